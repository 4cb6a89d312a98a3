"""Chooses and checks the kernel for the attention of packed rows.

The first row of the table that fits the device, the precision and the heads is compared with a
masked softmax on segments of unequal length (`self_check.py`). If it fails or is wrong, the next
row is tried. The last one runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from grpo_cli.models.attention import mismatch
from grpo_cli.models.kernels import self_check
from grpo_cli.models.kernels.base import Kernel
from grpo_cli.models.kernels.table import TABLE, Needs, Row


def choose(
    needs: Needs,
    *,
    say: Callable[[str], None],
    agree_on: Callable[[str | None], str | None] = lambda reason: reason,
    table: Sequence[Row] = TABLE,
) -> Kernel:
    """Returns the first kernel of the table that fits and passes the check.

    Args:
        say: receives a line for each kernel that fails.
        agree_on: reduces a reason over all processes to one, so that all use the same kernel.
    """
    *checked, last = [row for row in table if row.fits(needs)]
    for row in checked:
        made: list[Kernel] = []
        failure = agree_on(mismatch(partial(_attempt, row, needs, made)))
        if failure is None:
            return made[0]
        say(f"note: attention kernel {row.name} is not used ({failure})")
    return last.make()  # plain, which needs no check


def _attempt(row: Row, needs: Needs, made: list[Kernel]) -> None:
    """Makes and checks a kernel, and appends it to `made`."""
    made.append(row.make())
    self_check.compare(made[0], needs)
