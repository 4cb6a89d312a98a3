"""What of the data set a run trains on and for how long: epochs, rows split off."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.errors import UserError
from grpo_cli.models.loading import LoadedModel
from grpo_cli.training import inputs, loop, prepare
from grpo_cli.training.run import Run
from tests.data.test_files import write
from tests.training.test_interrupted import leaving_at
from tests.training.test_train import built, evaluator, metrics, recipe, timeless, trained, weights

pytestmark = pytest.mark.runs


def trained_in_parts(folder: Path, call: int, **changes: Any) -> Run:
    """A run that is left when it asks for the `call`-th time, and resumed."""
    left = built(folder, **changes)
    leaving_at(left, call)
    loop.train(left)
    left.close()
    assert 0 < left.state.step < left.recipe.steps
    return trained(folder, resume="auto", **changes)


def test_epochs_become_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(tmp_path / name) for name in ("steps", "epochs", "parts")]
    by_steps = trained(tmp_path, output_dir=folders[0], steps=5)
    capsys.readouterr()
    by_epochs = trained(tmp_path, output_dir=folders[1], epochs=1.0)  # 25 prompts, 6 a step
    assert "25 prompts (4.167 steps an epoch), 5 steps," in capsys.readouterr().out
    in_parts = trained_in_parts(tmp_path, 40, output_dir=folders[2], epochs=1.0)
    assert by_epochs.recipe.steps == 5
    assert [m["epoch"] for m in metrics(by_epochs)] == [n * 6 / 25 for n in range(1, 6)]
    for run in (by_epochs, in_parts):
        assert torch.equal(weights(run), weights(by_steps))
        assert timeless(run) == timeless(by_steps)
    again = recipe(tmp_path, output_dir=folders[1], epochs=1.0, resume="auto")
    assert "finished after 5 steps, and nothing is left to do; a larger epochs=N continues it" in (
        prepare.finished(again) or ""
    )
    more = trained(tmp_path, output_dir=folders[1], epochs=1.5, resume="auto")
    assert more.state.step == 7


def test_split_off_rows(tmp_path: Path) -> None:
    split = {"dataset__eval": None, "dataset__test_split_size": 0.2, "steps": 2}
    live = trained(tmp_path, **split)
    held_out = {p.row for p in evaluator(live).tasks[0].prompts}
    assert len(held_out) == 5
    assert held_out | {p.row for p in live.queue.stream.prompts} == set(range(25))
    assert len(live.queue.stream.prompts) == 20
    assert "eval/accuracy" in metrics(live)[-1]
    # `grpo eval` of the run finds the same rows.
    prepared = prepare.for_evaluation(recipe(tmp_path, **split, seed=7))
    model, tokenizer = live.policy.model, live.policy.tokenizer
    loaded = LoadedModel(model, tokenizer, None, tokenizer)
    (task,) = inputs.make_tasks(prepared, loaded, print)
    assert {p.row for p in task.prompts} == held_out
    assert task.name == "rows"


def length_of_tests(completions: list[str], tests: list[str | None], **_: Any) -> list[float]:
    """A reward of data set `b` only: it would fail where there are no tests."""
    return [float(len(t)) for t in tests]  # type: ignore[arg-type]


def mixture(folder: Path, **changes: Any) -> dict[str, Any]:
    """Changes for a run on two data sets, of which each has a reward of its own."""
    rows = {
        "a": [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(9)],
        "b": [{"text": f"write {n}", "tests": "abc"[: n % 4]} for n in range(4)],
    }
    for name, found in rows.items():
        write(folder / f"{name}.jsonl", *found)
    parts = {
        "a": {"data": str(folder / "a.jsonl"), "weight": 2.0},
        "b": {"data": str(folder / "b.jsonl"), "prompt": "{text}:", "solution": "{tests}"},
    }
    return {
        "dataset__train": None,
        "dataset__mixture": parts,
        "dataset__eval": None,
        "dataset__held_out": {name: {"data": part["data"]} for name, part in parts.items()},
        "dataset__held_out__b__prompt": "{text}:",
        "reward": {
            "evens": {"function": "tests.training.test_train:evens"},
            "tested": {"function": "tests.training.test_data:length_of_tests", "datasets": ["b"]},
        },
        "model__build__warmup_steps": 2,
        **changes,
    }


def test_mixture_with_rewards(tmp_path: Path) -> None:
    outputs = [str(tmp_path / name) for name in ("straight", "parts")]
    live = trained(tmp_path, output_dir=outputs[0], **mixture(tmp_path))
    for step in metrics(live):
        counts = {name: step.get(f"mixture/{name}/prompts", 0) for name in "ab"}
        assert sum(counts.values()) == 6
        rewards = [counts[name] * step[f"mixture/{name}/reward"] for name in "ab" if counts[name]]
        assert step["reward"] == pytest.approx(sum(rewards) / 6)
    assert sum(step.get("mixture/b/prompts", 0) for step in metrics(live)) > 0
    assert metrics(live)[0]["epoch"] == 6 / 13
    judges = [[*task.scorer.rewards] for task in evaluator(live).tasks]
    assert judges == [["evens"], ["evens", "tested"]], "as in training"
    columns = {p.columns["dataset"]: p for p in live.queue.stream.prompts}
    assert columns["b"].columns["answer"] is None
    assert str(columns["b"].text).startswith("write ")
    in_parts = trained_in_parts(tmp_path, 60, output_dir=outputs[1], **mixture(tmp_path))
    assert torch.equal(weights(in_parts), weights(live))
    assert timeless(in_parts) == timeless(live)
    again = trained(tmp_path, output_dir=str(tmp_path / "file"), **mixture(tmp_path, epochs=1.0))
    assert again.recipe.steps == 3, "13 prompts, 6 a step"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dataset__train": "x.jsonl"}, "dataset.train: is not read with dataset.mixture, whose"),
        ({"reward__tested__datasets": []}, "lacks the column 'tests' (reward.tested)"),
        ({"dataset__mixture__b__solution": "{tset}"}, "the column 'tset' (dataset.mixture.b.s"),
    ],
)
def test_mistakes_about_a_mixture(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        prepare.for_training(recipe(tmp_path, **{**mixture(tmp_path), **changes}))
    assert expected in str(error.value)


def test_a_streamed_run_is_resumed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.data.streaming.BLOCK_ROWS", 7)
    stream = {
        "dataset__streaming": True,
        "dataset__solution": None,
        "model__build__warmup_steps": 0,
        "generation__dynamic_sampling": True,  # groups are left over
        "steps": 5,
    }
    outputs = [str(tmp_path / name) for name in ("straight", "parts")]
    live = trained(tmp_path, output_dir=outputs[0], **stream)
    assert metrics(live)[-1]["epoch"] >= 1
    assert not live.queue.lengths
    in_parts = trained_in_parts(tmp_path, 60, output_dir=outputs[1], **stream)
    assert torch.equal(weights(in_parts), weights(live))
    assert timeless(in_parts) == timeless(live)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epochs": 1.0}, "epochs = 1: nobody knows the length of a stream before its end; set"),
        ({}, "model.build.warmup_steps: needs all rows at the start"),
    ],
)
def test_mistakes_about_a_stream(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        recipe(tmp_path, **{"dataset__streaming": True, **changes})
    assert expected in str(error.value)
