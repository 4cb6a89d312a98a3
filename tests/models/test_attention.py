"""How a model calls attention, and what it turns down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.models import attention
from grpo_cli.models.attention import UnsupportedModelError, install


class Noting:
    """Attends to nothing, and notes what it is asked."""

    longest = 10

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.asked = (layer, query, key, value, scale)
        return query


MODULE = SimpleNamespace(layer_idx=3, config=SimpleNamespace(), training=False)


def call(attending: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    if kwargs.pop("half", False):
        v = v.bfloat16()
    return attention.attention(MODULE, q, k, v, None, attending=attending, **kwargs)  # type: ignore[arg-type]


def test_arguments_of_attend() -> None:
    noting = Noting()
    out, weights = call(noting)
    layer, query, key, value, scale = noting.asked
    assert (layer, scale) == (3, 16**-0.5)
    assert [tuple(t.shape) for t in (query, key, value)] == [(5, 4, 16), (5, 2, 16), (5, 2, 16)]
    assert (tuple(out.shape), weights) == ((1, 5, 4, 16), None)
    call(noting, scaling=0.7, sliding_window=10, softcap=None, half=True)
    assert noting.asked[-1] == 0.7
    assert {t.dtype for t in noting.asked[1:4]} == {torch.bfloat16}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 9}, 9),
        (
            {"sliding_window": 9, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            None,
        ),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, 9),
        ({"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 4}, 8),
    ],
)
def test_window_in_the_config(
    config: dict[str, Any], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "config", SimpleNamespace(**config))
    if window is None:
        call(Noting())
        return
    with pytest.raises(UnsupportedModelError, match=f"its attention sees {window} tokens"):
        call(Noting())


def test_installed_attention_is_still_sdpa(model: PreTrainedModel) -> None:
    ids, mask = torch.tensor([[0, 5, 6, 7], [8, 9, 10, 11]]), torch.tensor([[0, 1, 1, 1], [1] * 4])
    before = model(ids, attention_mask=mask).logits
    assert install(model)
    assert model.config._attn_implementation == attention.NAME
    assert install(model), "twice"
    assert torch.equal(model(ids, attention_mask=mask).logits[mask.bool()], before[mask.bool()])


def test_unsupported_attention(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.set_attn_implementation("eager")
    assert not install(model)
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    assert not install(model)
    assert model.config._attn_implementation == "sdpa"
