import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli.generation.base import Request, ignore
from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.embedded.rows import RaggedRow
from grpo_cli.generation.embedded.speculation import drafter, drafts
from grpo_cli.generation.embedded.speculation.drafter import Drafter, Speculation
from grpo_cli.generation.embedded.speculation.drafts import NgramDrafts
from grpo_cli.generation.embedded.speculation.kept_completions import KeptCompletions
from grpo_cli.generation.embedded.speculation.ragged_batch import RaggedBatch
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Completion
from tests.conftest import as_prompts
from tests.generation.embedded.test_generator import MANY_EOS, PROMPTS, SEEDS, same

DRAWS = 120_000, 20_000  # of the slow tier, and of the default one
Z = 4.0  # standard deviations; a chi-square statistic beyond them has a probability of 3e-5


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts all that may be, from the first token on, right or not."""
    monkeypatch.setattr(drafts, "LEAST_PROBABILITY", 0.0)
    monkeypatch.setattr(drafter, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(drafter, "ENOUGH", 0)


def generate(
    model: PreTrainedModel,
    sampling: Sampling,
    speculation: Speculation | None,
    num_generations: int = 4,
    max_rows: int = 100,
) -> list[Completion]:
    generator = TransformersGenerator(model, MANY_EOS, max_rows, speculation=speculation)
    groups = generator.generate(as_prompts(PROMPTS), num_generations, sampling, SEEDS)
    return [c for group in groups for c in group]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(14),
        Sampling(14, temperature=0.3, top_p=0.9),
        Sampling(14, temperature=0),
        Sampling(14, temperature=0.5, repetition_penalty=1.3, frequency_penalty=0.4),
        Sampling(14, temperature=0.5, no_repeat_ngram_size=2, min_tokens=9),
    ],
    ids=str,
)
@pytest.mark.parametrize("max_rows", [100, 6])
def test_completions_are_those_without_drafts(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    sampling: Sampling,
    max_rows: int,
) -> None:
    expected = generate(model, sampling, None, max_rows=max_rows)
    monkeypatch.setattr(NgramDrafts, "draft", _half_right([c.ids for c in expected]))
    how = Speculation(5, budget=50)
    found = generate(model, sampling, how, max_rows=max_rows)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    counts = how.counts
    if max_rows == 100:  # else the last few rows may be few tokens
        assert counts["accepted"] > counts["steps"] / 3
        assert counts["drafted"] - counts["accepted"] > counts["steps"] / 3
    assert counts["steps"] > 0


def _half_right(completions: Sequence[Sequence[int]]) -> Callable[..., list[int]]:
    """Returns a `draft` that knows what follows, and has every third token of a row wrong."""

    def draft(_: NgramDrafts, completion: Sequence[int], most: int) -> list[int]:
        length = len(completion)
        whole = next(ids for ids in completions if ids[:length] == completion)
        places = range(length, min(length + most, len(whole)))
        return [whole[place] if place % 3 else 7 for place in places]

    return draft


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("budget", "longest"), [(16, 3), (6, 2)])
def test_no_draft_goes_beyond_the_limit_or_the_budget(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, budget: int, longest: int
) -> None:
    widths: list[tuple[int, int, int]] = []
    whole = RaggedBatch.make_room

    def recorded(batch: RaggedBatch) -> None:
        whole(batch)
        widths.extend((len(row.draft), row.left, batch.num_tokens) for row in batch.rows)

    monkeypatch.setattr(RaggedBatch, "make_room", recorded)
    kept = KeptCompletions()
    greedy = Sampling(6, temperature=0)
    for i, completion in enumerate(generate(model, greedy, None, num_generations=1)):
        kept.keep(PROMPTS[i], [[*completion.ids, 9, 9, 9]])
    generate(model, greedy, Speculation(3, budget, kept), num_generations=2, max_rows=2)
    assert max(draft for draft, _, _ in widths) == longest
    assert all(draft < left for draft, left, _ in widths)
    assert max(tokens for _, _, tokens in widths) <= budget


def test_drafts_that_do_not_pay_are_not_begun(model: PreTrainedModel) -> None:
    """A random model repeats nothing; the numbers are then the same to the last bit."""
    how = Speculation(8, kept=KeptCompletions())
    long = Sampling(40)
    generator = TransformersGenerator(model, [], 100, speculation=how)
    found = generator.generate(as_prompts(PROMPTS[:1]), 4, long, SEEDS[:1])
    without = TransformersGenerator(model, [], 100)
    assert found == without.generate(as_prompts(PROMPTS[:1]), 4, long, SEEDS[:1])
    assert (how.counts["steps"], how.counts["drafted"]) == (0, 0)


def test_drafts_end_where_too_few_are_right() -> None:
    drafts_of = Drafter(Speculation(4))
    state = _state(rows=1, vocabulary=5, tokens=9)
    known = NgramDrafts([1])
    for _ in range(9):
        known.add([2, 2, 2, 2])
    state.tokens[0] = [2, 2, 2]
    drafts_of.known[state, 0] = known
    drafts_of.counted[state, 0] = 3
    row = RaggedRow(state, 0, 3, 0)
    for _ in range(drafter.ENOUGH // 4):
        drafts_of.draft([row])
        assert len(row.draft) == 4
        row.drawn = 1  # none was right
        drafts_of.count([row])
    drafts_of.draft([row])
    assert row.draft == []


def _state(rows: int, vocabulary: int, tokens: int, **how: object) -> DecodingState:
    """A prompt's rows whose uniform numbers come from one stream, which is quicker."""
    sampling = replace(Sampling(tokens), **how)  # type: ignore[arg-type]
    state = DecodingState(Request(as_prompts([[1]]), rows, sampling, [0]), [], None, ignore)
    numbers = np.random.default_rng(vocabulary).random((rows, tokens), dtype=np.float32)
    state.noise = dict(enumerate(numbers))
    return state


