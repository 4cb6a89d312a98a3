"""Everything that can be known to be wrong before a model is loaded: data, rewards, folders."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path

from grpo_cli import benchmarks, data, folders, lock, registry, tracking
from grpo_cli.config import Recipe
from grpo_cli.errors import UserError, nearest
from grpo_cli.reward_calls import Crew, Sample
from grpo_cli.scoring import Scorer

MADE_UP = "The answer is 0."  # a completion to try rewards out on


@dataclass(frozen=True)
class Bench:
    """A benchmark's rows, and what judges them."""

    rows: data.Rows
    scorer: Scorer


@dataclass(frozen=True)
class Prepared:
    """A recipe found to be sound, with what was loaded to find out."""

    recipe: Recipe
    folder: Path
    resume_from: list[Path]  # checkpoints to go on from, the first that is whole
    train_rows: data.Rows | None
    eval_rows: data.Rows | None
    scorer: Scorer  # of training; for an evaluation alone, the same as the next
    eval_scorer: Scorer
    benchmarks: dict[str, Bench] = field(default_factory=dict)  # by name


def for_training(recipe: Recipe) -> Prepared:
    """Checks a recipe for `grpo train`.

    Raises:
        UserError: the folder holds another run; the data, a reward or the model is not there.
    """
    if not recipe.reward:
        raise UserError("reward: at least one is needed to train, such as reward=[math].")
    folder = Path(recipe.output_dir).expanduser()
    resume_from = find_resume(recipe, folder)
    tracking.require(recipe.tracking.backend)
    check_engine(recipe)
    check_model_path(recipe)
    train_rows = data.load_rows(recipe.dataset, "train")
    eval_rows = None
    if recipe.dataset.eval and not recipe.benchmark:
        eval_rows = data.load_rows(recipe.dataset, "eval")
    crew = Crew(recipe.scoring)
    limit = recipe.generation.max_completion_tokens
    scorer = make_scorer(recipe, train_rows, limit, crew)
    eval_scorer = scorer if eval_rows is None else scorer_of_evaluation(recipe, eval_rows, crew)
    benches = benches_of(recipe, crew)
    return Prepared(
        with_absolute_paths(recipe),
        folder,
        resume_from,
        train_rows,
        eval_rows,
        scorer,
        eval_scorer,
        benches,
    )


def for_evaluation(recipe: Recipe) -> Prepared:
    """Checks a recipe for `grpo eval`.

    Raises:
        UserError: no held-out data; the data, a reward or the model is not there.
    """
    if recipe.dataset.eval is None and not recipe.benchmark:
        raise UserError(
            "dataset.eval: the recipe has no held-out rows; give a file or a hub name, or "
            "benchmark=NAME."
        )
    check_engine(recipe)
    check_model_path(recipe)
    folder, crew = Path(recipe.output_dir).expanduser(), Crew(recipe.scoring)
    check_writable(folder)
    if recipe.benchmark:
        benches = benches_of(recipe, crew)
        scorer = next(iter(benches.values())).scorer
        return Prepared(
            with_absolute_paths(recipe), folder, [], None, None, scorer, scorer, benches
        )
    rows = data.load_rows(recipe.dataset, "eval")
    scorer = scorer_of_evaluation(recipe, rows, crew)
    return Prepared(with_absolute_paths(recipe), folder, [], None, rows, scorer, scorer)


def benches_of(recipe: Recipe, crew: Crew) -> dict[str, Bench]:
    """The recipe's benchmarks by name, loaded.

    Raises:
        UserError: their data or their reward is not there, or no sandbox for programs.
    """
    if "tir" in recipe.eval.mode:
        from grpo_cli import tools

        tools.describe(recipe.generation.tools)
    registry.import_modules(recipe.scoring.modules, "scoring.modules")
    benches = {}
    for name, benchmark in recipe.benchmark.items():
        rows = benchmarks.load(name, benchmark, recipe.eval.limit)
        rewards = benchmarks.rewards(benchmark)
        limit = recipe.eval.max_completion_tokens or benchmark.max_completion_tokens
        run = {
            "max_completion_tokens": limit or recipe.generation.max_completion_tokens,
            "device": recipe.device,
        }
        renaming = f"benchmark.{name}.columns"
        scorer = Scorer(rewards, rows.columns, rows.source, crew, run, renaming)
        if recipe.scoring.try_out and os.environ.get("LOCAL_RANK", "0") == "0":  # once a node
            columns = data.other_columns(rows.rows[0])
            prompt = [{"role": "user", "content": ""}] if benchmark.chat else ""
            try:
                scorer.try_out(Sample(0, prompt, MADE_UP, (0,), columns))
            except BaseException:
                crew.close()
                raise
        benches[name] = Bench(rows, scorer)
    return benches


