"""Stage precision: compares log-probabilities and decoding with float64."""

from __future__ import annotations

import copy
import functools
import math
import random
from functools import partial
from typing import Any

import torch
from check import Cases, Figures, Setting
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.embedded.graphs import CudaGraphs, FallbackGraphs
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.self_check import Outcome
from grpo_cli.records import Completion, Prompt, Rollout

# Times the error of the simplest mode in the same precision; no error can be as small as the floor.
TIMES, FLOOR = 3.0, 1e-6
DECODING_ERROR = {"float32": 1e-3, "bfloat16": 0.1}  # mean difference of log-probabilities, nats
PRECISIONS = ("float32", "bfloat16")
MODES: dict[str, dict[str, Any]] = {
    "packed, logits in chunks": {"packed": True, "chunked": True},
    "packed, logits whole": {"packed": True, "chunked": False},
    "padded, logits in chunks": {"packed": False, "chunked": True},
}


def cases(stage: str, setting: Setting) -> Cases:
    """Returns the cases of the stage."""
    quick: Cases = {}
    compiled: Cases = {}  # last, since a stage may end before they do
    for precision in PRECISIONS:
        for way in ("graphs", "steps"):
            quick[f"decoding, {way}, {precision}"] = partial(decoding, setting, precision, way)
    quick["decoding, graphs against steps"] = partial(graphs_against_steps, setting)
    for precision in PRECISIONS:
        for name, mode in MODES.items():
            call = partial(logprob_error, setting, mode, precision)
            quick[f"logprobs, {name}, {precision}"] = call
        mode = {"packed": True, "compile_backend": "eager" if setting.dry else "inductor"}
        call = partial(logprob_error, setting, mode, precision)
        compiled[f"logprobs, packed, compiled, {precision}"] = call
    return {**quick, **compiled}


@functools.cache
def random_model(setting: Setting) -> PreTrainedModel:
    """Returns a Qwen2 with random float32 weights."""
    width = 64 if setting.dry else 256
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4 * width, hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=2 if setting.dry else 4, num_attention_heads=width // 64 * 2,
        num_key_value_heads=width // 64, max_position_embeddings=32768, tie_word_embeddings=True,
        eos_token_id=None, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    with torch.device(setting.device):
        return Qwen2ForCausalLM(config).eval()


