"""Which adapters vLLM can apply itself; every refusal names the other way."""

import re
from typing import Any

import pytest

from grpo_cli.errors import UserError
from grpo_cli.generation.vllm import lora
from grpo_cli.models import adapters
from grpo_cli.models.settings import Adapter


def config_of(**fields: Any) -> Any:
    return adapters.config_of(Adapter(**{"method": "lora", **fields}), "base", None)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "rslora", "rank": 512},
        {"args": {"init_lora_weights": False}},
        {"args": {"rank_pattern": {"q_proj": 512}, "alpha_pattern": {"q_proj": 4}}},
        {"target_modules": ["q_proj"], "args": {"layers_to_transform": [0]}},
    ],
    ids=str,
)
def test_supported_adapters(fields: dict[str, Any]) -> None:
    lora.check(config_of(**fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"method": "dora"}, "vLLM does not apply DoRA"),
        ({"args": {"modules_to_save": ["norm", "mlp"]}},
         "vLLM does not take modules that are trained as a whole (modules_to_save: mlp, norm)"),
        ({"args": {"bias": "lora_only"}}, "vLLM does not take trained biases (bias = lora_only)"),
        ({"args": {"target_parameters": ["mlp.experts.down_proj"]}},
         "vLLM gets adapters of linear layers only (target_parameters: mlp.experts.down_proj)"),
        *(({"args": {"init_lora_weights": init}},
           f"vLLM does not take the init {init}, since such an init can change "
           "the weights under the adapter") for init in ("pissa", "olora")),
        ({"rank": 513}, "rank 513 is above vLLM's largest, 512"),
        ({"args": {"rank_pattern": {"q_proj": 600}}}, "rank 600 is above vLLM's largest, 512"),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_adapters(fields: dict[str, Any], reason: str) -> None:
    said = f"adapter.sync = adapter: {reason}; use adapter.sync=merge"
    with pytest.raises(UserError, match=re.escape(said)):
        lora.check(config_of(**fields))


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (2, 8), (9, 16), (257, 320), (512, 512)])
def test_the_room_for_a_rank(rank: int, allowed: int) -> None:
    assert lora.max_rank(rank) == allowed


def test_the_largest_rank() -> None:
    assert lora.largest_rank(config_of(rank=4)) == 4
    assert lora.largest_rank(config_of(rank=4, args={"rank_pattern": {"q_proj": 2, "v": 9}})) == 9