def scorer_of_evaluation(recipe: Recipe, rows: data.Rows, crew: Crew) -> Scorer:
    """The recipe's rewards for held-out rows, with the length limit of evaluation."""
    limit = recipe.eval.max_completion_tokens or recipe.generation.max_completion_tokens
    return make_scorer(recipe, rows, limit, crew)


def make_scorer(recipe: Recipe, rows: data.Rows, limit: int, crew: Crew) -> Scorer:
    """The recipe's rewards for these rows, each tried out on the first of them.

    Args:
        limit: longest completion, in tokens.

    Raises:
        UserError: a function that is not there, does not fit the data, or fails on the first row.
    """
    run = {"max_completion_tokens": limit, "device": recipe.device}
    scorer = Scorer(recipe.reward, rows.columns, rows.source, crew, run)
    if recipe.scoring.try_out and os.environ.get("LOCAL_RANK", "0") == "0":  # once a node
        row = rows.rows[0]
        prompt = data.prompt_text(row, recipe.dataset, 0)
        try:
            scorer.try_out(Sample(0, prompt, MADE_UP, (0,), data.other_columns(row)))
        except BaseException:
            crew.close()
            raise
    return scorer


def find_resume(recipe: Recipe, folder: Path) -> list[Path]:
    """The checkpoints to go on from, the furthest first; none to begin anew.

    Raises:
        UserError: the folder holds another run, or there is no such checkpoint.
    """
    check_writable(folder)
    saved = folders.steps_saved(folder)
    if recipe.resume is not None and recipe.overwrite:
        raise UserError("overwrite=true discards the run that resume would go on with; set one.")
    if recipe.resume == "auto":
        return folders.resumable(folder)
    if lock.is_restart(folder):  # the same run goes on, whatever it began from
        own = folders.resumable(folder)
        return own if own or recipe.resume is None else [Path(recipe.resume).expanduser()]
    if recipe.resume is not None:
        path = Path(recipe.resume).expanduser()
        if not folders.has_training_state(path):
            beside = [str(p) for p in path.parent.glob("step-*")] if path.parent.is_dir() else []
            raise UserError(
                f"resume = {path}: no checkpoint with a training state lies there; give `auto` or "
                f"a folder such as outputs/NAME/checkpoints/step-100.{nearest(str(path), beside)}"
            )
        inside = path.resolve().parent.parent == folder.resolve()
        if not inside and folders.holds_run(folder):
            raise UserError(
                f"output_dir = {folder}: holds another run than resume = {path}; "
                "choose another output_dir."
            )
        return [path]
    if folders.holds_run(folder) and not recipe.overwrite:
        newest = f" up to step {saved[-1]}" if saved else ""
        raise UserError(
            f"output_dir = {folder}: holds a run already{newest}; go on with resume=auto, discard "
            "it with overwrite=true, or choose another output_dir."
        )
    return []


def check_writable(folder: Path) -> None:
    """Raises a UserError if the run's folder cannot be made or written to."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"output_dir = {folder}: {existing} is a file, not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"output_dir = {folder}: {existing} cannot be written to.")


def check_engine(recipe: Recipe) -> None:
    """Raises a UserError if the engine that samples is not installed."""
    if recipe.generation.engine == "vllm_colocate" and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "generation = vllm_colocate: vLLM is not installed here; pip install 'grpo-cli[vllm]'."
        )


def check_model_path(recipe: Recipe) -> None:
    """Raises a UserError if model.path or model.chat_template names what is not there."""
    template = recipe.model.chat_template
    if template is not None and "{" not in template and not Path(template).expanduser().is_file():
        raise UserError(f"model.chat_template = {template}: neither a file nor a Jinja template.")
    if recipe.model.path is None:
        return
    path = Path(recipe.model.path).expanduser()
    if path.is_dir():
        if not folders.is_model(path):
            raise UserError(
                f"model.path = {path}: the folder holds no model (config.json, *.safetensors)."
            )
    elif folders.looks_local(recipe.model.path):
        raise UserError(f"model.path = {path}: there is no such folder.")


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The same recipe, its local files named so that they are found from any working directory."""

    def absolute(source: str | None) -> str | None:
        if source is None or source.startswith("pkg://") or "{" in source:
            return source
        path = Path(os.path.expanduser(source))
        return str(path.resolve()) if path.exists() else source

    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(
            recipe.model,
            path=absolute(recipe.model.path),
            chat_template=absolute(recipe.model.chat_template),
        ),
        benchmark={
            name: dataclasses.replace(b, data=absolute(b.data))
            for name, b in recipe.benchmark.items()
        },
        dataset=dataclasses.replace(
            recipe.dataset,
            train=absolute(recipe.dataset.train),
            eval=absolute(recipe.dataset.eval),
        ),
    )
