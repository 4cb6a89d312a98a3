"""`grpo eval`: the command line of an evaluation. evaluation_run.py runs it.

They are separate so that a mistake on the command line is found before torch is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from grpo_cli.checkpoints import paths, provenance
from grpo_cli.checkpoints.lookup import find_model
from grpo_cli.config import parsing, sources
from grpo_cli.config.command_line import DEFAULT_RECIPE, quoted, split_options
from grpo_cli.config.compose import BARE, compose_and_call, given_keys
from grpo_cli.config.knob import knob
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.sources import file_format
from grpo_cli.config.user_code import off_import_path
from grpo_cli.config.words import described, parse, split
from grpo_cli.errors import UserError
from grpo_cli.evaluation.knobs import (
    check_read,
    check_rows,
    settings,
    without_training,
    without_unread_data,
)
from grpo_cli.evaluation.settings import Eval
from grpo_cli.files import read_yaml

USAGE = """\
grpo eval CHECKPOINT                          on the recipe's held-out rows
grpo eval CHECKPOINT benchmark=gsm8k,math     on benchmarks, or on files
grpo eval HUB/NAME benchmark=math500 num_samples=64 metric=maj,pass
grpo eval compare A/eval.json B/eval.json     two evaluations, row by row

  benchmark=NAME,...       Shipped benchmarks, or files with the columns
                           question and answer.
  mode, metric, num_samples, temperature, top_p, k, limit
                           Short for eval.mode, eval.metric and so on.
