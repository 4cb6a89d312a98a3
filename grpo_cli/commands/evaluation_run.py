"""Runs one `grpo eval`, from the model to the written results."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_cli.checkpoints import paths
from grpo_cli.checkpoints.lock import Lock
from grpo_cli.checkpoints.lookup import model_hash
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import listed
from grpo_cli.evaluation import tables
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.evaluation.journal import FOLDER, Journal
from grpo_cli.evaluation.knobs import hash_of
from grpo_cli.evaluation.tasks import Task, TaskResult
from grpo_cli.generation.factory import make_generator
from grpo_cli.models import loading
from grpo_cli.reporting.progress import Bar
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.training import inputs
from grpo_cli.training.prepare import Prepared


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
        results = solved(evaluator, journal, reporter)
    finally:
        generator.close()
    report = {"checkpoint_hash": identity, **settings}
    finish(prepared, path, results, report, reporter, workers)


def solved(evaluator: Evaluator, journal: Journal, reporter: Reporter) -> list[TaskResult]:
    """Runs the evaluator with a bar on the terminal and returns its results."""
    bar = Bar(reporter.console, "eval", evaluator.problems)
    try:
        if journal.found:
            reporter.say(f"resumes: {journal.found:,} problems are already complete")
            bar.start_at(journal.found)
        return evaluator.run(
            lambda done, text: bar.update(done, text), journal=journal, keep_groups=True
        )
    finally:
        bar.close()
        journal.close()


def finish(
    prepared: Prepared,
    path: str,
    results: Sequence[TaskResult],
    settings: Mapping[str, Any],
    reporter: Reporter,
    workers: Workers,
) -> None:
    """Writes and shows an evaluation, and deletes its journal."""
    folder, overwrite = prepared.folder, prepared.recipe.overwrite
    with workers.raise_together():
        if workers.is_main:
            before = None if overwrite else tables.set_aside(folder, settings)
            tables.write(folder, path, results, settings)
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
            tables.show(reporter.console, paths.shown(path), results)
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
