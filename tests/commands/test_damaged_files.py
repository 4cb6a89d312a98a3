"""Damaged files of a run and of a user: each command that reads one names it in a sentence."""

import bdb
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from grpo_cli import cli
from grpo_cli.checkpoints.paths import remove
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError
from grpo_cli.evaluation import journal
from tests.conftest import Grpo
from tests.report_runs import write_run

KINDS: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "cut": lambda path: path.write_text('{"a": [1, \n'),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "not UTF-8": lambda path: path.write_bytes(b"caf\xe9\n"),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "nested": lambda path: path.write_text("[" * 2000 + "\n"),
    "10 MB": lambda path: path.write_text("x" * 10_000_000 + "\n"),
    "aliases": lambda path: path.write_text("a: &a [1]\nb: [*a, *a]\n"),
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
}
READ = ("metrics.jsonl", "summary.json", "recipe.yaml", "completions/step-10.parquet")
CASES = (
    *(("report run --output=r.html", f"run/{name}") for name in READ),
    ("show run --step=10", "run/completions/step-10.parquet"),
    ("show run/completions/step-10.parquet", "run/completions/step-10.parquet"),
    ("explain my.yaml steps", "my.yaml"),
    ("explain my.yaml loss=own steps", "loss/own.yaml"),
    ("score reward=exact_match input=c.jsonl", "c.jsonl"),
    ("score reward=exact_match input=c.csv", "c.csv"),
    ("eval compare run run", "run/eval.json"),
)
SOUND = (("empty", "metrics.jsonl"), ("10 MB", "c.csv"))  # nothing is done yet; a long header


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_run(folder / "run")
    (folder / "run" / "eval.json").write_text('{"benchmarks": {}}')
    (folder / "my.yaml").write_text("defaults: [arithmetic_tiny, _self_]\n")
    (folder / "loss").mkdir()
    (folder / "loss" / "own.yaml").write_text("policy: clipped\n")
    (folder / "c.jsonl").write_text('{"completion": "4", "answer": "4"}\n')
    (folder / "c.csv").write_text("completion,answer\n4,4\n")
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("words", "name"), CASES)
def test_a_damaged_file_is_named(
    words: str, name: str, kind: str, grpo: Grpo, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = world / name
    if (kind, path.name) in SOUND:
        return
    monkeypatch.chdir(world)
    sound = path.rename(world / "sound")
    KINDS[kind](path)
    try:
        code, _, err = grpo(*words.split())
    finally:
        remove(path)
        sound.rename(path)
    assert (code, "internal error" in err) == (2, False), err
    assert path.name in err
    assert err.startswith("grpo: ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_journal_is_named_or_left_out(kind: str, tmp_path: Path) -> None:
    (tmp_path / journal.FOLDER).mkdir()
    KINDS[kind](tmp_path / journal.FOLDER / "rank-0.jsonl")
    is_refused = kind in ("a folder", "a loop", "a pipe")
    with pytest.raises(UserError, match=r"rank-0\.jsonl: ") if is_refused else nullcontext():
        assert journal.Journal(tmp_path, Workers("cpu"), "key").found == 0


def test_a_pipe_in_a_model_folder_is_named(grpo: Grpo, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "tokenizer.json")
    for words in (f"export {tmp_path} out", f"eval {tmp_path}"):
        code, _, err = grpo(*words.split())
        assert (code, "tokenizer.json: cannot be read: it is not a plain file" in err) == (2, True)


def test_an_unexpected_error_is_a_line_to_report(
    grpo: Grpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: list[str]) -> None:
        raise bdb.BdbQuit if argv else ValueError("no\x1b[31m red")

    monkeypatch.setitem(cli.COMMANDS, "rewards", fail)
    with pytest.raises(bdb.BdbQuit):  # `q` in a debugger ends it
        grpo("rewards", "q")
    code, _, err = grpo("rewards")
    assert (code, err.count("\n")) == (1, 1)
    assert r"grpo: internal error: ValueError: no\x1b[31m red (" in err
    assert "test_damaged_files.py:" in err
    monkeypatch.setenv("GRPO_DEBUG", "1")
    with pytest.raises(ValueError, match="red"):
        grpo("rewards")
