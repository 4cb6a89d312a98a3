"""Evaluation while training: on benchmarks, by a metric of one's own, with an early end."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.cli import run_command
from tests.data.test_files import write

TINY = (
    "device=cpu", "model.build.hidden_size=32", "model.build.intermediate_size=64",
    "model.build.num_layers=1", "model.build.warmup_steps=0", "prompts_per_step=2",
    "generation.num_generations=2", "generation.max_completion_tokens=4", "log.report=false",
    "checkpoint.every=100", "optimizer.learning_rate=0",  # so that nothing ever gets better
)  # fmt: skip
SUMS = [{"question": f"{i}+{i}=", "answer": str(2 * i), "kind": "ab"[i % 2]} for i in range(6)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write(Path(f"{name}.jsonl"), *SUMS)
    return tmp_path


def train(*words: str) -> int:
    own = [f"benchmark.{n}.data={n}.jsonl" for n in ("one", "two")]
    own += [f"benchmark.{n}.modes.cot.prompt='{{question}}'" for n in ("one", "two")]
    return run_command(["train", "recipe=arithmetic_tiny", "output_dir=run", *TINY, *own, *words])


def metrics() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.runs
def test_benchmarks_are_evaluated_by_name(folder: Path) -> None:
    words = ("benchmark.one.breakdown=[kind]", "eval.num_samples=2", "eval.best=two/maj@2")
    assert train("steps=2", "eval.every=1", *words) == 0
    first, last = metrics()
    assert {f"eval/{n}/{k}" for n in ("one", "two") for k in ("accuracy", "maj@2", "n")} <= {*last}
    assert last["eval/one/n"] == 6
    assert last["eval/one/kind/b/n"] == 3
    assert "eval/two/kind/b/n" not in last
    assert first["eval/one/accuracy"] == last["eval/one/accuracy"], "the policy is the same"
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["after"]["benchmarks"]["one/accuracy"] == last["eval/one/accuracy"]
    assert len(summary["after"]["interval_95"]) == 2


@pytest.mark.runs
def test_a_run_that_gets_no_better_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("steps=50", "eval.every=2", "eval.patience=2") == 0
    assert [m["step"] for m in metrics()] == [1, 2, 3, 4]
    out = capsys.readouterr().out
    assert "ended after step 4: no better eval/accuracy than" in out
    assert Path("run/checkpoints/step-4").is_dir()
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["steps"], summary["before"] is None) == (4, False)
    # It is over for those who go on, too.
    assert train("steps=50", "eval.every=2", "eval.patience=2", "resume=auto") == 0
    assert len(metrics()) == 4
    wanted = ("eval.best=mean_length", "stop.accuracy=1", "eval.at_start=false")
    assert train("steps=50", "eval.every=2", "overwrite=true", *wanted) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["stopped_by"], summary["steps"]) == ("stop.accuracy", 2)
    assert summary["before"] is None


@pytest.mark.smoke  # builds a run
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval.best=one/maj@4"], "eval.best = one/maj@4: there is no such number; there are"),
        (["eval.best=six/accuracy"], "eval.best = six/accuracy: six is no benchmark"),
        (["eval.best=one/kind/x/acc"], "the evaluation gives no such number; there are"),
        (["reward.exact_match=null"], "reward: at least one is needed to train"),
    ],
)
def test_mistakes(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("steps=1", *words) == 2
    assert message in capsys.readouterr().err
