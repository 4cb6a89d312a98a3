"""Processes and devices: start and stop, rank, sums and gathers over ranks. Wraps accelerate."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn

from grpo_cli.errors import TrainingError, UserError

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

# Kept to the end of the process. Were DDP's reducer the last to hold a group, freeing it would join
# gloo's threads with the GIL held, and now and then one of them waits for the GIL: a hang at exit.
_groups: list[Any] = []


class Workers:
    """The processes of this run. With one process every method is a plain local operation."""

    def __init__(self, device: str = "auto", mixed_precision: str = "no") -> None:
        """Joins the processes that torchrun started, if it did.

        Args:
            device: auto, cpu, cuda or mps. mixed_precision: no or bf16.

        Raises:
            UserError: the device is not there.
        """
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        if (device == "cuda" and not cuda) or (device == "mps" and not mps):
            raise UserError(f"device = {device}: this machine has none; use device=auto.")
        # accelerate ignores torchrun's processes on a machine without GPU unless it is told `cpu`.
        cpu = device == "cpu" or (device == "auto" and not cuda and not mps)
        # NCCL's own 10 minutes are too short for others to wait while one writes a checkpoint.
        patience = InitProcessGroupKwargs(timeout=timedelta(hours=1))
        self.accelerator = Accelerator(
            cpu=cpu, mixed_precision=mixed_precision, kwargs_handlers=[patience]
        )
        self.rank = self.accelerator.process_index
        self.size = self.accelerator.num_processes
        self.device = self.accelerator.device
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        assert self.size == launched, f"{launched} processes launched, {self.size} joined"
        if dist.is_initialized():
            _groups.append(dist.group.WORLD)

    @property
    def is_main(self) -> bool:
        return bool(self.rank == 0)

    def place(self, model: M) -> M:
        """The model on this process's device, in the run's precision, for forward passes alone."""
        placed: M = self.accelerator.prepare_model(model, evaluation_mode=True)
        return placed

    def wrap(self, model: nn.Module) -> nn.Module:
        """The same for training: backward averages the gradients over processes."""
        wrapped: nn.Module = self.accelerator.prepare_model(model)
        return wrapped

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of this process's share of a sum over all processes.

        Gradients are averaged over processes by the wrapper, so the share is scaled up first.
        """
        self.accelerator.backward(loss * self.size)

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Gradients stay local inside, until the backward of the `last` micro-batch."""
        with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
            yield

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
        # MPS has no float64, NCCL no CPU tensors: reduce where the backend can, read on the CPU.
        if dist.get_backend() == "nccl":
            tensor = tensor.to(self.device)
        dist.all_reduce(tensor, op)
        return tensor.cpu()

    def gather(self, value: T) -> list[T]:
        """Each process's picklable value, in the order of ranks, on every process."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Host-side work that may fail on one process alone: then all raise, and none waits."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.size == 1:
            if error is not None:
                raise error
            return
        kind = UserError if isinstance(error, UserError) else TrainingError
        told = self.gather(None if error is None else (kind, f"process {self.rank}: {error}"))
        for kind_and_message in told:
            if kind_and_message is not None:
                kind, message = kind_and_message
                raise kind(message) from error

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

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
