"""Samples episodes: turns of the model and replies of environments, with any generator.

A ready episode is continued as a prompt, by one turn or by a piece of a turn. Then its environment
answers, and the tokens of the reply are appended (`player.Player`). The random stream of an episode
depends on (its prompt's seed, its index in the group, its pieces) and on no other episode. The
engine chooses which episodes share a batch, see `generation.base.Session`.
"""

from __future__ import annotations

import collections
import contextlib
import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.environments.chat import Chat
from grpo_cli.environments.chat_template import ChatTemplate
from grpo_cli.environments.episode import Episode
from grpo_cli.environments.functions import EnvironmentFailure
from grpo_cli.environments.player import Player, shown
from grpo_cli.environments.protocol import Observation
from grpo_cli.environments.rollouter import Rollouter, RolloutSetup, Sampled
from grpo_cli.environments.settings import NAME_COLUMN, EpisodeSettings
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.base import Generator, Request, Session
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.stop_strings import StopStrings
from grpo_cli.random_streams import derive_seed

if TYPE_CHECKING:
    from grpo_cli.environments.programs import ProgramDialogue, ProgramSessions
    from grpo_cli.environments.sessions import Sessions

BEAT_SECONDS = 0.5  # longest wait between two heartbeats
SOON = 0.02  # seconds that an engine elsewhere is polled while environments may answer
PATIENCE = 0.5  # seconds that a round waits for further episodes once one is ready
MOST_FAILED = 16  # failed episodes of a call that are allowed whatever their share
FAILURES_SAID = 3  # number of failures after which a note is printed


@dataclass
class EpisodeLoop(Rollouter):
    """Samples episodes with a generator, environments and limits."""

    environments: Sessions | ProgramSessions
    # By environment name; "" if there is only one. All are of one kind.
    dialogues: Mapping[str, Chat | ProgramDialogue]
    settings: EpisodeSettings
    max_prompt_tokens: int | None = None  # limit of a prompt with its first observation
    max_failed_share: float = 1.0  # share of a call's episodes; more failures abort the call
    say: Callable[[str], None] = lambda line: None  # prints a line for the user
    num_failures: int = 0  # failures of environments in the whole run
    seconds_waited: float = 0.0  # seconds of waiting for environments while nothing was sampled
    environment_seconds: float = 0.0  # total seconds of all environment calls
    num_episodes: int = 0
    takes_turns = has_environments = True

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        if recipe.rollout is not None and not recipe.dataset.chat:
            raise UserError(
                f"rollout = {recipe.rollout}: leads a conversation; set dataset.chat=true."
            )

    @classmethod
    def make(cls, setup: RolloutSetup) -> Rollouter:
        recipe, sessions, loaded = setup.recipe, setup.sessions, setup.loaded
        if sessions is None:  # only benchmarks are evaluated
            return Rollouter()
        dialogues: dict[str, Chat | ProgramDialogue] = {}
        replies = None if sessions.spec.has_state else ("tool",)
        for name in sessions.spec.names:
            schemas, kwargs = sessions.schemas(name), recipe.model.chat_template_kwargs
            template = ChatTemplate(loaded.tokenizer, setup.eos_ids, schemas, kwargs, loaded.vision)
            chat = Chat(template, recipe.model.response_template)
            chat.check(replies)
            dialogues[name] = chat
            tools = ", ".join(schema["function"]["name"] for schema in schemas)
            said = f"tools {tools}" if tools else "no tools"
            setup.say(f"environment {name or 'of all rows'}: {said}")
        share, most = recipe.environment.max_failed_share, setup.max_prompt_tokens
        return cls(sessions, dialogues, recipe.episode, most, share, setup.say)

    def take_times(self) -> dict[str, float]:
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
        rounds = _Rounds(self, request, is_repeatable=generator.is_repeatable)
        try:
            rounds.begin()
            with generator.session() as session:
                yield rounds.run(session)
        finally:
            self.seconds_waited += rounds.seconds_waited
            rounds.close()


