"""Rewards with a timeout, async ones, what is remembered, counted and logged."""

import math
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from grpo_cli import rewards
from grpo_cli.data.sample import Sample
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.records import Rollout
from grpo_cli.scoring import registry
from grpo_cli.scoring.bound_reward import TrainerState
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.scorer import Scorer, ScoringSession, metrics_of
from grpo_cli.scoring.settings import Reward, Scoring
from tests import pool_rewards
from tests.conftest import make_rollout, score


def spec(name: str, **knobs: Any) -> Reward:
    return Reward(f"tests.pool_rewards:{name}", **knobs)


def make(executor: RewardExecutor, specs: Mapping[str, Reward], *columns: str) -> Scorer:
    return Scorer(specs, columns, "rows.jsonl", executor)


def scored(
    executor: RewardExecutor,
    rollouts: list[Rollout],
    state: TrainerState | None = None,
    **specs: Reward,
) -> tuple[list[Rollout], ScoringSession]:
    session = make(executor, specs, *rollouts[0].prompt.columns).begin(state)
    session.add(rollouts)
    return session.finish(rollouts), session


def rollouts_of(*texts: str, **columns: Any) -> list[Rollout]:
    return [make_rollout(text=t, columns=columns, row=i) for i, t in enumerate(texts)]


def parts(rollouts: list[Rollout], name: str = "r") -> list[float | None]:
    return [r.reward_parts[name] for r in rollouts]


def metrics(*sessions: ScoringSession) -> dict[str, float]:
    found = metrics_of(sessions, Workers("cpu"))
    return {name: value for name, value in found.items() if not name.startswith("time/")}


def test_a_timeout_moves_a_function_to_workers(executor: RewardExecutor) -> None:
    both = {"one": spec("batch_size", timeout=30), "all": spec("batch_size")}
    rollouts, _ = scored(executor, rollouts_of("a", "bb", "ccc"), **both)
    assert parts(rollouts, "one") == [1.0] * 3
    assert parts(rollouts, "all") == [3.0] * 3
    rollouts, _ = scored(executor, rollouts, r=spec("does", timeout=30))
    assert os.getpid() not in {int(p or 0) for p in parts(rollouts)}


@pytest.mark.programs
@pytest.mark.parametrize(("name", "value"), [("does", None), ("does_or_minus_1", -1.0)])
def test_a_completion_that_takes_too_long_gets_the_functions_value(
    executor: RewardExecutor, name: str, value: float | None
) -> None:
    rollouts = rollouts_of("quick", "hang", "quick too")
    rollouts, session = scored(executor, rollouts, r=spec(name, timeout=1.0, on_error="count"))
    assert parts(rollouts)[1] == value
    assert None not in (parts(rollouts)[0], parts(rollouts)[2])
    assert math.isnan(rollouts[1].reward) == (value is None)
    assert metrics(session) == {"rewards/r/timeouts": 1.0, "rewards/r/errors": 0.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "reward 'r' raised RuntimeError: on purpose at "),
        ("die", "reward 'r' raised its worker process ended (signal 9), for row 1, completion"),
        ("two", "reward 'r' must return a list of 1 values, one a completion; it returned 2 "),
        ("nan", "reward 'r' returned nan, which is not a finite number"),
    ],
)
def test_failures_stop_or_are_counted(executor: RewardExecutor, text: str, message: str) -> None:
    rollouts = rollouts_of("fine", text, "fine")
    with pytest.raises(TrainingError) as error:
        scored(executor, rollouts, r=spec("does", timeout=30))
    assert str(error.value).startswith(message)
    rollouts, session = scored(executor, rollouts, r=spec("does", timeout=30, on_error="count"))
    assert [p is None for p in parts(rollouts)] == [False, True, False]
    assert metrics(session) == {"rewards/r/timeouts": 0.0, "rewards/r/errors": 1.0}


def test_those_of_a_batch_that_do_not_fail_are_called_together(executor: RewardExecutor) -> None:
    rollouts = rollouts_of("fine", "raise", "fine too")
    rollouts, session = scored(executor, rollouts, r=spec("batch_without_raise", on_error="count"))
    assert parts(rollouts) == [2.0, None, 2.0]
    # Logged by the call that counts, and not by those that look for the failure.
    assert metrics(session) == {"rewards/r/errors": 1.0, "rewards/r/size": 2.0}


def calls_of(path: Path) -> list[str]:
    return path.read_text().split("\0")[1:]


