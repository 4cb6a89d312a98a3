"""scripts/gpu: the pack for a machine with a GPU, and the program that checks grpo there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.programs import ROOT

sys.path.append(str(ROOT / "scripts" / "gpu"))

import check
import pack

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


def test_table_has_a_column_for_each_figure_and_a_line_for_each_error(tmp_path: Path) -> None:
    rows = [
        check.add(tmp_path, "speed", "a", "ok", "", 1.0, {"tokens/s": 12345.6, "GiB": 0.51234}),
        check.add(tmp_path, "speed", "b", "failed", "OutOfMemoryError: no", 1.0),
        check.add(tmp_path, "tests", "c", "ok", "", 1.0, {"passed": 1234}),
    ]
    assert check.table({"gpu": "H100", "cores": 16}, rows) == (
        "gpu H100, cores 16\n\n"
        "| speed | status | tokens/s | GiB |\n| --- | --- | --- | --- |\n"
        "| a | ok | 12,346 | 0.512 |\n| b | failed |  |  |\n\n- b: OutOfMemoryError: no\n\n"
        "| tests | status | passed |\n| --- | --- | --- |\n| c | ok | 1,234 |\n"
    )


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
