import pytest

from grpo_cli.algorithm.controllers import adapted_beta, adapted_coef, applied_coef


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),  # target 0.5, step 0.005, within 0 and 1
    [
        (0.05, 0.2, 0.055),
        (0.05, 0.5, 0.055),  # at the target it still acts
        (0.05, 0.51, 0.045),
        (0.999, 0.2, 1.0),
        (1.0, 0.2, 1.0),
        (0.003, 0.9, 0.0),
        (0.0, 0.9, 0.0),
    ],
)
def test_adapted_coef_by_hand(coef: float, entropy: float, expected: float) -> None:
    assert adapted_coef(coef, entropy, 0.5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("entropy", "target", "expected"),
    [
        (None, None, 0.03),
        (9.0, None, 0.03),
        (0.2, 0.5, 0.03),
        (0.5, 0.5, 0.03),
        (0.51, 0.5, 0.0),
        (None, 0.5, 0.0),  # before any measure
    ],
)
def test_applied_coef_by_hand(entropy: float | None, target: float | None, expected: float) -> None:
    assert applied_coef(0.03, entropy, target) == expected


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
def test_adapted_beta_by_hand(kl: float, beta: float) -> None:
    assert adapted_beta(0.5, kl, target=0.1) == pytest.approx(beta)