def random_rollouts(setting: Setting) -> list[Rollout]:
    """Returns rollouts of random tokens and lengths, with rewards 1 and -1 in turn."""
    length, groups = (48, 2) if setting.dry else (384, 4)
    draws, words = random.Random(0), range(random_model(setting).config.vocab_size)
    found = []
    for number in range(groups):
        prompt = Prompt(number, draws.choices(words, k=length // 8), "", {})
        for row in range(4):
            count = draws.randint(length // 4, length) - length // 8
            own = Completion(draws.choices(words, k=count), [math.nan] * count, "length")
            sign = 1.0 if row % 2 else -1.0
            found.append(Rollout(prompt, own, "", reward=sign))
    return found


def half(setting: Setting) -> Any:
    """Returns a function that makes autocast's context, as with mixed_precision=bf16."""
    return partial(torch.autocast, setting.device, torch.bfloat16)


def logprob_error(setting: Setting, mode: dict[str, Any], precision: str) -> Figures:
    """Compares log-probabilities and gradient of a mode with the float64 model's."""
    # Copies, since a compiled model stays compiled.
    model, simplest, precise = (copy.deepcopy(random_model(setting)) for _ in range(3))
    rollouts = random_rollouts(setting)
    notes: list[str] = []
    mode = {"autocast": half(setting)} | mode if precision == "bfloat16" else mode
    own = PolicyLogprobs(model, say=notes.append, **mode)
    own.check(rollouts, 1.0)
    least_of = {**mode, "packed": False, "chunked": False, "compile_backend": None}
    plain = PolicyLogprobs(simplest, **least_of)
    exact = PolicyLogprobs(precise.double(), packed=False, chunked=False)
    mine, simple, right = (outcome(p, rollouts) for p in (own, plain, exact))
    largest, mean, error = mine.errors(right)
    _, least, least_error = simple.errors(right)
    figures = {"mean": mean, "max": largest, "gradient": error, "mean, simplest mode": least}
    figures["gradient, simplest mode"] = least_error
    if notes:
        return figures | {"status": "wrong", "error": notes[0]}
    excess = max(mean / (TIMES * least + FLOOR), error / (TIMES * least_error + FLOOR))
    return figures | verdict(excess, 1.0)


def outcome(policy_logprobs: PolicyLogprobs, rollouts: list[Rollout]) -> Outcome:
    """Returns log-probabilities, and the gradient of a mixture of them."""
    model = policy_logprobs.model
    model.zero_grad(set_to_none=True)
    logprobs, _ = policy_logprobs(rollouts, 1.0)
    signs = torch.tensor([[r.reward] for r in rollouts], device=logprobs.device)
    (logprobs * signs).sum().backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return Outcome.of(rollouts, logprobs.detach(), gradient.cpu())


def decoding(setting: Setting, precision: str, way: str) -> Figures:
    """Compares what the embedded engine reports while it samples with the float64 model."""
    generator, rollouts, notes = sampled(setting, precision, way)
    precise = copy.deepcopy(generator.policy).double()
    with torch.no_grad():
        right = PolicyLogprobs(precise, packed=False, chunked=False)(rollouts, 1.0)[0]  # [B, C]
    reported = torch.tensor([r.completion.sampling_logprobs for r in rollouts])
    apart = (reported.double() - right.cpu()).abs()
    figures = {"mean": apart.mean().item(), "max": apart.max().item()}
    if notes:
        return figures | {"status": "wrong", "error": notes[0]}
    return figures | verdict(figures["mean"], DECODING_ERROR[precision])


def graphs_against_steps(setting: Setting) -> Figures:
    """Compares completions and log-probabilities with CUDA graphs with those step by step."""
    (_, replayed, notes), (_, stepped, _) = (
        sampled(setting, "float32", way) for way in ("graphs", "steps")
    )
    pairs = [(a.completion, b.completion) for a, b in zip(replayed, stepped, strict=True)]
    same = [(a, b) for a, b in pairs if a.ids == b.ids]
    gaps = (torch.tensor([a.sampling_logprobs, b.sampling_logprobs]).diff(dim=0) for a, b in same)
    apart = [gap.abs().max().item() for gap in gaps]
    figures = {"same completions": len(same) / len(pairs), "max": max(apart, default=0.0)}
    if notes:
        return figures | {"status": "wrong", "error": notes[0]}
    # Rounding changes a draw about once in 1e5 tokens.
    if figures["same completions"] < 0.75:
        return figures | {"status": "wrong", "error": "completions differ"}
    return figures | verdict(figures["max"], DECODING_ERROR["float32"])


def sampled(
    setting: Setting, precision: str, way: str
) -> tuple[TransformersGenerator, list[Rollout], list[str]]:
    """Samples with CUDA graphs or step by step; returns the engine, rollouts and its notes."""
    model = random_model(setting)
    how: dict[str, Any] = {} if precision == "float32" else {"autocast": half(setting)}
    notes: list[str] = []
    generator = TransformersGenerator(model, [], say=notes.append, **how)
    if setting.dry or way == "steps":
        generator.graphs = FallbackGraphs(CudaGraphs(), notes.append, has_failed=True)
    draws, words = random.Random(0), range(model.config.vocab_size)
    prompts = [Prompt(n, draws.choices(words, k=9 + 7 * n), "", {}) for n in range(4)]
    tokens = 12 if setting.dry else 100
    groups = generator.generate(prompts, 4, Sampling(max_tokens=tokens), [*range(4)])
    rollouts = [Rollout(p, c, "") for p, g in zip(prompts, groups, strict=True) for c in g]
    return generator, rollouts, notes


def verdict(error: float, limit: float) -> Figures:
    """Returns the status of a case; NaN is wrong."""
    if error <= limit:
        return {}
    return {"status": "wrong", "error": f"{error:.2g} is more than {limit:.2g}"}
