"""The table of GPUs, and the one sentence for a name that is not in it."""

import pytest
import torch

from grpo_cli.errors import UserError
from grpo_cli.planning import devices


@pytest.mark.parametrize("name", devices.GPUS)
def test_every_gpu_has_a_peak_and_a_memory(name: str) -> None:
    device = devices.named(name, torch.float16)
    card, memory, bandwidth, _ = devices.GPUS[name]
    assert device.flops >= 6e13, card
    assert device.memory == pytest.approx(0.94e9 * memory)
    assert device.bandwidth == pytest.approx(1e9 * bandwidth)


def test_several_nodes_are_linked_by_the_slower_link() -> None:
    assert devices.named("H100-80GB", torch.bfloat16).link == 450e9
    assert devices.named("h100-80gb", torch.bfloat16, nodes=2).link == 50e9
    assert devices.named("l4", torch.bfloat16, nodes=2).link == 32e9


def test_an_unknown_gpu_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"^gpu = h100-80: is not listed; .* mean h100-80gb"):
        devices.named("h100-80", torch.bfloat16)


def test_a_gpu_of_several_sizes_is_refused_with_all_of_them() -> None:
    with pytest.raises(UserError, match=r"Did you mean a100-40gb or a100-80gb\?"):
        devices.named("A100", torch.bfloat16)


def test_a_gpu_without_the_type_is_refused() -> None:
    with pytest.raises(UserError, match=r"^gpu = v100-16gb: has no bfloat16; use mixed_precision="):
        devices.named("v100-16gb", torch.bfloat16)


def test_this_machines_cpu() -> None:
    device = devices.of_machine(torch.device("cpu"), 1e11, 5e9)
    assert (device.kind, device.memory, device.flops, device.utilisation) == ("cpu", 5e9, 1e11, 0.6)
