"""Memory and traffic by hand, against real models and against the tool's own sharding."""

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from grpo_cli import flops, scaling
from grpo_cli.budget import saved_bytes
from grpo_cli.errors import UserError
from grpo_cli.likelihood import Likelihood, bytes_per_token, cut
from grpo_cli.rollouts import Rollout
from grpo_cli.scaling import (
    MODELS,
    Cluster,
    Memory,
    Sent,
    Settings,
    Shape,
    activation_bytes,
    checkpoint_bytes,
    compute_seconds,
    host_bytes,
    memory,
    share,
    sync,
    traffic,
)
from tests.conftest import make_rollout

ROOT = Path(__file__).resolve().parent.parent
QWEN2 = {"num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "Qwen2.5-7B": lambda: transformers.Qwen2Config(
        **{**QWEN2, "num_key_value_heads": 4},
        num_hidden_layers=28,
        hidden_size=3584,
        num_attention_heads=28,
        intermediate_size=18944,
    ),
    "Qwen2.5-32B": lambda: transformers.Qwen2Config(
        **QWEN2,
        num_hidden_layers=64,
        hidden_size=5120,
        num_attention_heads=40,
        intermediate_size=27648,
    ),
    "Qwen2.5-72B": lambda: transformers.Qwen2Config(
        **QWEN2,
        num_hidden_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        intermediate_size=29568,
    ),
    "Qwen3-235B-A22B": lambda: transformers.Qwen3MoeConfig(
        num_hidden_layers=94,
        hidden_size=4096,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
    ),
}
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

# 10 rows and columns that can be checked in one's head: a layer has 4·4·4 + 3·4·8 + 2·4 = 168
# parameters, embedding and head 40 each, the last norm 4. 420 in all, 2·160 + 40 in products.
TINY = Shape(layers=2, hidden=4, heads=2, kv_heads=2, head_dim=2, width=8, vocab=10)
PLAIN = Settings(half=False, gradient_checkpointing=False, micro_tokens=1)


def make(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return make(config)


def of_kind(kind: str, **more: Any) -> PretrainedConfig:
    config: PretrainedConfig = getattr(transformers, f"{kind}Config")(**{**SMALL, **more})
    return config


# Parameters


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_tables_have_the_parameters_of_real_ones(name: str) -> None:
    model, shape = on_meta(CONFIGS[name]()), MODELS[name]
    assert Shape.of(model.config) == shape
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.active == flops.params_in_products(model)


def test_parameters_of_published_models() -> None:
    published = {"Qwen2.5-7B": 7.61, "Qwen2.5-32B": 32.8, "Qwen2.5-72B": 72.7}  # their model cards
    for name, billions in published.items():
        assert MODELS[name].parameters / 1e9 == pytest.approx(billions, abs=0.06)
    assert MODELS["Qwen3-235B-A22B"].parameters / 1e9 == pytest.approx(235, abs=0.5)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("Mistral", {"head_dim": 24}),
        ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen2", {"num_key_value_heads": 4, "num_hidden_layers": 3}),
        ("Qwen3", {"head_dim": 32}),
        ("Qwen3Moe", {**MOE, "head_dim": 16}),
        ("Qwen3Moe", {**MOE, "head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_tensors_are_those_of_real_models(kind: str, more: dict[str, Any]) -> None:
    model = on_meta(of_kind(kind, **more))
    shape = Shape.of(model.config)
    of_layer = [tuple(p.shape) for p in model.base_model.layers[0].parameters()]
    every = [tuple(p.shape) for p in model.parameters()]
    assert sorted(shape.layer()) == sorted(of_layer)
    assert sorted(shape.layer() * shape.layers + shape.root()) == sorted(every)
    assert shape.active == flops.params_in_products(model)
    expected = flops.forward_flops(model.config, shape.active, 9, 45, logits=5)
    assert shape.forward_flops(9, 45, logits=5) == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.GPT2Config(), "model_type = gpt2"),
        (of_kind("Llama", attention_bias=True), "llama with attention_bias"),
        (of_kind("Llama", mlp_bias=True), "llama with mlp_bias"),
        (of_kind("Qwen3Moe", **MOE, mlp_only_layers=[0]), "qwen3_moe with mlp_only_layers"),
        (of_kind("Qwen3Moe", **MOE, decoder_sparse_step=2), "qwen3_moe with decoder_sparse_step"),
    ],
)
def test_a_model_that_is_not_described_is_refused(config: PretrainedConfig, said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}: .*llama, mistral"):
        Shape.of(config)


