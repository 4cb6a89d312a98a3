"""Adapts coefficients to a target: β of the KL term, and that of the entropy bonus."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_cli.algorithm.settings import Loss

KL_GAIN = 0.1  # Ziegler et al.: β changes by at most a fifth of this per step
ENTROPY_COEF_STEP, ENTROPY_COEF_MAX = 0.005, 1.0  # Skywork-OR1's step


@dataclass
class AdaptiveBeta:
    """The coefficient of the KL term, which follows `loss.kl_target` if that is set.

    β ← β(1 + 0.1·e), e = clip(KL/target − 1, −0.2, 0.2) (Ziegler et al., arXiv 1909.08593, section
    2.2), with the mean KL of the step's tokens.
    """

    adapted: float | None = None  # stored in checkpoints; None before the first update

    def value(self, config: Loss) -> float:
        """Returns the coefficient for this step."""
        if config.kl_target is None or self.adapted is None:
            return config.beta
        return self.adapted

    def update(self, config: Loss, kl: float) -> None:
        """Updates the coefficient from the KL measured in a step; a NaN leaves it unchanged."""
        if config.kl_target is not None and math.isfinite(kl):
            error = min(max(kl / config.kl_target - 1, -0.2), 0.2)
            self.adapted = self.value(config) * (1 + KL_GAIN * error)


@dataclass
class AdaptiveEntropyBonus:
    """The coefficient of the entropy bonus, which follows `loss.entropy_target` if that is set.

    It takes a step up after an entropy at or below the target, and else a step down. The bonus is
    applied only after such an entropy, so not in the first optimizer step (Skywork-OR1, arXiv
    2505.22312, section 4.1).
    """

    adapted: float | None = None  # stored in checkpoints; None before the first update
    entropy: float | None = None  # entropy of the last optimizer step, nats a token; also stored

    def value(self, config: Loss) -> float:
        """Returns the coefficient for this optimizer step."""
        target = config.entropy_target
        if target is None:
            return config.entropy_coef
        if self.entropy is None or not self.entropy <= target:  # a NaN too
            return 0.0
        return config.entropy_coef if self.adapted is None else self.adapted

    def update(self, config: Loss, entropy: float) -> None:
        """Updates the coefficient from the entropy measured in an optimizer step."""
        if config.entropy_target is None:
            return
        self.entropy = entropy
        coef = config.entropy_coef if self.adapted is None else self.adapted
        step = ENTROPY_COEF_STEP if entropy <= config.entropy_target else -ENTROPY_COEF_STEP
        self.adapted = min(max(coef + step, 0.0), ENTROPY_COEF_MAX)
