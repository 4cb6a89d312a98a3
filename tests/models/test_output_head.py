"""The output head in float32: products, gradients, sampling."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.errors import UserError
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models import loading, output_head, tiny
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.settings import Model
from grpo_cli.models.token_logprobs import Head, linear_logprobs, token_logprobs
from grpo_cli.records import Prompt, Rollout
from tests.conftest import BUILD
from tests.models.test_policy_logprobs import Doubled

HALF = torch.bfloat16


def with_head(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model).to(HALF)
    output_head.use_float32(model)
    return model


@pytest.mark.parametrize("autocast", [False, True])
def test_only_the_product_is_float32(autocast: bool, model: PreTrainedModel) -> None:
    wide = with_head(model)
    layer = wide.get_output_embeddings()
    hidden = torch.randn(4, layer.in_features).to(HALF)
    with torch.autocast("cpu", HALF, enabled=autocast):
        logits = layer(hidden)
    assert logits.dtype == torch.float32
    assert layer.weight.dtype == HALF
    assert layer.weight is wide.get_input_embeddings().weight, "tied as before"
    right = hidden.double() @ layer.weight.double().t()
    assert (
        (logits - right).abs().max() < 1e-5 < (layer.weight @ hidden.t()).t().sub(right).abs().max()
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_chunks_match_complete_logits(autocast: bool) -> None:
    """Both with float32 arithmetic on bfloat16 numbers."""
    torch.manual_seed(0)
    layer = output_head.Float32Linear(16, 50, bias=True).to(HALF)
    hidden, targets = torch.randn(7, 16).to(HALF), torch.randint(50, (7,))

    def gradients(chunked: bool) -> tuple[Tensor, list[Tensor]]:
        h = hidden.clone().requires_grad_()
        with torch.autocast("cpu", HALF, enabled=autocast):
            if chunked:
                head = Head(layer.weight, layer.bias, in_float32=True)
                logprobs = linear_logprobs(h, head, targets, chunk_bytes=50 * 4 * 2)[0]
            else:
                logprobs = token_logprobs(layer(h)[None], targets[None])[0]
        found = torch.autograd.grad(logprobs.square().sum(), [h, *layer.parameters()])
        return logprobs.detach(), [g.float() for g in found]

    (a, of_a), (b, of_b) = gradients(True), gradients(False)
    assert (a - b).abs().max() < 1e-5
    for x, y in zip(of_a, of_b, strict=True):  # gradients are rounded to bfloat16 in the end
        assert (x - y).abs().max() <= 0.01 * y.abs().max()
    narrow = linear_logprobs(hidden, Head(layer.weight, layer.bias), targets)[0]
    assert (narrow - b).abs().max() > 1e-4


def test_sampler_and_trainer_use_the_same_product(model: PreTrainedModel) -> None:
    """Layers that add nothing leave the head's product as the only source of rounding."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    apart = []
    for own in (with_head(model), copy.deepcopy(model).to(HALF)):
        prompts = [Prompt(i, [5 + i, 6, 7], "", {}) for i in range(3)]
        generator = TransformersGenerator(own, [], 100)
        sampled = generator.generate(prompts, 2, Sampling(max_tokens=8), [1, 2, 3])
        made = [Rollout(p, c, "") for p, group in zip(prompts, sampled, strict=True) for c in group]
        trained = PolicyLogprobs(own)(made, 1.0)[0]
        before = torch.tensor([[r.prompt.ids[-1], *r.completion.ids[:-1]] for r in made])
        hidden = own.model.norm(own.model.embed_tokens(before)).double()
        logits = hidden @ own.lm_head.weight.double().t()
        right = token_logprobs(logits, torch.tensor([r.completion.ids for r in made]))
        reported = torch.tensor([r.completion.sampling_logprobs for r in made])
        apart.append([(found - right).abs().max().item() for found in (reported, trained)])
    assert max(apart[0]) < 1e-5
    assert min(apart[1]) > 1e-4


def test_copies_keep_it(model: PreTrainedModel) -> None:
    wide = with_head(model)
    assert output_head.is_float32(loading.skeleton(wide))
    assert output_head.is_float32(loading.frozen_copy(wide))
    assert not output_head.is_float32(loading.skeleton(model))
    assert wide.state_dict().keys() == model.state_dict().keys()


def test_a_model_is_loaded_with_it(tmp_path: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(tmp_path)
    tiny.make_tokenizer(BUILD, []).save_pretrained(tmp_path)
    for value, expected in (("float32", True), ("auto", False)):
        loaded, _ = loading.load(Model(dtype="bfloat16", head_dtype=value), tmp_path)
        assert output_head.is_float32(loaded) == expected
        assert loaded.dtype == HALF


def test_another_output_layer_is_refused(model: PreTrainedModel) -> None:
    model.lm_head = Doubled(32, 10)
    with pytest.raises(UserError, match=r"head_dtype = float32: .* is a Doubled, not an nn.Linear"):
        output_head.use_float32(model)
