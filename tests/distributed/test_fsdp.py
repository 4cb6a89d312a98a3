"""A model divided over processes computes what the whole one does, and only shards stay.

The cases are in `sharded.py`, and run on two and on three gloo processes.
"""

import pytest

from grpo_cli.distributed import fsdp
from tests.models.families import FAMILIES, Family
from tests.models.test_architectures import make
from tests.sharded import CASES, outcome


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.xdist_group("sharded")  # the processes are started once
@pytest.mark.slow
def test_processes(processes: int, name: str) -> None:
    done, output = outcome(processes)
    assert name in done, output


# BioGPT names no layers; the parts of Gemma 3n beside its layers are large in a tiny model.
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.model_type not in ("biogpt", "gemma3n_text")], ids=str
)
def test_the_layers_that_are_gathered_one_by_one(family: Family) -> None:
    model = make(family)
    layers = fsdp.layers(model)
    assert len(layers) == model.config.num_hidden_layers
    inside = sum(p.numel() for layer in layers for p in layer.parameters())
    ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    outside = sum(p.numel() for p in model.parameters()) - inside
    assert outside - sum(p.numel() for p in ends) < 0.1 * inside, "little is left for the root"
