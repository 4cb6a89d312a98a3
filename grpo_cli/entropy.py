"""The coefficient of the entropy bonus, where it follows a target. Pure."""

from __future__ import annotations


def adapted_coef(
    coef: float, entropy: float, target: float, *, low: float, high: float, step: float
) -> float:
    """The next optimizer step's coefficient: up by `step` at or below the target, else down.

    Skywork-OR1 (arXiv 2505.22312, section 4.1).

    Args:
        entropy: mean over the optimizer batch's tokens, in nats; target: the same.
        low, high: bounds of the coefficient.
    """
    moved = coef + step if entropy <= target else coef - step
    return min(max(moved, low), high)


def applied_coef(coef: float, entropy: float | None, target: float | None) -> float:
    """The coefficient that acts on an optimizer step.

    Without a target it is `coef`. With one it acts only while the entropy is at or below it, as
    measured in the optimizer step before; in the first one, before any measure, it does not.
    """
    if target is None:
        return coef
    return coef if entropy is not None and entropy <= target else 0.0
