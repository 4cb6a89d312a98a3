"""When a run is told to end, by whom, and how long it has left; by a clock that is set by hand."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from grpo_cli.distributed import heartbeat, stop_signal
from grpo_cli.distributed.stop_signal import (
    SIGNALS,
    WAKE,
    StoppedWhileStarting,
    StopSignal,
    end_of_job,
    leave_closed_terminal,
)
from grpo_cli.errors import UserError

NOW = 1000.0


class Heard:
    """What a run has said and told the others, and what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.told: list[int] = []
        self.elsewhere: int | None = None

    def stop(self, *, started: bool = True, **settings: Any) -> StopSignal:
        made = StopSignal(self.said.append, send=self.told.append, received=self.asked, **settings)
        made.started = started
        return made

    def asked(self) -> int | None:
        return self.elsewhere


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """Those before the test, and after it; signals that a StopSignal has let go of do nothing."""
    for name in ("GRPO_END_TIME", "SLURM_JOB_END_TIME", "GRPO_GRACE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.signal(number, _nothing) for number in (*SIGNALS, WAKE)}
    yield dict.fromkeys(SIGNALS, _nothing)
    for number, handler in before.items():
        signal.signal(number, handler)


def _nothing(*_: Any) -> None:
    pass


def installed() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in SIGNALS}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    hands = SimpleNamespace(now=NOW)
    monkeypatch.setattr(stop_signal, "time", SimpleNamespace(time=lambda: hands.now))
    return hands


