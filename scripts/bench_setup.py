"""Defines what both sides of the benchmark get: workloads, models, a tokenizer, prompts, a reward.

Nothing is downloaded. A token is a character, so a prompt of N tokens is a text of N characters,
except with the real chat model (`make real-model`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import real_model
import yaml

WARM_UP = 1  # steps at the beginning of each process that do not count
LORA_ALPHA = 32
FIRST_CHARACTER = 4  # ids below: pad, eos, and the two of a chat template

# Arguments of Qwen2Config. `eos` is how many words there are for one that ends a completion: with
# random weights all words are about as likely, so lengths are geometric with about that mean.
MODELS: dict[str, dict[str, int]] = {
    "1m": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "eos": 64,
    },
    "small": {
        "vocab_size": 128, "hidden_size": 384, "intermediate_size": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "eos": 128,
    },
    "110m": {
        "vocab_size": 12_000, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4, "eos": 128,
    },
    "0.5b": {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "eos": 128,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One setting that both sides are timed in."""

    name: str
    prompt_tokens: tuple[int, int]  # of the shortest and of the longest prompt
    limit: int  # longest completion, in tokens
    prompts: int = 8  # a step
    generations: int = 8  # completions of each
    min_tokens: int = 0  # shortest completion
    model: str = "small"
    questions: str = ""  # file of samples/ whose questions the real chat model is asked
    micro_batch: int = 0  # completions in one forward of TRL; 0: all at once
    lora_rank: int = 0  # of an adapter on all linear layers of the decoder; 0: all weights train
    steps: int = 3  # counted, in each round


WORKLOADS = {
    w.name: w
    for w in (
        Workload("tail", (30, 130), limit=512),
        Workload("prompts", (512, 512), limit=64, prompts=4, generations=16),
        Workload("short", (12, 12), limit=24, prompts=64, min_tokens=24),
        Workload("lora", (30, 130), limit=512, prompts=3, model="110m", lora_rank=16, steps=1),
        Workload("real", (0, 0), limit=64, prompts=16, micro_batch=8, steps=2,
                 questions="chat_sums_train.jsonl"),
        Workload("real-256", (0, 0), limit=256, prompts=16, micro_batch=8, steps=1,
                 questions="gsm8k_train.jsonl.gz"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Describes the work of one process of one side; handed over as a pickle."""

    side: str  # ours, trl or generate
    workload: Workload
    folder: str  # holds `model` and `prompts.jsonl`
    output: str  # folder for what the side writes by itself
    steps: int  # counted and not
    bf16: bool = False
    metered: bool = False  # looks at memory, which costs time

    @property
    def model(self) -> str:
        return str(Path(self.folder) / "model")

    def rows(self) -> list[dict[str, Any]]:
        """Returns the prompts in the order of the steps."""
        lines = (Path(self.folder) / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


def reward(completions: Sequence[Any], **ignored: Any) -> list[float]:
    """Returns 1.0 for three completions in ten, by a hash of their text or messages."""
    texts = (json.dumps(completion).encode() for completion in completions)
    digests = (hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return [float(int.from_bytes(digest, "little") / 2**64 < 0.3) for digest in digests]


def make_prompts(count: int, tokens: tuple[int, int], seed: int = 0) -> list[dict[str, Any]]:
    """Returns `count` rows whose `prompt` has as many characters as `tokens` allows.

    Args:
        tokens: of the shortest and of the longest prompt; lengths are uniform between them.
    """
    draws = random.Random(seed)
    rows = []
    for _ in range(count):
        length = draws.randint(*tokens)
        # No spaces: transformers loads a Qwen2's tokenizer by rules of its own, which drop them.
        text = "+".join(str(draws.randint(0, 99)) for _ in range(length))
        rows.append({"prompt": text[: length - 1] + "="})
    return rows


def make_folder(folder: Path, workload: Workload, steps: int) -> None:
    """Writes model, tokenizer and the prompts of `steps` steps."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True)
    count = steps * workload.prompts
    if workload.questions:
        (folder / "model").symlink_to(real_model.folder())
        rows = ask(workload.questions, count)
    else:
        rows = make_prompts(count, workload.prompt_tokens)
        make_tokenizer(MODELS[workload.model]["vocab_size"]).save_pretrained(folder / "model")
        make_model(workload.model).save_pretrained(folder / "model")
    lines = (json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def ask(sample: str, count: int) -> list[dict[str, Any]]:
    """Returns the first questions of a file of samples/, each as a conversation."""
    content = (resources.files("grpo_cli") / "samples" / sample).read_bytes()
    if sample.endswith(".gz"):
        content = gzip.decompress(content)
    questions = [json.loads(line)["question"] for line in content.splitlines()[:count]]
    return [{"prompt": [{"role": "user", "content": question}]} for question in questions]


def make_model(name: str) -> Any:
    """Returns a random Qwen2, the same each time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = dict(MODELS[name])
    # With a vocabulary of 151,936 words one end token would never be met: so there are many.
    eos = list(range(1, shape["vocab_size"], shape.pop("eos")))
    torch.manual_seed(0)
    ends = {"eos_token_id": eos if len(eos) > 1 else eos[0], "pad_token_id": 0}
    shape |= {"max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **ends))


def make_tokenizer(words: int) -> Any:
    """Returns a tokenizer with a token for each printable character.

    The rest of `words` are never encoded, only decoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    assert len(special) == FIRST_CHARACTER, "the first ids are the special ones"
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    known = special + characters
    known += [f"<{number}>" for number in range(len(known), words)]
    vocab = {word: i for i, word in enumerate(known)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def write_recipe(job: Job) -> Path:
    """Writes `recipe.yaml` for our side: `grpo train` with its defaults."""
    import torch

    w = job.workload
    recipe: dict[str, Any] = {
        "defaults": [
            "schema", {"adapter": "lora" if w.lora_rank else "none"},
            {"generation": "transformers"}, {"loss": "dapo"}, {"advantage": "group"},
            {"optimizer": "adamw"}, {"tracking": "none"}, "_self_",
        ],
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "steps": job.steps,
        "prompts_per_step": w.prompts,
        "mixed_precision": "bf16" if job.bf16 else "no",
        "model": {"path": job.model},
        "dataset": {"train": str(Path(job.folder) / "prompts.jsonl"), "shuffle": False},
        "reward": {"draw": {"function": "bench_setup:reward"}},
        "generation": {"num_generations": w.generations, "max_completion_tokens": w.limit},
        "optimizer": {"learning_rate": 1e-7},
        "checkpoint": {"every": 0},
        "log": {"report": False},
    }  # fmt: skip
    if w.questions:
        recipe["dataset"]["chat"] = True
    if w.min_tokens:
        recipe["generation"]["min_completion_tokens"] = w.min_tokens
    if w.lora_rank:
        recipe["adapter"] = {"rank": w.lora_rank, "alpha": LORA_ALPHA}
    path = Path(job.output) / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path
