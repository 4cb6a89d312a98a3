"""The state of completions that are being sampled; all decoders use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import Finished, Request
from grpo_cli.generation.sampling import choose
from grpo_cli.generation.stop_strings import StopStrings
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion


class DecodingState:
    """Holds G = num_generations rows of each prompt: row r is completion r % G of prompt r // G."""

    def __init__(
        self,
        request: Request,
        eos_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        numbers: Sequence[int] | None = None,
        never: tuple[int, ...] = (),
    ) -> None:
        """Starts all rows.

        Args:
            tokenizer: required only for stop strings.
            numbers: indices of the request's prompts to sample; None: all.
            never: tokens that must not be sampled.
        """
        self.request = request
        self.numbers = [*(range(len(request.prompts)) if numbers is None else numbers)]
        self.sources = [request.prompts[n] for n in self.numbers]
        self.prompts = [prompt.ids for prompt in self.sources]
        self.num_generations = num_generations = request.num_generations
        self.sampling = sampling = replace(request.sampling, never=never)
        self.seeds = [request.seeds[n] for n in self.numbers]
        self.eos_ids = list(eos_ids)
        self.finished: list[Finished] = []  # until `take_finished`
        self.stop = None
        if sampling.stop:
            assert tokenizer is not None, "stop strings are found in text"
            self.stop = StopStrings(tokenizer, sampling.stop)
        rows = len(self.prompts) * num_generations
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.logprobs: list[list[float]] = [[] for _ in range(rows)]
        self.finish_reasons: list[Literal["stop", "length"]] = ["length"] * rows
        self.left = [num_generations] * len(self.prompts)  # unfinished rows of each prompt
        self.noise: dict[int, np.ndarray] = {}
        self.bias: Tensor | None = None
        self.seen: dict[int, Tensor] = {}
        self.counts: dict[int, Tensor] = {}

    @property
    def missing(self) -> list[int]:
        """The indices of the request's prompts that are not finished."""
        return [n for n, left in zip(self.numbers, self.left, strict=True) if left]

    def take_finished(self) -> list[Finished]:
        """Returns the prompts that have finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def conversation(self, row: int) -> int:
        """Returns the number of a row's conversation."""
        number, j = divmod(row, self.num_generations)
        return self.request.conversations[self.numbers[number] * self.num_generations + j]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with the longest completion."""
        return max(map(len, self.prompts)) + self.sampling.max_tokens

    def ids(self, row: int) -> list[int]:
        """Returns the ids of a row's prompt and of its completion so far."""
        return [*self.prompts[row // self.num_generations], *self.tokens[row]]

    def next(self, rows: Sequence[int], logits: Tensor) -> tuple[Tensor, list[bool]]:
        """Draws a token for each of these rows.

        Args:
            logits: [B, V] for the rows' next tokens.

        Returns:
            (tokens [B], whether each row has ended with its token).
        """
        heartbeat.beat()
        uniforms, device = None, logits.device
        if self.sampling.temperature > 0:
            drawn = [self.stream(row)[len(self.tokens[row])] for row in rows]
            uniforms = torch.tensor(np.array(drawn), device=device)  # [B]
        if self.bias is None:
            self.bias = self.sampling.bias(logits.shape[-1], device)
        tokens, logprobs = choose(
            logits,
            self.sampling,
            uniforms,
            bias=self.bias,
            seen=self._seen(rows, logits),
            counts=self._counts(rows, logits),
            forbidden=self._forbidden(rows, device),
        )
        ended = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            self.tokens[row].append(token)
            self.logprobs[row].append(logprob)
            if row in self.seen:
                self.seen[row][token] = True
            if row in self.counts:
                self.counts[row][token] += 1
            ended.append(self._has_ended(row, token))
            if ended[-1]:
                self._end(row)
        return tokens, ended

    @property
    def reads_no_history(self) -> bool:
        """Whether no setting reads earlier tokens, as a penalty or a stop string does."""
        s = self.sampling
        penalties = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        return not (s.stop or s.min_tokens or penalties)

    def take(self, row: int, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Appends tokens to a row, up to the one that ends it; returns whether one does.

        For tokens that were drawn elsewhere; requires `reads_no_history`.
        """
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens[row].append(token)
            self.logprobs[row].append(logprob)
            if self._has_ended(row, token):
                self._end(row)
                return True
        return False

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
        self.counts.pop(row, None)
        number = row // self.num_generations
        self.left[number] -= 1
        if not self.left[number]:
            rows = range(number * self.num_generations, (number + 1) * self.num_generations)
            group = [
                Completion(self.tokens[r], self.logprobs[r], self.finish_reasons[r]) for r in rows
            ]
            self.finished.append(Finished(self.request, self.numbers[number], group))

    def stream(self, row: int) -> np.ndarray:
        """Returns the uniform numbers in [0, 1) for sampling a row's tokens, [max_tokens]."""
        if row not in self.noise:
            seed = self.seeds[row // self.num_generations]
            own = torch.Generator().manual_seed(derive_seed(seed, row % self.num_generations))
            self.noise[row] = torch.rand(self.sampling.max_tokens, generator=own).numpy()
        return self.noise[row]

    def _seen(self, rows: Sequence[int], logits: Tensor) -> Tensor | None:
        """Returns which tokens occur in prompt or completion, [B, V] bool; None if unused."""
        if self.sampling.repetition_penalty == 1:
            return None
        for row in rows:
            if row not in self.seen:
                seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
                seen[torch.tensor(self.prompts[row // self.num_generations])] = True
                self.seen[row] = seen
        return torch.stack([self.seen[row] for row in rows])

    def _counts(self, rows: Sequence[int], logits: Tensor) -> Tensor | None:
        """Returns how often each token occurs in the completion, [B, V]; None if unused."""
        if not (self.sampling.presence_penalty or self.sampling.frequency_penalty):
            return None
        for row in rows:
            if row not in self.counts:
                self.counts[row] = torch.zeros(logits.shape[-1], device=logits.device)
        return torch.stack([self.counts[row] for row in rows])

    def _forbidden(self, rows: Sequence[int], device: torch.device) -> Tensor | None:
        """Returns the tokens that must not come next, [B, K], -1 where fewer; None if none."""
        is_short = [len(self.tokens[row]) + 1 < self.sampling.min_tokens for row in rows]
        if not (any(is_short) and self.eos_ids):
            return None
        none = [-1] * len(self.eos_ids)
        return torch.tensor([self.eos_ids if short else none for short in is_short], device=device)


def check_logits(logits: Tensor) -> None:
    """Checks the logits of a batch of prompts for NaN.

    Args:
        logits: [N, V].

    Raises:
        TrainingError: a logit is NaN, so that no token can be drawn.
    """
    if logits.isnan().any():
        raise TrainingError(
            "the policy's logits are NaN, so that nothing can be sampled: its weights are not "
            "finite or too large. Resume from an earlier checkpoint with a lower "
            "optimizer.learning_rate, or use a wider model.dtype.",
            alone=True,
        )
