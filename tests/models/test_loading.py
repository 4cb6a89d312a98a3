"""A model is loaded with all its weights, or refused in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.checkpoints import model_folder
from grpo_cli.config.contradictions import contradictions
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.models import loading
from grpo_cli.models.settings import Model
from grpo_cli.records import Prompt

FILE = "model.safetensors"
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Path:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Returns what changes the weights that a folder holds."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / FILE)
        change(weights)
        save_file(weights, folder / FILE, {"format": "pt"})

    return damage


def of_bert(folder: Path) -> None:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 300}
    config = transformers.BertConfig(**small, intermediate_size=8)
    transformers.BertForMaskedLM(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (with_weights(lambda w: w.pop(NAME)), f"it lacks the weights {NAME}"),
        (
            with_weights(lambda w: w[NAME][3, 4].fill_(torch.nan)),
            f"the weights of {NAME} are not finite",
        ),
        (with_weights(lambda w: w.update({NAME: w[NAME][:-1].contiguous()})), ""),
        (shutil.rmtree, "it is gone; a run keeps its last checkpoint.keep_last checkpoints only."),
        (of_bert, "a bert model reads in both directions and cannot generate"),
    ],
)
def test_damaged_model_refused(folder: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(folder)
    with pytest.raises(UserError) as error:
        loading.load(Model(path=str(folder)), folder)
    assert str(error.value).startswith(f"model.path = {folder}: cannot be loaded: {reason}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # an empty one is made, or none
def test_a_model_without_tokenizer_is_refused(folder: Path, kind: str) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"^model.path = {folder}: holds no tokenizer; save one"):
        loading.load_config(Model(path=str(folder)), folder)


@pytest.mark.parametrize("name", [FILE, "config.json", "tokenizer_config.json"])
def test_damaged_file_of_a_model_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(UserError, match=rf"^{folder}/{name}: cannot be read: "):
        loading.load(Model(path=str(folder)), folder)


@pytest.mark.parametrize("longrope", [False, True])
def test_context_length_is_checked(model: PreTrainedModel, longrope: bool) -> None:
    model.config.max_position_embeddings, why = 128, ""
    if longrope:
        rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
        model.config.max_position_embeddings, model.config.rope_parameters = 256, rope
        why = r" \(longrope changes positions beyond\)"
    prompts = [Prompt.from_ids([5] * n) for n in (3, 10)]
    loading.check_context(model, "m", prompts, 118)
    with pytest.raises(UserError, match=f"is 128 tokens{why}, but the longest prompt has 10"):
        loading.check_context(model, "m", prompts, 119)


def test_a_token_without_an_embedding(model: PreTrainedModel) -> None:
    size = model.config.vocab_size
    loading.check_embeddings(model, "m", [Prompt.from_ids([5, size - 1]), Prompt.from_ids([5])])
    with pytest.raises(UserError, match=f"m: its tokenizer has the token {size}, but the model"):
        loading.check_embeddings(model, "m", [Prompt.from_ids([5, size]), Prompt.from_ids([5])])


def test_a_model_folder_has_the_dtype_of_the_files_that_were_loaded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    half = {"half_type": torch.bfloat16}
    loaded, _ = loading.load(Model(path=str(tmp_path / "half")), tmp_path / "half", **half)
    assert loaded.dtype == torch.float32
    assert json.loads(model_folder.files_of(loaded, None)["config.json"])["dtype"] == "bfloat16"
    weights = dict(loaded.state_dict())
    written = dict(model_folder.as_published(loaded, weights, weights))
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor.float(), weights[name]) for name, tensor in written.items())
    # In float32 arithmetic it would lose small changes.
    exact, _ = loading.load(Model(path=str(tmp_path / "half")), tmp_path / "half")
    assert json.loads(model_folder.files_of(exact, None)["config.json"])["dtype"] == "float32"


def test_changed_config_field_is_stored(folder: Path, tmp_path: Path) -> None:
    config = Model(args={"rms_norm_eps": 0.5, "use_safetensors": True})
    stored = loading.load(Model(), folder)[0].config.rms_norm_eps
    changed, _ = loading.load(config, folder)
    assert changed.config.rms_norm_eps == 0.5 != stored
    assert changed.model.norm.variance_epsilon == 0.5
    empty, _ = loading.load(config, folder, weights=False)  # of a process that gets its share later
    assert empty.model.norm.variance_epsilon == 0.5
    changed.save_pretrained(tmp_path / "again")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "again").rms_norm_eps == 0.5


def test_files_in_a_subfolder_are_found(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "parent" / "inside")
    model, tokenizer = loading.load(Model(args={"subfolder": "inside"}), tmp_path / "parent")
    assert len(tokenizer) > 0
    assert next(model.parameters()).isfinite().all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rms_norm_epsilon", 1e-5, r"is not a field of the config .* mean rms_norm_eps"),
        ("weights_only", False, "is not a field of the config"),  # would unpickle anything
        ("_attn_implementation", "a/b", "is not a field of the config"),
        ("use_safetensor", True, ".* mean use_safetensors"),
    ],
)
def test_other_arguments_are_refused(folder: Path, name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"model\.args\.{name}: {message}"):
        loading.load(Model(args={name: value}), folder)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dtype", "write model.dtype"),
        ("trust_remote_code", "write model.trust_remote_code"),
        ("device_map", "distributed=fsdp2"),
        ("token", "HF_TOKEN"),
    ],
)
def test_arguments_with_a_setting_of_their_own(name: str, instead: str) -> None:
    recipe = Recipe(model=Model(path="some/model", args={name: 1}))
    (said,) = [m for m in contradictions(recipe, ()) if "model.args" in m]
    assert said.startswith(f"model.args.{name}: cannot be set: ")
    assert instead in said


def test_vllm_does_not_read_a_changed_config() -> None:
    for name, is_refused in (("rms_norm_eps", True), ("use_safetensors", False)):
        recipe = Recipe(model=Model(path="some/model", args={name: 1}))
        recipe.generation.engine = "vllm_server"
        said = [m for m in contradictions(recipe, ()) if "model.args" in m]
        assert bool(said) == is_refused
