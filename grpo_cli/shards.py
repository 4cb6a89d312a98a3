"""A checkpoint's tensors as torch.distributed.checkpoint keeps them: each process writes its own.

Names are "model.NAME", "reference.NAME" and "optimizer.NAME.KEY", with the names of parameters. A
tied weight is there once. What several processes hold alike is written by one of them, and what is
divided (a DTensor) by each its part, so that any number of processes can load it, however divided.
"""

from __future__ import annotations

import heapq
import io
import os
import pickle
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from grpo_cli import heartbeat
from grpo_cli.folders import TRAINING
from grpo_cli.manifest import Entry, Hashing

SHARDS = f"{TRAINING}/shards"
OVERHEAD = 2048  # bytes that torch.save puts around a tensor, about

# One process needs no process group, which is no surprise here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass
class Parts:
    """What is trained. Modules and state are the same on every process, or DTensors."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None = None  # where it is no longer the model that the run began with

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor to be saved, by its name in a checkpoint."""
        found = {f"model.{name}": tensor for name, tensor in tensors_of(self.model).items()}
        for name, state in self.optimizer_state().items():
            for key, value in state.items():
                assert isinstance(value, Tensor), f"optimizer: {key} of {name} is no tensor"
                found[f"optimizer.{name}.{key}"] = value
        if self.reference is not None:
            of = tensors_of(self.reference).items()
            found |= {f"reference.{name}": tensor for name, tensor in of}
        return {name: tensor.detach() for name, tensor in found.items()}

    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves, by the names of the model."""
        names = {id(tensor): name for name, tensor in tensors_of(self.model).items()}
        return {names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of those parameters that have one."""
        of = self.optimizer.state
        return {name: of[p] for name, p in self.trained().items() if p in of}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each once."""
    # state_dict, for it makes FSDP2 put back the shards of what it still holds gathered.
    found: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), name)
    return {name: state[name] for name in found.values()}


@dataclass
class Piece:
    """What a process writes of one tensor."""

    tensor: Tensor
    offsets: torch.Size  # where it lies in the whole tensor
    size: torch.Size  # of the whole tensor


def own_pieces(tensors: Mapping[str, Tensor], rank: int, processes: int) -> dict[str, Piece]:
    """What the process `rank` writes: its shards, and its share of what all hold alike."""
    alike = {name: t for name, t in tensors.items() if not isinstance(t, DTensor)}
    # The largest first, each to the process that has least to write: the same answer everywhere.
    loads = [(0, process) for process in range(processes)]
    writers: dict[str, int] = {}
    for name in sorted(alike, key=lambda name: (-alike[name].nbytes, name)):
        load, process = heapq.heappop(loads)
        writers[name] = process
        heapq.heappush(loads, (load + alike[name].nbytes + OVERHEAD, process))
    pieces = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            (chunk,) = cast(Any, tensor).__create_chunk_list__()
            pieces[name] = Piece(tensor.to_local(), chunk.offsets, tensor.size())
        elif writers[name] == rank:
            pieces[name] = Piece(tensor, torch.Size([0] * tensor.dim()), tensor.size())
    return pieces


class Staging:
    """Copies of tensors on the host. Their memory is used again: making it anew takes longer."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}

    def copied(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The same pieces, no longer those that training goes on with."""
        kept, self.copies = self.copies, {}
        for name, piece in pieces.items():
            copy, tensor = kept.get(name), piece.tensor
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                pinned = tensor.is_cuda
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self.copies[name] = copy.copy_(tensor, non_blocking=True)
        if any(piece.tensor.is_cuda for piece in pieces.values()):
            torch.cuda.synchronize()
        return {n: Piece(self.copies[n], p.offsets, p.size) for n, p in pieces.items()}


class Plan(SavePlanner):
    """Has each process write its pieces.

    With 1,024 processes the main one goes through millions of them, so it does that once. torch's
    own planner takes some 50 µs for each.
    """

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        self.pieces = pieces

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing is to be set up: `pieces` is all there is."""

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(piece.offsets, piece.tensor.size()),
                    properties=metadata.TensorProperties(dtype=piece.tensor.dtype),
                    size=piece.size,
                ),
            )
            for name, piece in self.pieces.items()
        ]
        paths = {name: tuple(name.split(".", 1)) for name in self.pieces}
        return SavePlan(items, planner_data=paths)

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], metadata.Metadata]:
        stored: dict[str, metadata.TensorStorageMetadata] = {}
        paths: dict[str, tuple[str, ...]] = {}
        written: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = []
            for item in plan.items:
                if item.index in written:  # of a mesh that also holds copies
                    continue
                written.add(item.index)
                items.append(item)
                data, name = item.tensor_data, item.index.fqn
                assert data is not None
                if name not in stored:
                    stored[name] = metadata.TensorStorageMetadata(data.properties, data.size, [])
                stored[name].chunks.append(data.chunk)
            plans.append(SavePlan(items))
            paths |= plan.planner_data
        for name, tensor in stored.items():
            there = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            assert there == tensor.size.numel(), f"{name} is not whole: {there} of its numbers"
        return plans, metadata.Metadata(cast(Any, stored), planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.pieces[write_item.index.fqn].tensor


class _Files(filesystem.FileSystem):
    """Files of which is known what was written to them."""

    def __init__(self) -> None:
        self.written: dict[str, Entry] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as file:
            stream = Hashing(cast(Any, file))
            try:
                yield stream
            except BaseException:
                if stream.error is not None:
                    raise stream.error from None
                raise
        self.written[f"{SHARDS}/{Path(path).name}"] = stream.entry

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        entry = self.written.pop(f"{SHARDS}/{Path(path).name}")
        self.written[f"{SHARDS}/{Path(new_path).name}"] = entry


def write(folder: Path, pieces: Mapping[str, Piece], group: Any) -> dict[str, Entry]:
    """Writes this process's pieces to a checkpoint. Every process of the group calls it.

    Args:
        group: of the processes; None for one alone.

    Returns:
        The files that this process has written, by their paths in the checkpoint.
    """
    files = _Files()
    # Copying ahead would open a CUDA stream in this thread, whose GPU is the first and not its own.
    writer = FileSystemWriter(folder / SHARDS, per_thread_copy_ahead=0)
    writer.fs = files
    save(
        {}, storage_writer=writer, planner=Plan(pieces), process_group=group, no_dist=group is None
    )
    return files.written


class Shards(FileSystemReader):
    """The tensors of a checkpoint, to be read by name or into what is there."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint / SHARDS)
        self.metadata = self.read_metadata()
        self.set_up_storage_reader(self.metadata, True)
        self.tensors = {
            name: stored
            for name, stored in self.metadata.state_dict_metadata.items()
            if isinstance(stored, metadata.TensorStorageMetadata)
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return cast(metadata.Metadata, _Unpickler(file).load())

    def names(self, part: str) -> list[str]:
        """The names in "model", "optimizer" or "reference"."""
        start = f"{part}."
        return [name.removeprefix(start) for name in self.tensors if name.startswith(start)]

    def read(self, name: str) -> Tensor:
        """One whole tensor, on the CPU."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.read_into({name: tensor})
        return tensor

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills tensors, or of DTensors this process's shards, by name. Reads what it needs."""
        planner = _Loading()
        planner.set_up_planner(dict(tensors), self.metadata, True)
        self.read_data(planner.create_local_plan(), planner).wait()


class _Loading(DefaultLoadPlanner):
    """Reads tensors and nothing else: what is no tensor would be unpickled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        heartbeat.touch()  # a large checkpoint takes long to read

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


class _Unpickler(pickle.Unpickler):
    """Of a checkpoint's index, which is a pickle: a file from elsewhere must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in _MODULES else None
        if isinstance(found, torch.dtype) or (module, name) in _KNOWN:
            return found
        raise pickle.UnpicklingError(f"holds {module}.{name}, which is none of an index's")


_KNOWN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    *((metadata.__name__, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
    (filesystem.__name__, "_StorageInfo"),
}
_MODULES = {module for module, _ in _KNOWN}


def size_on_disk(tensors: Iterable[Tensor]) -> int:
    """Bytes that some tensors take in a checkpoint, about."""
    return sum(tensor.nbytes + OVERHEAD for tensor in tensors)
