"""One process fails: all end soon, with its name as the last word; a stall names the slowest."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from grpo_cli.distributed import heartbeat, supervisor
from grpo_cli.errors import TrainingError
from tests import programs
from tests.programs import PATIENCE, ROOT, environment, torchrun

SCRIPT = ROOT / "tests" / "watched.py"
NODE = heartbeat.node()
SLOW = pytest.mark.slow
LONG = 60.0  # seconds of a stall that no test waits for


def watched(folder: Path, mode: str, guilty: int, stall: float = LONG) -> list[str]:
    """Words that start `tests/watched.py`."""
    return [str(SCRIPT), mode, str(folder), str(stall), str(guilty)]


def launch(
    folder: Path, mode: str, guilty: int, *, processes: int = 2, stall: float = LONG
) -> tuple[int, str]:
    """Exit code of torchrun and what is on the screen."""
    with begun(torchrun(processes, *watched(folder, mode, guilty, stall))) as job:
        screen, _ = job.communicate(timeout=PATIENCE)
    return job.returncode, screen


@contextlib.contextmanager
def begun(command: list[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """A job under way, which does not outlast a test that fails."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
    ) as job:
        try:
            yield job
        finally:
            job.kill()


def waiting(
    folder: Path, go: Path, *, processes: int = 2, stall: float = LONG
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """A good job, which waits in step 2 until the file is there, or for a signal."""
    return begun(torchrun(processes, *watched(folder, "none", 1, stall)), WATCHED_READY=str(go))


def told(screen: str) -> list[str]:
    return [line for line in screen.splitlines() if line.startswith("grpo: ")]


def root_cause(screen: str) -> str:
    """What torchrun's closing block says last of all."""
    return screen.partition("Root Cause")[2].partition("traceback : ")[2].splitlines()[0].strip()


def log(folder: Path, rank: int, kind: str = "log") -> str:
    return (folder / "logs" / f"rank-{rank}.{kind}").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "mode", [pytest.param("none", marks=pytest.mark.smoke), pytest.param("early", marks=SLOW)]
)
def test_a_good_end_is_quiet(tmp_path: Path, mode: str) -> None:
    """Also if one process ends before the others."""
    code, screen = launch(tmp_path, mode, 1)
    assert (code, "".join(screen.split())) == (0, "donedone")
    if mode == "none":
        assert {p.name for p in (tmp_path / "logs").iterdir()} == {"misdeed", "rank-1.log"}
        assert "misdeed" in log(tmp_path, 1), "what another than the first prints is in its log"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("mode", "guilty", "processes", "error"),
    [
        ("raise", 1, 2, "ValueError: no reward for this"),
        pytest.param("raise", 0, 2, "ValueError: no reward for this", marks=SLOW),
        pytest.param("together", 1, 2, "only here", marks=SLOW),
        pytest.param("sys_exit", 1, 2, "SystemExit: 3", marks=SLOW),
        # a thread of its own, the others in C++, and its cleanup do not hold up the end
        pytest.param("stuck_thread", 1, 2, "ValueError: a thread of mine never ends", marks=SLOW),
        pytest.param("stuck_others", -1, 3, "ValueError: the others are stuck", marks=SLOW),
        pytest.param("cleanup", 1, 2, "ValueError: and then its cleanup hangs", marks=SLOW),
    ],
)
def test_the_error_of_one_is_the_last_word(
    tmp_path: Path, mode: str, guilty: int, processes: int, error: str
) -> None:
    code, screen = launch(tmp_path, mode, guilty, processes=processes)
    message = f"process {abs(guilty)} on {NODE}, step 2, reward: {error}"
    assert code == 1
    assert told(screen) == [f"grpo: {message}"]
    if mode not in ("together", "sys_exit"):
        assert root_cause(screen) == message
    if mode == "raise":
        assert screen.index("in misbehave") < screen.index("grpo: "), "its traceback comes before"
        assert "losed by peer" not in screen
        assert "no reward for this" in log(tmp_path, guilty)
        assert "losed by peer" in log(tmp_path, 1 - guilty), "what followed is in the other's log"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("mode", "guilty", "processes", "shown"),
    [
        ("kill", 1, 3, "Signal 9 (SIGKILL)"),
        pytest.param("kill", 0, 2, "Signal 9 (SIGKILL)", marks=SLOW),
        pytest.param("exit", 1, 2, "To enable traceback", marks=SLOW),
        pytest.param("segfault", 1, 2, "Signal 11 (SIGSEGV)", marks=SLOW),
    ],
)
def test_a_process_that_vanishes_is_named(
    tmp_path: Path, mode: str, guilty: int, processes: int, shown: str
) -> None:
    code, screen = launch(tmp_path, mode, guilty, processes=processes)
    assert code == 1
    (line,) = told(screen)
    assert line.startswith(f"grpo: process {guilty} on {NODE} is gone (exited or killed")
    assert "it was last in reward of step 2" in line
    assert "was told of" not in screen, "torchrun's SIGTERM is not a request to stop"
    assert root_cause(screen).startswith(shown)
    if mode == "segfault":
        assert "misbehave" in log(tmp_path, guilty, "stacks.txt")


