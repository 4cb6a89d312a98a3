"""A loss and a rule are found by name or dotted path, and what the recipe gives them is checked."""

import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.algorithm.settings import Advantage, Loss
from grpo_cli.algorithm.variants import POLICY, RULES, find, own_arguments, readers, traits_of
from grpo_cli.errors import UserError
from grpo_cli.training.prepare import parse
from tests.algorithm.test_loss import measured, output_of, terms_of
from tests.config.test_parsing import recipe

MINE = """
from __future__ import annotations

from typing import Annotated

from torch import Tensor

from grpo_cli.algorithm.metric_sums import MetricSums
from grpo_cli.algorithm.variants import policy_loss
from grpo_cli.config.knob import Arg


def measure_gate(metric_sums: MetricSums, ratio: Tensor, mask: Tensor) -> None:
    metric_sums.mean("gate/ratio", ratio, mask)


@policy_loss(metrics=(measure_gate,))
def gated(
    ratio: Tensor,
    advantages: Tensor,
    *,
    slope: Annotated[float, Arg("Steepness of the gate.", gt=0, le=9)] = 2.0,
) -> Tensor:
    return -slope * ratio * advantages


def plain(ratio: Tensor, advantages: Tensor, *, power: int) -> Tensor:
    return -(ratio**power) * advantages


def odd(images: Tensor) -> Tensor:
    return images


def halved(rewards: Tensor, *, factor: float = 0.5) -> Tensor:
    return (rewards * factor).float()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, in the working directory."""
    (tmp_path / "mine_of_test_arguments.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_of_test_arguments", raising=False)
    find.cache_clear()
    return "mine_of_test_arguments"


def message(**changes: Any) -> str:
    with pytest.raises(UserError) as error:
        parse(recipe(**changes))
    return str(error.value)


def test_a_loss_of_the_users_with_an_argument_and_a_metric(mine: str) -> None:
    changes = {"loss.policy": f"{mine}:gated", "advantage.rule": f"{mine}:halved"}
    found = parse(recipe(**changes))
    assert found.loss.args == {"slope": 2.0}
    assert found.advantage.args == {"factor": 0.5}
    given = parse(recipe(**changes, **{"loss.args": {"slope": 3}}))
    assert given.loss.args == {"slope": 3.0}

    inputs = terms_of([[1.0, 0.0]], [[2.0, -1.0]], [[1, 1]])
    output = output_of(found.loss, inputs)
    assert output.loss.item() == pytest.approx(-2.0 * (math.e * 2 - 1) / 2)
    assert measured(found.loss, inputs)["gate/ratio"] == pytest.approx((math.e + 1) / 2)


def test_mistakes_are_one_sentence_each(mine: str) -> None:
    gated, plain = f"{mine}:gated", f"{mine}:plain"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss.policy": "cliped"}, "loss.policy = 'cliped': must be one of clipped, cispo"),
        ({"loss.policy": "not_there:f"}, "cannot import not_there: ModuleNotFoundError"),
        ({"loss.policy": f"{mine}:gate"}, f"{mine} has no 'gate'. Did you mean gated?"),
        ({"loss.policy": f"{mine}:odd"}, "takes 'images', which is not a tensor it can be given"),
        ({"loss.policy": plain}, "loss.args.power: is missing"),
        ({"loss.policy": plain, "loss.args": {"power": 1.5}}, "must be of type int"),
        ({"loss.policy": gated, "loss.args": {"slope": 0}}, "loss.args.slope = 0.0: must be > 0"),
        ({"loss.policy": gated, "loss.args": {"slop": 1}}, "no such argument; it has slope."),
        ({"loss.args": {"slope": 1}}, "args.slope: clipped has no such argument; it has delta"),
        ({"loss.policy": gated, "loss.epsilon": 0.3}, "loss.epsilon = 0.3: is only read with"),
        ({"advantage.rule": "grpo"}, "advantage.rule = 'grpo': must be one of group, rloo"),
    ]
    for changes, expected in cases:
        assert re.search(re.escape(expected), message(**changes)), (changes, message(**changes))


def test_each_shipped_function_has_a_default_for_its_arguments() -> None:
    for table, section in ((POLICY, Loss()), (RULES, Advantage())):
        for name, function in table.items():
            for own in own_arguments(function, section).values():
                assert own.arg.doc, f"{name}: an argument lacks its sentence"
            assert traits_of(function) is not None
            assert readers(function)[0] is function


@pytest.mark.parametrize("function", [*POLICY.values(), *RULES.values()])
def test_a_loss_and_its_metrics_agree_on_the_defaults(function: Any) -> None:
    defaults: dict[str, Any] = {}
    for reader in readers(function):
        for name, p in inspect.signature(reader).parameters.items():
            assert defaults.setdefault(name, p.default) == p.default, name
