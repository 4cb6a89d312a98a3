"""Tokens that must not come next: against transformers, and by hand."""

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor, PreTrainedTokenizerFast

from grpo_cli.generation.forbidden import Ngrams, bad_word_ids, completing


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_repeated_ngrams_are_those_of_transformers(n: int) -> None:
    drawn = torch.Generator().manual_seed(n)
    ids = torch.randint(4, (20, 12), generator=drawn)
    for length in range(1, 13):
        begun = ids[:, :length]
        scores = NoRepeatNGramLogitsProcessor(n)(begun, torch.zeros(20, 4))
        for row, score in zip(begun.tolist(), scores, strict=True):
            expected = score.isinf().nonzero().flatten().tolist()
            ours = Ngrams(n, row[: length // 2])
            for token in row[length // 2 :]:
                ours.append(token)
            assert ours.repeating() == expected, (row, n)


def test_the_last_token_of_a_sequence_is_what_completes_it() -> None:
    sequences = [[7], [1, 2, 3], [2, 4], [2, 5]]
    assert completing([], sequences) == [7]
    assert completing([1, 2], sequences) == [7, 3, 4, 5]
    assert completing([2], sequences) == [7, 4, 5]
    assert completing([2, 1], sequences) == [7]


def test_words_are_forbidden_at_the_beginning_and_within_a_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    plain = tokenizer.encode("12", add_special_tokens=False)
    spaced = tokenizer.encode(" 12", add_special_tokens=False)
    assert len(spaced) > len(plain), "the space is a token of its own here"
    assert bad_word_ids(tokenizer, ["12", " 12"]) == [plain, plain]
