"""FLOPs of vision towers: the formula by hand, and the model's own products counted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from grpo_cli.images import StoredImage
from grpo_cli.models import tower_flops
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.tower_flops import TowerFlops
from grpo_cli.models.vision import parameters_of_images
from tests.conftest import make_rollout
from tests.models.test_vision import Loaded, load
from tests.vision_models import picture


def test_the_formula_goes_through_what_was_counted() -> None:
    assert tower_flops._fitted({4: 4 * 10 + 16 * 3, 9: 9 * 10 + 81 * 3}) == (10, 3)
    assert tower_flops._fitted({4: 40}) == (10, 0)
    assert TowerFlops(10, 3).of_tokens(5) == 125


def products(loaded: Loaded, image: StoredImage) -> float:
    """The FLOPs of all products with a weight in the tower, and of its attention."""
    total = 0.0

    def add(module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal total
        weight = module.weight
        total += 2 * weight.numel() * output.numel() / weight.shape[0]

    kinds = nn.Linear, nn.Conv2d, nn.Conv3d
    hooks = [m.register_forward_hook(add) for m in loaded.model.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        loaded.model.get_image_features(**loaded.vision.inputs((image,)))
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("family", ["qwen2_vl", "idefics3_tiles", "llava", "internvl"])
def test_an_image_takes_what_its_products_and_its_attention_take(
    tmp_path: Path, family: str
) -> None:
    loaded = load(family, tmp_path)
    tower = tower_flops.measure(loaded.model, loaded.vision)
    assert tower is not None
    for size in ((48, 32), (64, 32)):
        image = StoredImage(picture(0, size), "picture")
        prompt = loaded.prompt(0, [image], "Hi")
        found, expected = tower.of_prompt(prompt), products(loaded, image)
        if family != "qwen2_vl":  # tiles of 4 or 16 patches: attention is a few percent
            assert 0.8 < expected / found < 1
            continue
        patches = 4 * loaded.vision.count(image, tower.token)
        # 2 layers of width 32; each patch sees each: two products of 2 FLOPs.
        assert found == pytest.approx(expected + 2 * 4 * 32 * patches**2, rel=1e-6)
        both = replace(prompt, images=(image, image))
        assert tower.of_prompt(both) == 2 * found


@pytest.mark.parametrize("family", ["llava_next", "gemma3"])
def test_models_that_the_formula_does_not_describe_have_no_number(
    tmp_path: Path, family: str
) -> None:
    loaded = load(family, tmp_path)
    assert tower_flops.measure(loaded.model, loaded.vision) is None
    rollout = replace(make_rollout(), prompt=loaded.mixed()[0])
    policy_logprobs = PolicyLogprobs(loaded.model, say=lambda line: None)
    assert math.isnan(policy_logprobs.flops([rollout]))
    assert policy_logprobs.tokens_of_images(rollout.prompt) == 0


def test_an_update_counts_the_tower_once_for_a_group(tmp_path: Path) -> None:
    loaded = load("idefics3", tmp_path)
    policy_logprobs = PolicyLogprobs(loaded.model, say=lambda line: None)
    policy_logprobs.tower = tower = tower_flops.measure(loaded.model, loaded.vision)
    assert tower is not None
    prompt = loaded.mixed()[0]
    group = [replace(make_rollout(), prompt=prompt) for _ in range(3)]
    texts = [replace(r, prompt=replace(prompt, images=())) for r in group]
    images = tower.of_prompt(prompt)
    assert images > 0

    def added(backward: bool) -> float:
        count = policy_logprobs.flops
        return count(group, backward=backward) - count(texts, backward=backward)

    assert added(False) == pytest.approx(images)
    assert added(True) == pytest.approx(3 * images)
    tokens = policy_logprobs.tokens_of_images(prompt)
    assert 1 < tokens < 100
    tower_weights = parameters_of_images(loaded.model)
    for p in tower_weights:
        p.requires_grad_(False)
    frozen = PolicyLogprobs(loaded.model, say=lambda line: None)
    frozen.tower = tower
    text_pass = frozen.flops(texts, backward=True)
    assert frozen.flops(group, backward=True) - text_pass == pytest.approx(images)
    assert frozen.tokens_of_images(prompt) == pytest.approx(tokens / 3)
    tower_weights[-1].requires_grad_(True)  # a part of it: the formula does not say
    partly = PolicyLogprobs(loaded.model, say=lambda line: None)
    partly.tower = tower
    assert math.isnan(partly.flops(group, backward=True))
    assert partly.flops(texts, backward=True) == text_pass
    assert partly.tokens_of_images(prompt) == frozen.tokens_of_images(prompt)
