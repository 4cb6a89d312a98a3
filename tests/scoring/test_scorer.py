import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.models import tiny
from grpo_cli.models.settings import Build
from grpo_cli.records import Rollout
from grpo_cli.rewards import reward
from grpo_cli.scoring.bound_reward import TrainerState
from grpo_cli.scoring.registry import resolve
from grpo_cli.scoring.scorer import RewardResult, Scorer
from grpo_cli.scoring.settings import Reward
from grpo_cli.scoring.step_rewards import token_of_character
from tests.conftest import make_rollout, score
from tests.episodes import MESSAGES, make_episode
from tests.tables import table

# Reward functions, found by the recipe under tests.scoring.test_scorer:NAME.


def text_length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def is_answer(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    return [None if a is None else float(c == a) for c, a in zip(completions, answer, strict=True)]


def mostly(completions: list[str], answer: Sequence[str] = (), *, level: int = 7) -> list[float]:
    return [float(level)] * len(completions)


def open_ended(completions: list[str], *, level: int = 7, **columns: Any) -> list[float]:
    assert "level" not in columns
    return [float(level)] * len(completions)


def raises_on_x(completions: list[str], **_: Any) -> list[float]:
    return [float({"x": "no number"}.get(c, 1)) for c in completions]


def raises_on_pairs(completions: list[str]) -> list[float]:
    assert len(completions) == 1, "one at a time"
    return [1.0]


SEEN: list[dict[str, Any]] = []


def sees(**everything: Any) -> list[float]:
    SEEN.append(everything)
    return [0.0] * len(everything["completions"])


def limited(completions: list[str], *, max_completion_tokens: int) -> list[float]:
    return [float(max_completion_tokens)] * len(completions)


def column_of_that_name(completions: list[str], max_completion_tokens: list[int]) -> list[float]:
    return [float(n) for n in max_completion_tokens]


RETURNED: list[Any] = []


def returns(completions: list[str]) -> Any:
    return RETURNED[0]


@reward(positions="tokens")
def returns_tokens(completions: list[str]) -> Any:
    return RETURNED[0]


Specs = Mapping[str, Reward | str]


def scorer(
    rewards: Specs,
    columns: Sequence[str] = ("answer", "level"),
    max_completion_tokens: int | None = None,
) -> Scorer:
    specs = {
        name: r if isinstance(r, Reward) else Reward(f"tests.scoring.test_scorer:{r}")
        for name, r in rewards.items()
    }
    run = {"max_completion_tokens": max_completion_tokens} if max_completion_tokens else {}
    return Scorer(specs, columns, "rows.jsonl", run=run)


def rollout(
    text: str = "",
    answer: str | None = "",
    row: int = 0,
    ids: Sequence[int] = (7, 8),
    **columns: Any,
) -> Rollout:
    columns = {"answer": answer, "level": 3, **columns}
    return make_rollout(
        completion_ids=ids, text=text, columns=columns, row=row, reward=math.nan, prompt="P"
    )


def scored(rollouts: list[Rollout], **rewards: Reward | str) -> list[Rollout]:
    return score(scorer(rewards), rollouts)[0]


def rewards_of(rollouts: list[Rollout], **rewards: Reward | str) -> list[float]:
    return [r.reward for r in scored(rollouts, **rewards)]


def user_error(says: str, **rewards: Reward | str) -> None:
    with pytest.raises(UserError, match=says):
        scorer(rewards)


def training_error(rollouts: list[Rollout], says: str, **rewards: Reward | str) -> None:
    with pytest.raises(TrainingError) as error:
        scored(rollouts, **rewards)
    assert says in str(error.value)


def test_function_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_grpo_rewards").mkdir()
    (tmp_path / "my_grpo_rewards" / "short.py").write_text("def brief(completions): return [1.0]")
    assert resolve("my_grpo_rewards.short:brief")([""]) == [1.0]
    with pytest.raises(UserError, match=r"reward\.r\.function = .* 'breif'\. Did you mean brief"):
        resolve("my_grpo_rewards.short:breif", "reward.r.function")


def test_unknown_names() -> None:
    user_error(r"reward\.r\.function: .* 'exact_mach'.* mean exact_match", r=Reward("exact_mach"))


def test_a_column_that_the_data_lacks() -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl: lacks the column 'answer' \(reward\.r\)"):
        scorer({"r": "is_answer"}, columns=["question", "gold"])
    scorer({"r": "mostly"}, columns=[])  # has a default
    given = Reward("tests.scoring.test_scorer:is_answer", args={"answer": ["4"]})
    scorer({"r": given}, columns=[])


def of_one(completion: str, answer: str) -> float:
    return 0.0


def of_its_prompt(prompt: list[str], completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "column"), [("of_one", "completion"), ("of_its_prompt", "prompt")]
)
def test_a_parameter_that_is_never_passed(function: str, column: str) -> None:
    path = f"tests.scoring.test_scorer:{function}"
    says = rf"reward\.r: .* passed as '{column}'; call the parameter {column}s, the list"
    with pytest.raises(UserError, match=says):
        scorer({"r": function}, columns=["answer", "prompt"])
    scorer({"r": Reward(path, args={column: "a"})}, columns=["answer"])


