"""A run that ends before its first step, or early, and what the others and the batch job learn."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli import cli
from grpo_cli.commands import train
from grpo_cli.distributed.job_store import Failure
from grpo_cli.distributed.settings import Distributed
from grpo_cli.distributed.stop_signal import StoppedWhileStarting, StopSignal
from grpo_cli.distributed.supervisor import Supervisor
from grpo_cli.distributed.workers import Workers, exit_process
from grpo_cli.errors import Stopped
from grpo_cli.reporting.run_folder import RunFolder
from grpo_cli.reporting.status import Status
from grpo_cli.training import build
from tests import programs


def launch(folder: Path, mode: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = ["-m", "tests.commands.test_train", str(folder), mode]
    return programs.run(programs.torchrun(2, *program), **environment)


@pytest.mark.programs
def test_a_signal_to_one_process_while_it_starts_ends_all(tmp_path: Path) -> None:
    asked = tmp_path / "requeue"
    found = launch(tmp_path, "signal", GRPO_REQUEUE_FILE=str(asked))
    assert found.returncode == 0, found.stderr
    ends = sorted((tmp_path / f"end-{rank}").read_text() for rank in (0, 1))
    assert ends == ["stopped by 15"] * 2, found.stderr
    assert "is gone" not in found.stdout + found.stderr, "nobody is to blame"
    assert "Error" not in found.stderr
    assert asked.exists()


@pytest.mark.programs
def test_a_sweep_of_several_processes_trains_all_jobs_and_compares_rewards(tmp_path: Path) -> None:
    words = [
        "train", "-m", "recipe=arithmetic_tiny", "seed=0,1", f"output_dir={tmp_path / 'run'}",
        "reward=[length]", "reward.length.args.target=9", "steps=1", "prompts_per_step=2",
        "model.build.hidden_size=32", "model.build.intermediate_size=64",
        "model.build.num_layers=1", "model.build.warmup_steps=2",
        "dataset.eval_limit=2", "eval.at_start=false", "checkpoint.every=0", "log.report=false",
    ]  # fmt: skip
    found = programs.run(programs.torchrun(2, "-m", "-m", "grpo_cli", *words), COLUMNS="200")
    assert found.returncode == 0, found.stderr
    table = found.stdout.rpartition("held-out reward")[2]
    for seed in (0, 1):
        summary = json.loads((tmp_path / f"run-{seed}" / "summary.json").read_text())
        assert summary["processes"] == 2
        assert re.search(rf"run-{seed} │ seed={seed} +│ - +│ {summary['after']['reward']} ", table)


@pytest.mark.slow
def test_a_process_that_waits_where_no_python_runs_is_ended(tmp_path: Path) -> None:
    found = launch(tmp_path, "stuck")
    assert "exitcode  : 143" in found.stderr, found.stderr
    assert (tmp_path / "end-1").read_text() == "stopped by 15"
    assert not (tmp_path / "end-0").exists()


def test_a_failure_elsewhere_is_the_end_of_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor ends a process that hangs in C++, whose main thread cannot say it."""
    monkeypatch.setattr(Supervisor, "_run", lambda self: None)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    eye = Supervisor(0, 1, tmp_path, None)
    status = Status(tmp_path, main=True)
    status.start()
    eye.ending.on_failure = partial(status.end, "failed")
    eye.ending.failure = Failure(1, "process 1 on n2 is gone", time.time(), 0)
    eye.ending.exit(1)
    found = RunFolder(tmp_path).status()
    assert found is not None
    assert (found["state"], found["message"]) == ("failed", "process 1 on n2 is gone")


@pytest.mark.slow
def test_torchruns_sigterm_after_a_failure_is_no_reason_to_queue_again(tmp_path: Path) -> None:
    asked = tmp_path / "requeue"
    found = launch(tmp_path, "failure", GRPO_REQUEUE_FILE=str(asked))
    assert found.returncode == 1
    assert "ValueError: no weights" in found.stderr
    assert not asked.exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_whoever_was_told_asks_for_a_requeue(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "requeue"
    monkeypatch.setenv("RANK", rank)
    assert not train.ask_for_requeue(signal.SIGTERM)
    monkeypatch.setenv("GRPO_REQUEUE_FILE", str(asked))
    assert not train.ask_for_requeue(signal.SIGINT)
    assert not asked.exists()
    for _ in range(2):
        assert train.ask_for_requeue(signal.SIGTERM)
        assert asked.exists()


@pytest.mark.parametrize(
    ("requeued", "restarts", "code"),
    [(False, None, 143), (False, "0", 143), (False, "2", 0), (True, None, 0)],
)
def test_no_exit_code_makes_torchrun_start_what_was_stopped_again(
    requeued: bool, restarts: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(argv: list[str]) -> None:
        raise Stopped(signal.SIGTERM, "stopped after step 3", requeued=requeued)

    monkeypatch.setitem(cli.COMMANDS, "train", stopped)
    if restarts is None:
        monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    assert cli.run_command(["train"]) == code


def program(folder: Path, mode: str) -> None:
    """One of two processes whose second is stopped, or fails, before the run is built."""

    def building(
        prepared: Any, command: list[str], workers: Workers, stop: StopSignal, features: Any
    ) -> Any:
        workers.barrier()
        if workers.rank == 1:
            time.sleep(0.3)  # the other waits
            if mode == "failure":
                raise ValueError("no weights")
            os.kill(os.getpid(), signal.SIGTERM)
        if mode == "failure":
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun would, but before it knows why
        if mode == "stuck":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # torchrun's is no help
            time.sleep(600)
        workers.gather("met")
        raise AssertionError("nobody comes here")

    build.build = building  # type: ignore[assignment]
    recipe = SimpleNamespace(
        device="cpu",
        mixed_precision="no",
        distributed=Distributed(),
        checkpoint=SimpleNamespace(grace=30.0),
    )
    rank = os.environ["RANK"]
    try:
        train.run_recipe(SimpleNamespace(recipe=recipe, folder=folder), [])  # type: ignore[arg-type]
    except StoppedWhileStarting as early:
        asked = train.ask_for_requeue(early.signal)
        (folder / f"end-{rank}").write_text(f"stopped by {early.signal}")
        exit_process(0 if asked or mode == "stuck" else 128 + early.signal)


if __name__ == "__main__":
    program(Path(sys.argv[1]), sys.argv[2])
