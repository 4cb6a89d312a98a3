"""Prompts in the forms that vLLM accepts, and what those with images need there.

vLLM expands images into tokens itself. It gets one placeholder token per image, and its expanded
prompt must equal the trainer's tokens:

    Prompt.ids    [1, 92, 10, 256, 256, 256, 256, 51]   an image of 4 tokens
    to vLLM       [1, 92, 10, 256, 51] and the image
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from grpo_cli.errors import TrainingError, UserError, listed
from grpo_cli.generation.base import EngineSetup
from grpo_cli.generation.vllm import lora
from grpo_cli.images import unreadable
from grpo_cli.models import adapters
from grpo_cli.models.vision import parameters_of_images
from grpo_cli.records import Prompt

PROMPTS, TOKENS = 4, 24  # compared prompts, and tokens of each: few, since it is in every step
FAST = 1  # zlib level; each PNG is sent only once


@dataclass(frozen=True)
class ComparedPrompt:
    """A prompt whose last `num_tokens` tokens are compared."""

    prompt: Prompt
    num_tokens: int


def given_ids(prompt: Prompt) -> list[int]:
    """Returns the token ids for vLLM, with one placeholder for each image."""
    if prompt.vision is None:
        return list(prompt.ids)
    return prompt.vision.collapsed(prompt.ids, prompt.images)


def in_process(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt in the form of vLLM's in-process engine."""
    given: dict[str, Any] = {"prompt_token_ids": given_ids(prompt)}
    if prompt.images:
        given["multi_modal_data"] = {"image": [image.open() for image in prompt.images]}
    return given


def over_http(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt as fields of a request to a server; images are sent as PNG, losslessly."""
    given: dict[str, Any] = {"token_ids": given_ids(prompt)}
    if prompt.images:
        given["return_token_ids"] = True
        given["content_parts"] = []
        for image in prompt.images:
            file = io.BytesIO()
            image.open().save(file, "PNG", compress_level=FAST)
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            given["content_parts"].append({"type": "image_url", "url": url})
    return given


async def encoded(prompt: Prompt) -> dict[str, Any]:
    """Returns `over_http`; encodes images in a thread, so that other requests continue."""
    return await asyncio.to_thread(over_http, prompt) if prompt.images else over_http(prompt)


def check_ids(prompt: Prompt, found: Sequence[int] | None) -> None:
    """Checks that vLLM expanded a prompt with images to the trainer's tokens.

    Raises:
        TrainingError: the tokens differ, so that vLLM's log-probabilities are of another prompt.
    """
    if prompt.images and list(found or ()) != list(prompt.ids):
        raise TrainingError(
            f"vLLM made {len(found or ())} tokens of the prompt of row {prompt.row}, and the "
            f"trainer's processor {len(prompt.ids)}, or others: it does not read images as this "
            "model's processor does. Use generation=transformers.",
            alone=True,
        )


def limits(setup: EngineSetup) -> dict[str, Any]:
    """Returns the argument of vLLM's `LLM` for the largest number of images in a prompt."""
    most = max(len(p.images) for p in setup.prompts)
    is_known = most and not setup.recipe.dataset.streaming  # later prompts may have more
    return {"limit_mm_per_prompt": {"image": most}} if is_known else {}


def refused_rows(prompts: Iterable[Prompt]) -> str:
    """Returns the rows of a refused request with images, for its message; "" without any."""
    rows = dict.fromkeys(str(p.row) for p in prompts if p.images)
    return f" (rows {listed(rows)})" if rows else ""


class PromptCheck:
    """Checks, once, that no setting contradicts prompts with images."""

    def __init__(self, setup: EngineSetup, lora_rank: int | None) -> None:
        """Raises a UserError if the known prompts have images, and a setting contradicts them."""
        self.config, self.lora_rank = setup.recipe.generation.vllm, lora_rank
        self.is_done = any(p.images for p in setup.prompts)
        if self.is_done:
            self.check_settings(setup.model)

    def __call__(self, prompts: Sequence[Prompt], model: PreTrainedModel) -> None:
        """Raises a TrainingError at the first images, which a stream may have in a later row."""
        first = next((p for p in prompts if p.images), None)
        if first is None or self.is_done:
            return
        try:
            self.check_settings(model)
        except UserError as error:
            raise TrainingError(
                f"the prompt of row {first.row} is the first with images: {error}", alone=True
            ) from error
        self.is_done = True

    def check_settings(self, model: PreTrainedModel) -> None:
        """Raises a UserError if a setting contradicts prompts with images."""
        if self.lora_rank is not None:
            check_tower(model)
        if self.config.in_flight:
            raise UserError(
                "generation.vllm.in_flight = true: a server's completions cannot go on over new "
                "weights where prompts have images; set it to false."
            )


def check_tower(model: PreTrainedModel) -> None:
    """Raises a UserError if the model has an adapter on a layer that reads images.

    vLLM ignores adapters on a vision tower, so it would sample with other weights than the trainer.
    """
    of_images = {id(p) for p in parameters_of_images(model)}
    for name, base in adapters.base_layers(model):
        if any(id(p) in of_images for p in base.parameters()):
            raise UserError(
                "adapter.sync = adapter: vLLM applies adapters to the language model only, and "
                f"{name} reads images; {lora.OTHER_WAY}, or name the language model's layers in "
                "adapter.target_modules."
            )


def fixed_rows(prompts: Sequence[Prompt], of_images: Collection[int]) -> list[ComparedPrompt]:
    """Returns the tokens to check: the ends of the first prompts, since beginnings may be equal.

    Prompts with images come first, since only they test the weights of the vision tower; images
    stay in front of the tokens. One that is unreadable is reported by the step that uses it.

    Args:
        of_images: ids of image tokens, which have no log-probabilities.
    """
    with_images = (p for p in prompts if p.images and unreadable(p.images) is None)
    texts = (p for p in prompts if not p.images)
    ends = (_end(prompt, of_images) for prompt in itertools.chain(with_images, texts))
    rows = list(itertools.islice(filter(None, ends), PROMPTS))
    first = next((i for i in prompts[0].ids if i not in of_images), 0)
    return rows or [ComparedPrompt(Prompt.from_ids([first, first]), 1)]


def _end(prompt: Prompt, of_images: Collection[int]) -> ComparedPrompt | None:
    """Returns the last tokens of a prompt, after its images; None if there are none."""
    num_tokens = next(
        (n for n, i in enumerate(reversed(prompt.ids)) if i in of_images), len(prompt.ids)
    )
    if prompt.images:
        return ComparedPrompt(prompt, min(num_tokens, TOKENS)) if num_tokens else None
    ids = prompt.ids[-min(num_tokens, TOKENS) :]
    return ComparedPrompt(Prompt.from_ids(ids), len(ids) - 1) if len(ids) > 1 else None
