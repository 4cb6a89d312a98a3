"""`grpo probe`: its words, what it prints and writes, and its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.data import stored_completions
from tests import programs
from tests.conftest import Grpo
from tests.data.test_files import write

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
# The smallest run that there is, and a reward that any model gets at times.
SMALL = (
    "recipe=arithmetic_tiny", "dataset.train=rows.jsonl", "dataset.eval=null", "steps=4",
    "prompts_per_step=4", "model.build.hidden_size=16", "model.build.intermediate_size=32",
    "model.build.num_layers=1",
    "model.build.warmup_steps=3", "generation.max_completion_tokens=6", "reward=[length]",
    "reward.length.args.target=3", "tracking=tensorboard", "eval.every=0",
)  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", *ROWS)


def written(folder: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "probe.json").read_text())
    return found


@pytest.mark.runs
def test_what_it_prints_and_writes(grpo: Grpo, rows: Path) -> None:
    code, out, err = grpo("probe", *SMALL, "dataset.train_limit=6", "samples=4")
    assert (code, err) == (0, ""), err
    folder = Path("outputs/probe/arithmetic_tiny")
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock", "completions.parquet", "probe.json",
    ]  # fmt: skip
    found = written(folder)
    assert (found["prompts"], found["samples"], found["completions"]) == (6, 4, 24)
    assert [*found["signal"]] == ["2", "4"]
    assert found["verdict"] in out.splitlines()
    for said in ("probe 6/6", "share of groups", "<- generation.num_gen", "length"):
        assert said in out
    code, out, _ = grpo("show", str(folder), "--number=2")
    assert code == 0
    assert "2 of 24 completions" in out
    code, out, err = grpo("score", "reward=exact_match", f"input={folder}")
    assert code == 0, err


@pytest.mark.runs
def test_exit_code_of_a_run_that_cannot_learn(grpo: Grpo, rows: Path) -> None:
    words = ("prompts=4", "samples=2", "reward.length.args.target=5000")
    code, out, err = grpo("probe", *SMALL, *words, "generation.temperature=0.0001")
    assert code == 3
    assert "The run cannot learn as it stands" in out
    found = written("outputs/probe/arithmetic_tiny")
    assert not found["can_learn"]
    assert found["findings"][0]["name"] == "identical"
    assert err.startswith("grpo: arithmetic_tiny: cannot learn as it stands (identical); what was")
    # The same command again: the same completions, whatever else was drawn in this process.
    grpo("probe", *SMALL, *words, "generation.temperature=0.0001")
    assert written("outputs/probe/arithmetic_tiny")["rates"] == found["rates"]


@pytest.mark.programs
def test_several_processes_find_what_one_finds(grpo: Grpo, rows: Path, tmp_path: Path) -> None:
    words = (*SMALL[:1], f"dataset.train={rows}", *SMALL[2:], "prompts=5", "samples=4")
    grpo("probe", *words)
    folder = f"output_dir={tmp_path / 'two'}"
    done = programs.run(
        programs.torchrun(2, "-m", "grpo_cli", "probe", *words, folder, "distributed=fsdp2")
    )
    assert done.returncode == 0, done.stderr
    one, two = written("outputs/probe/arithmetic_tiny"), written(tmp_path / "two")
    for key in ("rates", "signal", "lengths", "findings"):
        assert one[key] == two[key], key
    samples = stored_completions.load(tmp_path / "two" / "completions.parquet", {}, "input")
    assert len(samples) == 20
