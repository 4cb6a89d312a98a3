"""Runs `grpo train`, from joining the other processes to a successful or failed end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from grpo_cli.checkpoints import checkpointer
from grpo_cli.distributed.stop_signal import StoppedWhileStarting, StopSignal, end_of_job
from grpo_cli.distributed.supervisor import CLOSING_SECONDS, SAVING_SECONDS, Supervisor
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.records import Prompt
from grpo_cli.reporting.alarms import Alarms
from grpo_cli.reporting.report.page import Report
from grpo_cli.reporting.tracking import Trackers
from grpo_cli.training import build, loop
from grpo_cli.training.evaluation import Evaluation
from grpo_cli.training.kept_steps import KeptSteps
from grpo_cli.training.plan import PlanRecord
from grpo_cli.training.prepare import Prepared
from grpo_cli.training.run import Run

REQUEUE_FILE = "GRPO_REQUEUE_FILE"  # created by a run that was stopped and can be resumed


def features(run: Run, prompts: Sequence[Prompt], evaluator: Evaluator | None) -> Iterator[object]:
    """Yields the callbacks of `grpo train` that come before the recipe's."""
    recipe, reporter = run.recipe, run.reporter
    if recipe.tracking.backend != ["none"]:
        yield Trackers(recipe.tracking, run.workers, reporter.say)
    if evaluator is not None:
        yield Evaluation(run, evaluator)
    yield Alarms(recipe, reporter.alarmed)  # after the evaluation: it follows these metrics too
    if recipe.log.keep_steps:
        yield KeptSteps(run)
    yield PlanRecord(run, prompts)
    if recipe.log.report:
        yield Report(reporter.say)


def run_recipe(prepared: Prepared, command: list[str]) -> Run:
    """Builds a run, trains, and returns the run when it is complete or was stopped by a signal.

    With several processes, the process that has an error reports it, and all of them exit here.

    Args:
        command: the command line, stored with the run.

    Raises:
        StoppedWhileStarting: a signal arrived before there was anything to save.
    """
    recipe = prepared.recipe
    workers = Workers(recipe.device, recipe.mixed_precision, recipe.distributed)
    say: Callable[[str], None] = print if workers.is_main else lambda text: None
    stop = StopSignal(say, recipe.checkpoint.grace, end_of_job())
    supervisor = Supervisor(
        workers.rank, workers.size, prepared.folder, recipe.distributed.stall_minutes
    )
    supervisor.log.redirect()
    # From the beginning, so that torchrun's SIGTERM ends no process before it has reported.
    stop.send = supervisor.send_stop
    stop.received = lambda: supervisor.stop_signal
    stop.is_aftermath = lambda: supervisor.has_failed
    supervisor.ending.is_starting = lambda: not stop.started
    supervisor.ending.ends_at = lambda: stop.ends_at
    supervisor.ending.is_saving = checkpointer.is_being_written
    live: Run | None = None
    try:
        live = build.build(prepared, command, workers, stop, features)
        supervisor.ending.on_failure = partial(live.reporter.status.end, "failed")
        with without_long_pauses():
            loop.train(live)
    except StoppedWhileStarting as early:
        if not supervisor.send_stop_now(early.signal):  # another process failed: torchrun's signal
            supervisor.ending.leave(1)
        supervisor.close()
        raise
    except KeyboardInterrupt as error:  # a second Ctrl-C
        if live is not None:
            live.close(error)
        stop.release()
        supervisor.close()
        raise
    except BaseException as error:
        is_own = isinstance(error, UserError | TrainingError) or supervisor.has_failed
        number = supervisor.stop_signal  # it may have stopped another process, which caused this
        if live is None and not is_own and number is not None:
            stop.release()
            supervisor.close()
            raise StoppedWhileStarting(number) from error
        if workers.size > 1:  # before the cleanup, which may hang
            supervisor.report(error, exit_code(error))
        if live is not None:
            at_most = None if workers.size == 1 else SAVING_SECONDS - CLOSING_SECONDS
            live.checkpointer.wait(at_most)
            cause = supervisor.failure  # it may have caused this process's error
            live.close(error if cause is None else TrainingError(cause.text))
        if workers.size > 1:
            supervisor.ending.leave(exit_code(error))
        stop.release()
        supervisor.close()
        raise
    live.close()
    supervisor.close()
    return live


@contextlib.contextmanager
def without_long_pauses() -> Iterator[None]:
    """Limits garbage collection to objects created within the context.

    A collection over all imported objects takes a quarter of a second. It occurs at a different
    time on each process, and the others wait for it each time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a process that ends with this error."""
    return 2 if isinstance(error, UserError) else 1


def ask_for_requeue(number: int) -> bool:
    """Asks the batch script, if there is one, to requeue the job; returns False after Ctrl-C.

    The request is a file, since exit codes survive neither torchrun nor srun. Every process creates
    it, since it may be the only one that the signal reached in time.
    """
    path = os.environ.get(REQUEUE_FILE)
    if not path or number == signal.SIGINT:
        return False
    Path(path).touch()
    return True
