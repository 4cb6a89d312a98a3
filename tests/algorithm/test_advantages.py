"""Each rule against literal cases, against tests/reference_advantages.py, and what all rules share.

A new rule is covered by what all share as soon as it has a YAML; it needs cases of its own besides,
and a function of its name in the reference.
"""

import dataclasses
import inspect
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from grpo_cli.algorithm.advantages import (
    RULES,
    advantage_shares,
    all_equal,
    gdpo,
    group_mean,
    group_relative,
    level_rewards,
    max_rl,
    opo,
    pass_at_k,
    process_advantages,
    reinforce_pp,
    rloo,
    turn_advantages,
)
from grpo_cli.algorithm.settings import Advantage
from grpo_cli.algorithm.variants import apply, knobs_read, own_arguments, parameters
from grpo_cli.records import RolloutStats
from grpo_cli.training.rollouts.credit import reward_tensors
from tests import reference_advantages as reference
from tests.conftest import make_rollout
from tests.programs import ROOT
from tests.tables import table

NAN = math.nan
FOLDER = ROOT / "recipes" / "advantage"


def shipped_settings() -> dict[str, Advantage]:
    out = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        settings = yaml.safe_load(path.read_text("utf-8"))
        del settings["defaults"]
        out[path.stem] = Advantage(**settings)
    return out


SETTINGS = shipped_settings()
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def double(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def advantages(rewards: list[float], scale: str = "group") -> list[float]:
    return group_relative(double([rewards]), scale=scale)[0].tolist()


# Literal cases.


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # std = sqrt(4 · 0.25 / 3) = 0.57735027; 0.5 / (std + 0.0001) = 0.86587550
        ([1.0, 0.0, 0.0, 1.0], [0.8658755, -0.8658755, -0.8658755, 0.8658755]),
        # mean 0.25, std = sqrt((0.5625 + 3 · 0.0625) / 3) = 0.5
        ([1.0, 0.0, 0.0, 0.0], [1.4997001, -0.4999000, -0.4999000, -0.4999000]),
        # mean 2, std = sqrt(2): 1 / 1.41431356
        ([3.0, 1.0], [0.7070568, -0.7070568]),
        # a spread as small as eps: mean 1e-4, std = sqrt(2) · 1e-4, 1 / (1.41421356 + 1)
        ([2e-4, 0.0], [0.4142136, -0.4142136]),
    ],
)
def test_group_relative_by_hand(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards) == pytest.approx(expected, abs=1e-6)


def test_scale_none_only_subtracts_the_mean() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], "none") == [0.75, -0.25, -0.25, -0.25]
    assert advantages([5.0, -1.0, NAN], "none") == [3.0, -3.0, 0.0]


def test_scale_batch_divides_by_the_std_of_the_step() -> None:
    # less 0.5 and 1; all four have the mean 0.75 and the std sqrt((3 · 0.0625 + 0.5625) / 3) = 0.5
    out = group_relative(double([[1.0, 0.0], [1.0, 1.0]]), scale="batch")
    assert out[0].tolist() == pytest.approx([0.99980004, -0.99980004], abs=1e-6)
    assert out[1].tolist() == [0.0, 0.0]


def test_rloo_by_hand() -> None:
    # 1 − 0; 0 − 1/3. Then 1 − 0 and 0 − 1; a reward alone has nothing to be compared to.
    rows = [[1.0, 0.0, 0.0, 0.0], [1.0, NAN, 0.0, NAN], [NAN, 7.0, NAN, NAN]]
    expected = [[1.0, -1 / 3, -1 / 3, -1 / 3], [1.0, 0.0, -1.0, 0.0], [0.0] * 4]
    torch.testing.assert_close(rloo(double(rows)), torch.tensor(expected))


def test_reinforce_pp_by_hand() -> None:
    rewards = double([[1.0, 0.0], [1.0, 1.0]])
    # less the groups' means: 0.5, −0.5, 0, 0, with std sqrt(0.5 / 3) = 0.40824829
    expected = [[1.22444473, -1.22444473], [0.0, 0.0]]
    out = reinforce_pp(rewards, baseline="group")
    torch.testing.assert_close(out, torch.tensor(expected), atol=1e-6, rtol=0)
    # mean 0.75, std 0.5: the second prompt, always solved, is pushed up as well
    expected = [[0.49990002, -1.49970006], [0.49990002, 0.49990002]]
    out = reinforce_pp(rewards, baseline="none")
    torch.testing.assert_close(out, torch.tensor(expected), atol=1e-6, rtol=0)