def test_equal_completions_are_scored_once(executor: RewardExecutor, tmp_path: Path) -> None:
    notes = str(tmp_path / "notes")
    rollouts = rollouts_of("a", "b", "a", answer=notes)
    specs = {"r": spec("counted_once", timeout=30)}
    scorer = make(executor, specs, "answer")
    for _ in range(2):
        assert parts(score(scorer, rollouts)[0]) == [1.0] * 3
    assert sorted(calls_of(tmp_path / "notes")) == ["a", "b"]
    # Another row is another matter, and so is another argument or function.
    score(scorer, rollouts_of("a", answer=notes + "2"))
    assert calls_of(tmp_path / "notes2") == ["a"]
    for _ in range(2):  # failures are not remembered
        failing = rollouts_of("raise", answer=notes + "3")
        scored(executor, failing, r=spec("counted_once", timeout=30, on_error="count"))
    assert calls_of(tmp_path / "notes3") == ["raise", "raise"]


def test_what_is_remembered_is_logged_again(executor: RewardExecutor) -> None:
    for _ in range(2):
        rollouts, session = scored(executor, rollouts_of("abc"), r=spec("logs_once", timeout=30))
        assert rollouts[0].extras == {"shouted": "ABC"}
        assert metrics(session)["rewards/r/length"] == 3.0


def test_async_functions_wait_together_within_the_limit(executor: RewardExecutor) -> None:
    pool_rewards.MOST = 0
    rollouts = rollouts_of(*("x" * n for n in range(12)))
    rollouts, _ = scored(executor, rollouts, r=spec("waits", concurrency=4))
    assert parts(rollouts) == [float(n) for n in range(12)]
    assert pool_rewards.MOST == 4


def test_an_async_function_has_a_deadline_for_each_completion(executor: RewardExecutor) -> None:
    rollouts = rollouts_of("ok", "hang", "ok")
    rollouts, session = scored(executor, rollouts, r=spec("waits_or_minus_2", timeout=0.5))
    assert parts(rollouts) == [2.0, -2.0, 2.0]
    assert metrics(session) == {"rewards/r/timeouts": 1.0}


def test_an_async_function_that_raises(executor: RewardExecutor) -> None:
    with pytest.raises(TrainingError, match="'r' raised RuntimeError: in a coroutine at "):
        scored(executor, rollouts_of("ok", "raise"), r=spec("waits"))
    with pytest.raises(TrainingError, match="'r' raised TimeoutError"):
        scored(executor, rollouts_of("timeout"), r=spec("waits"))


def test_an_async_function_that_never_awaits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.scoring.scorer.GRACE", -0.99)
    executor = RewardExecutor(Scoring())
    with pytest.raises(TrainingError, match="'r' blocks its event loop: its calls do not end at"):
        scored(executor, rollouts_of("x"), r=spec("blocks", timeout=1.0, concurrency=1000))
    executor.close()


@pytest.mark.programs
def test_what_ends_a_coroutine_does_not_end_the_loop(executor: RewardExecutor) -> None:
    for text, error in (
        ("exit", "RuntimeError: SystemExit: 3 at"),
        ("cancel", "CancelledError"),
        ("interrupt", "RuntimeError: KeyboardInterrupt"),
        ("stubborn", "took more"),
        ("exit in a task", "RuntimeError|CancelledError|SystemExit|took more"),
    ):
        with pytest.raises(TrainingError, match=f"'r' (raised )?({error})"):
            verdict_of(executor, text)
        rollouts, _ = scored(executor, rollouts_of("fine"), r=spec("waits"))
        assert parts(rollouts) == [4.0], "the loop goes on"


def verdict_of(executor: RewardExecutor, text: str) -> None:
    rollouts, _ = scored(executor, rollouts_of(text), r=spec("ends", timeout=2.0))
    if rollouts[0].reward_parts["r"] is None:
        raise TrainingError("reward 'r' took more than its time")


