"""Steps in float32 of weights that are kept in bfloat16 or whose optimizer is on the host."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from grpo_cli.checkpoints import checkpointer
from grpo_cli.checkpoints.checkpointer import Checkpointer, Parts
from grpo_cli.checkpoints.paths import checkpoint_path
from grpo_cli.config.schema import Optimizer
from grpo_cli.distributed.workers import Workers
from grpo_cli.models import memory, optimizers
from grpo_cli.models.master_weights import CHUNK_BYTES, MASTER, UPDATES, MasterWeights
from tests.models.test_optimizers import EVERY, same, step

MODES = {"stochastic": ("stochastic", "none"), "offload": ("nearest", "optimizer")}


def made(model: PreTrainedModel, mode: str, **changes: Any) -> torch.optim.Optimizer:
    rounding, offload = MODES[mode]
    config = Optimizer(**{"learning_rate": 1e-2, "rounding": rounding, **changes})
    return optimizers.make(config, model, offload=offload, seed=3)


class Layer(nn.Module):
    """Stands in for a model: a bfloat16 weight, of which each element is 1."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape, dtype=dtype))


def over(
    *layers: Layer, lr: float, on_host: bool = False, chunk_bytes: int = CHUNK_BYTES, seed: int = 0
) -> MasterWeights:
    return MasterWeights(
        [{"params": [layer.weight for layer in layers], "state_bytes": 0.0}],
        lambda groups: torch.optim.SGD(groups, lr=lr),
        on_host=on_host,
        stochastic=not on_host,
        seed=seed,
        chunk_bytes=chunk_bytes,
    )


def take(optimizer: torch.optim.Optimizer, *layers: Layer, steps: int = 1) -> None:
    for _ in range(steps):
        for layer in layers:
            layer.weight.grad = torch.full_like(layer.weight, -1.0)
        optimizer.step()


def test_small_updates_count() -> None:
    """64 updates of 1/2048 to weights of 1 in bfloat16, which has a step of 1/128 there."""
    plain, stochastic, on_host = (Layer(100, 100) for _ in range(3))
    take(torch.optim.SGD([plain.weight], lr=1 / 2048), plain, steps=64)
    assert (plain.weight == 1).all(), "each update is lost"
    take(over(stochastic, lr=1 / 2048), stochastic, steps=64)
    assert stochastic.weight.float().mean().item() == pytest.approx(1 + 64 / 2048, abs=1e-3)
    assert stochastic.weight.unique().numel() > 2
    take(over(on_host, lr=1 / 2048, on_host=True), on_host, steps=64)
    assert (on_host.weight == 1 + 64 / 2048).all()


def test_parameters_step_in_chunks() -> None:
    """Of 400, 400, 400 and 4000 bytes in float32, 1000 at a time."""
    layers = [Layer(100), Layer(100), Layer(100), Layer(1000)]
    optimizer = over(*layers, lr=1.0, chunk_bytes=1000)
    inner, seen = optimizer.inner.step, []

    def look() -> None:
        inner()
        held = [m for m in optimizer.masters.values() if m.untyped_storage().nbytes()]
        assert {m for m in held if m.grad is not None} == set(held)
        seen.append([m.numel() for m in held])

    optimizer.inner.step = look  # type: ignore[method-assign]
    take(optimizer, *layers)
    assert seen == [[100, 100], [100], [1000]]
    assert all((layer.weight == 2).all() for layer in layers)
    assert all(m.untyped_storage().nbytes() == 0 for m in optimizer.masters.values())
    assert all(m.grad is None for m in optimizer.masters.values())


@pytest.mark.parametrize("on_host", [True, False])
def test_a_weight_without_gradient_stays(on_host: bool) -> None:
    used, unused = Layer(4), Layer(4)
    optimizer = over(used, unused, lr=0.5, on_host=on_host)
    take(optimizer, used)
    assert (used.weight == 1.5).all()
    assert (unused.weight == 1).all()


