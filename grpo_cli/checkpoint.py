"""Checkpoints: every process writes its shards, while training goes on.

    checkpoints/step-200/config.json, model.safetensors, ...   a plain model folder, if asked for
    checkpoints/step-200/training/shards/                      model, optimizer, moved reference
    checkpoints/step-200/training/state.pt, recipe.yaml        where the run stands
    checkpoints/step-200/training/model/                       config and tokenizer, where not above
    checkpoints/step-200/training/manifest.json                sizes and sha256 of all these

A checkpoint is written as step-200.tmp, the manifest last, and renamed, so that a folder called
step-N was whole once; `choose` looks whether it still is.
"""

from __future__ import annotations

import io
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli import heartbeat, manifest, plain, shards
from grpo_cli.distributed import Workers
from grpo_cli.folders import (
    REPLACED,
    TRAINING,
    checkpoint_path,
    is_interrupted,
    recover,
    resumable,
    step_of,
    steps_saved,
)
from grpo_cli.manifest import Entry
from grpo_cli.shards import Parts, Piece, Shards

PARTIAL = ".tmp"
MODEL = f"{TRAINING}/model"
STATE = f"{TRAINING}/state.pt"
PATIENCE = timedelta(minutes=30)  # with the slowest process, while a checkpoint is written

T = TypeVar("T")

_being_written: set[Path] = set()
_groups: list[Any] = []  # kept to the end, as `distributed._groups`


def is_being_written() -> bool:
    """Whether this process is about to write a checkpoint, or is writing one."""
    return bool(_being_written)


class _Failed(Exception):  # noqa: N818 - told, not raised any further
    """What went wrong on one process, in words."""


@dataclass
class _Job:
    """A checkpoint to be written. What is in it is no longer changed by training."""

    path: Path
    plain: bool
    done: Callable[[], None]
    model: nn.Module
    pieces: dict[str, Piece] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)  # of the main process, by path
    model_bytes: int = 0
    error: Exception | None = None  # that kept this process from getting it ready

    @property
    def partial(self) -> Path:
        return self.path.with_name(self.path.name + PARTIAL)


