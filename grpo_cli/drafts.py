"""Completions while they are being sampled, whichever decoder makes the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_cli import heartbeat
from grpo_cli.rollouts import Completion, derive_seed
from grpo_cli.sampling import Sampling, choose
from grpo_cli.stop_strings import StopStrings

OnGroup = Callable[[int, list[Completion]], None]


def ignore(number: int, completions: list[Completion]) -> None:
    """For those who wait until all groups are there."""


class Drafts:
    """`num_generations` rows for each prompt: row r is completion r % G of prompt r // G."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        eos_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_group: OnGroup = ignore,
    ) -> None:
        """Begins them.

        Args:
            seeds: one a prompt; completion j of a prompt is drawn from (its seed, j).
            tokenizer: read where there are stop strings.
            on_group: called with a prompt's number and completions once they are all whole.
        """
        self.prompts = prompts
        self.num_generations = num_generations
        self.sampling = sampling
        self.seeds = seeds
        self.eos_ids = list(eos_ids)
        self.on_group = on_group
        self.stop = None
        if sampling.stop:
            assert tokenizer is not None, "stop strings are found in text"
            self.stop = StopStrings(tokenizer, sampling.stop)
        rows = len(prompts) * num_generations
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.logprobs: list[list[float]] = [[] for _ in range(rows)]
        self.finish_reasons: list[Literal["stop", "length"]] = ["length"] * rows
        self.left = [num_generations] * len(prompts)  # rows of each prompt not yet whole
        self.groups: list[list[Completion]] = [[] for _ in prompts]
        self.noise: dict[int, np.ndarray] = {}
        self.seen: dict[int, Tensor] = {}

    def next(self, rows: Sequence[int], logits: Tensor) -> tuple[Tensor, list[bool]]:
        """Draws a token for each of some rows; hands over groups that are whole by it.

        Args:
            logits: [B, V] of the rows' next tokens.

        Returns:
            (tokens [B], whether a row has ended with it).
        """
        heartbeat.beat()
        tokens, logprobs = choose(
            logits,
            self.sampling,
            self._uniforms(rows, logits.device),
            seen=self._seen(rows, logits),
            forbidden=self._forbidden(rows, logits.device),
        )
        ended = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            self.tokens[row].append(token)
            self.logprobs[row].append(logprob)
            if row in self.seen:
                self.seen[row][token] = True
            ended.append(self._has_ended(row, token))
            if ended[-1]:
                self._end(row)
        return tokens, ended

    def _has_ended(self, row: int, token: int) -> bool:
        ids = self.tokens[row]
        stops = token in self.eos_ids
        if self.stop is not None and not stops and len(ids) >= self.sampling.min_tokens:
            stops = self.stop.ends(ids)
        if stops:
            self.finish_reasons[row] = "stop"
        return stops or len(ids) == self.sampling.max_tokens

    def _end(self, row: int) -> None:
        self.noise.pop(row, None)
        self.seen.pop(row, None)
        number = row // self.num_generations
        self.left[number] -= 1
        if not self.left[number]:
            rows = range(number * self.num_generations, (number + 1) * self.num_generations)
            self.groups[number] = [
                Completion(self.tokens[r], self.logprobs[r], self.finish_reasons[r]) for r in rows
            ]
            self.on_group(number, self.groups[number])

    def _uniforms(self, rows: Sequence[int], device: torch.device) -> Tensor | None:
        """[B], each from its row's own stream: nothing else in the batch moves it."""
        if self.sampling.temperature == 0:
            return None
        for row in rows:
            if row not in self.noise:
                seed = self.seeds[row // self.num_generations]
                own = derive_seed(seed, row % self.num_generations)
                self.noise[row] = uniforms(own, self.sampling.max_tokens).numpy()
        drawn = [self.noise[row][len(self.tokens[row])] for row in rows]
        return torch.tensor(np.array(drawn), device=device)

    def _seen(self, rows: Sequence[int], logits: Tensor) -> Tensor | None:
        """[B, V] tokens of prompt and completion, where a repetition penalty reads them."""
        if self.sampling.repetition_penalty == 1:
            return None
        for row in rows:
            if row not in self.seen:
                seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
                seen[torch.tensor(self.prompts[row // self.num_generations])] = True
                self.seen[row] = seen
        return torch.stack([self.seen[row] for row in rows])

    def _forbidden(self, rows: Sequence[int], device: torch.device) -> Tensor | None:
        """[B, K] every eos, in the rows that are still too short."""
        if not (self.sampling.min_tokens and self.eos_ids):
            return None
        eos, none = self.eos_ids, [-1] * len(self.eos_ids)
        short = [len(self.tokens[row]) + 1 < self.sampling.min_tokens for row in rows]
        return torch.tensor([eos if s else none for s in short], device=device)


def uniforms(seed: int, number: int) -> Tensor:
    """The numbers in [0, 1) that a row's tokens are drawn with, [number]."""
    return torch.rand(number, generator=torch.Generator().manual_seed(seed))
