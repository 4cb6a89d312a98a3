"""Processes and devices: start and stop, rank, sums and gathers over ranks. Wraps accelerate."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from transformers import PreTrainedModel

from grpo_cli import gloo, heartbeat, sharding
from grpo_cli.config import Distributed
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.heartbeat import Leave, waiting

CHUNK = 2**24  # weights whose gradients are summed in one call

T = TypeVar("T")

# Kept to the end of the process. Freeing the last hold on a group joins gloo's threads with the GIL
# held, and now and then one of them waits for the GIL: a hang at exit, seen with DDP's reducer.
_groups: list[Any] = []


class Workers:
    """The processes of this run. With one process every method is a plain local operation."""

    def __init__(
        self,
        device: str = "auto",
        mixed_precision: str = "no",
        config: Distributed | None = None,
    ) -> None:
        """Joins the processes that torchrun started, if it did.

        Args:
            device: auto, cpu, cuda or mps. mixed_precision: no or bf16.
            config: how the work is divided; None: every process has the whole model.

        Raises:
            UserError: the device is not there, or there are more processes than there may be.
        """
        self.config = config or Distributed()
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        if (device == "cuda" and not cuda) or (device == "mps" and not mps):
            raise UserError(f"device = {device}: this machine has none; use device=auto.")
        # accelerate ignores torchrun's processes on a machine without GPU unless it is told `cpu`.
        cpu = device == "cpu" or (device == "auto" and not cuda and not mps)
        # The watch ends a run that stands still, and names who is to blame; this is behind it.
        stall = heartbeat.START_TIMES * self.config.stall_minutes
        minutes = stall + 5 if stall else 7 * 24 * 60
        patience = InitProcessGroupKwargs(timeout=timedelta(minutes=minutes))
        gloo.use_one_thread()
        meet_anew("gloo" if cpu else "nccl", timedelta(minutes=minutes))
        self.accelerator = Accelerator(
            cpu=cpu, mixed_precision=mixed_precision, kwargs_handlers=[patience]
        )
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self.device = self.accelerator.device
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        assert self.size == launched, f"{launched} processes launched, {self.size} joined"
        if self.config.strategy == "single" and self.size > 1:
            raise UserError(
                f"distributed = single: torchrun has started {self.size} processes; use "
                "distributed=ddp or distributed=fsdp2."
            )
        # Whether forward and backward passes are collective: as many of them on every process.
        self.in_step = self.size > 1 and self.config.strategy in ("fsdp2", "zero3")
        self.half = mixed_precision == "bf16"
        self.control: Any = None  # the group for what lies on the host
        if dist.is_initialized():
            _groups.append(dist.group.WORLD)
            if dist.get_backend() == "nccl":
                self.control = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
                _groups.append(self.control)

    @property
    def is_main(self) -> bool:
        return bool(self.rank == 0)

    def place(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model on this process's device, or its share, with the main process's weights."""
        if self.in_step:
            again = self.config.strategy == "zero3" or self.config.reshard_after_forward
            return sharding.shard(model, self.device, half=self.half, reshard_after_forward=again)
        model.to(self.device)
        if self.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, 0)
        return model

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The run's arithmetic inside."""
        context: contextlib.AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Adds a loss's gradient to this process's own."""
        self.accelerator.backward(loss)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums every process's gradients, once all their micro-batches are done.

        Not during the last backward, as DistributedDataParallel does it: then a process could not
        do a micro-batch again, and one without any would have to make one up.
        """
        if self.size == 1 or self.in_step:  # the latter's backward passes have summed them
            return
        weights = [p for p in parameters if p.requires_grad]
        there = torch.tensor([float(p.grad is not None) for p in weights])
        used = self._reduce(there, dist.ReduceOp.MAX).bool().tolist()
        chunk: list[nn.Parameter] = []
        for p in (p for p, is_used in zip(weights, used, strict=True) if is_used):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.numel() > CHUNK and p.grad.dtype == torch.float32 and p.grad.is_contiguous():
                dist.all_reduce(p.grad)  # no copy of an embedding at the peak of memory
                continue
            if chunk and sum(q.numel() for q in chunk) + p.numel() > CHUNK:
                _sum_together(chunk)
                chunk = []
            chunk.append(p)
        if chunk:
            _sum_together(chunk)

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sums by key over processes; every process passes the same keys."""
        if self.size == 1:
            return dict(values)
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        return dict(zip(values, self._reduce(total, dist.ReduceOp.SUM).tolist(), strict=True))

    def max(self, value: float) -> float:
        """The largest of the processes' values."""
        return self.maxima({"value": value})["value"]

    def maxima(self, values: dict[str, float]) -> dict[str, float]:
        """The largest by key over processes; every process passes the same keys."""
        if self.size == 1 or not values:
            return dict(values)
        largest = torch.tensor(list(values.values()), dtype=torch.float64)
        return dict(zip(values, self._reduce(largest, dist.ReduceOp.MAX).tolist(), strict=True))

    def concatenate(self, own: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """The processes' one-dimensional CPU tensors, of any lengths, one after another.

        Returns:
            (all of them [N] on the CPU, where this process's own lies in it).
        """
        if self.size == 1:
            return own, slice(0, len(own))
        parts = self.gather(own)
        start = sum(len(part) for part in parts[: self.rank])
        return torch.cat(parts), slice(start, start + len(own))

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        with waiting():
            dist.all_reduce(tensor, op, group=self.control)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Each process's picklable value, in the order of ranks, on every process."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with waiting():
            dist.all_gather_object(out, value, group=self.control)
        return out

    def gather_on_main(self, value: T) -> list[T]:
        """The same on the main process; nothing on the others."""
        if self.size == 1:
            return [value]
        out: list[Any] | None = [None] * self.size if self.is_main else None
        with waiting():
            dist.gather_object(value, out, dst=0, group=self.control)
        return out or []

    def first(self, value: T | None) -> T | None:
        """The value of the first process that has one."""
        return next((v for v in self.gather(value) if v is not None), None)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Host-side work that may fail on one process alone: then all raise, and none waits."""
        error: Exception | None = None
        leaving: Leave | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        except Leave as caught:
            leaving = caught
        if self.size == 1:
            if error is not None or leaving is not None:
                raise error or leaving  # type: ignore[misc]
            return
        kind = UserError if isinstance(error, UserError) else TrainingError
        mine = None if error is None else (kind, str(error), heartbeat.where())
        theirs = self.first(mine)
        if theirs is not None:
            kind, message, where = theirs
            told = kind(message)
            told.where = where
            raise told from error
        if leaving is not None:
            raise leaving

    def barrier(self) -> None:
        if self.size > 1:
            with waiting():
                dist.barrier(group=self.control)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process runs the block before the others do, and lets them go if it fails."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def meet_anew(backend: str, patience: timedelta) -> None:
    """Joins the other processes where torchrun has started them again after a failure.

    Its store still holds the addresses of those before, and whoever reads one of these waits for
    them for ever (pytorch issues 135712, 167288).
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(address, port, size, False, patience)  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"restart-{restarts}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=patience)


def _sum_together(weights: Sequence[nn.Parameter]) -> None:
    """Sums gradients over processes in float32 or better, in one call."""
    grads = [p.grad for p in weights if p.grad is not None]
    wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    flat = torch.cat([g.flatten().to(wide) for g in grads])
    dist.all_reduce(flat)
    parts = torch.split(flat, [g.numel() for g in grads])
    for grad, total in zip(grads, parts, strict=True):
        grad.copy_(total.view_as(grad))
