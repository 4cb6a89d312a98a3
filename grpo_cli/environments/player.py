"""Plays one episode: turns of the model, and replies of its environment.

Faults. An environment that fails is replaced by a fresh one with the same seed, to which the turns
so far are replayed. If all its answers are the same, the episode continues. On a different answer
the episode is rewound to that turn. After more than `RETRIES` failures the episode ends without a
reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_cli.environments.episode import Episode, Exchange
from grpo_cli.environments.functions import EnvironmentFailure
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.environments.response import MalformedCall
from grpo_cli.environments.settings import EpisodeSettings
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.stop_strings import StopStrings
from grpo_cli.records import decoded

if TYPE_CHECKING:
    from grpo_cli.environments.chat import Chat
    from grpo_cli.environments.programs import ProgramDialogue, ProgramSession
    from grpo_cli.environments.sessions import EnvironmentSession

RETRIES = 2  # per episode: transient faults seldom recur, and more retries do not fix others
MOST_PARSE_ERRORS = 2  # per episode, so that the model may correct itself
MOST_BYSTANDER_FAILURES = 20  # per episode

# Yields the answer of an environment that it waits for, or None if it waits for sampled tokens.
Play = Generator[Future[Observation] | None, Any, None]


@dataclass(eq=False)
class Player:
    """Plays one episode; holds its environment, its limits and its failures."""

    episode: Episode
    dialogue: Chat | ProgramDialogue  # converts between tokens and messages
    open_session: Callable[[], EnvironmentSession | ProgramSession]  # opens a fresh environment
    sampling: Sampling
    settings: EpisodeSettings
    stop: StopStrings  # the stop strings of `sampling`
    on_failure: Callable[[EnvironmentFailure, bool], None]  # gets whether the episode ends by it
    session: EnvironmentSession | ProgramSession | None = None
    first: Observation | None = None  # the observation from `reset`
    failures: int = 0  # number of failures of its own environments
    bystander_failures: int = 0  # losses through another environment's failure in the worker

    def __post_init__(self) -> None:
        self.steps = self._play()

    def release(self) -> None:
        """Releases the environment, even in the middle of a call."""
        if self.session is not None:
            self.session.abandon()
            self.session = None

    def _play(self) -> Play:
        """Plays the episode; an environment that fails is replaced by a fresh one.

        It yields a future and is sent (its result, seconds that it took), or yields None and is
        sent the next piece.
        """
        e, is_over = self.episode, False
        while not is_over:
            try:
                yield from self._play_in_one()
                return
            except EnvironmentFailure as failure:
                self.release()
                self.failures += failure.own
                self.bystander_failures += not failure.own
                is_over = self.failures > RETRIES
                is_over |= self.bystander_failures > MOST_BYSTANDER_FAILURES
                self.on_failure(failure, is_over)
                if is_over:
                    e.stop_reason, e.error = failure.stop_reason, str(failure)
        if not e.ids:  # a rollout has at least one token
            e.add_piece((yield None))

    def _play_in_one(self) -> Play:
        """Plays the episode in a fresh environment, to which its turns so far are replayed."""
        e, session = self.episode, self.open_session()
        self.session = session
        e.opened += 1
        first, _ = yield session.reset()
        if self.first is None:
            self.first = first
        elif list(self.first.messages) != list(first.messages):
            self.failures = RETRIES
            error = f"a fresh environment begins with {shown(first)}, not {shown(self.first)}"
            raise EnvironmentFailure("env_error", error)
        for exchange in [x for x in e.exchanges if x.is_stepped]:
            found, seconds = yield session.step(exchange.message)
            if (before := exchange.observation) is not None:
                now = (list(found.messages), found.reward, found.done)
                if (list(before.messages), before.reward, before.done) == now:
                    continue
                e.rewind(exchange)
            self._reply(exchange, found, seconds)
            break
        while not e.stop_reason:
            if (turn := (yield from self._turn())) is not None:
                found, seconds = yield session.step(turn.message)
                self._reply(turn, found, seconds)
        if self.session is not None:  # None: its prompt is too long
            found, _ = yield session.finish()
            e.rewards |= found.rewards
            e.metrics |= found.metrics
            self.session = None

    # The model's turn

    def _turn(self) -> Generator[None, Any, Exchange | None]:
        """Samples a turn; returns it, or None if the environment does not get it."""
        e, dialogue = self.episode, self.dialogue
        while True:
            before, begin = len(e.ids), e.turn_start
            piece = yield None
            e.add_piece(piece)
            if e.stop_reason:  # its prompt is too long
                return None
            # The generator has checked the first piece of a turn itself if it had no other stops.
            stops_at = None
            if self.sampling.stop and (before > begin or dialogue.stops(len(e.calls))):
                shortest = self.sampling.min_tokens - begin
                end = self.stop.first_end(e.ids[begin:], before - begin, shortest)
                stops_at = None if end is None else begin + end
            has_stopped = piece.finish_reason == "stop" and stops_at != len(e.ids)
            turn_length = dialogue.turn_end(
                e.ids[begin:], before - begin, len(e.calls), has_stopped=has_stopped
            )
            if turn_length is not None and (stops_at is None or begin + turn_length < stops_at):
                e.cut(begin + turn_length)
                return self._read(at_stop_string=False)
            if stops_at is not None:
                e.cut(stops_at)
                return self._read(at_stop_string=True)
            if len(e.ids) == self.sampling.max_tokens:
                e.stop_reason = "max_tokens"
            elif len(e.ids) - begin == self.settings.turn_tokens:
                e.stop_reason = "turn_tokens"
            if e.stop_reason:
                e.end_turn(self._unread())
                return None

    def _read(self, *, at_stop_string: bool) -> Exchange | None:
        """Ends the current turn; returns it, or None if the environment does not get it."""
        e, dialogue, error = self.episode, self.dialogue, None
        ids = e.ids[e.turn_start :]
        try:
            message = dialogue.read(ids, len(e.calls), at_stop_string=at_stop_string)
        except MalformedCall as malformed:
            message, error = self._unread(), str(malformed)
        e.end_turn(message)
        is_full = len(e.ids) == self.sampling.max_tokens
        if is_full and dialogue.is_one_text and message.get("tool_calls"):
            e.stop_reason = "max_tokens"  # no room for the results of its calls
            return None
        exchange = Exchange(message, len(e.turns) - 1, is_stepped=error is None)
        e.exchanges.append(exchange)
        if error is None:
            return exchange
        e.parse_errors += 1
        if e.parse_errors > MOST_PARSE_ERRORS:
            e.stop_reason = "parse_error"
            return None
        role = "tool" if dialogue.tools else "user"
        answer = {"role": role, "content": json.dumps({"error": error}, ensure_ascii=False)}
        self._reply(exchange, Observation([answer]), 0.0)
        return None

    def _unread(self) -> Message:
        """Returns the current turn as a message without calls."""
        ids = self.episode.ids[self.episode.turn_start :]
        return {"role": "assistant", "content": decoded(self.dialogue.tokenizer, ids)}

    def _reply(self, exchange: Exchange, found: Observation, seconds: float) -> None:
        """Appends the environment's observation, or ends the episode with it."""
        e, dialogue, settings = self.episode, self.dialogue, self.settings
        e.observe(exchange, found)
        if found.done:
            is_answer = dialogue.tools and not (found.messages or found.calls)
            e.stop_reason = "answered" if is_answer and found.reward is None else "env_done"
        elif sum(turn.by == "model" for turn in e.turns) == settings.max_turns:
            e.stop_reason = "max_turns"
        else:
            turn = e.turns[exchange.turn]
            ids = dialogue.reply_to(
                e.ids[turn.start : turn.end], found.messages, settings.reply_tokens
            )
            left = self.sampling.max_tokens - len(e.ids)
            if len(ids) < left or dialogue.is_one_text:
                e.add_reply(ids[:left], seconds)
            if len(ids) >= left:  # no room for an answer
                e.stop_reason = "max_tokens"


def shown(observation: Observation) -> str:
    """Returns the beginning of an observation's messages, for error messages."""
    return repr([m.get("content") for m in observation.messages])[:200]
