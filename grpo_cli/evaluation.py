"""One `grpo eval` from its model, or its file of completions, to what it writes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli import benchmarks, build, eval_report, given, registry
from grpo_cli.config import Recipe
from grpo_cli.distributed import Workers
from grpo_cli.errors import UserError, listed
from grpo_cli.eval_settings import hash_of
from grpo_cli.evaluate import Evaluator, Result
from grpo_cli.generators import make_generator
from grpo_cli.journal import FOLDER, Journal
from grpo_cli.lock import Lock
from grpo_cli.models import file_hash, model_hash
from grpo_cli.prepare import Prepared, check_writable
from grpo_cli.progress import Bar
from grpo_cli.report import Reporter
from grpo_cli.reward_calls import Crew
from grpo_cli.sampling import Sampling
from grpo_cli.scoring import Scorer
from grpo_cli.tasks import Task


def of_model(prepared: Prepared, path: str, settings: Mapping[str, Any]) -> None:
    """Loads the model of a prepared recipe, solves its tasks, writes what came of it.

    Killed on the way and started again, it goes on where it was: what is there of the same model,
    problems and settings is not generated again.

    Args:
        path: the model's folder or hub name. settings: for eval.json.
    """
    recipe = prepared.recipe
    workers = Workers(recipe.device, recipe.mixed_precision, recipe.distributed)
    with workers.together():
        lock = Lock(prepared.folder) if workers.is_main else None
    try:
        _of_model(prepared, path, settings, workers)
    finally:
        if lock is not None:
            lock.release()


def _of_model(prepared: Prepared, path: str, settings: Mapping[str, Any], workers: Workers) -> None:
    recipe = prepared.recipe
    reporter = Reporter(recipe, prepared.folder, workers.is_main)
    with workers.together():
        model, tokenizer = build.load_policy(prepared, workers, reporter)
        tasks = build.make_tasks(prepared, tokenizer, reporter)
    model = workers.place(model)
    prompts = [prompt for task in tasks for prompt in task.prompts]
    generator = make_generator(recipe, model, tokenizer, workers, prompts, reporter.say)
    evaluator = Evaluator(recipe.eval, workers, tokenizer, generator, tasks)
    silent = [task.label for task in tasks if not task.has_votes]
    if "maj" in recipe.eval.metric and silent:
        reporter.say(f"note: no maj@k of {listed(silent)}: no final answers to vote on")
    for line in dict.fromkeys(d for t in tasks for d in t.descriptions):
        reporter.say(line)
    with workers.together():
        own_hash = model_hash(path) if workers.is_main else None
    commit = getattr(model.config, "_commit_hash", None)
    identity = workers.first(own_hash) or commit or path
    try:
        generator.update_weights(model, 0)
        journal = Journal(prepared.folder, workers.rank, key_of(recipe, tasks, identity))
        journal.agree(workers)
        results = solved(evaluator, journal, reporter, "eval")
    finally:
        generator.close()
    told = {"checkpoint_hash": identity, **settings}
    finish(prepared.folder, path, results, told, reporter, workers, recipe.overwrite)


def of_completions(
    recipe: Recipe,
    path: Path,
    columns: Mapping[str, str],
    mode: str | None,
    settings: Mapping[str, Any],
) -> None:
    """Scores a file of completions on the recipe's one benchmark, and writes what came of it.

    Args:
        columns: new name -> name in the file. mode: that they were made in, if that was said.

    Raises:
        UserError: the file, a column or the benchmark's data is not there.
    """
    folder = Path(recipe.output_dir).expanduser()
    check_writable(folder)
    ((name, benchmark),) = recipe.benchmark.items()
    registry.import_modules(recipe.scoring.modules, "scoring.modules")
    found = given.load(path, columns, name, benchmark, recipe.eval.limit, mode)
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
    crew = Crew(recipe.scoring)
    workers = Workers("cpu")
    reporter = Reporter(recipe, folder, workers.is_main)
    scorer = Scorer(
        benchmarks.rewards(benchmark),
        [*groups[0].prompt.columns],
        str(path),
        crew,
        {"max_completion_tokens": recipe.longest_completion, "device": recipe.device},
        "columns",
    )
    task = Task(
        name=name,
        mode=recipe.eval.mode[0],
        prompts=[g.prompt for g in groups],
        scorer=scorer,
        right=next(iter(scorer.terms)),
        sampling=Sampling(max_tokens=1),  # nothing is sampled
        num_samples=config.num_samples,
        seed=recipe.seed,
        has_votes=benchmarks.has_votes(benchmark.reward),
        breakdown=tuple(benchmark.breakdown),
        given=groups,
        ends_known=found.ends_known,
        data=found.data,
    )
    if found.rows is not None and found.rows > len(groups):
        reporter.say(
            f"warning: of the {found.rows:,} rows of {name} {len(groups):,} have completions; the "
            "numbers are of these alone"
        )
    evaluator = Evaluator(config, workers, None, None, [task])
    try:
        results = solved(evaluator, None, reporter, "score")
    finally:
        crew.close()
    sampled = ("temperature", "top_p", "max_completion_tokens")
    told = {**settings, "eval": dataclasses.asdict(config)}
    for key in sampled:  # how they were made is not known
        del told["eval"][key]
    del told["generation"], told["model"], told["mixed_precision"]
    told["checkpoint_hash"] = file_hash(given.find(path))
    if columns:
        told["columns"] = dict(columns)
        told["settings_hash"] = hash_of([told["settings_hash"], told["columns"]])
    told["completions"] = str(path)
    finish(folder, str(path), results, told, reporter, workers, recipe.overwrite)


def solved(
    evaluator: Evaluator, journal: Journal | None, reporter: Reporter, verb: str
) -> list[Result]:
    """The evaluator's results, with a bar on the terminal."""
    workers = evaluator.workers
    bar = Bar(reporter.console, verb, evaluator.problems)
    try:
        if journal is not None:
            workers.barrier()  # every process has read what there was
            with workers.together():
                journal.begin()
            if journal.found:
                reporter.say(f"goes on: {journal.found:,} problems are completed already")
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
    results: Sequence[Result],
    settings: Mapping[str, Any],
    reporter: Reporter,
    workers: Workers,
    overwrite: bool,
) -> None:
    """Writes and shows an evaluation; what it has noted down on the way is no longer needed.

    Args:
        overwrite: whether another evaluation in the folder is discarded, not moved aside.
    """
    with workers.together():
        if workers.is_main:
            before = None if overwrite else eval_report.set_aside(folder, settings)
            eval_report.write(folder, subject, results, settings)
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
            eval_report.show(reporter.console, subject, results)
            said = f"numbers: {folder / 'eval.json'}"
            if results[0].task.mode is not None:
                said += f"; beside the paper's: {folder / 'table.md'}, table.tex"
            reporter.say(said)
            reporter.say(f"every completion: {folder / 'completions.parquet'}")
            if before is not None:
                reporter.say(f"what was there of another evaluation: {before}")


def key_of(recipe: Recipe, tasks: Sequence[Task], identity: str) -> str:
    """What completions and their scores depend on, as a short text."""
    generation, precision = dataclasses.asdict(recipe.generation), recipe.mixed_precision
    parts: list[Any] = [identity, generation, precision, recipe.model.dtype]
    for task in tasks:
        terms = [(t.path, dict(t.args), t.weight) for t in task.scorer.terms.values()]
        parts.append([task.label, task.seed, task.num_samples, repr(task.sampling), terms])
        parts.append([p.ids for p in task.prompts])
        parts.append([p.columns for p in task.prompts])
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
