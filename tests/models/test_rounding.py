"""Stochastic rounding to bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_cli.models import rounding
from grpo_cli.models.rounding import round_stochastically


def rounded(values: Tensor, seed: int = 0) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(values, out, torch.Generator().manual_seed(seed))
    return out


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("share", "steps"), [(0.25, 1), (0.5, 1), (0.75, 1), (1 / 128, 1), (0.0, 0)]
)
def test_a_value_is_rounded_up_as_often_as_it_is_near(sign: int, share: float, steps: int) -> None:
    """The step of bfloat16 above 1 is 1/128."""
    number = 100_000
    found = rounded(torch.full((number,), sign * (1 + share / 128)))
    values = {float(v) for v in found.unique()}
    assert values == ({sign * 1.0, sign * 1.0078125} if steps else {sign * 1.0})
    up = (found.float().abs() > 1).float().mean().item()
    assert up == pytest.approx(share, abs=5 * (share * (1 - share) / number) ** 0.5)


def test_what_is_no_number_and_what_fits_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3e38, 1e-40, torch.inf, -torch.inf, torch.nan])
    fits = values.bfloat16().float()
    found = rounded(fits)
    assert torch.equal(found.view(torch.int16)[:-1], fits.bfloat16().view(torch.int16)[:-1])
    assert found[-1].isnan()
    all_bits = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # another NaN
    assert rounded(all_bits).isnan().all()


def test_the_seed_decides_and_blocks_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.full((4, 1000), 1 + 1 / 256)
    assert torch.equal(rounded(values), rounded(values))
    assert not torch.equal(rounded(values), rounded(values, seed=1))
    monkeypatch.setattr(rounding, "BLOCK", 1000)
    rows = rounded(values)
    assert not torch.equal(rows[0], rows[1])
