"""Stores a checkpoint's tensors with torch.distributed.checkpoint, a part per process.

Names are "model.NAME", "reference.NAME" and "optimizer.NAME.KEY", with the names of parameters. A
tied weight is stored once. A replicated tensor is written by one process. Of a DTensor each process
writes its shard. Any number of processes can load both, with any sharding.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from grpo_cli.checkpoints.manifest import Entry, Hashing
from grpo_cli.checkpoints.paths import TRAINING
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.balance import split_balanced
from grpo_cli.errors import TrainingError
from grpo_cli.models import adapters

SHARDS = f"{TRAINING}/shards"
NUMBER = ":number"  # suffix of a tensor that is a plain number in the optimizer
OVERHEAD = 2048  # approximate bytes that torch.save adds per tensor

# A single process needs no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass
class Parts:
    """The objects that a run trains. Their tensors are DTensors, or equal on every process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    # None while it is the run's initial policy; for an adapter, the weights by name.
    reference: nn.Module | Mapping[str, Tensor] | None = None
    keeps_optimizer: bool = True  # whether the optimizer's state is saved

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor to save, by its name in a checkpoint."""
        tensors = {f"model.{name}": tensor for name, tensor in tensors_of(self.model).items()}
        for name, p in self.trained().items() if self.keeps_optimizer else ():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, (bool, int, float)):
                    kind = torch.float64 if isinstance(value, float) else None
                    key, value = key + NUMBER, torch.tensor(value, dtype=kind)
                if not isinstance(value, Tensor):
                    raise TrainingError(
                        f"optimizer: the state {key!r} of {name} is of type {type(value).__name__}"
                        "; a checkpoint keeps tensors and numbers."
                    )
                tensors[f"optimizer.{name}.{key}"] = value
        if self.reference is not None:
            reference = tensors_of(self.reference).items()
            tensors |= {f"reference.{name}": tensor for name, tensor in reference}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that the optimizer updates, by name in the model."""
        names = {id(tensor): name for name, tensor in tensors_of(self.model).items()}
        return {names[id(p)]: p for g in self.optimizer.param_groups for p in g["params"]}


def tensors_of(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name, tied ones only once.

    For a model with an adapter only the adapter's tensors, since the others never change.
    """
    if isinstance(model, Mapping):
        return dict(model)
    own = adapters.tensors_of(model)
    # state_dict makes FSDP2 reshard the layers that are still gathered.
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and (not own or name in own):
            names.setdefault(id(tensor), name)
    return {name: state[name] for name in names.values()}


@dataclass
class Piece:
    """The part of a tensor that one process writes."""

    tensor: Tensor
    offsets: torch.Size  # position in the full tensor
    size: torch.Size  # size of the full tensor


def pieces_of(tensors: Mapping[str, Tensor], rank: int, processes: int) -> dict[str, Piece]:
    """Selects process `rank`'s tensors to write: its shards, and a share of replicated tensors."""
    replicated = sorted(name for name, t in tensors.items() if not isinstance(t, DTensor))
    sizes = [tensors[name].nbytes + OVERHEAD for name in replicated]
    own = {replicated[i] for i in split_balanced(sizes, processes)[rank]}
    pieces = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            (chunk,) = cast(Any, tensor).__create_chunk_list__()
            pieces[name] = Piece(tensor.to_local(), chunk.offsets, tensor.size())
        elif name in own:
            pieces[name] = Piece(tensor, torch.Size([0] * tensor.dim()), tensor.size())
    return pieces


class Staging:
    """Host copies of tensors. Pinned memory is reused, which is faster than allocation."""

    def __init__(self) -> None:
        self.pinned: dict[str, Tensor] = {}

    def copy(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copies the pieces to the host, so that training can change the originals."""
        kept, self.pinned, copies = self.pinned, {}, {}
        for name, piece in pieces.items():
            copy, tensor = kept.get(name), piece.tensor
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name] = copy.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                self.pinned[name] = copy
        if self.pinned:
            torch.cuda.synchronize()
        return {n: Piece(copies[n], p.offsets, p.size) for n, p in pieces.items()}


class PieceSavePlanner(DefaultSavePlanner):
    """Plans a save in which each process writes its own pieces."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__()
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        """Returns this process's part of the plan."""
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
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Returns the tensor of a plan's item."""
        return self.pieces[write_item.index.fqn].tensor


class _Files(filesystem.FileSystem):
    """A file system that records the size and hash of each written file."""

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
    """Writes this process's pieces to a checkpoint. Collective over the group.

    Args:
        folder: the checkpoint's folder.
        pieces: the result of `pieces_of`.
        group: process group; None for a single process.

    Returns:
        The files that this process has written, by path in the checkpoint.
    """
    files = _Files()
    # Copying ahead would open a CUDA stream in this thread on the first GPU, not on its own.
    writer = FileSystemWriter(folder / SHARDS, per_thread_copy_ahead=0)
    writer.fs = files
    planner = PieceSavePlanner(pieces)
    save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    return files.written


class Shards(FileSystemReader):
    """Reads the tensors of a checkpoint, by name or into existing tensors."""

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
        """Reads the index without executing code from it."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            return cast(metadata.Metadata, _Unpickler(file).load())

    def names(self, part: str) -> list[str]:
        """Returns the tensor names of "model", "optimizer" or "reference"."""
        start = f"{part}."
        return [name.removeprefix(start) for name in self.tensors if name.startswith(start)]

    def read(self, name: str) -> Tensor:
        """Reads a full tensor on the CPU."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.read_into({name: tensor})
        return tensor

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills tensors, or this process's shards of DTensors, by name."""
        planner = _Loading()
        planner.set_up_planner(dict(tensors), self.metadata, True)
        self.read_data(planner.create_local_plan(), planner).wait()


class _Loading(DefaultLoadPlanner):
    """Loads only tensors, since other items would be unpickled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        heartbeat.touch()  # reading a large checkpoint takes long

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


class _Unpickler(pickle.Unpickler):
    """Unpickles a checkpoint's index without executing code, since the file may be untrusted."""

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name) if module in _MODULES else None
        if isinstance(value, torch.dtype) or (module, name) in _KNOWN:
            return value
        raise pickle.UnpicklingError(f"holds {module}.{name}, which is none of an index's")


_KNOWN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    *((metadata.__name__, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
    (filesystem.__name__, "_StorageInfo"),
}
_MODULES = {module for module, _ in _KNOWN}
