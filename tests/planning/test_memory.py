"""Memory and FLOPs by hand, against real models and against the tool's own sharding."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from grpo_cli.config.schema import Adapter
from grpo_cli.errors import UserError
from grpo_cli.generation.embedded.decode_batch import ROOM
from grpo_cli.generation.embedded.engine import PREFILL, REFILL
from grpo_cli.generation.embedded.products import LARGE, SHARE
from grpo_cli.models import adapters
from grpo_cli.models.activation_bytes import bytes_per_token
from grpo_cli.models.optimizers import EIGHT_BIT
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.planning import memory as planned
from grpo_cli.planning import workload
from grpo_cli.planning.memory import (
    Memory,
    activation_bytes,
    checkpoint_bytes,
    kept_by,
    kept_in_layer,
    memory,
    share,
)
from grpo_cli.planning.settings import Cluster, Settings
from grpo_cli.planning.shapes import Shape, count
from grpo_cli.records import Rollout
from tests.conftest import make_rollout
from tests.planning.models import MOE, PLAIN, SMALL, TINY, make, of_kind
from tests.programs import ROOT


def test_a_strategy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"^strategy = fsdp: one of ddp, fsdp2\.$"):
        Settings(strategy="fsdp")


# What a process keeps


def test_shares_by_hand() -> None:
    assert [share([(10, 3), (7,)], n, "fsdp2") for n in (1, 2, 4, 8, 100)] == [37, 19, 11, 7, 4]
    assert [share([(10, 3), (7,)], n, "ddp") for n in (1, 2, 100)] == [37, 37, 37]
    # Two tensors of 8 experts. On 16 GPUs their second dimensions are divided. On 32 that of one
    # is: of the other each GPU keeps a row, and only 8 of the rows are there.
    experts = [(8, 32, 3), (8, 16, 5)]
    assert [share(experts, n, "fsdp2") for n in (4, 8, 16, 32)] == [352, 176, 48 + 40, 24 + 80]
    assert share([(8, 32)], 16, "fsdp2") == 32


FAKE = """
import json, sys, torch, transformers
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from grpo_cli.config.schema import Adapter
from grpo_cli.distributed import fsdp as sharding
from grpo_cli.models import adapters

