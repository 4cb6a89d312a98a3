"""A plan as a whole: what is derived, what fits, what to change."""

from dataclasses import replace

import pytest

from grpo_cli.planning import devices
from grpo_cli.planning.memory import activation_bytes
from grpo_cli.planning.plan import Change, Extent, Plan, changes, derived_micro_tokens, predict
from grpo_cli.planning.settings import Settings
from grpo_cli.planning.text import duration, gb, number, text_of
from tests.planning.models import MODELS, TINY

import torch  # isort: skip

H100 = devices.named("h100-80gb", torch.bfloat16)
L4 = devices.named("l4", torch.bfloat16)
STEP = Settings(
    strategy="ddp", prompts=8, num_generations=8, prompt_tokens=256, completion_tokens=512,
    max_completion_tokens=512, embedded=True, reference=False, gradient_checkpointing=False,
)  # fmt: skip


def plan_of(settings: Settings, device: devices.Device, gpus: int = 1) -> Plan:
    return predict(MODELS["Qwen2.5-7B"], settings, device, gpus, Extent(10, 2))


@pytest.fixture(scope="module")
def on_l4() -> tuple[Plan, list[Change]]:
    plan = plan_of(STEP, L4)
    return plan, changes(plan, lambda s: plan_of(replace(s, decoded_rows=None), L4))


def test_micro_batches_are_derived_as_the_run_derives_them() -> None:
    """16 bytes a parameter of 420 leave 4 of 10 parts for activations; a power of two."""
    plain = replace(STEP, bf16=False)
    size = activation_bytes(TINY, plain)
    device = replace(H100, memory=420 * 16 + 2.5 * 1500 * size)
    assert derived_micro_tokens(TINY, plain, device, 1) == 1024
    assert derived_micro_tokens(TINY, plain, H100, 1) == 32768


def test_a_model_that_fits_needs_no_changes_to_be_named() -> None:
    plan = predict(TINY, STEP, L4, 1, Extent(10))
    assert plan.fits
    assert plan.run_seconds == 10 * plan.step_seconds
    found = plan.as_json()
    assert found["peak"] == max(found["memory"].values())
    assert found["memory"][found["peak_stage"]] == found["peak"]
    assert found["step_seconds"] == pytest.approx(sum(found["time"].values()), rel=0.01)


def test_changes_that_fit_come_first(on_l4: tuple[Plan, list[Change]]) -> None:
    plan, found = on_l4
    assert not plan.fits
    fits = [change.plan.fits for change in found]
    assert fits == sorted(fits, reverse=True)
    adapters = [c.words.partition(" ")[0] for c in found if c.plan.fits]
    assert sorted(adapters) == ["adapter=lora", "adapter=qlora"], "all that 24 GB hold"
    assert all(c.plan.memory.peak < plan.memory.peak for c in found)
    words = " ".join(c.words for c in found)
    assert "distributed=fsdp2" not in words, "one GPU"


def test_eight_gpus_can_be_sharded_over() -> None:
    plan = plan_of(replace(STEP, embedded=False), H100, gpus=8)
    found = changes(plan, lambda s: plan_of(s, H100, gpus=8))
    assert "distributed=fsdp2" in [c.words for c in found if c.plan.fits]


def test_text(on_l4: tuple[Plan, list[Change]]) -> None:
    plan, found = on_l4
    text = text_of("mine", plan, found, ["something is left out"])
    assert "DOES NOT FIT" in text
    assert f"* {found[0].words}\n" in text, "the first that fits"
    assert "note: something is left out\n" in text
    assert all(len(line) < 200 for line in text.splitlines())


def test_numbers_for_people() -> None:
    assert [gb(4e6), gb(1.26e9), gb(172e9)] == ["4 MB", "1.3 GB", "172 GB"]
    assert [number(512), number(1.02e6), number(3e12)] == ["512 ", "1.02 M ", "3 T "]
    seconds = (0.0123, 8, 600, 36000, 1e6)
    assert [*map(duration, seconds)] == ["12.3 ms", "8 s", "10 min", "10 h", "11.6 days"]