def test_logged_metrics_are_averaged_over_calls_and_sheets(executor: RewardExecutor) -> None:
    found = [scored(executor, [r], r=spec("logs")) for r in rollouts_of("abc", "a", "abcde")]
    assert metrics(*(session for _, session in found)) == {"rewards/r/length": 3.0}
    extras = [r.extras for rollouts, _ in found for r in rollouts]
    assert extras == [{"shouted": text} for text in ("ABC", "A", "ABCDE")]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["clashes"], "rewards/a/advantage_share is a metric already"),
        (["miscounts"], r"log_extra\('one', ...\) with 1 values for 2 compl"),
        (["logs", "logs"], r"'b' called log_extra\('shouted', ...\), as another"),
    ],
)
def test_what_cannot_be_logged(executor: RewardExecutor, names: list[str], says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        scored(executor, rollouts_of("x", "y"), **dict(zip("ab", map(spec, names), strict=False)))


def test_time_counts_what_was_computed(executor: RewardExecutor) -> None:
    times = []
    for _ in range(2):
        _, session = scored(executor, rollouts_of("zz"), r=spec("slowly_once", timeout=30))
        times.append(metrics_of([session], Workers("cpu"))["time/rewards/r"])
    assert times[0] >= 0.05
    assert times[1] == 0.0


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_functions_read_the_log_of_the_run(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = RewardExecutor(Scoring(workers=1))
    sent: list[Any] = []
    send = Connection.send

    def spy(pipe: Connection, message: Any) -> None:
        sent.append(message)
        send(pipe, message)

    monkeypatch.setattr(Connection, "send", spy)
    log: list[dict[str, Any]] = [{"step": 1, "x": 1.0}, {"step": 2, "x": 20.0}]
    other: list[dict[str, Any]] = [{"step": 1, "x": 300.0}]
    for lines in (log[:1], log, log, other, [], log):
        state = TrainerState(log_history=list(lines))
        rollouts, _ = scored(executor, rollouts_of("x"), state, r=spec("log_of", timeout=timeout))
        assert parts(rollouts) == [sum(line["x"] for line in lines)]
    executor.close()
    if timeout is None:
        assert not sent
        return
    _, *calls = sent  # the first says what to import
    assert all(arguments["trainer_state"].log_history == [] for _, arguments, _ in calls)
    news = [new for _, _, (_, new) in calls]
    assert news == [log[:1], log[1:], [], other, [], log], "a worker keeps the lines that it has"


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("size", {"concurrency": 3}, "r.concurrency: is only read for async functions"),
        ("waits", {"timeout": 0.0}, "r.timeout: an async function has one"),
    ],
)
def test_settings_of_no_use(
    executor: RewardExecutor, name: str, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"reward.{message}"):
        make(executor, {"r": spec(name, **knobs)}, "answer")


@pytest.mark.programs
def test_a_recipe_may_undo_what_the_decorator_says(executor: RewardExecutor) -> None:
    terms = make(
        executor, {"r": spec("is_shouted"), "plain": spec("is_shouted", timeout=0)}
    ).rewards
    assert (terms["r"].timeout, terms["r"].cache) == (30, True)
    assert (terms["plain"].timeout, terms["plain"].cache) == (None, False)


def test_what_a_function_says_of_itself_is_for_the_log(executor: RewardExecutor) -> None:
    specs = {"plain": spec("size"), "r": spec("is_shouted", args={"level": 3})}
    assert make(executor, specs).descriptions == ["reward r: capitals, level 3"]
    with pytest.raises(UserError, match=r"^reward.r: no such level: 4$"):
        make(executor, {"r": spec("is_shouted", args={"level": 4})})


@pytest.mark.parametrize(("name", "knobs"), [("does", {"timeout": 30.0}), ("waits", {})])
def test_try_out_finds_failures(executor: RewardExecutor, name: str, knobs: dict[str, Any]) -> None:
    sample = Sample(0, "P", "raise", (0,), {"answer": "1"})
    with pytest.raises(UserError, match=r"^reward\.r: tried out on row 0 .*raised RuntimeError"):
        make(executor, {"r": spec(name, **knobs)}, "answer").try_out(sample)
    make(executor, {"r": spec(name, **knobs, on_error="count")}, "answer").try_out(sample)


def test_modules_are_imported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "REGISTERED", dict(rewards.REGISTERED))
    monkeypatch.chdir(tmp_path)
    text = "from grpo_cli.rewards import reward\n@reward\ndef brief{n}(completions): return [1.0]\n"
    for n in "12":
        (tmp_path / f"my_grpo_module{n}.py").write_text(text.format(n=n))
    registry.import_modules(["my_grpo_module1", "my_grpo_module2"], "grpo rewards")
    assert registry.resolve("brief1")([""]) == [1.0]
    (tmp_path / "my_grpo_module3.py").write_text(text.format(n="").replace("brief", "math"))
    with pytest.raises(UserError, match=r"my_grpo_module3:math (is called 'math', as|and grpo)"):
        registry.import_modules(["my_grpo_module3"], "grpo rewards")
    (tmp_path / "my_grpo_module4.py").write_text(text.format(n="1"))
    with pytest.raises(UserError, match=r"my_grpo_module4:brief1 and my_grpo_module1:brief1 have"):
        registry.import_modules(["my_grpo_module4"], "grpo rewards")
    with pytest.raises(UserError, match=r"^grpo rewards: nowhere: cannot import nowhere: .* it is"):
        registry.import_modules(["nowhere"], "grpo rewards")
    for name in ("my_grpo_module1.py", "./my/rewards.py"):
        with pytest.raises(UserError, match=r"; write my(_grpo_module1|\.rewards)$"):
            registry.import_modules([name], "grpo rewards")


def test_workers_are_this_processs_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert RewardExecutor(Scoring()).workers == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert RewardExecutor(Scoring()).workers == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert RewardExecutor(Scoring()).workers == 1
    assert RewardExecutor(Scoring(workers=3)).workers == 3
