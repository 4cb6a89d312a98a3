"""FlexAttention on the CPU: its mask, its forward compiled, its gradient uncompiled."""

import pytest
import torch
from torch.nn.attention import flex_attention

from grpo_cli.models.kernels.flex import Flex, block_mask
from tests.models.kernels.layouts import (
    GROUPS,
    Group,
    assert_same,
    make_heads,
    make_layout,
    plain,
    seen,
)

LONG: list[Group] = [(150, [7, 260]), (5, [])]  # several blocks of 128, some of them whole


@pytest.mark.parametrize(
    ("groups", "size"), [*((groups, 4) for groups in GROUPS.values()), (LONG, 128)]
)
def test_block_mask(groups: list[Group], size: int) -> None:
    mask = block_mask(make_layout(groups), size)
    pairs = seen(groups)
    count = len(pairs)
    places = torch.arange(count)
    none = torch.tensor(0)
    assert torch.equal(mask.mask_mod(none, none, places[:, None], places[None]), pairs)
    blocks = -(-count // size)
    padded = torch.zeros(blocks * size, blocks * size, dtype=torch.bool)
    padded[:count, :count] = pairs
    tiles = padded.view(blocks, size, blocks, size).transpose(1, 2).flatten(2)
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(-1))
    computed_whole = [
        (row, block)
        for row, number in enumerate(mask.full_kv_num_blocks[0, 0].tolist())
        for block in mask.full_kv_indices[0, 0, row, :number].tolist()
    ]
    assert all(bool(tiles[place].all()) for place in computed_whole)
    if groups is LONG:
        assert computed_whole, "some blocks are computed without the mask"


@pytest.mark.slow  # the first call of FlexAttention takes 2 s
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("both", torch.float64, 1e-10), ("long", torch.float32, 1e-4)]
)
def test_flex_matches_softmax(
    name: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch refuses a gradient on the CPU, where only its uncompiled form has one.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    groups = LONG if name == "long" else GROUPS[name]
    assert_same(groups, 4, 2, dtype, tolerance, Flex(flex_attention.flex_attention))


@pytest.mark.slow
def test_compiled_forward() -> None:
    (q, k, v), _ = make_heads(LONG, 4, 2, torch.float32)
    q, k, v = (t.repeat(1, 1, 4) for t in (q, k, v))  # heads of 32
    out = Flex().attend(make_layout(LONG), q, k, v, 0.1)
    expected = plain(LONG, *(t.double() for t in (q, k, v)), 0.1)
    assert (out - expected).abs().max() < 1e-4
