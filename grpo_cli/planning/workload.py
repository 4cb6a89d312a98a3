"""The tokens of a step: lengths of completions, micro-batches, steps of decoding.

Nothing is known of the lengths before a run but their limit and, perhaps, their mean. With a mean
below the limit they are geometric, cut at the limit: each token ends a completion with the same
probability. Example: mean 3, limit 8, 4 completions: 1, 1, 3 and 7 tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from grpo_cli.models import packing
from grpo_cli.planning.settings import Settings
from grpo_cli.records import Completion, Prompt, Rollout

SOME_GROUPS = 32  # of a step, at least, whose micro-batches are made; the others are like them
SOME_MICRO_BATCHES = 4  # that these groups fill, at least
REFILL = 0.5  # share of the rows that have to be free for others to come in (engine.REFILL)


@dataclass(frozen=True)
class MicroBatch:
    """The size of one micro-batch."""

    tokens: int  # computed, with padding where rows are padded
    attended: int  # pairs of a query and a key that it sees
    logits: int  # tokens whose logits are computed


@dataclass(frozen=True)
class Workload:
    """The tokens of one process in one step."""

    settings: Settings
    gpus: int  # processes

    @property
    def groups(self) -> int:
        """Prompts of the process that has the most."""
        return self.settings.prompts_of(self.gpus)

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths of the completions of some groups, one group after another."""
        s = self.settings
        of_group = s.prompt_tokens + s.num_generations * max(s.completion_tokens - 1, 1)
        enough = math.ceil(SOME_MICRO_BATCHES * s.micro_tokens / of_group)
        some = min(self.groups, max(SOME_GROUPS, enough))
        number = some * s.num_generations
        ordered = completion_lengths(s.completion_tokens, s.max_completion_tokens, number)
        return [ordered[i % some * s.num_generations + i // some] for i in range(number)]

    @property
    def scale(self) -> float:
        """The number of all completions, in multiples of those of `lengths`."""
        return self.groups * self.settings.num_generations / len(self.lengths)

    @cached_property
    def rollouts(self) -> list[Rollout]:
        """Rollouts of these lengths; their tokens mean nothing."""
        s = self.settings
        made = []
        for i, length in enumerate(self.lengths):
            ids = [0] * s.prompt_tokens
            prompt = Prompt(row=i // s.num_generations, ids=ids, text="", columns={})
            made.append(Rollout(prompt, Completion([0] * length, [], "stop"), ""))
        return made

    @cached_property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches of all `rollouts`, split as the run splits them."""
        return self._split(self.rollouts)

    @cached_property
    def trained(self) -> list[MicroBatch]:
        """The micro-batches of the groups that have a gradient."""
        s = self.settings
        some = len(self.lengths) // s.num_generations
        groups = max(round(s.signal_share * some), 1)
        return self._split(self.rollouts[: groups * s.num_generations])

    def _split(self, every: list[Rollout]) -> list[MicroBatch]:
        s = self.settings
        split = packing.packed_micro_batches if s.packed else packing.padded_micro_batches
        made = []
        for rollouts in split(every, s.micro_tokens):
            logits = sum(len(r.completion.ids) for r in rollouts)
            if s.packed:
                tokens, pairs = packing.unique_tokens(rollouts)
            else:
                width = max(map(packing.length, rollouts))
                tokens, pairs = len(rollouts) * width, len(rollouts) * width * (width + 1) // 2
            made.append(MicroBatch(tokens, pairs, logits))
        return made

    @property
    def largest(self) -> MicroBatch:
        """The micro-batch of the most tokens that has a gradient."""
        return max(self.trained, key=lambda m: m.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the process's prompts, each once."""
        return self.groups * self.settings.prompt_tokens

    @property
    def sampled_tokens(self) -> float:
        """Tokens of the process's completions."""
        return self.scale * sum(self.lengths)

    @property
    def tokens(self) -> float:
        """Prompt and completion tokens of a step over all processes, as `num_tokens` counts."""
        s = self.settings
        mean = sum(self.lengths) / len(self.lengths)
        return s.prompts * s.num_generations * (s.prompt_tokens + mean)

    @property
    def own_keys(self) -> float:
        """Keys of its own completion that every sampled token reads, added up."""
        return self.scale * sum(n * (n + 1) / 2 for n in self.lengths)

    def decoding_seconds(self, rows: int, of_step: Callable[[float], float]) -> float:
        """Returns the seconds of all steps of decoding, in which rows end and others come in.

        Args:
            rows: decoded at the same time.
            of_step: returns the seconds of a step with a number of rows.
        """
        number = len(self.lengths)
        # A few groups in place of all: the same share of the rows is decoded at a time.
        scale = max(self.scale, 1.0)
        rows = max(1, round(rows / scale)) if rows < number * scale else number
        waiting = list(reversed(self.lengths))
        active: list[int] = []  # steps after which a row ends
        now, total = 0, 0.0
        while waiting or active:
            free = rows - len(active)
            if waiting and (not active or free >= max(REFILL * rows, 1)):
                for _ in range(min(free, len(waiting))):
                    # The first token comes from the prompt's own pass.
                    heapq.heappush(active, now + waiting.pop() - 1)
            end = heapq.heappop(active)
            if end > now:
                total += (end - now) * of_step((len(active) + 1) * scale)
                now = end
        return total


def completion_lengths(mean: float, limit: int, number: int) -> list[int]:
    """Returns `number` lengths between 1 and `limit` of about this mean, in order."""
    if mean >= limit:
        return [limit] * number
    low, high = 0.0, 1.0  # of the probability that a completion goes on
    for _ in range(60):
        middle = (low + high) / 2
        mean_of_middle = (1 - middle**limit) / (1 - middle) if middle < 1 else limit
        low, high = (middle, high) if mean_of_middle < mean else (low, middle)
    if low <= 0:
        return [1] * number
    shares = ((i + 0.5) / number for i in range(number))
    return [min(max(math.ceil(math.log(1 - share) / math.log(low)), 1), limit) for share in shares]
