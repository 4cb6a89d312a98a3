"""The peak memory of stages, against allocations of known size."""

import pytest
import torch

from grpo_cli.reporting.stage_clock import CLEAR, CPU_STEPS, Clock, MemoryMeter

CPU = torch.device("cpu")
KNOWN = 2**27


@pytest.fixture
def meter() -> MemoryMeter:
    meter = MemoryMeter(CPU)
    for _ in range(CPU_STEPS.start):
        assert meter.of_next_step(lambda: 0) is None
    assert meter.of_next_step(lambda: 0) is meter
    return meter


@pytest.mark.skipif(not CLEAR.exists(), reason="only Linux keeps the largest resident memory")
def test_a_stage_has_its_own_peak_and_not_that_of_the_one_before(meter: MemoryMeter) -> None:
    clock = Clock(CPU, meter=meter)
    with clock.stage("large"):
        torch.ones(KNOWN // 4)
    with clock.stage("small"):
        torch.ones(KNOWN // 32)
    assert meter.peaks["large"] == pytest.approx(KNOWN, rel=0.1)
    assert meter.peaks["small"] < KNOWN / 4


def test_weights_count_and_what_else_is_resident_does_not() -> None:
    meter = MemoryMeter(CPU)
    for _ in range(CPU_STEPS.start):
        meter.of_next_step(lambda: 0)
    meter.of_next_step(lambda: 10**9)
    meter.skip()
    meter.note("reward")
    assert meter.peaks["reward"] == pytest.approx(10**9, rel=0.05)