"""


@dataclass
class EvalOptions:
    """The arguments of `grpo eval` that are not keys of a recipe."""

    trust: bool = knob(
        False,
        "Trust the checkpoint's recipe completely, even if someone else made it. It can run code.",
    )


HELP = USAGE + described(EvalOptions)
TRUST = "trust=true"
SHORT = ("mode", "metric", "num_samples", "temperature", "top_p", "k", "limit")


def main(argv: list[str]) -> list[Path]:
    """Runs `grpo eval` with its arguments.

    Returns:
        The folder of each evaluation.

    Raises:
        UserError: a mistake on the command line. TrainingError: the evaluation failed.
    """
    options, words = split_options(argv)
    if words[:1] == ["compare"]:
        from grpo_cli.evaluation import compare

        compare.main([*words[1:], *options])
        return []
    words = [w for word in words for w in spelt_out(word)]
    own, words = split(EvalOptions, words)
    given = parse(EvalOptions, own)
    models = [w.removeprefix("checkpoint=") for w in words if is_model(w)]
    overrides = [*(w for w in words if not is_model(w)), *options]
    if len(models) != 1 and not {*options} - {"-m", "--multirun"}:
        raise UserError(
            "grpo eval: give one checkpoint, such as outputs/NAME/checkpoints/step-100; "
            + (f"got {' and '.join(models)}." if models else "grpo score scores completions.")
        )
    for word in words:
        if word.startswith(("model=", "model.path=", "model.build")):
            raise UserError(f"{word}: grpo eval evaluates the checkpoint that it is given.")
    return evaluate_checkpoint(find_model(models[0]) if models else "", overrides, given.trust)


def spelt_out(word: str) -> list[str]:
    """Returns the overrides that a word of `grpo eval` is short for."""
    key, equals, value = word.partition("=")
    if not equals:
        return [word]
    if key in SHORT:
        value = f"[{value.strip('[]')}]" if key in ("mode", "metric", "k") else value
        return [f"eval.{key}={value}"]
    if key != "benchmark":
        return [word]
    out: list[str] = []
    names: list[str] = []
    for choice in value.strip("[]").split(","):
        if file_format(Path(choice)) is None:
            names.append(choice)
            continue
        path = Path(choice).expanduser()
        stem = path.name.removesuffix(".gz").rpartition(".")[0]
        name = re.sub(r"\W", "_", stem, flags=re.ASCII)
        name = name if name[:1].isalpha() else f"file_{name}"
        if any(w.startswith(f"benchmark.{name}.data=") for w in out):
            raise UserError(
                f"{word}: two files are called {name}; name one with benchmark.NAME.data=FILE."
            )
        out.append(f"benchmark.{name}.data={quoted(os.path.realpath(path))}")
    return [*([f"benchmark={','.join(names)}"] if names else []), *out]


def evaluate_checkpoint(path: str, overrides: list[str], trust: bool) -> list[Path]:
    """Evaluates a model on benchmarks, or on the held-out rows of the recipe stored with it.

    Args:
        trust: whether to apply all of a stored recipe that another user has made.

    Returns:
        The folder of each evaluation.
    """
    folders: list[Path] = []
    check_read(overrides)
    stored = Path(path) / paths.TRAINING / "recipe.yaml"
    is_local = bool(path) and Path(path).is_dir()
    is_foreign = is_local and not (trust or provenance.is_own(Path(path)))
    reads_foreign = False  # whether a foreign folder's recipe is read
    if is_foreign:
        provenance.check(path, provenance.refused_base(Path(path)), TRUST)
    if path and not any(w.startswith("recipe=") for w in overrides):
        if stored.is_file():
            reads_foreign = is_foreign
            if reads_foreign:  # before Hydra reads it
                provenance.check(path, provenance.unusual(read_yaml(stored)), TRUST)
            overrides = [f"recipe={stored}", *overrides]
        elif any(w.startswith("dataset.eval=") for w in overrides):
            overrides = [f"recipe={DEFAULT_RECIPE}", *overrides]
        elif not benchmarks_named(overrides):
            raise UserError(
                f"checkpoint = {path}: there is no such folder with a recipe stored in it; if this "
                "is a model's folder or hub name, say what to evaluate it on with benchmark=NAME, "
                "recipe=NAME, or dataset.eval=FILE and a reward."
            )
    chosen = benchmarks_named(overrides)

    def task(cfg: DictConfig) -> None:
        # The stored recipe's model is where training began; the checkpoint is evaluated.
        cfg.model.path = path
        if not ("model.tokenizer" in given_keys(cfg) or sources.is_adapter(Path(path))):
            cfg.model.tokenizer = None  # a checkpoint has the run's
        keep_benchmarks(cfg, chosen)
        without_training(cfg, overrides)
        if reads_foreign:
            given = {*given_keys(cfg), "output_dir"}  # the recipe's own is never used
            asked = provenance.refused(without_unread_data(cfg), Path(path), given)
            provenance.check(path, asked, TRUST)
        from grpo_cli.training import prepare

        recipe = prepare.resolved(parsing.parse(cfg, given_keys(cfg)), trains=False)
        check_rows(overrides, recipe)
        if not any(w.startswith("output_dir=") for w in overrides):
            folder = paths.evaluation_folder(path) / folder_name(recipe)
            job = HydraConfig.get()
            is_sweep = job.mode is RunMode.MULTIRUN
            recipe.output_dir = f"{folder}-{job.job.num}" if is_sweep else str(folder)
        prepared = prepare.for_evaluation(recipe)
        folders.append(Path(recipe.output_dir).expanduser().absolute())
        from grpo_cli.commands import evaluation_run

        try:
            evaluation_run.evaluate_model(prepared, path, settings(recipe))
        finally:
            prepared.close()

    with off_import_path(is_foreign):
        compose_and_call(overrides, task, BARE, only_this_file=reads_foreign)
    return folders


def folder_name(recipe: Recipe) -> str:
    """Returns the name of an evaluation's folder; "" for the recipe's held-out rows."""
    if not recipe.benchmark:
        return ""
    name = "+".join(recipe.benchmark)
    if recipe.eval.limit is not None:
        name += f"-first{recipe.eval.limit}"
    if recipe.eval.mode != Eval().mode:
        name += "-" + "+".join(recipe.eval.mode)
    return name if recipe.eval.num_samples == 1 else f"{name}-{recipe.eval.num_samples}"


def benchmarks_named(overrides: Sequence[str]) -> list[str]:
    """Returns the benchmarks that the command line names; [] if the recipe decides."""
    names = []
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key == "benchmark":
            names += value.strip("[]").split(",")
        elif key.startswith("benchmark."):
            names.append(key.split(".")[1])
    return list(dict.fromkeys(names))


def keep_benchmarks(cfg: DictConfig, chosen: Sequence[str]) -> None:
    """Removes the benchmarks of a stored recipe if the command line names others."""
    with open_dict(cfg):
        for name in [n for n in cfg.benchmark if chosen and n not in chosen]:
            del cfg.benchmark[name]


def is_model(word: str) -> bool:
    """Returns whether a word of the command line names the model to evaluate."""
    is_override = "=" in word or word.startswith("~")
    return word.startswith("checkpoint=") or not is_override or Path(word).is_dir()
