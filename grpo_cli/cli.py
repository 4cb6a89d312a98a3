"""The `grpo` command: compose, check, build, train or evaluate; exit codes and messages.

Exit codes: 0 done; 1 the run failed; 2 what was asked for is wrong; 130 and 143 stopped by Ctrl-C
and by SIGTERM, or 0 where a batch system is asked to start the run again, or torchrun would.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_cli import __version__, parsing
from grpo_cli.compose import (
    BARE,
    complete,
    compose_and_call,
    explain,
    given_keys,
    recipe_files,
    split_options,
)
from grpo_cli.errors import TrainingError, UserError, listed, nearest
from grpo_cli.stop import is_started_again

SAYS_WHY_SECONDS = 3.0  # for a node's first process, where all of them make the same mistake

USAGE = """\
grpo: train language models with GRPO

  grpo train [recipe=NAME] [key=value ...]   train; the default recipe is arithmetic_tiny
  grpo eval CHECKPOINT [key=value ...]       evaluate a checkpoint, or any model with benchmark=NAME
  grpo score reward=NAME input=FILE          try rewards out on completions that are there
  grpo serve model=PATH ...                  serve a model with vLLM for generation=vllm_server
  grpo slurm recipe=NAME nodes=N ...         write (and submit) a SLURM batch script for a recipe
  grpo preflight                             check the nodes of a job before it trains
  grpo export CHECKPOINT FOLDER              a plain model folder from a checkpoint
  grpo recipes                               the recipes there are
  grpo rewards [MODULE ...]                  the reward functions there are
  grpo train --help                          groups and knobs (with recipe=NAME: of that recipe)
  grpo train recipe=NAME --cfg job           the composed recipe; runs nothing
  eval "$(grpo -sc install=bash)"            shell completion (also zsh, fish)
"""


def main() -> None:
    """Entry point of the console script."""
    # Threads that spin while they wait make a step 10 times slower where others use the cores too.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):  # a completion may hold what the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run_command(sys.argv[1:]))


def run_command(argv: list[str]) -> int:
    """Runs one `grpo` command line and returns its exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises instead of printing and exiting
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
            raise UserError(
                f"grpo {argv[0]}: there is no such command; there are {listed(COMMANDS)}."
                + nearest(argv[0], COMMANDS)
            )
    except UserError as error:
        return _leave(str(error), 2, everywhere=error.alone)
    except (HydraException, OmegaConfBaseException) as error:
        return _leave(explain(error), 2)
    except TrainingError as error:
        return _leave(str(error), 1, everywhere=error.alone)
    except Stopped as stopped:
        in_order = stopped.requeued or is_started_again()
        return _leave(str(stopped), 0 if in_order else 128 + stopped.signal)
    except BrokenPipeError:  # `grpo ... | head` has read enough; nothing is left to flush to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        if argv[0] == "eval":
            return _leave("stopped at once; the same words go on where it was", 130)
        return _leave("stopped at once; what came after the last checkpoint is not saved", 130)
    return 0


class Stopped(Exception):  # noqa: N818 - no error: the command did as it was told
    """What was told to stop, and did so in good order."""

    def __init__(self, signal: int, message: str, *, requeued: bool = False) -> None:
        """requeued: whether a batch system starts it again."""
        super().__init__(message)
        self.signal, self.requeued = signal, requeued


def _leave(message: str | None, code: int, *, everywhere: bool = False) -> int:
    rank = os.environ.get("RANK", "0")
    # Once a node, for its disk may be what is wrong.
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stdout.flush()
        print(
            f"grpo: {message}" if rank == "0" else f"grpo (process {rank}): {message}",
            file=sys.stderr,
        )
    elif code == 2:
        time.sleep(SAYS_WHY_SECONDS)  # torchrun ends the others as soon as one has ended
    return code


def train(argv: list[str]) -> None:
    """`grpo train`: composes the recipe, checks it, builds the run and trains."""

    def task(cfg: DictConfig) -> None:
        from grpo_cli import prepare

        prepared = prepare.for_training(parsing.parse(cfg, given_keys(cfg)))
        from grpo_cli import saving, session
        from grpo_cli.stop import StoppedWhileStarting

        try:
            live = session.run_recipe(prepared, ["grpo", "train", *argv])
        except StoppedWhileStarting as early:
            prepared.scorer.crew.close()
            raise Stopped(
                early.signal, str(early), requeued=session.ask_for_requeue(early.signal)
            ) from early
        if live.left_at is not None or not live.is_over:
            number = live.stopped_by
            assert number is not None, "a run ends early only when it is told to"
            raise Stopped(
                number, saving.how_it_ended(live), requeued=session.ask_for_requeue(number)
            )

    compose_and_call(argv, task)


