import math

import pytest
import torch

from grpo_cli.algorithm.loss import (
    bounded,
    effective_share,
    log_correction,
    off_policy_keep,
    sampling_ratio,
)
from grpo_cli.algorithm.settings import CORRECTIONS

TWO = math.log(2)

OLD = torch.tensor([[TWO, -TWO, 2 * TWO, 5.0], [2 * TWO, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 5.0]])
SAMPLED = torch.tensor([[0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


# The levels that a mode begins with; rows: ratios 2, 1/2, 4 and 1; 4; nothing trains
LEVELS = {
    "token": [[2, 0.5, 4, 1], [4, 1, 1, 1], [1, 1, 1, 1]],
    "sequence": [[4], [4], [1]],
    "sequence_mean": [[4 ** (1 / 4)], [4], [1]],
}


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_sampling_ratio_by_hand(mode: str) -> None:
    expected = torch.tensor(LEVELS[mode.rpartition("_")[0]], dtype=torch.float32)
    torch.testing.assert_close(sampling_ratio(OLD, SAMPLED, MASK, mode), expected)


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_sampling_ratio_stays_finite(mode: str) -> None:
    old = torch.tensor([[-1.0, -1.0], [-900.0, -900.0]])
    sampled = torch.tensor([[-900.0, -math.inf], [-1.0, -1.0]])
    ratio = sampling_ratio(old, sampled, torch.ones(2, 2), mode)
    assert ratio.isfinite().all()
    assert (ratio[0] > 1e30).all()
    assert (ratio[1] < 1e-30).all()


@pytest.mark.parametrize(
    ("mode", "floor", "expected"),  # of 0.1, 0.5, 1, 3, 3.1 with a cap of 3
    [
        ("truncate", None, [0.1, 0.5, 1.0, 3.0, 3.0]),
        ("truncate", 0.5, [0.5, 0.5, 1.0, 3.0, 3.0]),
        ("mask", None, [0.1, 0.5, 1.0, 3.0, 0.0]),
        ("mask", 0.5, [0.0, 0.5, 1.0, 3.0, 0.0]),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_bounds_by_hand(level: str, mode: str, floor: float | None, expected: list[float]) -> None:
    ratio = torch.tensor([0.1, 0.5, 1.0, 3.0, 3.1])
    factor = bounded(ratio, f"{level}_{mode}", 3.0, floor)
    assert factor.tolist() == torch.tensor(expected).tolist()
    without_cap = bounded(ratio, f"{level}_{mode}", None, floor)
    assert without_cap.tolist() == [*factor[:-1].tolist(), ratio[-1].item()]


def test_off_policy_keep_by_hand() -> None:
    """Drifts: (0.8 + 0.2 + 0) / 3, 0.3 of the one token that trains, 0.5; then rising ones."""
    logprobs = torch.tensor([[-1.8, -1.2, -1.0], [-1.3, -9.0, -9.0], [-1.5] * 3, [0.0] * 3])
    sampled = torch.full((4, 3), -1.0)
    mask = torch.tensor([[1.0] * 3, [1.0, 0.0, 0.0], [1.0] * 3, [1.0] * 3])
    advantages = torch.tensor([[-1.0, 1.0, 0.0], [-1.0] * 3, [-1.0, 0.0, -2.0], [-1.0] * 3])

    def kept(threshold: float) -> list[list[float]]:
        rows = off_policy_keep(advantages, logprobs, sampled, mask, threshold).tolist()
        return [rows[0], rows[1][:1], rows[2], rows[3]]  # what the mask leaves out is anyone's

    every = [[1, 1, 1], [1], [1, 1, 1], [1, 1, 1]]
    assert kept(0.6) == every
    assert kept(0.4) == [[1, 1, 1], [1], [0, 1, 0], [1, 1, 1]]
    assert kept(0.32) == [[0, 1, 1], [1], [0, 1, 0], [1, 1, 1]]
    assert kept(0.2) == [[0, 1, 1], [0], [0, 1, 0], [1, 1, 1]]
    assert kept(0.0) == [[0, 1, 1], [0], [0, 1, 0], [1, 1, 1]]


def test_effective_share_by_hand() -> None:
    assert effective_share(1.0, 1.0) == 1  # equal weights
    assert effective_share(0.25, 0.25) == 0.25  # a quarter is 1, the rest 0
    assert effective_share(1.5, 2.5) == pytest.approx(0.9)  # 1 and 2
    assert effective_share(0.0, 0.0) == 0  # nothing is left


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_correction_by_hand(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=dtype)
    by_token = log_correction(torch.tensor([[2.0, 0.0, 2.0]], dtype=dtype), mask)
    assert by_token.isfinite().all()
    assert by_token[0, 0].item() == pytest.approx(TWO)
    assert by_token[0, 1] < math.log(1e-8)  # vespo's own bound is the one that counts
    assert by_token[0, 2] == 0
    by_row = log_correction(torch.tensor([[2.0]], dtype=dtype), mask)
    assert by_row.shape == (1, 1)
    assert by_row.item() == pytest.approx(TWO)
    one = log_correction(torch.ones(1, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype))
    assert one.item() == 0
