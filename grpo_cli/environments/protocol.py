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

Imports only the standard library, since worker processes import this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# {"role": "user", "content": "..."}. An assistant message may have "tool_calls" in the form of chat
# templates: [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}].
Message = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """The outcome of one tool call, for the metrics; its answer is a message."""

    name: str
    failed: bool = False  # it raised, timed out, or had invalid arguments or an unknown name
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Observation:
    """An environment's reply to a turn of the model, or to `reset`."""

    messages: Sequence[Message] = ()  # appended to the conversation; roles user, tool or system
    reward: float | None = None  # reward of the model's last turn; None: not known
    done: bool = False  # whether the episode is over
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of the tools; only read after `reset`
    rewards: Mapping[str, float] = field(default_factory=dict)  # episode rewards by name
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as means over episodes
    calls: Sequence[ToolCall] = ()  # the tool calls of this turn, in order


class Environment(Protocol):
    """One episode's state. An object is made for each rollout, or reset and reused."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begins an episode.

        Args:
            row: the columns of the data set's row.
            seed: the same for all rollouts of a group, whose first observations must be equal.
        """

    def step(self, message: Message) -> Observation:
        """Processes a complete turn of the model, an assistant message."""

    # Optional: `get_reward()` is called once, at the end of the episode, however it ended.
    # `close()` is called when the object is no longer needed.
