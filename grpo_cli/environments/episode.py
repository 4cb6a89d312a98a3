r"""The state of one growing episode: its tokens, who produced them, and its messages.

    ids          <tool_call>…</tool_call><|im_end|> \n<tool>6</tool>… It is 6.<|im_end|>
    is_sampled   1 1 1 1 1 1 1 1 1 1 1              0 0 0 0 0 0 0 0    1 1 1 1
    turns        Turn(0, 11, "model")               Turn(11, 19, ...)  Turn(19, 23, "model")

Tokens are appended and never rendered again: the model trains on exactly the tokens it sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.records import Completion, Turn

# Stop reasons for which `finish_reason` is "length": a limit has cut the episode.
CUT = ("max_turns", "turn_tokens", "max_tokens")


@dataclass
class Exchange:
    """A turn of the model and the environment's observation of it."""

    message: Message
    turn: int  # index in `Episode.turns`
    observation: Observation | None = None  # None: not received yet
    is_stepped: bool = True  # false: the message was malformed and the environment has not seen it


@dataclass
class Episode:
    """An episode that is still growing."""

    number: int  # index of its prompt
    sample: int  # index in the group
    is_one_text: bool = False  # see `programs.ProgramDialogue`
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    pieces: int = 0  # number of generated pieces; a turn has one or more
    sampled_at: int | None = None
    parse_errors: int = 0
    stop_reason: str = ""
    error: str = ""  # environment's error that left the rollout without a reward
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)
    opened: int = 0  # number of environments opened so far

    @property
    def turn_start(self) -> int:
        """Index of the first token of the current turn."""
        return self.turns[-1].end if self.turns else 0

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
        """Ends the model's current turn."""
        self.turns.append(Turn(self.turn_start, len(self.ids), "model"))
        self.messages.append(message)

    def cut(self, length: int) -> None:
        """Keeps only the first `length` tokens."""
        del self.ids[length:], self.logprobs[length:], self.is_sampled[length:]

    def observe(self, exchange: Exchange, observation: Observation) -> None:
        """Stores an environment's observation of a turn."""
        exchange.observation = observation
        self.turns[exchange.turn] = dataclasses.replace(
            self.turns[exchange.turn], reward=observation.reward
        )
        self.messages += observation.messages
        self.calls += observation.calls
        self.metrics |= observation.metrics
        self.rewards |= observation.rewards

    def rewind(self, exchange: Exchange) -> None:
        """Rewinds the episode to the end of a turn of the model."""
        known = self.exchanges[: self.exchanges.index(exchange)]
        self.cut(self.turns[exchange.turn].end)
        del self.turns[exchange.turn + 1 :]
        self.exchanges = [*known, exchange]
        self.parse_errors = sum(not e.is_stepped for e in known)
        self.messages, self.calls, self.rewards, self.metrics = [], [], {}, {}
        for e in known:
            self.messages.append(e.message)
            if e.observation is not None:
                self.observe(e, e.observation)
        self.messages.append(exchange.message)
        self.stop_reason = ""

    def completion(self) -> Completion:
        """Converts the episode to a `Completion`.

        The turns' spans cover all tokens; exactly the environment's tokens are not sampled.
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


def counts_by_tool(calls: Iterable[ToolCall]) -> dict[str, list[int]]:
    """Returns `Completion.calls_by_tool` of an episode's calls."""
    counts: dict[str, list[int]] = {}
    for call in calls:
        known = counts.setdefault(call.name, [0, 0, 0])
        counts[call.name] = [
            known[0] + 1, known[1] + call.failed, known[2] + call.timed_out,
        ]  # fmt: skip
    return counts
