"""The run's processes and devices: rank, sums and gathers over processes. Wraps accelerate.

Gloo groups get one thread each: with two, PyTorch corrupts their memory. Each thread writes the
name of its last collective into the group's string without a lock (`ProcessGroupGloo::runLoop`,
lastCompletedWorkName; seen in torch 2.13). Names of more than 15 letters, such as
ALLGATHER_COALESCED of a DTensor, are on the heap and can be freed twice. This causes "malloc():
unaligned tcache chunk detected", a segmentation fault or a hang, once in some hundred runs, or
within seconds with many concurrent collectives. A second thread has no other use.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from grpo_cli.distributed import fsdp, heartbeat
from grpo_cli.distributed.heartbeat import WorkInterrupted, waiting
from grpo_cli.distributed.process_log import flush_output
from grpo_cli.distributed.settings import HALF_TYPES, Distributed
from grpo_cli.errors import TrainingError, UserError

CHUNK = 2**24  # elements whose gradients are summed in one call

T = TypeVar("T")

# Kept until the process ends. Freeing the last reference to a group joins gloo's threads with the
# GIL held. If one of them waits for the GIL, the exit hangs (seen with DDP's reducer).
_groups: list[Any] = []


class Workers:
    """The processes of this run. With one process every method is a local operation."""

    def __init__(
        self, device: str = "auto", mixed_precision: str = "no", config: Distributed | None = None
    ) -> None:
        """Joins the processes that torchrun started, if any.

        Args:
            device: auto, cpu, cuda or mps.
            mixed_precision: no, bf16 or fp16.
            config: division of the work; None: every process holds the complete model.

        Raises:
            UserError: this machine lacks the device, or distributed=single has several processes.
        """
        self.config = config or Distributed()
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        if (device == "cuda" and not cuda) or (device == "mps" and not mps):
            raise UserError(f"device = {device}: this machine has none; use device=auto.")
        # On a machine without GPU, accelerate ignores torchrun's processes unless `cpu` is passed.
        cpu = device == "cpu" or (device == "auto" and not cuda and not mps)
        # Above the stall limit, so that the supervisor ends a stalled run and names the process.
        stall = heartbeat.START_TIMES * self.config.stall_minutes
        minutes = stall + 5 if stall else 7 * 24 * 60
        timeout = timedelta(minutes=minutes)
        use_single_threaded_gloo()
        # With offloading, gradient norms and sums are reduced on the host.
        backend = "nccl" if self.config.offload != "all" or cpu else "cuda:nccl,cpu:gloo"
        rejoin_after_restart("gloo" if cpu else backend, timeout)
        self.accelerator = Accelerator(
            cpu=cpu,
            mixed_precision="no",  # see `autocast`: accelerate's is fixed by a process's first run
            kwargs_handlers=[InitProcessGroupKwargs(backend, timeout=timeout)],
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
        if self.config.offload == "all" and self.size == 1:
            raise UserError(
                "distributed.offload = all: nothing is sharded in one process, so that FSDP2 "
                "offloads nothing; start several with torchrun, or use distributed.offload=none."
            )
        # Whether forward and backward passes are collective, with equal counts on every process.
        self.runs_in_lockstep = self.size > 1 and self.config.strategy == "fsdp2"
        half = HALF_TYPES.get(mixed_precision)
        self.half_type: torch.dtype | None = None if half is None else getattr(torch, half)
        self.control: Any = None  # process group for values in host memory
        if dist.is_initialized():
            _groups.append(dist.group.WORLD)
            if self.device.type == "cuda":
                self.control = dist.new_group(backend="gloo", timeout=timeout)
                _groups.append(self.control)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return bool(self.rank == 0)

    def place(self, model: PreTrainedModel) -> PreTrainedModel:
        """Moves the model, or its local shard, to the device with the main process's weights.

        Collective.
        """
        if self.runs_in_lockstep:
            return fsdp.shard(
                model,
                self.device,
                half_type=self.half_type,
                reshard_after_forward=self.config.reshard_after_forward,
                on_host=self.config.offload == "all",
            )
        model.to(self.device)
        if self.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, 0)
        return model

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the autocast context of the run's mixed precision."""
        if self.half_type is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.half_type)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Returns the loss scaler, which is disabled unless the computation is in float16."""
        is_needed = self.half_type == torch.float16
        scaler = torch.amp.GradScaler(self.device.type, enabled=is_needed)
        # Creates its tensors, since a process may step before it has scaled a loss.
        scaler.scale(torch.zeros((), device=self.device))
        return scaler

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates a loss's gradient in this process's gradients."""
        self.accelerator.backward(loss)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients over processes, after each process's last micro-batch.

        DistributedDataParallel does this during the last backward. A process could then not repeat
        a micro-batch, and a process without one would have to compute a dummy.
        """
        if self.size == 1 or self.runs_in_lockstep:  # in lockstep the backward passes sum gradients
            return
        weights = [p for p in parameters if p.requires_grad]
        has_gradient = torch.tensor([float(p.grad is not None) for p in weights])
        used = self._reduce(has_gradient, dist.ReduceOp.MAX).bool().tolist()
        chunk: list[nn.Parameter] = []
        for p in (p for p, is_used in zip(weights, used, strict=True) if is_used):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.numel() > CHUNK and p.grad.dtype == torch.float32 and p.grad.is_contiguous():
                dist.all_reduce(p.grad)  # in place, without a copy of an embedding at peak memory
                continue
            if chunk and sum(q.numel() for q in chunk) + p.numel() > CHUNK:
                _sum_together(chunk)
                chunk = []
            chunk.append(p)
        if chunk:
            _sum_together(chunk)

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sums values by key over processes; every process must pass the same keys."""
        return self._reduce_values(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """Returns the maximum of a value over processes."""
        return self.maxima({"value": value})["value"]

    def maxima(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the maximum of each key over processes; every process must pass the same keys."""
        return self._reduce_values(values, dist.ReduceOp.MAX)

    def _reduce_values(self, values: dict[str, float], op: Any) -> dict[str, float]:
        if self.size == 1 or not values:
            return dict(values)
        tensor = torch.tensor(list(values.values()), dtype=torch.float64)
        return dict(zip(values, self._reduce(tensor, op).tolist(), strict=True))

    def concatenate(self, local: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Concatenates the processes' one-dimensional CPU tensors, which may differ in length.

        Returns:
            (the concatenation [N] on the CPU, the slice of this process's tensor).
        """
        if self.size == 1:
            return local, slice(0, len(local))
        parts = self.gather(local)
        start = sum(len(part) for part in parts[: self.rank])
        return torch.cat(parts), slice(start, start + len(local))

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        with waiting():
            dist.all_reduce(tensor, op, group=self.control)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Returns the picklable values of all processes in rank order, on every process."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with waiting():
            dist.all_gather_object(out, value, group=self.control)
        return out

    def gather_on_main(self, value: T) -> list[T]:
        """Returns the values of all processes on the main process, and [] on the others."""
        if self.size == 1:
            return [value]
        out: list[Any] | None = [None] * self.size if self.is_main else None
        with waiting():
            dist.gather_object(value, out, dst=0, group=self.control)
        return out or []

    def first(self, value: T | None) -> T | None:
        """Returns the first value that is not None in rank order, or None; collective."""
        return next((v for v in self.gather(value) if v is not None), None)

    def can_continue(self, strategy: str) -> bool:
        """Returns whether checks and micro-batches of a run with this strategy hold in this one.

        In lockstep they are the same on all processes; under ddp each process has its own.
        """
        return strategy == "fsdp2" or not self.runs_in_lockstep

    def lockstep_max(self, value: float) -> float:
        """Returns the maximum over processes in lockstep; without lockstep, the own value."""
        return self.max(value) if self.runs_in_lockstep else value

    def agree(self, reason: str | None) -> str | None:
        """Returns the first reason of any process in lockstep; without lockstep, the own one."""
        return self.first(reason) if self.runs_in_lockstep else reason

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raises on all processes if the block fails on one, so that none waits for it."""
        error: Exception | None = None
        interrupt: WorkInterrupted | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        except WorkInterrupted as caught:
            interrupt = caught
        if self.size == 1:
            if error is not None or interrupt is not None:
                raise error or interrupt  # type: ignore[misc]
            return
        kind = UserError if isinstance(error, UserError) else TrainingError
        local = None if error is None else (kind, str(error), heartbeat.where())
        first = self.first(local)
        if first is not None:
            kind, message, where = first
            raised = kind(message)
            raised.where = where
            raise raised from error
        if interrupt is not None:
            raise interrupt

    def barrier(self) -> None:
        """Waits for all processes."""
        if self.size > 1:
            with waiting():
                dist.barrier(group=self.control)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the block on the main process before the others, which continue if it fails."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def close(self) -> None:
        """Ends the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def exit_process(code: int) -> NoReturn:
    """Exits; a process that has joined a group skips the interpreter's finalization.

    A gloo thread may hold tensors of the last collectives slightly longer than the main thread. If
    it releases them during finalization, C++ aborts the process with SIGABRT, and a complete run
    appears to have failed (pytorch issue 38228, PR 179291).
    """
    if not _groups:
        sys.exit(code)
    atexit._run_exitfuncs()
    flush_output()
    os._exit(code)


class _GlooType(type):
    """Makes isinstance(group, _SingleThreadedGloo) true for every gloo group."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)


class _SingleThreadedGloo(metaclass=_GlooType):
    """Constructs a `ProcessGroupGloo` with one thread; torch.distributed passes no options."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # its stub lacks the options
        options = gloo._Options()
        options._threads = 1
        options._timeout = timeout
        # PyTorch's own choice of devices, which it makes only if no options are passed.
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        if names:
            options._devices = [gloo.create_device(interface=name) for name in names.split(",")]
        else:
            options._devices = [gloo.create_default_device()]
        return gloo(store, rank, size, options)


def use_single_threaded_gloo() -> None:
    """Restricts every gloo group that this process creates from now on to a single thread."""
    if dist.is_available() and dist.is_gloo_available():
        distributed_c10d.ProcessGroupGloo = _SingleThreadedGloo  # type: ignore[assignment,misc]


def rejoin_after_restart(backend: str, timeout: timedelta) -> None:
    """Joins the other processes if torchrun has restarted them after a failure.

    torchrun's store still holds the addresses of the previous processes. A process that reads one
    of these waits forever (pytorch issues 135712, 167288).
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(address, port, size, False, timeout)  # type: ignore[attr-defined]
    fresh = dist.PrefixStore(f"restart-{restarts}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=timeout)


def _sum_together(weights: Sequence[nn.Parameter]) -> None:
    """Sums gradients over processes in one call, in float32 or better."""
    grads = [p.grad for p in weights if p.grad is not None]
    wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    flat = torch.cat([g.flatten().to(wide) for g in grads])
    dist.all_reduce(flat)
    parts = torch.split(flat, [g.numel() for g in grads])
    for grad, total in zip(grads, parts, strict=True):
        grad.copy_(total.view_as(grad))