@pytest.mark.slow
def test_a_job_that_was_suspended_goes_on(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with waiting(tmp_path, go, stall=3) as job:
        workers = ready(tmp_path, 2)
        for number, seconds in ((signal.SIGSTOP, 6), (signal.SIGCONT, 1)):
            for pid in workers:
                os.kill(pid, number)
            time.sleep(seconds)  # longer than a stall
        go.touch()
        screen, _ = job.communicate(timeout=PATIENCE)
    assert (job.returncode, "".join(screen.split())) == (0, "donedone")


STUCK = "has been in reward of step 2 for"
FROZEN = "last in reward of step 2, has given no answer"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("mode", "guilty", "processes", "what", "stack"),
    [
        ("sleep", 1, 2, f"process 1 on {NODE} {STUCK}", "never_returns"),
        pytest.param("sleep", 0, 1, STUCK, "never_returns", marks=SLOW),
        ("freeze", 0, 2, f"process 0 on {NODE}, {FROZEN}", "in misbehave"),
        pytest.param("freeze", 1, 3, f"process 1 on {NODE}, {FROZEN}", "in misbehave", marks=SLOW),
        pytest.param("regex", 0, 2, f"process 0 on {NODE}, {FROZEN}", "in misbehave", marks=SLOW),
        pytest.param("recv", 0, 2, "and all wait for one another", "", marks=SLOW),
    ],
)
def test_a_stall_names_the_slowest_and_shows_the_stacks_of_all(
    tmp_path: Path, mode: str, guilty: int, processes: int, what: str, stack: str
) -> None:
    """A frozen process, which cannot end itself, is ended by another."""
    code, screen = launch(tmp_path, mode, guilty, processes=processes, stall=3)
    assert code == 1
    (line,) = told(screen)
    assert "stalled for 3 s: " in line
    assert what in line
    assert "done" not in screen, "a frozen process goes on only to die"
    if mode == "recv":
        return
    assert stack in log(tmp_path, guilty, "stacks.txt")
    if processes > 1:
        assert line.endswith(f"; stacks in {tmp_path}/logs/.")
        assert "all_reduce" in log(tmp_path, 1 - guilty, "stacks.txt")


@pytest.mark.slow
def test_a_signal_to_one_is_known_to_all(tmp_path: Path) -> None:
    code, screen = launch(tmp_path, "signal", 1)
    assert code == 0
    for rank in (0, 1):
        assert f"process {rank} was told of {signal.SIGUSR1:d}" in screen


def ready(folder: Path, processes: int) -> list[int]:
    """Waits until all are in step 2; their process ids."""
    files = [folder / "logs" / f"ready-{rank}" for rank in range(processes)]
    until = time.monotonic() + PATIENCE
    while not all(f.exists() and f.read_text() for f in files):
        assert time.monotonic() < until, "the job did not start"
        time.sleep(0.05)
    return [int(f.read_text()) for f in files]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_stopped_ends_in_good_order(tmp_path: Path, number: int) -> None:
    with waiting(tmp_path, tmp_path / "never") as job:
        ready(tmp_path, 2)
        job.send_signal(number)
        screen, _ = job.communicate(timeout=PATIENCE)
    assert told(screen) == []
    for rank in (0, 1):
        assert f"process {rank} was told of {number:d}" in screen