def test_settings_and_clusters_that_do_not_exist() -> None:
    with pytest.raises(UserError, match=r"^strategy = fsdp: one of ddp, fsdp2, zero3\.$"):
        Settings(strategy="fsdp")
    with pytest.raises(UserError, match=r"^gpus = 12: .* gpus_per_node = 8\.$"):
        Cluster(12)
    with pytest.raises(UserError, match=r"^gpus = 0: "):
        Cluster(0)
    assert [Cluster(n).nodes for n in (1, 3, 8, 16)] == [1, 1, 1, 2]


# What a process keeps


def test_shares_by_hand() -> None:
    assert [share([(10, 3), (7,)], n, "fsdp2") for n in (1, 2, 4, 8, 100)] == [37, 19, 11, 7, 4]
    assert [share([(10, 3), (7,)], n, "ddp") for n in (1, 2, 100)] == [37, 37, 37]
    # Two tensors of 8 experts. On 16 GPUs their second dimensions are divided. On 32 that of one
    # is: of the other each GPU keeps a row, and only 8 of the rows are there.
    experts = [(8, 32, 3), (8, 16, 5)]
    assert [share(experts, n, "fsdp2") for n in (4, 8, 16, 32)] == [352, 176, 48 + 40, 24 + 80]
    assert share([(8, 32)], 16, "fsdp2") == 32


def test_shares_make_up_the_whole() -> None:
    for shape in MODELS.values():
        for n in (1, 2, 8, 64):  # of which every number of rows is a multiple
            own = shape.layers * share(shape.layer(), n, "fsdp2") + share(shape.root(), n, "fsdp2")
            assert own * n == shape.parameters
    for n in range(1, 200):
        assert n * share(TINY.layer(), n, "fsdp2") >= 168
        assert share(TINY.layer(), n + 1, "fsdp2") <= share(TINY.layer(), n, "fsdp2")


FAKE = """
import json, sys, torch, transformers
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from grpo_cli import sharding

calls = []

def counted(name):
    call = getattr(dist, name)
    def count(output_tensor=None, input_tensor=None, *args, output=None, input=None, **kwargs):
        given = input_tensor if input is None else input
        calls.append((name, given.numel(), given.element_size()))
        made = output_tensor if output is None else output
        return call(made, given, *args, **kwargs)
    setattr(dist, name, count)

counted("all_gather_single"), counted("reduce_scatter_single")

def micro_batch(model):
    model(torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits.float().mean().backward()

for gpus, reshard, config in json.loads(sys.argv[1]):
    calls.clear()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    config = transformers.Qwen3MoeConfig(**config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    sharding.shard(model, torch.device("cpu"), half=True, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    micro_batch(model)
    counts, kept = list(calls), sum(p.to_local().numel() for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        micro_batch(model)
        tracker.reset_mod_stats()
        micro_batch(model)  # beside the gradient of the one before
    (of_device,) = tracker.get_tracker_snapshot("peak").values()
    peak = {str(getattr(k, "name", k)): size for k, size in of_device.items()}
    print(json.dumps([counts, kept, peak]))
    dist.destroy_process_group()
"""

