"""Decoding with transformers' own cache, for models `engine.py` cannot decode.

A prompt's cache is repeated for its group, and finished rows are dropped. Layers of recurrent
models (`families.is_recurrent`) keep a state instead of keys and values, and padding would enter
that state. Their prompts are therefore batched by equal length, and the caches are joined:

    prompts of 3, 3 and 1 tokens   two forwards, [2, 3] and [1, 1]
    joined, 3 rows                 states [3, ...]; keys [3, H, 3, D], two columns of row 2 masked
    a step                         one token a row; no state sees padding
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from grpo_cli.generation.base import Finished
from grpo_cli.generation.embedded.decoding_state import DecodingState, check_logits
from grpo_cli.models import packing
from grpo_cli.models.families import is_recurrent, without_router_logits
from grpo_cli.models.packing import pad_left
from grpo_cli.records import Prompt


@dataclass(frozen=True)
class CachedDecoder:
    """Decodes padded batches; repeats a prompt's cache for its group and drops finished rows."""

    model: PreTrainedModel
    max_rows: int  # maximum batch size; a group is never split, and may be larger

    @torch.no_grad()
    def decode(self, states: Sequence[DecodingState]) -> Iterator[list[Finished]]:
        """Decodes every row from its prompt to its last token; yields prompts as they finish."""
        for state in states:
            at_once = max(1, self.max_rows // state.num_generations)
            # Prompts of similar length are grouped to reduce padding.
            lengths = [len(prompt) for prompt in state.prompts]
            order = sorted(range(len(lengths)), key=lengths.__getitem__)
            for start in range(0, len(order), at_once):
                yield from self._batch(state, order[start : start + at_once])

    def _batch(self, state: DecodingState, numbers: Sequence[int]) -> Iterator[list[Finished]]:
        """Decodes the prompts with these indices, which are sorted by length."""
        repeat = state.num_generations
        prompts = [state.sources[n] for n in numbers]
        together = [prompts]
        if is_recurrent(self.model):
            together = [list(same) for _, same in groupby(prompts, key=lambda p: len(p.ids))]
        begun = [self._prefill(some) for some in together]
        logits = torch.cat([part for part, _ in begun])
        check_logits(logits)
        cache = join([part for _, part in begun])
        mask = pad_left([p.ids for p in prompts], self.model.device)[1]
        after = [packing.positions_of(self.model, p)[1] for p in prompts]
        rows = [n * repeat + j for n in numbers for j in range(repeat)]
        next_position = torch.tensor(after, device=mask.device)  # [B]
        if repeat > 1:
            index = torch.arange(len(numbers), device=mask.device).repeat_interleave(repeat)
            cache.reorder_cache(index)
            logits, mask, next_position = logits[index], mask[index], next_position[index]
        while True:
            tokens, ended = state.next(rows, logits)
            if state.finished:
                yield state.take_finished()
            keep = [i for i, has_ended in enumerate(ended) if not has_ended]
            if not keep:
                return
            if len(keep) < len(rows):
                index = torch.tensor(keep, device=tokens.device)
                cache.reorder_cache(index)
                rows = [rows[i] for i in keep]
                tokens, mask, next_position = tokens[index], mask[index], next_position[index]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            position_ids = {"position_ids": next_position[:, None]}
            logits = self._forward(tokens[:, None], mask, cache, position_ids)
            next_position = next_position + 1

    def _prefill(self, prompts: Sequence[Prompt]) -> tuple[Tensor, DynamicCache]:
        """Returns the logits of the prompts' next tokens, [B, V], and their cache."""
        ids, mask = pad_left([p.ids for p in prompts], self.model.device)
        cache = DynamicCache(config=self.model.config)
        arguments = packing.padded_arguments(prompts, ids, mask, self.model)
        return self._forward(ids, mask, cache, arguments), cache

    def _forward(
        self, ids: Tensor, mask: Tensor, cache: DynamicCache, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Returns the logits of each row's next token, [B, V]."""
        if "cache_params" in signature(self.model.forward).parameters:  # a model without attention
            past: dict[str, Any] = {"cache_params": cache}  # such batches have no padding
        else:
            past = {"past_key_values": cache, "attention_mask": mask}
        past |= without_router_logits(self.model)
        logits: Tensor = self.model(
            input_ids=ids, use_cache=True, logits_to_keep=1, **arguments, **past
        ).logits
        return logits[:, -1]


def join(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Concatenates caches along the batch, padding keys on the left; the last is the longest."""
    whole = caches[-1]
    for layer, *others in zip(whole.layers, *(c.layers for c in caches[:-1]), strict=True):
        parts: list[Any] = [*others, layer]
        if len(parts) == 1:
            return whole
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, {})
            for i, state in states.items():
                if state is not None:
                    states[i] = torch.cat([getattr(part, name)[i] for part in parts])
        for name in ("keys", "values"):
            kept = getattr(layer, name, None)
            if kept is not None:
                columns = [kept.shape[-2] - getattr(part, name).shape[-2] for part in parts]
                padded = zip(parts, columns, strict=True)
                rows = [pad(getattr(part, name), (0, 0, n, 0)) for part, n in padded]
                setattr(layer, name, torch.cat(rows))
    return whole
