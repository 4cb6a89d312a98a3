"""Turns rollouts into model inputs: one packed row with each prompt once, or padded rows.

Example: a prompt p of 3 tokens with completions a (4 tokens) and b (3 tokens), and a prompt q of 1
token with a completion c (2 tokens), packed. The last token of a completion predicts nothing and is
omitted, so 13 tokens take N = 10 places (padded, the three rows take 3 x 7 = 21):

    place         0  1  2    3  4  5    6  7    8    9
    token        p0 p1 p2 | a0 a1 a2 | b0 b1 | q0 | c0
    position      0  1  2    3  4  5    3  4    0    1
    segment         0           1         2     3    4     a and b attend to p, c to q

    predictors   2  3  4  5    2  6  7    8  9             T = 9: place 2 (p2) predicts a0 and b0
    targets     a0 a1 a2 a3   b0 b1 b2   c0 c1

The hidden state of p2 is computed once and used for both completions. If a1 came from a tool, it is
an input but not a target: place 3 and target a1 are omitted, and T = 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.models.attention import Layout, Prefix
from grpo_cli.records import Prompt, Rollout, on_device


@dataclass(frozen=True)
class Inputs:
    """A model's inputs, and the places whose outputs predict the completions.

    `predictors` and `targets` list the sampled tokens of all completions in order, T in total.
    Tokens of tools and environments are inputs, not targets: they need no logits.
    """

    input_ids: Tensor  # [R, W]
    attention_mask: Tensor | None  # [R, W] 1 on real tokens; None for a packed row
    layout: Layout | None  # attention layout of a packed row; None for padded rows
    predictors: Tensor  # [T] places in [R · W] of the tokens that predict the targets
    targets: Tensor  # [T] sampled completion tokens
    arguments: dict[str, Tensor]  # position_ids [R, W] or [3, R, W]; pixel_values etc.


def pack(
    rollouts: Sequence[Rollout],
    device: torch.device,
    model: PreTrainedModel | None = None,
) -> Inputs:
    """Packs rollouts into one row of W = N tokens, with each prompt and its images once.

    Args:
        model: gives the positions and the dtype of images; required if prompts have images.
    """
    ids: list[int] = []
    position_ids = PositionIds()
    prompts: list[Prompt] = []
    segments: list[tuple[int, int]] = []
    prefixes: list[Prefix] = []
    predictors: list[Sequence[int]] = [[] for _ in rollouts]
    for members in by_prompt(rollouts):
        whole = rollouts[members[0]].prompt
        prompts.append(whole)
        prompt = whole.ids
        start, first = len(ids), len(ids) + len(prompt)
        ids += prompt
        after = position_ids.add_prompt(whole, model)
        segments.append((start, first))
        for i in members:
            fed = rollouts[i].completion.ids[:-1]
            begin = len(ids)
            predictors[i] = sampled_of([first - 1, *range(begin, begin + len(fed))], rollouts[i])
            ids += fed
            position_ids.add(range(after, after + len(fed)))
            if fed:
                segments.append((begin, begin + len(fed)))
        if len(ids) > first:
            prefixes.append(Prefix(start, first, first, len(ids)))
    input_ids = on_device(torch.tensor([ids]), device)
    return Inputs(
        input_ids=input_ids,
        attention_mask=None,
        layout=Layout(segments, prefixes, device),
        predictors=as_places([p for row in predictors for p in row], device),
        targets=targets(rollouts, device),
        arguments={"position_ids": position_ids.tensor(device)}
        | image_arguments(prompts, input_ids, model, packed=True),
    )


def pad(
    rollouts: Sequence[Rollout],
    device: torch.device,
    model: PreTrainedModel | None = None,
    *,
    right: bool = False,
) -> Inputs:
    """Pads rollouts to one row each, prompt and completion together.

    Args:
        model: as for `pack`; with M-RoPE and images the model computes the positions.
        right: pad on the right. Then no token reads the padding, even in recurrent layers, which
            may ignore the mask.
    """
    rows = [r.prompt.ids + r.completion.ids for r in rollouts]
    ids, mask = (pad_right if right else pad_left)(rows, device)
    width = ids.shape[1]
    ends = [width * i + (len(row) if right else width) for i, row in enumerate(rows)]
    predictors = [
        place
        for end, r in zip(ends, rollouts, strict=True)
        for place in sampled_of(range(end - len(r.completion.ids) - 1, end - 1), r)
    ]
    prompts = [r.prompt for r in rollouts]
    return Inputs(
        input_ids=ids,
        attention_mask=mask,
        layout=None,
        predictors=as_places(predictors, device),
        targets=targets(rollouts, device),
        arguments=padded_arguments(prompts, ids, mask, model),
    )


def targets(rollouts: Sequence[Rollout], device: torch.device) -> Tensor:
    """Returns the sampled tokens of all completions in order, [T]."""
    return as_places([t for r in rollouts for t in sampled_of(r.completion.ids, r)], device)


def trains(rollouts: Sequence[Rollout], device: torch.device) -> Tensor:
    """Returns a mask of the tokens in `targets` that train, [T] float, 1 or 0."""
    kept = [r.loss_tokens > 0 for r in rollouts for _ in range(r.completion.sampled_tokens)]
    return on_device(torch.tensor(kept).float(), device)


def sampled_of(values: Sequence[int], r: Rollout) -> Sequence[int]:
    """Filters a completion's values, one per token, to those of sampled tokens."""
    sampled = r.completion.is_sampled
    return values if sampled is None else list(compress(values, sampled))


