"""Training in float16: scaled losses, skipped optimizer steps, and what ends the run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from grpo_cli import cli
from grpo_cli.checkpoints import paths
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.training import loop
from tests.training.test_train import built, metrics, one_update, trained, weights
from tests.training.test_train import test_stop_and_resume_is_the_same_run as stop_and_resume

pytestmark = pytest.mark.runs


def test_gradients_match_float32(tmp_path: Path) -> None:
    plain, figures = one_update(built(tmp_path, output_dir=str(tmp_path / "a")))
    half, of_half = one_update(
        built(tmp_path, output_dir=str(tmp_path / "b"), mixed_precision="fp16")
    )
    assert {g.dtype for g in half} == {torch.float32}
    one, other = (torch.cat([g.flatten() for g in found]) for found in (plain, half))
    assert 0 < (one - other).norm() < 0.02 * one.norm()
    assert of_half["grad_norm"] == pytest.approx(figures["grad_norm"], rel=0.02)
    assert of_half["loss_scale"] == 2.0**16
    assert of_half["skipped_updates"] == 0
    assert not {"loss_scale", "skipped_updates"} & figures.keys()


def test_overflowing_step_is_skipped(tmp_path: Path) -> None:
    live = built(tmp_path, mixed_precision="fp16", update__num_iterations=2, steps=1)
    live.policy.scaler.load_state_dict({**live.policy.scaler.state_dict(), "scale": 2.0**40})
    before = weights(live)
    loop.train(live)
    live.close()
    assert torch.equal(before, weights(live))
    (line,) = metrics(live)
    assert line["skipped_updates"] == 2
    assert line["loss_scale"] == live.policy.scaler.get_scale() == 2.0**38
    assert "grad_norm" not in line, "there is none"
    assert not live.policy.optimizer.state, "Adam has counted no step"


def test_gradients_that_overflow_without_a_scale_end_the_run(tmp_path: Path) -> None:
    live = built(tmp_path, mixed_precision="fp16", steps=40)
    live.policy.model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainingError, match=r"step 17: the loss is .* with a loss scale of 1 too"):
        loop.train(live)
    live.close()
    assert [m["skipped_updates"] for m in metrics(live)] == [1] * 16
    assert live.policy.scaler.get_scale() == 1


def test_resumed_run_keeps_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    initial = torch.amp.GradScaler.__init__

    def large(self: Any, *args: Any, **how: Any) -> None:
        initial(self, *args, init_scale=2.0**21, growth_interval=2, **how)  # some steps are skipped

    monkeypatch.setattr(torch.amp.GradScaler, "__init__", large)
    stop_and_resume(tmp_path, {"mixed_precision": "fp16", "update__minibatches": 2})
    lines = (tmp_path / "straight" / "metrics.jsonl").read_text("utf-8").splitlines()
    scales = [json.loads(line)["loss_scale"] for line in lines]
    assert scales[0] < 2.0**21, "an optimizer step was skipped"
    assert scales != sorted(scales, reverse=True), "and the scale has grown again"


def test_weights_of_16_bits_are_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model__dtype": "bfloat16", "optimizer__args": {"eps": 1e-4}}
    said = r"bfloat16: .*mixed_precision = fp16 .*model\.dtype=float32"
    with pytest.raises(UserError, match=said):
        built(tmp_path, mixed_precision="fp16", **changes)


def test_the_stored_type_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    first = trained(tmp_path, steps=1)
    model = AutoModelForCausalLM.from_pretrained(paths.checkpoint_path(first.folder, 1))
    model.bfloat16().save_pretrained(source)
    first.policy.tokenizer.save_pretrained(source)
    changes = {
        "model": {"path": str(source), "dtype": "auto"},
        "output_dir": str(tmp_path / "auto"),
    }
    live = trained(tmp_path, **changes, steps=1)
    assert live.policy.model.dtype == torch.bfloat16
    stored = yaml.safe_load((live.folder / "recipe.yaml").read_text("utf-8"))
    assert stored["model"]["dtype"] == "bfloat16"
    words = [f"recipe={live.folder / 'recipe.yaml'}", "model.dtype=auto", "resume=auto"]
    words.append(f"output_dir={live.folder}")
    assert cli.run_command(["train", *words]) == 0
    assert "the run is finished after 1 step," in capsys.readouterr().out