@pytest.mark.parametrize(
    ("events", "end", "number", "ends_at"),
    [
        ("INT", None, signal.SIGINT, None),
        ("TERM", None, signal.SIGTERM, 30),
        ("HUP", None, signal.SIGHUP, 30),
        ("+1e9", None, None, None),
        # SLURM sends more than one; the time that is left does not begin again
        ("USR1 +10 TERM +10 TERM +10 USR1", None, signal.SIGUSR1, 30),
        # one after a Ctrl-C sets an end, a second does not give it more time
        ("INT +10 TERM +5 TERM", None, signal.SIGINT, 40),
        ("INT +10 TERM +5 TERM", 20, signal.SIGINT, 20),
        # torchrun kills its processes soon after a Ctrl-C
        ("torchrun INT", None, signal.SIGINT, 30),
        ("torchrun +5 <INT", None, signal.SIGINT, 35),
        # another process was told: this one's time begins when it hears of it
        ("+5 <INT", None, signal.SIGINT, None),
        ("+5 <TERM", None, signal.SIGTERM, 35),
        # before a known end of the job
        ("TERM", 100, signal.SIGTERM, 30),
        ("TERM", 20, signal.SIGTERM, 20),
        ("INT", 100, signal.SIGINT, 100),
        ("+70", 100, None, None),
        ("+70.5", 100, signal.SIGALRM, 100),
    ],
)
def test_what_ends_a_run_and_when(
    events: str,
    end: float | None,
    number: int | None,
    ends_at: float | None,
    heard: Heard,
    clock: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_torchrun = events.startswith("torchrun")
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    run = heard.stop(grace=30.0, end=end and NOW + end)
    own = []
    for event in events.removeprefix("torchrun ").split():
        if event[0] == "+":
            clock.now += float(event)
        elif event[0] == "<":
            heard.elsewhere = signal.Signals[f"SIG{event[1:]}"]
        else:
            own.append(signal.Signals[f"SIG{event}"])
            signal.raise_signal(own[-1])
    assert run.is_requested == (number is not None)
    assert (run.signal, run.ends_at) == (number, ends_at and NOW + ends_at)
    assert run.is_too_late(math.inf, math.inf) == (ends_at is not None)
    assert heard.told == own[:1], "the others are to know of the first signal of this process"
    assert len(heard.said) == (number is not None)
    if heard.said:
        at_once = number == signal.SIGINT and not under_torchrun
        text = "saved first; once more to stop at once" if at_once else "less than 30 s, and else "
        assert heard.said[0].startswith("stopping: this step is finished and saved")
        assert text in heard.said[0]


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed(heard: Heard) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = heard.stop()
    signal.raise_signal(signal.SIGHUP)
    assert not run.is_requested
    run.release()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_lines_for_a_closed_terminal_are_discarded() -> None:
    terminal, closed = os.openpty(), os.openpty()
    os.close(closed[0])
    with pytest.raises(OSError, match="Input/output error"):
        os.write(closed[1], b"line")
    leave_closed_terminal((terminal[1], closed[1]))
    os.write(closed[1], b"line")
    os.write(terminal[1], b"line")
    assert os.read(terminal[0], 4) == b"line", "a terminal that is there is kept"
    for descriptor in (*terminal, closed[1]):
        os.close(descriptor)


@pytest.mark.programs
def test_a_child_that_a_reward_has_forked_dies_of_its_signal(heard: Heard) -> None:
    run = heard.stop()
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not run.is_requested


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_it_at_once(
    first: int, heard: Heard, handlers: dict[int, Any]
) -> None:
    run = heard.stop()
    signal.raise_signal(first)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert installed() == handlers, "a third one is Python's"
    assert (run.signal, heard.told) == (first, [first])


def test_a_signal_while_the_run_is_starting(heard: Heard, handlers: dict[int, Any]) -> None:
    run = heard.stop(started=False)
    with pytest.raises(StoppedWhileStarting, match="before the first step") as early:
        signal.raise_signal(signal.SIGTERM)
    assert early.value.signal == signal.SIGTERM
    assert not isinstance(early.value, Exception), "nothing that handles errors takes it for one"
    assert heard.told == [signal.SIGTERM]
    assert installed() == handlers
    assert (run.signal, heard.said) == (None, [])


def test_torchruns_sigterm_after_a_failure_is_no_order(heard: Heard) -> None:
    failed = [True]
    run = heard.stop(is_aftermath=lambda: failed[0])
    signal.raise_signal(signal.SIGTERM)
    assert (run.signal, heard.told) == (None, [])
    run.started = False
    signal.raise_signal(signal.SIGTERM)  # nor while the run is starting
    run.started = True
    signal.raise_signal(signal.SIGUSR1)  # which is not torchrun's
    assert run.signal == signal.SIGUSR1
    other = heard.stop(is_aftermath=lambda: failed[0])
    failed[0] = False
    signal.raise_signal(signal.SIGTERM)
    assert other.signal == signal.SIGTERM


def test_a_signal_in_the_middle_of_a_line(heard: Heard) -> None:
    def busy(text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    run = StopSignal(busy, send=heard.told.append)
    run.started = True
    signal.raise_signal(signal.SIGTERM)
    assert run.is_requested
    assert heard.told == [signal.SIGTERM]


def test_a_call_of_a_users_function_is_interrupted_if_the_run_has_to_end(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard.stop()
    has_to_end = [False]
    monkeypatch.setattr(heartbeat, "leave", lambda: has_to_end[0])
    signal.raise_signal(WAKE)
    with heartbeat.calling():
        signal.raise_signal(WAKE)
        has_to_end[0] = True
        with pytest.raises(heartbeat.WorkInterrupted):
            signal.raise_signal(WAKE)
    signal.raise_signal(WAKE)  # outside of a call the work asks for itself


def test_a_signal_while_the_others_are_asked(heard: Heard) -> None:
    def asked() -> int:
        signal.raise_signal(signal.SIGTERM)
        return signal.SIGINT

    run = StopSignal(heard.said.append, received=asked)
    run.started = True
    assert run.is_requested
    assert (run.signal, run.ends_at) == (signal.SIGTERM, NOW + 30), "its own came first"
    assert len(heard.said) == 1


@pytest.mark.parametrize(("given", "expected"), [("", 20.0), ("0", 0.0), ("2.5", 2.5)])
def test_grace(given: str, expected: float, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_GRACE", given)
    run = heard.stop(grace=20.0)
    signal.raise_signal(signal.SIGTERM)
    assert (run.grace, run.ends_at) == (expected, NOW + expected)
    assert f"less than {expected:g} s" in heard.said[0]


@pytest.mark.parametrize("given", ["60s", "-1", "nan"])
def test_a_grace_that_is_no_number_of_seconds(
    given: str, heard: Heard, handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_GRACE", given)
    with pytest.raises(UserError, match=f"^GRPO_GRACE = {given}: has to be a number of seconds"):
        heard.stop()
    assert installed() == handlers


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"GRPO_END_TIME": "1800000000"}, 1.8e9),
        ({"SLURM_JOB_END_TIME": "1700000000"}, 1.7e9),
        ({"GRPO_END_TIME": "1800000000", "SLURM_JOB_END_TIME": "1700000000"}, 1.8e9),
        ({"GRPO_END_TIME": "", "SLURM_JOB_END_TIME": "1700000000"}, 1.7e9),
        ({"SLURM_JOB_END_TIME": "Unknown"}, None),  # of a job without a time limit
    ],
    ids=str,
)
def test_end_of_job(
    given: dict[str, str], expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert end_of_job() == expected


@pytest.mark.parametrize(
    ("step", "save", "now", "late"),
    [
        # 1.5 of both and a second, of 30 s
        (15.0, 4.0, NOW, False),  # 29.5
        (15.0, 5.0, NOW, True),  # 31
        (0.0, 0.0, NOW + 29, False),
        (0.0, 0.0, NOW + 29.5, True),
        (math.inf, 0.0, NOW, True),  # the first step: nobody knows
    ],
)
def test_whether_the_step_can_be_finished(
    step: float, save: float, now: float, late: bool, heard: Heard, clock: SimpleNamespace
) -> None:
    run = heard.stop(grace=30.0)
    signal.raise_signal(signal.SIGTERM)
    clock.now = now
    assert run.is_too_late(step, save) == late


# In place of torchrun: starts a process, and waits for it.
TORCHRUN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True).wait()
"""
PROCESS = """
import os, time
from grpo_cli.distributed import stop_signal
stop_signal.die_with_torchrun()
first = os.getppid()
print(os.getpid(), flush=True)
while os.getppid() == first:
    time.sleep(0.01)
print("alive", flush=True)
time.sleep(600)
"""


@pytest.mark.programs
@pytest.mark.parametrize("launcher", ["torchrun", "another"])
def test_a_process_dies_with_its_torchrun(launcher: str) -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "r"}
    if launcher == "another":
        environment.pop("TORCHELASTIC_RUN_ID")
    command = [sys.executable, "-c", TORCHRUN, PROCESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert parent.stdout.readline() == ("" if launcher == "torchrun" else "alive\n")
        if launcher == "another":
            process.kill()
        gone, _ = psutil.wait_procs([process], timeout=60)
        assert gone
