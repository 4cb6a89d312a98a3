"""Writes and loads checkpoints: every process writes its shards while training continues.

    checkpoints/step-200/config.json, model.safetensors, ...   a model folder (checkpoint.model)
    checkpoints/step-200/README.md                             its model card
    checkpoints/step-200/training/shards/                      model, optimizer, moved reference
    checkpoints/step-200/training/state.pt, recipe.yaml        the state of the run
    checkpoints/step-200/training/contents.json                hashes of the data, tokenizer, ...
    checkpoints/step-200/training/model/                       config and tokenizer, if not above
    checkpoints/step-200/training/manifest.json                sizes and sha256 of all these, except
                                                               the card, which may be edited

A checkpoint is written as step-200.tmp, the manifest last, and then renamed. A folder called step-N
was therefore complete when it was renamed; `choose` checks whether it still is.
"""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_cli.checkpoints import manifest, model_folder, provenance, shards
from grpo_cli.checkpoints.manifest import Entry
from grpo_cli.checkpoints.paths import KEPT, PARTIAL, REPLACED, STATE, TRAINING, remove
from grpo_cli.checkpoints.retention import being_written, keep_model_only, make_room, remove_torn
from grpo_cli.checkpoints.shards import Parts, Piece, Shards
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.workers import Workers
from grpo_cli.models import adapters

MODEL = f"{TRAINING}/model"
CONTENTS = f"{TRAINING}/contents.json"
WRITE_TIMEOUT = timedelta(minutes=30)  # for the slowest process while a checkpoint is written

T = TypeVar("T")

_groups: list[Any] = []  # kept until the process ends, like `workers._groups`


def is_being_written() -> bool:
    """Returns whether this process is writing a checkpoint or about to write one."""
    return bool(being_written)


class _Failed(Exception):  # noqa: N818 - reported, not raised further
    """One process's failure, as a message."""


@dataclass
class _Job:
    """A checkpoint to be written, whose contents training no longer changes."""

    path: Path
    with_model: bool  # whether to write a model folder too
    resumable: bool  # whether to keep what resuming needs
    outdated: Callable[[], list[Path]]
    done: Callable[[], None]
    model: nn.Module
    pieces: dict[str, Piece] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)  # the main process's files, by path
    model_bytes: int = 0
    error: Exception | None = None  # raised while this process prepared the checkpoint

    @property
    def partial(self) -> Path:
        """The checkpoint's folder while it is being written."""
        return self.path.with_name(self.path.name + PARTIAL)

    @property
    def title(self) -> str:
        """The checkpoint's name in messages: `checkpoint step-2`, `replay/step-2`."""
        folder, name = self.path.parent.name, self.path.name
        return f"checkpoint {name}" if folder != KEPT else f"{folder}/{name}"