def test_reinforce_pp_without_a_baseline_takes_single_completions() -> None:
    # mean 0.5, std sqrt(0.5): 0.5 / 0.70720678
    out = reinforce_pp(double([[1.0], [0.0], [NAN]]), baseline="none")
    assert out.flatten().tolist() == pytest.approx([0.7070068, -0.7070068, 0.0], abs=1e-6)
    for size in range(1, 40):  # a step of equal rewards is silent, whatever their mean is off by
        rewards = torch.full((size, 3), 0.1, dtype=torch.float64)
        assert reinforce_pp(rewards, baseline="none").eq(0).all()


def test_reinforce_pp_refuses_an_unknown_baseline() -> None:
    with pytest.raises(AssertionError, match="unknown baseline 'batch'"):
        reinforce_pp(double([[1.0, 0.0]]), baseline="batch")


def test_opo_by_hand() -> None:
    rewards = double([[1.0, 0.0, NAN], [2.0, 1.0, 0.0]])
    lengths = double([[30, 10, 99], [1, 2, 1]])
    # 30 / 40 of the first group's tokens have the reward 1; then (1·2 + 2·1) / 4
    expected = [[0.25, -0.75, 0.0], [1.0, 0.0, -1.0]]
    assert opo(rewards, lengths).tolist() == expected


def test_pass_at_k_of_real_rewards_by_hand() -> None:
    # The best of each pair of 0, 1, 3: 1, 3, 3, with mean 7/3 and std sqrt(8/9). Pairs with the 0:
    # 1 and 3, as with the 1; with the 3: 3 and 3.
    expected = [-0.35355339, -0.35355339, 0.70710678, 0.0]
    out = pass_at_k(double([[0.0, 1.0, 3.0, NAN]]), k=2)[0].tolist()
    assert out == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("n", range(2, 10))
def test_pass_at_k_of_zeros_and_ones_is_the_papers_closed_form(n: int) -> None:
    for k in range(1, n + 1):
        for wrong in range(n + 1):
            rate = 1 - comb(wrong, k) / comb(n, k)
            sigma = sqrt(rate * (1 - rate))
            of_right = of_wrong = 0.0
            if sigma > 0:
                of_right = (1 - rate) / sigma
                of_wrong = (1 - rate - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / sigma
            out = pass_at_k(double([[0.0] * wrong + [1.0] * (n - wrong)]), k=k)[0].tolist()
            expected = [of_wrong] * wrong + [of_right] * (n - wrong)
            assert out == pytest.approx(expected, abs=1e-6), (n, k, wrong)


def test_max_rl_by_hand() -> None:
    rows = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, NAN, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0, 1.0, NAN, 0.0]]
    expected = [[3.0, -1.0, -1.0, -1.0], [0.5, 0.5, 0.0, -1.0], [0.0] * 4, [1.0, 0.0, 0.0, -1.0]]
    torch.testing.assert_close(max_rl(double(rows)), torch.tensor(expected))


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"max_rl needs rewards >= 0; there is a -0\.5\."):
        max_rl(double([[1.0, 0.0, NAN], [NAN, -0.25, -0.5]]))
    max_rl(double([[0.0, NAN]]))


def test_gdpo_by_hand() -> None:
    # z = 0.5 / (sqrt(0.5) + 1e-4) in each group and part that differs, so the sums are 2z, −2z in
    # one group and z, −z in the other: mean 0, std z · sqrt(10 / 3) = 1.29081234, + 1e-4.
    correct = double([[1.0, 0.0], [1.0, 0.0]])
    tidy = double([[1.0, 0.0], [0.0, 0.0]])
    out = gdpo(torch.stack([correct, tidy], -1), double([1.0, 1.0]))
    expected = [[1.09536026, -1.09536026], [0.54768013, -0.54768013]]
    torch.testing.assert_close(out, torch.tensor(expected), atol=1e-6, rtol=0)


