"""Makes the scorers of a recipe's data sets, and tries each reward on the first row."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grpo_cli.config.recipe import Recipe
from grpo_cli.data.prompts import prompt_texts
from grpo_cli.data.rows import DATASET, Rows, load_named, select_rows
from grpo_cli.data.sample import Sample
from grpo_cli.data.settings import Dataset
from grpo_cli.data.streaming import RowStream
from grpo_cli.errors import UserError, first_three
from grpo_cli.evaluation import benchmarks
from grpo_cli.evaluation.benchmarks import LoadedBenchmark
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.scoring.settings import Reward

MADE_UP = "The answer is 0."  # a completion to try rewards out on
MADE_UP_EPISODE = {  # the same as an episode
    "messages": [{"role": "assistant", "content": MADE_UP}],
    "turns": [{"start": 0, "end": 1, "by": "model", "reward": 0.0, "seconds": 0.0}],
    "stop_reason": "answered",
    "rewards": {},
    "metrics": {},
}


@dataclass(frozen=True)
class HeldOutRows:
    """One set of held-out rows."""

    rows: Rows
    dataset: Dataset  # how a row becomes a prompt
    scorer: Scorer
    accuracy: str | None = None  # reward whose value 1 counts as right; None: the recipe's


@dataclass(frozen=True)
class TrainRows:
    """A data set to train on."""

    rows: Rows
    dataset: Dataset  # how a row becomes a prompt
    weight: float = 1.0  # in a mixture
    stream: RowStream | None = None  # if the rows are only the first of a stream


def scorer_of_training(
    recipe: Recipe, train: dict[str, TrainRows], executor: RewardExecutor
) -> Scorer:
    """Returns the scorer of training, after trying the rewards on the first row of each data set.

    With dataset.bad_rows=drop it removes the rows that a reward refuses from `train`.

    Raises:
        UserError: as `make_scorer`; for a mixture it names the data set.
    """
    limit = recipe.generation.max_completion_tokens
    if "" in train:
        scorer = make_scorer(recipe, recipe.reward, train[""].rows, recipe.dataset, limit, executor)
        if train[""].stream is None:
            rows = scorable(scorer, train[""].rows, recipe.dataset)
            train[""] = dataclasses.replace(train[""], rows=rows)
        return scorer
    columns = {c: None for part in train.values() for c in [*part.rows.columns, DATASET]}
    for name, part in train.items():
        own = {reward: recipe.reward[reward] for reward in rewards_of(recipe, name)}
        rows = dataclasses.replace(part.rows, columns=[*part.rows.columns, DATASET])
        key, more = f"dataset.mixture.{name}.columns", {DATASET: name}
        scorer = make_scorer(recipe, own, rows, part.dataset, limit, executor, key, more)
        kept = scorable(scorer, part.rows, part.dataset)
        train[name] = dataclasses.replace(part, rows=kept)
    run = values_of_run(recipe, limit)
    return Scorer(recipe.reward, [*columns], "dataset.mixture", executor, run)


def held_out_of(
    recipe: Recipe, rows: Rows | None, executor: RewardExecutor
) -> dict[str, HeldOutRows]:
    """Returns the sets of held-out rows by name, unless benchmarks replace them.

    Args:
        rows: the held-out rows (`dataset.eval`, `dataset.test_split_size`); None: there are none.

    Raises:
        UserError: a set cannot be loaded, or does not fit its rewards.
    """
    if recipe.benchmark:
        return {}
    limit = recipe.eval.max_completion_tokens or recipe.generation.max_completion_tokens
    if rows is not None:
        scorer = make_scorer(recipe, recipe.reward, rows, recipe.dataset, limit, executor)
        return {"": HeldOutRows(scorable(scorer, rows, recipe.dataset), recipe.dataset, scorer)}
    found = {}
    for name, held in recipe.dataset.held_out.items():
        key = f"dataset.held_out.{name}"
        set_rows, dataset = load_named(held, recipe.dataset, key)
        wanted = held.rewards or rewards_of(recipe, name)
        own = {reward: config for reward, config in recipe.reward.items() if reward in wanted}
        scorer = make_scorer(recipe, own, set_rows, dataset, limit, executor, f"{key}.columns")
        set_rows = scorable(scorer, set_rows, dataset)
        found[name] = HeldOutRows(set_rows, dataset, scorer, held.accuracy)
    return found


def benches_of(recipe: Recipe, executor: RewardExecutor) -> dict[str, LoadedBenchmark]:
    """Loads the recipe's benchmarks, by name.

    Raises:
        UserError: the data, a reward, or the sandbox for programs is missing.
    """
    if recipe.runs_programs:
        from grpo_cli.environments import program_calls

        program_calls.describe(recipe.generation.tools)
    benches = {}
    for name, benchmark in recipe.benchmark.items():
        rows = benchmarks.load(name, benchmark, recipe.eval.limit)
        rewards = benchmarks.rewards(benchmark)
        limit = recipe.eval.max_completion_tokens or benchmark.max_completion_tokens
        run = values_of_run(recipe, limit or recipe.generation.max_completion_tokens)
        renaming = f"benchmark.{name}.columns"
        scorer = Scorer(rewards, rows.columns, rows.source, executor, run, renaming)

        def sample(rows: Rows = rows, chat: bool = benchmark.chat) -> Sample:
            asked, most = [{"role": "user", "content": ""}], recipe.dataset.max_pixels
            found = Sample.of_row(rows, 0, asked, MADE_UP, (0,), most)
            return dataclasses.replace(found, row=0, prompt=asked if chat else "")

        try_out(scorer, sample)
        benches[name] = LoadedBenchmark(scorable(scorer, rows, recipe.dataset), scorer)
    return benches


def make_scorer(
    recipe: Recipe,
    rewards: Mapping[str, Reward],
    rows: Rows,
    dataset: Dataset,
    limit: int,
    executor: RewardExecutor,
    renaming: str = "dataset.columns",
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Scorer:
    """Returns the scorer of these rows, after trying each reward on the first row.

    Args:
        dataset: how a row becomes a prompt.
        limit: longest completion, in tokens.
        renaming: the key that renames a column, for messages.
        more: further columns of each row.

    Raises:
        UserError: a function does not exist, does not fit the data, or fails on the first row.
    """
    run = values_of_run(recipe, limit)
    scorer = Scorer(rewards, rows.columns, rows.source, executor, run, renaming)
    try_out(scorer, lambda: first_sample(recipe, rows, dataset, more))
    return scorer


def values_of_run(recipe: Recipe, limit: int) -> dict[str, Any]:
    """Returns the values of a run that rewards may take as keyword-only arguments.

    Args:
        limit: longest completion, in tokens.
    """
    return {
        "max_completion_tokens": limit,
        "device": recipe.device,
        "episode_credit": recipe.episode.credit,
    }


def rewards_of(recipe: Recipe, name: str) -> list[str]:
    """Returns the rewards that apply to a data set; all of them if the mixture lacks it."""
    return [
        reward
        for reward, config in recipe.reward.items()
        if name not in recipe.dataset.mixture or name in (config.datasets or [name])
    ]


def try_out(scorer: Scorer, sample: Callable[[], Sample | None]) -> None:
    """Tries each reward on a sample, once a node; ends the scorer's processes if one fails."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            if (found := sample()) is not None:
                scorer.try_out(found)
        except BaseException:
            scorer.executor.close()
            raise


