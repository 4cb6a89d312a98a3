"""Loads the model and the prompts of a prepared recipe, for a run, `grpo eval` and `grpo probe`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from grpo_cli.config import sources
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.conversations import Schemas
from grpo_cli.data.prompts import (
    MixtureStream,
    PromptStream,
    images_of,
    make_prompts,
    mixed,
    solution_pairs,
)
from grpo_cli.data.rows import Rows
from grpo_cli.data.settings import Dataset
from grpo_cli.data.streaming import StreamedPrompts
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments import factory as environments
from grpo_cli.environments.chat import Chat
from grpo_cli.environments.chat_template import ChatTemplate
from grpo_cli.environments.rollouter import Rollouter, RolloutSetup
from grpo_cli.environments.sessions import Sessions
from grpo_cli.environments.settings import NAME_COLUMN
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.evaluation import tasks
from grpo_cli.images import ImageError, unreadable
from grpo_cli.models import loading, tiny
from grpo_cli.models.loading import LoadedModel, load_model
from grpo_cli.records import Prompt
from grpo_cli.reporting.progress import Bar
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.training.prepare import Prepared
from grpo_cli.training.scorers import TrainRows


def load_policy(prepared: Prepared, workers: Workers, reporter: Reporter) -> LoadedModel:
    """Loads the recipe's model; a model that the recipe builds is built first."""
    recipe, path = prepared.recipe, prepared.recipe.model.path
    if recipe.model.build is not None:
        with workers.main_first():  # the others find the main process's model
            path = str(build_model(recipe, prepared.train, prepared.sessions, reporter.console))
    assert path is not None, "checked when the recipe was parsed"
    return load_model(path, recipe, workers, reporter.say, trains=bool(prepared.train))


def build_model(
    recipe: Recipe, train: Mapping[str, TrainRows], sessions: Sessions | None, console: Console
) -> Path:
    """Builds the recipe's model unless it is in the cache, and returns its folder.

    Args:
        train: data sets whose solutions the model is warmed up with.
        sessions: the sessions of the recipe's environments, whose tools the prompts list.
    """
    build = recipe.model.build
    assert build is not None
    tools: dict[str, Schemas] = {"": ()}
    if sessions is not None:
        tools = {name: sessions.schemas(name) for name in sessions.spec.names}
    by_name = sessions is not None and sessions.spec.by_name
    pairs: list[tiny.Pair] = []
    for part in train.values() if build.warmup_steps else ():
        own = list(solution_pairs(part.rows, part.dataset))
        texts, reads = [prompt for prompt, _ in own], build.vision_layers > 0
        rows = images_of(part.rows, texts, part.dataset.max_pixels, reads_images=reads)
        names = part.rows.column(NAME_COLUMN) if by_name else [""] * len(own)
        for (_, solution), row, name in zip(own, rows, names, strict=True):
            pairs.append(tiny.Pair(row.prompt, solution, tools[str(name)], row.images))
    bar = Bar(console, "warm-up", build.warmup_steps)
    path = tiny.build(
        build,
        pairs,
        recipe.seed,
        lambda step, loss: bar.update(step, f"supervised loss {loss:.3f}"),
        lambda tokenizer, tools: (
            Chat(ChatTemplate(tokenizer, [tokenizer.eos_token_id], tools)).episode_ids
        ),
    )
    bar.close()
    return path


def make_stream(
    prepared: Prepared, loaded: LoadedModel, say: Callable[[str], None]
) -> PromptStream:
    """Returns the stream of prompts that the run trains on."""
    recipe, parts = prepared.recipe, prepared.train
    seed, dataset = recipe.seed, recipe.dataset
    say_once = functools.cache(say)  # every epoch reads each image again
    is_sound = sound_images(say_once if dataset.bad_rows == "drop" else None)
    if parts.keys() == {""} and (stream := parts[""].stream) is not None:

        def of_block(rows: Rows, may_be_empty: bool) -> list[Prompt]:
            make = partial(prompts_of, rows, dataset, prepared, loaded, say_once)
            return make(may_be_empty=may_be_empty)[0]

        streamed = StreamedPrompts(stream, of_block, seed, dataset.shuffle)
        streamed.is_sound, streamed.has_images = is_sound, loaded.vision is not None
        return streamed

    def prompts(name: str) -> list[Prompt]:
        part = parts[name]
        found, overlong = prompts_of(part.rows, part.dataset, prepared, loaded, say)
        if overlong:
            key = f"dataset.mixture.{name}" if name else "dataset.train"
            say(
                f"{key}: {overlong:,} of {len(part.rows.rows):,} prompts longer than "
                f"dataset.max_prompt_tokens = {dataset.max_prompt_tokens}: dropped"
            )
        return found

    if "" in parts:
        return PromptStream(prompts(""), seed, dataset.shuffle, is_sound)
    every = mixed({name: (part.rows, prompts(name)) for name, part in parts.items()})
    weights = {name: part.weight for name, part in parts.items()}
    return MixtureStream(every, weights, seed, dataset.shuffle, is_sound)


