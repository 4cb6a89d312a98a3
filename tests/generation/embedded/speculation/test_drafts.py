import random

from grpo_cli.generation.embedded.speculation.drafts import ORDERS, NgramDrafts
from grpo_cli.generation.embedded.speculation.kept_completions import KeptCompletions

PROMPT = [1, 2, 3, 4, 5, 6, 7]
COMPLETION = list(range(10, 30))


def test_a_draft_is_what_has_followed_most_often() -> None:
    drafts = NgramDrafts(PROMPT)
    assert drafts.draft([], 8) == []
    for _ in range(3):
        drafts.add(COMPLETION)
    drafts.add([10, 11, 12, 13, 99])
    assert drafts.draft([], 4) == COMPLETION[:4]
    # 13 has followed four times of four, 14 three times of four: 3.3/4 and 2.3/4; then 2.3/3.
    assert drafts.draft([10, 11, 12], 8) == [13, 14]
    drafts.add([10, 11, 12, 13, 99])
    assert drafts.draft([10, 11, 12], 8) == [13, 14][:1]
    assert drafts.draft([98, 13, 14, 15], 1) == [16]  # by the three tokens before it
    assert drafts.draft([98, 97, 14, 15], 1) == []


def test_counts_are_the_same_in_one_piece_and_token_by_token() -> None:
    rng = random.Random(0)
    whole, parts = NgramDrafts(PROMPT), NgramDrafts(PROMPT)
    for _ in range(5):
        ids = [rng.randrange(3) for _ in range(40)]
        whole.add(ids)
        counted = 0
        while counted < len(ids):
            more = counted + rng.randrange(1, 9)
            parts.add(ids[:more], counted)
            counted = min(more, len(ids))
    assert whole.counts == parts.counts


def test_hits_are_the_tokens_that_drafts_would_have_had() -> None:
    drafts = NgramDrafts(PROMPT)
    for share in (0.0, 0.0, 1.0):  # seen once, a token has a probability of 0.3
        assert drafts.hits(COMPLETION) == share * len(COMPLETION)
        drafts.add(COMPLETION)
    assert drafts.hits(COMPLETION, 15) == len(COMPLETION) - 15
    assert drafts.hits([*COMPLETION[:4], 99, *COMPLETION[5:]]) == len(COMPLETION) - 1 - min(ORDERS)


def test_kept_completions_are_bounded_and_restored() -> None:
    kept = KeptCompletions(most_tokens=10)
    kept.keep([1], [[1, 2, 3], [4]])
    kept.keep([2], [[5, 6]])
    kept.keep([1], [[7, 8], []])
    assert (kept.of([1]), kept.tokens) == ([[7, 8], []], 4)
    kept.keep([3], [[9] * 7])  # 11 tokens: those of prompt 2 are the oldest
    assert [kept.of([n]) for n in (1, 2, 3)] == [[[7, 8], []], [], [[9] * 7]]
    again = KeptCompletions()
    again.restore(kept.to_state())
    assert [again.of([n]) for n in (1, 2, 3)] == [[[7, 8], []], [], [[9] * 7]]
    assert again.tokens == kept.tokens
    again.restore(KeptCompletions().to_state())
    assert not again.groups
