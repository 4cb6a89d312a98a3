"""What an evaluation is made of: sets of problems, each put and judged in one way."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_cli import benchmarks
from grpo_cli.config import Recipe, Tools
from grpo_cli.prepare import Prepared
from grpo_cli.rollouts import Group, Prompt, derive_seed
from grpo_cli.sampling import Sampling
from grpo_cli.scoring import Scorer
from grpo_cli.tools import describe

STREAM = -1  # apart from the streams of training, which are numbered by position


@dataclass(frozen=True)
class Task:
    """Problems, how they are put to the model, and what counts as right."""

    name: str  # of the data, short
    mode: str | None  # cot or tir; None: the recipe's own held-out rows
    prompts: Sequence[Prompt]
    scorer: Scorer
    right: str  # the reward of which 1 counts as right
    sampling: Sampling
    num_samples: int
    seed: int
    key: str = ""  # in the names of metrics
    has_votes: bool = False  # whether equal answers can be counted
    breakdown: tuple[str, ...] = ()  # columns by which the accuracy is told besides
    tools: Tools | None = None
    cut: tuple[str, ...] = ()  # texts that end a completion and are no part of what is judged
    asks: tuple[str, ...] = ()  # of these, those that follow a problem, here the model's own
    given: Sequence[Group] | None = None  # completions that are there: nothing is sampled
    ends_known: bool = True  # whether it is known which completions were cut off
    data: str = ""  # says what the rows are, for those who compare

    @property
    def label(self) -> str:
        """The task in a word or two."""
        return f"{self.name} {self.mode}" if self.mode else self.name

    @property
    def descriptions(self) -> list[str]:
        """What is to be known of how completions are judged, and programs run."""
        own = list(self.scorer.descriptions)
        return own if self.tools is None else [*own, f"tools: {describe(self.tools)}"]


def sampling_of(recipe: Recipe, limit: int | None, stop: Sequence[str]) -> Sampling:
    """How completions are drawn for an evaluation.

    Args:
        limit: longest completion, unless eval.max_completion_tokens says; None: that of generation.
        stop: texts that end a completion, besides those of generation.
    """
    config, generation = recipe.eval, recipe.generation
    return Sampling(
        max_tokens=config.max_completion_tokens or limit or generation.max_completion_tokens,
        temperature=config.drawn_at,
        top_p=config.top_p,
        repetition_penalty=generation.repetition_penalty,
        min_tokens=generation.min_completion_tokens,
        stop=(*generation.stop, *stop),
    )


def held_out(
    recipe: Recipe, name: str, prompts: Sequence[Prompt], scorer: Scorer, data: str = ""
) -> Task:
    """The recipe's own held-out rows, judged by its own rewards."""
    right = recipe.eval.accuracy or next(iter(recipe.reward))
    return Task(
        name=name,
        mode=None,
        prompts=prompts,
        scorer=scorer,
        right=right,
        sampling=sampling_of(recipe, None, ()),
        num_samples=recipe.eval.num_samples,
        seed=derive_seed(recipe.seed, STREAM),
        has_votes=recipe.eval.num_samples > 1
        and benchmarks.has_votes(recipe.reward[right].function),
        data=data,
    )


def of_benchmarks(prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """A task for each benchmark of the recipe in each mode.

    Raises:
        UserError: a chat without a template.
    """
    recipe = prepared.recipe
    tasks = []
    for mode in recipe.eval.mode:
        for name, benchmark in recipe.benchmark.items():
            bench = prepared.benchmarks[name]
            tasks.append(
                Task(
                    name=name,
                    mode=mode,
                    prompts=benchmarks.make_prompts(name, benchmark, mode, bench.rows, tokenizer),
                    scorer=bench.scorer,
                    right=next(iter(bench.scorer.terms)),
                    sampling=sampling_of(recipe, benchmark.max_completion_tokens, benchmark.stop),
                    num_samples=recipe.eval.num_samples,
                    seed=derive_seed(recipe.seed, STREAM, _number(f"{name} {mode}")),
                    key=name if len(recipe.eval.mode) == 1 else f"{name}/{mode}",
                    has_votes=benchmarks.has_votes(benchmark.reward),
                    breakdown=tuple(benchmark.breakdown),
                    cut=tuple(benchmark.stop),
                    asks=benchmarks.asking(benchmark),
                    tools=recipe.generation.tools if mode == "tir" else None,
                    data=benchmarks.fingerprint(bench.rows),
                )
            )
    return tasks


def _number(text: str) -> int:
    """A number that stands for a text in seeds."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
