"""The Generator protocol, and the generator that samples with the transformers model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.policy import inference
from grpo_cli.rollouts import (
    Completion,
    Group,
    Prompt,
    Rollout,
    derive_seed,
    pad_left,
    positions,
)
from grpo_cli.sampling import Sampling, draw, log_distribution

OnGroup = Callable[[int, list[Completion]], None]


def ignore(number: int, completions: list[Completion]) -> None:
    """For those who wait until all groups are there."""


class Generator(Protocol):
    """Makes completions. Speaks token ids; what it returns was sampled, nothing is guessed."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        """`num_generations` completions for each prompt, in the order of the prompts.

        Args:
            prompts: token ids. seeds: one a prompt; completion j of a prompt depends on
                (its seed, j) and the weights, not on the other prompts.
            on_group: called with (number of the prompt, its completions) as soon as they are all
                there, while others are still being made; it must be quick.
        """
        ...

    def update_weights(self, policy: PreTrainedModel) -> None:
        """Makes what is generated from now on come from `policy`."""
        ...

    def close(self) -> None:
        """Gives back processes and memory."""
        ...


def sample(
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, Prompt]],
    num_generations: int,
    sampling: Sampling,
    seed: int,
    arrived: Callable[[list[Rollout]], None],
) -> list[Group]:
    """A group of rollouts, decoded and not yet scored, for each (position, prompt).

    Args:
        arrived: called with a group's rollouts while others are still being sampled.
    """
    groups: dict[int, Group] = {}

    def take(number: int, completions: list[Completion]) -> None:
        position, prompt = prompts[number]
        texts = (tokenizer.decode(c.ids, skip_special_tokens=True) for c in completions)
        rollouts = [Rollout(prompt, c, t) for c, t in zip(completions, texts, strict=True)]
        groups[number] = Group(position, prompt, rollouts)
        arrived(rollouts)

    generator.generate(
        [prompt.ids for _, prompt in prompts],
        num_generations,
        sampling,
        [derive_seed(seed, position) for position, _ in prompts],
        take,
    )
    assert len(groups) == len(prompts), "a generator hands over every group once"
    return [groups[number] for number in range(len(prompts))]


class TransformersGenerator:
    """Decodes with the policy's own module: no second copy of the weights, none to be stale.

    A prompt is computed once and its cache repeated for the group; rows leave the batch as they
    finish.
    """

    def __init__(self, policy: PreTrainedModel, eos_ids: Sequence[int], max_rows: int) -> None:
        """max_rows: completions decoded at the same time; bounds the memory of the cache."""
        self.policy = policy
        self.eos_ids = torch.tensor(list(eos_ids), dtype=torch.long)
        self.max_rows = max_rows

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        at_once = max(1, self.max_rows // num_generations)
        # Prompts of like length go together, so that little is padded.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        groups: list[list[Completion]] = [[] for _ in prompts]
        with inference(self.policy):
            for start in range(0, len(order), at_once):
                chunk = order[start : start + at_once]

                def whole(k: int, completions: list[Completion], chunk: list[int] = chunk) -> None:
                    groups[chunk[k]] = completions
                    on_group(chunk[k], completions)

                self._decode(
                    [prompts[i] for i in chunk],
                    num_generations,
                    sampling,
                    [derive_seed(seeds[i], j) for i in chunk for j in range(num_generations)],
                    whole,
                )
        return groups

    def update_weights(self, policy: PreTrainedModel) -> None:
        self.policy = policy

    def close(self) -> None:
        pass

    def _decode(
        self,
        prompts: list[Sequence[int]],
        repeat: int,
        sampling: Sampling,
        seeds: list[int],
        on_group: OnGroup,
    ) -> None:
        """One batch of B = len(prompts) · repeat rows, from prompts to the last token."""
        device = self.policy.device
        eos = self.eos_ids.to(device)
        noise = uniforms(seeds, sampling).to(device)  # [B, max_tokens]
        ids, mask = pad_left(prompts, device)
        cache = DynamicCache(config=self.policy.config)
        logits = self._forward(ids, mask, positions(mask), cache)
        if repeat > 1:
            cache.batch_repeat_interleave(repeat)
        logits, mask = logits.repeat_interleave(repeat, 0), mask.repeat_interleave(repeat, 0)
        next_position = mask.sum(-1)  # [B]

        tokens: list[list[int]] = [[] for _ in seeds]
        logprobs: list[list[float]] = [[] for _ in seeds]
        left = [repeat] * len(prompts)  # rows of each group still being decoded
        finish_reasons: list[Literal["stop", "length"]] = ["length"] * len(seeds)

        def end(row: int) -> None:
            group = row // repeat
            left[group] -= 1
            if not left[group]:
                rows = range(group * repeat, (group + 1) * repeat)
                done = [Completion(tokens[r], logprobs[r], finish_reasons[r]) for r in rows]
                on_group(group, done)

        alive = torch.arange(len(seeds), device=device)  # rows of the batch still being decoded
        for t in range(sampling.max_tokens):
            log_p = log_distribution(logits, sampling)
            token = draw(log_p, noise[alive, t]) if sampling.temperature else log_p.argmax(-1)
            chosen = log_p.gather(-1, token[:, None]).squeeze(-1)
            ended = torch.isin(token, eos)
            last = t + 1 == sampling.max_tokens
            for row, a, b, stops in zip(
                alive.tolist(), token.tolist(), chosen.tolist(), ended.tolist(), strict=True
            ):
                tokens[row].append(a)
                logprobs[row].append(b)
                if stops:
                    finish_reasons[row] = "stop"
                if stops or last:
                    end(row)
            if last or bool(ended.all()):
                break
            if bool(ended.any()):
                keep = (~ended).nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                alive, token = alive[keep], token[keep]
                mask, next_position = mask[keep], next_position[keep]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            logits = self._forward(token[:, None], mask, next_position[:, None], cache)
            next_position = next_position + 1

    def _forward(
        self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Logits of each row's next token, [B, V]."""
        logits: Tensor = self.policy(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]


def uniforms(seeds: Sequence[int], sampling: Sampling) -> Tensor:
    """One number in [0, 1) for each row and position, [B, max_tokens], from each row's own seed."""
    if sampling.temperature == 0:
        return torch.zeros(len(seeds), 0)
    generator = torch.Generator()
    rows = [
        torch.rand(sampling.max_tokens, generator=generator.manual_seed(seed)) for seed in seeds
    ]
    return torch.stack(rows)
