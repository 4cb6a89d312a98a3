"""Checks a recipe before a model is loaded: data, rewards, folders, adapter and engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from grpo_cli.checkpoints import lock, lookup, manifest, paths
from grpo_cli.config import contradictions, parsing, saved_recipe, sources
from grpo_cli.config.keys import flagged, is_among
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.rows import DATASET, Rows, hold_out, load_named, load_rows
from grpo_cli.data.settings import Dataset
from grpo_cli.data.streaming import open_stream
from grpo_cli.environments import factory as environments
from grpo_cli.errors import UserError, counted, nearest
from grpo_cli.evaluation.benchmarks import LoadedBenchmark
from grpo_cli.files import read_json, read_yaml
from grpo_cli.generation.vllm import lora
from grpo_cli.models.adapter_methods import INIT_WITHOUT_BASE
from grpo_cli.models.settings import ADAM, Adapter
from grpo_cli.reporting import tracking
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.scorer import Scorer, needed_columns
from grpo_cli.training.scorers import (
    HeldOutRows,
    TrainRows,
    benches_of,
    held_out_of,
    scorer_of_training,
)

if TYPE_CHECKING:
    from peft import PeftConfig

    from grpo_cli.environments.sessions import Sessions
    from grpo_cli.training.callbacks import Loaded


@dataclass(frozen=True)
class Prepared:
    """A checked recipe, with the data and rewards that the checks have loaded."""

    recipe: Recipe
    folder: Path
    train: dict[str, TrainRows]  # by name in dataset.mixture; "": the only one; {}: no training
    scorer: Scorer  # for training; in `grpo eval`, for the first task
    held_out: dict[str, HeldOutRows] = field(default_factory=dict)  # by name; "": the only ones
    benchmarks: dict[str, LoadedBenchmark] = field(default_factory=dict)  # by name
    note: str | None = None  # printed when the run starts
    sessions: Sessions | None = None  # opens the environments of rollouts
    callbacks: Sequence[Loaded] = ()

    def close(self) -> None:
        """Ends the processes of rewards and environments; a second call does nothing."""
        self.scorer.executor.close()
        if self.sessions is not None:
            self.sessions.close()


def parse(cfg: DictConfig | dict[str, Any], given: Collection[str] = ()) -> Recipe:
    """Returns a training run's recipe after the checks of config, loss and advantage rule.

    Args:
        given: full keys set on the command line, as for `parsing.parse`.

    Raises:
        UserError: as `parsing.parse`; or the loss or rule is unknown or does not take an argument.
    """
    from grpo_cli.algorithm import arguments  # late: it imports torch

    return parsing.parse(cfg, given, checks=(arguments.problems,))


def for_training(recipe: Recipe) -> Prepared:
    """Checks a recipe for `grpo train`.

    Raises:
        UserError: the folder holds another run; the data, a reward or the model is missing.
    """
    from grpo_cli.models import optimizers  # late: it imports torch
    from grpo_cli.training import callbacks
    from grpo_cli.training.rollouts.credit import check_episode_credit

    if not recipe.reward:
        named = "environment" if recipe.has_environment else "math"
        raise UserError(f"reward: at least one is needed to train, such as reward=[{named}].")
    check_episode_credit(recipe)
    here, folder = Path.cwd(), Path(recipe.output_dir).expanduser().absolute()
    find_resume(recipe, folder)  # early: the run builds its model before it resumes
    recipe = resolved(recipe)
    optimizers.check(recipe)
    check_dtype(recipe)
    tracking.require(recipe.tracking.backend)
    check_model_path(recipe)
    check_adapter(recipe)
    with contextlib.chdir("."):  # undoes a module's own chdir: data paths are still relative
        loaded = callbacks.load(recipe.callbacks)
    needed = needed_columns(recipe.reward)
    train, eval_rows = train_rows_of(recipe, needed)
    if recipe.dataset.eval and not recipe.benchmark:
        eval_rows = load_rows(recipe.dataset, "eval", needed)
    limited = [name for name, reward in recipe.reward.items() if reward.datasets]
    if limited and "" in train and DATASET not in train[""].rows.columns:
        raise UserError(
            f"reward.{limited[0]}.datasets: is only read with dataset.mixture, or with data that "
            f"has a column {DATASET}."
        )
    parsing.with_steps(recipe, sum(len(part.rows.rows) for part in train.values()))  # at most
    executor = RewardExecutor(recipe.scoring)
    scorer = scorer_of_training(recipe, train, executor)
    held_out = held_out_of(recipe, eval_rows, executor)
    benches = benches_of(recipe, executor)
    check_engine(recipe)
    sessions = environments.open_sessions(recipe, parts_of(train, held_out))
    try:
        note = check_hub(recipe)  # the last check, since it may create a repository
    except BaseException:
        if sessions is not None:
            sessions.close()
        raise
    with contextlib.chdir(here):  # a user's module may have changed it
        recipe = with_absolute_paths(recipe)
    return Prepared(recipe, folder, train, scorer, held_out, benches, note, sessions, loaded)


def parts_of(
    train: Mapping[str, TrainRows], held_out: Mapping[str, HeldOutRows]
) -> list[tuple[Rows, Dataset]]:
    """Returns all rows, each with the settings that turn them into prompts."""
    every: list[TrainRows | HeldOutRows] = [*train.values(), *held_out.values()]
    return [(part.rows, part.dataset) for part in every]


def train_rows_of(
    recipe: Recipe, needed: Mapping[str, str] | None = None
) -> tuple[dict[str, TrainRows], Rows | None]:
    """Returns (training data by name, rows held out by `dataset.test_split_size`).

    Raises:
        UserError: the data cannot be loaded.
    """
    dataset, held_out = recipe.dataset, None
    train = {}
    for name, part in dataset.mixture.items():
        rows, config = load_named(part, dataset, f"dataset.mixture.{name}")
        train[name] = TrainRows(rows, config, part.weight)
    if dataset.streaming:
        stream = open_stream(dataset, needed)
        at = dataclasses.replace(dataset, train=sources.absolute(stream.source))
        stream = dataclasses.replace(stream, config=at)  # its files are opened again later
        train[""] = TrainRows(stream.first, dataset, stream=stream)
    if not train:
        rows = load_rows(dataset, "train", needed)
        if dataset.test_split_size is not None:
            rows, held_out = hold_out(rows, dataset)
        train[""] = TrainRows(rows, dataset)
    return train, held_out


def for_evaluation(recipe: Recipe) -> Prepared:
    """Checks a recipe for `grpo eval`.

    Raises:
        UserError: no held-out data; the data, a reward or the model is missing.
    """
    here, dataset = Path.cwd(), recipe.dataset
    splits = dataset.test_split_size is not None
    if not (dataset.eval or splits or dataset.held_out or recipe.benchmark):
        raise UserError(
            "dataset.eval: the recipe has no held-out rows; give a file or a hub name, or "
            "benchmark=NAME."
        )
    recipe = resolved(recipe, trains=False)
    check_model_path(recipe)
    folder = Path(recipe.output_dir).expanduser().absolute()
    executor = RewardExecutor(recipe.scoring)
    check_writable(folder)
    benches = benches_of(recipe, executor)
    rows = None
    if dataset.eval and not benches:
        rows = load_rows(dataset, "eval")
    elif splits and not benches:
        _, rows = train_rows_of(recipe)
    held_out = held_out_of(recipe, rows, executor)
    check_engine(recipe)
    tasks: list[LoadedBenchmark | HeldOutRows] = [*benches.values(), *held_out.values()]
    sessions = environments.open_sessions(recipe, parts_of({}, held_out)) if held_out else None
    with contextlib.chdir(here):  # a user's module may have changed it
        recipe = with_absolute_paths(recipe)
    return Prepared(recipe, folder, {}, tasks[0].scorer, held_out, benches, sessions=sessions)


def find_resume(recipe: Recipe, folder: Path) -> list[Path]:
    """Returns the checkpoints to resume from, the furthest first; none for a new run.

    Raises:
        UserError: the folder holds another run, or there is no such checkpoint.
    """
    check_writable(folder)
    if recipe.overwrite:
        paths.check_no_links(folder)
    saved, is_finished = paths.steps_saved(folder), (folder / "summary.json").is_file()
    if recipe.resume is not None and recipe.overwrite:
        raise UserError("overwrite=true discards the run that resume continues; set one of them.")
    if recipe.resume == "auto":
        found = paths.resumable(folder)
        if not found and saved:
            raise UserError(
                f"resume = auto: {paths.shown(folder)} holds a model and no state to resume from "
                "(checkpoint.every=0); begin a run from it with "
                f"model.path={paths.shown(folder)} and another output_dir."
            )
        if not found and is_finished:
            raise UserError(
                f"resume = auto: {paths.shown(folder)} holds a finished run without its "
                "checkpoints; choose another output_dir, or discard the run with overwrite=true in "
                "place of resume."
            )
        return found
    restarts = lock.is_restart(folder)  # the same run continues, whatever it started from
    own = paths.resumable(folder) if restarts else []
    if own or (restarts and recipe.resume is None):
        return own
    if recipe.resume is not None:
        path = Path(recipe.resume).expanduser()
        found = paths.resumable(path) or [path]
        path = found[0]
        if not paths.has_training_state(path):
            beside = [str(p) for p in path.parent.glob("step-*")] if path.parent.is_dir() else []
            raise UserError(
                f"resume = {path}: no checkpoint with a training state lies there; give `auto` or "
                f"a folder such as outputs/NAME/checkpoints/step-100.{nearest(str(path), beside)}"
            )
        inside = path.resolve().parent.parent == folder.resolve()
        if not (inside or restarts) and paths.holds_run(folder):
            raise UserError(
                f"output_dir = {paths.shown(folder)}: holds another run than resume = {path}; "
                "choose another output_dir."
            )
        has_all = recipe.epochs is None and paths.step_of(path) >= recipe.steps
        lacks_evaluation = paths.is_interrupted(path) or (inside and not is_finished)
        if has_all and not lacks_evaluation:
            raise UserError(
                f"steps = {recipe.steps}: {paths.shown(path)} has them all, and nothing is left "
                "to do; a larger steps=N continues it."
            )
        return found
    if paths.holds_run(folder) and not recipe.overwrite:
        newest = f" up to step {saved[-1]}" if saved else ""
        raise UserError(
            f"output_dir = {paths.shown(folder)}: holds a run already{newest}; continue it with "
            "resume=auto, discard it with overwrite=true, or choose another output_dir."
        )
    return []


def with_model_of_run(recipe: Recipe, *, trains: bool = True) -> Recipe:
    """Returns the recipe with model.path=RUN replaced by the newest model of the run.

    Raises:
        UserError: the model is an adapter that is to be trained.
    """
    path = recipe.model.path
    if path is None:
        return recipe
    found = lookup.find_checkpoint(path)
    if found is not None and paths.is_model(found):
        path = str(found)
    if trains and sources.is_adapter(Path(path).expanduser()):
        raise UserError(
            f"model.path = {path}: is an adapter; continue training it with adapter=lora "
            f"adapter.path={path} and model.path of its base model."
        )
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, path=path))


def resolved(recipe: Recipe, *, trains: bool = True) -> Recipe:
    """Returns the recipe with model.path=RUN, model.dtype=auto and dataset.chat=auto resolved.

    Raises:
        UserError: the model is missing, is an adapter that is to be trained, its config names no
            type that can be trained, or there is no chat template for dataset.system.
    """
    recipe = with_model_of_run(recipe, trains=trains)
    model, dataset, path = recipe.model, recipe.dataset, recipe.model.path
    if path is not None and "auto" in (model.dtype, dataset.chat):
        from grpo_cli.models import loading  # late: it imports torch

        lookup.check_model_folder("model.path", path)
    if model.dtype == "auto":
        dtype = "float32" if path is None else loading.stored_dtype(model, path)
        model = dataclasses.replace(model, dtype=dtype)
    if dataset.chat == "auto":
        chat = recipe.has_environment or model.chat_template is not None
        chat = chat or (path is not None and loading.has_chat_template(model, path))
        if not chat and dataset.system is not None and not recipe.benchmark:
            raise UserError(
                "dataset.system: the model has no chat template to put it into; write it into "
                "dataset.prompt, or set model.chat_template."
            )
        dataset = dataclasses.replace(dataset, chat=chat)
    if model.build is None:  # only its warm-up reads solutions
        dataset = dataclasses.replace(dataset, solution=None)
    return dataclasses.replace(recipe, model=model, dataset=dataset)


def check_dtype(recipe: Recipe) -> None:
    """Raises a UserError if weights of the model's dtype cannot be updated."""
    dtype = recipe.model.dtype
    if recipe.mixed_precision == "fp16" and dtype != "float32":
        raise UserError(
            f"model.dtype = {dtype}: mixed_precision = fp16 scales losses, and the optimizer needs "
            "gradients in float32; use model.dtype=float32, or mixed_precision=no."
        )
    for problem in contradictions.of_dtype(recipe):
        raise UserError(problem)
    smallest = 2.0**-24  # the smallest number of float16 above 0
    eps = recipe.optimizer.args.get("eps", 1e-8)
    if dtype == "float16" and recipe.optimizer.algorithm in ADAM and eps < smallest:
        raise UserError(
            f"model.dtype = float16: eps = {eps:g} of AdamW is 0 in it, so that it divides by 0; "
            "use model.dtype=bfloat16 or float32, or optimizer.args.eps=1e-4."
        )


