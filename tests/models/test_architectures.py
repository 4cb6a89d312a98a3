"""Families of models: in which mode each is computed, and that the numbers are its own.

A random model of each line of `families.py`, made here, against transformers' own `forward` and
`generate`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.checkpoints import paths
from grpo_cli.errors import TrainingError
from grpo_cli.generation.embedded.cached_decoding import CachedDecoder
from grpo_cli.generation.embedded.engine import Engine
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.families import is_recurrent, reads_both_directions
from grpo_cli.models.loading import set_dropout
from grpo_cli.models.policy_logprobs import ForwardMode, PolicyLogprobs
from grpo_cli.models.routers import has_balancing_loss
from grpo_cli.records import Completion, Prompt, Rollout
from grpo_cli.training.run import Run
from tests.conftest import as_prompts
from tests.models.families import FAMILIES, Family
from tests.training.test_train import metrics, trained, weights

VOCABULARY = 96
SHARED: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
DECODERS = {"engine": Engine, "cache": CachedDecoder}
EACH = pytest.mark.parametrize("family", FAMILIES, ids=str)
RUN = ("llama", "falcon, ALiBi", "mixtral", "qwen3_next", "mamba2")


def make(family: Family, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A random model whose tokens depend much on what they see."""
    settings = {k: v for k, v in SHARED.items() if k not in family.without} | family.settings
    config = AutoConfig.for_model(family.model_type, vocab_size=vocabulary, **settings)
    set_dropout(config, 0.0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape) * (0.7 if len(p) == vocabulary else 0.25))
            elif family.recurrent:  # biases, which would make a state of padding
                p.add_(torch.randn(p.shape) * 0.1)
    model.generation_config.eos_token_id = None
    return model.eval()


PROMPTS = [[5, 9, 17, 33, 20, 8, 41], [60], [30, 31, 32], [70, 71, 72, 73]]


def make_rollouts() -> list[Rollout]:
    random = torch.Generator().manual_seed(0)
    return [
        Rollout(prompt, Completion(ids, [0.0] * length, "stop"), "")
        for prompt in (Prompt(row, ids, "", {}) for row, ids in enumerate(PROMPTS))
        for length in (1, 4, 6)
        for ids in [torch.randint(3, VOCABULARY, (length,), generator=random).tolist()]
    ]


def true_logprobs(model: PreTrainedModel, prompt: list[int], ids: list[int]) -> Tensor:
    """Of one row alone: nothing padded, nothing cached."""
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(ids)), ids]


def flat_gradient(model: PreTrainedModel, scalar: Tensor) -> Tensor:
    model.zero_grad()
    scalar.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@EACH
def test_training_mode_and_numbers(family: Family) -> None:
    model, rollouts = make(family).train(), make_rollouts()
    assert not reads_both_directions(model.config)
    assert is_recurrent(model) == family.recurrent
    assert has_balancing_loss(model) == family.balanced
    rows = [true_logprobs(model, r.prompt.ids, r.completion.ids) for r in rollouts]
    expected = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    assert torch.cat(rows).std() > 0.3, "something to compare"
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradient = flat_gradient(model, (weights * expected).sum())
    said: list[str] = []
    policy_logprobs = PolicyLogprobs(model, say=said.append)
    policy_logprobs.check(rollouts, 1.0)
    assert policy_logprobs.mode == family.mode
    if family.packed:
        assert said == []
    elif family.why.startswith(("its attention is", "its layers")):
        assert said == [f"note: rows are padded: the model's {family.why.removeprefix('its ')}"]
    else:
        off = f"note: {ForwardMode(True, True)} is off ({family.why})"
        assert said == [f"{off}; {family.mode} gives the same result, slower"]
    found, _ = policy_logprobs(rollouts, 1.0)
    assert (found - expected).abs().max() < 1e-4
    mine = flat_gradient(model, (weights * found).sum())
    assert mine.shape == gradient.shape
    assert (mine - gradient).abs().max() < 1e-3 * gradient.abs().max()


@EACH
def test_decoder_and_completions(family: Family) -> None:
    model = make(family)
    greedy = [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=6,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert len({token for ids in greedy for token in ids}) > 5, "something to compare"
    eos = greedy[0][3]
    greedy = [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in greedy]
    said: list[str] = []
    generator = TransformersGenerator(model, [eos], say=said.append)
    if family.decoder == "none":
        with pytest.raises(TrainingError, match=f"with its cache in transf.*{family.why_no_cache}"):
            generator.generate(as_prompts(PROMPTS), 2, Sampling(6, temperature=0), [0, 1, 2, 3])
        return
    groups = generator.generate(as_prompts(PROMPTS), 2, Sampling(6, temperature=0), [0, 1, 2, 3])
    assert generator.decoder is DECODERS[family.decoder]
    expected = []
    if family.why:
        expected = [f"note: the embedded engine is off ({family.why}"]
    assert len(said) == len(expected)
    for line, begin in zip(said, expected, strict=True):
        assert line.startswith(begin)
    assert [[c.ids for c in group] for group in groups] == [[ids, ids] for ids in greedy]
    sampled = generator.generate(as_prompts(PROMPTS), 2, Sampling(6), [4, 5, 6, 7])
    for prompt, (c, *_) in zip(PROMPTS * 2, [*groups, *sampled], strict=True):
        with torch.no_grad():
            right = true_logprobs(model, prompt, c.ids)
        assert c.sampling_logprobs == pytest.approx(right.tolist(), abs=1e-4)


def test_depthwise_convolution_is_a_state() -> None:
    model = make(Family("llama"))
    assert not is_recurrent(model)
    model.model.layers[0].mixer = nn.Conv1d(4, 4, 3, groups=4)
    assert is_recurrent(model)


def two_steps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, **changes: Any
) -> Run:
    """A run of two steps that begins with the model."""
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    own: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "steps": 2,
        "generation__temperature": 2.0,
        "checkpoint__every": 1,
        "dataset__eval": None,
    }
    return trained(folder, **own, **changes)


@pytest.mark.runs
@pytest.mark.parametrize("family", [f for f in FAMILIES if str(f) in RUN], ids=str)
def test_a_run_trains_and_resumes(
    family: Family, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make(family, len(tokenizer))
    straight = two_steps(model, tokenizer, tmp_path)
    for line in metrics(straight):
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics(straight)[0]["grad_norm"] > 0
    first = paths.checkpoint_path(straight.folder, 1)
    resumed = two_steps(model, tokenizer, tmp_path, resume=str(first))
    assert torch.equal(weights(resumed), weights(straight))
    assert not torch.equal(
        weights(resumed), torch.cat([p.detach().flatten() for p in model.parameters()])
    )
