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
from grpo_cli.models.kernels.table import TABLE, Needs, Row, refusal, unfit


def choose(
    needs: Needs,
    wanted: str = "auto",
    *,
    say: Callable[[str], None],
    agree_on: Callable[[str | None], str | None] = lambda reason: reason,
    table: Sequence[Row] = TABLE,
) -> Kernel:
    """Returns the first kernel of the table that fits and passes the check.

    Args:
        wanted: value of `update.attention_kernel`.
        say: receives a line for each kernel that fails.
        agree_on: reduces a reason over all processes to one, so that all use the same kernel.

    Raises:
        UserError: the wanted kernel does not fit or fails.
    """
    rows = [r for r in table if r.fits(needs) and wanted in (r.name, "auto")]
    if wanted == "auto":
        rows = [r for r in rows if r.is_automatic(needs)]
    reason = unfit([r for r in table if r.name == wanted], needs)
    for row in rows:
        if row.name == "plain":  # needs no check
            return row.make()
        made: list[Kernel] = []
        failure = agree_on(mismatch(partial(_attempt, row, needs, made)))
        if failure is None:
            return made[0]
        reason = f"its check fails: {failure}"
        if wanted == "auto":
            say(f"note: attention kernel {row.name} is not used ({failure})")
    raise refusal(wanted, reason)


def _attempt(row: Row, needs: Needs, made: list[Kernel]) -> None:
    """Makes and checks a kernel, and appends it to `made`."""
    made.append(row.make())
    self_check.compare(made[0], needs)
