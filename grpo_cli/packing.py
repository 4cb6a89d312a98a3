"""Rollouts to what a model is given: one row with each prompt once, or rows padded to one width.

Two completions of a prompt of three tokens, and one of another prompt of one token, packed:

    tokens      p0 p1 p2 | a0 a1 a2 | b0 b1 | q0 | c0        N = 10: the last token of a completion
    positions    0  1  2    3  4  5    3  4    0    1        predicts nothing, and is left out
    sees         ....... prompt and its own ....  ......

a0 and b0 are both predicted by p2, whose hidden state is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli.attention import Layout, Prefix
from grpo_cli.rollouts import Rollout, pad_left, positions


@dataclass(frozen=True)
class Inputs:
    """What a model is given, and where in what it returns the completions are found.

    `predictors` and `targets` go through the completions one after another, T tokens in all.
    """

    input_ids: Tensor  # [R, W]
    position_ids: Tensor  # [R, W]
    attention_mask: Tensor | None  # [R, W] 1 on real tokens; None where `layout` says it
    layout: Layout | None  # of one packed row
    predictors: Tensor  # [T] place, in [R · W], of the token that predicts a completion token
    targets: Tensor  # [T] the completion token


def pack(rollouts: Sequence[Rollout], device: torch.device) -> Inputs:
    """One row, W = N tokens, in which rollouts of one prompt share it."""
    ids: list[int] = []
    position_ids: list[int] = []
    segments: list[tuple[int, int]] = []
    prefixes: list[Prefix] = []
    predictors: list[list[int]] = [[] for _ in rollouts]
    for members in by_prompt(rollouts):
        prompt = rollouts[members[0]].prompt.ids
        start, first = len(ids), len(ids) + len(prompt)
        ids += prompt
        position_ids += range(len(prompt))
        segments.append((start, first))
        for i in members:
            fed = rollouts[i].completion.ids[:-1]
            begin = len(ids)
            predictors[i] = [first - 1, *range(begin, begin + len(fed))]
            ids += fed
            position_ids += range(len(prompt), len(prompt) + len(fed))
            if fed:
                segments.append((begin, begin + len(fed)))
        if len(ids) > first:
            prefixes.append(Prefix(start, first, first, len(ids)))
    return Inputs(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([position_ids], device=device),
        attention_mask=None,
        layout=Layout(segments, prefixes, device),
        predictors=torch.tensor([p for row in predictors for p in row], device=device),
        targets=targets(rollouts, device),
    )


def pad(rollouts: Sequence[Rollout], device: torch.device) -> Inputs:
    """One row a rollout, prompt and completion together, padded on the left."""
    rows = [r.prompt.ids + r.completion.ids for r in rollouts]
    ids, mask = pad_left(rows, device)
    width = ids.shape[1]
    ends = range(width, width * len(rows) + 1, width)
    predictors = [
        place
        for end, r in zip(ends, rollouts, strict=True)
        for place in range(end - len(r.completion.ids) - 1, end - 1)
    ]
    return Inputs(
        input_ids=ids,
        position_ids=positions(mask),
        attention_mask=mask,
        layout=None,
        predictors=torch.tensor(predictors, device=device),
        targets=targets(rollouts, device),
    )


def targets(rollouts: Sequence[Rollout], device: torch.device) -> Tensor:
    """Completion tokens, one completion after another, [T]."""
    return torch.tensor([t for r in rollouts for t in r.completion.ids], device=device)


def by_prompt(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Numbers of the rollouts of each prompt, prompts in the order in which they come first."""
    found: dict[int, list[int]] = {}
    for i, r in enumerate(rollouts):
        found.setdefault(id(r.prompt), []).append(i)
    return list(found.values())


def packed_micro_batches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """Splits rollouts so that no packed micro-batch holds more than `max_tokens` tokens.

    Rollouts of a prompt stay together as far as they fit. A single one longer than the budget is a
    micro-batch of its own. The split changes memory and time, never the gradient.
    """
    chunk: list[Rollout] = []
    tokens = 0
    for members in by_prompt(rollouts):
        shared = 0  # tokens of the prompt that are still to be paid for
        for i, r in enumerate(rollouts[m] for m in members):
            if i == 0:
                shared = len(r.prompt.ids)
            own = len(r.completion.ids) - 1
            if chunk and tokens + shared + own > max_tokens:
                yield chunk
                chunk, tokens, shared = [], 0, len(r.prompt.ids)
            chunk.append(r)
            tokens += shared + own
            shared = 0
    if chunk:
        yield chunk


def padded_micro_batches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """The same for padded rows; rows of like length go together, so that little is padded."""
    chunk: list[Rollout] = []
    for r in sorted(rollouts, key=length):
        if chunk and (len(chunk) + 1) * length(r) > max_tokens:  # the longest so far
            yield chunk
            chunk = []
        chunk.append(r)
    if chunk:
        yield chunk


def length(r: Rollout) -> int:
    """Tokens of prompt and completion."""
    return len(r.prompt.ids) + len(r.completion.ids)


def unique_tokens(rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """(tokens computed when packed, pairs of a query and a key that it sees)."""
    tokens = pairs = 0
    for members in by_prompt(rollouts):
        prompt = len(rollouts[members[0]].prompt.ids)
        tokens += prompt
        pairs += prompt * (prompt + 1) // 2
        for m in members:
            fed = len(rollouts[m].completion.ids) - 1
            tokens += fed
            pairs += fed * prompt + fed * (fed + 1) // 2
    return tokens, pairs
