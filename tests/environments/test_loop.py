"""Tests the rounds of episodes with scripted turns and environments."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.environments.chat import Chat
from grpo_cli.environments.chat_template import ChatTemplate
from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.environments.response import MalformedCall
from grpo_cli.environments.sessions import EnvironmentFailure
from grpo_cli.environments.settings import EpisodeSettings
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Completion, Prompt

EOS = ord(".")


class Characters:
    """A dialogue whose tokens are characters; "." ends a turn, and "[...]" is a reply."""

    tools: Sequence[Mapping[str, Any]] = ()
    is_one_text = False
    piece_tokens = None

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))

    def with_observation(
        self, prompt: Prompt, observation: Sequence[Message], limit: int
    ) -> Prompt:
        added = [ord(c) for m in observation for c in m["content"]]
        return dataclasses.replace(prompt, ids=[*prompt.ids, *added], row_ids=prompt.ids)

    def stops(self, num_calls: int) -> tuple[str, ...]:
        return ()

    def turn_end(
        self, ids: Sequence[int], before: int, num_calls: int, *, has_stopped: bool
    ) -> int | None:
        return len(ids) if has_stopped else None

    def read(self, ids: Sequence[int], num_calls: int, *, at_stop_string: bool) -> Message:
        text = "".join(map(chr, ids)).rstrip(".")
        if text.startswith("!"):
            raise MalformedCall("no such call")
        return {"role": "assistant", "content": text}

    def reply_to(self, turn: Sequence[int], messages: Sequence[Message], limit: int) -> list[int]:
        text = "".join(m["content"][:limit] for m in messages)
        return [ord(c) for c in ("" if turn[-1] == EOS else ".") + f"[{text}]"]


class Scripted(Generator):
    """Generates what `answer` returns for a text, character by character; notes each request."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer = answer
        self.requests: list[tuple[list[str], Sampling, list[int]]] = []

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        texts = ["".join(map(chr, p.ids)) for p in request.prompts]
        self.requests.append((texts, request.sampling, list(request.seeds)))
        for number, text in enumerate(texts):
            group = []
            for _ in range(request.num_generations):
                ids = [ord(c) for c in self.answer(text)][: request.sampling.max_tokens]
                ended = ids[-1] == EOS
                logprobs = [-0.1 * (i + 1) for i in range(len(ids))]
                group.append(Completion(ids, logprobs, "stop" if ended else "length"))
            yield number, group


Step = Callable[[int, Message], Observation]


