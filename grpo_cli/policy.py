"""The policy: tokenizer, model, frozen reference."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.config import Model
from grpo_cli.errors import UserError

transformers.utils.logging.disable_progress_bar()  # the run has a progress display of its own


def load(
    config: Model, path: str | Path, *, weights: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (on the CPU, in training mode) and tokenizer from a folder or the hub.

    Args:
        weights: false: only the model's structure, on the meta device.

    Raises:
        UserError: nothing there, or nothing that transformers can load.
    """
    shared: dict[str, Any] = {
        "revision": config.revision or "main",
        "trust_remote_code": config.trust_remote_code,
    }
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), **shared)
        model_config = transformers.AutoConfig.from_pretrained(str(path), **shared)
        if config.dropout is not None:
            set_dropout(model_config, config.dropout)
        how: dict[str, Any] = {
            "dtype": getattr(torch, config.dtype),
            "attn_implementation": config.attn_implementation,
        }
        kind = transformers.AutoModelForCausalLM
        if weights:
            model = kind.from_pretrained(str(path), config=model_config, **how, **shared)
        else:
            with torch.device("meta"):
                code = {"trust_remote_code": config.trust_remote_code}
                model = kind.from_config(model_config, **how, **code)
            with contextlib.suppress(OSError):  # not every model has one
                model.generation_config = transformers.GenerationConfig.from_pretrained(
                    str(path), revision=shared["revision"]
                )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(f"model.path = {path}: cannot be loaded: {reason}") from error
    if not tokenizer("a")["input_ids"]:  # what transformers makes where there are no files of one
        raise UserError(f"model.path = {path}: holds no tokenizer; save the model's own beside it.")
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    prepare_for_training(model, config)
    return model, tokenizer


def prepare_for_training(model: PreTrainedModel, config: Model) -> None:
    """Training mode, with the dropout and the activation checkpointing that the recipe asks for."""
    model.train()
    if config.dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = config.dropout
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def set_dropout(model_config: transformers.PretrainedConfig, rate: float) -> None:
    """Sets every dropout rate that a model config knows, by whatever name."""
    for name, value in model_config.to_dict().items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, (int, float)):
            setattr(model_config, name, rate)


def read_template(given: str) -> str:
    """A chat template, from a file if `given` names one."""
    if "{" in given:
        return given
    return Path(given).expanduser().read_text(encoding="utf-8")


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a completion: the generation config's and the tokenizer's."""
    found: set[int] = set()
    for ids in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(found)


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same structure without tensors (on the meta device), for inference."""
    with torch.device("meta"):
        made: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    made.generation_config = model.generation_config
    return made.to(model.dtype).requires_grad_(False).eval()


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A reference policy with the model's present weights: no gradient, no dropout."""
    return copy.deepcopy(model).requires_grad_(False).eval()


@torch.no_grad()
def mix(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """Sets ref ← α·policy + (1 − α)·ref, in place (TR-DPO, arXiv 2404.09656; α = 1: a copy)."""
    # By parameters, not by names: a tied output head has two names and must not be mixed twice.
    for mixed, ours in zip(reference.parameters(), policy.parameters(), strict=True):
        mixed.lerp_(ours.to(mixed), alpha)
    for kept, current in zip(reference.buffers(), policy.buffers(), strict=True):
        kept.copy_(current)


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """No gradient and no dropout inside; the module's mode is put back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
