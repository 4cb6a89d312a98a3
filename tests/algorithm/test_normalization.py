import pytest

from grpo_cli.algorithm.normalization import WEIGHTS, token_weight

# Two prompts with completions of 3 and 1, and of 4 tokens and one that does not train.
LENGTHS = [[3, 1], [4, 0]]
COUNTS = {"tokens": 8, "completions": 4, "prompts": 2}
LONGEST = 16

# What each token's loss is multiplied by.
BY_HAND = {
    "tokens": [[1 / 8, 1 / 8], [1 / 8]],
    "completions": [[1 / 12, 1 / 4], [1 / 16]],
    "prompts": [[1 / 8, 1 / 8], [1 / 8]],
    "constant": [[1 / 64, 1 / 64], [1 / 64]],
    "sums": [[1 / 4, 1 / 4], [1 / 4]],
}


@pytest.mark.parametrize("normalize", WEIGHTS)
def test_weights_by_hand(normalize: str) -> None:
    for lengths, expected in zip(LENGTHS, BY_HAND[normalize], strict=True):
        tokens = sum(lengths)
        found = [token_weight(normalize, n, tokens, COUNTS, LONGEST) for n in lengths if n]
        assert found == pytest.approx(expected)


def test_each_prompt_weighs_the_same_however_long_its_completions() -> None:
    """Groups of 6 and 2 tokens: 12ths and 4ths, where `tokens` has 8ths."""
    counts = {"tokens": 8, "completions": 4, "prompts": 2}
    of_long = token_weight("prompts", 5, 6, counts, LONGEST)
    of_short = token_weight("prompts", 1, 2, counts, LONGEST)
    assert (of_long, of_short) == pytest.approx((1 / 12, 1 / 4))
    assert 6 * of_long == pytest.approx(2 * of_short)