def micro_batch(model):
    model(torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits.float().mean().backward()

for gpus, reshard, kind, config, rank in json.loads(sys.argv[1]):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    config = getattr(transformers, kind + "Config")(**config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if rank:
        adapter = Adapter(method="lora", rank=rank)
        adapters.attach(model, adapters.config_of(adapter, "base", None), seed=0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    cpu, half = torch.device("cpu"), torch.bfloat16
    sharding.shard(model, cpu, half_type=half, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model.train()
    micro_batch(model)
    kept = sum(p.to_local().numel() for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        micro_batch(model)
        tracker.reset_mod_stats()
        micro_batch(model)  # beside the gradient of the one before
    (of_device,) = tracker.get_tracker_snapshot("peak").values()
    peak = {str(getattr(k, "name", k)): size for k, size in of_device.items()}
    print(json.dumps([kept, peak]))
    dist.destroy_process_group()
"""

SHARDED: dict[str, Any] = {
    **SMALL,
    **MOE,
    "vocab_size": 500,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "moe_intermediate_size": 96,
    "tie_word_embeddings": False,
}
# (GPUs, reshard_after_forward, changes to SHARDED, rank of an adapter on a model without experts,
# moment of the peak, bytes of it that experts divided inside their rows take once more)
CASES: list[tuple[int, bool, dict[str, int], int, str, int]] = [
    (2, True, {}, 0, "backward of a layer", 0),
    (16, True, {}, 0, "backward of a layer", 0),
    (16, True, {"hidden_size": 264}, 0, "backward of a layer", 0),  # one tensor's divides by 16
    (16, False, {}, 0, "forward", 2 * 8 * (192 * 256 + 256 * 96)),
    (16, False, {"vocab_size": 2500}, 0, "backward of a layer", 2 * 8 * 256 * 96),
    (16, True, {"vocab_size": 6000}, 0, "end of the backward", 0),
    (2, True, {"intermediate_size": 1024}, 8, "forward", 0),
    (16, False, {"intermediate_size": 1024}, 16, "forward", 0),
]


def sharded_model(more: dict[str, int], rank: int) -> tuple[str, dict[str, Any]]:
    """Returns family and sizes of a case's model; one with an adapter has no experts."""
    sizes = SHARDED | more
    if not rank:
        return "Qwen3Moe", sizes
    return "Qwen2", {key: value for key, value in sizes.items() if key not in MOE}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Returns for each case the elements kept, and the peak of memory by kind.

    They are those of real FSDP2 micro-batches, in process groups that send nothing.
    """
    script = tmp_path_factory.mktemp("fake") / "fake.py"
    script.write_text(FAKE)
    given = [
        (gpus, reshard, *sharded_model(more, rank), rank) for gpus, reshard, more, rank, *_ in CASES
    ]
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)],
        cwd=ROOT,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "ONEDNN_MAX_CPU_ISA": os.environ["ONEDNN_MAX_CPU_ISA"],  # see conftest.py
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(CASES) :]]


@pytest.mark.programs
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.xdist_group("fake")  # all are of one program
def test_memory_is_that_of_real_fsdp2(case: int, real: list[Any]) -> None:
    gpus, reshard, more, rank, peak_at, once_more = CASES[case]
    kept, peak = real[case]
    kind, sizes = sharded_model(more, rank)
    shape, cluster = Shape.of(of_kind(kind, **sizes)), Cluster(gpus)
    settings = Settings(
        reshard_after_forward=reshard, reference=False, micro_tokens=3, gradient_checkpointing=True,
        adapter_rank=rank,
    )  # fmt: skip
    moments = memory(shape, cluster, settings).moments.values()  # here the logits are whole: tiny
    without = [{k: v for k, v in parts.items() if k != "logits chunk"} for parts in moments]
    parts = max(without[:-1], key=lambda parts: sum(parts.values()))
    assert parts is without[list(memory(shape, cluster, settings).moments).index(peak_at)]
    assert parts["weights"] + parts.get("adapter", 0) == 4 * kept == peak["SHARDED_PARAM"]
    assert parts["gradients"] == peak["SHARDED_GRAD"]
    assert parts["moments"] == pytest.approx(peak["OPT"], rel=0.01)
    arriving = once_more if peak_at == "forward" else 0
    assert parts.get("gathered", 0) == peak["UNSHARDED_PARAM"] + peak["ALL_GATHER"] + arriving
    assert sum(parts.values()) == pytest.approx(peak["Total"], rel=0.01)
    assert once_more == 0 or sum(parts.values()) - once_more < 0.99 * peak["Total"]


# Activations


def rollouts() -> list[Rollout]:
    """Two prompts with two completions each, long enough for their beginnings to be cut off."""
    draws = torch.Generator().manual_seed(1)
    texts = torch.randint(3, 97, (4, 64), generator=draws).tolist()
    prompts = torch.randint(3, 97, (2, 64), generator=draws).tolist()
    return [make_rollout(prompts[i // 2], texts[i], row=i // 2) for i in range(4)]


def policy_logprobs(config: PretrainedConfig, arithmetic: str, rank: int = 0) -> PolicyLogprobs:
    bf16 = arithmetic not in ("float32", "autocast")
    model = make(config, torch.bfloat16 if bf16 else torch.float32).train()
    if rank:
        adapter = Adapter(method="lora", rank=rank)
        adapters.attach(model, adapters.config_of(adapter, "base", None), seed=0)
        if arithmetic == "bfloat16":
            model.to(torch.bfloat16)  # as gathered weights are
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if arithmetic.startswith("autocast"):
        autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    found = PolicyLogprobs(model, autocast=autocast)
    found.check(rollouts(), 1.0)
    assert found.mode.packed
    assert found.mode.chunked
    return found


ARITHMETIC = {
    "float32": Settings(strategy="ddp", bf16=False),
    "autocast": Settings(strategy="ddp"),
    "autocast, bfloat16 weights": Settings(strategy="ddp", weight_bytes=2),
    "bfloat16": Settings(strategy="fsdp2"),
    "copied": Settings(strategy="ddp", bf16=False, weight_bytes=2),
}


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize(
    ("kind", "more", "rank"),
    [("Qwen2", {}, 0), ("Qwen3Moe", MOE, 0), ("Qwen2", {}, 8), ("Qwen2", {"head_dim": 24}, 3)],
)
def test_a_layer_keeps_what_the_tool_measures(
    kind: str, more: dict[str, Any], rank: int, arithmetic: str
) -> None:
    measured = []
    for layers in (1, 2):
        torch.manual_seed(0)
        config = of_kind(kind, **more, num_hidden_layers=layers)
        found = policy_logprobs(config, arithmetic, rank)
        measured.append(bytes_per_token(found, rollouts(), 1.0))
    settings = replace(ARITHMETIC[arithmetic], adapter_rank=rank, gradient_checkpointing=False)
    shape, kept = Shape.of(config), kept_by(settings)
    assert kept_in_layer(shape, kept, rank) == pytest.approx(measured[1] - measured[0])
    assert activation_bytes(shape, settings) == pytest.approx(measured[1], rel=0.01)


# Memory


def test_memory_by_hand() -> None:
    """420 parameters; on 4 GPUs a layer's rows divide into 42, the root's 10, 4 and 10 into 25."""
    assert TINY.parameters == 420
    assert TINY.active == 2 * 160 + 40
    of_one = activation_bytes(TINY, PLAIN)  # a token's: 24·4 + 16·4 + 4·2 + 8 + 16·8 a layer
    assert of_one == 2 * 304 + 12 * 4 + 8 * 2
    chunk = 1 * 10 * 4  # logits of the only token
    ddp = replace(PLAIN, strategy="ddp")
    state = {"weights": 1680, "gradients": 1680, "moments": 3360, "reference": 1680}
    rest = {"weights": 1680, "moments": 3360, "reference": 1680}
    # Without gradient: 3 times the residual stream and the feed-forward's width.
    reference = {**rest, "activations": 4 * (3 * 4 + 3 * 8), "logits chunk": chunk}
    assert memory(TINY, Cluster(4), ddp).moments == {
        "reference log-probabilities": reference,
        "forward": {**state, "activations": 672, "logits chunk": chunk},
        "backward of the head": {
            **state,
            "activations": 672,
            "logits chunk": chunk,
            "head's gradient": 160,
        },
        "optimizer": {**state, "optimizer's temporaries": 0},
        "sending weights": {**rest, "bucket": 256 * 2**20},
    }
    muon = memory(TINY, Cluster(4), replace(ddp, optimizer="muon")).moments["forward"]
    other = memory(TINY, Cluster(4), replace(ddp, optimizer="torch.optim:SGD")).moments["optimizer"]
    assert other["optimizer's temporaries"] == 1680
    assert muon["moments"] == 4 * 2 * 160 + 8 * (420 - 2 * 160), "layers one, the root two"
    eight = memory(TINY, Cluster(4), replace(ddp, optimizer=EIGHT_BIT[0])).moments["forward"]
    assert eight["moments"] == int(420 * (2 + 1 / 32))
    # Rows: of a layer 4·4 of 4 (a row each), 2 norms of 4, 3·4·8; of the root 10, 4, 10 of 4.
    own = 4 * (2 * 42 + (3 * 4 + 1 + 3 * 4))
    state = {"weights": own, "gradients": own, "moments": 2 * own, "reference": own}
    root, a_layer = 4 * (4 * 25), 4 * (4 * 42)  # padded
    rest = {"weights": own, "moments": 2 * own, "reference": own}
    assert memory(TINY, Cluster(4), PLAIN).moments == {
        "reference log-probabilities": {**rest, "activations": 144, "logits chunk": chunk},
        "forward": {
            **state,
            "gathered": root + 3 * a_layer,
            "activations": 672,
            "logits chunk": chunk,
        },
        "backward of the head": {
            **state,
            "gathered": root,
            "activations": 672,
            "logits chunk": chunk,
            "head's gradient": 160,
        },
        "backward of a layer": {
            **state,
            "gathered": root + 2 * a_layer,
            "activations": 672,
            "head's gradient": 160,
            "unsummed gradient": 4 * 168 + 4 * 168,
        },
        "end of the backward": {
            **state,
            "unsummed gradient": 4 * 84 + 4 * 4 * 25,
        },
        "sending weights": {
            "weights": own,
            "moments": 2 * own,
            "reference": own,
            "bucket": 512 * 2**20,
        },
    }


def test_adapter_by_hand() -> None:
    """Rank 1: for the 7 matrices 4 pairs of 4 + 4, two of 4 + 8 and one of 8 + 4: 68 a layer."""
    lora = replace(PLAIN, strategy="ddp", adapter_rank=1)
    assert count(TINY.adapter(1)) == 4 * 8 + 3 * 12
    kept = activation_bytes(TINY, lora)  # a layer: 16·4 + 16·4 + 4·2 + 8 + 16·8 + 28
    assert kept == 2 * 300 + 4 * 4 + 8 * 2
    adapter = 4 * 2 * 68
    rest = {"weights": 1680, "adapter": adapter, "moments": 2 * adapter}
    state = {**rest, "gradients": adapter}
    used = {"activations": 632, "logits chunk": 40}
    assert memory(TINY, Cluster(4), lora).moments == {
        "reference log-probabilities": {**rest, "activations": 144, "logits chunk": 40},
        "forward": {**state, **used},
        "backward of the head": {**state, **used},
        "optimizer": {**state, "optimizer's temporaries": 0},
        "sending weights": {**rest, "bucket": 256 * 2**20, "merged matrix": 32 * (2 * 4 + 4)},
    }
    assert checkpoint_bytes(TINY, lora) == 3 * adapter
    # On 2 GPUs: of a layer 4·4 rows of 4 halved to 2, two norms of 2, 3 halves; each A of 1 row is
    # on both. The last micro-batch leaves nothing of the frozen root to sum.
    sharded = memory(TINY, Cluster(2), replace(lora, strategy="fsdp2")).moments
    own_adapter = 4 * 2 * (4 * (4 + 2) + 2 * (4 + 4) + (8 + 2))
    assert sharded["forward"]["adapter"] == sharded["forward"]["gradients"] == own_adapter
    assert sharded["end of the backward"]["unsummed gradient"] == 0
    assert "head's gradient" not in sharded["backward of a layer"]


def test_quantized_base_by_hand() -> None:
    lora = replace(PLAIN, strategy="ddp", adapter_rank=1)
    nf4 = memory(TINY, Cluster(1), replace(lora, quantization="nf4")).moments["forward"]
    assert nf4["weights"] == 320 * (0.5 + 1 / 64 + 1 / 4096) + 100 * 4  # matrices of both layers
    assert nf4["dequantized matrix"] == 32 * 4


@pytest.mark.parametrize("wrong", [{"adapter_rank": 0}, {"strategy": "fsdp2"}])
def test_a_quantized_base_needs_an_adapter_and_complete_weights(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^quantization: needs an adapter, and strategy = ddp\.$"):
        Settings(**({"strategy": "ddp", "adapter_rank": 8} | wrong), quantization="nf4")


def test_an_adapter_of_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"^adapter: adapters of models with experts"):
        memory(replace(TINY, experts=2, chosen=1), Cluster(1), replace(PLAIN, adapter_rank=4))


def test_less_memory_for_all_weights_by_hand() -> None:
    half = replace(PLAIN, strategy="ddp", weight_bytes=2)
    plain = memory(TINY, Cluster(1), half).moments
    assert plain["forward"]["moments"] == 420 * 4
    rests = memory(TINY, Cluster(2), replace(PLAIN, offload="all")).moments["forward"]
    assert [rests[part] for part in ("weights", "gradients", "moments")] == [0, 0, 0]
    with pytest.raises(UserError, match=r"^offload = all: needs strategy = fsdp2\.$"):
        replace(half, offload="all")


def test_experts_by_hand() -> None:
    """Two in tensors of (2, 16, 4) and (2, 4, 8); a layer has 272 parameters with the router's."""
    shape, kept = replace(TINY, experts=2, chosen=1), replace(PLAIN, reshard_after_forward=False)
    rows = memory(shape, Cluster(2), kept).moments  # an expert each
    assert rows["forward"]["gathered"] == 4 * (84 + 4 * 272)
    assert rows["backward of a layer"]["unsummed gradient"] == 4 * (272 + 272)
    # On 4 GPUs the router's 2 rows are padded to 4. Experts are put together in one more copy.
    inside = memory(shape, Cluster(4), kept).moments
    assert inside["forward"]["gathered"] == 4 * (100 + 4 * 280 + 2 * 16 * 4 + 2 * 4 * 8)
    assert inside["backward of a layer"]["unsummed gradient"] == 4 * (272 + 2 * 4 * 8 + 280)
    again = memory(shape, Cluster(4), PLAIN).moments["backward of a layer"]
    assert again["unsummed gradient"] == 4 * (272 + 280)


def test_mixed_precision_by_hand() -> None:
    bf16 = memory(TINY, Cluster(4), replace(PLAIN, bf16=True)).moments
    assert bf16["forward"]["gathered"] == 2 * (100 + 3 * 168)
    assert bf16["forward"]["logits chunk"] == 2 * 40
    assert bf16["backward of the head"]["head's gradient"] == 40 * (4 + 2)
    assert bf16["backward of a layer"]["head's gradient"] == 40 * 2
    assert bf16["backward of a layer"]["unsummed gradient"] == 2 * 168 + 4 * 168
    ddp = memory(TINY, Cluster(4), replace(PLAIN, strategy="ddp", bf16=True)).moments
    assert ddp["forward"]["bf16 copies"] == 2 * (2 * 160 + 40)
    assert ddp["backward of the head"]["bf16 copies"] == 2 * (2 * 160 + 40)
    checkpointed = replace(PLAIN, strategy="ddp", bf16=True, gradient_checkpointing=True)
    assert "bf16 copies" not in memory(TINY, Cluster(4), checkpointed).moments["optimizer"]
    backward = memory(TINY, Cluster(4), checkpointed).moments["backward of the head"]
    assert "bf16 copies" not in backward


def test_generation_by_hand() -> None:
    embedded = replace(
        PLAIN, bf16=True, embedded=True, prompt_tokens=3, num_generations=2, max_completion_tokens=5
    )
    moments = memory(TINY, Cluster(4), embedded).moments
    assert "sending weights" not in moments
    assert moments["generating"]["whole copy"] == 2 * 420
    # Keys and values of 4 in 2 layers, in bfloat16, for the prompt and twice 5 tokens.
    assert moments["generating"]["keys and values"] == (2 * 2 * 4 * 2) * (3 + 2 * 5)
    assert "gradients" not in moments["generating"]
    ddp = memory(TINY, Cluster(4), replace(embedded, strategy="ddp")).moments["generating"]
    assert "whole copy" not in ddp
    assert ddp["bf16 copies"] == 2 * (2 * 160 + 40)


def test_large_matrices_are_prepacked_on_a_cpu() -> None:
    shape = replace(TINY, hidden=256, heads=4, kv_heads=2, head_dim=64, width=511, vocab=512)
    embedded = replace(PLAIN, bf16=False, embedded=True, prepacks=True)
    # Queries, keys and values together 512 wide; the others of a layer have fewer than 2**17.
    packed = {"prepacked weights": 4 * (shape.layers * 512 * 256 + 512 * 256)}
    generating = memory(shape, Cluster(1), embedded).moments["generating"]
    assert packed.items() <= generating.items()
    small = Cluster(1, 8 * 4 * shape.parameters - 1)
    assert "prepacked weights" not in memory(shape, small, embedded).moments["generating"]
    for other in ({"prepacks": False}, {"bf16": True}, {"adapter_rank": 4}):
        changed = replace(embedded, **other)
        assert "prepacked weights" not in memory(shape, Cluster(1), changed).moments["generating"]


def test_the_constants_are_those_of_the_engine() -> None:
    assert workload.REFILL == REFILL
    assert (planned.PREFILL, planned.ROOM, planned.LARGE) == (PREFILL, ROOM, LARGE)
    assert planned.PACKED_SHARE == SHARE


def test_the_first_wall_is_named() -> None:
    found = Memory({"a": {"x": 5, "y": 4}, "b": {"x": 5, "z": 6}, "c": {"x": 5, "u": 3, "v": 9}})
    assert found.peak == 17
    assert found.at_peak == {"x": 5, "u": 3, "v": 9}
    limits = (4, 5, 8.9, 9, 10.9, 11, 16.9, 17)
    assert [found.wall(n) for n in limits] == ["x", "y", "y", "z", "z", "v", "v", None]


# Checkpoints


def test_checkpoints_by_hand() -> None:
    assert checkpoint_bytes(TINY, Settings()) == 420 * 12
    assert checkpoint_bytes(TINY, Settings(weight_bytes=2)) == 420 * 6
