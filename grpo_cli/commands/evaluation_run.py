"""Runs one `grpo eval`, from the model or the file of completions to the written results."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.checkpoints import paths
from grpo_cli.checkpoints.lock import Lock
from grpo_cli.checkpoints.lookup import file_hash, model_hash
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.stored_completions import find as find_file
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError, listed
from grpo_cli.evaluation import benchmarks, stored_completions, tables
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.evaluation.journal import FOLDER, Journal
from grpo_cli.evaluation.knobs import hash_of
from grpo_cli.evaluation.settings import Eval
from grpo_cli.evaluation.tasks import Task, TaskResult, of_stored
from grpo_cli.generation.factory import make_generator
from grpo_cli.models import loading
from grpo_cli.reporting.progress import Bar
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.training import inputs
from grpo_cli.training.prepare import Prepared, check_writable


def evaluate_model(prepared: Prepared, path: str, settings: Mapping[str, Any]) -> None:
    """Loads the model of a prepared recipe, evaluates its tasks and writes the results.

    An evaluation that was killed is resumed: stored completions of the same model, problems and
    settings are not generated again.

    Args:
        path: the model's folder or hub name. settings: for eval.json.
    """
    recipe = prepared.recipe
    workers = Workers(recipe.device, recipe.mixed_precision, recipe.distributed)
    with contextlib.ExitStack() as stack:
        with workers.raise_together():
            if workers.is_main:
                stack.callback(Lock(prepared.folder).release)
        _evaluate(prepared, path, settings, workers)


def _evaluate(prepared: Prepared, path: str, settings: Mapping[str, Any], workers: Workers) -> None:
    recipe = prepared.recipe
    reporter = Reporter(recipe, prepared.folder, workers.is_main)
    with workers.raise_together():
        loaded = inputs.load_policy(prepared, workers, reporter)
        tasks = inputs.make_tasks(prepared, loaded, reporter.say)
    prompts = [prompt for task in tasks for prompt in task.prompts]
    loading.check_embeddings(loaded.model, path, prompts)
    model, tokenizer = workers.place(loaded.model), loaded.tokenizer
    rollouter = inputs.make_rollouter(prepared, loaded, reporter.say)
    prompts = [*inputs.with_room_for_observations(recipe, model, prompts)]
    generator = make_generator(recipe, model, tokenizer, workers, prompts, reporter.say)
    evaluator = Evaluator(recipe.eval, workers, tokenizer, generator, tasks, rollouter)
    without_votes = [task.label for task in tasks if not task.has_votes]
    if "maj" in recipe.eval.metric and without_votes:
        reporter.say(f"note: no maj@k for {listed(without_votes)}: no final answers to vote on")
    for line in dict.fromkeys(d for t in tasks for d in t.descriptions):
        reporter.say(line)
    with workers.raise_together():
        own_hash = model_hash(path) if workers.is_main else None
    commit = getattr(model.config, "_commit_hash", None)
    identity = workers.first(own_hash) or commit or path
    try:
        generator.update_weights(model, 0)
        journal = Journal(prepared.folder, workers, key_of(settings, tasks, identity))
        results = solved(evaluator, journal, reporter, "eval")
    finally:
        generator.close()
    report = {"checkpoint_hash": identity, **settings}
    finish(prepared.folder, path, results, report, reporter, workers, recipe)


def score_completions(
    recipe: Recipe,
    path: Path,
    columns: Mapping[str, str],
    mode: str | None,
    settings: Mapping[str, Any],
) -> None:
    """Scores a file of completions on the recipe's one benchmark and writes the results.

    Args:
        columns: new name -> name in the file. mode: the mode that they were made in, if given.

    Raises:
        UserError: the file, a column or the benchmark's data is missing.
    """
    folder = Path(recipe.output_dir).expanduser()
    check_writable(folder)
    ((name, benchmark),) = recipe.benchmark.items()
    found = stored_completions.load(
        path, columns, name, benchmark, recipe.eval.limit, mode, recipe.dataset.max_pixels
    )
    groups = found.groups
    sizes = [len(g.rollouts) for g in groups]
    if min(sizes) == 1 and (recipe.eval.k or recipe.eval.metric):
        raise UserError(
            "eval.metric, eval.k: are only read where there are several completions of each "
            f"problem; {path} has one."
        )
    config = dataclasses.replace(recipe.eval, num_samples=min(sizes))
    if config.k and max(config.k) > min(sizes):
        raise UserError(
            f"eval.k = {max(config.k)}: must be <= {min(sizes)}, the completions that {path} has "
            "of each problem."
        )
    executor, workers = RewardExecutor(recipe.scoring), Workers("cpu")
    reporter = Reporter(recipe, folder, workers.is_main)
    run = {"max_completion_tokens": recipe.longest_completion, "device": recipe.device}
    names = [*groups[0].prompt.columns]
    scorer = Scorer(benchmarks.rewards(benchmark), names, str(path), executor, run, "columns")
    scorer.check_cells([group.prompt.columns for group in groups], "completions")
    task = of_stored(name, recipe, found, scorer, config.num_samples)
    if not found.is_benchmark:
        reporter.say(
            f"note: the {len(groups):,} problems and their answers are from {path}; nothing says "
            f"that they are those of {name}, so that published results are left out"
        )
    if found.rows is not None and found.rows > len(groups):
        reporter.say(
            f"warning: only {len(groups):,} of the {found.rows:,} rows of {name} have completions; "
            "the numbers cover these rows only"
        )
    try:
        evaluator = Evaluator(config, workers, None, None, [task])
        results = solved(evaluator, None, reporter, "score")
    finally:
        executor.close()
    report = settings_of_completions(settings, config, path, columns)
    finish(folder, str(path), results, report, reporter, workers, recipe)


def settings_of_completions(
    settings: Mapping[str, Any], config: Eval, path: Path, columns: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the settings for eval.json, without those of sampling, which are unknown."""
    sampling = ("temperature", "top_p", "max_completion_tokens")
    known = {k: v for k, v in dataclasses.asdict(config).items() if k not in sampling}
    report = {**settings, "eval": known}
    del report["generation"], report["model"], report["mixed_precision"]
    report["checkpoint_hash"] = file_hash(find_file(path, "completions"))
    if columns:
        report["columns"] = dict(columns)
        report["settings_hash"] = hash_of([report["settings_hash"], report["columns"]])
    report["completions"] = str(path)
    return report


