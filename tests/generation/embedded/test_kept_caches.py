"""Tests that conversations go on from what the embedded engine has kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli.generation.embedded import decode_batch, engine
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.embedded.kept_caches import KeptCache
from grpo_cli.generation.sampling import Sampling
from tests.conversations import Conversations

PROMPTS = [[40, 41, 42, 43, 44, 45, 46], [50], [60, 61, 62], [70, 71, 72, 73], [80, 81, 80, 81]]
MANY_EOS = list(range(200, 259))  # completions end after a few tokens
SAMPLING = Sampling(max_tokens=12)
LONGEST = max(map(len, PROMPTS)) + SAMPLING.max_tokens


def sampler(model: PreTrainedModel, max_rows: int = 100) -> TransformersGenerator:
    return TransformersGenerator(model, MANY_EOS, max_rows)


def conversations(**how: Any) -> Conversations:
    return Conversations(PROMPTS, 3, SAMPLING, 4, **how)


def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the tokens of prompts that are computed, at each beginning."""
    found: list[int] = []
    logits = engine.Engine._logits

    def counting(self: Any, ids: Any, *others: Any) -> Any:
        if len(others) > 3:  # a prefill passes `kept`, a decoding step does not
            found.append(ids.numel())
        return logits(self, ids, *others)

    monkeypatch.setattr(engine.Engine, "_logits", counting)
    return found


def worst(model: PreTrainedModel, feed: Conversations) -> float:
    """The largest difference of the engine's log-probabilities from the model's own."""
    differences = []
    for ids, sampled in zip(feed.ids, feed.sampled, strict=True):
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        differences += [abs(logprobs[at - 1, ids[at]].item() - lp) for at, lp in sampled]
    return max(differences)


def same(a: Conversations, b: Conversations) -> bool:
    drawn = [[lp for row in feed.sampled for _, lp in row] for feed in (a, b)]
    return a.ids == b.ids and drawn[0] == pytest.approx(drawn[1], abs=1e-4)


def test_kept_caches_are_reused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler(model).generate([], 1, SAMPLING, [])
    plain, kept = conversations(), conversations()
    keeps_none = sampler(model)
    keeps_none.cache_tokens = LONGEST
    plain.run(keeps_none)
    generator = sampler(model)
    generator.choose_decoder(generator.checked_on or plain.first.prompts)
    counts = computed(monkeypatch)
    kept.run(generator)
    assert same(plain, kept)
    assert worst(model, kept) < 1e-4
    # The prompts once, then each reply and the token before it, which was drawn and not computed.
    replies = sum(map(len, kept.ids)) - 3 * sum(map(len, PROMPTS)) - sum(map(len, kept.sampled))
    assert sum(counts) == sum(map(len, PROMPTS)) + replies + 3 * len(kept.ids)


@pytest.mark.parametrize("most", [1, 4])
def test_caches_without_room_are_computed_again(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    plain, kept = conversations(), conversations()
    plain.run(sampler(model))
    steps = []
    step = engine.Engine._step

    def counting(self: engine.Engine, batches: Any, direct: Any) -> None:
        steps.append((len(self.caches or ()), sum(map(len, batches))))
        step(self, batches, direct)

    monkeypatch.setattr(engine.Engine, "_step", counting)
    generator = sampler(model, 3)
    generator.cache_tokens = most * LONGEST
    kept.run(generator)
    assert same(plain, kept)
    steps = [(held, rows) for held, rows in steps if held]
    assert all(held + rows <= most for held, rows in steps)
    assert bool(steps) == (most > 1)


def test_conversations_do_not_wait_for_one_another(model: PreTrainedModel) -> None:
    slow = conversations(is_repeatable=False, held=4)
    slow.run(sampler(model))
    plain = conversations()
    plain.run(sampler(model))
    assert same(slow, plain)
    second_turn = slow.log.index(("asked", 4))
    assert slow.log.index(("asked", 5), slow.log.index(("asked", 5)) + 1) < second_turn


def test_cache_reuses_a_common_prefix() -> None:
    keys = torch.arange(4.0).view(1, 1, 4, 1)
    cache = KeptCache([1, 2, 3, 4], keys, -keys)
    beginning = cache.beginning([1, 2, 9, 4, 5])
    assert beginning is not None
    assert (list(beginning.ids), beginning.keys.flatten().tolist()) == ([1, 2], [0.0, 1.0])
    assert cache.beginning([9, 2]) is None
    same_prompt = cache.beginning([1, 2, 3, 4])
    assert same_prompt is not None, "the last token's logits are asked for"
    assert same_prompt.values.flatten().tolist() == [0.0, -1.0, -2.0]


def test_out_of_memory_midway(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kept = conversations(), conversations()
    plain.run(sampler(model))
    attend, calls = decode_batch.Continuation.attend, 0

    def failing(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("no room")
        return attend(self, *args)

    monkeypatch.setattr(decode_batch.Continuation, "attend", failing)
    said: Sequence[str] = []
    generator = sampler(model)
    generator.say = said.append  # type: ignore[attr-defined]
    kept.run(generator)
    assert "out of memory" in said[0]
    assert same(plain, kept)
