"""Models for the tests of this folder."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import PreTrainedModel


@pytest.fixture
def wide(model: PreTrainedModel) -> PreTrainedModel:
    """A model with matrices that are large enough for 8 bits."""
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Linear(32, 160, bias=True)
    mlp.gate_proj = nn.Linear(32, 160, bias=False)
    mlp.down_proj = nn.Linear(160, 32, bias=False)
    return model
