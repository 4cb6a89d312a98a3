"""Runs one `grpo probe`, from the model to the written results."""

from __future__ import annotations

from itertools import chain

from grpo_cli.checkpoints import paths
from grpo_cli.checkpoints.lock import Lock
from grpo_cli.config import parsing
from grpo_cli.data.stored_completions import rows_by_group, write_parquet
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import CannotLearn
from grpo_cli.evaluation.probe.run import FILE, ProbeParts, ProbeResult, run_probe
from grpo_cli.evaluation.probe.verdict import lines
from grpo_cli.files import write_text
from grpo_cli.generation.factory import make_generator
from grpo_cli.reporting.progress import Bar
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.scoring.bound_reward import TrainerState
from grpo_cli.training import inputs
from grpo_cli.training.prepare import Prepared

LEAST_SAMPLES, MOST_SAMPLES = 16, 64  # per prompt, unless a number is given


def probe(prepared: Prepared, prompts: int, samples: int | None) -> None:
    """Loads the model of a prepared recipe, probes it, writes and prints the result.

    Args:
        prompts, samples: see `commands.probe.ProbeOptions`.

    Raises:
        CannotLearn: the run cannot learn as it stands.
    """
    recipe, folder = prepared.recipe, prepared.folder
    workers = Workers(recipe.device, recipe.mixed_precision, recipe.distributed)
    with workers.raise_together():
        lock = Lock(folder) if workers.is_main else None
    try:
        reporter = Reporter(recipe, folder, workers.is_main)
        group = recipe.generation.num_generations
        samples = samples or max(LEAST_SAMPLES, min(group, MOST_SAMPLES))
        result = measured(prepared, prompts, samples, workers, reporter)
        with workers.raise_together():
            if workers.is_main:
                write(prepared, result, reporter)
    finally:
        if lock is not None:
            lock.release()
    if not result.verdict.can_learn:
        raise CannotLearn(
            f"{recipe.recipe}: cannot learn as it stands ({', '.join(result.verdict.reasons)}); "
            f"what was found: {paths.shown(folder / FILE)}"
        )


def measured(
    prepared: Prepared, number: int, samples: int, workers: Workers, reporter: Reporter
) -> ProbeResult:
    """Loads the model, and probes it with `number` prompts."""
    say, scorer = reporter.say, prepared.scorer
    with workers.raise_together():
        loaded = inputs.load_policy(prepared, workers, reporter)
    model, tokenizer = loaded.model, loaded.tokenizer
    stream = inputs.make_stream(prepared, loaded, say)
    prompts = list(stream.prompts)
    recipe = parsing.with_steps(prepared.recipe, len(prompts))
    prompts += inputs.longest_unknown(recipe, prompts)
    model = workers.place(model)
    inputs.check_fits(recipe, model, prompts)
    rollouter = inputs.make_rollouter(prepared, loaded, say)
    generator = make_generator(recipe, model, tokenizer, workers, prompts, say)
    for line in scorer.descriptions:
        say(line)
    state = TrainerState(max_steps=recipe.steps)
    parts = ProbeParts(recipe, workers, tokenizer, generator, stream, scorer, rollouter, state)
    bar = Bar(reporter.console, "probe", min(number, len(stream.prompts)))
    try:
        generator.update_weights(model, 0)
        return run_probe(parts, number, samples, progress=bar.update)
    finally:
        bar.close()
        generator.close()


def write(prepared: Prepared, result: ProbeResult, reporter: Reporter) -> None:
    """Writes probe.json and completions.parquet, and prints the result."""
    report, completions = prepared.folder / FILE, prepared.folder / "completions.parquet"
    write_text(report, result.as_json())
    write_parquet(completions, [*chain.from_iterable(rows_by_group(result.groups))])
    files = f"\nnumbers: {paths.shown(report)}; every completion: {paths.shown(completions)}"
    shown = lines(prepared.recipe.recipe, result.measured, result.verdict)
    for line in chain(shown, [files]):
        reporter.console.print(line, markup=False, soft_wrap=True)
