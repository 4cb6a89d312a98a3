"""Chooses and checks the kernel for the attention of packed rows.

The first kernel that fits the device, the precision and the heads is compared with a masked softmax
on segments of unequal length (`self_check.py`). If it fails or is wrong, the next one is tried.
`Plain` runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from grpo_cli.models.attention import mismatch
from grpo_cli.models.kernels import self_check
from grpo_cli.models.kernels.base import Kernel, Needs
from grpo_cli.models.kernels.flex import Flex
from grpo_cli.models.kernels.plain import Plain
from grpo_cli.models.kernels.varlen import HALVES, Varlen

WIDEST = 256  # maximum head dimension of flash attention


def candidates(needs: Needs) -> dict[str, Callable[[], Kernel]]:
    """Returns the kernels that fit, by name, in the order in which they are tried.

    They depend only on device type, precision and heads, which all processes share.
    """
    kernels: dict[str, Callable[[], Kernel]] = {}
    # Not in float32, where the compilation of flex would take longer than a short run.
    if needs.device.type == "cuda" and needs.dtype in HALVES:
        if needs.head_dim % 8 == 0 and needs.head_dim <= WIDEST:
            kernels["varlen"] = Varlen
        kernels["flex"] = Flex
    return kernels | {"plain": Plain}


def choose(
    needs: Needs,
    *,
    say: Callable[[str], None],
    agree_on: Callable[[str | None], str | None] = lambda reason: reason,
    kernels: Mapping[str, Callable[[], Kernel]] | None = None,
) -> Kernel:
    """Returns the first kernel that passes the check.

    Args:
        say: receives a line for each kernel that fails.
        agree_on: reduces a reason over all processes to one, so that all use the same kernel.
        kernels: those to try in place of `candidates`; the last one is not checked.
    """
    *checked, (_, plain) = (kernels or candidates(needs)).items()
    for name, make in checked:
        made: list[Kernel] = []

        def attempt(make: Callable[[], Kernel] = make, made: list[Kernel] = made) -> None:
            made.append(make())
            self_check.compare(made[0], needs)

        failure = agree_on(mismatch(attempt))
        if failure is None:
            return made[0]
        say(f"note: attention kernel {name} is not used ({failure})")
    return plain()