def test_the_learning_rate_is_that_of_the_groups() -> None:
    layer = Layer(4)
    optimizer = over(layer, lr=1.0)
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.param_groups[0]["lr"] = 0.25
    take(optimizer, layer)
    assert (layer.weight == 1.25).all()


def test_rounding_depends_on_seed_parameter_and_step_only() -> None:
    def after(seed: int, chunk_bytes: int, steps: int) -> tuple[Tensor, Tensor]:
        first, second = Layer(1000), Layer(1000)
        optimizer = over(first, second, lr=1 / 256, seed=seed, chunk_bytes=chunk_bytes)
        take(optimizer, first, second, steps=steps)
        return first.weight.detach(), second.weight.detach()

    torch.manual_seed(1)
    first, second = after(0, CHUNK_BYTES, 1)
    torch.manual_seed(2)
    again = after(0, 1, 1)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)
    assert not torch.equal(first, after(1, CHUNK_BYTES, 1)[0])
    up = [t > 1 for t in after(0, CHUNK_BYTES, 2)]
    assert not torch.equal(up[0], first > 1)


def test_weights_in_float32_among_others_are_not_rounded() -> None:
    wide, narrow = Layer(100, dtype=torch.float32), Layer(100)
    take(over(wide, narrow, lr=1e-6), wide, narrow)
    assert torch.equal(wide.weight.detach(), torch.full((100,), 1 + 1e-6))
    assert narrow.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_a_resumed_run_has_the_same_bits(
    name: str,
    dtype: torch.dtype,
    mode: str,
    wide: PreTrainedModel,
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    wide.to(dtype)
    options = {"algorithm": name, "args": EVERY[name], "weight_decay": 0.1}
    parts = Parts(wide, made(wide, mode, **options))
    for _ in range(2):
        step(parts)
    saver = Checkpointer(Workers("cpu"), print, background=False)
    path = checkpoint_path(tmp_path, 2)
    saver.save(path, parts, {}, "steps: 3\n", tokenizer, with_model=False)
    assert saver.wait() is None
    kept = {key for state in parts.optimizer.state.values() for key in state}
    is_half = dtype == torch.bfloat16
    assert (MASTER in kept) == (mode == "offload" and is_half)
    assert (UPDATES in kept) == (mode == "stochastic" and is_half)
    step(parts)

    other = copy.deepcopy(wide)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    resumed = Parts(other, made(other, mode, **options))
    checkpointer.load(path, resumed)
    assert not same(parts, resumed)
    step(resumed)
    assert same(parts, resumed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EVERY)
def test_a_step_of_float32_weights_is_as_without(
    name: str, mode: str, wide: PreTrainedModel
) -> None:
    other = copy.deepcopy(wide)
    args = {"fused": False} if name == "adamw" else EVERY[name]  # on the host it is fused
    options: dict[str, Any] = {"algorithm": name, "args": args, "weight_decay": 0.1}
    plain = Parts(other, optimizers.make(Optimizer(learning_rate=1e-2, **options), other))
    ours = Parts(wide, made(wide, mode, **options))
    for parts in (plain, ours, plain, ours):
        step(parts)
    for a, b in zip(wide.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_state_is_in_float32_and_weights_in_bfloat16(mode: str, wide: PreTrainedModel) -> None:
    wide.to(torch.bfloat16)
    parts = Parts(wide, made(wide, mode))
    step(parts)
    types = {
        key: value.dtype
        for state in parts.optimizer_state().values()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    kept = {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    assert types == kept | ({MASTER: torch.float32} if mode == "offload" else {})
    assert {p.dtype for p in wide.parameters()} == {torch.bfloat16}
    assert parts.trained().keys() == dict(wide.named_parameters()).keys()


def test_embeddings_have_32_bits_in_an_8_bit_optimizer(wide: PreTrainedModel) -> None:
    wide.to(torch.bfloat16)
    parts = Parts(wide, made(wide, "stochastic", algorithm="adamw_8bit"))
    step(parts)
    types = {n: s["state1"].dtype for n, s in parts.optimizer_state().items()}
    assert types["model.layers.0.mlp.up_proj.weight"] == torch.uint8
    assert types["model.embed_tokens.weight"] == torch.float32


def test_the_host_copy_follows_float32_and_plain_bfloat16_does_not(model: PreTrainedModel) -> None:
    """40 steps with a learning rate at which bfloat16 loses most updates."""

    def trained(dtype: torch.dtype, mode: str | None) -> Tensor:
        own = copy.deepcopy(model).to(dtype)
        config = {"learning_rate": 2e-5}
        if mode is None:
            parts = Parts(own, optimizers.make(Optimizer(**config), own))
        else:
            parts = Parts(own, made(own, mode, **config))
        for _ in range(40):
            step(parts)
        trained = list(parts.trained().values() if mode == "offload" else own.parameters())
        return torch.cat([p.detach().float().flatten() for p in trained])

    start = torch.cat([p.detach().flatten() for p in model.to(torch.bfloat16).float().parameters()])
    right = trained(torch.float32, None) - start

    def share(found: Tensor) -> float:  # of the right movement, along its direction
        return (((found - start) @ right) / right.square().sum()).item()

    assert share(trained(torch.bfloat16, "offload")) > 0.95
    assert share(trained(torch.bfloat16, "stochastic")) > 0.9
    assert share(trained(torch.bfloat16, None)) < 0.6


def test_room_for_the_state_of_the_host_is_left_where_it_is(model: PreTrainedModel) -> None:
    numel = sum(p.numel() for p in model.parameters())
    model.to(torch.bfloat16)
    cpu = torch.device("cpu")
    # The host is the device here: gradients in bfloat16, two moments in float32.
    for mode in MODES:
        assert memory.bytes_to_come(made(model, mode), cpu) == numel * (2 + 8)
    assert memory.bytes_to_come(made(model, "offload"), torch.device("cuda")) == 0


def test_a_loss_scaler_unscales_the_gradients_of_the_weights() -> None:
    layer = Layer(4, dtype=torch.float32)
    optimizer = over(layer, lr=1.0, on_host=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad, expected in ((False, 1.0 + 0.5), (True, 1.0 + 0.5)):
        layer.weight.grad = None
        loss = scaler.scale((-0.5 * layer.weight).sum())
        loss.backward()
        assert layer.weight.grad is not None
        if bad:
            layer.weight.grad[0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (layer.weight == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon", "sgd"])
def test_on_a_gpu_the_steps_are_near_those_on_a_cpu(
    name: str, mode: str, wide: PreTrainedModel
) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    options = {"algorithm": name, "args": EVERY[name]}
    other = copy.deepcopy(wide).cuda()
    for own in (wide, other):
        parts = Parts(own, made(own, mode, **options))
        for _ in range(3):
            ids = torch.tensor([[5, 6, 7, 8]], device=own.device)
            own(ids, labels=ids).loss.backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad(set_to_none=True)
        places = {p.device.type for p in parts.trained().values()}
        assert places == {"cpu" if mode == "offload" else own.device.type}
    torch.cuda.synchronize()
    far = [
        (a - b.cpu()).abs().max().item()
        for a, b in zip(wide.parameters(), other.parameters(), strict=True)
    ]
    assert max(far) < (5e-3 if "8bit" in name or name == "muon" else 1e-4)


@pytest.mark.gpu
def test_a_gpu_holds_weights_and_gradients_only_with_offload() -> None:
    layer = Layer(4096, 4096).cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = over(layer, lr=1 / 2048, on_host=True)
    take(optimizer, layer, steps=2)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before == layer.weight.nbytes  # the gradient
    assert (layer.weight == 1 + 2 / 2048).logical_or(layer.weight == 1).all()
    master = next(iter(optimizer.masters.values()))
    assert (master == 1 + 2 / 2048).all()
