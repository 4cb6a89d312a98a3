"""The interface of environments: they take messages and return observations, never token ids.

    class Guess:
        def reset(self, row, seed):
            self.number = random.Random(seed).randrange(32)
            return Observation([{"role": "user", "content": "I think of a number below 32."}])

        def step(self, message):
            guess = int(message["content"])
            if guess == self.number:
                return Observation(reward=1.0, done=True)
            return Observation([{"role": "user", "content": "higher" ...}])

Imports nothing but the standard library, since worker processes import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# {"role": "user", "content": "..."}; the assistant's may have "tool_calls", as chat templates
# take them: [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}].
Message = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """The outcome of one call of a tool, for the metrics; its answer is a message."""

    name: str
    failed: bool = False  # it raised, ran out of time, or could not be called as it was written
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Observation:
    """An environment's reply to a turn of the model, or to `reset`."""

    messages: Sequence[Message] = ()  # appended to the conversation; roles user, tool or system
    reward: float | None = None  # of the turn that the model has just taken; None: not known
    done: bool = False  # the episode is over
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of the tools; read after `reset` only
    rewards: Mapping[str, float] = field(default_factory=dict)  # of the whole episode, by name
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as their mean
    calls: Sequence[ToolCall] = ()  # the tools that this turn has called, in order


class Environment(Protocol):
    """One episode's state. An object is made for each rollout, or reset and used again."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins an episode.

        Args:
            row: the columns of the data set's row.
            seed: the same for all rollouts of a group, whose first observation must be equal.
        """

    def step(self, message: Message) -> Observation:
        """Takes a complete turn of the model, the assistant's message."""

    # Optional: `get_reward()` is asked once, when the episode is over, however it ended; and
    # `close()` when the object is no longer needed.
