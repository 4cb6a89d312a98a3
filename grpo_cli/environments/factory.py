"""Finds a recipe's kind of rollout, and opens the sessions of its tools and environment."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from grpo_cli.config import parsing
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.user_code import import_function, is_coroutine_function
from grpo_cli.data.prompts import other_columns, prompt_text
from grpo_cli.data.rows import Rows
from grpo_cli.data.settings import Dataset
from grpo_cli.environments.sessions import Sessions
from grpo_cli.environments.settings import NAME_COLUMN
from grpo_cli.errors import UserError, listed, nearest

if TYPE_CHECKING:
    from grpo_cli.data.prompts import ToolsOf
    from grpo_cli.environments.rollouter import Rollouter


def open_sessions(recipe: Recipe, parts: Iterable[tuple[Rows, Dataset]]) -> Sessions | None:
    """Returns the `Sessions` of the recipe after a trial of each environment; None without any.

    Args:
        parts: data rows with their `dataset` section; the first row of each environment is used
            for the trial.

    Raises:
        UserError: a tool or an environment cannot be used, or a row names an unknown environment.
    """
    kind, environment = kind_of(recipe), recipe.environment
    kind.check(recipe)
    key = f"rollout = {recipe.rollout}"
    if recipe.rollout is not None and not kind.has_environments:
        if recipe.tools:
            raise UserError(
                f"{key} together with tools: only a coroutine function (async def) calls the "
                "recipe's tools; remove one of them."
            )
        when = f"with a coroutine function (async def), and {key} is none"
        for problem in parsing.unread_of_episodes(recipe, (), when):
            raise UserError(problem)
    if not kind.has_environments:
        return None
    if recipe.rollout is not None:
        environment = dataclasses.replace(environment, path=recipe.rollout)
    sessions = Sessions(environment, recipe.tools, recipe.scoring.worker_memory_gb)
    try:
        for name, row in first_rows(sessions, parts).items():
            sessions.try_out(name, row)
    except BaseException:
        sessions.close()
        raise
    return sessions


def first_rows(
    sessions: Sessions, parts: Iterable[tuple[Rows, Dataset]]
) -> dict[str, dict[str, Any]]:
    """Returns the first row of each environment with its prompt, as `reset` gets it.

    Raises:
        UserError: a row names an unknown environment, or has no prompt.
    """
    firsts: dict[str, dict[str, Any]] = {}
    is_only_one = sessions.spec.names == [""]
    for rows, dataset in parts:
        for number, value in enumerate([""] if is_only_one else rows.column(NAME_COLUMN)):
            if str(value) in firsts:
                continue
            line, row = rows.line(number), rows.rows[number]
            name = known_name(row, sessions, f"{rows.source}, row {line}: ")
            prompt = prompt_text(row, dataset, line)
            firsts[name] = {**other_columns(row), "prompt": prompt}
    return firsts


def kind_of(recipe: Recipe) -> type[Rollouter]:
    """Returns the class that makes the recipe's rollouts; `rollout` can name one of your own.

    Raises:
        UserError: `rollout` names no function and no such class.
    """
    from grpo_cli.environments.loop import EpisodeLoop
    from grpo_cli.environments.rollouter import Rollouter
    from grpo_cli.environments.trl_rollouts import TrlRollouts

    if recipe.rollout is None:
        return EpisodeLoop if recipe.has_environment else Rollouter
    found = import_function(recipe.rollout, f"rollout = {recipe.rollout}")
    if inspect.isclass(found) and issubclass(found, Rollouter):
        return found
    return EpisodeLoop if is_coroutine_function(found) else TrlRollouts


def tools_of(sessions: Sessions | None) -> ToolsOf | None:
    """Returns the function that maps a row to the tool schemas of its prompt; None: no tools."""
    if sessions is None:
        return None
    schemas = {name: sessions.schemas(name) for name in sessions.spec.names}
    return lambda row: schemas[known_name(row, sessions)]  # rows of a stream come later


def known_name(row: Mapping[str, Any], sessions: Sessions, where: str = "") -> str:
    """Returns the name of a row's environment; "" if there is only one.

    Raises:
        UserError: no environment has this name.
    """
    known = sessions.spec.names
    name = "" if known == [""] else str(row.get(NAME_COLUMN))
    if name not in known:
        raise UserError(
            f"{where}the column {NAME_COLUMN!r} names no environment: "
            f"{row.get(NAME_COLUMN)!r}; environment.by_name has {listed(known)}."
            f"{nearest(name, known)}"
        )
    return name