class Checkpointer:
    """Writes a run's checkpoints, one at a time. Its methods are collective."""

    def __init__(self, workers: Workers, say: Callable[[str], None], contents: bytes = b"") -> None:
        """Creates a process group for saving, so that its collectives never mix with training's.

        Args:
            say: prints a line for the user; also called from the writing thread.
            contents: contents.json, the hashes of the run's inputs; b"": none.
        """
        self.workers, self.say, self.contents = workers, say, contents
        self.error: str | None = None  # error of the newest checkpoint
        self.best: int | None = None  # newest best step that has a checkpoint
        self.staging = shards.Staging()
        self.thread: threading.Thread | None = None  # writing thread
        self.began = -math.inf  # time at which the thread started
        self.group: Any = None
        if workers.size > 1:
            self.group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
            _groups.append(self.group)

    def save(
        self,
        path: Path,
        parts: Parts,
        state: dict[str, Any],
        recipe_yaml: str,
        tokenizer: Any,
        *,
        with_model: bool,
        resumable: bool = True,
        card: str = "",
        outdated: Callable[[], list[Path]] = list,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes a checkpoint once the previous one is written. Does not raise: see `error`.

        Args:
            path: its final name.
            parts: model, optimizer and reference.
            state: tensors and built-in types for `load_state`; the main process's is written.
            recipe_yaml: contents of recipe.yaml.
            tokenizer: saved with the model.
            with_model: also write a model folder that loads anywhere.
            resumable: keep what resuming needs; else the model folder stands alone.
            card: the model card, which becomes README.md of the model folder; "": none.
            outdated: returns the checkpoints to be removed after this one is written; on a full
                disk the oldest are removed before.
            done: called on the main process when the checkpoint has its final name.
        """
        self.wait()
        job = _Job(path, with_model, resumable, outdated, done, parts.model)
        being_written.add(job.partial)
        with heartbeat.inside("checkpoint"):
            try:
                tensors = parts.tensors()
                pieces = shards.pieces_of(tensors, self.workers.rank, self.workers.size)
                job.pieces = self.staging.copy(pieces)  # so that training can continue
                if self.workers.is_main:
                    weights = [t for name, t in tensors.items() if name.startswith("model.")]
                    job.model_bytes = sum(t.nbytes for t in weights) if with_model else 0
                    prefix, buffer = "" if with_model else f"{MODEL}/", io.BytesIO()
                    assert isinstance(parts.model, PreTrainedModel), "it is to be loaded again"
                    is_adapted = adapters.attached_config(parts.model) is not None
                    files = model_folder.files_of_adapter if is_adapted else model_folder.files_of
                    model_files = files(parts.model, tokenizer)
                    torch.save(state, buffer)
                    job.small = {prefix + name: data for name, data in model_files.items()}
                    job.small[STATE] = buffer.getvalue()
                    job.small[f"{TRAINING}/recipe.yaml"] = recipe_yaml.encode()
                    if card:
                        job.small[prefix + manifest.CARD] = card.encode()
                    if self.contents:
                        job.small[CONTENTS] = self.contents
            except Exception as error:
                job.error = error
        self.began = time.monotonic()
        self.thread = threading.Thread(
            target=self.write, args=(job,), name="checkpoint", daemon=True
        )
        self.thread.start()

    def wait(self, seconds: float | None = None) -> str | None:
        """Waits for the checkpoint being written, at most `seconds`.

        Returns:
            The last checkpoint's error, or None.
        """
        if self.thread is not None:
            with heartbeat.inside("checkpoint"):
                _join(self.thread, seconds)
            if self.thread.is_alive():
                return "is still being written"
            self.thread = None
        return self.error

    def seconds_left(self, usual: float) -> float:
        """Returns the expected remaining seconds of the checkpoint being written.

        Args:
            usual: usual seconds of a checkpoint.
        """
        if self.thread is None or not self.thread.is_alive():
            return 0.0
        return max(usual - (time.monotonic() - self.began), 0.0)

    def write(self, job: _Job) -> None:
        """Writes a checkpoint and renames it to its final name, or reports why that failed."""
        needed = [0]
        try:
            self.error = None
            self.write_and_name(job, needed)
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            if self.workers.is_main:
                shutil.rmtree(job.partial, ignore_errors=True)
            if isinstance(error, CheckpointException) and error.failures:
                rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
                why = with_rank(rank, manifest.reason(cause, job.path.parent, needed[0]))
            else:
                why = manifest.reason(error, job.path.parent, needed[0])
            why = str(error) if isinstance(error, _Failed) else why
            self.error = f"{job.title} could not be written: {why}"
            if self.workers.is_main:
                self.say(f"{self.error}; the run continues")
        finally:
            being_written.discard(job.partial)

    def write_and_name(self, job: _Job, needed: list[int]) -> None:
        """Runs the steps of a save, each on all processes before the next step begins."""

        def on_all(action: Callable[[], T]) -> list[T]:
            return self.agreed(action, lambda error: manifest.reason(error, folder, needed[0]))

        def on_main(action: Callable[[], None]) -> None:
            on_all(lambda: action() if self.workers.is_main else None)

        def begin() -> None:
            shutil.rmtree(job.partial, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            remove_torn(folder)  # frees their disk space
            make_room(job.path, needed[0], job.outdated(), self.say)
            manifest.check_space(folder, needed[0])
            (job.partial / shards.SHARDS).mkdir(parents=True)

        def local_bytes() -> int:
            if job.error is not None:
                raise job.error
            small = sum(map(len, job.small.values()))
            tensors = [piece.tensor for piece in job.pieces.values()]
            on_disk = sum(tensor.nbytes + shards.OVERHEAD for tensor in tensors)
            return on_disk + small + job.model_bytes

        def finish() -> None:
            files = {name: entry for part in written for name, entry in part.items()}
            files |= write_model_and_state(job)
            manifest.write(job.partial, files)
            if not job.resumable:
                keep_model_only(job.partial)
            manifest.sync_folders(job.partial)
            give_name(job.partial, job.path)
            provenance.note_own(job.path)

        def follow() -> None:
            try:
                job.done()
            except Exception as error:  # the checkpoint itself is complete
                self.say(f"{job.title} is written, but then: {error}")

        folder = job.path.parent
        needed[0] = sum(on_all(local_bytes))
        on_main(begin)
        local_files = shards.write(job.partial, job.pieces, self.group)
        written = on_all(lambda: local_files)
        on_main(finish)
        on_main(follow)

    def agreed(self, action: Callable[[], T], reason: Callable[[Exception], str]) -> list[T]:
        """Returns the action's result on each process; raises if it failed on any process."""
        value: T | None = None
        why: str | None = None
        try:
            value = action()
        except Exception as error:
            why = reason(error)
        results: list[Any] = [(value, why)]
        if self.group is not None:
            results = [None] * self.workers.size
            dist.all_gather_object(results, (value, why), group=self.group)
        for rank, (_, why) in enumerate(results):
            if why is not None:
                raise _Failed(with_rank(rank, why))
        return [value for value, _ in results]


def with_rank(rank: int, why: str) -> str:
    """Prefixes a failure's message with the process, unless it is the main process."""
    return f"process {rank}: {why}" if rank else why


def _join(thread: threading.Thread, seconds: float | None) -> None:
    """Waits for the writing thread, which is not stalled as long as bytes are written.

    Args:
        seconds: longest wait; None: until the thread ends.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    before = manifest.written()
    while thread.is_alive() and time.monotonic() < end:
        thread.join(min(1.0, max(end - time.monotonic(), 0.0)))
        if manifest.written() != before:
            before = manifest.written()
            heartbeat.touch()


def write_model_and_state(job: _Job) -> dict[str, Entry]:
    """Writes all files except the shards; reads a model folder's weights from the shards."""
    files = {name: manifest.write_file(job.partial / name, job.small[name]) for name in job.small}
    if job.with_model:
        stored = Shards(job.partial)
        model = job.model
        assert isinstance(model, PreTrainedModel)
        names, weights = stored.names("model"), StoredModel(stored, job.pieces)
        if adapters.attached_config(model) is not None:
            own = adapters.file_tensors(model, {name: weights[name] for name in names})
            entry = model_folder.write_safetensors(job.partial / adapters.WEIGHTS, own)
            return files | {adapters.WEIGHTS: entry}
        tensors = model_folder.as_published(model, names, weights)
        files |= model_folder.write_weights(job.partial, tensors)
    return files


class StoredModel(dict[str, Tensor]):
    """The model's tensors by name: from memory, or read from the shards on access."""

    def __init__(self, stored: Shards, pieces: dict[str, Piece]) -> None:
        self.stored, self.pieces = stored, pieces

    def __missing__(self, name: str) -> Tensor:
        piece = self.pieces.get(f"model.{name}")
        if piece is not None and piece.tensor.size() == piece.size:
            return piece.tensor
        return self.stored.read(f"model.{name}")


def give_name(partial: Path, path: Path) -> None:
    """Renames a complete checkpoint to its final name; keeps the old one until then."""
    aside = path.with_name(path.name + REPLACED)
    if path.exists() or path.is_symlink():
        with contextlib.suppress(OSError):
            remove(aside)
        path.rename(aside)
    try:
        partial.rename(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise
    manifest.sync_folder(path.parent)
    with contextlib.suppress(OSError):
        remove(aside)


def choose(candidates: Sequence[Path], workers: Workers, say: Callable[[str], None]) -> Path | None:
    """Returns the first complete checkpoint, and reports the skipped ones. Collective.

    Args:
        candidates: checkpoints, the newest first.
    """
    for path in candidates:
        problem = workers.gather(manifest.verify(path) if workers.is_main else None)[0]
        if problem is None:
            return path
        if workers.is_main:
            say(f"{path.parent.name}/{path.name} {problem}: skipped")
    return None


def load(path: Path, parts: Parts) -> None:
    """Fills model, optimizer and reference from a checkpoint, in place.

    The checkpoint may come from a different number of processes. Every process reads only its own
    shards, without a collective. The settings of the optimizer's param_groups are unchanged.

    Raises:
        ValueError: the checkpoint belongs to another model.
    """
    stored = Shards(path)
    named: list[tuple[str, nn.Module | Mapping[str, Tensor]]] = [("model", parts.model)]
    if parts.reference is not None and stored.names("reference"):
        named.append(("reference", parts.reference))
    targets: dict[str, Tensor] = {}
    for part, module in named:
        tensors = shards.tensors_of(module)
        check_fits(part, tensors, stored)
        targets |= {f"{part}.{name}": tensor.detach() for name, tensor in tensors.items()}
    targets |= optimizer_targets(parts, stored)
    stored.read_into(targets)
    # Tensors that stand for plain numbers become numbers in the optimizer's state.
    trained = parts.trained()
    for name, tensor in targets.items():
        if name.endswith(shards.NUMBER):
            of, _, key = name.removeprefix("optimizer.").removesuffix(shards.NUMBER).rpartition(".")
            parts.optimizer.state[trained[of]][key] = tensor.item()


def check_fits(part: str, tensors: dict[str, Tensor], stored: Shards) -> None:
    """Checks that the checkpoint has these tensors with these shapes.

    Raises:
        ValueError: a name or a shape differs.
    """
    saved = set(stored.names(part))
    for name in sorted(saved ^ set(tensors)):
        where = "only in the checkpoint" if name in saved else "not in the checkpoint"
        raise ValueError(f"{part}: {name} is {where}")
    for name, tensor in tensors.items():
        size = stored.tensors[f"{part}.{name}"].size
        if size != tensor.size():
            raise ValueError(f"{part}: {name} is {list(size)} there, {list(tensor.size())} here")


def optimizer_targets(parts: Parts, stored: Shards) -> dict[str, Tensor]:
    """Fills the optimizer's state with empty tensors of the saved shapes; returns them by name."""
    optimizer = parts.optimizer
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = parts.trained()
    optimizer.state.clear()
    targets = {}
    for name in stored.names("optimizer"):
        of, _, key = name.rpartition(".")
        if (p := trained.get(of)) is None:
            continue
        saved = stored.tensors[f"optimizer.{name}"]
        dtype = saved.properties.dtype
        if key.endswith(shards.NUMBER):  # becomes a plain number after it is read
            targets[f"optimizer.{name}"] = torch.zeros((), dtype=dtype)
            continue
        if dtype == stored.tensors[f"model.{of}"].properties.dtype:
            dtype = p.dtype  # which may have changed; 8-bit states have a dtype of their own
        tensor = new_state(optimizer, p, groups[id(p)], key, saved.size, dtype)
        optimizer.state[p][key] = targets[f"optimizer.{name}"] = tensor
    return targets


def new_state(
    optimizer: torch.optim.Optimizer,
    p: nn.Parameter,
    group: dict[str, Any],
    key: str,
    size: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """Creates a tensor of an optimizer's state as torch's optimizers do."""
    if key == "step":  # on the host, unless the entire update runs on the device
        on_device = group.get("fused") or group.get("capturable")
        return torch.zeros((), device=p.device if on_device else "cpu")
    if size != p.size():
        assert not isinstance(p, DTensor), f"optimizer: {key} is {list(size)}, not as its parameter"
        return torch.zeros(size, dtype=dtype, device=p.device)
    if hasattr(optimizer, "get_state_buffer"):  # bitsandbytes, which may page the state
        buffer: Tensor = optimizer.get_state_buffer(p, dtype=dtype)
        return buffer
    return torch.zeros_like(p.detach(), dtype=dtype, memory_format=torch.preserve_format)


def has_reference(path: Path) -> bool:
    """Returns whether the checkpoint holds a reference policy."""
    return bool(Shards(path).names("reference"))


def load_state(path: Path) -> dict[str, Any]:
    """Loads a checkpoint's training state on the CPU."""
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state
