"""Adapts coefficients to a target: β of the KL term, and that of the entropy bonus."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_cli.algorithm.settings import Loss

KL_GAIN = 0.1  # Ziegler et al.: β changes by at most a fifth of this per step
ENTROPY_COEF_STEP, ENTROPY_COEF_MAX = 0.005, 1.0  # Skywork-OR1's step


@dataclass
class AdaptiveBeta:
    """The coefficient of the KL term, which follows `loss.kl_target` if that is set."""

    adapted: float | None = None  # stored in checkpoints; None before the first update

    def value(self, config: Loss) -> float:
        """Returns the coefficient for this step."""
        if config.kl_target is None or self.adapted is None:
            return config.beta
        return self.adapted

    def update(self, config: Loss, kl: float) -> None:
        """Updates the coefficient from the KL measured in a step; a NaN leaves it unchanged."""
        if config.kl_target is not None and math.isfinite(kl):
            self.adapted = adapted_beta(self.value(config), kl, config.kl_target)


@dataclass
class AdaptiveEntropyBonus:
    """The coefficient of the entropy bonus, which follows `loss.entropy_target` if that is set."""

    adapted: float | None = None  # stored in checkpoints; None before the first update
    entropy: float | None = None  # entropy of the last optimizer step; also stored

    def value(self, config: Loss) -> float:
        """Returns the coefficient for this optimizer step."""
        coef = config.entropy_coef
        if config.entropy_target is not None and self.adapted is not None:
            coef = self.adapted
        return applied_coef(coef, self.entropy, config.entropy_target)

    def update(self, config: Loss, entropy: float) -> None:
        """Updates the coefficient from the entropy measured in an optimizer step."""
        if config.entropy_target is None:
            return
        self.entropy = entropy
        coef = config.entropy_coef if self.adapted is None else self.adapted
        self.adapted = adapted_coef(coef, entropy, config.entropy_target)


def adapted_beta(beta: float, kl: float, target: float) -> float:
    """Returns the next step's β: higher if the KL is above its target, else lower.

    β ← β(1 + 0.1·e), e = clip(KL/target − 1, −0.2, 0.2) (Ziegler et al., arXiv 1909.08593, section
    2.2).

    Args:
        kl: mean over the step's tokens, in nats. target: its target, in nats.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + KL_GAIN * error)


def adapted_coef(coef: float, entropy: float, target: float) -> float:
    """Returns the next coefficient: a step up if the entropy is at or below target, else down.

    Skywork-OR1 (arXiv 2505.22312, section 4.1).

    Args:
        entropy: mean over the optimizer batch's tokens, in nats. target: its target, in nats.
    """
    moved = coef + ENTROPY_COEF_STEP if entropy <= target else coef - ENTROPY_COEF_STEP
    return min(max(moved, 0.0), ENTROPY_COEF_MAX)


def applied_coef(coef: float, entropy: float | None, target: float | None) -> float:
    """Returns the coefficient that is applied in an optimizer step.

    Without a target it is `coef`. With a target it is `coef` only if the entropy of the previous
    optimizer step was at or below the target, and otherwise 0, as in the first step.
    """
    if target is None:
        return coef
    return coef if entropy is not None and entropy <= target else 0.0
