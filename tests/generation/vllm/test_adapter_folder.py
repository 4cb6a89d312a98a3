"""The folder from which vLLM reads the adapter: what peft reads, replaced at once."""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.generation.vllm.adapter_folder import AdapterFolder, rank_on
from grpo_cli.generation.vllm.prompts import check_tower
from grpo_cli.generation.vllm.weights import AdapterWeights, WeightInfo
from grpo_cli.models.settings import Adapter
from tests.models.test_adapters import adapted, move
from tests.models.test_vision import load


def test_peft_reads_the_folder(tmp_path: Path) -> None:
    model, base = adapted("lora")
    folder = AdapterFolder(tmp_path / "adapter", model)
    for _ in range(2):  # the second replaces the first
        move(model)
        folder.write(AdapterWeights(model))
        read = PeftModel.from_pretrained(copy.deepcopy(base), folder.path)
        ids = torch.tensor([[3, 4, 5, 6]])
        with torch.no_grad():
            assert torch.equal(read(input_ids=ids).logits, model(input_ids=ids).logits)
    assert sorted(p.name for p in folder.path.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    assert json.loads((folder.path / "adapter_config.json").read_text())["r"] == 4
    folder.remove()
    assert not folder.path.exists()


def test_open_files_keep_the_old_weights(tmp_path: Path) -> None:
    model, _ = adapted("lora")
    folder = AdapterFolder(tmp_path, model)
    folder.write([("a", torch.zeros(3))])
    old = (tmp_path / "adapter_model.safetensors").open("rb")
    folder.write([("a", torch.ones(2000))])
    assert len(old.read()) < 200
    assert load_file(tmp_path / "adapter_model.safetensors")["a"].sum() == 2000


def test_infos_are_of_the_adapter_only() -> None:
    model, _ = adapted("lora")
    infos = AdapterWeights(model).infos()
    assert [WeightInfo(n, tuple(t.shape), t.dtype) for n, t in AdapterWeights(model)] == infos
    assert len(infos) == sum(p.requires_grad for p in model.parameters())
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert name in {info.name for info in infos}


@pytest.mark.parametrize(("sync", "rank"), [("merge", None), ("adapter", 4)])
def test_the_rank_that_engines_need(sync: str, rank: int | None) -> None:
    model, base = adapted("lora")
    recipe = Recipe(adapter=Adapter(method="lora", sync=sync))
    assert rank_on(model, recipe) == rank
    assert rank_on(base, recipe) is None


def test_adapter_on_other_layers() -> None:
    model, _ = adapted("experts")
    recipe = Recipe(adapter=Adapter(method="lora", sync="adapter"))
    with pytest.raises(UserError, match=r"linear layers only .*mlp\.experts\.\w+_proj\); use adap"):
        rank_on(model, recipe)
    model.peft_config["default"].target_parameters = None  # as all-linear does by itself
    with pytest.raises(UserError, match=r"linear layers only, and .*experts.* is a .*sync=merge"):
        rank_on(model, recipe)


def test_an_adapter_on_the_tower(tmp_path: Path) -> None:
    """vLLM would leave it out."""
    model = load("idefics3", tmp_path).model
    text = peft.LoraConfig(target_modules=r".*text_model.*q_proj")
    check_tower(peft.get_peft_model(copy.deepcopy(model), text))
    every = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(UserError, match=r"language model only, and .*\.vision_.* reads images"):
        check_tower(every)
