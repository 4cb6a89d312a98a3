"""Samples episodes: turns of the model and replies of environments, with any generator.

A ready episode is continued as a prompt, by one turn or by a piece of a turn. Then its environment
answers, and the tokens of the reply are appended. The random stream of an episode depends on (its
prompt's seed, its index in the group, its pieces) and on no other episode. The engine chooses which
episodes share a batch, see `generation.base.Session`.

Faults. An environment that fails is replaced by a fresh one with the same seed, to which the turns
so far are replayed. If all its answers are the same, the episode continues. On a different answer
the episode is rewound to that turn. After more than `RETRIES` failures the episode ends without a
reward.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase

from grpo_cli.distributed import heartbeat
from grpo_cli.environments.adapters import NAME_COLUMN
from grpo_cli.environments.episode import Episode, Exchange, Play
from grpo_cli.environments.functions import EnvironmentFailure
from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.environments.response import MalformedCall
from grpo_cli.environments.settings import EpisodeSettings
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import Generator, Request, Session
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.stop_strings import StopStrings
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion, Prompt

if TYPE_CHECKING:
    from grpo_cli.environments.programs import ProgramSessions
    from grpo_cli.environments.sessions import Sessions

BEAT_SECONDS = 0.5  # longest wait between two heartbeats
SOON = 0.02  # seconds that an engine elsewhere is polled while environments may answer
PATIENCE = 0.5  # seconds that a round waits for further episodes once one is ready
RETRIES = 2  # per episode: transient faults seldom recur, and more retries do not fix others
MOST_PARSE_ERRORS = 2  # per episode, so that the model may correct itself
MOST_FAILED = 16  # failed episodes of a call that are allowed whatever their share
MOST_BYSTANDER_FAILURES = 20  # per episode
FAILURES_SAID = 3  # number of failures after which a note is printed

# A prompt's index, and for each of its rollouts the prompt as it was sampled, and the completion.
Sampled = tuple[int, Sequence[Prompt], list[Completion]]


class Dialogue(Protocol):
    """Converts between tokens and messages, for episodes with one set of tools.

    `chat.Chat` uses a chat template, `programs.ProgramDialogue` uses fenced blocks. All dialogues
    of a loop are of one kind.
    """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def is_one_text(self) -> bool:
        """Whether turns and replies form one text, which rewards read as a whole.

        An episode then has no messages, and a reply that exceeds the token budget is truncated, not
        dropped.
        """

    @property
    def piece_tokens(self) -> int | None:
        """Maximum tokens of a piece, if turns can end without a stop string; None: no maximum."""

    def with_observation(
        self, prompt: Prompt, observation: str | Sequence[Message], limit: int
    ) -> Prompt: ...

    def stops(self, num_calls: int) -> tuple[str, ...]:
        """Returns strings that end a piece, in addition to the sampling's stop strings.

        Args:
            num_calls: number of tool calls in the episode so far, here and below.
        """

    def turn_end(
        self, ids: Sequence[int], before: int, num_calls: int, *, has_stopped: bool
    ) -> int | None:
        """Returns the length of a turn that has ended, or None. Tokens after it are dropped.

        Args:
            ids: the tokens of the current turn, including the last piece.
            before: number of tokens from earlier pieces.
            has_stopped: whether the piece ended with an eos or one of `stops`.
        """

    def read(self, ids: Sequence[int], num_calls: int, *, at_stop_string: bool) -> Message:
        """Returns a complete turn as a message.

        Args:
            at_stop_string: whether it ended at one of the sampling's stop strings.

        Raises:
            MalformedCall: the turn begins a call that cannot be read.
        """

    def reply_to(self, turn: Sequence[int], messages: Sequence[Message], limit: int) -> list[int]:
        """Returns the tokens of a reply, between the given turn of the model and its next one."""


@dataclass
class EpisodeLoop:
    """Samples episodes with a generator, environments and limits."""

    environments: Sessions | ProgramSessions
    dialogues: Mapping[str, Dialogue]  # by environment name; "" if there is only one
    settings: EpisodeSettings
    max_prompt_tokens: int | None = None  # limit of a prompt with its first observation
    max_failed_share: float = 1.0  # share of a call's episodes; more failures abort the call
    say: Callable[[str], None] = lambda line: None  # prints a line for the user
    num_failures: int = 0  # failures of environments in the whole run
    seconds_waited: float = 0.0  # seconds of waiting for environments while nothing was sampled
    environment_seconds: float = 0.0  # total seconds of all environment calls
    num_episodes: int = 0

    def take_times(self) -> dict[str, float]:
        """Returns the time metrics since the last call, and resets them."""
        times = {
            "time/waiting": self.seconds_waited,
            "time/environment": self.environment_seconds / max(self.num_episodes, 1),
        }
        self.seconds_waited, self.environment_seconds, self.num_episodes = 0.0, 0.0, 0
        return times

    @contextlib.contextmanager
    def sample(self, generator: Generator, request: Request) -> Iterator[Iterator[Sampled]]:
        """Samples the episodes that a request asks for; yields them by prompt, as they end.

        The prompts are those with the environments' first observations. Every process calls it.

        Args:
            request: the environments of a group share a seed derived from the prompt's seed.

        Raises:
            TrainingError: a group's environments begin differently, or too many have failed.
        """
        self.num_episodes += len(request.prompts) * request.num_generations
        episodes = _Episodes(self, request, is_repeatable=generator.is_repeatable)
        try:
            episodes.begin()
            with generator.session() as session:
                yield episodes.run(session)
        finally:
            self.seconds_waited += episodes.seconds_waited
            episodes.close()


class _Episodes:
    """The episodes of one `sample`."""

    def __init__(self, loop: EpisodeLoop, request: Request, *, is_repeatable: bool) -> None:
        """is_repeatable: whether the engine is, with `order=auto`."""
        self.loop, self.settings, self.sampling = loop, loop.settings, request.sampling
        self.first_prompts = request.prompts  # without the first observations
        self.prompts, self.seeds = list(request.prompts), request.seeds
        self.num_generations = request.num_generations
        order = loop.settings.order
        self.is_repeatable = order == "repeatable" or (order == "auto" and is_repeatable)
        self.any_dialogue = next(iter(loop.dialogues.values()))
        self.stop = StopStrings(self.any_dialogue.tokenizer, self.sampling.stop)
        is_only_one = loop.dialogues.keys() == {""}
        self.names = [
            "" if is_only_one else str(p.columns.get(NAME_COLUMN)) for p in request.prompts
        ]
        self.episodes = [
            [
                Episode(number, sample, is_one_text=self.any_dialogue.is_one_text)
                for sample in range(request.num_generations)
            ]
            for number in range(len(request.prompts))
        ]
        self.ready: list[Episode] = []  # episodes whose next piece can be sampled
        self.complete: list[Sampled] = []  # groups that `run` has not yielded yet
        # Answers of environments: (episode, answer, seconds that it took).
        self.answers: queue.SimpleQueue[tuple[Episode, Future[Observation], float]]
        self.answers = queue.SimpleQueue()
        self.num_waiting = 0  # number of pending environment calls
        self.num_failed = 0  # number of episodes without a reward
        self.seconds_waited = 0.0

    # The first turn

    def begin(self) -> None:
        """Resets all environments and adds their first observations to the prompts."""
        for group in self.episodes:
            for e in group:
                e.play = self._play(e)
                self._resume(e, partial(next, e.play))
        self.wait(math.inf)
        for number, group in enumerate(self.episodes):
            firsts = [e.first for e in group if e.first is not None]
            if not firsts:
                continue
            for other in firsts[1:]:
                if list(other.messages) != list(firsts[0].messages):
                    raise TrainingError(
                        f"the environments of one group begin differently, with "
                        f"{_shown(firsts[0])} and {_shown(other)}: reset must depend on the row "
                        "and the seed only."
                    )
            if firsts[0].messages:
                self._add_first(number, firsts[0])

    def _add_first(self, number: int, first: Observation) -> None:
        prompt = self.prompts[number]
        observation: str | Sequence[Message] = first.messages
        if [m["role"] for m in first.messages] == ["user"]:
            (message,) = first.messages
            # Many templates refuse two consecutive user messages.
            follows = isinstance(prompt.text, list) and prompt.text[-1]["role"] == "user"
            if follows or message.get("append"):
                observation = str(message["content"])
        prompt = self._dialogue(number).with_observation(
            prompt, observation, self.settings.reply_tokens
        )
        most = self.loop.max_prompt_tokens
        if most is not None and len(prompt.ids) > most:
            for e in self.episodes[number]:
                self._release(e)
                e.stop_reason = "env_error"
                e.error = (
                    f"the first observation makes a prompt of {len(prompt.ids)} tokens, more than "
                    f"dataset.max_prompt_tokens = {most}"
                )
            return
        self.prompts[number] = prompt

    # The next turns

    def run(self, engine: Session) -> Iterator[Sampled]:
        """Samples all turns of all episodes; yields each group once it is complete."""
        self.engine = engine
        conversations = range(len(self.prompts) * self.num_generations)
        first, self.ready = self.piece(Episode(0, 0)), []  # all are ready for their first piece
        engine.submit(Request(self.prompts, self.num_generations, first, self.seeds, conversations))
        has_more = True
        while has_more:
            joins = engine.joins_requests and not self.is_repeatable
            if joins or not engine.unfinished:
                for request in self.take_ready(exact=joins and not engine.rounds_lengths):
                    engine.submit(request)
            if engine.unfinished:
                timeout = SOON if joins and self.num_waiting else BEAT_SECONDS
                for request, number, pieces in engine.poll(timeout):
                    for i, piece in enumerate(pieces, number * len(pieces)):
                        group, sample = divmod(request.conversations[i], self.num_generations)
                        e = self.episodes[group][sample]
                        self._resume(e, partial(e.play.send, piece))
            has_more = bool(engine.unfinished) or self.wait(0.0 if joins else PATIENCE)
            yield from self.complete
            self.complete.clear()

    def piece(self, e: Episode, *, exact: bool = False) -> Sampling:
        """Returns the sampling settings for an episode's next piece.

        All prompts of a request share one length. If it need not be exact, it is therefore that of
        a complete turn, or a power of two for the rest of a turn. Pieces with `piece_tokens` are
        always a power of two. No piece exceeds the limits of prompt and completion.
        """
        sampling, turn_tokens = self.sampling, self.settings.turn_tokens
        complete = min(turn_tokens or sampling.max_tokens, sampling.max_tokens)
        left = min(sampling.max_tokens - len(e.ids), complete - (len(e.ids) - e.turn_start))
        piece_tokens = self.any_dialogue.piece_tokens
        if piece_tokens is not None:
            most = 1 << (min(left, piece_tokens).bit_length() - 1)
        else:
            most = left if exact or left == complete else 1 << (left.bit_length() - 1)
        shortest = min(max(sampling.min_tokens - len(e.ids), 0), most)
        stop = (*sampling.stop, *self.any_dialogue.stops(len(e.calls)))
        return replace(sampling, max_tokens=most, min_tokens=shortest, stop=stop)

    def take_ready(self, *, exact: bool) -> list[Request]:
        """Returns requests for the next pieces of all ready episodes, without waiting.

        Args:
            exact: request exactly the tokens that are left. Otherwise lengths are rounded down, so
                that more episodes share a request, and the rest is requested later.
        """
        with contextlib.suppress(queue.Empty):  # processes the answers that are there already
            while self.num_waiting:
                self._take_answer(*self.answers.get_nowait())
        kinds: dict[Sampling, list[Episode]] = collections.defaultdict(list)
        self.ready.sort(key=lambda e: (e.number, e.sample))  # an order independent of timing
        for e in self.ready:
            kinds[self.piece(e, exact=exact)].append(e)
        self.ready = []
        return [
            Request(
                [
                    replace(prompt, ids=[*prompt.ids, *e.ids])
                    for e in episodes
                    for prompt in [self.prompts[e.number]]
                ],
                1,
                piece,
                [derive_seed(self.seeds[e.number], e.sample, e.pieces) for e in episodes],
                [e.number * self.num_generations + e.sample for e in episodes],
            )
            for piece, episodes in kinds.items()
        ]

    def wait(self, patience: float) -> bool:
        """Processes answers of environments; returns whether an episode is ready to sample.

        Args:
            patience: seconds to wait for further episodes once one is ready. If the run is
                repeatable, it waits for all of them.
        """
        begun, end = time.monotonic(), math.inf
        while self.num_waiting:
            if self.ready and not self.is_repeatable:
                end = min(end, time.monotonic() + patience)
            if time.monotonic() >= end:
                break
            heartbeat.beat_of_main()  # only of the main thread: prefetch threads may wait longer
            left = max(0.0, min(end - time.monotonic(), BEAT_SECONDS))
            with contextlib.suppress(queue.Empty):
                self._take_answer(*self.answers.get(timeout=left))
        self.seconds_waited += time.monotonic() - begun
        return bool(self.ready)

    def close(self) -> None:
        """Releases the environments of incomplete episodes."""
        for group in self.episodes:
            for e in group:
                self._release(e)

    # One episode

    def _resume(self, e: Episode, step: Callable[[], Future[Observation] | None]) -> None:
        """Plays an episode until it waits for its environment or for its next piece."""
        try:
            waits_for = step()
        except StopIteration:
            self._release(e)
            e.is_complete = True
            self.engine.end(e.number * self.num_generations + e.sample)
            group = self.episodes[e.number]
            if all(other.is_complete for other in group):
                prompts = [self.prompts[e.number]] * len(group)
                self.complete.append((e.number, prompts, [other.completion() for other in group]))
            return
        if waits_for is None:
            self.ready.append(e)
            return
        self.num_waiting += 1
        begun = time.monotonic()
        waits_for.add_done_callback(
            lambda answer: self.answers.put((e, answer, time.monotonic() - begun))
        )

    def _take_answer(self, e: Episode, answer: Future[Observation], seconds: float) -> None:
        self.num_waiting -= 1
        self.loop.environment_seconds += seconds
        try:
            found = answer.result(), seconds
        except EnvironmentFailure as failure:
            self._resume(e, partial(e.play.throw, failure))
        else:
            self._resume(e, partial(e.play.send, found))

    def _play(self, e: Episode) -> Play:
        """Plays an episode; an environment that fails is replaced by a fresh one.

        It yields a future and is sent (its result, seconds that it took), or yields None and is
        sent the next piece.
        """
        while True:
            try:
                yield from self._play_in_one(e)
                return
            except EnvironmentFailure as failure:
                self._release(e)
                e.failures += failure.own
                e.bystander_failures += not failure.own
                self.loop.num_failures += failure.own
                if failure.own and self.loop.num_failures == FAILURES_SAID:
                    name = self.names[e.number]
                    self.loop.say(
                        f"note: environments{f' {name}' if name else ''} have failed "
                        f"{FAILURES_SAID} times and are replaced; the last error: {failure}"
                    )
                if e.failures <= RETRIES and e.bystander_failures <= MOST_BYSTANDER_FAILURES:
                    continue
                e.stop_reason, e.error = failure.stop_reason, str(failure)
            self.num_failed += 1
            total, share = sum(map(len, self.episodes)), self.loop.max_failed_share
            if self.num_failed > max(MOST_FAILED, share * total):
                raise TrainingError(
                    f"the environments of {self.num_failed} of {total} rollouts failed, more than "
                    f"environment.max_failed_share = {share:g}; the last error: {e.error}"
                )
            if not e.ids:  # a rollout has at least one token
                e.add_piece((yield None))
            return

    def _play_in_one(self, e: Episode) -> Play:
        """Plays an episode in a fresh environment, to which its turns so far are replayed."""
        seed = derive_seed(self.seeds[e.number], "environment")
        prompt = self.first_prompts[e.number]
        row = {**prompt.columns, "prompt": prompt.text}
        session = e.session = self.loop.environments.open(self.names[e.number], row, seed)
        e.opened += 1
        first, _ = yield session.reset()
        if e.first is None:
            e.first = first
        elif list(e.first.messages) != list(first.messages):
            e.failures = RETRIES
            error = f"a fresh environment begins with {_shown(first)}, not {_shown(e.first)}"
            raise EnvironmentFailure("env_error", error)
        for exchange in [x for x in e.exchanges if x.is_stepped]:
            found, seconds = yield session.step(exchange.message)
            if (before := exchange.observation) is not None:
                now = (list(found.messages), found.reward, found.done)
                if (list(before.messages), before.reward, before.done) == now:
                    continue
                e.rewind(exchange)
            self._reply(e, exchange, found, seconds)
            break
        while not e.stop_reason:
            if (turn := (yield from self._turn(e))) is not None:
                found, seconds = yield session.step(turn.message)
                self._reply(e, turn, found, seconds)
        if e.session is not None:  # None: its prompt is too long
            found, _ = yield session.finish()
            e.rewards |= found.rewards
            e.metrics |= found.metrics
            e.session = None

    # The model's turn

    def _turn(self, e: Episode) -> Coroutine[None, Any, Exchange | None]:
        """Samples a turn; returns it, or None if its environment does not get it."""
        dialogue = self._dialogue(e.number)
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
                return self._read(e, at_stop_string=False)
            if stops_at is not None:
                e.cut(stops_at)
                return self._read(e, at_stop_string=True)
            if len(e.ids) == self.sampling.max_tokens:
                e.stop_reason = "max_tokens"
            elif len(e.ids) - begin == self.settings.turn_tokens:
                e.stop_reason = "turn_tokens"
            if e.stop_reason:
                e.end_turn(self._unread(e))
                return None

    def _read(self, e: Episode, *, at_stop_string: bool) -> Exchange | None:
        """Ends the current turn; returns it, or None if its environment does not get it."""
        dialogue = self._dialogue(e.number)
        ids = e.ids[e.turn_start :]
        try:
            message = dialogue.read(ids, len(e.calls), at_stop_string=at_stop_string)
            error = None
        except MalformedCall as malformed:
            message, error = self._unread(e), str(malformed)
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
        self._reply(e, exchange, Observation([answer]), 0.0)
        return None

    def _unread(self, e: Episode) -> Message:
        """Returns the current turn as a message without calls."""
        tokenizer = self._dialogue(e.number).tokenizer
        text = tokenizer.decode(e.ids[e.turn_start :], skip_special_tokens=True)
        return {"role": "assistant", "content": text}

    def _reply(self, e: Episode, exchange: Exchange, found: Observation, seconds: float) -> None:
        """Appends an environment's observation, or ends the episode with it."""
        e.observe(exchange, found)
        dialogue, settings = self._dialogue(e.number), self.settings
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

    def _release(self, e: Episode) -> None:
        if e.session is not None:
            e.session.abandon()
            e.session = None

    def _dialogue(self, number: int) -> Dialogue:
        return self.loop.dialogues[self.names[number]]


def _shown(observation: Observation) -> str:
    """Returns the beginning of an observation's messages, for error messages."""
    return repr([m.get("content") for m in observation.messages])[:200]
