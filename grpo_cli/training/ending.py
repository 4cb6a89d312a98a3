"""Ends a run: writes its summary, or says where a stopped run is stored."""

from __future__ import annotations

from pathlib import Path

from grpo_cli.checkpoints import paths, retention
from grpo_cli.errors import TrainingError
from grpo_cli.reporting.alarms import Raised
from grpo_cli.reporting.machine import machine
from grpo_cli.reporting.reporter import readable, versions
from grpo_cli.training import resume
from grpo_cli.training.run import Run


def finish(run: Run) -> None:
    """Writes summary.json and the curves, and prints the closing table.

    Raises:
        TrainingError: the last checkpoint could not be written, or a callback's on_end failed.
    """
    state = run.state
    error = run.checkpointer.wait()
    if run.workers.max(float(error is not None)):
        raise TrainingError(f"training has finished, but {error}")
    run.callbacks.checkpoints(run)
    stopped = run.stopped_by
    if stopped is not None:
        message = f"ended after step {state.step}: {stopped.sentence}"
        run.reporter.alarmed(state.step, "stop", [Raised(stopped.rule, message)])
    saved = paths.steps_saved(run.folder)
    best = state.best_step if state.best_step in saved else None
    last = paths.shown(paths.checkpoint_path(run.folder, saved[-1])) if saved else None
    summary = {
        "recipe": run.recipe.recipe,
        "seed": run.recipe.seed,
        "steps": state.step,
        "stopped_by": None if stopped is None else stopped.rule,
        "stopped_because": None if stopped is None else stopped.sentence,
        "before": readable(state.before) if state.before else None,
        "after": readable(state.after) if state.after else None,
        "after_step": state.after_step,
        "best_checkpoint": paths.shown(paths.checkpoint_path(run.folder, best)) if best else None,
        "best_metric": run.recipe.eval.best if best else None,
        "best_value": state.best_value if best else None,
        "last_checkpoint": last,
        "seconds": round(state.total_seconds, 1),
        "num_tokens": state.num_tokens,
        "processes": run.workers.size,
        "device": str(run.workers.device),
        "machine": machine(run.workers.device),
        "versions": versions(),
    }
    run.reporter.finish(summary)
    failure: TrainingError | None = None
    try:
        run.callbacks.call(run, "on_end", summary=summary)
    except TrainingError as caught:  # the run is complete: it is pushed all the same
        failure = caught
    if run.workers.is_main:
        run.pusher.finish(lambda: run.interrupts.stop.is_requested)
        retention.prune(run.folder, **resume.keeping(run))  # checkpoints that were kept for pushes
        if failure is not None:  # on the main process only: torchrun ends all when one fails
            raise failure


def how_it_ended(run: Run, saved_in: Path | None) -> str:
    """Returns the closing message of a run that was stopped before its last step.

    Args:
        saved_in: the checkpoint of an interrupted step; None if the run ended after a step.
    """
    step, error = run.state.step, run.checkpointer.wait()
    if saved_in is None and step == 0:
        return "stopped before the first step; there is nothing new to save"
    path = saved_in or paths.checkpoint_path(run.folder, step)
    when = f"after step {step}"
    if paths.is_interrupted(path):
        in_evaluation = run.recovery.unreported is not None
        when = f"{when}, in its evaluation" if in_evaluation else f"in step {step + 1}"
    if error is not None:
        return f"stopped {when}; {error}"
    again = f"grpo train resume={paths.shown(run.folder)}"
    return f"stopped {when}; saved in {paths.shown(path)}; `{again}` continues it"