def finished(recipe: Recipe) -> str | None:
    """Returns the message for a run to resume that is already finished; None if it is not.

    Raises:
        UserError: the finished run has other settings, and its record must not be rewritten.
    """
    folder = Path(recipe.output_dir).expanduser()
    restarts = recipe.resume == "auto" or (recipe.resume is None and lock.is_restart(folder))
    try:
        done = read_json(folder / "summary.json")["steps"]
        stored = read_yaml(folder / "recipe.yaml")
    except (UserError, KeyError):
        return None
    knob, steps = "steps", recipe.steps
    if recipe.epochs is not None:
        if stored.get("epochs") != recipe.epochs:  # the number of steps depends on the data
            return None
        knob, steps = "epochs", stored["steps"]
    if not restarts or done < steps or not paths.steps_saved(folder):
        return None
    changes = [
        change
        for change in saved_recipe.differences(stored, with_absolute_paths(recipe))
        if not is_among(change.partition(":")[0], flagged("without_effect"))
    ]
    if changes:
        others = f" and {len(changes) - 3} others" if len(changes) > 3 else ""
        raise UserError(
            f"output_dir = {paths.shown(folder)}: holds a finished run with other settings ("
            f"{', '.join(changes[:3])}{others}); choose another output_dir, or discard the run "
            "with overwrite=true."
        )
    more = f"; a larger {knob}=N continues it" if paths.resumable(folder) else ""
    said = f"the run is finished after {counted(done, 'step')}, and nothing is left to do"
    return f"{folder}: {said}{more}"