def too_far(observed: Sequence[int], probabilities: Sequence[float]) -> float:
    """The chi-square statistic's distance from its mean, in standard deviations."""
    expected = np.array(probabilities) * sum(observed)
    assert expected.min() > 5
    statistic = float((((np.array(observed) - expected) ** 2) / expected).sum())
    freedom = len(observed) - 1
    # Wilson and Hilferty: its cube root is nearly normal.
    mean, deviation = 1 - 2 / (9 * freedom), math.sqrt(2 / (9 * freedom))
    return ((statistic / freedom) ** (1 / 3) - mean) / deviation


@pytest.mark.parametrize("draft", [[2, 1], [4, 3, 0], [1]])
@pytest.mark.parametrize("draws", [pytest.param(DRAWS[0], marks=pytest.mark.slow), DRAWS[1]])
def test_tokens_drawn_with_drafts_have_the_distributions_probabilities(
    draws: int, draft: list[int]
) -> None:
    """Chi-square over what is drawn first, and over what follows where the draft was right."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(draft) + 1, 5, generator=generator)
    p = logits.softmax(-1).double()
    state = _state(draws, 5, tokens=5)
    many = logits.expand(draws, -1, -1).flatten(0, 1)
    state.next_drafted(list(range(draws)), [draft] * draws, many)
    firsts = np.bincount([ids[0] for ids in state.tokens], minlength=5)
    assert abs(too_far(firsts, p[0].tolist())) < Z
    for depth in range(1, len(draft) + 1):
        right = [ids for ids in state.tokens if ids[:depth] == draft[:depth]]
        assert {len(ids) > depth for ids in right} == {True}
        following = np.bincount([ids[depth] for ids in right], minlength=5)
        assert abs(too_far(following, p[depth].tolist())) < Z
    wrong = [ids for ids in state.tokens if ids[0] != draft[0]]
    assert {len(ids) for ids in wrong} == {1}


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_whole_completions_have_the_models_probabilities(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square over the 125 completions of three tokens of five, drawn 120,000 times."""
    tokens = [40, 41, 42, 43, 44]
    sampling = Sampling(3, allowed_token_ids=tuple(tokens))
    prompt = PROMPTS[0]
    outcomes = [[a, b, c] for a in tokens for b in tokens for c in tokens]
    logits = model(torch.tensor([prompt + ids for ids in outcomes])).logits[:, len(prompt) - 1 : -1]
    only = logits[..., tokens].log_softmax(-1).double()
    places = torch.tensor(outcomes)[..., None] - tokens[0]
    p = only.gather(-1, places).squeeze(-1).sum(-1).exp()
    kept = KeptCompletions()
    kept.keep(prompt, [[41, 44, 40], [41, 42, 43], [44, 44, 44]])
    how = Speculation(2, 8000, kept)
    generator = TransformersGenerator(model, [], 2000, speculation=how)
    seen: dict[tuple[int, ...], int] = {}
    for part in range(DRAWS[0] // 2000):
        (group,) = generator.generate(as_prompts([prompt]), 2000, sampling, [part])
        for completion in group:
            seen[tuple(completion.ids)] = seen.get(tuple(completion.ids), 0) + 1
    assert how.counts["accepted"] > DRAWS[0] / 20
    observed = [seen.get(tuple(ids), 0) for ids in outcomes]
    assert sum(observed) == DRAWS[0]
    assert abs(too_far(observed, (p / p.sum()).tolist())) < Z
