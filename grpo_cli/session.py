"""One `grpo train` from meeting the other processes to parting from them, however it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_cli import build, checkpoint, train
from grpo_cli.distributed import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.prepare import Prepared
from grpo_cli.run import Run
from grpo_cli.stop import Stop, StoppedWhileStarting, end_of_job
from grpo_cli.watch import CLOSING_SECONDS, SAVING_SECONDS, Watch

REQUEUE_FILE = "GRPO_REQUEUE_FILE"  # made by a run that was told to end and can go on


def run_recipe(prepared: Prepared, command: list[str]) -> Run:
    """Builds a run and trains; returns it when it is done or was told to end.

    With several processes an error is told by the one that had it, and ends them all here.

    Args:
        command: the command line, kept beside the run.

    Raises:
        StoppedWhileStarting: it was told to end before there was anything to save.
    """
    recipe = prepared.recipe
    workers = Workers(recipe.device, recipe.mixed_precision, recipe.distributed)
    say: Callable[[str], None] = print if workers.is_main else lambda text: None
    stop = Stop(say, recipe.checkpoint.grace, end_of_job())
    watch = Watch(
        workers.rank, workers.size, prepared.folder, recipe.distributed.stall_minutes, say
    )
    watch.log_to_file()
    # It listens from the beginning, so that torchrun's SIGTERM ends no process that is to tell.
    stop.tell = watch.tell_stop
    stop.told = lambda: watch.stop_told
    stop.is_aftermath = lambda: watch.has_failed
    watch.is_starting = lambda: not stop.started
    watch.is_saving = checkpoint.is_being_written
    live: Run | None = None
    try:
        live = build.build(prepared, command, workers, stop)
        with without_long_pauses():
            train.train(live)
    except StoppedWhileStarting as early:
        if not watch.tell_stop_now(early.signal):  # torchrun told it to, as another has failed
            watch.leave(1)
        watch.close(done=False)
        raise
    except KeyboardInterrupt:  # a second Ctrl-C
        if live is not None:
            live.close()
        stop.release()
        watch.close()
        raise
    except BaseException as error:
        if live is None and (number := stopped_elsewhere(watch, error)) is not None:
            stop.release()
            watch.close(done=False)
            raise StoppedWhileStarting(number) from error
        if workers.size > 1:  # before anything is cleaned up, which may hang
            watch.tell(error, exit_code(error))
        if live is not None:
            at_most = None if workers.size == 1 else SAVING_SECONDS - CLOSING_SECONDS
            live.checkpointer.wait(at_most)
            live.close()
        if workers.size > 1:
            watch.leave(exit_code(error))
        stop.release()
        watch.close()
        raise
    live.close()
    watch.close()
    workers.close()
    return live


def stopped_elsewhere(watch: Watch, error: BaseException) -> int | None:
    """The signal that another process left for, if this error of building a run comes of that."""
    if isinstance(error, UserError | TrainingError) or watch.has_failed:
        return None
    return watch.stop_told


@contextlib.contextmanager
def without_long_pauses() -> Iterator[None]:
    """Garbage is looked for only among what is made inside.

    Looking through all that was imported takes a quarter of a second, at another moment on each
    process, and the others wait for it every time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def exit_code(error: BaseException) -> int:
    """Of a process that ends with this error."""
    return 2 if isinstance(error, UserError) else 1


def ask_for_requeue(number: int) -> bool:
    """Asks the batch script to queue the job again, where there is one; False of a Ctrl-C.

    A file says it, for exit codes survive neither torchrun nor srun. Every process makes it, for it
    may be the only one that was told in time.
    """
    path = os.environ.get(REQUEUE_FILE)
    if not path or number == signal.SIGINT:
        return False
    Path(path).touch()
    return True
