"""The `grpo` command: runs one of its verbs, prints its errors, returns its exit code.

Exit codes: 0 done; 1 the run failed; 2 the command line or the recipe is wrong; 3 a probe found
that the run cannot learn as it stands; 129, 130 and 143 stopped by SIGHUP, by Ctrl-C and by
SIGTERM, or 0 if a batch system is asked to start the run again or torchrun would.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_cli import __version__
from grpo_cli.checkpoints import paths
from grpo_cli.checkpoints.lookup import with_recipe_of_run
from grpo_cli.config.command_line import recipe_files
from grpo_cli.config.compose import BARE, complete, compose_and_call, error_message, given_keys
from grpo_cli.config.interpolation import masked, printable
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
from grpo_cli.files import read_json, read_yaml

# Errors of a full or read-only disk. They are not bugs, and are printed as one sentence.
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

  grpo train [FILE] [key=value ...]    train a model, by a recipe
  grpo recipes                         list the recipes that ship
  grpo rewards [MODULE ...]            list the reward functions

Before a run
  grpo plan [FILE] [gpu=h100-80gb]     predict memory and disk
  grpo probe [FILE]                    find out whether the run can learn
  grpo score reward=NAME input=FILE    try reward functions without a model
  grpo explain [FILE] KEY              print a knob's value and what sets it
  grpo doctor [FILE]                   print what this machine lacks

During and after it
  grpo watch RUN                       show a run in the terminal
  grpo report RUN [OTHER]              write a run, or two, as one HTML file
  grpo show RUN [--step N]             print completions
  grpo replay RUN --step N             recompute a kept step
  grpo eval CHECKPOINT                 evaluate a checkpoint or any model
  grpo export CHECKPOINT FOLDER        write a plain model folder

On a cluster
  grpo slurm [FILE] nodes=N ...        write and submit a SLURM batch script
  grpo serve model=NAME                start a vLLM server to sample from

Examples
  grpo train recipe=arithmetic_tiny
  grpo train my.yaml steps=50 adapter=lora

`grpo COMMAND --help` shows the main options, `grpo help COMMAND` all of them.
All pages are in docs/. Shell completion: eval "$(grpo -sc install=bash)"
"""
HELP = {
    "train": """\
grpo train [FILE | recipe=NAME] [key=value ...]

Trains a model with GRPO and writes the run to outputs/NAME. Without a recipe it
starts from `chat`, for which a model, rows and a reward have to be given.

  model.path=NAME                       Hub name, folder, or a run
  dataset.train=ROWS                    Hub name, .jsonl, .csv or .parquet file
  dataset.eval=ROWS                     Held-out rows
  reward.NAME.function=MODULE:FUNCTION  Your reward, or reward=[math]
  steps=100                             Number of steps, or epochs=N
  prompts_per_step=16                   Prompts of a step, over all processes
  generation.num_generations=8          Completions of each prompt
  generation.max_completion_tokens=256  Length limit of a completion
  optimizer.learning_rate=1e-05         Peak learning rate
  loss=dapo                             grpo, dr_grpo, gspo, cispo and others
  adapter=none                          lora, qlora, dora and others

Examples:
  grpo train recipe=arithmetic_tiny
  grpo train my.yaml loss=gspo --steps 50
  grpo train resume=outputs/my

`grpo explain KEY` describes a knob, `grpo help train` lists all of them.
""",
    "recipes": "grpo recipes: prints the name and the description of each shipped recipe\n",
    "rewards": """\
grpo rewards [MODULE ...]: prints the shipped reward functions and those in your
modules, with the columns that they read and the arguments that they take
""",
}


def main() -> None:
    """Entry point of the console script."""
    die_with_torchrun()
    for name, value in settings_of_cpu().items():
        os.environ.setdefault(name, value)
    # A completion may hold characters that the terminal cannot show.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _print_traceback
    code = run_command(sys.argv[1:])
    workers = sys.modules.get("grpo_cli.distributed.workers")  # not imported for it: torch is slow
    (workers.exit_process if workers else sys.exit)(code)


