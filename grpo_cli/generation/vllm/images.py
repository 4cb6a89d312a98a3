"""Prompts with images in the forms that vLLM accepts, in process and over HTTP.

vLLM expands images into tokens itself. It gets one placeholder token per image, and its expanded
prompt must equal the trainer's tokens:

    Prompt.ids    [1, 92, 10, 256, 256, 256, 256, 51]   an image of 4 tokens
    to vLLM       [1, 92, 10, 256, 51] and the image
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from grpo_cli.errors import TrainingError
from grpo_cli.records import Prompt

FAST = 1  # zlib level; each PNG is sent only once


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
