import pytest

from grpo_cli.algorithm.batch import WEIGHTS, token_weight

# Two prompts with completions of 5 and 1, and of 2 tokens and one that does not train.
LENGTHS = [[5, 1], [2, 0]]
COUNTS = {"tokens": 8, "completions": 4, "prompts": 2}
LONGEST = 16

# What each token's loss is multiplied by.
BY_HAND = {
    "tokens": [[1 / 8, 1 / 8], [1 / 8]],
    "completions": [[1 / 20, 1 / 4], [1 / 8]],
    "prompts": [[1 / 12, 1 / 12], [1 / 4]],
    "constant": [[1 / 64, 1 / 64], [1 / 64]],
    "sums": [[1 / 4, 1 / 4], [1 / 4]],
}


@pytest.mark.parametrize("normalize", WEIGHTS)
def test_weights_by_hand(normalize: str) -> None:
    for lengths, expected in zip(LENGTHS, BY_HAND[normalize], strict=True):
        tokens = sum(lengths)
        found = [token_weight(normalize, n, tokens, COUNTS, LONGEST) for n in lengths if n]
        assert found == pytest.approx(expected)