def settings_of_cpu() -> dict[str, str]:
    """Returns the environment variables that OpenMP and oneDNN read when torch is imported.

    oneDNN and PyTorch cache the primitives of 1,024 shapes each by default. Micro-batches have new
    shapes in each step, so that `recipe=chat_sums` with bfloat16 grew by 70 MB a step.
    """
    caches = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "128")
    return {"GOMP_SPINCOUNT": str(spin_count()), **caches}


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
    # peft imports bitsandbytes, which warns on some CPUs that it found no 4-bit kernel.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        wants_all = argv[:1] == ["help"]
        argv = argv[wants_all:] or ["--help"]
        if argv[0] in ("-h", "--help"):
            print(USAGE, end="")
        elif wants_all and argv[0] in COMMANDS:
            show_all(argv[0])
        elif argv[0] in COMMANDS and asks_for_help(*argv):
            print(help_of(argv[0]), end="")
        elif argv[0] == "--version":
            print(__version__)
        elif argv[0] in ("-sc", "--shell_completion"):
            complete(argv, COMMANDS)
        elif argv[0] in COMMANDS:
            check_working_folder()
            COMMANDS[argv[0]](argv[1:])
        else:
            is_recipe = argv[0].startswith("--config") or argv[0].endswith(".yaml")
            hint = " Did you mean grpo train?" if is_recipe else nearest(argv[0], COMMANDS)
            hint = " Did you mean grpo train resume=RUN?" if argv[0] == "resume" else hint
            raise UserError(
                f"grpo {argv[0]}: there is no such command; there are {listed(COMMANDS)}.{hint}"
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
    except KeyboardInterrupt:
        said = filter(None, ["stopped immediately", WHEN_STOPPED.get(argv[0])])
        return _leave("; ".join(said), 130)
    except Exception as error:
        if isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
            place = f"{error.filename}: " if error.filename else ""
            return _leave(f"{place}{error.strerror}.", 1, everywhere=True)
        is_quit = type(error).__module__ == "bdb"  # `q` in a debugger
        if is_quit or os.environ.get("GRPO_DEBUG"):
            raise
        return _leave(internal_error(error), 1, everywhere=True)
    return 0


def internal_error(error: Exception) -> str:
    """Returns the line to report about an unexpected error: its type, text and last calls."""
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    calls = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    return (
        f"internal error: {type(error).__name__}: {error} ({calls}; grpo {__version__}). Please "
        "report this line and the command; GRPO_DEBUG=1 shows the traceback."
    )


def _leave(message: str | None, code: int, *, everywhere: bool = False) -> int:
    rank = os.environ.get("RANK", "0")
    # Once per node: a disk error may occur on one node only.
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stdout.flush()
        who = "grpo" if rank == "0" else f"grpo (process {rank})"
        print(printable(f"{who}: {message}"), file=sys.stderr)
    elif code in (2, 3):
        time.sleep(PRINT_SECONDS)  # torchrun ends the others as soon as one has ended
    return code


def train(argv: list[str]) -> list[Path]:
    """`grpo train`: composes the recipe, checks it, builds the run and trains.

    Returns:
        The folder of each run; several with -m.
    """
    runs: dict[Path, list[str]] = {}
    joined: list[Any] = []  # the `Workers` of the last run; the jobs of a sweep share their group

    def task(cfg: DictConfig) -> None:
        from grpo_cli.training import prepare

        folder = Path(cfg.output_dir).expanduser().absolute()
        runs[folder] = HydraConfig.get().overrides.task
        recipe = prepare.resolved(prepare.parse(cfg, given_keys(cfg)))
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
            joined[:] = [live.workers]
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
    for workers in joined:
        workers.close()
    if len(runs) > 1 and os.environ.get("RANK", "0") == "0":
        print_runs(runs)
    return [*runs]


def print_runs(runs: Mapping[Path, Sequence[str]]) -> None:
    """Prints a table of runs with the words in which they differ, and results before and after.

    These are accuracies, or mean rewards if a run's rewards have values other than 0 and 1.
    """
    from rich.console import Console  # late: slow
    from rich.table import Table

    found = {folder: read_json(folder / "summary.json") for folder in runs}
    ends = {folder: [s["before"] or {}, s["after"] or {}] for folder, s in found.items()}
    key = "reward" if any("graded" in e for both in ends.values() for e in both) else "accuracy"
    table = Table("run", "differs in", "before", "after", title=f"held-out {key}")
    common = set.intersection(*map(set, runs.values()))
    for folder, words in runs.items():
        differing = " ".join(word for word in words if word not in common)
        table.add_row(paths.shown(folder), differing, *(str(e.get(key, "-")) for e in ends[folder]))
    Console().print(table)


def asks_for_help(command: str, *words: str) -> bool:
    """Returns whether a command line asks for help, or lacks the words that it needs."""
    if {"-h", "--help"} & {*words} and "compare" not in words:
        return not {"--cfg", "--info"} & {*words}
    return not words and command in ("show", "watch", "report", "replay", "export")


def help_of(command: str, name: str = "HELP") -> str:
    """Returns the help of a command, which fits a screen; `ALL` is that with every word."""
    if command in HELP:
        return HELP[command]
    module = importlib.import_module(f"grpo_cli.commands.{MODULES[command]}")
    return str(getattr(module, name, module.HELP))


def show_all(command: str) -> None:
    """Prints every word of a command, in a pager if there is a terminal."""
    import pydoc

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print(help_of(command, "ALL"))
        if command in ("train", "eval", "probe", "score"):
            compose_and_call(["--help"], lambda cfg: None, BARE)
    pydoc.pager(printed.getvalue())


def verb(module: str) -> Callable[[list[str]], object]:
    """Returns the `main` of a module of grpo_cli.commands, which is imported when it is called."""

    def main(argv: list[str]) -> object:
        return importlib.import_module(f"grpo_cli.commands.{module}").main(argv)

    return main


def check_working_folder() -> None:
    """Raises a UserError if the working folder has been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working folder has been deleted; change to another one.") from error


def recipes(argv: list[str]) -> None:
    """`grpo recipes`: prints the name and the description of each shipped recipe."""
    files = recipe_files()
    width = max(len(path.stem) for path in files)
    for path in files:
        print(f"{path.stem:{width}} {read_yaml(path)['description']}")


def rewards(argv: list[str]) -> None:
    """`grpo rewards [MODULE ...]`: prints each reward function with its columns and arguments."""
    from grpo_cli.rewards import traits_of
    from grpo_cli.scoring import registry
    from grpo_cli.scoring.bound_reward import Signature

    registry.import_modules(argv, "grpo rewards")
    for name in sorted(registry.known()):
        function = registry.resolve(name)
        signature, timeout = Signature.of(function), traits_of(function).timeout
        columns = listed([*signature.required, *(f"[{c}]" for c in signature.optional)])
        needed = signature.needed
        arguments = [f"{a} (to be set)" if a in needed else a for a in signature.arguments]
        arguments += [a for a in signature.optional if a not in signature.arguments]
        first_line = ((function.__doc__ or "").strip().splitlines() or [""])[0]
        print(f"{name:16} {first_line}")
        print(f"{'':16} columns: {columns}; arguments: {listed(arguments)}")
        if timeout is not None:
            print(f"{'':16} at most {timeout:g} s for a completion")


MODULES = {
    "eval": "evaluate",
    **{name: name for name in (
        "plan", "probe", "score", "show", "watch", "explain", "report", "replay", "serve", "slurm",
        "doctor", "export",
    )},
}  # fmt: skip
COMMANDS: dict[str, Callable[[list[str]], object]] = {
    "train": train,
    **{name: verb(module) for name, module in MODULES.items()},
    "recipes": recipes,
    "rewards": rewards,
}


if __name__ == "__main__":
    main()
