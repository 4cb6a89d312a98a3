"""`grpo watch`: the block of text, the screen and its keys, and a run that is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli import cli
from grpo_cli.commands.watch_screen import Help, WatchApp
from grpo_cli.reporting.live import following
from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.reporter import completion_row, write_parquet
from grpo_cli.reporting.run_folder import RunFolder
from tests import programs
from tests.conftest import make_group
from tests.episodes import make_episode
from tests.pictures import image_groups, write_groups
from tests.runs_on_disk import NOW, write_completions, write_run
from tests.tables import table

# GRPO_WRITE_SNAPSHOTS=1 writes them anew; those of a screen beside a run differ each time.
SNAPSHOTS = Path(__file__).parent / "snapshots"
TEXTS = ["The answer is 2.", "It is\nthree.", "漢字 かな", "2"]


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of another node, whose status is half a second old."""
    clock = SimpleNamespace(time=lambda: NOW + 0.5, monotonic=lambda: 100.0)
    monkeypatch.setattr(following, "time", clock)
    monkeypatch.chdir(tmp_path)
    folder = write_run(Path("outputs/tiny"))
    (folder / ".lock").write_text("process 4242 on n7, since 2027-01-15 08:00:00\n")
    write_completions(folder, 100, TEXTS, [1.0, 0.0, 0.1, 0.9])
    write_completions(folder, 120, TEXTS, [0.9, 0.0, 0.1, 1.0])
    return folder


def keep(name: str, screen: str) -> None:
    """Keeps what is shown, for people, if it is asked for."""
    if os.environ.get("GRPO_WRITE_SNAPSHOTS"):
        (SNAPSHOTS / f"{name}.txt").write_text(screen, encoding="utf-8")


def block(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str, width: int = 80
) -> tuple[int, str, str]:
    monkeypatch.setenv("COLUMNS", str(width))
    code = cli.run_command(["watch", *words])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.parametrize("width", [80, 200])
