"""Worker processes that can be killed: whatever a call does, it ends, and the others go on."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_cli.scoring.guards import CallResult, recorders
from grpo_cli.scoring.pool import Call, Pool
from tests.programs import ROOT, alone, environment, gone, until

pytestmark = pytest.mark.programs

PATIENCE = 60.0  # seconds after which a test that hangs fails instead


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2, memory_gb=4)
    yield pool
    pool.close()


def ask(pool: Pool, *texts: str, seconds: float = 30.0, name: str = "does") -> list[CallResult]:
    calls = [Call(f"tests.pool_rewards:{name}", {"completions": [text]}, seconds) for text in texts]
    return [f.result(PATIENCE) for f in [pool.submit(call) for call in calls]]


def test_values_come_back_in_the_order_of_the_calls(pool: Pool) -> None:
    texts = ["x" * n for n in range(50)]
    assert [d.values for d in ask(pool, *texts, name="size")] == [[float(n)] for n in range(50)]
    pids = {int(d.values[0]) for d in ask(pool, *["pid"] * 200)}
    assert 1 <= len(pids - {os.getpid()}) == len(pids) <= 2, "in as many processes as asked for"
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)  # SLURM's, when the run has to end
    assert {int(d.values[0]) for d in ask(pool, *["pid"] * 200)} & pids, "they live"


@pytest.mark.parametrize("text", ["hang", "stop"])
def test_a_call_ends_at_its_deadline(pool: Pool, text: str) -> None:
    slow = pool.submit(Call("tests.pool_rewards:does", {"completions": [text]}, 3.0))
    others = ask(pool, *["quick"] * 20)
    assert not slow.done(), "the others went past it"
    assert [d.error for d in others] == [None] * 20
    done = slow.result(PATIENCE)
    assert done == CallResult(
        timed_out=True, seconds=3.0, error="took more than 3 s and was stopped"
    )
    assert ask(pool, "again")[0].error is None


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("die", "its worker process ended (signal 9)"),
        ("leave", "its worker process ended (exit code 0)"),
        ("exit", "SystemExit: 3 at "),
        ("raise", "RuntimeError: on purpose at "),
        ("memory", "MemoryError"),
        ("unpicklable", "it returned what cannot be sent: "),
    ],
)
def test_a_failed_call_says_why(pool: Pool, text: str, error: str) -> None:
    bad, good = ask(pool, text, "fine")
    assert bad.values is None
    assert not bad.timed_out
    assert bad.error.startswith(error)
    assert good.error is None


def test_an_argument_that_cannot_travel(pool: Pool) -> None:
    call = Call("tests.pool_rewards:size", {"completions": [lambda: 0]}, 30.0)
    error = pool.submit(call).result(PATIENCE).error
    assert "pickle" in error


def test_a_function_that_is_not_there(pool: Pool) -> None:
    (done,) = ask(pool, "x", name="nowhere")
    assert "in its worker process, tests.pool_rewards:nowhere cannot be imported" in done.error


def test_children_with_sessions_of_their_own_end_with_the_worker(tmp_path: Path) -> None:
    pool = Pool(1)
    (late,) = ask(pool, f"session {tmp_path / 'late'}", seconds=3.0)
    assert late.timed_out
    assert gone(*map(int, (tmp_path / "late").read_text().split()))
    (done,) = ask(pool, f"daemon {tmp_path / 'daemon'}")
    assert done.error is None
    pool.close()
    assert gone(*map(int, (tmp_path / "daemon").read_text().split()))


def test_extras_are_plain_whatever_they_were() -> None:
    class Parsed:
        def __init__(self) -> None:
            self.open = lambda: None  # which nothing can send to another process

        def __str__(self) -> str:
            return "x = 3"

    given = {
        "flag": (True, True),
        "scalar": (torch.tensor(2.5), 2.5),
        "numbers": (np.array([[1, 2]]), [[1, 2]]),
        "float64": (np.float64(0.5), 0.5),
        "nested": ({3: (Parsed(), None)}, {"3": ["x = 3", None]}),
        "object": (Parsed(), "x = 3"),
    }
    arguments: dict[str, Any] = {"log_extra": None}
    _, extras = recorders(arguments)
    for column, (value, _) in given.items():
        arguments["log_extra"](column, [value])
    arguments["log_extra"]("tensor", torch.tensor([1, 2]))
    expected = [(column, [found]) for column, (_, found) in given.items()]
    assert pickle.loads(pickle.dumps(extras)) == [*expected, ("tensor", [1, 2])]
    kinds = {type(value) for _, values in extras for value in values}
    assert kinds == {bool, float, list, dict, str, int}


def test_a_forked_child_that_returns_is_not_heard() -> None:
    pool = Pool(1)
    values = [d.values for d in ask(pool, "fork", "a", "fork", "b", "c")]
    pool.close()
    assert len({int(pid) for (pid,) in values}) == 1, "the worker's own, each time"


def test_working_folder_hides_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random", "select", "resource"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the real one')")
    (tmp_path / "own_reward.py").write_text("def f(completions): return [5.0]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path, as some tools put there
    pool = Pool(1)
    (done,) = [pool.submit(Call("own_reward:f", {"completions": ["x"]}, 30.0)).result(PATIENCE)]
    pool.close()
    assert done.values == [5.0], done.error


def test_a_pool_that_breaks_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda args: None)

    def breaks(self: Pool) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Pool, "take_calls", breaks)
    pool = Pool(1)
    expected = "the thread reward-pool broke: RuntimeError: on purpose"
    for _ in range(2):
        assert [d.error for d in ask(pool, "x")] == [expected]
    pool.close()


def test_closing_ends_the_workers_and_the_calls_under_way() -> None:
    pool = Pool(1)
    (pid,) = ask(pool, "pid")[0].values
    under_way = pool.submit(Call("tests.pool_rewards:does", {"completions": ["hang"]}, 60.0))
    queued = pool.submit(Call("tests.pool_rewards:does", {"completions": ["hang"]}, 60.0))
    pool.close()
    for future in (under_way, queued):
        assert future.result(PATIENCE).error == "the pool was closed"
    assert gone(int(pid))


def test_workers_that_cannot_start_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(1)
    for program, error in (
        ("/bin/false", "its worker process ended (exit code 1)"),
        ("/no/such", "[Errno 2] No such file or directory: '/no/such'"),
    ):
        monkeypatch.setattr(sys, "executable", program)
        (done,) = ask(pool, "x")
        assert done.error == f"no worker process could be started: {error}"
    monkeypatch.undo()
    assert ask(pool, "x")[0].error is None, "the next one starts"
    pool.close()


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    program = """
import sys, time
from grpo_cli.scoring.pool import Call, Pool
pool = Pool(2)
call = lambda text: pool.submit(Call("tests.pool_rewards:does", {"completions": [text]}, 60.0))
idle, busy = call("pid"), None
print(int(idle.result().values[0]), flush=True)
call("children " + sys.argv[1])
time.sleep(3600)
"""
    pids = tmp_path / "pids"
    command, known = alone("-c", program, str(pids)), environment()
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=known)
    idle = int(parent.stdout.readline())
    until(lambda: pids.exists() and pids.read_text())
    busy = int(pids.read_text().split()[0])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(idle, busy)
    os.kill(int(pids.read_text().split()[1]), signal.SIGKILL)  # a plain child of the busy one
