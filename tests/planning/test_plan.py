"""A plan: memory by hand, what fits, what to change, what is printed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.planning import devices
from grpo_cli.planning.memory import Job, Lengths, memory
from grpo_cli.planning.plan import Plan, changes, predict, text_of, with_values
from grpo_cli.planning.sizes import Sizes, sizes_of

H100 = devices.named("h100-80gb", torch.bfloat16)
L4 = devices.named("l4", torch.bfloat16)
# 1,000 weights, of which 800 in the layers' matrices; 5 bytes of activations for a token.
TINY = Sizes(
    transformers.PretrainedConfig(), parameters=1000, layer=400, matrices=800,
    largest_matrix=100, cache=16, layers=2, hidden=4, vocab=25, activations=5.0,
)  # fmt: skip
SEVEN_B = transformers.Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
TEN = {"update.tokens_per_micro_batch": 10, "generation.num_generations": 2, "prompts_per_step": 8}


def job(values: dict[str, Any], gpus: int = 1, sizes: Sizes = TINY) -> Job:
    recipe = with_values(Recipe(), {"loss.beta": 0.0, **TEN, **values})
    return Job(recipe, sizes, H100, gpus, Lengths(prompt=3, mean=4, longest=7))


def seven_b(values: dict[str, Any], device: devices.Device, gpus: int = 1) -> Plan:
    recipe = with_values(Recipe(), {"mixed_precision": "bf16", "loss.beta": 0.0, **values})
    return predict(Job(recipe, sizes_of(SEVEN_B, recipe), device, gpus, Lengths(256, 512, 512)))


def test_all_weights_by_hand() -> None:
    found = memory(job({}), 10)
    assert found["forward_backward"] == {
        "weights": 4000, "gradients": 4000, "optimizer state": 8000, "activations": 50,
        "logits": 4 * 10 * 25, "head's gradient": 400,
    }  # fmt: skip
    # 16 rows; the caches of their 7 tokens are a quarter larger while they grow
    keys = (8 * 3 + 1.25 * 16 * 7) * 16 * 4
    assert found["generate"]["keys and values"] == keys
    assert "gradients" not in found["generate"]
    assert memory(job({"loss.beta": 0.1}), 10)["optimizer"]["reference"] == 4000


def test_an_adapter_and_quantized_weights_by_hand() -> None:
    sizes = replace(TINY, adapter=50)
    lora = {"adapter.method": "lora", "model.dtype": "bfloat16", "loss.beta": 0.1}
    found = memory(job(lora, sizes=sizes), 10)["optimizer"]
    own = {"adapter": 200, "reference": 200, "gradients": 200, "optimizer state": 400}
    assert found == {"weights": 2000, **own}
    quantized = memory(job(lora | {"model.quantization": "nf4"}, sizes=sizes), 10)
    assert quantized["optimizer"]["weights"] == pytest.approx(800 * 0.5159 + 200 * 2, rel=1e-3)
    assert quantized["forward_backward"]["dequantized matrix"] == 200


def test_shards_by_hand() -> None:
    values = {"distributed.strategy": "fsdp2", "generation.engine": "vllm_server"}
    found = memory(job(values, gpus=4), 10)
    assert found["optimizer"] == {"weights": 1000, "gradients": 1000, "optimizer state": 2000}
    gathered = found["forward_backward"]["gathered weights"]
    assert gathered == (100 + 3 * 400) * 4, "embedding or head, and three layers"
    assert {*found} == {"forward_backward", "optimizer", "weights"}, "nothing samples here"
    kept = memory(job(values | {"distributed.reshard_after_forward": False}, gpus=4), 10)
    assert kept["forward_backward"]["gathered weights"] > gathered


def test_optimizers_and_offload() -> None:
    eight = memory(job({"optimizer.algorithm": "bitsandbytes.optim:AdamW8bit"}), 10)["optimizer"]
    assert eight["optimizer state"] == pytest.approx(900 * (2 + 8 / 256) + 100 * 8), "embeddings"
    muon = memory(job({"optimizer.algorithm": "muon"}), 10)["optimizer"]
    assert muon["optimizer state"] == 800 * 4 + 200 * 8
    assert muon["temporaries"] == 4000, "its step is not fused"


@pytest.mark.parametrize(("steps", "every", "best"), [(3, 1, 4000), (2, 1, 0), (3, 0, 0)])
def test_checkpoints_on_the_disk(steps: int, every: int, best: int) -> None:
    values = {"steps": steps, "checkpoint.every": 1, "eval.every": every}
    assert predict(job(values)).disk == 2 * (3 * 4000 + 4000) + best


def test_changes_that_fit_come_first() -> None:
    plan = seven_b({"model.gradient_checkpointing": True}, L4)
    found = changes(plan)
    fits = [changed.fits for changed in found.values()]
    assert fits == sorted(fits, reverse=True)
    words = " ".join(found)
    first = next(iter(found))
    assert "distributed=fsdp2" not in words, "one GPU"
    assert all(changed.peak < plan.peak for changed in found.values())
    text = text_of(plan, found, ["something is left out"], None)
    assert "DOES NOT FIT" in text
    assert f"  {first}\n" in text
    assert "note: something is left out\n" in text


def test_gpus_by_name_and_by_memory() -> None:
    assert H100.memory == pytest.approx(0.94 * 80e9)
    assert [devices.named(n, torch.bfloat16).memory for n in ("24", "24GB")] == [0.94 * 24e9] * 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("A100", r"Did you mean a100-40gb or a100-80gb\?"),
        ("v100-32gb", "has no bfloat16; use mixed_precision="),
    ],
)
def test_an_unknown_gpu_is_refused(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        devices.named(name, torch.bfloat16)