def solved(
    evaluator: Evaluator, journal: Journal | None, reporter: Reporter, verb: str
) -> list[TaskResult]:
    """Runs the evaluator with a bar on the terminal and returns its results."""
    bar = Bar(reporter.console, verb, evaluator.problems)
    try:
        if journal is not None and journal.found:
            reporter.say(f"resumes: {journal.found:,} problems are already complete")
            bar.start_at(journal.found)
        return evaluator.run(
            lambda done, text: bar.update(done, text), journal=journal, keep_groups=True
        )
    finally:
        bar.close()
        if journal is not None:
            journal.close()


def finish(
    folder: Path,
    subject: str,
    results: Sequence[TaskResult],
    settings: Mapping[str, Any],
    reporter: Reporter,
    workers: Workers,
    recipe: Recipe,
) -> None:
    """Writes and shows an evaluation, and deletes its journal.

    Args:
        recipe: only overwrite is read.
    """
    with workers.raise_together():
        if workers.is_main:
            before = None if recipe.overwrite else tables.set_aside(folder, settings)
            tables.write(folder, subject, results, settings)
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
            tables.show(reporter.console, paths.shown(subject), results)
            said = f"numbers: {paths.shown(folder / 'eval.json')}"
            if results[0].task.mode is not None:
                said += f"; beside the paper's: {paths.shown(folder / 'table.md')}"
            reporter.say(said)
            reporter.say(f"every completion: {paths.shown(folder / 'completions.parquet')}")
            if before is not None:
                reporter.say(f"moved the earlier evaluation (other settings) to {before}")


def key_of(settings: Mapping[str, Any], tasks: Sequence[Task], identity: str) -> str:
    """Returns a hash of everything that completions depend on: model, settings and prompts."""
    prompts = [(task.label, [(p.ids, p.columns) for p in task.prompts]) for task in tasks]
    return hash_of([identity, settings["settings_hash"], prompts])
