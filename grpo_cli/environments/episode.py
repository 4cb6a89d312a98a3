r"""One episode while it grows: its tokens, whose they are, and what was said.

    ids          <tool_call>…</tool_call><|im_end|> \n<tool>6</tool>… It is 6.<|im_end|>
    is_sampled   1 1 1 1 1 1 1 1 1 1 1              0 0 0 0 0 0 0 0    1 1 1 1
    turns        Turn(0, 11, "model")               Turn(11, 19, ...)  Turn(19, 23, "model")

Tokens are appended and never rendered again: the model is trained on what it has sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.records import Completion, Turn, counts_by_tool

# Reasons after which `finish_reason` is length: a limit has cut the episode.
CUT = ("max_turns", "turn_tokens", "max_tokens")


class EnvironmentSession(Protocol):
    """One rollout's environment, wherever it runs.

    Each future ends within a deadline, with an observation or an `EnvironmentFailure`.
    """

    def reset(self) -> Future[Observation]: ...

    def step(self, message: Message) -> Future[Observation]: ...

    def finish(self) -> Future[Observation]:
        """Asks for the rewards of the episode and releases the environment."""

    def abandon(self) -> None:
        """Releases the environment, whatever it is doing."""


@dataclass
class Exchange:
    """A turn of the model and the environment's observation of it."""

    message: Message
    turn: int  # index in `Episode.turns`
    observation: Observation | None = None  # None: not there yet
    is_stepped: bool = True  # false: the message was malformed and the environment has not seen it


@dataclass
class Episode:
    """An episode that is still growing."""

    number: int  # of its prompt
    sample: int  # its place in the group
    is_one_text: bool = False  # see `loop.Dialogue`
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    pieces: int = 0  # that were generated
    sampled_at: int | None = None
    parse_errors: int = 0
    stop_reason: str = ""
    error: str = ""  # of the environment, where the rollout is left without a reward
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    session: EnvironmentSession | None = None
    first: Observation | None = None  # of `reset`
    exchanges: list[Exchange] = field(default_factory=list)
    replayed: int = 0  # exchanges that the present environment has seen
    opened: int = 0  # environments
    failures: int = 0  # of its environments
    bystander_failures: int = 0  # of environments in the same worker, which took its own with them
    is_complete: bool = False

    @property
    def turn_start(self) -> int:
        """The first token of the turn under way."""
        return self.turns[-1].end if self.turns else 0

    @property
    def num_model_turns(self) -> int:
        """Number of complete turns of the model."""
        return sum(turn.by == "model" for turn in self.turns)

    def add_piece(self, piece: Completion) -> None:
        """Appends sampled tokens."""
        assert len(piece.ids) == len(piece.sampling_logprobs), "a log-probability for each token"
        self.ids += piece.ids
        self.logprobs += piece.sampling_logprobs
        self.is_sampled += [True] * len(piece.ids)
        self.pieces += 1
        if piece.sampled_at is not None:
            known = piece.sampled_at if self.sampled_at is None else self.sampled_at
            self.sampled_at = min(known, piece.sampled_at)

    def add_reply(self, ids: Sequence[int], seconds: float) -> None:
        """Appends the tokens of an environment's reply as a turn; none of them trains."""
        start = len(self.ids)
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.is_sampled += [False] * len(ids)
        self.turns.append(Turn(start, len(self.ids), "environment", seconds=seconds))

    def end_turn(self, message: Message) -> None:
        """Ends the turn of the model that is under way."""
        self.turns.append(Turn(self.turn_start, len(self.ids), "model"))
        self.messages.append(message)

    def cut(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        del self.ids[length:], self.logprobs[length:], self.is_sampled[length:]

    def observe(self, exchange: Exchange, observation: Observation) -> None:
        """Keeps an environment's observation of a turn."""
        exchange.observation = observation
        self.turns[exchange.turn] = dataclasses.replace(
            self.turns[exchange.turn], reward=observation.reward
        )
        self.messages += observation.messages
        self.calls += observation.calls
        self.metrics |= observation.metrics
        self.rewards |= observation.rewards

    def rewind(self, exchange: Exchange) -> None:
        """Goes back to the end of a turn of the model, as if nothing had come after it."""
        known = self.exchanges[: self.exchanges.index(exchange)]
        self.cut(self.turns[exchange.turn].end)
        del self.turns[exchange.turn + 1 :]
        self.exchanges = [*known, exchange]
        observations = [e.observation for e in known if e.observation is not None]
        self.messages = []
        for e in known:
            self.messages += [e.message, *(e.observation.messages if e.observation else ())]
        self.messages.append(exchange.message)
        self.calls = [call for o in observations for call in o.calls]
        self.parse_errors = sum(not e.is_stepped for e in known)
        self.rewards, self.metrics = {}, {}
        for o in observations:
            self.rewards |= o.rewards
            self.metrics |= o.metrics
        self.stop_reason = ""

    def completion(self) -> Completion:
        """Returns the episode as the completion that it is for everything else.

        The spans of the turns cover all tokens, and the tokens of the environment are those that
        were not sampled.
        """
        if self.turn_start < len(self.ids):  # its environment failed before its first turn ended
            self.turns.append(Turn(self.turn_start, len(self.ids), "model"))
        by_turns = [turn.by == "model" for turn in self.turns for _ in range(turn.start, turn.end)]
        assert by_turns == self.is_sampled, "the turns say whose the tokens are"
        finish_reason: Literal["stop", "length"] = "length" if self.stop_reason in CUT else "stop"
        return Completion(
            self.ids,
            self.logprobs,
            finish_reason,
            self.sampled_at,
            None if all(self.is_sampled) else self.is_sampled,
            tool_calls=len(self.calls),
            tool_errors=sum(call.failed for call in self.calls),
            tool_timeouts=sum(call.timed_out for call in self.calls),
            turns=tuple(self.turns),
            stop_reason=self.stop_reason,
            messages=() if self.is_one_text else tuple(self.messages),
            env_rewards=dict(self.rewards),
            env_metrics=dict(self.metrics),
            env_error=self.error,
            calls_by_tool=counts_by_tool(self.calls),
            parse_errors=self.parse_errors,
            env_retries=max(0, self.opened - 1),
        )


def has_same_effect(a: Observation, b: Observation) -> bool:
    """Whether two observations tell the model the same and end the episode alike."""

    def told(o: Observation) -> tuple[Any, ...]:
        return list(o.messages), o.reward, o.done

    return told(a) == told(b)
