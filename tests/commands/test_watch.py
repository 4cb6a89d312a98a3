"""`grpo watch`: the block of text, and the view that follows a run."""

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from grpo_cli.commands import watch
from grpo_cli.reporting.live import following
from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.live.panels import view
from grpo_cli.reporting.run_folder import RunFolder
from tests import programs
from tests.conftest import Grpo
from tests.runs_on_disk import NOW, write_completions, write_run

# GRPO_WRITE_SNAPSHOTS=1 rewrites them.
SNAPSHOTS = Path(__file__).parent / "snapshots"
TEXTS = ["The answer is 2.", "It is\nthree.", "漢字 かな", "2"]


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of another node, whose status is half a second old."""
    clock = SimpleNamespace(time=lambda: NOW + 0.5)
    monkeypatch.setattr(following, "time", clock)
    monkeypatch.chdir(tmp_path)
    folder = write_run(Path("outputs/tiny"))
    write_completions(folder, 100, TEXTS, [1.0, 0.0, 0.1, 0.9])
    write_completions(folder, 120, TEXTS, [0.9, 0.0, 0.1, 1.0])
    return folder


@pytest.mark.parametrize("width", [80, 200])
def test_the_block_of_text(
    run_folder: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = grpo("watch", str(run_folder))
    assert (code, err) == (0, "")
    snapshot = SNAPSHOTS / f"block-{width}.txt"
    if os.environ.get("GRPO_WRITE_SNAPSHOTS"):
        snapshot.write_text(out, encoding="utf-8")
    assert out == snapshot.read_text(encoding="utf-8")
    assert not any(ord(c) < 32 for c in out.replace("\n", ""))


@pytest.mark.programs
def test_the_verb_imports_nothing_that_takes_long() -> None:
    code = (
        "import sys; from grpo_cli import cli; from grpo_cli.commands import watch; "
        "from grpo_cli.reporting.live import panels; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    done = programs.run(programs.alone("-c", code))
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("size", [(80, 24), (20, 5)])
def test_the_view_follows_the_run_until_ctrl_c(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt
        with (run_folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 121, "reward": 0.25, "step_time": 2.0}\n')
        write_completions(run_folder, 121, ["line\n" * 100, "old"], [1.0, 0.0])

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep))
    width, height = size
    terminal = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None
    )
    run = Followed(RunFolder(run_folder))
    watch.follow(run, terminal, 7.0)
    assert looks == [7.0, 7.0]
    lines = [line.plain for line in view(run, terminal, height)]
    assert len(lines) <= height
    written = terminal.file.getvalue()  # type: ignore[attr-defined]
    for said in ("step 121 of 400", "assistant: line", "assistant: old") if width > 20 else ():
        assert said in "\n".join(lines)
        assert said in written
