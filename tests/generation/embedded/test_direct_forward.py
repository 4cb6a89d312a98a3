"""A decoder's forward pass without its modules gives the logits of its modules, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from grpo_cli.generation.base import Request
from grpo_cli.generation.embedded.decode_batch import Prefill
from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.direct_forward import DirectForward
from grpo_cli.generation.embedded.engine import Engine
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.attention import install, no_mask
from grpo_cli.records import Completion, Prompt
from tests.models.test_policy_logprobs import Doubled

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3.1": LlamaConfig(**SIZES, rope_parameters={
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}  # fmt: skip


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a random model in which norms and biases differ from their initial values."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    assert install(model)
    return model.eval()


class Averages:
    """Stands for attention: each token gets the mean of the values up to it, and its query."""

    longest = 31  # of the positions below, the largest with itself

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        means = (key + value).cumsum(0) / torch.arange(1, len(key) + 1)[:, None, None]
        means = means.to(value.dtype).repeat_interleave(query.shape[1] // value.shape[1], 1)
        return means * (1 + layer) + query * scale


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_the_modules(name: str, dtype: torch.dtype) -> None:
    model = model_of(CONFIGS[name]).to(dtype)
    ids, positions = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[7, 7, 2, 30, 9]])
    direct = DirectForward.of(model)
    assert direct is not None
    expected = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=no_mask(ids.device),
        use_cache=False,
        attending=Averages(),
    ).logits[0]
    assert torch.equal(direct(ids, positions, Averages()), expected)
    assert expected.std() > 0.1, "and they say something"


def completions_of(model: PreTrainedModel) -> list[Completion]:
    prompts = [Prompt.from_ids([5, 6, 7]), Prompt.from_ids([8, 9])]
    request = Request(prompts, 3, Sampling(max_tokens=12), [0, 1])
    finished = Engine(model, 6).decode([DecodingState(request, [4], None)])
    return [c for some in finished for done in some for c in done.completions]


def test_the_engine_samples_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["qwen2"])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = completions_of(model)
    plain = completions_of(model)
    monkeypatch.setattr(DirectForward, "of", lambda model: None)
    assert completions_of(model) == plain
    with torch.autocast("cpu", torch.bfloat16):
        assert completions_of(model) == mixed
    assert mixed != plain


def test_changed_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["llama"])
    completions_of(model)
    for weight in model.parameters():
        weight.data = 2 * weight.data  # another tensor
    changed = completions_of(model)
    monkeypatch.setattr(DirectForward, "of", lambda model: None)
    assert completions_of(model) == changed


def test_hooked_models_use_their_modules() -> None:
    hooked, doubled, wrapped = (model_of(CONFIGS["qwen2"]) for _ in range(3))
    assert DirectForward.of(hooked) is not None
    hooked.model.layers[1].mlp.register_forward_hook(lambda *of: None)
    doubled.model.layers[0].self_attn.o_proj = Doubled(32, 32)
    wrapped.model.layers[0].forward = lambda *of, **named: None
    for model in (hooked, doubled, wrapped):
        assert DirectForward.of(model) is None
    other = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2))
    assert DirectForward.of(other) is None


def test_prompts_keep_only_their_keys_and_values() -> None:
    model = model_of(CONFIGS["llama"])
    direct, prefill = DirectForward.of(model), Prefill([[3, 1, 4], [1, 5]], model.device)
    assert direct is not None
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        direct(ids, torch.tensor([[0, 1, 2, 0, 1]]), prefill)
    kept = [t.untyped_storage().nbytes() for t in (*prefill.keys, *prefill.values)]
    assert kept == [5 * 2 * 8 * 4] * 4  # 5 tokens of 2 heads of 8
