"""The `grpo` command: compose with Hydra, check, build, train or evaluate; exit codes and errors.

A recipe is a Hydra primary config, so `recipe=NAME` becomes `--config-name NAME` and Hydra keeps
the rest: override grammar, --cfg, --info, --help, multirun, completion. Exit codes: 0 done, 1 the
run failed, 2 what was asked for is wrong, 130 and 143 stopped by Ctrl-C and by SIGTERM.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_cli import __version__, config
from grpo_cli.errors import TrainingError, UserError, listed, nearest

DEFAULT_RECIPE = "arithmetic_tiny"
RECIPES = Path(__file__).resolve().parent.parent / "recipes"  # a checkout; else inside the package
if not RECIPES.is_dir():
    RECIPES = Path(__file__).resolve().parent / "recipes"

USAGE = """\
grpo: train language models with GRPO

  grpo train [recipe=NAME] [key=value ...]   train; the default recipe is arithmetic_tiny
  grpo eval CHECKPOINT [key=value ...]       evaluate a checkpoint, or any model with recipe=NAME
  grpo recipes                               the recipes there are
  grpo rewards                               the reward functions there are
  grpo train --help                          groups and knobs (with recipe=NAME: of that recipe)
  grpo train recipe=NAME --cfg job           the composed recipe; runs nothing
  eval "$(grpo -sc install=bash)"            shell completion (also zsh, fish)
"""

# Hydra makes no folder and no logging: the run's folder is ours to make, after the checks.
QUIET_HYDRA = [
    "hydra.run.dir=.",
    "hydra.sweep.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.searchpath=[pkg://grpo_cli.recipes]",
]


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(argv: list[str]) -> int:
    """Runs one `grpo` command line and returns its exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises instead of printing and exiting
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(USAGE, end="")
        elif argv[0] == "--version":
            print(__version__)
        elif argv[0] in ("-sc", "--shell_completion"):
            complete(argv)
        elif argv[0] in COMMANDS:
            COMMANDS[argv[0]](argv[1:])
        else:
            raise UserError(
                f"grpo {argv[0]}: there is no such command; there are {listed(COMMANDS)}."
                + nearest(argv[0], COMMANDS)
            )
    except UserError as error:
        return _fail(str(error), 2)
    except (HydraException, OmegaConfBaseException) as error:
        return _fail(explain(error, argv), 2)
    except TrainingError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("stopped at once; nothing was saved since the last checkpoint", 130)
    except Stopped as stopped:
        return _fail(str(stopped), 128 + stopped.signal)
    return 0


class Stopped(Exception):  # noqa: N818 - no error: the run did as it was told
    """A run that was told to stop, and saved."""

    def __init__(self, signal: int, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}; saved in {checkpoint}; resume=auto goes on")
        self.signal = signal


def _fail(message: str, code: int) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"grpo: {message}", file=sys.stderr)
    return code


def train(argv: list[str]) -> None:
    """Grpo train: composes the recipe and runs it."""
    command = ["grpo", "train", *argv]

    def task(cfg: DictConfig) -> None:
        recipe = config.parse(cfg)
        if HydraConfig.get().mode is hydra.types.RunMode.MULTIRUN:
            # The jobs of a sweep must not share a folder.
            recipe.output_dir = f"{recipe.output_dir}-{HydraConfig.get().job.override_dirname}"
        from grpo_cli import prepare

        prepared = prepare.for_training(recipe)
        from grpo_cli import checkpoint, run
        from grpo_cli import train as training

        live = run.build(prepared, command)
        try:
            training.train(live)
        finally:
            live.close()
        if live.stop.signal is not None and live.state.step < recipe.steps:
            path = checkpoint.path_of(live.folder, live.state.step)
            raise Stopped(live.stop.signal, live.state.step, path)

    compose_and_call(argv, task)


