"""Defines the tasks of an evaluation: problems with a prompt, a scorer and sampling settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_cli.config.recipe import Recipe
from grpo_cli.environments.program_calls import describe
from grpo_cli.evaluation import benchmarks
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.settings import Tools
from grpo_cli.models.vision import VisionProcessor
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Group, Prompt
from grpo_cli.rewards import has_votes
from grpo_cli.scoring.scorer import Scorer

STREAM = -1  # random stream of evaluation; training's are numbered from 0 by prompt index


@dataclass(frozen=True)
class Task:
    """Problems, with the form of their prompts and the criterion for right answers."""

    name: str  # short name of the data
    mode: str | None  # key of benchmark.NAME.modes; None: held-out rows of the recipe
    prompts: Sequence[Prompt]
    scorer: Scorer
    right: str  # name of the reward whose value 1 counts as right
    sampling: Sampling
    num_samples: int
    seed: int
    key: str = ""  # part of the metrics' names
    tools: Tools | None = None
    benchmark: Benchmark | None = None  # None: held-out rows of the recipe

    @property
    def label(self) -> str:
        """Returns the task's name in messages: benchmark and mode."""
        return f"{self.name} {self.mode}" if self.mode else self.name

    @property
    def has_votes(self) -> bool:
        """Whether final answers are extracted, so that equal ones can be counted."""
        is_read = self.benchmark is not None or self.num_samples > 1
        return is_read and has_votes(self.scorer.rewards[self.right].path)

    @property
    def descriptions(self) -> list[str]:
        """The lines that describe how completions are judged and programs are run."""
        own = list(self.scorer.descriptions)
        return own if self.tools is None else [*own, f"tools: {describe(self.tools)}"]


@dataclass(frozen=True)
class TaskResult:
    """The numbers of one task."""

    task: Task
    # accuracy, accuracy_low, accuracy_high, mean@8, level/3/accuracy ...: the same on every process
    metrics: dict[str, float]
    groups: list[Group]  # all groups in data order; on the main process, if requested

    @property
    def problems(self) -> int:
        return int(self.metrics["n"])


def sampling_of(recipe: Recipe, limit: int | None, stop: Sequence[str]) -> Sampling:
    """Returns the sampling settings of an evaluation.

    Args:
        limit: longest completion in tokens, unless eval.max_completion_tokens is set; None:
            generation's limit.
        stop: strings that end a completion, in addition to generation.stop.
    """
    config, generation = recipe.eval, recipe.generation
    as_in_training = config.sampling == "training"
    return Sampling.of(
        generation,
        max_tokens=config.max_completion_tokens or limit or generation.max_completion_tokens,
        temperature=recipe.evaluation_temperature,
        top_p=generation.top_p if as_in_training else config.top_p,
        top_k=generation.top_k if as_in_training else 0,
        min_p=generation.min_p if as_in_training else 0.0,
        stop=(*generation.stop, *stop),
    )


def held_out(
    recipe: Recipe,
    name: str,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    accuracy: str | None = None,
    *,
    is_one_of_several: bool = False,
) -> Task:
    """Builds the task of held-out rows, judged by the recipe's own rewards.

    Args:
        scorer: scorer of all or some of the recipe's rewards.
        accuracy: the reward whose value 1 counts as right; None: `Recipe.accuracies` says.
        is_one_of_several: puts the set's name into the names of its metrics.
    """
    wanted = (accuracy, *recipe.accuracies)
    right = next(reward for reward in wanted if reward in scorer.rewards)
    return Task(
        name=name,
        mode=None,
        prompts=prompts,
        scorer=scorer,
        right=right,
        sampling=sampling_of(recipe, None, ()),
        num_samples=recipe.eval.num_samples,
        seed=derive_seed(recipe.seed, STREAM, *([_number(name)] if is_one_of_several else [])),
        key=name if is_one_of_several else "",
    )


def of_benchmarks(
    recipe: Recipe,
    loaded: Mapping[str, benchmarks.LoadedBenchmark],
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None = None,
) -> list[Task]:
    """Builds a task for each benchmark of the recipe in each mode.

    Raises:
        UserError: a chat without a template.
    """
    tasks, template_kwargs = [], recipe.model.chat_template_kwargs
    for mode in recipe.eval.mode:
        for name, benchmark in recipe.benchmark.items():
            bench = loaded[name]
            tasks.append(
                Task(
                    name=name,
                    mode=mode,
                    prompts=benchmarks.make_prompts(
                        name,
                        benchmark,
                        mode,
                        bench.rows,
                        tokenizer,
                        template_kwargs,
                        vision,
                        recipe.dataset.max_pixels,
                    ),
                    scorer=bench.scorer,
                    right=next(iter(bench.scorer.rewards)),
                    sampling=sampling_of(recipe, benchmark.max_completion_tokens, benchmark.stop),
                    num_samples=recipe.eval.num_samples,
                    seed=derive_seed(recipe.seed, STREAM, _number(f"{name} {mode}")),
                    key=name if len(recipe.eval.mode) == 1 else f"{name}/{mode}",
                    tools=recipe.generation.tools if benchmark.modes[mode].tools else None,
                    benchmark=benchmark,
                )
            )
    return tasks


def _number(text: str) -> int:
    """Returns a number that identifies a text in seeds."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
