"""`grpo eval`: a checkpoint on its recipe's held-out rows or on benchmarks; stored completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from grpo_cli import data, folders, parsing
from grpo_cli.compose import BARE, compose_and_call, given_keys, split_options
from grpo_cli.config import Recipe
from grpo_cli.errors import UserError, listed
from grpo_cli.eval_settings import (
    check_read,
    check_read_of_completions,
    check_rows,
    settings,
    without_training,
)
from grpo_cli.models import find_model

USAGE = """\
grpo eval CHECKPOINT [key=value ...]                    the recipe's held-out rows
grpo eval CHECKPOINT benchmark=gsm8k,math mode=cot,tir  benchmarks, in words and with programs
grpo eval Qwen/Qwen2.5-Math-1.5B-Instruct benchmark=math500 num_samples=64 metric=maj,pass
grpo eval completions=FILE benchmark=gsm8k              stored completions, without a model
grpo eval compare A/eval.json B/eval.json               the same problems, paired

  benchmark=NAME,...   a shipped one, or a file of problems with the columns question and answer
  mode, metric, num_samples, temperature, k, limit      short for eval.KEY
  columns.NEW=NAME     rename a column of completions=FILE
"""

SHORT = ("mode", "metric", "num_samples", "temperature", "top_p", "k", "limit")
MANY = 10**6  # completions
LISTS = ("mode", "metric", "k")


def main(argv: list[str]) -> None:
    """Runs `grpo eval` with the words after it.

    Raises:
        UserError: what is asked for is wrong. TrainingError: it failed on the way.
    """
    options, words = split_options(argv)
    if words[:1] == ["compare"]:
        from grpo_cli import paired

        paired.main([*words[1:], *options])
        return
    if {"-h", "--help"} & {*options}:
        print(USAGE)
    words = [w for word in words for w in spelt_out(word)]
    given = [w for w in words if w.startswith(("completions=", "columns."))]
    words = [w for w in words if w not in given]
    models = [w.removeprefix("checkpoint=") for w in words if is_model(w)]
    overrides = [*(w for w in words if not is_model(w)), *options]
    if any(w.startswith("completions=") for w in given):
        if models:
            raise UserError(f"grpo eval: {models[0]} and completions= exclude one another.")
        evaluate_given(given, overrides)
        return
    if given:
        raise UserError(f"{given[0]}: is only read with completions=FILE.")
    if len(models) != 1 and not {*options} - {"-m", "--multirun"}:
        raise UserError(
            "grpo eval: give one checkpoint, such as outputs/NAME/checkpoints/step-100, or "
            "completions=FILE" + (f"; got {' and '.join(models)}." if models else ".")
        )
    for word in words:
        if word.startswith(("model=", "model.path=", "model.build")):
            raise UserError(f"{word}: the model of grpo eval is the one it is given to evaluate.")
    evaluate_model(find_model(models[0]) if models else "", overrides)


def spelt_out(word: str) -> list[str]:
    """A word of `grpo eval` as the overrides that it is short for."""
    key, equals, value = word.partition("=")
    if not equals:
        return [word]
    if key in SHORT:
        value = f"[{value.strip('[]')}]" if key in LISTS else value
        return [f"eval.{key}={value}"]
    if key != "benchmark":
        return [word]
    out: list[str] = []
    names: list[str] = []
    for choice in value.strip("[]").split(","):
        if data.file_format(Path(choice)) is None:
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
        out.append(f"benchmark.{name}.data={as_override(str(path.resolve()))}")
    return [*([f"benchmark={','.join(names)}"] if names else []), *out]


def as_override(text: str) -> str:
    """A text as Hydra's grammar wants it: in quotes where it has more than a plain path."""
    if re.fullmatch(r"[\w./:-]+", text, flags=re.ASCII):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def evaluate_model(path: str, overrides: list[str]) -> None:
    """Evaluates a model; what it is evaluated on is composed from the recipe stored with it."""
    check_read(overrides)
    stored = Path(path) / folders.TRAINING / "recipe.yaml"
    default = BARE
    if path and not any(w.startswith("recipe=") for w in overrides):
        if stored.is_file():
            overrides = [f"recipe={stored}", *overrides]
        elif not benchmarks_named(overrides):
            raise UserError(
                f"checkpoint = {path}: there is no such folder with a recipe stored in it; if this "
                "is a model's folder or hub name, say what to evaluate it on with benchmark=NAME "
                "or recipe=NAME."
            )
    chosen = benchmarks_named(overrides)

    def task(cfg: DictConfig) -> None:
        # The recipe says how the model came about; what is evaluated is the checkpoint.
        cfg.model.build, cfg.model.path = None, path
        keep_benchmarks(cfg, chosen)
        without_training(cfg, overrides)
        recipe = parsing.parse(cfg, given_keys(cfg))
        check_rows(overrides, recipe)
        if not any(w.startswith("output_dir=") for w in overrides):
            folder = folders.evaluation_folder(path) / of_what(recipe)
            recipe.output_dir = str(own_of_job(folder))
        from grpo_cli import prepare

        prepared = prepare.for_evaluation(recipe)
        from grpo_cli import evaluation

        try:
            evaluation.of_model(prepared, path, settings(recipe))
        finally:
            prepared.eval_scorer.crew.close()

    compose_and_call(overrides, task, default)