def sound_images(say: Callable[[str], None] | None) -> Callable[[Prompt], bool]:
    """Returns a function that checks whether a prompt's images can be read, and caches them.

    Args:
        say: prints a line for a prompt with unreadable images; None: raise a TrainingError.
    """

    def is_sound(prompt: Prompt) -> bool:
        try:
            if prompt.vision is not None:
                prompt.vision.inputs(prompt.images)
        except ImageError as error:
            if say is None:
                raise TrainingError(
                    f"{error}. dataset.bad_rows=drop leaves such rows out; resume=auto continues."
                ) from error
            say(f"note: {error}; another prompt takes its place")
            return False
        return True

    return is_sound


def prompts_of(
    rows: Rows,
    dataset: Dataset,
    prepared: Prepared,
    loaded: LoadedModel,
    say: Callable[[str], None],
    *,
    held_out: bool = False,
    may_be_empty: bool = False,
) -> tuple[list[Prompt], int]:
    """Returns the prompts of data rows, and the number of over-long ones, which are left out.

    Args:
        say: prints a line for each row that is dropped because of its images.
        held_out: whether the rows are for evaluation, which drops no long prompts.
        may_be_empty: whether no prompt at all is no error.
    """
    stops = dataset.bad_rows == "stop"
    return make_prompts(
        rows,
        dataset,
        loaded.tokenizer,
        held_out=held_out,
        template_kwargs=prepared.recipe.model.chat_template_kwargs,
        may_be_empty=may_be_empty,
        tools=environments.tools_of(prepared.sessions),
        vision=loaded.vision,
        on_bad_image=None if stops else lambda why: say(f"note: {why}; the row is dropped"),
    )


def make_tasks(
    prepared: Prepared, loaded: LoadedModel, say: Callable[[str], None]
) -> list[tasks.Task]:
    """Returns the recipe's benchmarks, or its held-out rows, as tasks.

    Raises:
        UserError: an image cannot be decoded, and dataset.bad_rows=stop.
    """
    recipe = prepared.recipe
    if recipe.benchmark:
        return tasks.of_benchmarks(recipe, prepared.benchmarks, loaded.tokenizer, loaded.vision)
    found = []
    for name, held in prepared.held_out.items():
        prompts, _ = prompts_of(held.rows, held.dataset, prepared, loaded, say, held_out=True)
        readable = []
        for prompt in prompts:
            if (why := unreadable(prompt.images)) is None:
                readable.append(prompt)
            elif held.dataset.bad_rows == "stop":
                raise UserError(f"{why} (dataset.bad_rows=drop drops the row).")
            else:
                say(f"note: {why}; the row is dropped")
        label = name or sources.short_name(recipe.dataset.eval or recipe.dataset.train or "")
        found.append(
            tasks.held_out(
                recipe, label, readable, held.scorer, held.accuracy, is_one_of_several=bool(name)
            )
        )
    return found


def make_rollouter(
    prepared: Prepared, loaded: LoadedModel, say: Callable[[str], None]
) -> Rollouter:
    """Makes the `Rollouter` of the recipe's own prompts."""
    most = prepared.recipe.dataset.max_prompt_tokens if prepared.train else None
    setup = RolloutSetup(prepared.recipe, prepared.sessions, loaded, most, say)
    return environments.kind_of(prepared.recipe).make(setup)


def longest_unknown(recipe: Recipe, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns a prompt of the largest length if some of the run's prompts are not known yet.

    Such prompts come from a stream, or have an environment's first observation.
    """
    if not (recipe.dataset.streaming or recipe.has_episodes):
        return []
    return [Prompt.from_ids(prompts[0].ids[:1] * recipe.dataset.max_prompt_tokens)]


def check_fits(
    recipe: Recipe,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt] = (),
) -> None:
    """Checks the loaded model's embeddings for all prompts, and its context for training prompts.

    Raises:
        UserError: a token has no embedding, or a prompt leaves too little of the context.
    """
    if recipe.model.path is None or recipe.model.build is not None:
        return
    loading.check_embeddings(model, recipe.model.path, [*prompts, *held_out])
    longest = recipe.generation.max_completion_tokens
    loading.check_context(model, recipe.model.path, prompts, longest)


def with_room_for_observations(
    recipe: Recipe, model: PreTrainedModel, prompts: Sequence[Prompt]
) -> Sequence[Prompt]:
    """Adds a prompt as long as the longest held-out one with a first observation may become."""
    if not prompts or not recipe.has_episodes:
        return prompts
    own = max(len(p.ids) for p in prompts)
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = (context or math.inf) - recipe.longest_completion - own
    longest = own + int(max(0, min(recipe.episode.reply_tokens, room)))
    return [*prompts, Prompt.from_ids(prompts[0].ids[:1] * longest)]