def evaluate(argv: list[str]) -> None:
    """`grpo eval`: a model on held-out rows or benchmarks, stored completions, two evaluations."""
    from grpo_cli import eval_command

    eval_command.main(argv)


# Hydra's options that print something, and run nothing.
SHOWING = ("--help", "-h", "--hydra-help", "--info", "-i", "--cfg", "-c")


def score(argv: list[str]) -> None:
    """`grpo score`: the recipe's rewards, or reward=NAME, on completions that are there."""
    from grpo_cli import score as scores

    options, words = split_options(argv)
    has_recipe = any(w.startswith("recipe=") for w in words)
    if {"-m", "--multirun"} & {*options}:
        raise UserError("grpo score: scores once; -m is for grpo train and grpo eval.")
    if {"-h", "--help"} & {*options}:
        print(scores.USAGE)
    if any(o.partition("=")[0] in SHOWING for o in options):
        rest = [w for w in words if not scores.is_own(w)]
        compose_and_call([*rest, *options], lambda cfg: None, BARE)
        return
    request, rest = scores.split_words(words)
    if not has_recipe and not any(w.lstrip("+").startswith("reward") for w in rest):
        raise UserError("grpo score: say what to score with: reward=NAME or recipe=NAME.")

    def task(cfg: DictConfig) -> None:
        scores.score(request, parsing.parse(cfg, given_keys(cfg)), has_recipe)

    compose_and_call([*rest, *options], task, BARE)


def serve(argv: list[str]) -> None:
    """`grpo serve`: starts vLLM's server with a model, or with that of a recipe."""
    from grpo_cli import serve as server

    options, words = split_options(argv)
    if {"-h", "--help"} & {*options}:
        print(server.usage(), end="")
        return
    if {"-m", "--multirun"} & {*options}:
        raise UserError("grpo serve: serves one model; -m is for grpo train and grpo eval.")
    settings, rest = server.split_words(words)
    if options and not rest:
        raise UserError(f"{options[0]}: is an option of recipes; add recipe=NAME.")

    def task(cfg: DictConfig | None) -> None:
        recipe = None if cfg is None else parsing.parse(cfg, given_keys(cfg))
        ended_by = server.serve(settings, recipe, rest)
        raise Stopped(ended_by, f"the server on port {settings.port} is stopped")

    if rest:
        compose_and_call([*rest, *options], task)
    else:
        task(None)


def slurm(argv: list[str]) -> None:
    """`grpo slurm`: writes a batch script that trains a recipe on many nodes, and submits it."""
    from grpo_cli import slurm as batch

    batch.main(argv)


def preflight(argv: list[str]) -> None:
    """`grpo preflight`: whether the nodes of a job can train together."""
    from grpo_cli import preflight as nodes

    nodes.main(argv)


def export(argv: list[str]) -> None:
    """`grpo export CHECKPOINT FOLDER`: a model folder that transformers loads."""
    from grpo_cli import export as models

    models.main(argv)


def recipes(argv: list[str]) -> None:
    """`grpo recipes`: one line each."""
    for path in recipe_files():
        text = yaml.safe_load(path.read_text(encoding="utf-8"))
        print(f"{path.stem:16} {text['description']}")


def rewards(argv: list[str]) -> None:
    """`grpo rewards [MODULE ...]`: name, what it is, the columns it needs, its arguments."""
    from grpo_cli import registry
    from grpo_cli.rewards import traits_of

    if {"-h", "--help"} & {*argv}:
        print(
            "grpo rewards [MODULE ...]: the reward functions there are, and those of your modules"
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


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "eval": evaluate,
    "score": score,
    "serve": serve,
    "slurm": slurm,
    "preflight": preflight,
    "export": export,
    "recipes": recipes,
    "rewards": rewards,
}


if __name__ == "__main__":
    main()
