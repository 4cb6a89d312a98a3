"""What a checkpoint consists of, and what is said of one that does not."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from grpo_cli.checkpoints import manifest
from grpo_cli.checkpoints.manifest import Entry, Hashing
from grpo_cli.errors import UserError

FILES = {"config.json": b"{}", "training/state.pt": b"state", "training/shards/a": b"0123456789"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {name: manifest.write_file(tmp_path / name, data) for name, data in FILES.items()}
    manifest.write(tmp_path, files)
    return tmp_path


def test_a_manifest_says_what_was_written(folder: Path) -> None:
    found = manifest.read(folder)
    assert found == {
        name: Entry(len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()
    }
    assert manifest.verify(folder) is None


def test_a_file_that_was_not_written_as_was_said_makes_no_manifest(tmp_path: Path) -> None:
    entry = manifest.write_file(tmp_path / "a", b"12345")
    for name, size, said in (("a", 7, "a: 5 bytes, 7 expected"), ("b", 5, "b: missing")):
        with pytest.raises(OSError, match=said) as caught:
            manifest.write(tmp_path, {name: Entry(size, entry.sha256)})
        assert "that all processes share?" in str(caught.value)
    assert not (tmp_path / manifest.MANIFEST).exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("training/shards/a", b"012345678", "training/shards/a: 9 bytes, 10 expected"),
        ("training/shards/a", b"", "training/shards/a: 0 bytes, 10 expected"),
        ("training/shards/a", b"0123456788", "training/shards/a: its contents have changed"),
        ("training/shards/a", None, "training/shards/a: missing"),
        ("config.json", b"[]", "config.json: its contents have changed"),
        (manifest.MANIFEST, None, "training/manifest.json: missing"),
        (manifest.MANIFEST, b"", "training/manifest.json: cannot be read: JSONDecodeError"),
        (manifest.MANIFEST, b"[" * 9**5, "training/manifest.json: cannot be read: RecursionError"),
        (manifest.MANIFEST, b'{"version": 1}', "training/manifest.json: cannot be read: KeyError"),
        (manifest.MANIFEST, b'{"version": 1, "files": {}}', "names no file"),
        (manifest.MANIFEST, b'{"version": 1, "files": {"a": {"size": 3}}}', "cannot be read"),
        *(
            (
                manifest.MANIFEST,
                json.dumps({"version": 1, "files": {name: {"bytes": 0, "sha256": ""}}}).encode(),
                f"names {name}, which is outside of it",
            )
            for name in ("/dev/zero", "../other/a")
        ),
    ],
)
def test_damage_is_found_and_named(
    folder: Path, name: str, content: bytes | None, said: str
) -> None:
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    found = manifest.verify(folder)
    assert found.startswith(f"is damaged ({said}" if ": " in said else "is damaged (")
    assert said in found


def test_what_may_be_edited_is_not_listed(tmp_path: Path) -> None:
    names = ("config.json", "adapter_config.json", "model/adapter_config.json", "model/README.md")
    files = {name: manifest.write_file(tmp_path / name, b"{}") for name in names}
    manifest.write(tmp_path, files)
    assert [*manifest.read(tmp_path)] == ["config.json"]


def test_a_manifest_of_a_later_version_is_not_guessed_at(folder: Path) -> None:
    file = folder / manifest.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 2}))
    assert manifest.verify(folder) == "has a manifest of version 2; this grpo reads version 1"


def test_a_file_that_cannot_be_opened_is_damage(folder: Path) -> None:
    file = folder / "training" / "shards" / "a"
    file.unlink()
    file.symlink_to(file)
    assert "training/shards/a: Too many levels of symbolic links" in (manifest.verify(folder) or "")


def test_a_device_is_no_file_of_a_checkpoint(folder: Path) -> None:
    """It could be read without end."""
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    entries = manifest.read(folder) | {"config.json": Entry(0, "")}
    assert manifest.wrong_size(folder, entries) == "config.json: is not a regular file"


def test_an_evaluation_reads_only_the_files_of_the_model(folder: Path) -> None:
    (folder / "training/shards/a").write_bytes(b"damaged123")
    assert manifest.verify(folder) is not None
    assert manifest.verify(folder, model_only=True) is None
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(UserError, match=r"is damaged \(config.json: its contents have changed"):
        manifest.check(folder, model_only=True)


def test_what_is_hashed_is_what_is_in_the_file(tmp_path: Path) -> None:
    tensor = torch.arange(100_000)
    with (tmp_path / "a").open("wb") as file:
        stream = Hashing(file)
        stream.write(b"before")
        torch.save(tensor, stream)
        stream.write(memoryview(tensor.numpy()))
        stream.flush()
    content = (tmp_path / "a").read_bytes()
    assert stream.entry == Entry(len(content), hashlib.sha256(content).hexdigest())
    assert stream.tell() == len(content)


def test_a_full_disk_is_remembered_by_what_writes_to_it() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        stream = Hashing(file)
        with pytest.raises((OSError, RuntimeError)):
            torch.save(torch.arange(1000), stream)
    assert stream.error.errno == errno.ENOSPC


def test_a_reason_is_one_line_with_what_helps(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = manifest.reason(full, tmp_path, 3_400_000_000)
    assert said.startswith(f"No space left on device ({tmp_path}: ")
    assert said.endswith(" free, about 3.4 GB needed)")
    gone = tmp_path / "gone"
    assert manifest.reason(full, gone, 5).endswith(f"({gone}: about 5 bytes needed)")
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert "about 5 bytes needed" in manifest.reason(quota, tmp_path, 5)
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/x/y")
    assert manifest.reason(missing, tmp_path, 5) == "No such file or directory: /x/y"
    assert manifest.reason(ValueError("a\nb"), tmp_path, 5) == "ValueError: a"
