import pytest

from grpo_cli.algorithm.loss import AdaptiveBeta, AdaptiveEntropyBonus
from grpo_cli.algorithm.settings import Loss


@pytest.mark.parametrize(
    ("coef", "entropy", "adapted", "applied"),  # target 0.5, step 0.005, within 0 and 1
    [
        (0.05, 0.2, 0.055, 0.055),
        (0.05, 0.5, 0.055, 0.055),  # at the target it still acts
        (0.05, 0.51, 0.045, 0.0),
        (0.999, 0.2, 1.0, 1.0),
        (1.0, 0.2, 1.0, 1.0),
        (0.003, 0.9, 0.0, 0.0),
        (0.0, 0.9, 0.0, 0.0),
    ],
)
def test_entropy_bonus_by_hand(coef: float, entropy: float, adapted: float, applied: float) -> None:
    bonus, config = AdaptiveEntropyBonus(), Loss(entropy_coef=coef, entropy_target=0.5)
    assert bonus.value(config) == 0.0, "before any measure"
    bonus.update(config, entropy)
    assert bonus.adapted == pytest.approx(adapted)
    assert bonus.value(config) == pytest.approx(applied)
    assert bonus.value(Loss(entropy_coef=0.03)) == 0.03, "without a target"


@pytest.mark.parametrize(
    ("kl", "beta"),  # from 0.5, target 0.1, gain 0.1
    [
        (0.1, 0.5),
        (0.11, 0.505),
        (0.09, 0.495),
        (0.12, 0.51),
        (5.0, 0.51),  # the error is no more than a fifth
        (0.0, 0.49),
        (-3.0, 0.49),  # k1 can be negative
    ],
)
def test_beta_by_hand(kl: float, beta: float) -> None:
    adaptive = AdaptiveBeta()
    adaptive.update(Loss(beta=0.5, kl_target=0.1), kl)
    assert adaptive.adapted == pytest.approx(beta)