def evaluate(argv: list[str]) -> None:
    """Grpo eval: composes the recipe stored with a checkpoint, or recipe=NAME, and evaluates."""
    paths = [a.removeprefix("checkpoint=") for a in argv if _is_checkpoint(a)]
    rest = [a for a in argv if not _is_checkpoint(a)]
    if any(a in ("--help", "-h") for a in rest):
        compose_and_call(rest, lambda cfg: None)
        return
    if len(paths) != 1:
        raise UserError(
            "grpo eval: give one checkpoint, such as outputs/NAME/checkpoints/step-100"
            + (f"; got {' and '.join(paths)}." if paths else ".")
        )
    from grpo_cli import checkpoint, prepare

    path = find_model(paths[0])
    stored = Path(path) / checkpoint.TRAINING / "recipe.yaml"
    if not any(a.startswith("recipe=") for a in rest):
        if not stored.is_file():
            raise UserError(
                f"checkpoint = {path}: no recipe is stored with it; say which with recipe=NAME."
            )
        rest = [f"recipe={stored}", *rest]

    def task(cfg: DictConfig) -> None:
        recipe = config.parse(cfg)
        # The stored recipe says how the model was made; what is evaluated is the checkpoint.
        recipe.model.build, recipe.model.path = None, path
        if not any(a.startswith("output_dir=") for a in rest):
            recipe.output_dir = str(default_eval_folder(path))
        prepared = prepare.for_evaluation(recipe)
        from grpo_cli import report, run

        evaluation, reporter = run.evaluate_checkpoint(prepared)
        settings = {
            "seed": recipe.seed,
            "eval": dataclasses.asdict(recipe.eval),
            "dataset": prepared.recipe.dataset.eval,
            "versions": run.versions(),
        }
        report.write_evaluation(prepared.folder, path, evaluation, settings, reporter)

    compose_and_call(rest, task)


def _is_checkpoint(argument: str) -> bool:
    return argument.startswith("checkpoint=") or ("=" not in argument and argument[:1] not in "-~")


def find_model(given: str) -> str:
    """What `grpo eval` is given: a model's folder, a run's (its newest checkpoint), a hub name.

    Raises:
        UserError: a path that holds no model.
    """
    from grpo_cli import checkpoint, prepare

    path = Path(given).expanduser()
    if checkpoint.is_model(path):
        return str(path.resolve())
    saved = checkpoint.steps_saved(path)
    if saved:
        return str(checkpoint.path_of(path, saved[-1]).resolve())
    if path.exists():
        raise UserError(
            f"checkpoint = {given}: holds no model (config.json and *.safetensors), "
            "nor checkpoints/step-N."
        )
    if prepare.looks_local(given):
        beside = [str(p) for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"checkpoint = {given}: there is no such folder.{nearest(given, beside)}")
    return given


def default_eval_folder(path: str) -> Path:
    """`RUN/eval/step-N` for a run's checkpoint, `outputs/eval/NAME` for another model."""
    folder = Path(path)
    if folder.parent.name == "checkpoints":
        return folder.parent.parent / "eval" / folder.name
    return Path("outputs/eval") / folder.name


def recipes(argv: list[str]) -> None:
    """Grpo recipes: one line each."""
    for path in recipe_files():
        text = yaml.safe_load(path.read_text(encoding="utf-8"))
        print(f"{path.stem:18} {text.get('description', '')}")


def rewards(argv: list[str]) -> None:
    """Grpo rewards: name, what it is, the columns it needs, its arguments."""
    from grpo_cli import scoring

    for name in sorted(scoring.shipped()):
        function = scoring.resolve(name)
        signature = scoring.Signature.of(function)
        first_line = (function.__doc__ or "").strip().splitlines()[0]
        print(f"{name:14} {first_line}")
        columns = listed([*signature.required, *(f"[{c}]" for c in signature.optional)])
        print(f"{'':14} columns: {columns}; arguments: {listed(signature.arguments)}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "eval": evaluate,
    "recipes": recipes,
    "rewards": rewards,
}


def recipe_files() -> list[Path]:
    """The shipped recipes."""
    return sorted(RECIPES.glob("*.yaml"))


def compose_and_call(argv: list[str], task: Callable[[DictConfig], None]) -> None:
    """Composes the recipe that the command line names and calls `task` with it.

    Raises:
        UserError: no such recipe. Hydra's and OmegaConf's errors pass through.
    """
    register_schema()
    folder, name, rest = split_recipe(argv)
    options, overrides = split_options(rest)
    options += ["--config-name", name]
    if folder is not None:
        # First on the search path, so that a user's file wins over a shipped one.
        options += ["--config-path", str(folder)]
    sys.argv = ["grpo", *options, *QUIET_HYDRA, f"recipe={name}", *overrides]
    hydra.main(version_base="1.3", config_path="pkg://grpo_cli.recipes", config_name=name)(task)()