class _Rounds:
    """Schedules the episodes of one `sample`: samples those that do not wait for an environment."""

    def __init__(self, loop: EpisodeLoop, request: Request, *, is_repeatable: bool) -> None:
        """is_repeatable: whether the engine is, with `order=auto`."""
        self.loop, self.sampling = loop, request.sampling
        self.prompts, self.seeds = list(request.prompts), request.seeds
        self.num_generations = request.num_generations
        order = loop.settings.order
        self.is_repeatable = order == "repeatable" or (order == "auto" and is_repeatable)
        self.any_dialogue = next(iter(loop.dialogues.values()))
        stop = StopStrings(self.any_dialogue.tokenizer, self.sampling.stop)
        self.groups: list[list[Player]] = []
        for number, prompt in enumerate(self.prompts):
            is_only_one = loop.dialogues.keys() == {""}
            name = "" if is_only_one else str(prompt.columns.get(NAME_COLUMN))
            row = {**prompt.columns, "prompt": prompt.text}
            seed = derive_seed(self.seeds[number], "environment")
            self.groups.append(
                [
                    Player(
                        Episode(number, sample, is_one_text=self.any_dialogue.is_one_text),
                        loop.dialogues[name],
                        partial(loop.environments.open, name, row, seed),
                        self.sampling,
                        loop.settings,
                        stop,
                        partial(self._count_failure, name),
                    )
                    for sample in range(self.num_generations)
                ]
            )
        self.unfinished = [self.num_generations] * len(self.prompts)  # episodes of each group
        self.ready: list[Player] = []  # whose next piece can be sampled
        self.complete: list[Sampled] = []  # groups that `run` has not yielded yet
        # Answers of environments: (player, answer, seconds that it took).
        self.answers = queue.SimpleQueue[tuple[Player, Future[Observation], float]]()
        self.num_waiting = 0  # number of pending environment calls
        self.num_failed = 0  # number of episodes without a reward
        self.seconds_waited = 0.0

    def begin(self) -> None:
        """Resets all environments and adds their first observations to the prompts."""
        for group in self.groups:
            for player in group:
                self._resume(player, partial(next, player.steps))
        self.wait(math.inf)
        for number, group in enumerate(self.groups):
            firsts = [player.first for player in group if player.first is not None]
            for other in firsts[1:]:
                if list(other.messages) != list(firsts[0].messages):
                    raise TrainingError(
                        f"the environments of one group begin differently, with "
                        f"{shown(firsts[0])} and {shown(other)}: reset must depend on the row "
                        "and the seed only."
                    )
            if firsts and firsts[0].messages:
                self._add_first(number, firsts[0])

    def _add_first(self, number: int, first: Observation) -> None:
        prompt = self.groups[number][0].dialogue.with_observation(
            self.prompts[number], first.messages, self.loop.settings.reply_tokens
        )
        most = self.loop.max_prompt_tokens
        if most is None or len(prompt.ids) <= most:
            self.prompts[number] = prompt
            return
        for player in self.groups[number]:
            player.release()
            player.episode.stop_reason = "env_error"
            player.episode.error = (
                f"the first observation makes a prompt of {len(prompt.ids)} tokens, more than "
                f"dataset.max_prompt_tokens = {most}"
            )

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
                        player = self.groups[group][sample]
                        self._resume(player, partial(player.steps.send, piece))
            has_more = bool(engine.unfinished) or self.wait(0.0 if joins else PATIENCE)
            yield from self.complete
            self.complete.clear()

    def piece(self, e: Episode, *, exact: bool = False) -> Sampling:
        """Returns the sampling settings for an episode's next piece.

        All prompts of a request share one length. If it need not be exact, it is therefore that of
        a complete turn, or a power of two for the rest of a turn. Pieces with `piece_tokens` are
        always a power of two. No piece exceeds the limits of prompt and completion.
        """
        sampling, turn_tokens = self.sampling, self.loop.settings.turn_tokens
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
        ready, self.ready = [player.episode for player in self.ready], []
        kinds: dict[Sampling, list[Episode]] = collections.defaultdict(list)
        for e in sorted(ready, key=self._conversation):  # an order independent of timing
            kinds[self.piece(e, exact=exact)].append(e)
        return [
            Request(
                [
                    replace(self.prompts[e.number], ids=[*self.prompts[e.number].ids, *e.ids])
                    for e in episodes
                ],
                1,
                piece,
                [derive_seed(self.seeds[e.number], e.sample, e.pieces) for e in episodes],
                [self._conversation(e) for e in episodes],
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
        for group in self.groups:
            for player in group:
                player.release()

    def _conversation(self, e: Episode) -> int:
        """Returns the number by which the engine knows an episode."""
        return e.number * self.num_generations + e.sample

    def _resume(self, player: Player, step: Callable[[], Future[Observation] | None]) -> None:
        """Plays an episode until it waits for its environment or for its next piece."""
        try:
            waits_for = step()
        except StopIteration:
            self._end(player)
            return
        if waits_for is None:
            self.ready.append(player)
            return
        self.num_waiting += 1
        begun = time.monotonic()
        waits_for.add_done_callback(
            lambda answer: self.answers.put((player, answer, time.monotonic() - begun))
        )

    def _take_answer(self, player: Player, answer: Future[Observation], seconds: float) -> None:
        self.num_waiting -= 1
        self.loop.environment_seconds += seconds
        try:
            found = answer.result(), seconds
        except EnvironmentFailure as failure:
            self._resume(player, partial(player.steps.throw, failure))
        else:
            self._resume(player, partial(player.steps.send, found))

    def _end(self, player: Player) -> None:
        """Ends an episode, and completes its group if it was the last one."""
        number = player.episode.number
        player.release()
        self.engine.end(self._conversation(player.episode))
        self.unfinished[number] -= 1
        if not self.unfinished[number]:
            completions = [other.episode.completion() for other in self.groups[number]]
            self.complete.append((number, [self.prompts[number]] * len(completions), completions))

    def _count_failure(self, name: str, failure: EnvironmentFailure, ends_episode: bool) -> None:
        """Counts a failure of an environment; raises a TrainingError after too many."""
        loop = self.loop
        loop.num_failures += failure.own
        if failure.own and loop.num_failures == FAILURES_SAID:
            loop.say(
                f"note: environments{f' {name}' if name else ''} have failed {FAILURES_SAID} times "
                f"and are replaced; the last error: {failure}"
            )
        self.num_failed += ends_episode
        total, share = len(self.prompts) * self.num_generations, loop.max_failed_share
        if ends_episode and self.num_failed > max(MOST_FAILED, share * total):
            raise TrainingError(
                f"the environments of {self.num_failed} of {total} rollouts failed, more than "
                f"environment.max_failed_share = {share:g}; the last error: {failure}"
            )
