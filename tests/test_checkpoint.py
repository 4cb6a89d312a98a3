import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from grpo_cli import checkpoint
from grpo_cli.folders import checkpoint_path, is_model, steps_saved


def save(folder: Path, step: int, model: PreTrainedModel, tokenizer: Tokenizer) -> Path:
    path = checkpoint_path(folder, step)
    checkpoint.save(path, model, tokenizer, {"step": step}, f"steps: {step}\n")
    return path


def empty(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_path(folder, step).mkdir(parents=True)


def test_a_checkpoint_gives_back_its_state(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    optimizer.step()
    state = {
        "run": {"step": 3, "best": None, "metrics": {"a": 0.5}},
        "optimizer": optimizer.state_dict(),
        "rng": [checkpoint.rng_state()],
    }
    path = checkpoint_path(tmp_path, 3)
    checkpoint.save(path, model, tokenizer, state, "steps: 3\n")
    found = checkpoint.load_state(path)
    assert found["run"] == state["run"]
    assert found["rng"][0]["python"] == state["rng"][0]["python"]
    moments = [s["exp_avg"] for s in found["optimizer"]["state"].values()]
    expected = [s["exp_avg"] for s in optimizer.state_dict()["state"].values()]
    assert len(moments) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(moments, expected, strict=True))
    assert (path / "training" / "recipe.yaml").read_text("utf-8") == "steps: 3\n"


def test_a_checkpoint_is_a_plain_model_folder(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    path = save(tmp_path, 3, model, tokenizer)
    assert path == tmp_path / "checkpoints" / "step-3"
    assert is_model(path)
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(loaded[k], v) for k, v in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(path)("1+1=") == tokenizer("1+1=")


@pytest.mark.parametrize("names", [[], ["config.json"], ["model.safetensors"]], ids=str)
def test_what_is_no_model_folder(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert not is_model(tmp_path)


def test_a_half_written_checkpoint_is_ignored_and_written_anew(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    empty(tmp_path, 2)
    partial = tmp_path / "checkpoints" / "step-4.tmp"
    partial.mkdir()
    (partial / "left-over").touch()
    assert steps_saved(tmp_path) == [2]
    path = save(tmp_path, 4, model, tokenizer)
    assert steps_saved(tmp_path) == [2, 4]
    assert not partial.exists()
    assert not (path / "left-over").exists()


def test_a_checkpoint_that_fails_half_way_leaves_the_old_ones(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    save(tmp_path, 2, model, tokenizer)
    for step in (2, 4):
        with pytest.raises(Exception, match="pickle"):
            checkpoint.save(checkpoint_path(tmp_path, step), model, tokenizer, {"f": lambda: 0}, "")
    assert steps_saved(tmp_path) == [2]
    assert checkpoint.load_state(checkpoint_path(tmp_path, 2)) == {"step": 2}


def test_the_same_step_again_replaces_its_checkpoint(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    path = save(tmp_path, 3, model, tokenizer)
    checkpoint.save(path, model, tokenizer, {"step": "again"}, "")
    assert checkpoint.load_state(path) == {"step": "again"}
    assert steps_saved(tmp_path) == [3]


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    assert steps_saved(tmp_path) == []
    empty(tmp_path, 100, 20, 3)
    (tmp_path / "checkpoints" / "step-best").mkdir()
    assert steps_saved(tmp_path) == [3, 20, 100]


@pytest.mark.parametrize(
    ("keep_last", "best", "kept"),
    [
        (2, None, [30, 100]),
        (1, None, [100]),
        (1, 20, [20, 100]),
        (2, 30, [30, 100]),
        (2, 7, [30, 100]),
        (9, None, [3, 20, 30, 100]),
    ],
)
def test_prune_keeps_the_newest_and_the_best(
    tmp_path: Path, keep_last: int, best: int | None, kept: list[int]
) -> None:
    empty(tmp_path, 3, 20, 30, 100)
    checkpoint.prune(tmp_path, keep_last, best)
    assert steps_saved(tmp_path) == kept


def test_random_streams_go_on_where_they_were_saved(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.normal()), torch.rand(1).item()]

    draw()  # half of a pair of normal numbers is now in each state
    torch.save(checkpoint.rng_state(), tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    draw()
    checkpoint.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected
