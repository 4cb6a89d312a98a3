"""Takes an optimizer's step in float32 for weights that are kept in another dtype or place.

The optimizer is made over float32 copies of the weights, the master weights. Its state, such as
AdamW's two moments, is in float32 too, and on the device of the master weights.

    optimizer.rounding=stochastic    the copies exist only during the step, for a chunk of the
                                     parameters at a time; the weights are rounded stochastically
    distributed.offload=optimizer    the copies stay on the host (ZeRO-Offload, arXiv 2101.06840);
                                     the device holds only weights and gradients

A step takes the parameters in chunks. Four parameters of 30, 30, 20 and 70 MB in float32 and chunks
of 64 MB give three steps of the inner optimizer:

    parameters 1 and 2    gradients to float32, step, weights rounded back
    parameter 3           the gradients of all others are None, so that the step skips them
    parameter 4           larger than a chunk: a chunk of its own

The inner optimizer must therefore keep all its state by parameter, as checkpoints require too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_cli.models.memory import own_part
from grpo_cli.models.rounding import round_stochastically
from grpo_cli.random_streams import derive_seed

CHUNK_BYTES = 64 * 2**20  # of float32 weights in one step of the inner optimizer
MASTER = "master"  # the key of a master weight in the inner optimizer's state
UPDATES = "updates"  # the number of steps that a weight has taken, a seed of its rounding


class MasterWeights(torch.optim.Optimizer):
    """Steps an inner optimizer over float32 master weights, and writes the weights back.

    `param_groups` holds the model's parameters, whose gradients are clipped, unscaled and cleared
    there. `state` is the inner optimizer's, by master weight.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make_inner: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        on_host: bool,
        stochastic: bool,
        seed: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Makes the master weights, and the inner optimizer over them.

        Args:
            groups: of the model's parameters; `lr` is read from them at each step.
            make_inner: makes the inner optimizer of the same groups with master weights.
            on_host: keep the master weights on the host; otherwise they exist during a step only.
            stochastic: round weights in bfloat16 stochastically; otherwise to nearest.
            seed: of the random numbers, with a weight's number and its steps.
            chunk_bytes: largest size of the weights that step together, in float32.
        """
        assert on_host or stochastic, "nothing to do for an optimizer over the weights themselves"
        self.on_host, self.stochastic, self.seed = on_host, stochastic, seed
        self.chunk_bytes = chunk_bytes
        self.masters: dict[nn.Parameter, nn.Parameter] = {}  # by the model's parameter
        inner_groups = []
        for group in groups:
            for p in group["params"]:
                self.masters[p] = self._make_master(p)
            inner_groups.append(group | {"params": [self.masters[p] for p in group["params"]]})
        self.inner = make_inner(inner_groups)
        for group, inner in zip(groups, self.inner.param_groups, strict=True):
            group["lr"] = inner["lr"]
            if any(self.masters[p].device != p.device for p in group["params"]):
                group["state_bytes"] = 0.0  # on the device of the weights
        super().__init__(groups, {})
        self.state = self.inner.state

    def _make_master(self, p: nn.Parameter) -> nn.Parameter:
        device = "cpu" if self.on_host else p.device
        # A DTensor stays one, with the same placement.
        master = nn.Parameter(p.detach().to(device, torch.float32, copy=True))
        if not self.on_host:
            own_part(master).untyped_storage().resize_(0)
        return master

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step of every weight that has a gradient."""
        assert closure is None, "gradients are computed before"
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = own["lr"]
        numbers = {p: i for i, p in enumerate(self.masters)}
        for chunk in self._chunks():
            self._load(chunk)
            self.inner.step()
            for p in chunk:
                self._write_back(p, numbers[p])

    def _chunks(self) -> Iterator[list[nn.Parameter]]:
        """Yields the parameters that have a gradient, a chunk at a time."""
        chunk: list[nn.Parameter] = []
        size = 0
        for p in (p for p in self.masters if p.grad is not None):
            needed = 4 * own_part(p).numel()
            if chunk and size + needed > self.chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(p)
            size += needed
        if chunk:
            yield chunk

    def _load(self, chunk: list[nn.Parameter]) -> None:
        """Gives the master weights of a chunk their gradients, and their values if they have none.

        Gradients are copied from a GPU to pinned memory, all of a chunk before one wait.
        """
        gradients: list[Tensor] = []
        for p in chunk:
            assert p.grad is not None
            gradients.append(p.grad.to(self.masters[p].device, non_blocking=True))
        if self.on_host and chunk[0].is_cuda:
            torch.cuda.current_stream(chunk[0].device).synchronize()
        for p, gradient in zip(chunk, gradients, strict=True):
            master = self.masters[p]
            if not self.on_host:
                own = own_part(master)
                own.untyped_storage().resize_(own.numel() * own.element_size())
                own.copy_(own_part(p))
            master.grad = gradient.to(torch.float32)

    def _write_back(self, p: nn.Parameter, number: int) -> None:
        """Rounds a master weight into the weight, and frees what only the step needs."""
        master, weight = self.masters[p], own_part(p)
        master.grad = None
        own = own_part(master)
        state = self.state[master]
        if self.stochastic and p.dtype == torch.bfloat16:
            state[UPDATES] = state.get(UPDATES, 0) + 1
            rank = p.device_mesh.get_rank() if isinstance(p, DTensor) else 0
            generator = torch.Generator(own.device)
            generator.manual_seed(derive_seed(self.seed, "rounding", number, state[UPDATES], rank))
            round_stochastically(own, weight, generator)
        else:
            rounded = own.to(weight.dtype)
            if weight.device != own.device and weight.is_cuda:
                rounded = rounded.pin_memory()  # its allocator keeps it until the copy has ended
            weight.copy_(rounded, non_blocking=True)
        if not self.on_host:
            own.untyped_storage().resize_(0)
        elif p.dtype != torch.float32:  # else the weight holds all of it
            state[MASTER] = master.detach()

    @torch.no_grad()
    def reload(self) -> None:
        """Copies to the host the weights that have no stored master weight.

        Called when a checkpoint was loaded.
        """
        for p, master in self.masters.items() if self.on_host else ():
            if MASTER not in self.state.get(master, {}):
                own_part(master).copy_(own_part(p))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer that keeps the state: the inner one of master weights, or itself."""
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def stepped_parameter(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> nn.Parameter:
    """Returns the parameter by which the state of a model's parameter is kept."""
    return optimizer.masters.get(p, p) if isinstance(optimizer, MasterWeights) else p
