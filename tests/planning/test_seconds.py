"""The seconds of a step by hand."""

from dataclasses import replace

import pytest

from grpo_cli.planning.devices import Device
from grpo_cli.planning.seconds import Speeds, listed_speeds, rows_at_a_time, stage_seconds
from grpo_cli.planning.settings import Settings
from tests.planning.models import TINY

DEVICE = Device("d", "cuda", 1e6, flops=1000, bandwidth=100, link=50, utilisation=0.5)
SPEEDS = Speeds(
    train=500, forward=1000, micro_batch=0.0, prefill=100, steps=((1, 2.0), (3, 4.0)), key=0.0,
    optimizer=7.0, weights=0.0,
)  # fmt: skip
STEP = Settings(
    strategy="ddp", prompts=5, num_generations=2, prompt_tokens=3, completion_tokens=4,
    max_completion_tokens=4, gradient_checkpointing=False, reference=False, micro_tokens=9,
    embedded=True, decoded_rows=10, bf16=False,
)  # fmt: skip
# A group of 3 + 2·3 tokens: 360 parameters in products, of which the head's 40 for 8 tokens.
# Pairs: 6 of the prompt, for each completion 3·3 and 6. 4 · 2 layers · 2 heads · 2.
FORWARD = 2 * (320 * 9 + 40 * 8) + 32 * (6 + 2 * (9 + 6))


def test_steps_between_and_beyond_the_measured_points() -> None:
    assert [SPEEDS.step(rows) for rows in (0.5, 1, 2, 3, 5)] == [2, 2, 3, 4, 6]
    assert replace(SPEEDS, steps=((1, 2.0),)).step(9) == 2


def test_training_by_hand() -> None:
    found = stage_seconds(TINY, DEVICE, 1, STEP, SPEEDS)
    assert found["forward_backward"] == pytest.approx(5 * 3 * FORWARD / 500)
    assert found["optimizer"] == 7
    assert {*found} == {"generate", "forward_backward", "optimizer"}
    more = replace(STEP, reference=True, old_logprobs=True, gradient_checkpointing=True)
    slower = stage_seconds(TINY, DEVICE, 1, more, SPEEDS)
    assert slower["forward_backward"] == pytest.approx(5 * 4 * FORWARD / 500)
    assert slower["ref_logprobs"] == slower["old_logprobs"] == pytest.approx(5 * FORWARD / 1000)
    adapter = replace(STEP, adapter_rank=1)  # no product for the gradient of frozen weights
    of_adapter = stage_seconds(TINY, DEVICE, 1, adapter, SPEEDS)["forward_backward"]
    assert of_adapter == pytest.approx(5 * 2 * FORWARD / 500)
    few = replace(STEP, signal_share=0.4, iterations=3, minibatches=2)
    of_few = stage_seconds(TINY, DEVICE, 1, few, SPEEDS)
    assert of_few["forward_backward"] == pytest.approx(3 * 2 * 3 * FORWARD / 500)
    assert of_few["optimizer"] == 6 * 7


def test_sampling_by_hand() -> None:
    """5 prompts of 3 tokens, one token's logits each; then 3 steps of 10 rows, 11 seconds each."""
    prompts = 5 * (2 * (320 * 3 + 40) + 32 * 6)
    found = stage_seconds(TINY, DEVICE, 1, STEP, SPEEDS)["generate"]
    assert found == pytest.approx(prompts / 100 + 3 * 11)


def test_gradients_are_summed_over_the_link() -> None:
    """420 weights of 4 bytes, sent twice but for a half, at 50 bytes a second."""
    found = stage_seconds(TINY, DEVICE, 2, STEP, SPEEDS)["optimizer"]
    assert found == pytest.approx(7 + 2 * 0.5 * 420 * 4 / 50)
    sharded = replace(STEP, strategy="fsdp2")
    fast = replace(SPEEDS, train=1e12)
    gathered = stage_seconds(TINY, DEVICE, 2, sharded, fast)["forward_backward"]
    assert gathered == pytest.approx(3 * 420 * (2 * 4 + 4) * 0.5 / 50)  # 3 micro-batches


def test_listed_rates() -> None:
    found = listed_speeds(TINY, STEP, DEVICE, 1)
    assert found.train == 500
    read = 0.7 * 100
    assert found.steps[0][1] == pytest.approx(420 * 4 / read)
    assert found.step(10) - found.step(0) == pytest.approx(10 * 2 * 360 / 500)
    assert found.key == pytest.approx(2 * 2 * 4 * 4 / read)


def test_rows_at_a_time() -> None:
    assert rows_at_a_time(TINY, DEVICE, STEP, 20) == 10
    assert rows_at_a_time(TINY, DEVICE, replace(STEP, decoded_rows=None), 2000) == 512
    # 2 · 2 · 4 · 4 bytes a token: 0.4 of 10,000 bytes less 1,680 are 52 tokens, rounded to 32.
    small = replace(DEVICE, memory=1e4)
    assert rows_at_a_time(TINY, small, replace(STEP, decoded_rows=None), 2000) == 32 // 7
