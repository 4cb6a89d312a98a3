"""The panels of `grpo watch`: what fits, and that a model's text drives no terminal."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from grpo_cli.reporting.live import figures, panels
from grpo_cli.reporting.live.following import Followed, best_and_worst
from grpo_cli.reporting.live.panels import number
from grpo_cli.reporting.run_folder import RunFolder
from tests.runs_on_disk import write_completions, write_run
from tests.tables import table

CONSOLE = Console(width=80)


def followed(folder: Path) -> Followed:
    run = Followed(RunFolder(folder))
    run.poll()
    return run


@pytest.mark.parametrize("width", [1, 60, 150])
def test_no_line_is_wider_than_its_panel(tmp_path: Path, width: int) -> None:
    run = followed(write_run(tmp_path))
    health = figures.health(run)
    for panel in (
        panels.header(run, health, width),
        panels.curves(run, width),
        panels.stages(run, width),
        panels.parts(run, width),
    ):
        assert max(line.cell_len for line in panel.split("\n", allow_blank=True)) <= width


def test_alarms_the_last_one_first(tmp_path: Path) -> None:
    run = followed(write_run(tmp_path))
    assert [line.plain for line in panels.alarms(run)] == [
        "! 2 alarms, the newest in step 90: entropy fell to 0.90",
        "! step 30: entropy fell to 0.30",
    ]
    run.alarms = [
        {"step": 1, "kind": "alarm", "message": "step 1: a\nb\x1b[2J"},
        {"step": 2, "kind": "stop", "message": "no alarm"},
    ]
    assert panels.alarms(run)[0].plain == "! 1 alarm in step 1: a b\\x1b[2J"


def test_a_run_of_which_nothing_is_known(tmp_path: Path) -> None:
    """Its files lack most keys."""
    (tmp_path / "recipe.yaml").write_text("seed: 1\n", encoding="utf-8")
    lines = [line.plain for line in panels.view(followed(tmp_path), CONSOLE)]
    assert lines[1] == "● unknown  has no status.json: may run or not"
    assert lines[2] == "step 0"
    assert lines[-3] == "memory not recorded · no checkpoint yet"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": null}\n', encoding="utf-8")
    assert panels.view(followed(tmp_path), CONSOLE)[2].plain == "step 1"


HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J[bold]not markup[/bold] \r\x9b31m \u202egnp.exe\u2028 漢字かな交じり文"
)


def test_a_completion_cannot_drive_the_terminal(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": HOSTILE}]}]
    write_completions(tmp_path, 1, [HOSTILE, "[/]"], [1.0, 0.0], prompt)
    sample = best_and_worst(tmp_path / "completions" / "step-1.parquet")[0]
    shown = panels.completion(sample)
    text = "\n".join(line.plain for line in shown)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028]", text)
    assert "\\x1b]0;owned\\x07\\x1b[2J[bold]not markup[/bold] \\x0d\\x9b31m \\u202egnp.exe" in text
    assert "漢字かな交じり文" in text
    assert "<image>" in text
    assert not any(span.style == "bold" and "not markup" in line.plain[span.start : span.end]
                   for line in shown for span in line.spans)  # fmt: skip


@table(
    ("value", "said"),
    [
        (0, "0"), (0.5, "0.500"), (-0.25, "-0.250"), (12.3456, "12.35"), (1234.5, "1234"),
        (123456.0, "1.2e+05"), (0.00012, "1.2e-04"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_numbers(value: float, said: str) -> None:
    assert number(value) == said