@pytest.mark.parametrize(
    ("function", "says"),
    [("mostly", "it takes answer, level. Did you mean level"), ("is_answer", "it takes answer.")],
)
def test_an_argument_that_a_function_does_not_take(function: str, says: str) -> None:
    given = Reward(f"tests.scoring.test_scorer:{function}", args={"levle": 1})
    user_error(rf"reward\.r\.args\.levle: .*takes no such argument; {says}", r=given)


@pytest.mark.parametrize("function", ["mostly", "open_ended"])
def test_a_keyword_only_argument_is_not_filled_by_a_column(function: str) -> None:
    assert rewards_of([rollout(level=3)], r=function) == [7.0]
    given = Reward(f"tests.scoring.test_scorer:{function}", args={"level": 5})
    assert rewards_of([rollout(level=3)], r=given) == [5.0]


def test_the_runs_limit_fills_an_argument_of_its_name_unless_the_recipe_sets_it() -> None:
    limited_to = Reward("tests.scoring.test_scorer:limited", args={"max_completion_tokens": 9})
    limited_by_run = Reward("tests.scoring.test_scorer:limited")
    rewards: Specs = {
        "runs": limited_by_run,
        "recipes": limited_to,
        "column": "column_of_that_name",
    }
    columns = ["max_completion_tokens"]
    made = scorer(rewards, columns=columns, max_completion_tokens=64)
    (r,), _ = score(made, [rollout(max_completion_tokens=5)])
    assert r.reward_parts == {"runs": 64.0, "recipes": 9.0, "column": 5.0}
    # Another run of the same recipe has its own limit.
    assert limited_by_run.args == {}
    (r,), _ = score(scorer(rewards, columns=columns, max_completion_tokens=32), [r])
    assert r.reward_parts == {"runs": 32.0, "recipes": 9.0, "column": 5.0}
    user_error(r"'max_completion_tokens'; set reward\.r\.args\.max_completion_tokens", r="limited")


def test_what_a_function_is_called_with() -> None:
    SEEN.clear()
    scored([rollout("a", "1", extra="e"), rollout("b", None, extra="f")], r="sees")
    for unlike in ("log_metric", "log_extra"):
        assert callable(SEEN[0].pop(unlike))
    assert [
        {
            "trainer_state": TrainerState(),
            "prompts": ["P", "P"],
            "completions": ["a", "b"],
            "completion_ids": [[7, 8], [7, 8]],
            "answer": ["1", None],
            "level": [3, 3],
            "extra": ["e", "f"],
        }
    ] == SEEN


def test_chat_completions_come_in_trls_form() -> None:
    SEEN.clear()
    r = make_rollout(prompt=[{"role": "user", "content": "hi"}], text="ho")
    scored([r], r="sees")
    assert SEEN[0]["prompts"] == [[{"role": "user", "content": "hi"}]]
    assert SEEN[0]["completions"] == [[{"role": "assistant", "content": "ho"}]]


def test_an_episode_comes_with_all_its_messages() -> None:
    SEEN.clear()
    r = make_episode((0.5, None), env_rewards={"Guess": 1.0})
    scored([r], r="sees")
    assert SEEN[0]["completions"] == [list(MESSAGES)]
    assert SEEN[0]["completion_ids"] == [r.completion.ids]
    (episode,) = SEEN[0]["episodes"]
    assert episode["messages"] == list(MESSAGES)
    assert [(t["start"], t["end"], t["by"], t["reward"]) for t in episode["turns"]] == [
        (0, 2, "model", 0.5),
        (2, 4, "environment", None),
        (4, 6, "model", None),
    ]
    assert episode["stop_reason"] == "answered"
    assert episode["rewards"] == {"Guess": 1.0}
    scored([rollout("abc")], r="sees")
    assert "episodes" not in SEEN[1], "which **kwargs would take"


