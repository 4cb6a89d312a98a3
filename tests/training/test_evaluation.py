"""Evaluation on several sets of held-out rows."""

from pathlib import Path
from typing import Any

import pytest

from grpo_cli.errors import UserError
from grpo_cli.evaluation import knobs
from grpo_cli.training import prepare
from tests.data.test_files import write
from tests.tables import table
from tests.training.test_train import evaluator, metrics, recipe, trained

SETS: dict[str, Any] = {
    "dataset__eval": None,
    "reward": {
        "evens": {"function": "tests.training.test_train:evens"},
        "length": {"weight": 0.5, "args": {"target": 3}},
    },
    "eval__every": 1,
    "eval__num_samples": 2,
    "eval__sampling": "training",
    "loss__beta": 0.05,
    "steps": 2,
}


def with_sets(folder: Path, **changes: Any) -> dict[str, Any]:
    """Changes for a run with two held-out sets, each with rewards of its own."""
    for name in ("easy", "hard"):
        row = {"question": f"{name}=", "answer": "1"}
        write(folder / f"{name}.jsonl", row, row)
    sets = {
        "easy": {"data": str(folder / "easy.jsonl"), "rewards": ["evens"]},
        "hard": {"data": str(folder / "hard.jsonl"), "limit": 1, "prompt": "{answer}+"},
    }
    return {**SETS, "dataset__held_out": sets, **changes}


@pytest.mark.runs
def test_metrics_of_held_out_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = trained(
        tmp_path, **with_sets(tmp_path, eval__best="hard/reward", generation__temperature=0.6)
    )
    temperatures = [task.sampling.temperature for task in evaluator(live).tasks]
    assert temperatures == [0.6, 0.6], "as in training"
    last = metrics(live)[-1]
    assert last["eval/easy/n"] == 2
    assert last["eval/hard/n"] == 1
    assert "eval/easy/rewards/length/mean" not in last
    assert "eval/hard/rewards/length/mean" in last
    rewards = [last[f"eval/{name}/reward"] for name in ("easy", "hard")]
    assert last["eval/reward"] == pytest.approx(sum(rewards) / 2)
    # `evens` is a share of tokens.
    assert "held-out reward before training" in (out := capsys.readouterr().out)
    assert "held-out accuracy" not in out
    assert 0 < last["eval/graded"] <= 1


@pytest.mark.runs
def test_grpo_eval_evaluates_every_held_out_set(tmp_path: Path) -> None:
    prepared = prepare.for_evaluation(recipe(tmp_path, **with_sets(tmp_path)))
    assert list(prepared.held_out) == ["easy", "hard"]
    assert [*prepared.held_out["easy"].scorer.rewards] == ["evens"]
    report = knobs.settings(prepared.recipe)
    assert list(report["dataset"]["held_out"]) == ["easy", "hard"]
    other = recipe(tmp_path, **with_sets(tmp_path, generation__temperature=0.5))
    assert knobs.settings(other)["settings_hash"] != report["settings_hash"]
    prepared.scorer.executor.close()


@table(
    "changes, expected",
    [
        ({"dataset__eval": "x.jsonl"}, "already; set dataset.eval=null."),
        (
            {"dataset__held_out": {"a": {"data": "x", "rewards": ["even"]}}},
            "dataset.held_out.a.rewards: 'even' is none of the recipe's rewards, evens, length. "
            "Did you mean evens?",
        ),
        (
            {"dataset__held_out": {"a": {"data": "x", "rewards": ["evens"], "accuracy": "length"}}},
            "dataset.held_out.a.accuracy = 'length': must be one of its rewards, evens.",
        ),
    ],
)
def test_mistakes(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], expected: str
) -> None:
    folder = tmp_path_factory.mktemp("sets")
    with pytest.raises(UserError) as error:
        recipe(folder, **with_sets(folder, **changes))
    assert expected in str(error.value)
