"""Builds requests to vLLM and reads its answers, both in process and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from grpo_cli.errors import TrainingError
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Completion

LOWEST = -9998.0  # vLLM writes -9999 for a missing log-probability
BANNED = -100.0  # the lowest logit bias that vLLM accepts: a probability below 1e-40


def sampling_params(
    sampling: Sampling,
    num_generations: int,
    eos_ids: Sequence[int],
    seed: int,
    structured: dict[str, Any] | None,
) -> dict[str, Any]:
    """Returns the fields of vLLM's SamplingParams, all that a server may have a default for.

    The tokens that end a completion are listed explicitly; vLLM's own eos is ignored.
    """
    greedy = sampling.temperature == 0
    never = dict.fromkeys(sampling.never, BANNED)
    params: dict[str, Any] = {
        "n": 1 if greedy else num_generations,  # greedy completions would be equal
        "seed": seed,
        "max_tokens": sampling.max_tokens,
        # vLLM's count excludes the eos; it checks stop strings only after the minimum.
        "min_tokens": max(sampling.min_tokens - 1, 0),
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0 if greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {**dict(sampling.logit_bias), **never} or None,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(eos_ids),
        "ignore_eos": True,
        "logprobs": 0,  # only of the sampled token
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
    }
    if structured is not None:
        params["structured_outputs"] = structured
    return params


def completion(
    ids: Sequence[int], logprobs: Sequence[float], finish_reason: str | None, sampled_at: int
) -> Completion:
    """Returns a completion from vLLM's output, after checking it.

    Args:
        sampled_at: step of the oldest weights that a token was sampled with.

    Raises:
        TrainingError: it was aborted, or lacks log-probabilities.
    """
    if finish_reason not in ("stop", "length"):
        raise TrainingError(f"vLLM broke a completion off ({finish_reason}).", alone=True)
    if len(ids) != len(logprobs) or not ids:
        said = f"vLLM returned {len(ids)} tokens and {len(logprobs)} log-probs."
        raise TrainingError(said, alone=True)
    if not all(logprob >= LOWEST for logprob in logprobs):  # also catches NaN
        raise TrainingError("vLLM returned a token without its log-probability.", alone=True)
    reason: Literal["stop", "length"] = "stop" if finish_reason == "stop" else "length"
    return Completion(list(ids), list(logprobs), reason, sampled_at)


def repeated(group: list[Completion], num_generations: int) -> list[Completion]:
    """Returns the group; repeats a single greedy completion `num_generations` times."""
    return group * num_generations if len(group) == 1 else group


def check_lengths(longest: int, max_tokens: int, max_model_len: int, whose: str) -> None:
    """Raises a TrainingError if vLLM would truncate completions without a warning.

    Args:
        longest: length of the longest prompt in tokens.
        whose: the limit's owner or key, for the message.
    """
    if longest + max_tokens > max_model_len:
        raise TrainingError(
            f"a prompt of {longest} tokens with a completion of up to {max_tokens} does not fit "
            f"into {max_model_len}, the longest sequence of {whose}.",
            alone=True,
        )


def prompt_logprobs(ids: Sequence[int], found: Sequence[dict[int, float] | None]) -> list[float]:
    """Returns the log-probabilities of a prompt's tokens except the first, [len(ids) - 1].

    Args:
        found: for each token, log-probabilities by token id; None for the first.

    Raises:
        TrainingError: a log-probability is missing.
    """
    known = zip(ids[1:], found[1:], strict=False)
    logprobs = [row[token] for token, row in known if row is not None and token in row]
    if len(logprobs) != len(ids) - 1:
        raise TrainingError("vLLM returned no log-probabilities of a prompt.", alone=True)
    return logprobs
