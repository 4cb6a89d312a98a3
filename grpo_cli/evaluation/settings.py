"""Declares the knobs of evaluations and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import above_0, at_least_0, at_least_1, knob, text


@dataclass
class Mode:
    """The form in which the problems of a benchmark are put to the model."""

    prompt: str | None = text(
        None, "Prompt template over the row's columns; null: the benchmark has no such mode."
    )
    tools: bool = knob(False, "Run the programs that a completion contains while it is sampled.")
    title: str | None = text(None, "Heading of the mode in tables; null: its name.")
    published: dict[str, float] = text(
        {}, "Published accuracies in percent by model, which tables show for comparison."
    )


IN_WORDS = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
MODES = {
    "cot": Mode(IN_WORDS, title="Chain-of-Thought Reasoning"),
    "tir": Mode(tools=True, title="Tool-Integrated Reasoning"),
}


@dataclass
class Benchmark:
    """A published set of problems: its rows, its prompts, and how an answer is judged."""

    title: str | None = text(None, "Column heading in tables; null: the benchmark's name.")
    column: int | None = at_least_1(
        None, "Rank among the columns of a table; null: after those that have one."
    )
    data: str = knob(
        "",
        "Rows: a hub name, a .json/.jsonl/.jsonl.gz/.csv/.parquet file, a pattern or a folder of "
        "such files, or pkg://package/file.",
        trusted="data",
    )
    subset: str | None = text(None, "Configuration of the hub data set.")
    split: str = text("test", "Split of a hub data set or a folder.")
    columns: dict[str, str] = text(
        {}, "Columns to rename before they are used, as new_name: old_name."
    )
    modes: dict[str, Mode] = knob(
        MODES,
        "Modes that eval.mode can name; each has prompt, tools, title and published. cot (in "
        "words) and tir (with programs that are run) are there, tir without a prompt.",
        trusted="modes",
    )
    system: str | None = text(None, "System prompt, for prompts that are chats.")
    chat: bool | None = knob(
        None, "Wrap the prompt in the tokenizer's chat template; null: if the tokenizer has one."
    )
    examples: list[Any] = text(
        [],
        "Worked examples for the prompt: mappings of the columns that the templates name, "
        "with `cot` or `tir`.",
    )
    shots: int = at_least_0(0, "Number of worked examples that precede the problem.")
    reward: str = knob(
        "math",
        "Reward function that gives 1 to a correct answer (see `grpo rewards`).",
        trusted="reward",
    )
    args: dict[str, Any] = knob({}, "Keyword arguments of the benchmark's reward function.")
    breakdown: list[str] = text([], "Columns by which the accuracy is also reported.")
    max_completion_tokens: int | None = at_least_1(
        None,
        "Length limit of a completion, unless eval.max_completion_tokens is set; null: "
        "generation.max_completion_tokens.",
    )
    stop: list[str] = text(
        [], "Texts that end a completion, such as the beginning of the next example."
    )

    @property
    def prompts(self) -> dict[str, str]:
        """The prompt template of each mode that has one."""
        return {name: mode.prompt for name, mode in self.modes.items() if mode.prompt is not None}

    def problems(self, key: str) -> Iterator[str]:
        """Yields messages about values that are missing or contradict one another.

        Args:
            key: the full key of this entry.
        """
        if not self.data:
            yield f"{key}.data: is missing; give a hub name or a file."
        if not all(isinstance(example, dict) for example in self.examples):
            yield (
                f"{key}.examples: must be mappings of columns, with the solution under the name of "
                "the mode."
            )
        elif self.shots > len(self.examples):
            yield (
                f"{key}.shots = {self.shots}: there are {len(self.examples)} examples; "
                f"add some to {key}.examples."
            )


@dataclass
class Eval:
    """Held-out evaluation, during training and by `grpo eval`."""

    every: int = at_least_0(0, "Evaluate every N steps; 0: never during training.", training=True)
    at_start: bool = knob(
        True,
        "Evaluate before the first step; after the last step a run always evaluates.",
        training=True,
    )
    accuracy: str | None = text(
        None,
        "Reward function whose value 1 counts as correct; null: the recipe's first reward of your "
        "own, or the first of all.",
        rows="own",
    )
    num_samples: int = at_least_1(1, "Completions per held-out row or problem.")
    sampling: str = knob(
        "own",
        "Sampling settings of evaluation: eval.temperature and eval.top_p (own), or temperature, "
        "top_p, top_k and min_p of generation (training).",
        choices=("own", "training"),
    )
    temperature: float | None = at_least_0(
        None,
        "Sampling temperature of evaluation; 0: greedy; null: 0 for one completion per row, "
        "0.7 for several.",
        read_if=("eval.sampling", "own"),
    )
    top_p: float = above_0(
        1.0,
        "Sample only from the most likely tokens that hold this share of the probability, in "
        "evaluation.",
        le=1,
    )
    max_completion_tokens: int | None = at_least_1(
        None, "Length limit of a completion in evaluation; null: generation.max_completion_tokens."
    )
    mode: list[str] = text(
        ["cot"],
        "Modes in which benchmarks are solved: in words (cot), or with programs that are run "
        "(tir).",
    )
    metric: list[str] = knob(
        [],
        "Metrics over several completions of a row: mean accuracy, pass@k, maj@k; empty: all.",
        choices=("mean", "pass", "maj"),
    )
    k: list[int] = at_least_1(
        [],
        "Values of k in pass@k and maj@k; empty: the powers of 2 up to eval.num_samples, and "
        "eval.num_samples.",
    )
    limit: int | None = at_least_1(None, "Use only the first N rows of every benchmark.")
    best: str = text(
        "accuracy",
        "Metric whose best value decides which checkpoint is kept as the best, as `eval/` "
        "names it, such as gsm8k/maj@8.",
        training=True,
    )
    patience: int = at_least_0(
        0, "End the run after this many evaluations in a row without a new best; 0: never.",
        read_if=("eval.every",), training=True,
    )  # fmt: skip

    @property
    def drawn_at(self) -> float:
        """The sampling temperature of evaluation, with its default resolved."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.num_samples == 1 else 0.7

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        for key, value in (("metric", self.metric), ("k", self.k)):
            if value and self.num_samples == 1:
                yield f"eval.{key} = {value}: is only read with eval.num_samples above 1."
        if too_large := [k for k in self.k if k > self.num_samples > 1]:
            yield (
                f"eval.k = {too_large[0]}: must be <= eval.num_samples = {self.num_samples}, the "
                "completions that there are."
            )
        if self.k and self.metric == ["mean"]:
            yield "eval.k: is only read with eval.metric = pass or maj; it is mean."
        if not self.mode:
            yield "eval.mode: is empty; give one or more, such as cot,tir."
