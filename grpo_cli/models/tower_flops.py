"""Counts the FLOPs with which a model encodes an image, by the number of the image's tokens.

The matrix products of a vision tower grow with the patches of an image and its attention with their
square, and in most models an image has a fixed number of patches for each of its tokens. So an
image of t tokens takes

    linear · t + squared · t²

FLOPs. The two numbers are measured on white pictures of two sizes, and checked on a third one, of
another ratio of its sides. The Qwen2-VL of the tests (4 patches a token, width 32, 2 layers) takes
204,800 · t of products and 4,096 · t² of attention. Where the formula does not describe the
model there is no number: LLaVA-NeXT crops the tokens of an image and not its patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedModel

from grpo_cli.distributed import fsdp
from grpo_cli.images import ImageError, StoredImage
from grpo_cli.models.families import has_bidirectional_images
from grpo_cli.models.loading import inference
from grpo_cli.models.quantization import is_quantized
from grpo_cli.models.vision import VisionProcessor
from grpo_cli.records import Prompt

# Sides of the pictures, in pixels. Processors have a smallest and a largest size, so that some have
# as many tokens as others: the first two that differ count.
SIDES = ((224, 224), (448, 448), (896, 896), (64, 64), (32, 32))
OTHER_RATIO = ((224, 448), (448, 896), (32, 64))
TOLERANCE = 0.02  # of the third picture


@dataclass(frozen=True)
class TowerFlops:
    """The FLOPs of encoding images, forward."""

    linear: float  # for each token of an image
    squared: float  # for each token of an image, squared
    token: int = 0  # the id of the token that stands for a feature of an image
    _known: dict[tuple[int, int], float] = field(default_factory=dict, compare=False)  # by size

    def of_tokens(self, tokens: int) -> float:
        """Returns the FLOPs of an image of so many tokens."""
        return self.linear * tokens + self.squared * tokens**2

    def of_prompt(self, prompt: Prompt) -> float:
        """Returns the FLOPs of a prompt's images, each encoded once."""
        total = 0.0
        for image in prompt.images:
            if image.size not in self._known:
                assert prompt.vision is not None, "a prompt with images has a processor"
                tokens = prompt.vision.count(image, self.token)
                self._known[image.size] = self.of_tokens(tokens)
            total += self._known[image.size]
        return total


def measure(model: PreTrainedModel, vision: VisionProcessor) -> TowerFlops | None:
    """Measures a model's tower; None if the formula does not describe it.

    Every process calls it where the model is sharded.
    """
    token = getattr(model.config, "image_token_id", None)
    if not isinstance(token, int) or not hasattr(model, "get_image_features"):
        return None
    # The counter does not know the products of quantized weights.
    if has_bidirectional_images(model) or any(map(is_quantized, model.parameters())):
        return None
    found: dict[int, float] = {}
    for size in SIDES:
        if len(found) < 2 and (one := _counted(model, vision, token, size)) is not None:
            found.setdefault(*one)
    checks = [_counted(model, vision, token, size) for size in OTHER_RATIO]
    others = [one for one in checks if one is not None]
    if not found or not others:
        return None
    linear, squared = _fitted(found)
    tower = TowerFlops(linear, squared, token)
    tokens, flops = next((one for one in others if one[0] not in found), others[0])
    return tower if abs(tower.of_tokens(tokens) - flops) <= TOLERANCE * flops else None


def _fitted(found: Mapping[int, float]) -> tuple[float, float]:
    """Returns the formula's two numbers from the FLOPs of one or two numbers of tokens."""
    (tokens, flops), *others = found.items()
    if not others:  # every image has as many tokens
        return flops / tokens, 0.0
    ((more, most_flops),) = others
    squared = (most_flops / more - flops / tokens) / (more - tokens)
    return flops / tokens - squared * tokens, squared


def _counted(
    model: PreTrainedModel, vision: VisionProcessor, token: int, size: tuple[int, int]
) -> tuple[int, float] | None:
    """Returns (tokens, FLOPs) of a white picture; None if the processor does not take its size."""
    from PIL import Image

    image = StoredImage(Image.new("RGB", size, "white"), "white")
    try:
        tokens, inputs = vision.count(image, token), vision.inputs((image,))
    except ImageError:
        return None
    if not tokens:
        return None
    device = fsdp.device_of(model)
    taken = signature(model.get_image_features).parameters
    given: dict[str, Any] = {
        name: value.to(device, model.dtype if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
        if name in taken
    }
    with inference(model), FlopCounterMode(display=False, custom_mapping=OF_CPU) as counter:
        fsdp.within(model, lambda: model.get_image_features(**given))
    fsdp.offload(model)
    return tokens, float(counter.get_total_flops())


def _of_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


# The counter knows the attention of GPUs only.
OF_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_attention}