def register_schema() -> None:
    """Makes the typed `Recipe` known to Hydra as the `schema` that every recipe begins with."""
    store: Any = ConfigStore.instance()
    store.store(name="schema", node=config.Recipe)


def split_recipe(argv: list[str]) -> tuple[Path | None, str, list[str]]:
    """Takes recipe=... and --config-dir out of a command line.

    Returns:
        (folder of a recipe from outside or None, its name, the other arguments).
    """
    name, folder, rest = DEFAULT_RECIPE, None, []
    arguments = iter(argv)
    for argument in arguments:
        if argument.startswith("recipe="):
            name = argument.removeprefix("recipe=")
        elif argument in ("--config-dir", "-cd"):
            folder = Path(next(arguments, ""))
        elif argument.startswith("--config-dir="):
            folder = Path(argument.removeprefix("--config-dir="))
        else:
            rest.append(argument)
    if folder is not None:
        folder = folder.expanduser().resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder}: there is no such folder.")
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            beside = [p.name for p in path.parent.glob("*.yaml")]
            raise UserError(f"recipe = {name}: there is no such file.{nearest(path.name, beside)}")
        return path.parent, path.stem, rest
    own = sorted(p.stem for p in folder.glob("*.yaml")) if folder is not None else []
    shipped = [p.stem for p in recipe_files()]
    if name not in own + shipped:
        raise UserError(
            f"recipe = {name}: there is no such recipe; there are {listed(own + shipped)}, "
            f"or give a file as recipe=./my.yaml.{nearest(name, own + shipped)}"
        )
    return folder, name, rest


def split_options(argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """(options with their values, overrides): Hydra's parser wants overrides in one stretch."""
    options: list[str] = []
    overrides: list[str] = []
    for argument in argv:
        if argument.startswith("-") or (
            options
            and options[-1] in ("--cfg", "-c", "--package", "-p", "--info", "-i")
            and ("=" not in argument)
        ):
            options.append(argument)
        else:
            overrides.append(argument)
    return options, overrides


def explain(error: Exception, argv: Iterable[str]) -> str:
    """Hydra's or OmegaConf's error in one message, with the nearest known key for a typo."""
    keys = [key for key, _ in config.knobs()]
    text = str(error)
    message = " ".join(line.strip() for line in text.splitlines() if line.strip())
    message = message.split(" full_key: ")[0].split(" To append to your")[0]
    cause = error.__cause__ or error
    unknown = getattr(cause, "key", None) or getattr(error, "key", None)
    full_key = getattr(cause, "full_key", None) or getattr(error, "full_key", None)
    hint = ""
    if "not in" in text or "Could not" in text:
        hint = nearest(str(full_key or unknown or ""), keys)
    return message + hint


def complete(argv: list[str]) -> None:
    """Shell completion: Hydra's, with the subcommand and recipe names added."""
    register_schema()
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    current = "" if line.endswith(" ") or not words else words[-1]
    before = words[1:] if not current else words[1:-1]
    if "query" in argv[-1] and not before:
        print(" ".join(c for c in COMMANDS if c.startswith(current)))
        return
    if "query" in argv[-1] and current.startswith("recipe="):
        print(" ".join(f"recipe={p.stem}" for p in recipe_files()))
        return
    name = next((w.removeprefix("recipe=") for w in before if w.startswith("recipe=")), "")
    if name not in [p.stem for p in recipe_files()]:
        name = DEFAULT_RECIPE
    os.environ["COMP_LINE"] = " ".join(
        [
            words[0] if words else "grpo",
            *(w for w in before[1:] if not w.startswith("recipe=")),
            current,
        ]
    )
    sys.argv = ["grpo", *argv]
    hydra.main(version_base="1.3", config_path="pkg://grpo_cli.recipes", config_name=name)(
        lambda cfg: None
    )()


if __name__ == "__main__":
    main()
