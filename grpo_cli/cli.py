"""The `grpo` command: runs one of its verbs, prints its errors, returns its exit code.

Exit codes: 0 done; 1 the run failed; 2 the command line or the recipe is wrong; 3 a probe found
that the run cannot learn as it stands; 129, 130 and 143 stopped by SIGHUP, by Ctrl-C and by
SIGTERM, or 0 if a batch system is asked to start the run again or torchrun would.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_cli import __version__
from grpo_cli.checkpoints.lookup import with_recipe_of_run
from grpo_cli.config.compose import (
    complete,
    compose_and_call,
    error_message,
    given_keys,
    recipe_files,
)
from grpo_cli.config.interpolation import masked
from grpo_cli.distributed.stop_signal import die_with_torchrun, is_started_again
from grpo_cli.errors import (
    NO_READER,
    CannotLearn,
    Stopped,
    TrainingError,
    UserError,
    listed,
    lost_reader,
    nearest,
)

# Errors of a full or read-only disk. They are no bugs, and are printed as one sentence.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
PRINT_SECONDS = 3.0  # time for a node's first process to print an error that all raise
RUNNING = Path("/proc/loadavg")  # its fourth field: threads that run now / all threads
SPINS_ALONE, SPINS_SHARED = 4000, 1000
WHEN_STOPPED = {
    "train": "everything after the last checkpoint is lost",
    "eval": "the same command resumes the evaluation",
}

USAGE = """\
grpo: train language models with GRPO

  grpo train [recipe=NAME] [key=value ...]   train a model; the default recipe is arithmetic_tiny
  grpo plan [recipe=NAME] [gpu=h100-80gb]    predict the memory and disk of a run
  grpo probe recipe=NAME                     find out whether a run can learn, before it trains
  grpo eval CHECKPOINT [key=value ...]       evaluate a checkpoint, or any model on benchmark=NAME
  grpo score reward=NAME input=FILE          try reward functions on stored completions
  grpo show RUN [--step=N]                   print a run's completions, turn by turn
  grpo watch RUN                             show a run while it runs, or after it
  grpo explain recipe=NAME KEY               print a knob's value and the place that sets it
  grpo report RUN [OTHER]                    write a run, or two, as one HTML file to look through
  grpo replay RUN --step=N                   recompute a kept step and compare its metrics
  grpo serve model=PATH ...                  start a vLLM server that training can sample from
  grpo slurm recipe=NAME nodes=N ...         write (and submit) a SLURM batch script for a recipe
  grpo doctor [recipe=NAME]                  print what this machine has, and what recipes lack
  grpo export CHECKPOINT FOLDER              write a checkpoint's model as a plain model folder
  grpo recipes                               list the recipes
  grpo rewards [MODULE ...]                  list the reward functions, also those of your modules

  grpo COMMAND --help                        print what a command takes
  grpo train recipe=NAME --help              print the groups and knobs of a recipe
  grpo train recipe=NAME --cfg job           print the composed recipe and run nothing
  eval "$(grpo -sc install=bash)"            switch on shell completion (also zsh, fish)
