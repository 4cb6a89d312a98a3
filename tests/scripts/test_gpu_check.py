"""scripts/gpu: the pack for a machine with a GPU, and the program that checks grpo there."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests import programs
from tests.programs import ROOT

sys.path.append(str(ROOT / "scripts" / "gpu"))

import check
import pack
from cases import Setting

IMAGE = pack.read_image((ROOT / "scripts/gpu/image.txt").read_text("utf-8"))


def test_the_image_fulfils_what_it_has_of_our_requirements_and_lacks_some() -> None:
    dependencies = pack.tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = pack.lacking(dependencies["dependencies"], IMAGE)
    # omegaconf of hydra; antlr of both.
    assert {"hydra-core", "omegaconf", "antlr4-python3-runtime"} <= wanted.keys()
    assert not wanted.keys() & IMAGE.keys()


def test_a_version_of_the_image_that_we_do_not_admit_is_named() -> None:
    image = pack.read_image("torch==2.10.0  # too old\nnumpy\n")
    assert image == {"torch": "2.10.0", "numpy": None}
    assert pack.lacking(["numpy>=1", "hydra-core; python_version < '3.12'"], image) == {}
    with pytest.raises(SystemExit, match=r"the image has torch 2\.10\.0, and torch>=2\.11"):
        pack.lacking(["torch>=2.11"], image)


def test_table_has_a_column_for_each_figure_and_a_line_for_each_error() -> None:
    rows = [
        check.row("speed", "a", "ok", figures={"tokens/s": 12345.6, "GiB": 0.51234}),
        check.row("speed", "b", "failed", error="OutOfMemoryError: no"),
        check.row("tests", "c", "ok", figures={"passed": 1234}),
    ]
    assert check.table({"gpu": "H100", "cores": 16}, rows) == (
        "gpu H100, cores 16\n\n"
        "| speed | status | tokens/s | GiB |\n| --- | --- | --- | --- |\n"
        "| a | ok | 12,346 | 0.512 |\n| b | failed |  |  |\n\n- b: OutOfMemoryError: no\n\n"
        "| tests | status | passed |\n| --- | --- | --- |\n| c | ok | 1,234 |\n"
    )


class FakeWorker:
    """A worker of five cases: one is right, one kills it, one breaks it, one never ends."""

    cases: ClassVar = [["tests", n] for n in ("right", "dies", "breaks", "hangs", "late")]
    made = 0

    def __init__(self, setting: Setting) -> None:
        type(self).made += 1

    def answer(self, seconds: float) -> Any:
        return self.cases

    def run(self, number: int, seconds: float) -> Any:
        name = self.cases[number][1]
        if name == "dies":
            raise EOFError
        if name == "hangs":
            time.sleep(seconds)
            return None
        status = "failed" if name == "breaks" else "ok"
        return check.row("tests", name, status) | {"is_broken": name == "breaks"}

    def end(self, patience: float) -> int:
        return -6


def test_a_stage_goes_on_after_a_case_that_dies_breaks_or_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "Worker", FakeWorker)
    monkeypatch.setitem(check.STAGES, "tests", ("training", 0.1))
    checker = check.Checker(Setting(True, tmp_path, tmp_path))
    checker.stage("tests")
    rows = checker.rows
    statuses = [(r["case"], r["status"]) for r in rows]
    assert statuses == [
        ("right", "ok"), ("dies", "died"), ("breaks", "failed"), ("hangs", "cut off"),
        ("late", "not begun"),
    ]  # fmt: skip
    assert "ended with -6" in rows[1]["error"]
    assert FakeWorker.made == 3  # at first, and after two that were lost
    lines = (tmp_path / "results.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows


@pytest.mark.slow
def test_dry_run_passes_in_every_stage(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/gpu/check.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True,
        timeout=programs.PATIENCE,
        env=programs.environment(OUT=str(tmp_path), PYTHON=sys.executable),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "results.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["stage"] for row in rows} == check.STAGES.keys()
    assert {row["status"] for row in rows} == {"ok"}
    assert {f.name for f in tmp_path.iterdir()} == {"log", "results.jsonl", "table.md"}
