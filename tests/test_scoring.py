import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_cli.config import Reward
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.rewards.exact_match import exact_match
from grpo_cli.rollouts import Rollout
from grpo_cli.scoring import Scorer, Signature, resolve, shipped
from tests.conftest import make_rollout

# Reward functions, found by the recipe under tests.test_scoring:NAME.


def text_length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def is_answer(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    return [None if a is None else float(c == a) for c, a in zip(completions, answer, strict=True)]


def mostly(completions: list[str], answer: Sequence[str] = (), *, level: int = 7) -> list[float]:
    return [float(level)] * len(completions)


def open_ended(completions: list[str], *, level: int = 7, **_: Any) -> list[float]:
    return [float(level)] * len(completions)


def demanding(completions: list[str], *, level: int) -> list[float]:
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


RETURNED: list[Any] = []


def returns(completions: list[str]) -> Any:
    return RETURNED[0]


def scorer(columns: Sequence[str] = ("answer", "level"), **rewards: Reward | str) -> Scorer:
    specs = {
        name: r if isinstance(r, Reward) else Reward(f"tests.test_scoring:{r}")
        for name, r in rewards.items()
    }
    return Scorer(specs, columns, "rows.jsonl")


def rollout(text: str = "", answer: str | None = "", row: int = 0, **columns: Any) -> Rollout:
    columns = {"answer": answer, "level": 3, **columns}
    return make_rollout(text=text, columns=columns, row=row, reward=math.nan, prompt="P")


def score(rollouts: list[Rollout], **rewards: Reward | str) -> list[float]:
    scorer(**rewards).score(rollouts)
    return [r.reward for r in rollouts]


def user_error(**rewards: Reward | str) -> str:
    with pytest.raises(UserError) as error:
        scorer(**rewards)
    return str(error.value)


def training_error(rollouts: list[Rollout], **rewards: Reward | str) -> str:
    with pytest.raises(TrainingError) as error:
        score(rollouts, **rewards)
    return str(error.value)


# Names.


def test_a_shipped_reward_by_its_short_name() -> None:
    assert resolve("exact_match") is exact_match
    assert {"exact_match", "math", "length", "boxed_format"} <= set(shipped())
    assert not any(name.startswith("_") for name in shipped())


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_reward_resolves(name: str) -> None:
    assert callable(resolve(name))


def test_a_function_of_a_module_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_grpo_rewards").mkdir()
    (tmp_path / "my_grpo_rewards" / "short.py").write_text("def brief(completions): return [1.0]")
    assert resolve("my_grpo_rewards.short:brief")([""]) == [1.0]
    with pytest.raises(UserError) as error:
        resolve("my_grpo_rewards.short:breif", "reward.r.function")
    assert str(error.value) == (
        "reward.r.function = my_grpo_rewards.short:breif: my_grpo_rewards.short has no function "
        "'breif'. Did you mean brief?"
    )
    (tmp_path / "my_broken_rewards.py").write_text("1 / 0")
    with pytest.raises(UserError) as error:
        resolve("my_broken_rewards:brief")
    assert str(error.value) == (
        "reward = my_broken_rewards:brief: cannot import my_broken_rewards: "
        "ZeroDivisionError: division by zero"
    )


def test_unknown_names() -> None:
    assert user_error(r=Reward("exact_mach")) == (
        "reward.r.function: there is no reward 'exact_mach'; there are "
        + ", ".join(sorted(shipped()))
        + ", or write your own as my_package.my_module:function. Did you mean exact_match?"
    )
    assert user_error(r=Reward("no_such_module:f")) == (
        "reward.r.function = no_such_module:f: cannot import no_such_module: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert user_error(r="RETURNED").startswith(
        "reward.r.function = tests.test_scoring:RETURNED: tests.test_scoring has no function"
    )


# Signatures.


def test_signature() -> None:
    assert Signature.of(is_answer) == Signature(("answer",), (), (), True)
    assert Signature.of(mostly) == Signature((), ("answer",), ("level",), False)
    assert Signature.of(text_length) == Signature((), (), (), False)


def test_a_column_that_the_data_lacks() -> None:
    with pytest.raises(UserError) as error:
        scorer(columns=["question", "gold"], r="is_answer")
    assert str(error.value) == (
        "reward.r: tests.test_scoring:is_answer needs the column 'answer', which rows.jsonl lacks; "
        "it has gold, question. Rename one with dataset.columns.answer=NAME."
    )
    scorer(columns=[], r="mostly")  # has a default
    scorer(columns=[], r=Reward("tests.test_scoring:is_answer", args={"answer": ["4"]}))


@pytest.mark.parametrize("function", ["mostly", "is_answer"])
def test_an_argument_that_a_function_does_not_take(function: str) -> None:
    found = user_error(r=Reward(f"tests.test_scoring:{function}", args={"levle": 1}))
    known, hint = {
        "mostly": ("answer, level", " Did you mean level?"),
        "is_answer": ("answer", ""),  # **_ is there for columns
    }[function]
    assert found == (
        f"reward.r.args.levle: tests.test_scoring:{function} takes no such argument; "
        f"it takes {known}.{hint}"
    )


def test_an_argument_without_a_default_must_be_given() -> None:
    found = user_error(r="demanding")
    assert found.startswith("reward.r")
    assert "'level'" in found
    scorer(r=Reward("tests.test_scoring:demanding", args={"level": 1}))


@pytest.mark.parametrize("function", ["mostly", "open_ended"])
def test_a_keyword_only_argument_is_not_filled_by_a_column(function: str) -> None:
    assert score([rollout(level=3)], r=function) == [7.0]
    given = Reward(f"tests.test_scoring:{function}", args={"level": 5})
    assert score([rollout(level=3)], r=given) == [5.0]


# Calls.


def test_what_a_function_is_called_with() -> None:
    SEEN.clear()
    score([rollout("a", "1", extra="e"), rollout("b", None, extra="f")], r="sees")
    assert SEEN == [
        {
            "prompts": ["P", "P"],
            "completions": ["a", "b"],
            "completion_ids": [[7, 8], [7, 8]],
            "answer": ["1", None],
            "level": [3, 3],
            "extra": ["e", "f"],
        }
    ]


def test_what_the_recipe_gives_wins_over_a_column() -> None:
    given = Reward("tests.test_scoring:is_answer", args={"answer": ["recipe's"]})
    assert score([rollout("recipe's", "column's")], r=given) == [1.0]


def test_chat_completions_come_in_trls_form() -> None:
    SEEN.clear()
    r = make_rollout(prompt=[{"role": "user", "content": "hi"}], text="ho")
    score([r], r="sees")
    assert SEEN[0]["prompts"] == [[{"role": "user", "content": "hi"}]]
    assert SEEN[0]["completions"] == [[{"role": "assistant", "content": "ho"}]]


def test_a_column_does_not_stand_in_for_what_was_sampled() -> None:
    SEEN.clear()
    taken = {"prompts": "column", "completions": "column", "completion_ids": "column"}
    score([rollout("sampled", **taken)], r="sees")
    assert SEEN[0]["completions"] == ["sampled"]
    assert SEEN[0]["prompts"] == ["P"]
    assert SEEN[0]["completion_ids"] == [[7, 8]]


def test_the_reward_is_the_weighted_sum() -> None:
    rollouts = [rollout("abc", "abc"), rollout("abcd", "x")]
    weighed = {
        "right": Reward("tests.test_scoring:is_answer", weight=2.0),
        "size": Reward("tests.test_scoring:text_length", weight=-0.5),
    }
    assert score(rollouts, **weighed) == [2 * 1 - 0.5 * 3, 2 * 0 - 0.5 * 4]
    # The parts are kept as they were, without weights.
    assert rollouts[0].reward_parts == {"right": 1.0, "size": 3.0}


def test_none_leaves_a_function_out_and_nothing_but_none_gives_nan() -> None:
    both = [rollout("abc", None), rollout("abc", "abc")]
    assert score(both, right="is_answer", size="text_length") == [3.0, 4.0]
    assert both[0].reward_parts == {"right": None, "size": 3.0}
    alone = [rollout("abc", None), rollout("abc", "abc")]
    rewards = score(alone, right="is_answer")
    assert math.isnan(rewards[0])
    assert rewards[1] == 1.0
    assert [r.loss_tokens for r in alone] == [0, 2]


def test_scoring_nothing_calls_nothing() -> None:
    assert score([], r="raises_on_pairs") == []


# What a function may get wrong.


def test_a_function_that_raises_is_blamed_with_row_and_completion() -> None:
    rollouts = [rollout("a", row=4), rollout("x", row=5), rollout("x", row=6)]
    found = training_error(rollouts, picky="raises_on_x")
    assert found.startswith(
        "reward 'picky' raised ValueError: could not convert string to float: 'no number' at "
    )
    line = raises_on_x.__code__.co_firstlineno + 1
    assert f"{Path(__file__).name}:{line}, for row 5, completion 'x'" in found


def test_a_function_that_raises_on_the_batch_alone() -> None:
    found = training_error([rollout(), rollout()], pair="raises_on_pairs")
    assert "AssertionError: one at a time" in found
    assert found.endswith("for some completion of the batch (not one by itself)")


def test_a_long_completion_is_shortened_in_messages() -> None:
    RETURNED[:] = ["s"]
    assert len(training_error([rollout("y" * 5000)], r="returns")) < 600


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ([1.0], "1 values"),
        ([1.0, 2.0, 3.0], "3 values"),
        (None, "None"),
        (1.0, "1.0"),
        ("ab", "'ab'"),
        ({0: 1, 1: 2}, "{0: 1, 1: 2}"),
        (np.ones(3), "3 values"),
    ],
)
def test_a_wrong_number_of_values(returned: Any, got: str) -> None:
    RETURNED[:] = [returned]
    assert training_error([rollout(), rollout()], r="returns") == (
        f"reward 'r' must return a list of 2 values, one a completion; it returned {got}."
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0", "a", [1.0], {}])
def test_a_value_that_is_not_a_finite_number(value: Any) -> None:
    RETURNED[:] = [[1.0, value]]
    assert training_error([rollout("a"), rollout("b", row=9)], r="returns") == (
        f"reward 'r' returned {value!r}, which is not a finite number or None, "
        "for row 9, completion 'b'"
    )


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
    rewards = score([rollout(), rollout()], r="returns")
    assert rewards == [1.0, 0.5]
    assert all(type(r) is float for r in rewards)
