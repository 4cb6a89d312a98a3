"""The checkpoint to resume from is known to fit before a model is built."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.checkpoints import paths
from grpo_cli.config import saved_recipe
from grpo_cli.config.contradictions import contradictions
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.rows import Rows, select_rows
from grpo_cli.data.settings import Dataset
from grpo_cli.distributed.settings import Distributed
from grpo_cli.errors import UserError
from grpo_cli.models.settings import Adapter, Build, Model, Optimizer
from grpo_cli.scoring.scorer import Scorer
from grpo_cli.scoring.settings import Reward
from grpo_cli.training import build, prepare, scorers
from tests.training.test_train import recipe as small_recipe


def test_resume_takes_the_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):  # with nothing but what is read before a model is built
        training = paths.checkpoint_path(tmp_path / "run", step) / paths.TRAINING
        training.mkdir(parents=True)
        stored = saved_recipe.as_yaml(Recipe(model=Model(build=Build())))
        (training / "recipe.yaml").write_text(stored, encoding="utf-8")
        (training / "manifest.json").write_text("{}", encoding="utf-8")
    newest, other = paths.resumable(tmp_path / "run")
    monkeypatch.setattr(paths, "has_training_state", lambda path: path == newest)
    recipe = Recipe(output_dir=str(tmp_path / "run"), resume=str(tmp_path / "run"))
    assert prepare.find_resume(recipe, tmp_path / "run") == [newest, other], "if one is damaged"
    with pytest.raises(UserError, match="no checkpoint with a training state"):
        prepare.find_resume(Recipe(resume=str(tmp_path)), tmp_path / "run")


@pytest.mark.parametrize(
    ("dtype", "eps", "refused"),
    [("float16", 1e-8, True), ("float16", 1e-4, False), ("bfloat16", 1e-8, False)],
)
def test_eps_rounded_to_zero_is_refused(dtype: str, eps: float, refused: bool) -> None:
    recipe = Recipe(model=Model(dtype=dtype), optimizer=Optimizer(args={"eps": eps}))
    assert (float(torch.tensor(eps).to(getattr(torch, dtype))) == 0) == refused
    if not refused:
        prepare.check_dtype(recipe)
        return
    with pytest.raises(UserError, match="eps = 1e-08 of AdamW is 0 in it"):
        prepare.check_dtype(recipe)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float64"}, "names float64; give model.dtype as one of float32, bfloat16"),
        ({}, "names no data type; give"),
    ],
)
def test_stored_dtype_of_a_model(tmp_path: Path, config: dict[str, str], expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    (tmp_path / "model.safetensors").touch()
    recipe = Recipe(model=Model(path=str(tmp_path), dtype="auto"), dataset=Dataset(chat=False))
    with pytest.raises(UserError, match=expected):
        prepare.resolved(recipe)


def test_quantized_weights_are_not_trained_or_sharded() -> None:
    pytest.importorskip("peft")
    quantized = Model(path="some/model", quantization="nf4")
    with pytest.raises(UserError, match=r"nf4: quantized weights cannot be .*adapter=qlora"):
        prepare.check_adapter(Recipe(model=quantized))
    lora = Adapter(method="lora")
    prepare.check_adapter(Recipe(model=quantized, adapter=lora))
    pissa = Adapter(method="lora", args={"init_lora_weights": "pissa"})
    with pytest.raises(UserError, match=r"init_lora_weights = pissa: is made from the weights"):
        prepare.check_adapter(Recipe(model=quantized, adapter=pissa))
    for strategy, refused in (("ddp", False), ("fsdp2", True)):
        recipe = Recipe(model=quantized, adapter=lora, distributed=Distributed(strategy=strategy))
        found = [text for text in contradictions(recipe, ()) if "cannot be sharded" in text]
        assert bool(found) == refused


def test_an_adapter_that_vllm_cannot_apply(tmp_path: Path) -> None:
    recipe = Recipe(adapter=Adapter(method="lora", args={"init_lora_weights": "pissa"}))
    prepare.check_adapter(recipe)
    recipe.adapter.sync = "adapter"
    with pytest.raises(UserError, match=r"not take the init pissa, .* use adapter\.sync=merge"):
        prepare.check_adapter(recipe)
    # Of adapter.path its own config counts.
    recipe.adapter = Adapter(method="lora", sync="adapter", path=str(tmp_path))
    (tmp_path / "adapter_model.safetensors").touch()
    stored = {"peft_type": "LORA", "r": 600, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"rank.*; use adapter\.sync=merge"):
        prepare.check_adapter(recipe)


def test_refused_run_closes_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Opened:
        def close(self) -> None:
            closed.append(self)

    def refuse(*_: Any) -> None:
        raise UserError("no")

    monkeypatch.setattr(prepare.environments, "open_sessions", lambda *_: Opened())
    monkeypatch.setattr(build, "assemble", refuse)
    with pytest.raises(UserError, match="no"):
        build.build(prepare.for_training(small_recipe(tmp_path)), ["grpo", "train"])
    assert len(closed) == 1


def test_rows_refused_by_a_reward() -> None:
    tests = ["assert f(1) == 2", "assert eval(f(1)) == 2", "pass", "f(2)", "max(1) or min(2)"]
    rows = Rows("rows.jsonl", ["tests"], [{"tests": [test]} for test in tests], [2, 4, 6, 8, 9])
    scorer = Scorer({"code": Reward(function="code")}, ["tests"], "rows.jsonl")
    with pytest.raises(UserError, match=r"bad_rows=drop leaves such rows out\.$") as raised:
        scorers.scorable(scorer, rows, Dataset())
    assert raised.match(r"jsonl: 3 of 5 .* row 4: reward.code: .*; row 6: .*; row 9: .* have no n")
    kept = scorers.scorable(scorer, rows, Dataset(bad_rows="drop"))
    assert (kept.lines, list(kept.column("tests"))) == ([2, 8], [[tests[0]], [tests[3]]])
    alone = select_rows(rows, [2])
    with pytest.raises(UserError, match="No row is left"):
        scorers.scorable(scorer, alone, Dataset(bad_rows="drop"))