# (GPUs, reshard_after_forward, what is different from SHARDED, where the peak is, bytes of it that
# experts divided inside their rows take once more)
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
CASES: list[tuple[int, bool, dict[str, int], str, int]] = [
    (2, True, {}, "backward of a layer", 0),
    (16, True, {}, "backward of a layer", 0),
    (16, True, {"hidden_size": 264}, "backward of a layer", 0),  # only one tensor's divides by 16
    (16, False, {}, "forward", 2 * 8 * (192 * 256 + 256 * 96)),
    (16, False, {"vocab_size": 2500}, "backward of a layer", 2 * 8 * 256 * 96),
    (16, True, {"vocab_size": 6000}, "end of the backward", 0),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of each case: collectives of a micro-batch, elements kept, the peak of memory by kind.

    From real FSDP2 micro-batches, in process groups that send nothing.
    """
    script = tmp_path_factory.mktemp("fake") / "fake.py"
    script.write_text(FAKE)
    given = [(gpus, reshard, SHARDED | more) for gpus, reshard, more, *_ in CASES]
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(CASES) :]]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.xdist_group("fake")  # all are of one program
def test_the_tool_shards_and_sends_so(case: int, real: list[Any]) -> None:
    gpus, reshard, more, peak_at, once_more = CASES[case]
    calls, kept, peak = real[case]
    shape, cluster = Shape.of(of_kind("Qwen3Moe", **(SHARDED | more))), Cluster(gpus)
    settings = Settings(
        reshard_after_forward=reshard,
        reference=False,
        prompts=gpus,
        num_generations=1,
        prompt_tokens=1,
        completion_tokens=2,
        micro_tokens=3,
        gradient_checkpointing=True,
    )
    assert settings.micro_batches(gpus) == 1
    sent = traffic(shape, cluster, settings)
    gathers = [n * size for name, n, size in calls if name == "all_gather_single"]
    scatters = [n * size for name, n, size in calls if name == "reduce_scatter_single"]
    forward_and_backward = sent["forward"] + sent.get("backward", Sent(0, 0))
    assert forward_and_backward == Sent((gpus - 1) * sum(gathers), (gpus - 1) * len(gathers))
    # A GPU passes on all but one of the n pieces that make up what it puts in.
    assert sent["gradients"].size == (gpus - 1) * sum(scatters) / gpus
    assert sent["gradients"].hops == (gpus - 1) * len(scatters)
    moments = memory(shape, cluster, settings).moments.values()  # here the logits are whole: tiny
    without = [{k: v for k, v in parts.items() if k != "logits chunk"} for parts in moments]
    parts = max(without[:-1], key=lambda parts: sum(parts.values()))
    assert parts is without[list(memory(shape, cluster, settings).moments).index(peak_at)]
    assert parts["weights"] == 4 * kept == peak["SHARDED_PARAM"]
    assert parts["gradients"] == peak["SHARDED_GRAD"]
    assert parts["moments"] == pytest.approx(peak["OPT"], rel=0.01)
    arriving = once_more if peak_at == "forward" else 0
    assert parts.get("gathered", 0) == peak["UNSHARDED_PARAM"] + peak["ALL_GATHER"] + arriving
    assert sum(parts.values()) == pytest.approx(peak["Total"], rel=0.01)
    assert once_more == 0 or sum(parts.values()) - once_more < 0.99 * peak["Total"]


def test_zero3_is_fsdp2_that_always_reshards() -> None:
    for shape, gpus in itertools.product([TINY, *MODELS.values()], (1, 8, 64, 1024)):
        cluster = Cluster(gpus)
        same = Settings(), Settings("zero3"), Settings("zero3", reshard_after_forward=False)
        for compute in (memory, traffic, sync, host_bytes):
            first, *others = (compute(shape, cluster, settings) for settings in same)
            assert others == [first, first]


# Activations


def rollouts() -> list[Rollout]:
    """Two prompts with two completions each, long enough for their beginnings to be cut off."""
    draws = torch.Generator().manual_seed(1)
    texts = torch.randint(3, 97, (4, 64), generator=draws).tolist()
    prompts = torch.randint(3, 97, (2, 64), generator=draws).tolist()
    return [make_rollout(prompts[i // 2], texts[i], row=i // 2) for i in range(4)]


def likelihood(config: PretrainedConfig, arithmetic: str, checkpointing: bool) -> Likelihood:
    half = arithmetic == "bfloat16"
    model = make(config, torch.bfloat16 if half else torch.float32).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if arithmetic == "autocast":
        autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    found = Likelihood(model, autocast=autocast)
    found.check(rollouts(), 1.0)
    assert found.way.packed
    assert found.way.chunked
    return found


ARITHMETIC = {
    "float32": Settings(strategy="ddp", half=False),
    "autocast": Settings(strategy="ddp"),
    "bfloat16": Settings(strategy="fsdp2"),
}


FAMILIES = [("Qwen2", {}), ("Qwen3", {"head_dim": 24}), ("Qwen3Moe", MOE)]


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize(("kind", "more"), FAMILIES)
def test_a_layer_keeps_what_the_tool_measures(
    kind: str, more: dict[str, Any], arithmetic: str
) -> None:
    measured = []
    for layers in (1, 2):
        torch.manual_seed(0)
        config = of_kind(kind, **more, num_hidden_layers=layers)
        found = likelihood(config, arithmetic, checkpointing=False)
        measured.append(bytes_per_token(found, rollouts(), 1.0))
    kept = scaling.kept_by(ARITHMETIC[arithmetic])
    assert scaling.kept_in_layer(Shape.of(config), kept) == pytest.approx(measured[1] - measured[0])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize(("kind", "more"), FAMILIES)
def test_activations_are_those_that_the_tool_measures(
    kind: str, more: dict[str, Any], arithmetic: str, checkpointing: bool
) -> None:
    """But for prompt tokens, which the head does not see, and shares that the measure counts."""
    config = of_kind(kind, **more, num_hidden_layers=6)
    torch.manual_seed(0)
    measured = bytes_per_token(likelihood(config, arithmetic, checkpointing), rollouts(), 1.0)
    settings = replace(ARITHMETIC[arithmetic], gradient_checkpointing=checkpointing)
    expected = activation_bytes(Shape.of(config), settings)
    assert expected == pytest.approx(measured, rel=0.04 if checkpointing else 0.01)


@pytest.mark.parametrize(("kind", "more"), [("Qwen2", {}), ("Qwen3Moe", MOE)])
def test_autocast_keeps_copies_of_the_weights(kind: str, more: dict[str, Any]) -> None:
    """What does not grow with the tokens: all but the head's, which the chunked logits drop."""
    config = of_kind(kind, **more)
    found = likelihood(config, "autocast", False)
    some, points = cut(rollouts()), []
    for rows in (some, some[:1]):
        with saved_bytes(found.model) as kept, torch.enable_grad():
            logprobs, _ = found(rows, 1.0)
        del logprobs
        points.append((kept(), found.tokens(rows)))
    (more_kept, tokens), (less_kept, fewer) = points
    slope = (more_kept - less_kept) / (tokens - fewer)
    parts = memory(Shape.of(config), Cluster(1), Settings(strategy="ddp")).moments["forward"]
    without_head = parts["bf16 copies"] - 2 * 97 * 64
    assert without_head == pytest.approx(more_kept - slope * tokens, abs=200)


# Memory


def test_memory_by_hand() -> None:
    """420 parameters; on 4 GPUs a layer's rows divide into 42, the root's 10, 4 and 10 into 25."""
    assert TINY.parameters == 420
    assert TINY.active == 2 * 160 + 40
    of_one = activation_bytes(TINY, PLAIN)  # a token's: 24·4 + 16·4 + 4·2 + 8 + 16·8 a layer
    assert of_one == 2 * 304 + 12 * 4 + 8 * 2
    chunk = 64 * 2**20
    ddp = replace(PLAIN, strategy="ddp")
    state = {"weights": 1680, "gradients": 1680, "moments": 3360, "reference": 1680}
    rest = {"weights": 1680, "moments": 3360, "reference": 1680}
    assert memory(TINY, Cluster(4), ddp).moments == {
        "forward": {**state, "activations": 672, "logits chunk": chunk},
        "backward of the head": {
            **state,
            "activations": 672,
            "logits chunk": chunk,
            "head's gradient": 160,
        },
        "optimizer": {**state, "AdamW's temporaries": 1680},
        "sending weights": {**rest, "bucket": 256 * 2**20},
    }
    # Rows: of a layer 4·4 of 4 (a row each), 2 norms of 4, 3·4·8; of the root 10, 4, 10 of 4.
    own = 4 * (2 * 42 + (3 * 4 + 1 + 3 * 4))
    state = {"weights": own, "gradients": own, "moments": 2 * own, "reference": own}
    root, a_layer = 4 * (4 * 25), 4 * (4 * 42)  # padded
    assert memory(TINY, Cluster(4), PLAIN).moments == {
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


def test_layers_kept_gathered_by_hand() -> None:
    kept = memory(TINY, Cluster(4), replace(PLAIN, reshard_after_forward=False)).moments
    assert kept["forward"]["gathered"] == 4 * (100 + 4 * 168)
    assert kept["backward of the head"]["gathered"] == 4 * (100 + 2 * 168)
    assert kept["backward of a layer"]["gathered"] == 4 * (100 + 168)
    assert "gathered" not in kept["end of the backward"]


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
    half = memory(TINY, Cluster(4), replace(PLAIN, half=True)).moments
    assert half["forward"]["gathered"] == 2 * (100 + 3 * 168)
    assert half["forward"]["logits chunk"] == 2 * 64 * 2**20
    assert half["backward of the head"]["head's gradient"] == 40 * (4 + 2)
    assert half["backward of a layer"]["head's gradient"] == 40 * 2
    assert half["backward of a layer"]["unsummed gradient"] == 2 * 168 + 4 * 168
    ddp = memory(TINY, Cluster(4), replace(PLAIN, strategy="ddp", half=True)).moments
    assert ddp["forward"]["bf16 copies"] == 2 * (2 * 160 + 40)
    assert ddp["backward of the head"]["bf16 copies"] == 2 * (2 * 160 + 40)
    checkpointed = replace(PLAIN, strategy="ddp", half=True, gradient_checkpointing=True)
    assert "bf16 copies" not in memory(TINY, Cluster(4), checkpointed).moments["optimizer"]
    backward = memory(TINY, Cluster(4), checkpointed).moments["backward of the head"]
    assert "bf16 copies" not in backward


def test_generation_by_hand() -> None:
    embedded = replace(
        PLAIN, half=True, embedded=True, prompt_tokens=3, num_generations=2, max_completion_tokens=5
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


def test_a_tensor_that_is_larger_than_a_bucket_goes_alone() -> None:
    parts = memory(MODELS["Qwen2.5-7B"], Cluster(64), Settings()).moments["sending weights"]
    assert parts["bucket"] == 2 * 4 * 152064 * 3584


def test_what_the_readme_says_of_ddp() -> None:
    """16 bytes a parameter, and 4 more for a reference."""
    for reference, size in ((False, 16), (True, 20)):
        settings = Settings(strategy="ddp", reference=reference)
        parts = memory(MODELS["Qwen2.5-7B"], Cluster(8), settings).moments["forward"]
        held = sum(parts.get(n, 0) for n in ("weights", "gradients", "moments", "reference"))
        assert held == size * 7_615_616_512


def test_the_first_wall_is_named() -> None:
    found = Memory({"a": {"x": 5, "y": 4}, "b": {"x": 5, "z": 6}, "c": {"x": 5, "u": 3, "v": 9}})
    assert found.peak == 17
    assert found.at_peak == {"x": 5, "u": 3, "v": 9}
    limits = (4, 5, 8.9, 9, 10.9, 11, 16.9, 17)
    assert [found.wall(n) for n in limits] == ["x", "y", "y", "z", "z", "v", "v", None]


def test_more_gpus_never_keep_more_of_the_state() -> None:
    for shape in MODELS.values():
        for strategy in scaling.STRATEGIES:
            settings = Settings(strategy=strategy)
            states = [
                memory(shape, Cluster(n), settings).moments["forward"]["moments"]
                for n in (8, 16, 64, 256, 1024)
            ]
            assert states == sorted(states, reverse=True)


def test_more_gpus_never_take_more_memory_where_the_rows_divide() -> None:
    for name, shape in MODELS.items():
        peaks = [memory(shape, Cluster(n), Settings()).peak for n in (8, 16, 32, 64, 128, 256)]
        assert all(b <= 1.001 * a for a, b in itertools.pairwise(peaks)), name


def test_experts_send_padding_where_neither_dimension_divides() -> None:
    shape = MODELS["Qwen3-235B-A22B"]  # 128 experts, of (3072, 4096) and (4096, 1536)

    def sent(gpus: int) -> float:
        return traffic(shape, Cluster(gpus), Settings(prompts=gpus))["forward"].size

    for gpus in (128, 256, 1024):
        assert sent(gpus) / sent(64) == pytest.approx(1, rel=0.05)
    # 3072 / 192 is whole, 4096 / 192 is not: of 192 rows 64 are padding, in a third of the weights.
    assert sent(192) / sent(64) == pytest.approx(1 + 0.5 / 3, rel=0.05)
    assert sent(640) / sent(64) == pytest.approx(5, rel=0.05)


# Traffic


def test_traffic_by_hand() -> None:
    """A group of 2 + 3·4 = 14 tokens; 8 prompts on 4 GPUs are 2 groups each, 28 tokens."""
    settings = replace(
        PLAIN,
        prompts=8,
        prompt_tokens=2,
        completion_tokens=4,
        num_generations=3,
        micro_tokens=10,
        half=True,
        embedded=True,
        old_logprobs=True,
    )
    assert settings.micro_batches(4) == 3
    layers, root = 2 * 42, 25
    sent = traffic(TINY, Cluster(4), settings)
    assert sent == {
        "forward": Sent(3 * 3 * (layers + root) * 2, 3 * 3 * 3),
        "backward": Sent(3 * 3 * layers * 2, 3 * 3 * 2),
        "gradients": Sent(3 * 3 * (layers + root) * 4, 3 * 3 * 3),
        "ref_logprobs": Sent(3 * (3 * layers + root) * 2, 3 * (3 * 2 + 1)),
        "old_logprobs": Sent(3 * (3 * layers + root) * 2, 3 * (3 * 2 + 1)),
        "generation": Sent(3 * (layers + root) * 2, 3 * (2 * 9 + 3)),
    }
    kept = traffic(TINY, Cluster(4), replace(settings, reshard_after_forward=False))
    assert kept == {name: part for name, part in sent.items() if name != "backward"}
    plain = replace(settings, embedded=False, old_logprobs=False, reference=False)
    assert sorted(traffic(TINY, Cluster(4), plain)) == ["backward", "forward", "gradients"]
    assert "old_logprobs" not in traffic(TINY, Cluster(4), replace(settings, old_logprobs=False))
    assert Sent(1, 2) + Sent(30, 40) == Sent(31, 42)
    ddp = traffic(TINY, Cluster(4), replace(settings, strategy="ddp"))
    assert ddp == {"gradients": Sent(2 * 3 / 4 * 420 * 4, 2 * 3)}
    # 7,615,616,512 gradients in calls of 2^24: 453.9 of them.
    of_7b = traffic(MODELS["Qwen2.5-7B"], Cluster(2), Settings(strategy="ddp"))["gradients"]
    assert of_7b.hops == 2 * 454


def test_ddp_sends_the_same_whatever_the_batch() -> None:
    shape, cluster = MODELS["Qwen2.5-7B"], Cluster(64)

    def sent(strategy: str, **more: int) -> float:
        settings = Settings(strategy=strategy, **more)  # type: ignore[arg-type]
        return sum(part.size for part in traffic(shape, cluster, settings).values())

    assert sent("ddp") == sent("ddp", prompts=9999) == sent("ddp", micro_tokens=100_000)
    assert sent("fsdp2", prompts=4096) == pytest.approx(4 * sent("fsdp2"), rel=0.02)
    assert sent("fsdp2", micro_tokens=16384) == pytest.approx(sent("fsdp2") / 2, rel=0.02)


def test_one_gpu_sends_nothing() -> None:
    for strategy in scaling.STRATEGIES:
        for part in traffic(TINY, Cluster(1), Settings(strategy=strategy)).values():
            assert part == Sent(0, 0)
        assert sync(TINY, Cluster(1), Settings(strategy=strategy)).gather == 0


def test_seconds_by_hand() -> None:
    node = Cluster(4, gpus_per_node=4, inside=100, between=80, hop=0.5)
    assert Sent(1000, 6).seconds(node) == 10 + 3
    assert Sent(1000, 6).seconds(replace(node, gpus=8)) == 1000 / 80 + 3
    assert Sent(1000, 6).seconds(replace(node, gpus=8, between=400)) == 10 + 3
    assert replace(node, gpus=8).link == 20


def test_products_by_hand() -> None:
    settings = Settings(
        prompts=5, num_generations=2, prompt_tokens=3, completion_tokens=4,
        gradient_checkpointing=False, reference=False,
    )  # fmt: skip
    cluster = Cluster(2, flops=1000, utilisation=0.5)
    # 3 groups of 3 + 2·4 tokens: 360 parameters in products, of which the head's 40 for 8 tokens
    # alone. Pairs: 6 of the prompt, for each completion 4·3 and 10. 4 · 2 layers · 2 heads · 2.
    forward = 2 * (320 * 11 + 40 * 8) + 32 * (6 + 2 * (12 + 10))
    assert compute_seconds(TINY, cluster, settings) == 3 * 3 * forward / 500
    more = replace(settings, gradient_checkpointing=True, reference=True, old_logprobs=True)
    assert compute_seconds(TINY, cluster, more) == 3 * 6 * forward / 500


# Weight sync and checkpoints


def test_weight_sync_by_hand() -> None:
    cluster = Cluster(8, gpus_per_node=4, inside=100, between=80, hop=0.5)
    three = Settings(servers=3)
    # Rows on 8 GPUs: one of each matrix and norm, 2 of the root's.
    own = 2 * (4 * 4 + 2 + 2 * 4 + 8) + 2 * 4 + 1 + 2 * 4
    found = sync(TINY, cluster, three)
    assert found.gather == 7 * own * 4 / 80 + 7 * (2 * 9 + 3) * 0.5
    assert found.send == 3 * 420 * 4 / 20
    assert found.seconds == found.gather + found.send
    assert sync(TINY, cluster, replace(three, strategy="ddp")).gather == 0


def test_checkpoints_by_hand() -> None:
    assert checkpoint_bytes(TINY, Settings()) == 420 * 12
    assert checkpoint_bytes(TINY, Settings(weight_bytes=2)) == 420 * 6
    cluster = Cluster(8, gpus_per_node=4)
    own = 2 * (4 * 4 + 2 + 2 * 4 + 8) + 2 * 4 + 1 + 2 * 4
    assert host_bytes(TINY, cluster, Settings()) == {"loading": 1680, "checkpoint": 4 * own * 12}
    ddp = host_bytes(TINY, cluster, Settings(strategy="ddp"))
    assert ddp == {"loading": 4 * 1680, "checkpoint": 420 * 12}


# The document


def test_tables_of_the_document_are_up_to_date() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    assert scaling.renewed(page) == page, "run python -m grpo_cli.scaling docs/scaling.md"


def test_tables_say_what_the_functions_give() -> None:
    cell = "| Qwen2.5-72B | 8 | "
    row = next(line for line in scaling.tables().splitlines() if line.startswith(cell))
    assert row.startswith(f"{cell}1,745: weights | 213: moments | ")
    assert "| Qwen2.5-72B | 291 | " in scaling.tables()


def test_a_page_is_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{scaling.BEGIN}\nold\n{scaling.END}\nafter\n")
    scaling.main([str(page)])
    assert page.read_text() == (
        f"before\n{scaling.BEGIN}\n\n{scaling.tables()}\n{scaling.END}\nafter\n"
    )
    scaling.main([])
    assert capsys.readouterr().out == scaling.tables() + "\n"
    page.write_text("nothing")
    with pytest.raises(AssertionError, match="the page must hold"):
        scaling.main([str(page)])