def check_writable(folder: Path) -> None:
    """Raises a UserError if the run's folder cannot be made or written to."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"output_dir = {paths.shown(folder)}: {existing} is a file, not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"output_dir = {paths.shown(folder)}: {existing} cannot be written to.")


def check_engine(recipe: Recipe) -> None:
    """Raises a UserError if the engine that samples refuses the recipe or is not installed."""
    from grpo_cli.generation import factory  # late: it imports torch

    factory.check_settings(recipe)
    factory.engine_class(recipe.generation.engine).require()


def check_hub(recipe: Recipe) -> str | None:
    """Checks on the main process that the run may push to the hub; returns a note, if any."""
    if recipe.hub.repo is None or os.environ.get("RANK", "0") != "0":
        return None
    from grpo_cli.reporting import hub  # late: it imports transformers

    return hub.check(recipe)


def check_model_path(recipe: Recipe) -> None:
    """Raises a UserError if model.path or model.chat_template does not exist.

    Also raises it if the package for quantization is missing, or if the model is a damaged
    checkpoint, whose weights would load and give other numbers.
    """
    template = recipe.model.chat_template
    file = None if template is None else sources.template_file(template)
    if file is not None and not file.is_file():
        raise UserError(f"model.chat_template = {template}: neither a file nor a Jinja template.")
    if recipe.model.quantization != "none":
        from grpo_cli.models import quantization  # late: it imports torch

        quantization.require()
    if recipe.model.path is not None:
        lookup.check_model_folder("model.path", recipe.model.path)
        folder = Path(recipe.model.path).expanduser()
        if (folder / manifest.MANIFEST).is_file() and os.environ.get("RANK", "0") == "0":
            manifest.check(folder, model_only=True)


def check_adapter(recipe: Recipe) -> PeftConfig | None:
    """Checks that the recipe's adapter can be trained on its model; returns peft's config of it.

    Raises:
        UserError: it cannot, or the model is quantized and there is no adapter.
    """
    adapter, quantization = recipe.adapter, recipe.model.quantization
    if adapter == Adapter() and quantization == "none":
        return None
    from grpo_cli.models import adapters  # late: it imports transformers

    config = adapters.config_of(adapter, recipe.model.path or "", recipe.model.revision)
    if quantization != "none" and config is None:
        raise UserError(
            f"model.quantization = {quantization}: quantized weights cannot be trained; train "
            "an adapter on them (adapter=qlora), or set model.quantization=none."
        )
    if config is None:
        return None
    init = adapters.init_of(config)
    if quantization != "none" and init not in INIT_WITHOUT_BASE:
        where = f"adapter.args.init_lora_weights = {init}"
        where = where if adapter.path is None else f"{adapter.path}: init {init}"
        raise UserError(
            f"{where}: is made from the weights of the model under the adapter, which are "
            "quantized; use adapter.args.init_lora_weights=gaussian or true, or "
            "model.quantization=none."
        )
    if adapter.sync == "adapter":
        lora.check(config)
    return config


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Returns the recipe with absolute paths of its local files and its folder.

    The paths then stay valid if a user's function changes the working folder.
    """

    def absolute(section: Any, *keys: str) -> Any:
        given = {key: getattr(section, key) for key in keys}
        changed = {key: sources.absolute(path) for key, path in given.items() if path is not None}
        return dataclasses.replace(section, **changed)

    def all_data(sections: Mapping[str, Any]) -> dict[str, Any]:
        return {name: absolute(section, "data") for name, section in sections.items()}

    dataset = absolute(recipe.dataset, "train", "eval")
    return dataclasses.replace(
        recipe,
        output_dir=str(Path(recipe.output_dir).expanduser().absolute()),
        model=absolute(recipe.model, "path", "tokenizer", "chat_template"),
        adapter=absolute(recipe.adapter, "path"),
        benchmark=all_data(recipe.benchmark),
        dataset=dataclasses.replace(
            dataset, mixture=all_data(dataset.mixture), held_out=all_data(dataset.held_out)
        ),
    )