class Checkpointer:
    """Writes a run's checkpoints, one at a time. All processes call the same methods together."""

    def __init__(self, workers: Workers, say: Callable[[str], None], background: bool) -> None:
        """Makes a process group for saving alone, so that it cannot mix with what trains.

        Args:
            say: takes a line for the user; also called from the thread that writes.
            background: training goes on while a checkpoint is written.
        """
        self.workers, self.say, self.background = workers, say, background
        self.error: str | None = None  # of the newest checkpoint
        self.best: int | None = None  # the newest best step whose checkpoint was there
        self.staging = shards.Staging()
        self.thread: threading.Thread | None = None  # that writes
        self.began = -math.inf  # when it did
        self.files: tuple[Any, Any, dict[str, bytes]] | None = None
        self.group: Any = None
        if workers.size > 1:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
            _groups.append(self.group)

    def save(
        self,
        path: Path,
        parts: Parts,
        state: dict[str, Any],
        recipe_yaml: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        plain: bool,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes one checkpoint, once the one before is written. Does not raise: see `error`.

        Args:
            path: its final name. state: what `load_state` gives back; tensors and plain values
                only, those of the main process count.
            plain: also as a model folder that loads anywhere.
            done: called on the main process when the checkpoint has its name.
        """
        self.wait()
        job = _Job(path, plain, done, parts.model)
        _being_written.add(job.partial)
        with heartbeat.inside("checkpoint"):
            try:
                self.get_ready(job, parts, state, recipe_yaml, tokenizer)
            except Exception as error:
                job.error = error
        self.began = time.monotonic()
        self.thread = threading.Thread(
            target=self.write, args=(job,), name="checkpoint", daemon=True
        )
        self.thread.start()
        if not self.background:
            self.wait()

    def wait(self, seconds: float | None = None) -> str | None:
        """Waits until nothing is being written, or so long; returns the last checkpoint's error."""
        if self.thread is not None:
            with heartbeat.inside("checkpoint"):
                _join(self.thread, seconds)
            if self.thread.is_alive():
                return "is still being written"
            self.thread = None
        return self.error

    def seconds_left(self, usual: float) -> float:
        """That what is being written is expected to take yet.

        Args:
            usual: seconds that a checkpoint takes.
        """
        if self.thread is None or not self.thread.is_alive():
            return 0.0
        return max(usual - (time.monotonic() - self.began), 0.0)

    def get_ready(
        self,
        job: _Job,
        parts: Parts,
        state: dict[str, Any],
        recipe_yaml: str,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Takes from training all that the checkpoint needs."""
        tensors = parts.tensors()
        pieces = shards.own_pieces(tensors, self.workers.rank, self.workers.size)
        job.pieces = self.staging.copied(pieces) if self.background else pieces
        if not self.workers.is_main:
            return
        if job.plain:
            job.model_bytes = sum(t.nbytes for n, t in tensors.items() if n.startswith("model."))
        where = "" if job.plain else f"{MODEL}/"
        of_model = self.files_of(parts.model, tokenizer)
        job.small = {where + name: data for name, data in of_model.items()}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        job.small[STATE] = buffer.getvalue()
        job.small[f"{TRAINING}/recipe.yaml"] = recipe_yaml.encode()

    def files_of(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
        """Config and tokenizer, which stay what they are: made once, for a tokenizer may be big."""
        if self.files is None or self.files[0] is not model or self.files[1] is not tokenizer:
            assert isinstance(model, PreTrainedModel), "only these can be loaded again"
            self.files = model, tokenizer, plain.files_of(model, tokenizer)
        return self.files[2]

    def write(self, job: _Job) -> None:
        """Writes a checkpoint and gives it its name, or says why not."""
        needed = [0]
        try:
            self.error = None
            self.write_and_name(job, needed)
        except (Exception, CheckpointException) as error:  # the second is no case of the first
            if self.workers.is_main:
                shutil.rmtree(job.partial, ignore_errors=True)
            if isinstance(error, CheckpointException) and error.failures:
                rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
                why = self.told(rank, manifest.reason(cause, job.path.parent, needed[0]))
            else:
                why = manifest.reason(error, job.path.parent, needed[0])
            why = str(error) if isinstance(error, _Failed) else why
            self.error = f"checkpoint {job.path.name} could not be written: {why}"
            if self.workers.is_main:
                self.say(f"{self.error}; the run goes on")
        finally:
            _being_written.discard(job.partial)

    def write_and_name(self, job: _Job, needed: list[int]) -> None:
        """The steps of a save; each is done on all processes before the next begins."""

        def on_all(action: Callable[[], T]) -> list[T]:
            return self.agreed(action, lambda error: manifest.reason(error, folder, needed[0]))

        def on_main(action: Callable[[], None]) -> None:
            on_all(lambda: action() if self.workers.is_main else None)

        def begin() -> None:
            shutil.rmtree(job.partial, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            remove_torn(folder)  # or what they fill would be missing for ever
            manifest.check_space(folder, needed[0])
            (job.partial / shards.SHARDS).mkdir(parents=True)

        def own_bytes() -> int:
            if job.error is not None:
                raise job.error
            small = sum(map(len, job.small.values()))
            tensors = [piece.tensor for piece in job.pieces.values()]
            return shards.size_on_disk(tensors) + small + job.model_bytes

        def finish() -> None:
            files = {name: entry for part in written for name, entry in part.items()}
            files |= write_model_and_state(job)
            manifest.write(job.partial, files)
            manifest.sync_folders(job.partial)
            give_name(job.partial, job.path)

        def follow() -> None:
            try:
                job.done()
            except Exception as error:  # the checkpoint is there all the same
                self.say(f"checkpoint {job.path.name} is written, but then: {error}")

        folder = job.path.parent
        needed[0] = sum(on_all(own_bytes))
        on_main(begin)
        own = shards.write(job.partial, job.pieces, self.group)
        written = on_all(lambda: own)
        on_main(finish)
        on_main(follow)

    def agreed(self, action: Callable[[], T], reason: Callable[[Exception], str]) -> list[T]:
        """What the action returns on each process; raises what it raised on any of them."""
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
                raise _Failed(self.told(rank, why))
        return [value for value, _ in results]

    def told(self, rank: int, why: str) -> str:
        return f"process {rank}: {why}" if rank else why


def _join(thread: threading.Thread, seconds: float | None) -> None:
    """Waits for the end of a thread that writes; a wait is no stall as long as bytes are written.

    Args:
        seconds: that it may take at most; None: any.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    before = manifest.written()
    while thread.is_alive() and time.monotonic() < end:
        thread.join(min(1.0, max(end - time.monotonic(), 0.0)))
        if manifest.written() != before:
            before = manifest.written()
            heartbeat.touch()


def write_model_and_state(job: _Job) -> dict[str, Entry]:
    """Writes what is not in the shards; the weights of a model folder are taken from there."""
    files = {name: manifest.write_file(job.partial / name, job.small[name]) for name in job.small}
    if job.plain:
        stored = Shards(job.partial)
        model = job.model
        assert isinstance(model, PreTrainedModel)
        tensors = plain.as_published(model, stored.names("model"), Model(stored, job.pieces))
        files |= plain.write_weights(job.partial, tensors)
    return files


class Model(dict[str, Tensor]):
    """The model's tensors by name: in memory, or read from the shards when they are asked for."""

    def __init__(self, stored: Shards, pieces: dict[str, Piece]) -> None:
        self.stored, self.pieces = stored, pieces

    def __missing__(self, name: str) -> Tensor:
        piece = self.pieces.get(f"model.{name}")
        if piece is not None and piece.tensor.size() == piece.size:
            return piece.tensor
        return self.stored.read(f"model.{name}")


def give_name(partial: Path, path: Path) -> None:
    """Renames a whole checkpoint. One of that name is there, whole, until this one is."""
    aside = path.with_name(path.name + REPLACED)
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    try:
        partial.rename(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise
    manifest.sync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def choose(candidates: Sequence[Path], workers: Workers, say: Callable[[str], None]) -> Path | None:
    """The first whole checkpoint; says which are skipped, and why. Every process calls it.

    Args:
        candidates: the newest first.
    """
    for path in candidates:
        problem = problem_of(path, workers)
        if problem is None:
            return path
        if workers.is_main:
            say(f"{path.parent.name}/{path.name} {problem}: skipped")
    return None


def problem_of(path: Path, workers: Workers) -> str | None:
    """What is wrong with a checkpoint; each process hashes its share of the files."""
    own: tuple[dict[str, Entry], str | None] = ({}, None)
    files, problem = workers.gather(manifest.listed(path) if workers.is_main else own)[0]
    if problem is not None:
        return problem
    share = manifest.divided(files, workers.size)[workers.rank]
    found = workers.gather(manifest.wrong_content(path, share))
    return next((f"is damaged ({wrong})" for wrong in found if wrong), None)


def load(path: Path, parts: Parts) -> None:
    """Fills model, optimizer and reference from a checkpoint, in place, whatever wrote it.

    Every process reads what it holds, without the others. The settings of the optimizer's
    param_groups stay as they are.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    stored = Shards(path)
    named = [("model", parts.model)]
    if parts.reference is not None and stored.names("reference"):
        named.append(("reference", parts.reference))
    targets: dict[str, Tensor] = {}
    for part, module in named:
        tensors = shards.tensors_of(module)
        check_fits(part, tensors, stored)
        targets |= {f"{part}.{name}": tensor.detach() for name, tensor in tensors.items()}
    targets |= optimizer_targets(parts, stored)
    stored.read_into(targets)


def check_fits(part: str, tensors: dict[str, Tensor], stored: Shards) -> None:
    """Raises a ValueError unless the checkpoint has these tensors, of these shapes."""
    there = set(stored.names(part))
    for name in sorted(there ^ set(tensors)):
        where = "only in the checkpoint" if name in there else "not in the checkpoint"
        raise ValueError(f"{part}: {name} is {where}")
    for name, tensor in tensors.items():
        size = stored.tensors[f"{part}.{name}"].size
        if size != tensor.size():
            raise ValueError(f"{part}: {name} is {list(size)} there, {list(tensor.size())} here")


def optimizer_targets(parts: Parts, stored: Shards) -> dict[str, Tensor]:
    """The optimizer's tensors by name, made where it has none yet, gone where none was saved."""
    saved: dict[str, list[str]] = {}
    for name in stored.names("optimizer"):
        of, _, key = name.rpartition(".")
        saved.setdefault(of, []).append(key)
    groups = {id(p): group for group in parts.optimizer.param_groups for p in group["params"]}
    targets = {}
    for name, p in parts.trained().items():
        if name not in saved:
            parts.optimizer.state.pop(p, None)
            continue
        state = parts.optimizer.state[p]
        for key in [key for key in state if key not in saved[name]]:
            del state[key]
        for key in saved[name]:
            if key not in state:
                size = stored.tensors[f"optimizer.{name}.{key}"].size
                state[key] = new_state(p, groups[id(p)], key, size)
            targets[f"optimizer.{name}.{key}"] = state[key]
    return targets


def new_state(p: nn.Parameter, group: dict[str, Any], key: str, size: torch.Size) -> Tensor:
    """A tensor of an optimizer's state as torch's optimizers make it."""
    if key == "step":  # on the host, unless the whole update runs on the device
        on_device = group.get("fused") or group.get("capturable")
        return torch.zeros((), device=p.device if on_device else "cpu")
    if size != p.size():
        assert not isinstance(p, DTensor), f"optimizer: {key} is {list(size)}, not as its parameter"
        return torch.zeros(size, dtype=p.dtype, device=p.device)
    return torch.zeros_like(p.detach(), memory_format=torch.preserve_format)


def has_reference(path: Path) -> bool:
    """Whether the checkpoint holds a reference of its own."""
    return bool(Shards(path).names("reference"))


def load_state(path: Path) -> dict[str, Any]:
    """The training state of a checkpoint, on the CPU."""
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def remove_torn(checkpoints: Path) -> None:
    """Removes what saves that were killed have left."""
    for torn in checkpoints.glob(f"*{PARTIAL}"):
        if torn not in _being_written:
            shutil.rmtree(torn, ignore_errors=True)


def prune(folder: Path, keep_last: int, best: int | None, newest: Path | None = None) -> None:
    """Removes all but the newest `keep_last` checkpoints of a run, and the best one.

    Args:
        newest: the one just written. One of a step that was broken off goes once there is another.
    """
    recover(folder)
    remove_torn(folder / "checkpoints")
    for step in steps_saved(folder)[:-keep_last]:
        if step != best and checkpoint_path(folder, step) != newest:
            shutil.rmtree(checkpoint_path(folder, step))
    for path in resumable(folder):
        if is_interrupted(path) and newest not in (None, path):
            shutil.rmtree(path)


def set_aside(folder: Path, path: Path, after: int) -> list[str]:
    """Renames what a run has kept beyond `path`, so that resume=auto ignores it.

    Args:
        path: the checkpoint that the run goes on from, after so many steps.

    Returns:
        The names of those renamed.
    """
    gone_on = (after, is_interrupted(path))
    # Also what is damaged: it must not count as the newest when others are pruned.
    paths = [checkpoint_path(folder, step) for step in steps_saved(folder)]
    paths += [p for p in resumable(folder) if is_interrupted(p)]
    later = [p for p in paths if (step_of(p), is_interrupted(p)) > gone_on]
    for beyond in later:
        old = beyond.with_name(beyond.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        beyond.rename(old)
    return [p.name for p in later]


def rng_state() -> dict[str, Any]:
    """The random streams of this process, as tensors and plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        # Of its own device: there may be others in the machine, and fewer of them another time.
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        # Earlier versions have kept the streams of all devices.
        own = min(torch.cuda.current_device(), len(state["cuda"]) - 1)
        torch.cuda.set_rng_state(state["cuda"][own])
