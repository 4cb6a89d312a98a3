"""The optimizer that a recipe names, its groups, and what a checkpoint keeps of it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers import PreTrainedTokenizerFast as Tokenizer

from grpo_cli.checkpoints import checkpointer
from grpo_cli.checkpoints.checkpointer import Checkpointer, Parts
from grpo_cli.checkpoints.paths import checkpoint_path
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.settings import Distributed
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.models import memory, optimizers
from grpo_cli.models.settings import Optimizer
from tests.models.families import FAMILIES, Family
from tests.models.test_architectures import make

SGD = "torch.optim:SGD"
MINE = f"{__name__}:Counting"
EIGHT_BIT, PAGED = optimizers.EIGHT_BIT
EVERY: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {},
    EIGHT_BIT: {},
    SGD: {"momentum": 0.9},
    MINE: {"every": 2},
}


@pytest.fixture
def wide(model: PreTrainedModel) -> PreTrainedModel:
    """A model with matrices that are large enough for 8 bits."""
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Linear(32, 160, bias=True)
    mlp.gate_proj = nn.Linear(32, 160, bias=False)
    mlp.down_proj = nn.Linear(160, 32, bias=False)
    return model


class Counting(torch.optim.Optimizer):
    """SGD whose steps become smaller; it counts with plain numbers."""

    def __init__(self, params: Any, lr: float, every: int = 1) -> None:
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["rate"] = group["lr"] / (1 + state["count"] // group["every"])
                    p.add_(p.grad, alpha=-state["rate"])


def NoRate(params: Any) -> None:  # noqa: N802
    raise AssertionError


def made(model: PreTrainedModel, **changes: Any) -> torch.optim.Optimizer:
    return optimizers.make(Optimizer(**{"learning_rate": 1e-2, **changes}), model)


def step(parts: Parts) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    parts.model(ids, labels=ids).loss.backward()
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)


def same(a: Parts, b: Parts) -> bool:
    first, second = a.tensors(), b.tensors()
    return first.keys() == second.keys() and all(
        torch.equal(first[n], second[n]) and first[n].dtype == second[n].dtype for n in first
    )


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in EVERY), ("adamw", torch.bfloat16)]
)
def test_resumed_optimizer_is_bitwise_equal(
    name: str, dtype: torch.dtype, wide: PreTrainedModel, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    wide.to(dtype)
    options = {"algorithm": name, "args": EVERY[name], "weight_decay": 0.1}
    parts = Parts(wide, made(wide, **options))
    start = copy.deepcopy(wide.state_dict())
    for _ in range(2):
        step(parts)
    saver = Checkpointer(Workers("cpu"), print)
    path = checkpoint_path(tmp_path, 2)
    saver.save(path, parts, {}, "steps: 3\n", tokenizer, with_model=False)
    assert saver.wait() is None
    step(parts)
    assert any(not torch.equal(v, start[k]) for k, v in wide.state_dict().items())

    other = copy.deepcopy(wide)
    resumed = Parts(other, made(other, **options))
    checkpointer.load(path, resumed)
    assert not same(parts, resumed)
    step(resumed)
    assert same(parts, resumed)
    kinds = {k: type(v) for state in resumed.optimizer.state.values() for k, v in state.items()}
    assert kinds == {k: type(v) for s in parts.optimizer.state.values() for k, v in s.items()}


@pytest.mark.parametrize(
    ("cuda", "offload", "args", "fused"),
    [
        (True, "none", {}, True),
        (True, "none", {"fused": False}, False),
        (False, "all", {}, True),
        (False, "none", {}, None),
    ],
)
def test_adamw_is_fused_on_cuda_and_where_asked(
    cuda: bool,
    offload: str,
    args: dict[str, Any],
    fused: bool | None,
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cuda:
        monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    optimizer = optimizers.make(Optimizer(args=args), model, offload=offload)
    assert optimizer.defaults["fused"] is fused


def test_unsupported_optimizer_state(model: PreTrainedModel) -> None:
    parts = Parts(model, made(model))
    step(parts)
    next(iter(parts.optimizer.state.values()))["history"] = []
    with pytest.raises(TrainingError, match=r"the state 'history' of .* is of type list"):
        parts.tensors()


@pytest.mark.parametrize("name", [EIGHT_BIT, PAGED])
def test_moments_of_8_bits(name: str, wide: PreTrainedModel) -> None:
    parts = Parts(wide, made(wide, algorithm=name))
    step(parts)
    state = parts.optimizer.state
    types = {n: state[p]["state1"].dtype for n, p in parts.trained().items()}
    assert types["model.layers.0.mlp.up_proj.weight"] == torch.uint8
    assert types["model.embed_tokens.weight"] == torch.float32
    held = {id(p): g["state_bytes"] for g in parts.optimizer.param_groups for p in g["params"]}
    assert held[id(wide.get_input_embeddings().weight)] == 8
    assert held[id(wide.model.layers[0].mlp.up_proj.weight)] < 3


def test_adamw_is_as_before(model: PreTrainedModel) -> None:
    """It has one group, and computes the same numbers as AdamW over all parameters."""
    other = copy.deepcopy(model)
    ours = Parts(model, made(model))
    plain = Parts(other, torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.0))
    assert len(ours.optimizer.param_groups) == 1
    for parts in (ours, plain, ours, plain):
        step(parts)
    assert same(ours, plain)


def decayed(model: PreTrainedModel, no_decay: list[str]) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = made(model, weight_decay=0.1, no_decay=no_decay)
    groups = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert sum(map(len, groups.values())) == len(names)
    return {names[id(p)] for p in groups.get(0.1, [])}


def test_norms_biases_and_embeddings_do_not_decay(model: PreTrainedModel) -> None:
    everything = {name for name, _ in model.named_parameters()}
    norms = {n for n in everything if "norm" in n}
    biases = {n for n in everything if n.endswith(".bias")}
    assert len(norms) == 5
    assert len(biases) == 6
    assert decayed(model, ["norms"]) == everything - norms
    assert decayed(model, ["biases"]) == everything - biases
    assert decayed(model, ["embeddings"]) == everything - {"model.embed_tokens.weight"}
    every = decayed(model, ["norms", "biases", "embeddings"])
    assert every == everything - norms - biases - {"model.embed_tokens.weight"}


@pytest.mark.parametrize("family", FAMILIES[::8], ids=str)
def test_decay_matches_transformers(family: Family) -> None:
    model = make(family)
    expected = set(Trainer.get_decay_parameter_names(None, model))
    names = {name for name, _ in model.named_parameters()}
    assert decayed(model, ["norms", "biases"]) == names & expected


def test_muon_gets_the_hidden_matrices(model: PreTrainedModel) -> None:
    optimizer = made(model, algorithm="muon", weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    muon = {names[id(p)] for g in optimizer.param_groups if g.get("muon") for p in g["params"]}
    assert len(muon) == 2 * 7
    assert all(name.endswith("_proj.weight") for name in muon)
    step(Parts(model, optimizer))
    keys = {frozenset(state) for state in optimizer.state.values()}
    assert keys == {frozenset({"momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"})}


def test_muon_updates_have_the_size_of_those_of_adamw(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight  # [32, 32]
    before = weight.detach().clone()
    torch.manual_seed(0)
    weight.grad = torch.randn(32, 32)
    made(model, algorithm="muon", learning_rate=1e-3).step()
    update = (before - weight.detach()) / 1e-3
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bytes_to_come(name: str, model: PreTrainedModel) -> None:
    optimizer = made(model, algorithm=name, args=EVERY[name])
    gradients = 4 * sum(p.numel() for p in model.parameters())
    predicted = memory.bytes_to_come(optimizer, torch.device("cpu")) - gradients
    step(Parts(model, optimizer))
    state = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    assert sum(v.nbytes for v in state) == predicted


REFUSED = {
    "unknown": ({"algorithm": "adam"}, "must be one of adamw, .* Did you mean adamw"),
    "class": ({"algorithm": f"{__name__}:Countin"}, "has no 'Countin'.*Counting"),
    "no class": ({"algorithm": f"{__name__}:NoRate"}, "is not a torch.optim.Optimizer"),
    "no lr": ({"algorithm": "torch.optim:Optimizer"}, "made with lr and optimizer.args: TypeError"),
    "knob": ({"args": {"betas": [0.9, 0.9]}}, "args.betas: is set by optimizer.betas"),
    "argument": ({"algorithm": SGD, "args": {"momentun": 1}}, "unexpected keyword .*momentun"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=[*REFUSED])
def test_a_mistake_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        optimizers.check(Recipe(optimizer=Optimizer(**changes)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", EVERY)
def test_sharded_optimizers(name: str) -> None:
    config = Optimizer(algorithm=name, args=EVERY[name])
    optimizers.check(Recipe(optimizer=config, distributed=Distributed(strategy="ddp")))
    sharded = Recipe(optimizer=config, distributed=Distributed(strategy="fsdp2"))
    if name in ("adamw", SGD, MINE):
        optimizers.check(sharded)
    else:
        with pytest.raises(UserError, match=f"{name}: does not work on sharded weights"):
            optimizers.check(sharded)
