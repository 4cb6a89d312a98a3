"""Reads and writes a checkpoint's manifest: size and sha256 of every file, to detect damage.

    training/manifest.json   {"version": 1, "files": {"config.json": {"bytes": 812, "sha256": ...}}}

The manifest is written last: a folder without one is not a complete checkpoint. It omits the model
card and an adapter's config, which names its base model, since users may edit both.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from grpo_cli.checkpoints.paths import TRAINING, shown, step_of
from grpo_cli.config.sources import ADAPTER_CONFIG
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import UserError, typed_line

MANIFEST = f"{TRAINING}/manifest.json"
CARD = "README.md"
EDITABLE = (CARD, ADAPTER_CONFIG)  # not in the manifest
VERSION = 1
BLOCK_BYTES = 2**22  # bytes read and hashed at a time


@dataclass(frozen=True)
class Entry:
    """The expected size and hash of a file."""

    bytes: int
    sha256: str


class Damaged(Exception):  # noqa: N818 - describes a checkpoint
    """Raised for an unusable checkpoint. The message follows its name: "is damaged (...)"."""


_written = 0  # bytes, see `written`


def written() -> int:
    """Returns the bytes that this process has written to checkpoints, a save's progress."""
    return _written


def _count(size: int) -> None:
    global _written
    _written += size


class Hashing(io.RawIOBase):
    """A file that is hashed while it is written, to avoid reading it back."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()
        self.error: OSError | None = None  # raised by a write; torch.save reports another error

    def write(self, data: Any) -> int:
        """Writes and hashes bytes."""
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        size = memoryview(data).nbytes
        self.size += size
        _count(size)
        return size

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return self.file.fileno()

    @property
    def entry(self) -> Entry:
        """Size and hash of the written bytes."""
        return Entry(self.size, self.sha256.hexdigest())


def write_file(path: Path, data: bytes) -> Entry:
    """Writes a small file and waits until it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        sync(file)
    _count(len(data))
    return Entry(len(data), hashlib.sha256(data).hexdigest())


def sync(file: BinaryIO) -> None:
    """Waits until a file's contents are on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folders(folder: Path) -> None:
    """Waits until the entries of a folder and its subfolders are on disk."""
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Waits until the entries of a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(folder: Path, files: Mapping[str, Entry]) -> None:
    """Writes the manifest of the checkpoint in `folder`.

    Raises:
        OSError: a written file is missing or has a different size.
    """
    if wrong := wrong_size(folder, files):
        raise OSError(f"{wrong}; is it a file system that all processes share?")
    listed = {
        name: asdict(files[name]) for name in sorted(files) if Path(name).name not in EDITABLE
    }
    content = {"version": VERSION, "files": listed}
    write_file(folder / f"{MANIFEST}.new", (json.dumps(content, indent=1) + "\n").encode())
    (folder / f"{MANIFEST}.new").replace(folder / MANIFEST)


def read(folder: Path) -> dict[str, Entry]:
    """Reads the files of a checkpoint from its manifest.

    Raises:
        Damaged: the manifest is missing or cannot be read.
    """
    if not (folder / MANIFEST).is_file():
        raise Damaged(f"is damaged ({MANIFEST}: missing)")
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        version = content["version"]
        files = {name: Entry(**entry) for name, entry in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"is damaged ({MANIFEST}: cannot be read: {typed_line(error)})") from error
    if version != VERSION:
        raise Damaged(f"has a manifest of version {version}; this grpo reads version {VERSION}")
    if not files:
        raise Damaged(f"is damaged ({MANIFEST}: names no file)")
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise Damaged(f"is damaged ({MANIFEST}: names {name}, which is outside of it)")
    return files


def listed(folder: Path, *, model_only: bool = False) -> tuple[dict[str, Entry], str | None]:
    """Returns a checkpoint's files, and the damage that their sizes show (None without any)."""
    try:
        files = read(folder)
    except Damaged as damaged:
        return {}, str(damaged)
    if model_only:
        files = {n: e for n, e in files.items() if not n.startswith(f"{TRAINING}/")}
    wrong = wrong_size(folder, files)
    return files, f"is damaged ({wrong})" if wrong else None


def wrong_size(folder: Path, files: Mapping[str, Entry]) -> str | None:
    """Describes the first file that is missing or has a different size; None without any."""
    for name, entry in files.items():
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found.st_size != entry.bytes:
            return f"{name}: {found.st_size:,} bytes, {entry.bytes:,} expected"
        if not stat.S_ISREG(found.st_mode):  # reading a device may never end
            return f"{name}: is not a regular file"
    return None


def wrong_content(folder: Path, name: str, entry: Entry) -> str | None:
    """Describes how a file's contents differ from the written ones; None if they do not."""
    sha256 = hashlib.sha256()
    try:
        with (folder / name).open("rb") as file:
            while part := file.read(BLOCK_BYTES):
                sha256.update(part)
                heartbeat.touch()
    except OSError as error:
        return f"{name}: {error.strerror}"
    is_same = sha256.hexdigest() == entry.sha256
    return None if is_same else f"{name}: its contents have changed since it was written"


def check(path: Path, *, model_only: bool = False) -> None:
    """Raises a UserError if a checkpoint is damaged.

    Args:
        model_only: check only the files of the model folder, not those of training.
    """
    if wrong := verify(path, model_only=model_only):
        beside = sorted(path.parent.glob("step-*"), key=step_of)
        names = ", ".join(p.name for p in beside if p.name != path.name) or "none"
        changed = " If you changed it on purpose, use a copy without its folder training."
        raise UserError(
            f"checkpoint = {path}: {wrong}; other checkpoints of this run: {names}."
            f"{changed if model_only else ''}"
        )


def verify(folder: Path, *, model_only: bool = False) -> str | None:
    """Describes a checkpoint's damage, as "is damaged (...)"; None if it is complete."""
    files, problem = listed(folder, model_only=model_only)
    if problem is not None:
        return problem
    largest_first = sorted(files, key=lambda name: -files[name].bytes)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: wrong_content(folder, name, files[name]), largest_first)
        wrong = next((problem for problem in found if problem), None)
    return f"is damaged ({wrong})" if wrong else None


def check_space(folder: Path, needed: int) -> None:
    """Checks that the disk of `folder` has `needed` free bytes.

    Raises:
        OSError: the space is insufficient (ENOSPC).
    """
    if free_bytes(folder) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def free_bytes(folder: Path) -> int:
    """Returns the free bytes of the disk of `folder`."""
    return shutil.disk_usage(folder).free


def reason(error: BaseException, folder: Path, needed: int) -> str:
    """Describes briefly why writing to `folder` failed; includes the free space on a full disk."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            try:
                free = f"{in_words(free_bytes(folder))} free, "
            except OSError:  # the folder itself is gone
                free = ""
            where = f" ({shown(folder)}: {free}about {in_words(needed)} needed)"
        return f"{error.strerror}{where}"
    return typed_line(error)


def in_words(size: float) -> str:
    """Formats a size as 12 bytes, 3.4 MB or 1.2 GB."""
    units: Iterable[tuple[str, float]] = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    for unit, factor in units:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:,.0f} bytes"