@pytest.mark.slow
def test_processes_do_not_outlive_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    with waiting(tmp_path, tmp_path / "never") as job:
        workers = [psutil.Process(pid) for pid in ready(tmp_path, 2)]
        job.kill()
        gone, alive = psutil.wait_procs(workers, timeout=PATIENCE)
        for worker in alive:
            worker.kill()
        screen, _ = job.communicate(timeout=10)
    assert len(gone) == 2
    (line,) = told(screen)
    assert "the job's store at" in line
    assert "is gone: torchrun there has ended" in line


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "nodes"), [("none", 1), ("kill", 1), ("kill", 2)])
def test_a_store_of_the_first_process_will_do(tmp_path: Path, mode: str, nodes: int) -> None:
    """As when srun starts the processes itself, without torchrun."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(programs.free_port()), "WORLD_SIZE": "2"}
    command = programs.alone(*watched(tmp_path, mode, 1))
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                begun(
                    command,
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    SLURMD_NODENAME=f"n{rank % nodes}",
                    **job,
                )
            )
            for rank in (0, 1)
        ]
        screens = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    codes = [process.returncode for process in processes]
    if mode == "none":
        assert (codes, told("".join(screens))) == ([0, 0], [])
    else:
        assert codes == [1, -signal.SIGKILL]
        what = "is gone" if nodes == 1 else "gives no answer"
        (line,) = told(screens[0])
        assert line.startswith(f"grpo: process 1 on n{nodes - 1} {what}")
        assert "it was last in reward of step 2" in line


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[supervisor.Supervisor]:
    eye = supervisor.Supervisor(0, 1, tmp_path, None)
    yield eye
    eye.close()  # or its thread would end this process, which has failed


def test_one_process_tells_itself_of_a_signal(alone: supervisor.Supervisor) -> None:
    assert alone.stop_signal is None
    alone.send_stop(signal.SIGUSR1)
    alone.send_stop(signal.SIGTERM)
    assert alone.stop_signal == signal.SIGUSR1, "the first one counts"


def test_nobody_leaves_while_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its way to a collective: the others of it would wait for ever."""
    heartbeat.at("reward", 3)
    monkeypatch.setattr(heartbeat, "leave", lambda: True)
    with pytest.raises(heartbeat.WorkInterrupted):
        heartbeat.beat()
    monkeypatch.setattr(heartbeat, "_beaten", time.monotonic() - 3600)
    with heartbeat.waiting():
        assert heartbeat.state().quiet < 60
        monkeypatch.setattr(heartbeat, "_beaten", time.monotonic() - 3600)
    assert heartbeat.state().quiet < 60


def test_seconds_add_up_over_nested_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    for name, value in (
        ("_now", lambda: now), ("_stage", "start"), ("_entered", now), ("_spent", {})
    ):  # fmt: skip
        monkeypatch.setattr(heartbeat, name, value)
    now = 103.0
    heartbeat.at("generate", 1)
    now = 104.0
    with heartbeat.inside("evaluate"):
        now = 109.0
        assert heartbeat.seconds() == {"start": 3, "generate": 1, "evaluate": 5}
    now = 111.0
    assert heartbeat.seconds() == {"start": 3, "generate": 3, "evaluate": 5}


def test_where(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat.at("reward", 3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert heartbeat.where() == "step 3, reward"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert heartbeat.where() == "process 2 on n7, step 3, reward"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("[pair.cc:553] Connection closed by peer [::1]:3"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (TrainingError("step 3: the loss is nan"), False),
        (ValueError("the judge timed out"), False),
        (MemoryError(), False),
    ],
)
def test_what_another_may_have_caused(error: Exception, expected: bool) -> None:
    assert supervisor._is_consequence(error) is expected
    wrapped = TrainingError("it failed")
    wrapped.__cause__ = error
    assert supervisor._is_consequence(wrapped) is expected


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TrainingError("the loss is nan"), "the loss is nan"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("no peer\nException raised from x.cpp:3"), "RuntimeError: no peer"),
    ],
)
def test_an_error_in_words(error: BaseException, text: str) -> None:
    assert supervisor._message(error) == text