def evaluate_given(words: Sequence[str], overrides: list[str]) -> None:
    """Scores stored completions on benchmarks."""
    file, columns = "", dict[str, str]()
    for word in words:
        key, _, value = word.partition("=")
        if not value:
            raise UserError(f"{word}: lacks a value.")
        if key == "completions":
            file = value
        else:
            columns[key.removeprefix("columns.")] = value
    path = Path(file).expanduser()
    check_read_of_completions(overrides)
    chosen = benchmarks_named(overrides)
    if len(chosen) != 1:
        named = listed(chosen) if chosen else "none"
        raise UserError(
            f"grpo eval completions={file}: give the benchmark that they answer as "
            f"benchmark=NAME; got {named}."
        )
    if any(w.startswith("eval.mode=") and "," in w for w in overrides):
        raise UserError("eval.mode: stored completions were made in one mode; give that.")

    def task(cfg: DictConfig) -> None:
        keep_benchmarks(cfg, chosen)
        recipe = parsing.parse(cfg, given_keys(cfg))
        if not any(w.startswith("output_dir=") for w in overrides):
            folder = Path("outputs/eval") / path.name.split(".")[0]
            recipe.output_dir = str(own_of_job(folder))
        from grpo_cli import evaluation

        mode = recipe.eval.mode[0] if "eval.mode" in given_keys(cfg) else None
        evaluation.of_completions(recipe, path, columns, mode, settings(recipe))

    # How many there are of a problem is known once the file is read.
    compose_and_call([*overrides, f"eval.num_samples={MANY}"], task, BARE)


def of_what(recipe: Recipe) -> str:
    """What tells the folders of a model's evaluations apart; "" of the recipe's held-out rows."""
    if not recipe.benchmark:
        return ""
    name = "+".join(recipe.benchmark)
    if recipe.eval.limit is not None:
        name += f"-first{recipe.eval.limit}"
    if recipe.eval.mode != ["cot"]:
        name += "-" + "+".join(recipe.eval.mode)
    return name if recipe.eval.num_samples == 1 else f"{name}-{recipe.eval.num_samples}"


def own_of_job(folder: Path) -> Path:
    """The folder; of a job of a sweep one of its own."""
    job = HydraConfig.get()
    if job.mode is not RunMode.MULTIRUN:
        return folder
    return folder.with_name(f"{folder.name}-{job.job.num}")


def benchmarks_named(overrides: Sequence[str]) -> list[str]:
    """Those that a command line chooses; none if it leaves that to the recipe."""
    names = []
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key == "benchmark":
            names += value.strip("[]").split(",")
        elif key.startswith("benchmark."):
            names.append(key.split(".")[1])
    return list(dict.fromkeys(names))


def keep_benchmarks(cfg: DictConfig, chosen: Sequence[str]) -> None:
    """Leaves out what a stored recipe was evaluated on, where the command line says otherwise."""
    with open_dict(cfg):
        for name in [n for n in cfg.benchmark if chosen and n not in chosen]:
            del cfg.benchmark[name]


def is_model(word: str) -> bool:
    """Whether a word of the command line names what is evaluated."""
    is_override = "=" in word or word.startswith("~")
    return word.startswith("checkpoint=") or not is_override or Path(word).is_dir()
