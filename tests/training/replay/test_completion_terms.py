"""The numbers of a completion's tokens, by hand."""

import math

import pytest
import torch

from grpo_cli.algorithm.loss import Coefficients
from grpo_cli.config.schema import Loss
from grpo_cli.training.replay.completion_terms import CLIPPED, LEFT_OUT, MASKED, TRAINS, terms_of
from tests.conftest import make_rollout

COEFFICIENTS = Coefficients(beta=0.5, entropy=0.1, entropy_tokens=5.0)


def test_a_clipped_a_masked_and_a_left_out_token() -> None:
    r = make_rollout(completion_ids=(7, 8, 9, 10), advantage=2.0, reward=1.0)
    r.completion = type(r.completion)(
        r.completion.ids, [0.0] * 4, "stop", is_sampled=[True, True, False, True]
    )
    r.weight = 0.25
    r.old_logprobs = torch.tensor([-1.0, -1.0, 0.0, -1.0])
    r.ref_logprobs = torch.tensor([-1.0, -1.0, 0.0, -2.0])
    r.high_entropy = torch.tensor([1.0, 1.0, 0.0, 0.0])
    logprobs = torch.tensor([[-1.0, -1.0 + math.log(1.5), 0.0, -1.0]])
    found = terms_of(Loss(beta=0.5, kl_estimator="k2"), r, logprobs, None, COEFFICIENTS)
    assert found.marks == [TRAINS, CLIPPED, MASKED, LEFT_OUT]
    assert found.ratio.tolist() == pytest.approx([1, 1.5, 1, 1])
    assert found.kl is not None
    assert found.kl.tolist() == pytest.approx([0, math.log(1.5) ** 2 / 2, 0, 0.5])
    # Ratio · advantage · weight where it is not clipped, less β · (log π − log π_ref) · weight.
    of_kl = 0.5 * 0.25
    expected = [2 * 0.25, -of_kl * math.log(1.5), 0, -of_kl]
    assert found.pull.tolist() == pytest.approx(expected, abs=1e-6)


def test_an_on_policy_completion_without_advantage() -> None:
    r = make_rollout(reward=1.0)
    r.weight = 0.5
    found = terms_of(Loss(), r, torch.tensor([[-1.0, -2.0]]), None, COEFFICIENTS)
    assert found.marks == [TRAINS, TRAINS]
    assert found.ratio.tolist() == [1, 1]
    assert found.old_logprobs.tolist() == [-1, -2]
    assert found.kl is None
    assert found.pull.tolist() == [0, 0]
