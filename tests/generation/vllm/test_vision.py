"""Prompts with images and real vLLM: the trainer's log-probabilities, never stale.

With the model of recipe=shapes_tiny: an Idefics 3 with the text model of Qwen2. Some families do
not run in vLLM on a CPU (LLaVA, Gemma 3), others need torchvision (Qwen).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli.distributed.workers import Workers
from grpo_cli.generation.base import EngineSetup, Generator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.vllm.base import VllmGenerator
from grpo_cli.generation.vllm.server import ServerGenerator
from grpo_cli.images import StoredImage
from grpo_cli.models import packing, tiny
from grpo_cli.models.families import placeholder_tokens
from grpo_cli.models.policy_logprobs import inference
from grpo_cli.models.settings import Build
from grpo_cli.records import Rollout
from tests.models.test_vision import Loaded, load_folder
from tests.vision_models import picture
from tests.vllm_engines import recipe_for, serve, wait_until_up

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from grpo_cli.generation.vllm.colocate import ColocatedGenerator  # noqa: E402

SAMPLING = Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    build = Build(num_layers=2, warmup_steps=0, vision_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "cache_dir", lambda: tmp_path_factory.mktemp("cache"))
        folder = tiny.build(build, [tiny.Pair("<image>How many?", "3")], 0, lambda *_: None)
    return load_folder("shapes", folder)


@pytest.fixture(scope="module", params=["colocate", "server"])
def engine(
    request: pytest.FixtureRequest, loaded: Loaded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmGenerator]:
    loaded.model.name_or_path = str(loaded.folder)
    if request.param == "colocate":
        recipe = recipe_for(loaded.folder, "vllm_colocate")
        generator = ColocatedGenerator.make(setup_of(loaded, recipe))
        yield generator
        generator.close()
        return
    serving = serve(loaded.folder, tmp_path_factory.mktemp("server") / "out")
    try:
        wait_until_up([serving])
        generator = ServerGenerator.make(setup_of(loaded, server_recipe(loaded, [serving.url])))
        yield generator
        generator.close()
    finally:
        serving.end()


def server_recipe(loaded: Loaded, urls: list[str], **of_vllm: Any) -> Any:
    recipe = recipe_for(loaded.folder, "vllm_server", servers=urls, **of_vllm)
    recipe.generation.vllm.engine_args = {}
    return recipe


def setup_of(loaded: Loaded, recipe: Any) -> EngineSetup:
    given = recipe, loaded.model, loaded.tokenizer, [2], Workers("cpu"), loaded.mixed(), print
    return EngineSetup(*given)


def move(model: PreTrainedModel, step: int) -> None:
    """Changes all weights, those of the tower too."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


def sampled(engine: Generator, loaded: Loaded) -> list[Rollout]:
    prompts = loaded.mixed()
    groups = engine.generate(prompts, 4, SAMPLING, range(3))
    pairs = zip(prompts, groups, strict=True)
    return [Rollout(prompt, c, "") for prompt, group in pairs for c in group]


def difference(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> float:
    """Mean |log-probability that was reported − what the model says without tokens of images|."""
    gaps, banned = [], list(placeholder_tokens(model.config))
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.completion.ids]])
        mask = torch.ones_like(ids)
        with inference(model):
            given = packing.padded_arguments([rollout.prompt], ids, mask, model)
            logits = model(input_ids=ids, attention_mask=mask, **given).logits[0]
        logits[:, banned] = -torch.inf
        first = len(rollout.prompt.ids)
        rows = logits[first - 1 : -1].log_softmax(-1)
        own = rows.gather(-1, ids[0, first:, None])[:, 0]
        gaps.append((torch.tensor(rollout.completion.sampling_logprobs) - own).abs())
    return torch.cat(gaps).mean().item()


def with_other_pictures(rollout: Rollout) -> Rollout:
    drawn = [
        StoredImage(picture(90 + i, image.size), "another")
        for i, image in enumerate(rollout.prompt.images)
    ]
    return replace(rollout, prompt=replace(rollout.prompt, images=tuple(drawn)))


def test_never_stale(engine: VllmGenerator, loaded: Loaded) -> None:
    """With the same pictures in each step: their features are of the newest weights."""
    banned = set(placeholder_tokens(loaded.model.config))
    for step in range(4):
        before = copy.deepcopy(loaded.model)
        move(loaded.model, step)
        metrics = engine.update_weights(loaded.model, step)
        found = sampled(engine, loaded)
        assert difference(loaded.model, found) < 1e-4
        assert difference(before, found) > 0.01
        assert metrics["weights/check_difference"] < 1e-4
        assert not banned & {i for r in found for i in r.completion.ids}
        others = [with_other_pictures(r) for r in found if r.prompt.images]
        assert difference(loaded.model, others) > 0.01


def test_stale_tower_is_found(engine: VllmGenerator, loaded: Loaded) -> None:
    """The check of the weights sees those that only images show."""
    engine.update_weights(loaded.model, 5)
    assert engine.weight_check is not None
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "vis" in name:  # vision_model, visual
                parameter.add_(0.5)
    trainer = engine.weight_check.trainer_logprobs()
    (found,) = engine.differences(trainer).values()
    assert found > 1e-3