# Against the reference.


@dataclass(frozen=True)
class Step:
    """Two reward functions' values and their sum, ragged; None where there is none."""

    parts: tuple[list[list[float | None]], list[list[float | None]]]
    lengths: list[list[int]]
    weights: tuple[float, float] = (1.0, 0.5)

    @property
    def rewards(self) -> list[list[float | None]]:
        out: list[list[float | None]] = []
        for one, two in zip(*self.parts, strict=True):
            row: list[float | None] = []
            for values in zip(one, two, strict=True):
                there = [w * v for w, v in zip(self.weights, values, strict=True) if v is not None]
                row.append(math.fsum(there) if there else None)
            out.append(row)
        return out

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {
            "rewards": padded(self.rewards),
            "parts": torch.stack([padded(part) for part in self.parts], dim=-1),
            "weights": double(self.weights),
            "lengths": padded(self.lengths).nan_to_num(),
        }


def padded(rows: Sequence[Sequence[float | None]]) -> Tensor:
    width = max(map(len, rows))
    return double(
        [[NAN if v is None else v for v in row] + [NAN] * (width - len(row)) for row in rows]
    )


def random_step(seed: int) -> Step:
    """Binary or real rewards (the seed's parity) in groups of 2 to 9, the awkward ones included."""
    draw = random.Random(seed)
    real = seed % 2 == 1

    def value() -> float | None:
        return draw.choice([None, *[draw.random() if real else float(draw.random() < 0.5)] * 5])

    sizes = [draw.randint(2, 9) for _ in range(draw.randint(1, 6))]
    one = [[value() for _ in range(size)] for size in sizes]
    two = [[value() for _ in range(size)] for size in sizes]
    same, alone = draw.random(), draw.random()
    one += [[None] * 3, [None, alone, None], [same] * 4, [1.0] * 9, [0.0] * 2]
    two += [[None] * 3, [None] * 3, [None] * 4, [same] * 9, [0.0] * 2]
    lengths = [[draw.randint(1, 50) for _ in row] for row in one]
    return Step((one, two), lengths)


def from_the_paper(step: Step, settings: Advantage) -> list[list[float]]:
    """What the reference of the rule's name makes of the step, by the names of its parameters."""
    function = getattr(reference, settings.rule)
    offered = {
        "groups": step.rewards, "lengths": step.lengths, "parts": step.parts,
        "weights": step.weights, "scale": settings.scale, **settings.args,
    }  # fmt: skip
    found: list[list[float]] = function(*map(offered.get, inspect.signature(function).parameters))
    return found


MORE = {
    "reinforce_pp-none": Advantage(rule="reinforce_pp", args={"baseline": "none"}),
    **{f"pass_at_{k}": Advantage(rule="pass_at_k", args={"k": k}) for k in (1, 2, 3, 9)},
}


@pytest.mark.parametrize("settings", [*SETTINGS.values(), *MORE.values()], ids=[*SETTINGS, *MORE])
def test_the_reference_says_the_same(settings: Advantage) -> None:
    for seed in range(30):
        step = random_step(seed)
        found = apply(RULES[settings.rule], step.tensors, settings)
        expected = from_the_paper(step, settings)
        for row, literal in zip(found.tolist(), expected, strict=True):
            padding = [0.0] * (len(row) - len(literal))
            assert row == pytest.approx(literal + padding, abs=1e-6, rel=1e-6), seed


def test_the_reference_of_process_supervision_says_the_same() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 12) for _ in range(draw.randint(2, 9))]
        steps = [
            [(draw.randrange(length), draw.random()) for _ in range(draw.randint(0, 4))]
            for length in lengths
        ]
        found = process_advantages(steps, lengths)
        for row, literal in zip(found, reference.process(steps, lengths), strict=True):
            assert row.tolist() == pytest.approx(literal, abs=1e-6, rel=1e-6), seed


# What all rules share.