@pytest.mark.parametrize("reason", ["env_error", "env_timeout"])
def test_a_rollout_whose_environment_failed_is_not_scored(reason: str) -> None:
    SEEN.clear()
    failed, good = make_episode(stop_reason=reason, env_rewards={"Guess": 1.0}), make_episode()
    failed, good = scored(
        [failed, good],
        r="sees",
        size=Reward("length", args={"target": 0}),
        own=Reward("environment"),
    )
    assert math.isnan(failed.reward), "never 0.0"
    assert failed.reward_parts == {"r": None, "size": None, "own": None}
    assert failed.loss_tokens == 0
    assert good.reward == -len("It is 42.")
    assert [len(call["completions"]) for call in SEEN] == [1]
    SEEN.clear()
    assert math.isnan(rewards_of([failed], r="sees")[0])
    assert SEEN == [], "no function is called"


def test_the_environments_reward_is_credited_to_turns_if_the_run_says_so() -> None:
    r = make_episode((0.5, None), env_rewards={"Guess": 1.0})
    specs = {"own": Reward("environment", weight=2.0)}
    (r,), _ = score(Scorer(specs, (), "rows.jsonl", run={"episode_credit": "turns"}), [r])
    assert r.step_rewards == {"own": [(1, 1.0), (5, 2.0)]}
    assert (r.reward, r.reward_parts) == (3.0, {"own": 1.5})
    assert math.isnan(r.outcome_reward)
    summed = Scorer(specs, (), "rows.jsonl", run={"episode_credit": "sum"})
    (r,), _ = score(summed, [make_episode((0.5, None))])
    assert (r.reward, r.step_rewards) == (1.0, {})


def test_steps_of_an_episode_are_counted_in_tokens() -> None:
    RETURNED[:] = [[[(1, 0.5)]]]
    (r,) = scored([make_episode()], r="returns_tokens")
    assert r.step_rewards == {"r": [(1, 0.5)]}
    with pytest.raises(TrainingError, match=r"by characters.*@reward\(positions="):
        scored([r], r="returns")


def test_the_reward_is_the_weighted_sum() -> None:
    weighed = {
        "right": Reward("tests.scoring.test_scorer:is_answer", weight=2.0),
        "size": Reward("tests.scoring.test_scorer:text_length", weight=-0.5),
    }
    rollouts = scored([rollout("abc", "abc"), rollout("abcd", "x")], **weighed)
    assert [r.reward for r in rollouts] == [2 * 1 - 0.5 * 3, 2 * 0 - 0.5 * 4]
    # The parts are kept as they were, without weights.
    assert rollouts[0].reward_parts == {"right": 1.0, "size": 3.0}
    # Without steps the outcome is all of the reward.
    assert [r.outcome_reward for r in rollouts] == [0.5, -2.0]
    assert [r.step_rewards for r in rollouts] == [{}, {}]


def test_none_leaves_a_function_out_and_nothing_but_none_gives_nan() -> None:
    rollouts = [rollout("abc", None), rollout("abc", "abc")]
    both = scored(rollouts, right="is_answer", size="text_length")
    assert [r.reward for r in both] == [3.0, 4.0]
    assert both[0].reward_parts == {"right": None, "size": 3.0}
    alone = scored(rollouts, right="is_answer")
    assert math.isnan(alone[0].reward)
    assert alone[1].reward == 1.0
    assert math.isnan(alone[0].outcome_reward)
    assert [r.loss_tokens for r in alone] == [0, 2]


def tells_it_to_end(completions: list[str]) -> list[float]:
    SEEN.append({"called": "first"})
    heartbeat.leave = lambda: True
    return [1.0] * len(completions)


def test_a_run_may_leave_between_two_functions() -> None:
    SEEN.clear()
    session, one = scorer({"first": "tells_it_to_end", "second": "sees"}).begin(), rollout()
    session.add([one])
    try:
        with pytest.raises(heartbeat.WorkInterrupted):
            session.finish([one])
    finally:
        heartbeat.leave = None
    assert SEEN == [{"called": "first"}]


def test_a_function_that_raises_is_blamed_with_row_and_completion() -> None:
    rollouts = [rollout("a", row=4), rollout("x", row=5), rollout("x", row=6)]
    line = raises_on_x.__code__.co_firstlineno + 1
    says = f"{Path(__file__).name}:{line}, for row 5, completion 'x'"
    training_error(rollouts, says, picky="raises_on_x")