def as_places(values: list[int], device: torch.device) -> Tensor:
    """Returns places or token ids as a long tensor, [T], which may be empty."""
    return on_device(torch.tensor(values, dtype=torch.long), device)


def by_prompt(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Returns the indices of each prompt's rollouts, in order of the prompts' first appearance.

    Prompts are equal if they have the same tokens and come from the same row, which determines
    other model inputs such as images.
    """
    indices: dict[tuple[int, ...], list[int]] = {}
    for i, r in enumerate(rollouts):
        indices.setdefault((r.prompt.row, *r.prompt.ids), []).append(i)
    return list(indices.values())


def packed_micro_batches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """Splits rollouts so that no packed micro-batch has more than `max_tokens` tokens.

    Rollouts of a prompt stay together if they fit. A rollout longer than `max_tokens` is its own
    micro-batch. The split changes memory and time, never the gradient.
    """
    chunk: list[Rollout] = []
    tokens = 0
    for members in by_prompt(rollouts):
        shared = 0  # prompt tokens that are not yet counted in this micro-batch
        for i, r in enumerate(rollouts[m] for m in members):
            if i == 0:
                shared = len(r.prompt.ids)
            added = len(r.completion.ids) - 1
            if chunk and tokens + shared + added > max_tokens:
                yield chunk
                chunk, tokens, shared = [], 0, len(r.prompt.ids)
            chunk.append(r)
            tokens += shared + added
            shared = 0
    if chunk:
        yield chunk


def padded_micro_batches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """Splits rollouts so that no padded micro-batch has more than `max_tokens` places.

    Rows of similar length are grouped to reduce padding.
    """
    chunk: list[Rollout] = []
    for r in sorted(rollouts, key=length):
        if chunk and (len(chunk) + 1) * length(r) > max_tokens:  # the longest so far
            yield chunk
            chunk = []
        chunk.append(r)
    if chunk:
        yield chunk


def length(r: Rollout) -> int:
    """Returns the number of tokens in prompt and completion."""
    return len(r.prompt.ids) + len(r.completion.ids)


def unique_tokens(rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Returns (number of tokens when packed, number of (query, key) pairs in attention)."""
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


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pads B lists of ids with zeros; returns (ids [B, T], attention mask [B, T])."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return on_device(ids, device), on_device(mask, device)


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-pads B lists of ids with zeros; returns (ids [B, T], attention mask [B, T])."""
    ids, mask = (t.flip(-1) for t in pad_left([row[::-1] for row in rows], device))
    return ids, mask


def has_three_axes(model: PreTrainedModel | None) -> bool:
    """Returns whether a model's image tokens have positions on three axes (M-RoPE)."""
    return model is not None and hasattr(model.base_model, "get_rope_index")


def positions_of(model: PreTrainedModel | None, prompt: Prompt) -> tuple[Tensor, int]:
    """Returns the positions of a prompt's tokens, and of the token after them.

    Returns:
        (positions [A, P], position of the completion's first token). A is 3 for images in a model
        with M-RoPE (Qwen2-VL, arXiv 2409.12191), where an image of 16 tokens in a grid of 4 x 4
        takes the positions 0 to 3 on each spatial axis. Otherwise A is 1.
    """
    length = len(prompt.ids)
    if model is None or not prompt.images or not has_three_axes(model):
        return torch.arange(length)[None], length
    index: Any = model.base_model.get_rope_index
    assert prompt.vision is not None
    given: dict[str, Any] = {**prompt.vision.inputs(prompt.images)}
    given["mm_token_type_ids"] = torch.tensor([prompt.vision.type_ids(prompt.ids)])
    taken = {n: given[n] for n in signature(index).parameters if n in given}
    positions, delta = index(torch.tensor([prompt.ids]), **taken)
    return positions[-3:, 0], length + int(delta.flatten()[0])


def _concatenated(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenates tensors along an axis, zero-padded to the largest size on the other axes."""
    largest = [max(sizes) for sizes in zip(*(t.shape for t in parts), strict=True)]
    padded = []
    for t in parts:
        size = [n if i == axis else largest[i] for i, n in enumerate(t.shape)]
        if list(t.shape) != size:
            whole = t.new_zeros(size)
            whole[tuple(slice(n) for n in t.shape)] = t
            t = whole
        padded.append(t)
    return torch.cat(padded, axis)


class PositionIds:
    """Collects the positions of tokens in one row: on one axis, or on three with M-RoPE."""

    def __init__(self) -> None:
        self.axes: list[list[int]] = [[]]

    def add(self, positions: Iterable[int]) -> None:
        """Adds tokens whose positions are the same on all axes."""
        first, *others = self.axes
        before = len(first)
        first.extend(positions)
        for axis in others:
            axis.extend(first[before:])

    def add_prompt(self, prompt: Prompt, model: PreTrainedModel | None, known: int = 0) -> int:
        """Adds a prompt except its first `known` tokens; returns the position after it."""
        if not prompt.images:
            self.add(range(known, len(prompt.ids)))
            return len(prompt.ids)
        positions, after = positions_of(model, prompt)
        positions = positions[:, known:]
        if known and len(self.axes) == 1 and bool((positions == positions[0]).all()):
            positions = positions[:1]  # the rest is only text
        if len(positions) == 1:
            self.add(positions[0].tolist())
            return after
        while len(self.axes) < len(positions):
            self.axes.append(list(self.axes[0]))
        for axis, values in zip(self.axes, positions.tolist(), strict=True):
            axis.extend(values)
        return after

    def tensor(self, device: torch.device) -> Tensor:
        """Returns the positions as a model input, [1, N] or [3, 1, N]."""
        positions = on_device(torch.tensor(self.axes), device)
        return positions if len(positions) == 1 else positions[:, None]


def image_arguments(
    prompts: Sequence[Prompt], ids: Tensor, model: PreTrainedModel | None, *, packed: bool
) -> dict[str, Tensor]:
    """Returns a model's keyword arguments for the images of prompts; {} without images.

    Args:
        prompts: all in one row, each once, if `packed`; else each is a row.
        ids: [R, W], all tokens of the rows.
    """
    vision = next((p.vision for p in prompts if p.images), None)
    if vision is None:
        return {}
    assert model is not None, "prompts with images need a model"
    made = [p.vision.inputs(p.images) if p.vision and p.images else {} for p in prompts]
    given: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for of_prompt in made for name in of_prompt):
        parts = [of_prompt.get(name) for of_prompt in made]
        by_row = name in vision.by_row
        if by_row and not packed:  # rows with fewer images are padded with zero images
            like = next(t for t in parts if t is not None)
            parts = [like[:, :0] if t is None else t for t in parts]
        axis = 1 if by_row and packed else 0
        joined = _concatenated([t for t in parts if t is not None], axis).to(ids.device)
        given[name] = joined.to(model.dtype) if joined.is_floating_point() else joined
    if vision.type_name is not None:
        types = torch.tensor([vision.type_ids(row) for row in ids.tolist()], device=ids.device)
        given[vision.type_name] = types
    return given


def padded_arguments(
    prompts: Sequence[Prompt], ids: Tensor, mask: Tensor, model: PreTrainedModel | None
) -> dict[str, Tensor]:
    """Returns a model's keyword arguments for positions and images of padded rows.

    A model with M-RoPE gets no positions with images, since it computes them itself.

    Args:
        prompts: the rows' prompts. ids: [B, W], with padding. mask: [B, W] 1 on real tokens.
    """
    images = image_arguments(prompts, ids, model, packed=False)
    if images and has_three_axes(model):
        return images
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # 0 on left padding
    return {"position_ids": positions} | images