def tensors_of(rewards: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """All that a rule can ask for. The second function is equal and missing where the first is."""
    if lengths is None:
        lengths = torch.arange(1, rewards.numel() + 1, dtype=torch.float64).reshape(rewards.shape)
    return {
        "rewards": rewards,
        "parts": torch.stack([rewards, rewards.square()], dim=-1),
        "weights": double([1.0, 0.5]),
        "lengths": lengths,
    }


def computed(settings: Advantage, tensors: dict[str, Tensor]) -> Tensor:
    return apply(RULES[settings.rule], tensors, settings)


@pytest.fixture
def rewards() -> Tensor:
    """[5, 8] in [0, 1): a missing one, a group of equal ones, and one of zeros and ones."""
    draw = torch.Generator().manual_seed(0)
    out = torch.rand(5, 8, dtype=torch.float64, generator=draw)
    out[1, 2] = NAN
    out[2] = 0.1
    out[3] = out[3].round()
    return out


EQUAL = [0.0, 1.0, 0.1, 0.3, 1 / 3, 1e6 + 0.1]


def equal_groups(size: int, values: Sequence[float]) -> Tensor:
    """A group of each value; then one with a signal, without which a step has no scale."""
    rows = [[value] * size + [NAN] for value in values]
    return double([*rows, [float(i % 3) for i in range(size + 1)]])


@every_setting
def test_equal_rewards_get_exactly_zero(settings: Advantage) -> None:
    values = EQUAL if settings.rule == "max_rl" else [*EQUAL, -3.0, -0.1]
    for size in range(2, 41):
        out = computed(settings, tensors_of(equal_groups(size, values)))
        assert out[:-1].eq(0).all(), size
        assert out.isfinite().all()


def test_a_mean_of_equal_rewards_can_be_off_by_an_ulp() -> None:
    # Without this the test above could not fail.
    groups = [equal_groups(size, [0.1])[0] for size in range(2, 41)]
    off = [(group_mean(row[None]) - 0.1).abs().item() for row in groups]
    assert 0 < max(off) < 1e-15


@every_setting
def test_a_step_without_any_signal_or_reward_is_all_zeros(settings: Advantage) -> None:
    for rows in ([[0.1] * 3, [0.3] * 3], [[NAN] * 3, [0.7, NAN, NAN]], [[NAN] * 3] * 2):
        out = computed(settings, tensors_of(double(rows)))
        assert out.eq(0).all(), rows


@every_setting
def test_a_higher_reward_never_gets_a_lower_advantage(settings: Advantage, rewards: Tensor) -> None:
    out = computed(settings, tensors_of(rewards))
    for row, advantage in zip(rewards, out, strict=True):
        there = (~row.isnan()).nonzero().squeeze(-1)
        ordered = advantage[there[row[there].argsort()]]
        assert (ordered.diff() >= -1e-6).all()
    assert out[0].max() > 0.1
    assert out[0].min() < -0.1


# max_rl divides by the mean, which a shift changes: by definition not what these tests are about.
LEVEL_FREE = {name: s for name, s in (SETTINGS | MORE).items() if s.rule != "max_rl"}
# The std of all rewards of the step grows as its groups are moved apart, and without a baseline
# nothing takes a group's level away: there only a shift of the whole step changes nothing.
OF_GROUPS = {
    name: s
    for name, s in LEVEL_FREE.items()
    if (s.rule, s.scale) != ("group", "batch") and s.args != {"baseline": "none"}
}


def shifted_by(shift: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    moved = {"rewards": tensors["rewards"] + shift, "parts": tensors["parts"] + shift[..., None]}
    return tensors | moved


@pytest.mark.parametrize("name", LEVEL_FREE)
def test_a_shift_of_rewards_changes_nothing(name: str, rewards: Tensor) -> None:
    given, settings = tensors_of(rewards), LEVEL_FREE[name]
    shifts = [double([[5.0]])]
    shifts += [double([[3.0], [-7.0], [0.5], [100.0], [0.0]])] if name in OF_GROUPS else []
    for shift in shifts:
        found = computed(settings, shifted_by(shift, given))
        torch.testing.assert_close(found, computed(settings, given), atol=1e-6, rtol=1e-6)


@every_setting
def test_rollouts_without_a_reward_get_zero_and_change_no_other(settings: Advantage) -> None:
    draw = torch.Generator().manual_seed(1)
    rewards = torch.rand(4, 5, dtype=torch.float64, generator=draw)
    lengths = torch.randint(1, 50, (4, 5), generator=draw).double()
    # The same rollouts with three without a reward strewn among them, and a group of such.
    places = torch.stack([torch.randperm(8, generator=draw)[:5].sort().values for _ in range(4)])
    strewn = torch.full((5, 8), NAN, dtype=torch.float64)
    strewn[:4].scatter_(1, places, rewards)
    longer = torch.full((5, 8), 70.0, dtype=torch.float64)
    longer[:4].scatter_(1, places, lengths)
    out = computed(settings, tensors_of(strewn, longer))
    assert out[strewn.isnan()].eq(0).all()
    expected = computed(settings, tensors_of(rewards, lengths))
    torch.testing.assert_close(out[:4].gather(1, places), expected, atol=1e-6, rtol=1e-6)


@every_setting
def test_order_does_not_matter(settings: Advantage, rewards: Tensor) -> None:
    draw = torch.Generator().manual_seed(2)
    order = torch.stack([torch.randperm(8, generator=draw) for _ in range(5)])
    groups = torch.tensor([3, 0, 4, 2, 1])
    given = tensors_of(rewards)
    mixed = {
        name: values
        if name == "weights"
        else values.gather(1, order[..., None].expand_as(values))[groups]
        if values.ndim == 3
        else values.gather(1, order)[groups]
        for name, values in given.items()
    }
    expected = computed(settings, given).gather(1, order)[groups]
    torch.testing.assert_close(computed(settings, mixed), expected, atol=1e-6, rtol=1e-6)


# Where something is taken over the whole step, a group's advantages depend on the others.
ALONE = {
    name: s
    for name, s in SETTINGS.items()
    if s.scale != "batch" and s.rule not in ("reinforce_pp", "gdpo")
}


@pytest.mark.parametrize("settings", ALONE.values(), ids=ALONE)
def test_groups_do_not_change_one_another(settings: Advantage, rewards: Tensor) -> None:
    given = tensors_of(rewards)
    alone = [
        computed(settings, given | {name: given[name][[p]] for name in ("rewards", "lengths")})
        for p in range(len(rewards))
    ]
    assert torch.equal(torch.cat(alone), computed(settings, given))


@every_setting
def test_advantages_are_float32_of_the_rewards_shape(settings: Advantage, rewards: Tensor) -> None:
    given = tensors_of(rewards)
    copies = {name: values.clone() for name, values in given.items()}
    out = computed(settings, given)
    assert out.dtype == torch.float32
    assert out.shape == rewards.shape
    for name, values in given.items():
        torch.testing.assert_close(values, copies[name], rtol=0, atol=0, equal_nan=True)


# What a rule has to have besides its function.


def test_a_knob_is_read_by_exactly_the_rules_that_take_it() -> None:
    taken = {name for function in RULES.values() for name in knobs_read(function)}
    taken -= {name for function in RULES.values() for name in own_arguments(function, Advantage())}
    assert taken == {f.name for f in dataclasses.fields(Advantage)} - {"rule", "args"}
    assert Advantage().rule in RULES


def test_rules_ask_for_tensors_that_there_are() -> None:
    step = {0: [RolloutStats(1.0, 1.0, {"r": 1.0}, {}, 2, 1, False, False, 1)]}
    offered = reward_tensors(step, {"r": 1.0})
    for function in RULES.values():
        assert set(parameters(function)[0]) <= set(offered)


def test_process_advantages_by_hand() -> None:
    # Rewards 1, 1 | 0, 1 | none: mean 0.75, std 0.5, so 1 is 0.25 / 0.5001 = 0.49990002 and 0 is
    # −0.75 / 0.5001 = −1.49970006. A token gets the sum over its own step and later ones.
    steps = [[(1, 1.0), (3, 1.0)], [(0, 0.0), (2, 1.0)], []]
    out = process_advantages(steps, [5, 3, 2])
    expected = [
        [0.99980004, 0.99980004, 0.49990002, 0.49990002, 0.0],  # nothing ends after the last step
        [-0.99980004, 0.49990002, 0.49990002],
        [0.0, 0.0],
    ]
    assert [len(row) for row in out] == [5, 3, 2]
    for row, literal in zip(out, expected, strict=True):
        assert row.dtype == torch.float32
        assert row.tolist() == pytest.approx(literal, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_steps_carry_no_signal(value: float) -> None:
    for size in range(1, 40):
        out = process_advantages(
            [[(t, value) for t in range(size)], [(0, value)], []], [size, 1, 3]
        )
        assert all(row.eq(0).all() for row in out)


def test_process_advantages_of_completions_without_steps() -> None:
    out = process_advantages([[], []], [3, 1])
    assert [row.tolist() for row in out] == [[0.0, 0.0, 0.0], [0.0]]
    assert process_advantages([], []) == []


def test_turn_advantages_by_hand() -> None:
    # Returns from each turn on: 3, 2 | 0 | 3, 3, 1. With 0 behind the last turn the means are
    # 2, 5/3, 1/3; the standard deviations sqrt(3), sqrt(7/3), sqrt(1/3), the first the largest.
    rewards = [[1.0, 2.0], [0.0], [0.0, 2.0, 1.0]]
    plain = [[1, 1 / 3], [-2], [1, 4 / 3, 2 / 3]]
    for scale, s in (("none", 1.0), ("group", 3**0.5 + 1e-4)):
        for own, literal in zip(turn_advantages(rewards, scale=scale), plain, strict=True):
            assert own == pytest.approx([a / s for a in literal])


def test_turn_advantages_of_single_turns_are_those_of_the_group() -> None:
    rewards = [1.0, 0.0, 0.25, 3.0]
    (expected,) = group_relative(torch.tensor([rewards]).double(), scale="group").tolist()
    assert [a for (a,) in turn_advantages([[r] for r in rewards])] == pytest.approx(expected)


def test_turn_advantages_stay_bounded_where_later_turns_differ_more_than_the_totals() -> None:
    # Totals 1 and 1.001, whose standard deviation would make advantages of 700.
    out = turn_advantages([[1.0, 0.0], [0.0, 1.001]])
    assert max(abs(a) for own in out for a in own) < 1


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0, 1e6])
def test_episodes_of_equal_returns_carry_no_signal(value: float) -> None:
    for size in range(1, 30):
        assert turn_advantages([[value]] * size) == [[0.0]] * size
        assert turn_advantages([[value, value]] * size, scale="none") == [[0.0, 0.0]] * size
    # As under every rule, also where one takes more turns.
    assert turn_advantages([[0.0, 1.0], [1.0]]) == [[0.0, 0.0], [0.0]]


def test_turn_advantages_of_nothing() -> None:
    assert turn_advantages([]) == []
    assert turn_advantages([[], []]) == [[], []]
    literal = pytest.approx(0.5 / (0.5**0.5 + 1e-4), rel=1e-12)  # roots differ between processors
    assert turn_advantages([[], [1.0]]) == [[], [literal]]


MOST_TURNS, STAYS = 4, 0.5


def estimated_gradient(
    advantages: Callable[[list[list[float]]], list[list[float]]], reward: str
) -> tuple[float, float]:
    """(mean, standard error) of a policy gradient, of episodes of one to four turns.

    After each turn the policy goes on with probability sigmoid(θ) = 1/2. Gradients are with respect
    to θ; that of the log-probability of going on is 1/2, of ending −1/2.

    Args:
        reward: "each turn" gives 1 in each turn, "at the end" 1 in the last; both with noise.
    """
    draw, found = random.Random(0), []
    for _ in range(1500):
        rewards, scores = [], []
        for _ in range(4):
            goes_on = [draw.random() < STAYS for _ in range(MOST_TURNS)]
            turns = next((k + 1 for k, on in enumerate(goes_on) if not on), MOST_TURNS)
            own = [float(reward == "each turn")] * (turns - 1) + [1.0]
            rewards.append([r + draw.gauss(0, 0.1) for r in own])
            scores.append([on - STAYS for on in goes_on[:turns]])
        weighed = zip(advantages(rewards), scores, strict=True)
        found.append(sum(a * s for own, of in weighed for a, s in zip(own, of, strict=True)) / 4)
    return statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5


@pytest.mark.parametrize(
    ("reward", "truth"),
    [
        ("each turn", 2.75 / 4),  # E[turns] = 1 + p + p² + p³, and dp/dθ = p (1 − p)
        ("at the end", 0.0),  # however long it takes
    ],
)
def test_turn_advantages_neither_pay_nor_charge_for_turns(reward: str, truth: float) -> None:
    mean, error = estimated_gradient(lambda r: turn_advantages(r, scale="none"), reward)
    # A group of 4 has 3/4 of the gradient: each episode is a part of its own baseline.
    assert abs(mean - 0.75 * truth) < 3 * error
    assert error < 0.03

    def pooled(rewards: list[list[float]]) -> list[list[float]]:
        steps = [list(enumerate(own)) for own in rewards]
        lengths = [len(own) for own in rewards]
        return [own.tolist() for own in process_advantages(steps, lengths, scale="none")]

    # The mean over all steps of the group is a charge for each of them (verl#7244).
    mean, error = estimated_gradient(pooled, reward)
    assert mean < 0.75 * truth - 10 * error


def test_all_equal_by_hand() -> None:
    rows = [[1.0, 1.0], [1.0, 1.0 + 1e-6], [1.0, NAN], [NAN, NAN], [-1.0, 1.0]]
    assert all_equal(torch.tensor(rows)).tolist() == [True, False, True, True, False]


def test_all_equal_except_for_rounding() -> None:
    sums = [[0.1 + 0.2, 0.3, NAN], [300.3, 300.29999999999995, NAN], [1.0, 1.0 + 2e-9, NAN]]
    assert all_equal(double(sums)).tolist() == [True, True, False]
    assert all_equal(-double(sums)).tolist() == [True, True, False]
    # The parts of the first reward are 1e10 times as large as their sum.
    cancelled = double([[1e9 - (1e9 - 0.1), 0.1]])
    assert not all_equal(cancelled)
    assert all_equal(cancelled, double([2e9]))


@pytest.mark.parametrize("settings", [*SETTINGS.values(), *MORE.values()], ids=[*SETTINGS, *MORE])
def test_no_rule_makes_a_signal_of_rounding(settings: Advantage) -> None:
    for values in ([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [300.3, 300.3, 300.29999999999995, 300.3]):
        assert computed(settings, tensors_of(double([values]))).eq(0).all()


def test_pass_at_k_whose_best_subsets_differ_by_rounding() -> None:
    # Every pair holds one of the three best.
    assert torch.equal(pass_at_k(double([[0.0, 0.3, 0.1 + 0.2, 0.3]]), k=2), torch.zeros(1, 4))


def test_rewards_leveled_by_hand() -> None:
    weights = {"a": 0.1, "b": 0.2, "c": 0.3}

    def level(parts: list[list[float]]) -> list[float]:
        own = [dict(zip(weights, values, strict=True)) for values in parts]
        rewards = [sum(weights[n] * v for n, v in of.items()) for of in own]
        rollouts = [
            make_rollout(reward=r, parts={**of}) for r, of in zip(rewards, own, strict=True)
        ]
        found = level_rewards(rollouts, weights)
        assert [r.reward for r in found] == [r.outcome_reward for r in found]
        return [r.reward for r in found]

    assert level([[1, 1, 0], [0, 0, 1]]) == [0.30000000000000004] * 2
    assert level([[1, 0, 0], [0, 0, 1]]) == [0.1, 0.3]
    # The sums are 0 and 6e-10, then 6e-9; 1e-9 of the largest sum of parts is 1.2e-9.
    assert level([[0, 3, -2], [0, 3, -2 + 2e-9]])[0] == pytest.approx(6e-10, rel=1e-3)
    assert level([[0, 3, -2], [0, 3, -2 + 2e-8]])[0] == pytest.approx(0, abs=1e-12)


def test_leveling_leaves_what_has_no_reward() -> None:
    rollouts = [make_rollout(reward=NAN, parts={"a": None}), make_rollout(reward=1.0)]
    without, one = level_rewards(rollouts, {"a": 1.0})
    assert math.isnan(without.reward)
    assert one.reward == 1.0


# The shares of reward functions in the advantages


def shares(advantages: Tensor, parts: list[list[list[float]]], **given: Tensor) -> list[float]:
    """Shares of functions whose values are given as [P][R][G]."""
    values = torch.tensor(parts, dtype=torch.float64).transpose(1, 2)
    total = given.get("total", values.sum(-1))
    counted = given.get("counted", torch.ones_like(total, dtype=torch.bool))
    return advantage_shares(advantages, values, total, counted).tolist()


@table(
    "parts, expected",
    [
        ([[1, 0, 1, 0], [0, 0, 1, 1]], [0.5, 0.5]),
        ([[1, 0, 1, 0], [3, 3, 3, 3]], [1.0, 0.0]),  # the second is constant
        ([[3, 0, 3, 0], [0, 0, 1, 1]], [0.9, 0.1]),  # variances 9/4 and 1/4, uncorrelated
        ([[2, 0, 2, 0], [0, 1, 0, 1]], [2.0, -1.0]),  # the second pulls against the sum
        ([[1, 0], [1, 0]], [0.5, 0.5]),
    ],
)
def test_shares_by_hand(parts: list[list[float]], expected: list[float]) -> None:
    rewards = torch.tensor(parts, dtype=torch.float64).sum(0, keepdim=True)
    for advantages in (group_relative(rewards, scale="group"), rloo(rewards)):
        assert shares(advantages, [parts]) == pytest.approx(expected, abs=1e-6)


def test_a_group_counts_by_the_square_of_its_advantages() -> None:
    """Scaled by its group, each group has the same variance; unscaled, 4 times the second's."""
    parts = [[[2, 0], [0, 0]], [[0, 0], [1, 0]]]
    rewards = torch.tensor([[2.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    scaled = group_relative(rewards, scale="group")
    assert shares(scaled, parts) == pytest.approx([0.5, 0.5], abs=1e-3)
    assert shares(rloo(rewards), parts) == pytest.approx([0.8, 0.2])


def test_a_baseline_that_is_the_same_for_a_group_changes_nothing() -> None:
    parts = [[[1, 0, 1, 0], [0, 0, 1, 1]]]
    rewards = torch.tensor([[1.0, 0.0, 2.0, 1.0]], dtype=torch.float64)
    advantages = opo(rewards, torch.tensor([[9.0, 1.0, 1.0, 1.0]], dtype=torch.float64))
    assert shares(advantages, parts) == pytest.approx([0.5, 0.5])


def test_a_rule_that_is_not_linear_shares_what_varies_with_the_reward() -> None:
    """Only the best of the group gets an advantage that the others do not have."""
    parts = [[[1, 0, 0, 0], [0, 0.1, 0.2, 0]]]
    rewards = torch.tensor([[1.0, 0.1, 0.2, 0.0]], dtype=torch.float64)
    first, second = shares(pass_at_k(rewards, k=2), parts)
    assert first + second == pytest.approx(1.0)
    assert first > 0.95


def test_completions_without_a_reward_or_excluded_ones_have_no_share() -> None:
    parts = [[[1, 0, 7], [0, 0, 0]], [[0, 0, 0], [1, 0, 0]]]
    total = torch.tensor([[1.0, 0.0, NAN], [1.0, 0.0, NAN]], dtype=torch.float64)
    advantages = rloo(total)
    assert shares(advantages, parts, total=total) == pytest.approx([0.5, 0.5])
    counted = torch.tensor([[True, True, True], [False, True, True]])
    assert shares(advantages, parts, total=total, counted=counted) == pytest.approx([2 / 3, 1 / 3])


def test_the_rest_is_of_what_no_function_gave() -> None:
    """A KL of 0 and 1 in the reward that falls from 1 to -1."""
    total = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    assert shares(rloo(total), [[[1, 0]]], total=total) == pytest.approx([0.5])


@table("rewards", [[1.0, 1.0], [NAN, NAN], [NAN, 2.0]])
def test_there_are_no_shares_without_an_advantage(rewards: list[float]) -> None:
    total = torch.tensor([rewards], dtype=torch.float64)
    values = total.nan_to_num().tolist()
    assert shares(rloo(total), [values], total=total) == []