def test_a_function_that_raises_on_the_batch_alone() -> None:
    says = ", for some completion of the batch (not one by itself)"
    training_error([rollout(), rollout()], says, pair="raises_on_pairs")


@pytest.mark.parametrize(
    "returned",
    [
        (1, 0.5),
        [True, 0.5],
        [np.float32(1), np.float64(0.5)],
        np.array([1, 0.5]),
        torch.tensor([1, 0.5]),
        [torch.tensor(1.0), 0.5],
    ],
    ids=repr,
)
def test_numbers_of_every_kind_are_taken(returned: Any) -> None:
    RETURNED[:] = [returned]
    rewards = rewards_of([rollout(), rollout()], r="returns")
    assert rewards == [1.0, 0.5]
    assert all(type(r) is float for r in rewards)


def by(positions: str, weight: float = 1.0) -> Reward:
    name = "returns" if positions == "characters" else "returns_tokens"
    return Reward(f"tests.scoring.test_scorer:{name}", weight=weight)


def encoded(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return tokenizer(text)["input_ids"]


def test_steps_by_tokens() -> None:
    RETURNED[:] = [[[(0, 1.0), (2, -0.5)], [[1, 2]], ((2, True), (2, 0.25))]]
    rollouts = scored([rollout("abc", ids=[7, 8, 9]) for _ in range(3)], r=by("tokens"))
    assert [r.step_rewards for r in rollouts] == [
        {"r": [(0, 1.0), (2, -0.5)]},
        {"r": [(1, 2.0)]},
        {"r": [(2, 1.0), (2, 0.25)]},
    ]
    assert [r.reward_parts for r in rollouts] == [{"r": 0.5}, {"r": 2.0}, {"r": 1.25}]
    assert [r.reward for r in rollouts] == [0.5, 2.0, 1.25]
    assert all(math.isnan(r.outcome_reward) for r in rollouts)
    assert all(type(v) is float for r in rollouts for _, v in r.step_rewards["r"])
    assert [r.loss_tokens for r in rollouts] == [3, 3, 3], "steps alone train"


def test_steps_by_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "aé中b"  # characters of 1, 2, 3 and 1 byte, a token each byte
    RETURNED[:] = [[[(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]]]
    r = rollout(text, ids=encoded(text, tokenizer))
    (r,), _ = score(scorer({"r": by("characters")}), [r], tokenizer)
    assert r.step_rewards == {"r": [(0, 1.0), (2, 2.0), (5, 3.0), (6, 4.0)]}
    assert r.reward == 10.0


@pytest.mark.parametrize("text", ["plain", "aé中😀b", "中文中文", "é", "😀😀", "x\n é\n\n12 中"])
@pytest.mark.parametrize("merges", [0, 30])
def test_the_token_of_a_character_is_the_first_that_completes_it(text: str, merges: int) -> None:
    tokenizer = tiny.make_tokenizer(
        Build(merges=merges), ["plain x\n é\n\n12 中 中文中文 aé中"] * 9
    )
    ids = encoded(text, tokenizer)
    for position in range(len(text)):
        written = [
            tokenizer.decode(ids[: t + 1]).startswith(text[: position + 1]) for t in range(len(ids))
        ]
        assert token_of_character(ids, position, tokenizer) == written.index(True), position


def test_special_tokens_write_no_character(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*encoded("a", tokenizer), 2, 0, *encoded("b", tokenizer), 2]
    assert token_of_character(ids, 0, tokenizer) == 0
    assert token_of_character(ids, 1, tokenizer) == 3


def test_last_character_of_a_truncated_completion(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encoded("a中", tokenizer)[:-1]
    text = tokenizer.decode(ids)
    assert text == "a\ufffd", "what a reward function is shown"
    assert token_of_character(ids, 0, tokenizer) == 0
    assert token_of_character(ids, 1, tokenizer) in (1, 2)


def test_weights_apply_to_steps_and_outcomes_leave_them_out() -> None:
    RETURNED[:] = [[[(0, 1.0), (1, 3.0)], [(1, -1.0)]]]
    rewards: dict[str, Reward | str] = {
        "steps": by("tokens", weight=0.5),
        "size": Reward("tests.scoring.test_scorer:text_length", weight=2.0),
        "right": "is_answer",
    }
    rollouts = scored([rollout("abc", "abc"), rollout("abc", None)], **rewards)
    assert [r.step_rewards for r in rollouts] == [
        {"steps": [(0, 0.5), (1, 1.5)]},
        {"steps": [(1, -0.5)]},
    ]
    assert [r.reward_parts["steps"] for r in rollouts] == [4.0, -1.0]  # unweighted, as ever
    assert [r.outcome_reward for r in rollouts] == [2 * 3 + 1, 2 * 3]
    assert [r.reward for r in rollouts] == [0.5 * 4 + 7, 0.5 * -1 + 6]


def test_numbers_none_and_steps_in_one_list() -> None:
    RETURNED[:] = [[0.25, None, [(1, 3.0)], []]]
    rollouts = scored([rollout() for _ in range(4)], r=by("tokens", weight=2.0))
    rewards = [r.reward for r in rollouts]
    assert rewards[0] == 0.5
    assert math.isnan(rewards[1])
    assert rewards[2:] == [6.0, 0.0]
    outcomes = [r.outcome_reward for r in rollouts]
    assert outcomes == pytest.approx([0.5, math.nan, math.nan, math.nan], nan_ok=True)
    assert [r.reward_parts["r"] for r in rollouts] == [0.25, None, 3.0, 0.0]
    assert [r.step_rewards for r in rollouts] == [{}, {}, {"r": [(1, 6.0)]}, {"r": []}]
    # No step was found, which is not the same as a function that does not apply.
    assert [r.loss_tokens for r in rollouts] == [2, 0, 2, 2]


def test_a_step_without_a_value_is_left_out() -> None:
    RETURNED[:] = [[[(0, None), (1, 3.0)]]]
    (r,) = scored([rollout()], r=by("tokens"))
    assert r.reward == 3.0
    assert r.step_rewards == {"r": [(1, 3.0)]}


A_STEP = "must be (position of its last of 2 tokens, counted from 0; value)"
FORMS = [(2, 1.0), (-1, 1.0), (True, 1.0), ("1", 1.0), (1, 1.0, 1.0), "ab", 1.0, {}]
BEYOND = "returned a number beyond ±1e+100; scale the reward down, for row 9"
TOO_LARGE = [1.1e100, -1e160, 10**400, -(10**5000)]


@table(
    "positions, returned, says",
    [
        *(
            ("characters", wrong, f"of 2 values, one a completion; it returned {got}.")
            for wrong, got in (([1.0], "1 values"), (None, "None"), (np.ones(3), "3 values"))
        ),
        *(
            ("characters", [1.0, value], f"returned {value!r}, which is not a finite number")
            for value in (math.nan, math.inf, -math.inf, "1.0", "a", {}, np.ones(2))
        ),
        *(("tokens", [0.5, [(0, 1.0), step]], f"the step {step!r}: {A_STEP}") for step in FORMS),
        *(
            (kind, [1.0, wrong], BEYOND)
            for value in TOO_LARGE
            for kind, wrong in (("characters", value), ("tokens", [(0, value)]))
        ),
    ],
)
def test_what_a_function_may_not_return(positions: str, returned: Any, says: str) -> None:
    RETURNED[:] = [returned]
    training_error([rollout("a"), rollout("b", row=9)], says, r=by(positions))


def test_the_largest_values_are_taken() -> None:
    RETURNED[:] = [[1e100, -1e100, 10**100]]
    assert rewards_of([rollout(), rollout(), rollout()], r="returns") == [1e100, -1e100, 1e100]


def test_positions_are_bounded_by_what_they_count(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*encoded("é", tokenizer), 2]  # three tokens, one character
    RETURNED[:] = [[[(1, 1.0)]]]
    says = "the step (1, 1.0): must be (position of its last of 1 characters"
    training_error([rollout("é", ids=ids)], says, r=by("characters"))
    RETURNED[:] = [[[(2, 1.0)]]]
    assert rewards_of([rollout("é", ids=ids)], r=by("tokens")) == [1.0]


def leaves(completions: list[str], **_: Any) -> list[float]:
    raise SystemExit(0)


def test_a_reward_that_leaves_the_program_is_an_error_and_no_success() -> None:
    scorer = Scorer({"r": Reward("tests.scoring.test_scorer:leaves")}, [], "here")
    with pytest.raises(TrainingError, match="'r' raised SystemExit"):
        score(scorer, [make_rollout()])


def test_an_error_does_not_repeat_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-12345678")
    result = RewardResult(error="raised 401: bad key sk-12345678")
    assert result.error == "raised 401: bad key $MY_API_KEY"
