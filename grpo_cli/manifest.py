"""The manifest of a checkpoint: size and sha256 of every file, so that damage is noticed.

    training/manifest.json   {"version": 1, "files": {"config.json": {"bytes": 812, "sha256": ...}}}

It is the last file to be written: a folder without one is not a whole checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from grpo_cli import heartbeat
from grpo_cli.folders import TRAINING

MANIFEST = f"{TRAINING}/manifest.json"
VERSION = 1
AT_A_TIME = 2**22  # bytes that are read and hashed in one go
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Entry:
    """What a file is expected to be."""

    bytes: int
    sha256: str


class Damaged(Exception):  # noqa: N818 - says what a checkpoint is
    """A checkpoint cannot be relied on. The message goes on after its name: "is damaged (...)"."""


_written = 0  # bytes of `written`


def written() -> int:
    """Bytes that this process has written to checkpoints so far: whether a save gets on."""
    return _written


def _count(size: int) -> None:
    global _written
    _written += size


class Hashing(io.RawIOBase):
    """A file being written, hashed on the way, so that it need not be read back."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()
        self.error: OSError | None = None  # what writing raised; torch.save tells another story

    def write(self, data: Any) -> int:
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
        return Entry(self.size, self.sha256.hexdigest())


def write_file(path: Path, data: bytes) -> Entry:
    """Writes a small file, so that it is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        sync(file)
    _count(len(data))
    return Entry(len(data), hashlib.sha256(data).hexdigest())


def sync(file: BinaryIO) -> None:
    """Waits until what was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folders(folder: Path) -> None:
    """Waits until the names in a folder and in those inside it are on the disk."""
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(folder: Path, files: Mapping[str, Entry]) -> None:
    """Writes the manifest of the checkpoint in `folder`.

    Raises:
        OSError: a file is not there as it was written, by whichever process.
    """
    if wrong := wrong_size(folder, files):
        raise OSError(f"{wrong}; is it a file system that all processes share?")
    content = {"version": VERSION, "files": {name: asdict(files[name]) for name in sorted(files)}}
    write_file(folder / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())


def read(folder: Path) -> dict[str, Entry]:
    """The files that a checkpoint consists of.

    Raises:
        Damaged: there is no manifest, or none that can be read.
    """
    if not (folder / MANIFEST).is_file():
        state, shards = folder / TRAINING / "state.pt", folder / TRAINING / "shards"
        if state.is_file() and not shards.exists():
            raise Damaged(
                "was written by an earlier version of grpo and cannot be gone on from "
                "(its model loads as any other: model.path=...)"
            )
        raise Damaged(f"is damaged ({MANIFEST}: missing)")
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        version = content["version"]
        files = {name: Entry(**entry) for name, entry in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Damaged(f"is damaged ({MANIFEST}: cannot be read: {reason})") from error
    if version != VERSION:
        raise Damaged(f"has a manifest of version {version}; this grpo reads version {VERSION}")
    if not files:
        raise Damaged(f"is damaged ({MANIFEST}: names no file)")
    return files


def listed(folder: Path) -> tuple[dict[str, Entry], str | None]:
    """(the files of a checkpoint, what is wrong with it as far as their sizes tell)."""
    try:
        files = read(folder)
    except Damaged as damaged:
        return {}, str(damaged)
    wrong = wrong_size(folder, files)
    return files, f"is damaged ({wrong})" if wrong else None


def wrong_size(folder: Path, files: Mapping[str, Entry]) -> str | None:
    """What is wrong with the first file that is missing or of another size; None if none is."""
    for name, entry in files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != entry.bytes:
            return f"{name}: {found:,} bytes, {entry.bytes:,} expected"
    return None


def wrong_content(folder: Path, files: Mapping[str, Entry]) -> str | None:
    """What is wrong with the first file that does not hold what was written; None if all do."""
    for name, entry in files.items():
        sha256 = hashlib.sha256()
        try:
            with (folder / name).open("rb") as file:
                while part := file.read(AT_A_TIME):
                    sha256.update(part)
                    heartbeat.touch()
        except OSError as error:
            return f"{name}: {error.strerror}"
        if sha256.hexdigest() != entry.sha256:
            return f"{name}: holds other bytes than were written"
    return None


def divided(files: Mapping[str, Entry], processes: int) -> list[dict[str, Entry]]:
    """The files in as many parts as there are processes, of about as many bytes each."""
    parts: list[dict[str, Entry]] = [{} for _ in range(processes)]
    sizes = [0] * processes
    for name in sorted(files, key=lambda name: -files[name].bytes):
        smallest = sizes.index(min(sizes))
        parts[smallest][name] = files[name]
        sizes[smallest] += files[name].bytes
    return parts


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint, such as "is damaged (...)"; None if it is whole."""
    files, problem = listed(folder)
    if problem is not None:
        return problem
    threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda part: wrong_content(folder, part), divided(files, threads))
        wrong = next((found for found in parts if found), None)
    return f"is damaged ({wrong})" if wrong else None


def check_space(folder: Path, needed: int) -> None:
    """Raises an OSError if the disk of `folder` has not as many bytes left."""
    if free_bytes(folder) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def free_bytes(folder: Path) -> int:
    """What may still be written to the disk of `folder`."""
    return shutil.disk_usage(folder).free


def reason(error: BaseException, folder: Path, needed: int) -> str:
    """Why writing to `folder` failed, in a few words, with the space where it is that."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        if error.errno in FULL:
            try:
                free = f"{in_words(free_bytes(folder))} free, "
            except OSError:  # the folder itself is gone
                free = ""
            where = f" ({folder}: {free}about {in_words(needed)} needed)"
        return f"{error.strerror}{where}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def in_words(size: float) -> str:
    """12 bytes, 3.4 MB, 1.2 GB."""
    units: Iterable[tuple[str, float]] = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    for unit, factor in units:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:,.0f} bytes"
