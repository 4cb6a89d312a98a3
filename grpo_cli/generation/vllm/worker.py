"""Runs inside vLLM's workers: weight transfers, and the methods that a trainer may call.

`grpo serve` passes `WorkerExtension` to vLLM, which imports this file in every worker and adds the
class's methods to the worker. The import registers the transfer `gloo` with vLLM's factory, and
replaces vLLM's transfer `ipc` by one without pickles. Both vLLM engines load weights with its
layerwise reload; only this file depends on that.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer import factory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest

from grpo_cli.generation.vllm import gloo_wire, ipc_wire
from grpo_cli.generation.vllm.weights import WeightInfo, buckets, unflattened

WORKER_ID = uuid.uuid4().hex  # changes with a restart


def refresh_packed_heads(model: nn.Module) -> None:
    """Repacks a tied output head from its embedding; called after every load of weights.

    On the CPU vLLM packs each linear weight for oneDNN. A reload repacks only the weights that it
    gets. A tied head is never sent, so its logits would remain those of the old weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def own_shared_memory(name: str) -> Iterator[None]:
    """Gives the shared memory of a CPU tensor-parallel group a name that is unique to this run.

    vLLM derives the name from the address of the group, which is the same for all engines that
    torchrun has started. It removes the name in a destructor, which does not run in a killed
    process: a later run on the node would not start. At the end of the block all processes have
    mapped the memory, and the name is removed.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    of_vllm = _CPUSHMDistributed.make_group_name

    def own(communicator: Any) -> str:
        return f"{name}-{of_vllm(communicator).lstrip('/')}"

    _CPUSHMDistributed.make_group_name = staticmethod(own)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(of_vllm)
        for left in Path("/dev/shm").glob(f"{name}-*"):
            left.unlink(missing_ok=True)


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The rendezvous settings of the group; the trainer is rank 0."""

    address: str
    port: int
    size: int
    timeout: float
    bucket_bytes: int


class GlooEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receives weights from a gloo group, a bucket at a time; otherwise as vLLM's nccl transfer."""

    init_info_cls = GlooInit
    group: Any = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = gloo_wire.join(
            init_info.address, init_info.port, rank, init_info.size, init_info.timeout
        )
        self.bucket_bytes, self.timeout = init_info.bucket_bytes, init_info.timeout

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        u = update_info
        infos = [
            WeightInfo(name, tuple(shape), getattr(torch, dtype))
            for name, dtype, shape in zip(u.names, u.dtype_names, u.shapes, strict=True)
        ]
        for bucket in buckets(infos, self.bucket_bytes):
            size = sum(torch.Size(info.shape).numel() for info in bucket)
            flat = torch.empty(size, dtype=bucket[0].dtype)
            gloo_wire.broadcast(self.group, flat, self.timeout).wait()
            self.model.load_weights(unflattened(flat, bucket))

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        refresh_packed_heads(self.model)

    def shutdown(self) -> None:
        self.group = None


@dataclass
class IpcUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Describes weights and their IPC handles, by the uuid of the GPU."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    handles: list[dict[str, dict[str, Any]]]

    def __post_init__(self) -> None:
        self.ipc_handles = [
            {uuid: ipc_wire.from_json(h, getattr(torch, dtype)) for uuid, h in by_gpu.items()}
            for by_gpu, dtype in zip(self.handles, self.dtype_names, strict=True)
        ]


class IpcEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """Receives weights as vLLM's ipc transfer does, but without unpickling the handles."""

    update_info_cls = IpcUpdate


class WorkerExtension:
    """Adds the methods that a trainer calls on each worker of a server, by `/collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    updating = False
    has_own_weights = True  # False once a trainer has sent all weights

    def grpo_state(self) -> dict[str, Any]:
        """Returns the worker's id, its model and settings, and whether an update is unfinished."""
        model = self.vllm_config.model_config
        config = model.hf_text_config.to_dict()
        return {
            "worker_id": WORKER_ID,
            "updating": self.updating,
            "model": model.model,
            "config": json.loads(json.dumps(config, default=str)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "quantization": model.quantization,
            "transfer": self.vllm_config.weight_transfer_config.backend,
            "has_own_weights": self.has_own_weights,
            "max_lora_rank": getattr(self.vllm_config.lora_config, "max_lora_rank", None),
        }

    def grpo_begin_update(self, what: str) -> None:
        """Marks the weights as partly updated.

        Args:
            what: "weights": all are replaced; "adapter": the model's own weights are kept.
        """
        self.updating = True
        self.has_own_weights = self.has_own_weights and what == "adapter"

    def grpo_end_update(self) -> None:
        self.updating = False

    def grpo_load(self, folder: str) -> None:
        """Loads weights from a folder that the trainer has written (transfer=disk)."""
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]
        refresh_packed_heads(self.model_runner.get_model())

    def grpo_can_read(self, folder: str) -> bool:
        """Returns whether this machine can read a folder of the trainer."""
        return os.access(folder, os.R_OK)

    def grpo_load_adapter(self, folder: str) -> None:
        """Replaces the adapter's weights by those in a folder (adapter.sync=adapter).

        Not by vLLM's route with load_inplace: each request would read the file at every token.
        """
        manager = self.model_runner.lora_manager
        (number,) = manager.list_adapters()
        manager.add_adapter(LoRARequest("policy", number, folder, load_inplace=True))


for name, engine in {"gloo": GlooEngine, "ipc": IpcEngine}.items():
    factory.WeightTransferEngineFactory._registry.pop(name, None)
    factory.WeightTransferEngineFactory.register_engine(name, engine)
