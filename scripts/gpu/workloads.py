"""Makes models with random weights and random rollouts, and times the speed stages."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from bench_probe import peak_memory, synchronize
from bench_setup import MODELS
from cases import Setting
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from grpo_cli.models.memory import release
from grpo_cli.records import Completion, Prompt, Rollout

SHAPES: dict[str, dict[str, int]] = {  # arguments of Qwen2Config
    "0.5b": {key: value for key, value in MODELS["0.5b"].items() if key != "eos"},
    "1.5b": {
        "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    },
    "precise": {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "dry": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    },
}  # fmt: skip
GROUPS = {512: 16, 2048: 4, 8192: 1}  # prompts by their rollouts' greatest length: as many tokens
NUM_GENERATIONS = 8
PROMPTS_OF_STEP = 8
_held: dict[str, PreTrainedModel] = {}  # the last model, which the next case often needs again


def lengths(setting: Setting) -> list[int]:
    """Returns the greatest lengths of rollouts that are measured, in tokens."""
    return [32, 64] if setting.dry else [*GROUPS]


def names(setting: Setting) -> list[str]:
    """Returns the models that are measured."""
    return ["dry"] if setting.dry else ["0.5b", "1.5b"]


def model(name: str, setting: Setting) -> PreTrainedModel:
    """Returns a model with random float32 weights, the same as in the case before if it can be."""
    if name not in _held:
        drop_model()
        _held[name] = make_model(name, setting.device)
    _held[name].zero_grad(set_to_none=True)
    return _held[name]


def drop_model() -> None:
    """Frees the model that is held for the next case."""
    _held.clear()
    release()


def make_model(name: str, device: str) -> PreTrainedModel:
    """Returns a Qwen2 with random float32 weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[name], max_position_embeddings=32768, tie_word_embeddings=True,
        eos_token_id=None, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        made = Qwen2ForCausalLM(config)
    return made.eval()


def half(setting: Setting) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns what makes autocast's context, as with mixed_precision=bf16."""
    return partial(torch.autocast, setting.device, torch.bfloat16)


def rollouts(words: int, length: int, groups: int, size: int = NUM_GENERATIONS) -> list[Rollout]:
    """Returns random rollouts whose lengths spread between a quarter of `length` and `length`.

    An eighth of `length` is the prompt. Advantages are 1 and -1 in turn.
    """
    draws = random.Random(0)
    prompt_tokens = length // 8
    found = []
    for number in range(groups):
        prompt = Prompt(number, draws.choices(range(words), k=prompt_tokens), "", {})
        for row in range(size):
            count = draws.randint(length // 4, length) - prompt_tokens
            sign = 1.0 if row % 2 else -1.0
            own = completion(draws.choices(range(words), k=count))
            found.append(Rollout(prompt, own, "", reward=sign, advantage=sign))
    return found


def completion(ids: list[int]) -> Completion:
    """Returns a completion of these tokens, whose log-probabilities are not known."""
    return Completion(ids, [math.nan] * len(ids), "length")


def now(device: torch.device) -> float:
    """Returns the time in seconds at which everything on the device is done."""
    synchronize(device)
    return time.perf_counter()


def measure(setting: Setting, call: Callable[[], object], repeats: int = 2) -> tuple[float, float]:
    """Returns the median seconds of a call after one that does not count, and its peak in GiB.

    The peak is of all that torch has allocated on the GPU, weights included; on the CPU, of the
    resident memory above that at the beginning.
    """
    device = torch.device(setting.device)
    taken = []
    with peak_memory(device) as seen:
        for _ in range(1 if setting.dry else 1 + repeats):
            start = now(device)
            call()
            taken.append(now(device) - start)
    return statistics.median(taken[1:] or taken), gib(device, seen)


def gib(device: torch.device, seen: Sequence[int]) -> float:
    """Returns the peak of `peak_memory` in GiB; see `measure`."""
    return (seen[1] if device.type == "cuda" else seen[1] - seen[0]) / 2**30
