"""Sessions in worker processes: whatever an environment does, each call ends."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from grpo_cli.environments.functions import EnvironmentFailure
from grpo_cli.environments.sessions import EnvironmentSession
from grpo_cli.errors import UserError
from grpo_cli.scoring import processes
from tests.environments.conftest import PATIENCE, SAMPLES, Open, begin, failed
from tests.environments.messages import calls, says, texts

pytestmark = pytest.mark.programs

SECONDS = 1.0  # deadline of calls that hang


def test_many_sessions_share_a_few_workers_and_keep_their_states(start: Open) -> None:
    sessions = start("Counter", workers=2)
    opened = [sessions.open("", {"start": n}, n) for n in range(40)]
    for first in [session.reset() for session in opened]:
        first.result(PATIENCE)
    for _ in range(3):
        for step in [s.step(calls(("increment", {"step": 100}))) for s in opened]:
            step.result(PATIENCE)
    rewards = [s.finish().result(PATIENCE).rewards["Counter"] for s in opened]
    assert rewards == [300.0 + n for n in range(40)]


def test_an_object_in_trls_manner_serves_the_next_episode_too(start: Open) -> None:
    sessions = start("Faulty")  # of our own manner: a new object for each
    assert begin(sessions).finish().result(PATIENCE).rewards == {"Faulty": 1.0}
    sessions = start("Numbered")
    first, second = [sessions.open("", {}, 0) for _ in range(2)]
    numbers = [texts(s.reset().result(PATIENCE)) for s in (first, second)]
    assert numbers == [["1"], ["2"]]
    second.finish().result(PATIENCE)
    third = sessions.open("", {}, 0)
    assert texts(third.reset().result(PATIENCE)) == ["2"]


def test_global_random_numbers_are_each_sessions_own(start: Open) -> None:
    """However the sessions of a worker take turns."""

    def draws(session: EnvironmentSession) -> str:
        return texts(session.step(says("")).result(PATIENCE))[0]

    sessions = start("Draws")
    one = sessions.open("", {}, 7)
    alone = [texts(one.reset().result(PATIENCE))[0], draws(one), draws(one)]
    a, b = sessions.open("", {}, 7), sessions.open("", {}, 7)
    mixed = [texts(s.reset().result(PATIENCE))[0] for s in (a, b)]
    assert mixed == [alone[0]] * 2
    assert [draws(a), draws(b), draws(b), draws(a)] == [alone[1]] * 2 + [alone[2]] * 2
    assert texts(sessions.open("", {}, 8).reset().result(PATIENCE)) != alone[:1]


# Faults. `in` is the method that does `what`.


@pytest.mark.parametrize(
    ("where", "what", "stop_reason", "problem"),
    [
        ("reset", "hang", "env_timeout", "took more than 1 s and was stopped"),
        ("get_reward", "deaf", "env_timeout", "took more than 1 s and was stopped"),
        ("step", "stop", "env_timeout", "took more than 1 s and was stopped"),
        ("get_reward", "raise", "env_error", "raised RuntimeError: on purpose at "),
        ("step", "interrupt", "env_error", "raised KeyboardInterrupt"),
        ("reset", "die", "env_error", "its worker process ended (signal 9)"),
        ("step", "leave", "env_error", "its worker process ended (exit code 0)"),
        ("step", "memory", "env_error", "raised MemoryError"),
        ("step", "bytes", "env_error", "abc\\xd8' is not a text"),
    ],
)
def test_a_fault_fails_its_session_only(
    start: Open, where: str, what: str, stop_reason: str, problem: str
) -> None:
    sessions = start("Faulty", seconds=SECONDS)
    session = sessions.open("", {"in": where, "what": what}, 0)
    call = session.reset()
    if where != "reset":
        call.result(PATIENCE)
        call = session.step(says(""))
    if where == "get_reward":
        call.result(PATIENCE)
        call = session.finish()
    failure = failed(call)
    assert failure.stop_reason == stop_reason
    assert failure.own
    assert str(failure).startswith(where)
    assert problem in str(failure)
    assert begin(sessions).finish().result(PATIENCE).rewards == {"Faulty": 1.0}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raise", "its constructor raised RuntimeError: on purpose at "),
        ("die", "its worker process ended (signal 9)"),
    ],
)
def test_a_constructor_that_fails(start: Open, what: str, says: str) -> None:
    sessions = start("Faulty", args={"init": what}, seconds=SECONDS)
    assert says in str(failed(sessions.open("", {}, 0).reset()))
    with pytest.raises(UserError) as error:
        sessions.try_out("", {})
    assert str(error.value).startswith(f"the environment {SAMPLES}:Faulty cannot be used: ")
    assert says in str(error.value)
    assert str(error.value).count("its constructor") <= 1, "it is blamed once"


def test_a_row_that_cannot_travel(start: Open) -> None:
    sessions = start("Faulty")
    other = sessions.open("", {}, 0)
    first = sessions.open("", {"f": lambda: 0}, 0).reset()
    second = other.reset()
    assert "cannot be sent" in str(failed(first))
    second.result(PATIENCE)


def test_a_forked_child_does_not_answer_and_ends_with_its_worker(start: Open) -> None:
    sessions = start("Faulty")
    session = begin(sessions, {"in": "step", "what": "fork"})
    parent = int(texts(session.step(says("")).result(PATIENCE))[0])
    assert parent != os.getpid()
    os.kill(parent, signal.SIGKILL)
    assert "signal 9" in str(failed(session.step(says(""))))
    assert begin(sessions).finish().result(PATIENCE).rewards == {"Faulty": 1.0}


def test_what_an_environment_prints_is_not_the_output_of_the_run(
    start: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    session = begin(start("Faulty"), {"in": "step", "what": "print"})
    session.step(says("")).result(PATIENCE)
    session._sessions.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "printed by an environment" in err


@pytest.mark.smoke
def test_a_worker_that_is_killed_takes_its_sessions_with_it_and_says_whose_fault_it_was(
    start: Open,
) -> None:
    sessions = start("Faulty", seconds=SECONDS)
    guilty, waiting, idle = [begin(sessions, {"in": "step", "what": w}) for w in ("deaf", "", "")]
    late = guilty.step(says(""))
    queued = waiting.step(says(""))
    begun = sessions.open("", {}, 0)  # whose reset has not begun
    reset = begun.reset()
    assert failed(late).own
    assert not failed(queued).own
    assert reset.result(PATIENCE).messages, "it moved to another worker"
    assert begun.step(says("")).result(PATIENCE).messages
    bystander = failed(idle.step(says("")))
    assert not bystander.own
    assert str(bystander).startswith("another environment in the same worker process failed: ")


def test_a_tool_that_ends_its_worker_is_answered_with_an_error(start: Open) -> None:
    sessions = start(tools={"does": "does", "times": "multiply"}, seconds=SECONDS)
    session, other = begin(sessions), begin(sessions)
    times = ("times", {"a": 2, "b": 3})
    answer = session.step(calls(times, ("does", {"what": "deaf"})))
    also = other.step(calls(times))
    observation = answer.result(PATIENCE)
    assert texts(observation) == ['{"error": "took more than 1 s and was stopped"}'] * 2
    assert [(c.failed, c.timed_out) for c in observation.calls] == [(True, True)] * 2
    died = session.step(calls(("does", {"what": "die"}))).result(PATIENCE)
    assert texts(died) == ['{"error": "its worker process ended (signal 9)"}']
    assert texts(also.result(PATIENCE)) == ["6"], "nothing of the other session was lost"
    assert texts(other.step(calls(times)).result(PATIENCE)) == ["6"]


def test_each_tool_of_a_turn_has_its_own_deadline(start: Open) -> None:
    sessions = start(tools={"wait": "wait_for", "does": "does"}, seconds=2.0)
    slow = ("wait", {"text": "there", "seconds": 1.1})
    nothing = ("does", {"what": ""})
    turn = calls(slow, nothing, slow, ("wait", {"text": "", "seconds": 60}), nothing, slow)
    observation = begin(sessions).step(turn).result(PATIENCE)
    assert [c.timed_out for c in observation.calls] == [False, False, False, True, False, False]


def test_async_environments_of_one_worker_wait_at_the_same_time(start: Open) -> None:
    sessions = start("Waits")
    opened = [begin(sessions, {"seconds": 0.3}) for _ in range(20)]
    steps = [session.step(says("")) for session in opened]
    assert max(s.result(PATIENCE).metrics["most"] for s in steps) == 20.0
    assert opened[0].finish().result(PATIENCE).rewards == {"Waits": 0.5}


def test_an_async_call_past_its_deadline_fails_alone(start: Open) -> None:
    sessions = start("Waits", seconds=SECONDS)
    slow, quick = begin(sessions, {"seconds": 60.0}), begin(sessions, {"seconds": 0.1})
    late, other = slow.step(says("")), quick.step(says(""))
    assert other.result(PATIENCE).metrics
    assert failed(late).stop_reason == "env_timeout"
    assert failed(late).own
    assert quick.step(says("")).result(PATIENCE).metrics, "the worker lives"


def test_the_time_in_which_others_hold_the_thread_does_not_count(start: Open) -> None:
    sessions = start("Waits", seconds=3.0)
    waits = begin(sessions, {"seconds": 0.1})
    blocks = [begin(sessions, {"seconds": 2.0}) for _ in range(2)]
    step = waits.step(says(""))
    blocked = [session.step(says("block")) for session in blocks]
    assert step.result(PATIENCE).metrics, "after four seconds in which it could not go on"
    assert [call.exception(PATIENCE) for call in blocked] == [None, None]


def test_whatever_many_environments_do_every_call_ends_and_nothing_is_left(start: Open) -> None:
    draw = random.Random(0)
    faults = ["hang", "deaf", "die", "leave", "exit", "raise", "memory", "stop", "fork", "", "", ""]
    sessions = start("Faulty", workers=3, seconds=0.5)
    rows = [
        {"in": draw.choice(["reset", "step", "get_reward"]), "what": draw.choice(faults)}
        for _ in range(40)
    ]
    opened = [sessions.open("", row, n) for n, row in enumerate(rows)]
    resets = [session.reset() for session in opened]
    begun = [s for s, r in zip(opened, resets, strict=True) if r.exception(PATIENCE) is None]
    steps = [session.step(says("")) for session in begun]
    made = [s for s, r in zip(begun, steps, strict=True) if r.exception(PATIENCE) is None]
    ends = [session.finish() for session in made]
    failures = [f for call in (*resets, *steps, *ends) if (f := call.exception(PATIENCE))]
    assert all(isinstance(f, EnvironmentFailure) for f in failures)
    harmless = sum(not row["what"] for row in rows)
    assert len(rows) - harmless <= len(failures) + sum(row["what"] == "fork" for row in rows)
    assert begin(sessions).finish().result(PATIENCE).rewards == {"Faulty": 1.0}
    sessions.close()
    assert processes.descendants(os.getpid()) == []


def test_a_call_before_the_end_of_another_fails_and_both_end(start: Open) -> None:
    session = begin(start("Waits"), {"seconds": 0.2})
    first, second = session.step(says("")), session.step(says(""))
    assert "has not ended" in str(failed(second))
    assert first.result(PATIENCE).metrics


def test_an_abandoned_session_gives_no_answer_and_no_trouble(start: Open) -> None:
    sessions = start("Waits")
    session = begin(sessions, {"seconds": 60.0})
    step = session.step(says(""))
    session.abandon()
    assert not failed(step).own
    assert not failed(session.step(says(""))).own
    idle = begin(sessions, {"seconds": 0.0})
    idle.abandon()
    assert not failed(idle.step(says(""))).own
    begin(sessions, {"seconds": 0.0})


def test_closing_ends_calls_under_way(start: Open) -> None:
    sessions = start("Waits")
    session = begin(sessions, {"seconds": 60.0})
    step = session.step(says(""))
    sessions.close()
    assert "closed" in str(failed(step))
    assert "closed" in str(failed(session.step(says(""))))
    assert "closed" in str(failed(sessions.open("", {}, 0).reset()))


def test_workers_close_their_environments_at_the_end_and_print_errors(
    start: Open, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sessions = start("Closes", args={"folder": str(tmp_path)})
    opened = [sessions.open("", {"n": n}, 0) for n in range(3)]
    for session in opened:
        session.reset().result(PATIENCE)
    opened[0].finish().result(PATIENCE)
    opened[1].abandon()
    sessions.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]
    assert capfd.readouterr().err.count("RuntimeError: never opened") == 3


def test_workers_that_cannot_start(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RETRY_SECONDS", 0.0)
    for program in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", program)
        failure = failed(start("Guess").open("", {}, 0).reset())
        assert "no worker process could be started: " in str(failure)


def test_the_text_of_a_failure_is_shortened_and_cleaned() -> None:
    text = str(EnvironmentFailure("env_error", "\x1b" + "x" * 9000))
    assert len(text) < 2200
    assert "\x1b" not in text