def scorable(scorer: Scorer, rows: Rows, dataset: Dataset) -> Rows:
    """Returns the rows that no reward refuses.

    Raises:
        UserError: a reward refuses rows and dataset.bad_rows=stop, or no row is left.
    """
    refused = scorer.refused(rows)
    if not refused:
        return rows
    few = first_three([f"row {rows.line(n)}: {why.rstrip('.')}" for n, why in refused.items()])
    said = f"{rows.source}: {len(refused):,} of {len(rows.rows):,} rows cannot be scored. {few}."
    if dataset.bad_rows == "stop":
        raise UserError(f"{said} dataset.bad_rows=drop leaves such rows out.")
    kept = [number for number in range(len(rows.rows)) if number not in refused]
    if not kept:
        raise UserError(f"{said} No row is left.")
    return select_rows(rows, kept)


def first_sample(
    recipe: Recipe, rows: Rows, dataset: Dataset, more: Mapping[str, Any]
) -> Sample | None:
    """Returns the first row as rewards receive it; with bad_rows=drop, the first readable row.

    Returns:
        None if no row is left.

    Raises:
        UserError: the first row cannot be read, and dataset.bad_rows=stop.
    """
    episode = MADE_UP_EPISODE if recipe.has_episodes else None
    texts = prompt_texts(rows, dataset)
    for number, prompt in enumerate(texts):
        sample = Sample.of_row(rows, number, prompt, MADE_UP, (0,), dataset.max_pixels)
        if (why := sample.unreadable) is None:
            columns = {**sample.columns, **more}
            return dataclasses.replace(sample, columns=columns, episode=episode)
        if dataset.bad_rows == "stop":
            raise UserError(f"{why}. dataset.bad_rows=drop leaves such rows out.")
    return None
