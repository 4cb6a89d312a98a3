"""Builds the sessions and the episode loop from a recipe's tools and environment."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from grpo_cli import data
from grpo_cli.config import parsing
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.user_code import import_function, is_coroutine_function
from grpo_cli.data.settings import Dataset
from grpo_cli.environments.sessions import Sessions
from grpo_cli.environments.settings import NAME_COLUMN
from grpo_cli.errors import UserError, listed, nearest

if TYPE_CHECKING:
    from grpo_cli.data.prompts import ToolsOf
    from grpo_cli.environments.rollouter import Rollouter
    from grpo_cli.models.loading import LoadedModel


def open_sessions(recipe: Recipe, parts: Iterable[tuple[data.Rows, Dataset]]) -> Sessions | None:
    """Returns the `Sessions` of the recipe after a trial of each environment; None without any.

    Args:
        parts: data rows with their `dataset` section; the first row of each environment is used
            for the trial.

    Raises:
        UserError: a tool or an environment cannot be used, or a row names an unknown environment.
    """
    environment = recipe.environment
    if recipe.rollout is not None:
        function = rollout_function(recipe)
        if not is_coroutine_function(function):
            check_trl_rollout(recipe, function)
            return None
        if not recipe.dataset.chat:
            raise UserError(
                f"rollout = {recipe.rollout}: leads a conversation; set dataset.chat=true."
            )
        environment = dataclasses.replace(environment, path=recipe.rollout)
    elif not recipe.has_environment:
        return None
    sessions = Sessions(environment, recipe.tools, recipe.scoring.worker_memory_gb)
    try:
        for name, row in first_rows(sessions, parts).items():
            sessions.try_out(name, row)
    except BaseException:
        sessions.close()
        raise
    return sessions


def first_rows(
    sessions: Sessions, parts: Iterable[tuple[data.Rows, Dataset]]
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
            prompt = data.prompt_text(row, dataset, line)
            firsts[name] = {**data.other_columns(row), "prompt": prompt}
    return firsts


def rollout_function(recipe: Recipe) -> Callable[..., Any]:
    """Imports the function that `rollout` names.

    Raises:
        UserError: the function does not exist.
    """
    path = str(recipe.rollout)
    if ":" not in path:
        raise UserError(f"rollout = {path}: is no function; give it as my_module:my_function.")
    return import_function(path, f"rollout = {path}")


def check_trl_rollout(recipe: Recipe, function: Callable[..., Any]) -> None:
    """Raises a UserError if a TRL rollout function cannot be used with the recipe."""
    key = f"rollout = {recipe.rollout}"
    if inspect.isclass(function):
        raise UserError(
            f"{key}: is a class; give a function of (prompts, trainer), or an object that is "
            "called like one."
        )
    try:
        inspect.signature(function).bind([], None)
    except TypeError:
        raise UserError(
            f"{key}: must take (prompts, trainer), or be a coroutine function (async def) that "
            "takes a conversation."
        ) from None
    if recipe.tools:
        raise UserError(
            f"{key} together with tools: only a coroutine function (async def) calls the recipe's "
            "tools; remove one of them."
        )
    when = f"with a coroutine function (async def), and {key} is none"
    for problem in parsing.unread_of_episodes(recipe, (), when):
        raise UserError(problem)
    sharded = recipe.distributed.strategy == "fsdp2"
    if sharded and recipe.generation.engine == "transformers":
        raise UserError(
            f"{key} with distributed = {recipe.distributed.strategy}: the engine transformers "
            "samples on all processes together, and the function does not; use vLLM "
            "(generation=vllm_colocate), or a coroutine function."
        )


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


def make_rollouter(
    recipe: Recipe,
    sessions: Sessions | None,
    loaded: LoadedModel,
    max_prompt_tokens: int | None,
    say: Callable[[str], None],
) -> Rollouter:
    """Makes the `Rollouter` of the recipe's own prompts.

    Args:
        max_prompt_tokens: length limit of a prompt with its first observation; None: no limit.
        say: prints a line for the user.

    Raises:
        UserError: the chat template does not support conversations with these tools.
    """
    from grpo_cli.environments.chat import Chat
    from grpo_cli.environments.chat_template import ChatTemplate
    from grpo_cli.environments.loop import EpisodeLoop
    from grpo_cli.environments.rollouter import Rollouter
    from grpo_cli.environments.trl_rollouts import TrlRollouts
    from grpo_cli.models import loading

    if sessions is None and recipe.rollout is None:
        return Rollouter()
    tokenizer, kwargs = loaded.tokenizer, recipe.model.chat_template_kwargs
    of_model = loading.eos_ids(loaded.model.generation_config, tokenizer)
    eos_ids = {*of_model, *recipe.generation.stop_token_ids}
    if sessions is None:
        path, function = str(recipe.rollout), rollout_function(recipe)
        return TrlRollouts(path, function, tokenizer, eos_ids, kwargs, max_prompt_tokens)

    dialogues = {}
    replies = None if sessions.spec.has_state else ("tool",)
    for name in sessions.spec.names:
        schemas = sessions.schemas(name)
        template = ChatTemplate(tokenizer, eos_ids, schemas, kwargs, loaded.vision)
        chat = Chat(template, recipe.model.response_template)
        chat.check(replies)
        dialogues[name] = chat
        tools = ", ".join(schema["function"]["name"] for schema in schemas)
        say(f"environment {name or 'of all rows'}: {f'tools {tools}' if tools else 'no tools'}")
    share = recipe.environment.max_failed_share
    return EpisodeLoop(sessions, dialogues, recipe.episode, max_prompt_tokens, share, say)