def test_the_block_of_text(
    run_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    code, out, err = block(capfd, monkeypatch, str(run_folder), width=width)
    assert (code, err) == (0, "")
    keep(f"block-{width}", out)
    assert out == (SNAPSHOTS / f"block-{width}.txt").read_text(encoding="utf-8")
    assert not any(ord(c) < 32 for c in out.replace("\n", ""))


@table(
    ("words", "said"),
    [
        ([], "Shows a run that goes on"),
        (["gone"], "RUN = gone: there is no such folder."),
        (["empty"], "RUN = empty: this is no folder of a run"),
        (["empty", "--every=0"], "--every = 0.0: must be >= 0.1."),
        (["--once"], "grpo watch: give one run, such as outputs/NAME; got nothing."),
        (["a", "b"], "got a b."),
        (["empty", "--evry=2"], "there is no such option"),
    ],
)
def test_mistakes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir(exist_ok=True)
    code, out, err = block(capfd, monkeypatch, *words)
    assert said in (err if words else out)
    assert code == (2 if words else 0)


@pytest.mark.programs
def test_the_verb_imports_nothing_that_takes_long() -> None:
    code = (
        "import sys; from grpo_cli import cli; from grpo_cli.commands import watch, watch_screen; "
        "from grpo_cli.reporting.live import panels; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    done = programs.run(programs.alone("-c", code))
    assert done.stdout == "[]\n", done.stderr


def driven(
    folder: Path, check: Callable[[WatchApp, Any], Any], size: tuple[int, int] = (80, 24)
) -> None:
    """Runs the screen without a terminal, and a test on it."""

    async def main() -> None:
        app = WatchApp(Followed(RunFolder(folder)), every=60.0)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await check(app, pilot)
        assert app.return_value is None, "it ended with an error"

    asyncio.run(main())


def shown(app: WatchApp, panel: str) -> tuple[str, str]:
    """Returns the title of a panel and the completion in it."""
    lines = app.panels[panel].shown.content.renderables  # type: ignore[union-attr]
    text = next(line.plain for line in lines if line.plain.startswith("assistant"))
    return str(app.panels[panel].border_title), text.removeprefix("assistant: ")


def test_keys(run_folder: Path) -> None:
    async def check(app: WatchApp, pilot: Any) -> None:
        assert shown(app, "good") == ("good: 1 of 2, step 120", "2")
        assert (app.panels["good"].display, app.panels["bad"].display) == (True, False)
        await pilot.press("n")
        assert shown(app, "good") == ("good: 2 of 2, step 120 (kept)", "The answer is 2.")
        await pilot.press("b", "right", "p")
        assert shown(app, "bad") == ("bad: 1 of 2, step 120 (kept)", "It is\nthree.")
        assert (app.panels["good"].display, app.panels["bad"].display) == (False, True)
        await pilot.press("a", "n", "n")
        assert shown(app, "bad") == ("all: 3 of 4, step 120 (kept)", "漢字 かな")
        await pilot.press("left_square_bracket")
        await pilot.pause()
        assert shown(app, "bad") == ("all: 1 of 4, step 100 (kept)", "The answer is 2.")
        await pilot.press("g", "l")
        await pilot.pause()
        assert shown(app, "good") == ("good: 1 of 2, step 120", "2")
        await pilot.press("question_mark")
        assert isinstance(app.screen, Help)
        await pilot.press("x")
        assert not isinstance(app.screen, Help)
        await pilot.press("q")

    driven(run_folder, check)


def test_a_long_completion_is_scrolled(run_folder: Path) -> None:
    write_completions(run_folder, 120, ["line\n" * 100, "short"], [1.0, 0.0])

    async def check(app: WatchApp, pilot: Any) -> None:
        panel = app.panels["good"]
        assert panel.max_scroll_y > 50
        await pilot.press("down", "down", "pagedown")
        await pilot.pause()
        assert panel.scroll_y == 12
        assert app.pager.kept == 120, "what is read stays"
        await pilot.press("end")
        await pilot.pause()
        assert panel.scroll_y == panel.max_scroll_y
        await pilot.press("home")
        await pilot.pause()
        assert panel.scroll_y == 0

    driven(run_folder, check)


def test_an_episode_is_shown_turn_by_turn_and_images_as_their_placeholder(
    run_folder: Path,
) -> None:
    group = make_group(0, [make_episode((0.5, 1.0))])
    write_parquet(run_folder / "completions" / "step-120.parquet", [completion_row(120, group, 0)])

    async def turns(app: WatchApp, pilot: Any) -> None:
        lines = [line.plain for line in app.panels["good"].shown.content.renderables]  # type: ignore[union-attr]
        assert "  reward of the turn: 0.5" in lines
        assert "assistant, turn 2: It is 42." in lines
        assert lines[-1] == "turns of the model: 2; tokens: 4 sampled, 2 of replies"

    driven(run_folder, turns)
    write_groups(run_folder / "completions" / "step-121.parquet", image_groups())

    async def images(app: WatchApp, pilot: Any) -> None:
        lines = [line.plain for line in app.panels["good"].shown.content.renderables]  # type: ignore[union-attr]
        assert "<image>" in lines[1]

    driven(run_folder, images)


def test_the_layout_follows_the_size(run_folder: Path) -> None:
    async def check(app: WatchApp, pilot: Any) -> None:
        assert app.curves.size.height == 3
        await pilot.resize_terminal(200, 50)
        await pilot.pause()
        assert app.panels["good"].display
        assert app.panels["bad"].display
        assert app.panels["bad"].size.width >= 98
        assert app.curves.size.height == 6
        assert app.parts.display
        await pilot.resize_terminal(20, 5)
        await pilot.pause()

    driven(run_folder, check)


def test_news_are_shown_and_an_error_ends_the_screen(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(app: WatchApp, pilot: Any) -> None:
        with (run_folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 121, "reward": 0.25, "step_time": 2.0}\n')
        write_completions(run_folder, 121, ["new", "old"], [1.0, 0.0])
        await app.look()
        assert "step 121 of 400" in app.top.content.plain  # type: ignore[union-attr]
        assert shown(app, "good") == ("good: 1 of 1, step 121", "new")
        shutil.rmtree(run_folder)
        await app.look()
        assert "step 0" in app.top.content.plain  # type: ignore[union-attr]

    driven(run_folder, check)

    async def fails(app: WatchApp, pilot: Any) -> None:
        def broken() -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(app.followed, "poll", broken)
        await app.look()
        await pilot.pause()
        assert isinstance(app.return_value, ValueError)
        app._return_value = None

    driven(run_folder, fails)


# In tmux, beside a run.


class Tmux:
    """A terminal of a given size, whose screen is read as text."""

    def __init__(self, socket: str, size: tuple[int, int], folder: Path, command: str) -> None:
        self.base = ["tmux", "-L", socket, "-f", "/dev/null"]
        self.name = f"{size[0]}x{size[1]}"
        shape = ["-x", str(size[0]), "-y", str(size[1])]
        self(["new-session", "-d", "-s", self.name, *shape, "-c", str(folder), command])

    def __call__(self, words: list[str]) -> str:
        variables = programs.environment()
        for name in ("COLUMNS", "LINES"):  # of pytest's terminal, which xdist hands on
            variables.pop(name, None)
        done = subprocess.run(
            [*self.base, *words], capture_output=True, text=True, env=variables, check=True
        )
        return done.stdout

    def keys(self, *names: str) -> None:
        self(["send-keys", "-t", self.name, *names])

    def screen(self) -> str:
        return self(["capture-pane", "-p", "-t", self.name])

    def wait_for(self, *texts: str) -> str:
        """Returns the screen once it shows all texts."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            found = self.screen()
            if all(text in found for text in texts):
                return found
            time.sleep(0.2)
        raise AssertionError(f"no {texts} in:\n{self.screen()}")


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run that would take long."""
    folder = tmp_path / "outputs" / "tiny"
    words = [
        "-m", "grpo_cli", "train", "steps=5000", "model.build.warmup_steps=0",
        "dataset.train_limit=64", "dataset.eval_limit=8", "eval.every=5", "prompts_per_step=16",
        "checkpoint.every=20", "log.completions_every=5", f"output_dir={folder}",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            programs.alone(*words), stdout=log, stderr=log, cwd=programs.ROOT,
            env=programs.environment(),
        )  # fmt: skip
    yield process, folder
    process.kill()
    process.wait()


@pytest.mark.programs
@pytest.mark.skipif(
    shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed"
)
def test_a_run_that_goes_on_and_is_killed(
    training: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    process, folder = training
    while not (folder / "status.json").is_file():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    socket = f"grpo-{os.getpid()}"
    command = " ".join(programs.alone("-m", "grpo_cli", "watch", "outputs/tiny"))
    small = Tmux(socket, (80, 24), tmp_path, command)
    large = Tmux(socket, (200, 50), tmp_path, command)
    try:
        keep("tmux-80x24-starting", small.wait_for("outputs/tiny", "●"))
        seen = small.wait_for("● training", "of 5,000", "left", "generate", "good: 1 of")
        assert len(seen.rstrip("\n").split("\n")) == 24
        assert max(map(len, seen.split("\n"))) <= 80
        keep("tmux-80x24-training", seen)
        seen = large.wait_for("● ", "held-out", "checkpoint", "good: 1 of", "bad: 1 of")
        assert max(map(len, seen.split("\n"))) > 150
        keep("tmux-200x50-training", seen)
        small.keys("b")
        small.wait_for("bad: 1 of")
        process.kill()
        process.wait()
        for terminal in (small, large):
            seen = terminal.wait_for("● dead  its process was killed: last in step")
            keep(f"tmux-{terminal.name}-killed", seen)
        small.keys("q")
        until = time.monotonic() + 30
        while small.name in large(["list-sessions"]):
            assert time.monotonic() < until, small.screen()
            time.sleep(0.2)
    finally:
        subprocess.run([*small.base, "kill-server"], check=False)
