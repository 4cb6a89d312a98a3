"""What is asked of vLLM, in full, and which of its answers are refused."""

import math
from typing import Any

import pytest

from grpo_cli.errors import TrainingError
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.vllm.requests import (
    check_lengths,
    completion,
    prompt_logprobs,
    repeated,
    sampling_params,
)
from grpo_cli.records import Completion

PLAIN: dict[str, Any] = {
    "n": 4, "max_tokens": 16, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "logit_bias": None, "stop": None, "stop_token_ids": [2, 7], "ignore_eos": True, "logprobs": 0,
    "detokenize": False, "skip_special_tokens": False, "seed": 0,
}  # fmt: skip


def asked(sampling: Sampling, seed: int = 0, structured: Any = None) -> dict[str, Any]:
    return sampling_params(sampling, 4, (2, 7), seed, structured)


def test_plain_request() -> None:
    assert asked(Sampling(max_tokens=16)) == PLAIN, "no structured outputs"


def test_request_with_every_setting() -> None:
    same: dict[str, Any] = {
        "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    sampling = Sampling(**same, logit_bias=((3, 1.5),), stop=("\n", "END"))
    expected = same | {
        "logit_bias": {3: 1.5}, "stop": ["\n", "END"], "detokenize": True,
        "structured_outputs": {"regex": "a"},
    }  # fmt: skip
    assert asked(sampling, structured={"regex": "a"}) == PLAIN | expected


def test_greedy_request() -> None:
    greedy = Sampling(
        max_tokens=16, temperature=0, top_p=0.5, top_k=3, min_p=0.2, repetition_penalty=1.5
    )
    expected = {"n": 1, "temperature": 0, "repetition_penalty": 1.5, "seed": 3}
    assert asked(greedy, seed=3) == PLAIN | expected


@pytest.mark.parametrize(("wanted", "for_vllm"), [(0, 0), (1, 0), (2, 1), (9, 8)])
def test_the_shortest_completion_counts_its_eos(wanted: int, for_vllm: int) -> None:
    assert asked(Sampling(16, min_tokens=wanted))["min_tokens"] == for_vllm


def test_a_completion_is_kept_as_it_came() -> None:
    found = completion((5, 2), [-0.5, -9998.0], "length", 3)
    assert found == Completion([5, 2], [-0.5, -9998.0], "length", sampled_at=3)


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "sentence"),
    [
        ([5], [-0.5], "abort", r"broke a completion off \(abort\)"),
        ([5, 6], [-0.5], "stop", "2 tokens and 1 log-probs"),
        ([], [], "stop", "0 tokens and 0 log-probs"),
        ([5, 6], [-0.5, -9999.0], "stop", "a token without its log-probability"),
        ([5, 6], [-math.inf, -0.5], "stop", "a token without its log-probability"),
    ],
)
def test_completions_that_are_refused(
    ids: list[int], logprobs: list[float], reason: str | None, sentence: str
) -> None:
    with pytest.raises(TrainingError, match=sentence):
        completion(ids, logprobs, reason, 0)


def test_one_greedy_completion_stands_for_all() -> None:
    one, other = Completion([5], [-1.0], "stop"), Completion([6], [-1.0], "stop")
    assert repeated([one], 3) == [one, one, one]
    assert repeated([one, other], 2) == [one, other]


def test_too_long_a_sequence_is_refused() -> None:
    check_lengths(3, 5, 8, "x")
    with pytest.raises(TrainingError, match=r"3 tokens .* of up to 6 does not fit into 8, .* x\."):
        check_lengths(3, 6, 8, "x")


def test_prompt_logprobs() -> None:
    found = [None, {4: -9.0, 6: -0.5}, {7: -0.25, 6: -9.0}]
    assert prompt_logprobs([5, 6, 7], found) == [-0.5, -0.25]


@pytest.mark.parametrize(
    "found", [[], [None, {6: -0.5}, None], [None, {6: -0.5}, {8: -0.25}]], ids=str
)
def test_missing_prompt_logprobs(found: Any) -> None:
    with pytest.raises(TrainingError, match="no log-probabilities of a prompt"):
        prompt_logprobs([5, 6, 7], found)