@dataclass
class Scene:
    """An environment of which each session calls `step(turn, message)`; notes what happens."""

    step: Step = lambda turn, message: Observation(done=True)
    first: Callable[[int], Observation] = lambda seed: Observation()
    final: Observation = field(default_factory=Observation)
    faults: dict[int, tuple[str, int]] = field(default_factory=dict)  # by session: (call, turn)
    opened: list[tuple[str, Mapping[str, Any], int]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    session: type[Session] | None = None  # None: Session

    def open(self, name: str, row: Mapping[str, Any], seed: int) -> Session:
        self.opened.append((name, row, seed))
        return (self.session or Session)(self, len(self.opened) - 1, seed)


@dataclass
class Session:
    scene: Scene
    number: int
    seed: int
    turn: int = 0

    def _ended(self, call: str, value: Callable[[], Observation]) -> Future[Observation]:
        future: Future[Observation] = Future()
        self.scene.log.append(f"{self.number} {call}")
        if self.scene.faults.get(self.number) == (call, self.turn):
            future.set_exception(EnvironmentFailure("env_error", "it broke"))
        else:
            future.set_result(value())
        return future

    def reset(self) -> Future[Observation]:
        return self._ended("reset", lambda: self.scene.first(self.seed))

    def step(self, message: Message) -> Future[Observation]:
        ended = self._ended("step", lambda: self.scene.step(self.turn, message))
        self.turn += 1
        return ended

    def finish(self) -> Future[Observation]:
        return self._ended("finish", lambda: self.scene.final)

    def abandon(self) -> None:
        self.scene.log.append(f"{self.number} abandon")


def prompt_of(text: str, **columns: Any) -> Prompt:
    return Prompt(0, [ord(c) for c in text], text, columns)


def run(
    scene: Scene,
    answer: Callable[[str], str],
    max_tokens: int = 64,
    prompts: Sequence[Prompt] = (),
    num_generations: int = 1,
    **settings: Any,
) -> tuple[list[list[Completion]], Scripted]:
    generator = Scripted(answer)
    most = settings.pop("max_prompt_tokens", None)
    share = settings.pop("max_failed_share", 1.0)
    say = settings.pop("say", print)
    names = {p.columns.get("environment", "") for p in prompts} or {""}
    loop = EpisodeLoop(
        scene, dict.fromkeys(names, Characters()), EpisodeSettings(**settings), most, share, say
    )
    prompts = prompts or [prompt_of("Q")]
    seeds = [7 + n for n in range(len(prompts))]
    sampling = Sampling(max_tokens=max_tokens)
    with loop.sample(generator, Request(prompts, num_generations, sampling, seeds)) as sampled:
        found = {number: group for number, _, group in sampled}
    return [found[n] for n in range(len(prompts))], generator


def text(completion: Completion) -> str:
    return "".join(map(chr, completion.ids))


def reply_with(words: Sequence[str]) -> Step:
    """Answers each turn with the next word and ends when there is none left."""

    def step(turn: int, message: Message) -> Observation:
        if turn == len(words):
            return Observation(reward=1.0, done=True)
        return Observation([{"role": "user", "content": words[turn]}], reward=0.25)

    return step


def next_digit(so_far: str) -> str:
    """Answers with the number of replies so far."""
    return f"{so_far.count('[')}."


def test_turns_and_replies_are_appended() -> None:
    ((c,),), generator = run(Scene(reply_with(["a", "b"])), next_digit)
    assert text(c) == "0.[a]1.[b]2."
    assert c.is_sampled == [s == "1" for s in "110001100011"]
    assert [lp == 0.0 for lp in c.sampling_logprobs] == [s == "0" for s in "110001100011"]
    spans = [(t.start, t.end, t.by, t.reward) for t in c.turns]
    assert spans == [
        (0, 2, "model", 0.25), (2, 5, "environment", None), (5, 7, "model", 0.25),
        (7, 10, "environment", None), (10, 12, "model", 1.0),
    ]  # fmt: skip
    assert (c.stop_reason, c.finish_reason) == ("env_done", "stop")
    assert [m["content"] for m in c.messages] == ["0", "a", "1", "b", "2"]
    assert [texts for texts, _, _ in generator.requests] == [["Q"], ["Q0.[a]"], ["Q0.[a]1.[b]"]]


def test_an_episode_of_one_turn_is_a_plain_completion() -> None:
    ((c,),), generator = run(Scene(), lambda so_far: "yes.")
    plain = Scripted(lambda so_far: "yes.")
    ((expected,),) = plain.generate([prompt_of("Q")], 1, Sampling(max_tokens=64), [7])
    assert generator.requests == plain.requests
    for name in ("ids", "sampling_logprobs", "finish_reason", "is_sampled", "sampled_at"):
        assert getattr(c, name) == getattr(expected, name)


@pytest.mark.parametrize(
    ("settings", "expected", "reason"),
    [
        ({"max_turns": 2}, "0.[a]1.", "max_turns"),
        ({"max_tokens": 7}, "0.[a]1.", "max_tokens"),  # the second reply leaves no room
        ({"max_tokens": 6}, "0.[a]1", "max_tokens"),
        ({"max_tokens": 5}, "0.", "max_tokens"),  # the first reply would fill it
        ({"turn_tokens": 1}, "0", "turn_tokens"),
    ],
)
def test_limits_cut_an_episode(settings: dict[str, Any], expected: str, reason: str) -> None:
    scene = Scene(reply_with(["a", "b", "c"]))
    ((c,),), _ = run(scene, next_digit, **settings)
    assert (text(c), c.stop_reason) == (expected, reason)
    assert c.finish_reason == "length"
    steps = sum(call.endswith("step") for call in scene.log)
    assert steps == expected.count("."), "a turn that a limit has cut is not given to it"
    assert scene.log[-1] == "0 finish", "its state is graded anyway"


def test_a_long_turn_is_sampled_in_pieces_that_share_rounds() -> None:
    scene = Scene(reply_with(["a"]))

    def answer(so_far: str) -> str:
        return "0." if "[" not in so_far else ("x" * 40 + ".")[so_far.count("x") :]

    ((c,),), generator = run(scene, answer, max_tokens=64)
    assert text(c) == "0.[a]" + "x" * 40 + "."
    limits = [sampling.max_tokens for _, sampling, _ in generator.requests]
    assert limits == [64, 32, 16], "5 of 64 tokens are taken, then 37"
    assert len({seeds[0] for _, _, seeds in generator.requests}) == 3
    assert [t.by for t in c.turns] == ["model", "environment", "model"]


def test_malformed_calls_are_answered_and_counted() -> None:
    scene = Scene(reply_with([]))
    ((c,),), _ = run(scene, lambda so_far: "!." if so_far.count("[") < 2 else "ok.", 200)
    assert c.stop_reason == "env_done"
    assert text(c).count("no such call") == 2
    assert sum(call.endswith("step") for call in scene.log) == 1, "it never sees a malformed one"
    ((c,),), _ = run(Scene(), lambda so_far: "!.", 400)
    assert c.stop_reason == "parse_error"
    assert text(c).count("no such call") == 2


def test_a_group_shares_its_seed_and_its_first_observation() -> None:
    scene = Scene(
        reply_with([]), lambda seed: Observation([{"role": "user", "content": f"<{seed % 7}>"}])
    )
    prompts = [prompt_of("P"), prompt_of("Q")]
    groups, generator = run(scene, lambda so_far: "x.", prompts=prompts, num_generations=3)
    seeds = [seed for _, _, seed in scene.opened]
    assert seeds[:3] == seeds[:1] * 3
    assert seeds[3:] == seeds[3:4] * 3
    assert seeds[0] != seeds[3]
    assert generator.requests[0][0] == [f"P<{seeds[0] % 7}>", f"Q<{seeds[3] % 7}>"]
    assert [len(g) for g in groups] == [3, 3]


def test_a_group_that_begins_differently_ends_the_run() -> None:
    begins = iter("ab")
    scene = Scene(first=lambda seed: Observation([{"role": "user", "content": next(begins)}]))
    with pytest.raises(TrainingError, match=r"begin differently, with .'a'. and .'b'."):
        run(scene, lambda so_far: "x.", num_generations=2)
    assert {"0 abandon", "1 abandon"} <= set(scene.log)


def test_the_row_names_its_environment() -> None:
    scene = Scene()
    prompts = [prompt_of("P", environment="one"), prompt_of("Q", environment="two", level=3)]
    run(scene, lambda so_far: "x.", prompts=prompts)
    assert [name for name, _, _ in scene.opened] == ["one", "two"]
    assert scene.opened[1][1] == {"environment": "two", "level": 3, "prompt": "Q"}


def test_times_of_a_step() -> None:
    class Slow(Session):
        def step(self, message: Message) -> Future[Observation]:
            late: Future[Observation] = Future()
            threading.Timer(0.2, lambda: late.set_result(Observation(done=True))).start()
            return late

    loop = EpisodeLoop(Scene(session=Slow), {"": Characters()}, EpisodeSettings())
    prompts = [prompt_of("P"), prompt_of("Q")]
    generator = Scripted(lambda so_far: "yes.")
    with loop.sample(generator, Request(prompts, 1, Sampling(9), [1, 2])) as sampled:
        assert len(list(sampled)) == 2
    times = loop.take_times()
    # A busy machine starts the clock some time after the timer.
    assert times["time/environment"] > 0.15, "of each rollout, though they ran together"
    assert 0.15 < times["time/waiting"] < times["time/environment"] * 2
    assert loop.take_times() == {"time/waiting": 0.0, "time/environment": 0.0}


def test_environments_that_fail_are_said_once() -> None:
    said: list[str] = []
    scene = Scene(faults=dict.fromkeys(range(9), ("reset", 0)))
    run(scene, lambda so_far: "yes.", num_generations=4, say=said.append)
    assert said == [
        "note: environments have failed 3 times and are replaced; the last error: it broke"
    ]


def test_a_failed_environment_is_replaced_and_replayed() -> None:
    scene = Scene(reply_with(["a", "b"]), faults={0: ("step", 1)})
    ((c,),), _ = run(scene, next_digit)
    ((expected,),), _ = run(Scene(reply_with(["a", "b"])), next_digit)
    assert c.env_retries == 1
    assert dataclasses.replace(c, env_retries=0) == expected, "nothing is lost or sampled again"
    calls = ["reset", "step", "step", "abandon"]
    assert scene.log[:4] == [f"0 {call}" for call in calls]
    assert scene.log[4:] == [f"1 {c}" for c in ["reset", "step", "step", "step", "finish"]]


@pytest.mark.parametrize("call", ["reset", "finish"])
def test_failures_of_reset_and_finish_are_retried(call: str) -> None:
    scene = Scene(reply_with(["a"]), final=Observation(rewards={"Guess": 0.5}))
    scene.faults = {0: (call, 0 if call == "reset" else 2)}
    ((c,),), _ = run(scene, next_digit)
    assert (text(c), c.stop_reason, c.env_rewards) == ("0.[a]1.", "env_done", {"Guess": 0.5})


def test_a_fresh_environment_that_answers_otherwise_goes_on_from_there() -> None:
    replies = iter(["a", "b", "A"])

    def step(turn: int, message: Message) -> Observation:
        if turn == 2:
            return Observation(done=True, reward=1.0)
        call = ToolCall("look")
        return Observation([{"role": "user", "content": next(replies, "B")}], calls=[call])

    scene = Scene(step, faults={0: ("step", 2)})
    ((c,),), _ = run(scene, next_digit)
    assert text(c) == "0.[A]1.[B]2."
    assert c.tool_calls == 2
    assert [m["content"] for m in c.messages] == ["0", "A", "1", "B", "2"]
    assert len(c.turns) == 5
    assert len(c.ids) == len(c.sampling_logprobs) == 12


def test_an_episode_is_given_up_after_its_retries() -> None:
    faults = dict.fromkeys(range(9), ("step", 0))
    scene = Scene(reply_with(["a"]), final=Observation(rewards={"Guess": 0.0}), faults=faults)
    ((c,),), _ = run(scene, next_digit)
    assert (text(c), c.stop_reason, c.env_rewards) == ("0.", "env_error", {})
    assert (c.env_error, c.env_retries) == ("it broke", 2)
    assert len(scene.opened) == 3


def test_a_broken_environment_ends_the_run_before_all_have_failed() -> None:
    scene = Scene(reply_with([]), faults=dict.fromkeys(range(1000), ("step", 0)))
    prompts = [prompt_of("Q") for _ in range(50)]
    with pytest.raises(TrainingError, match=r"21 of 100 rollouts failed.* = 0.2; .*: it broke"):
        run(scene, next_digit, prompts=prompts, num_generations=2, max_failed_share=0.2)


def test_a_prompt_that_an_observation_makes_too_long_has_no_reward() -> None:
    scene = Scene(first=lambda seed: Observation([{"role": "user", "content": "long"}]))
    ((c,),), generator = run(scene, lambda so_far: "x.", max_prompt_tokens=4)
    assert c.stop_reason == "env_error"
    assert generator.requests[0][0] == ["Q"], "no engine is given a prompt it has no room for"


def test_a_worker_that_dies_takes_no_retry_of_its_other_episodes() -> None:
    class Bystander(Session):
        def step(self, message: Message) -> Future[Observation]:
            if self.number < 4:
                future: Future[Observation] = Future()
                future.set_exception(EnvironmentFailure("env_error", "another died", own=False))
                return future
            return super().step(message)

    scene = Scene(reply_with([]), session=Bystander)
    ((c,),), _ = run(scene, lambda so_far: "x.")
    assert c.stop_reason == "env_done"


class Random(Generator):
    """Draws tokens at random, and keeps each piece by the tokens that it continues."""

    def __init__(self, size: int, eos: int) -> None:
        self.size, self.eos = size, eos
        self.drawn: dict[tuple[int, ...], list[list[int]]] = {}

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        for number, (prompt, seed) in enumerate(zip(request.prompts, request.seeds, strict=True)):
            group = []
            for sample in range(request.num_generations):
                rng = random.Random(f"{seed}/{sample}")
                ids: list[int] = []
                while len(ids) < request.sampling.max_tokens and self.eos not in ids[-1:]:
                    ids.append(self.eos if rng.random() < 0.15 else rng.randrange(self.size))
                self.drawn.setdefault(tuple(prompt.ids), []).append(ids)
                reason: Any = "stop" if ids[-1] == self.eos else "length"
                group.append(Completion(ids, [-1.0] * len(ids), reason))
            yield number, group


def test_what_is_trained_is_what_was_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    """Over 1,000 episodes each token is one that was drawn, or one of a reply that was appended."""
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    generator, chat = Random(len(tokenizer), eos), Chat(ChatTemplate(tokenizer, [eos]))
    appended: list[list[int]] = []
    encode = chat.replies.encode

    def noted(*args: Any, **kwargs: Any) -> list[int]:
        appended.append(encode(*args, **kwargs))
        return appended[-1]

    chat.replies.encode = noted  # type: ignore[method-assign]
    words = random.Random(5)

    def step(turn: int, message: Message) -> Observation:
        text = "".join(words.choice("aé中<|im_end|>\n 7") for _ in range(words.randrange(12)))
        return Observation([{"role": "user", "content": text}], done=words.random() < 0.3)

    prompts = [
        Prompt(n, [n], [{"role": "user", "content": str(n)}], {}) for n in range(250)
    ]  # fmt: skip
    loop = EpisodeLoop(Scene(step), {"": chat}, EpisodeSettings(turn_tokens=20, max_turns=6))
    request = Request(prompts, 4, Sampling(max_tokens=120), range(250))
    with loop.sample(generator, request) as sampled:
        found = [pair for _, own, group in sampled for pair in zip(own, group, strict=True)]
    assert len(found) == 1000
    foreign = 0
    for prompt, c in found:
        for turn in c.turns:
            ids = c.ids[turn.start : turn.end]
            if turn.by == "environment":
                assert ids in appended
                foreign += len(ids)
                continue
            while ids:  # in pieces
                before = tuple(prompt.ids + c.ids[: turn.end - len(ids)])
                (piece,) = [p for p in generator.drawn[before] if ids[: len(p)] == p][:1]
                ids = ids[len(piece) :]
    assert foreign > 1000


def test_rounds_are_the_same_whichever_environment_is_quicker() -> None:
    orders = []
    for slow in (0, 1):
        scene = Scene(reply_with(["a"]))

        class Slow(Session):
            def step(self, message: Message) -> Future[Observation]:
                ended = super().step(message)
                if self.number != slow:  # noqa: B023
                    return ended
                late: Future[Observation] = Future()
                threading.Timer(0.05, lambda: late.set_result(ended.result())).start()
                return late

        scene.session = Slow
        _, generator = run(scene, next_digit, prompts=[prompt_of("P"), prompt_of("Q")])
        orders.append(generator.requests)
    assert orders[0] == orders[1]
