"""Measures what drafts gain where completions repeat one another, and cost where they do not.

    python scripts/bench_drafts.py [RUN ...] [--pairs 15] [--prompts 1] [--rows 4]

Samples with the newest checkpoint of each run of `grpo train`, from prompts of its stored
completions; without a run, with random weights. With drafts of the group only, with drafts of the
last epoch as well (completions that the same policy has drawn before), and without drafts, in turn.
Times are seconds of the processor with one thread; a ratio above 1 says that drafts are quicker.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import datasets
import torch
from bench import machine
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_cli.checkpoints.lookup import find_model
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.embedded.speculation.drafter import Speculation
from grpo_cli.generation.embedded.speculation.kept_completions import KeptCompletions
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models import loading
from grpo_cli.records import Completion, Prompt

WORDS, ENDING = 16_000, 123  # of the random model: all, and those that end a completion
KINDS = ("none", "group", "epoch")  # drafts: none, of the group, and of the last epoch too
LEAST = 8  # pairs that quartiles are worth printing of


class Side:
    """Samples the same completions with or without drafts, and keeps what that has taken."""

    def __init__(self, model: PreTrainedModel, eos_ids: Sequence[int], drafts: int) -> None:
        """Makes the generator.

        Args:
            drafts: tokens that are drafted for a row at most; 0: none.
        """
        self.speculation = Speculation(drafts) if drafts else None
        self.generator = TransformersGenerator(model, eos_ids, speculation=self.speculation)
        self.seconds: list[float] = []

    def sample(
        self, prompts: list[Prompt], rows: int, tokens: int, seed: int
    ) -> list[list[Completion]]:
        """Returns a group of completions for each prompt."""
        seeds = [seed * len(prompts) + n for n in range(len(prompts))]
        start = time.process_time()
        groups = self.generator.generate(prompts, rows, Sampling(max_tokens=tokens), seeds)
        self.seconds.append(time.process_time() - start)
        return groups


def compare(
    model: PreTrainedModel,
    eos_ids: Sequence[int],
    prompts: Sequence[Prompt],
    given: argparse.Namespace,
) -> str:
    """Returns the cells of a row: ratios of the times, and how often drafts were right."""
    sides = {kind: Side(model, eos_ids, given.drafts * (kind != "none")) for kind in KINDS}
    warm_up = [*itertools.islice(itertools.cycle(prompts), given.prompts)]
    for side in sides.values():  # chooses the decoder
        side.sample(warm_up, given.rows, given.tokens, 0)
        side.seconds.clear()
        if side.speculation is not None:
            side.speculation.take_counts()
    equal = 0
    for pair in range(given.pairs):
        first = pair * given.prompts
        chosen = [*itertools.islice(itertools.cycle(prompts), first, first + given.prompts)]
        last = sides["none"].sample(chosen, given.rows, given.tokens, 1_000_000 + pair)
        sides["none"].seconds.pop()
        kept = KeptCompletions()
        for prompt, group in zip(chosen, last, strict=True):
            kept.keep(prompt.ids, [c.ids for c in group])
        epoch = sides["epoch"].speculation
        assert epoch is not None
        epoch.kept = kept
        order = [*sides] if pair % 2 else [*sides][::-1]
        found = {
            kind: sides[kind].sample(chosen, given.rows, given.tokens, pair + 1) for kind in order
        }
        ids = {kind: [c.ids for group in groups for c in group] for kind, groups in found.items()}
        equal += ids["none"] == ids["group"] == ids["epoch"]
    cells = []
    for kind in ("group", "epoch"):
        pairs = zip(sides["none"].seconds, sides[kind].seconds, strict=True)
        cells += [ratio([plain / drafted for plain, drafted in pairs]), counts(sides[kind])]
    return " | ".join([*cells, f"{equal} of {given.pairs}"])


def ratio(values: Sequence[float]) -> str:
    """Returns the median with its quartiles, such as "1.79x (1.60..1.95)"."""
    if len(values) < LEAST:
        return f"{statistics.median(values):.2f}x"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f}x ({low:.2f}..{high:.2f})"


def counts(side: Side) -> str:
    """Returns tokens per step of a row with drafts, and the share of drafted tokens accepted."""
    assert side.speculation is not None
    found = side.speculation.counts
    if not found["drafted"]:
        return "none begun"
    share = found["accepted"] / found["drafted"]
    return f"{found['drawn'] / found['steps']:.1f} tokens a step, {share:.2f} right"


def random_model() -> tuple[PreTrainedModel, list[int], list[Prompt]]:
    """Returns a model whose completions have 130 tokens on average, its eos ids, and prompts."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    draws = random.Random(0)
    prompts = [Prompt.from_ids(draws.choices(range(WORDS), k=40)) for _ in range(64)]
    return Qwen2ForCausalLM(config).eval(), [*range(ENDING)], prompts


def trained_model(run: Path) -> tuple[PreTrainedModel, list[int], list[Prompt]]:
    """Returns the newest model of a run, its eos ids, and prompts of its stored completions."""
    folder = find_model(str(run))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = sorted(map(str, (run / "completions").glob("*.parquet")))
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("parquet", data_files=files[-1:], split="train")["prompt_ids"]
    prompts = [Prompt.from_ids(list(ids)) for ids in dict.fromkeys(map(tuple, rows))]
    return model, loading.eos_ids(model.generation_config, tokenizer), prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs; none: random weights")
    parser.add_argument("--pairs", type=int, default=15, help="times that the sides take turns")
    parser.add_argument("--prompts", type=int, default=1, help="prompts sampled together")
    parser.add_argument("--rows", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="longest completion")
    parser.add_argument("--drafts", type=int, default=8, help="tokens drafted for a row at most")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), flush=True)
    header = ["model", "drafts of the group", "", "and of the last epoch", "", "equal completions"]
    print(f"| {' | '.join(header)} |\n{'| --- ' * len(header)}|")
    for run in given.runs or [None]:
        model, eos_ids, prompts = random_model() if run is None else trained_model(run)
        cells = compare(model, eos_ids, prompts, given)
        print(f"| {'random' if run is None else run.name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