"""


def main() -> None:
    """Entry point of the console script."""
    die_with_torchrun()
    os.environ.setdefault("GOMP_SPINCOUNT", str(spin_count()))
    # A completion may hold characters that the terminal cannot show.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _print_traceback
    code = run_command(sys.argv[1:])
    workers = sys.modules.get("grpo_cli.distributed.workers")  # not imported for it: torch is slow
    (workers.exit_process if workers else sys.exit)(code)


def spin_count() -> int:
    """Returns the number of spins of an OpenMP thread before it sleeps (GOMP_SPINCOUNT).

    Waking a thread takes as long as a small matrix product of decoding. But threads that never stop
    spinning make a step 10 times slower if other programs use the cores too.
    """
    try:
        running = int(RUNNING.read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):  # not on Linux
        return SPINS_SHARED
    return SPINS_ALONE if running <= 1 else SPINS_SHARED  # 1: this thread


def _print_traceback(*error: Any) -> None:
    """Prints the traceback of an unexpected error, without secrets."""
    print(masked("".join(traceback.format_exception(*error))), end="", file=sys.stderr)


def run_command(argv: list[str]) -> int:
    """Runs one `grpo` command line and returns its exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises instead of printing and exiting
    # peft imports bitsandbytes, which warns on some CPUs that it found no 4-bit kernel.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(USAGE, end="")
        elif argv[0] == "--version":
            print(__version__)
        elif argv[0] in ("-sc", "--shell_completion"):
            complete(argv, COMMANDS)
        elif argv[0] in COMMANDS:
            COMMANDS[argv[0]](argv[1:])
        else:
            is_recipe = argv[0].startswith("--config") or argv[0].endswith(".yaml")
            raise UserError(
                f"grpo {argv[0]}: there is no such command; there are {listed(COMMANDS)}."
                + (" Did you mean grpo train?" if is_recipe else nearest(argv[0], COMMANDS))
            )
    except UserError as error:
        return _leave(str(error), 2, everywhere=error.alone)
    except (HydraException, OmegaConfBaseException) as error:
        return _leave(error_message(error), 2)
    except TrainingError as error:
        return _leave(str(error), 1, everywhere=error.alone)
    except CannotLearn as found:
        return _leave(str(found), 3)
    except Stopped as stopped:
        resumes = stopped.requeued or is_started_again()
        return _leave(str(stopped), 0 if resumes else 128 + stopped.signal)
    except (BrokenPipeError, SystemExit) as error:  # `grpo ... | head` has read enough
        if not lost_reader(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if argv[0] in WHEN_STOPPED:
            return _leave(f"ended: {NO_READER}; {WHEN_STOPPED[argv[0]]}", 1)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        place = f"{error.filename}: " if error.filename else ""
        return _leave(f"{place}{error.strerror}.", 1, everywhere=True)
    except KeyboardInterrupt:
        said = filter(None, ["stopped immediately", WHEN_STOPPED.get(argv[0])])
        return _leave("; ".join(said), 130)
    return 0


def _leave(message: str | None, code: int, *, everywhere: bool = False) -> int:
    rank = os.environ.get("RANK", "0")
    # Once per node: a disk error may occur on one node only.
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stdout.flush()
        who = "grpo" if rank == "0" else f"grpo (process {rank})"
        print(masked(f"{who}: {message}"), file=sys.stderr)
    elif code in (2, 3):
        time.sleep(PRINT_SECONDS)  # torchrun ends the others as soon as one has ended
    return code


def train(argv: list[str]) -> None:
    """`grpo train`: composes the recipe, checks it, builds the run and trains."""

    def task(cfg: DictConfig) -> None:
        from grpo_cli.training import prepare

        recipe = prepare.with_stored_dtype(prepare.parse(cfg, given_keys(cfg)))
        if message := prepare.finished(recipe):
            if os.environ.get("RANK", "0") == "0":
                print(message)
            return
        prepared = prepare.for_training(recipe)
        from grpo_cli.commands import train
        from grpo_cli.distributed.stop_signal import StoppedWhileStarting
        from grpo_cli.training import ending

        try:
            live = train.run_recipe(prepared, ["grpo", "train", *argv])
        except StoppedWhileStarting as early:
            prepared.close()
            raise Stopped(
                early.signal, str(early), requeued=train.ask_for_requeue(early.signal)
            ) from early
        if live.recovery.interrupted is not None or not live.is_over:
            number = live.interrupts.signal
            assert number is not None, "a run ends early only when a signal asks it to"
            how = ending.how_it_ended(live, live.recovery.interrupted)
            raise Stopped(number, how, requeued=train.ask_for_requeue(number))

    compose_and_call(with_recipe_of_run(argv), task)


def verb(module: str) -> Callable[[list[str]], None]:
    """Returns the `main` of a module of grpo_cli.commands, which is imported when it is called."""

    def main(argv: list[str]) -> None:
        importlib.import_module(f"grpo_cli.commands.{module}").main(argv)

    return main


def recipes(argv: list[str]) -> None:
    """`grpo recipes`: prints the name and the description of each shipped recipe."""
    if {"-h", "--help"} & {*argv}:
        print("grpo recipes: prints the name and the description of each shipped recipe")
        return
    files = recipe_files()
    width = max((len(path.stem) for path in files), default=0)
    for path in files:
        text = yaml.safe_load(path.read_text(encoding="utf-8"))
        print(f"{path.stem:{width}} {text['description']}")


def rewards(argv: list[str]) -> None:
    """`grpo rewards [MODULE ...]`: prints each reward function with its columns and arguments."""
    from grpo_cli.rewards import traits_of
    from grpo_cli.scoring import registry

    if {"-h", "--help"} & {*argv}:
        print(
            "grpo rewards [MODULE ...]: prints the reward functions, also those of your modules, "
            "with the\ncolumns that they read and the arguments that they take"
        )
        return
    registry.import_modules(argv, "grpo rewards")
    for name in sorted(registry.known()):
        function = registry.resolve(name)
        signature, timeout = registry.Signature.of(function), traits_of(function).timeout
        columns = listed([*signature.required, *(f"[{c}]" for c in signature.optional)])
        needed = signature.needed
        arguments = [f"{a} (to be set)" if a in needed else a for a in signature.arguments]
        first_line = ((function.__doc__ or "").strip().splitlines() or [""])[0]
        print(f"{name:16} {first_line}")
        print(f"{'':16} columns: {columns}; arguments: {listed(arguments)}")
        if timeout is not None:
            print(f"{'':16} at most {timeout:g} s for a completion")


IN_MODULES = (
    "plan", "probe", "score", "show", "watch", "explain", "report", "replay", "serve", "slurm",
    "doctor", "export",
)  # fmt: skip
COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "eval": verb("evaluate"),
    **{name: verb(name) for name in IN_MODULES},
    "recipes": recipes,
    "rewards": rewards,
}


if __name__ == "__main__":
    main()
