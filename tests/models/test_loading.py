"""A model is loaded with all its weights, or refused in one sentence."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.config.schema import Model
from grpo_cli.errors import UserError
from grpo_cli.models import loading
from grpo_cli.records import Prompt

FILE = "model.safetensors"
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Path:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / FILE)
    del weights[NAME]
    save_file(weights, folder / FILE, {"format": "pt"})


def with_a_nan(folder: Path) -> None:
    weights = load_file(folder / FILE)
    weights[NAME][3, 4] = torch.nan
    save_file(weights, folder / FILE, {"format": "pt"})


def cut_off(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:100])


def of_another_shape(folder: Path) -> None:
    weights = load_file(folder / FILE)
    weights[NAME] = weights[NAME][:-1].contiguous()
    save_file(weights, folder / FILE, {"format": "pt"})


def of_bert(folder: Path) -> None:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 300}
    config = transformers.BertConfig(**small, intermediate_size=8)
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def test_a_complete_model_loads(folder: Path, model: PreTrainedModel) -> None:
    found, _ = loading.load(Model(path=str(folder)), folder)
    assert torch.equal(found.get_parameter(NAME), model.get_parameter(NAME))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_a_weight, f"it lacks the weights {NAME}"),
        (with_a_nan, f"the weights of {NAME} are not finite"),
        (cut_off, ""),  # safetensors' own words
        (of_another_shape, ""),
        (shutil.rmtree, "it is gone; a run keeps its last checkpoint.keep_last checkpoints only."),
        (of_bert, "a bert model reads in both directions and cannot generate"),
    ],
)
def test_an_unsound_model_is_refused(
    folder: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(folder)
    with pytest.raises(UserError) as error:
        loading.load(Model(path=str(folder)), folder)
    assert str(error.value).startswith(f"model.path = {folder}: cannot be loaded: {reason}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("max_tokens", "fits"), [(118, True), (119, False)])
def test_prompts_and_completions_fit_into_the_context(
    model: PreTrainedModel, max_tokens: int, fits: bool
) -> None:
    prompts = [Prompt.from_ids([5] * n) for n in (3, 10)]
    if fits:
        loading.check_context(model, "m", prompts, max_tokens, "generation.max_completion_tokens")
        return
    with pytest.raises(UserError, match=r"context is 128 tokens, but the longest prompt has 10"):
        loading.check_context(model, "m", prompts, max_tokens, "generation.max_completion_tokens")


@pytest.mark.parametrize("past", [0, 1])
def test_a_token_without_an_embedding(model: PreTrainedModel, past: int) -> None:
    largest = model.config.vocab_size - 1 + past
    prompts = [Prompt.from_ids([5, largest]), Prompt.from_ids([5])]
    with pytest.raises(UserError) if past else contextlib.nullcontext() as error:
        loading.check_embeddings(model, "m", prompts)
    if past:
        assert f"m: its tokenizer has the token {largest}, but the model" in str(error.value)
