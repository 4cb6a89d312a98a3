"""One server over HTTP: what it is asked, what is refused, and how a failure is told."""

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch

from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.vllm import client, server_key
from grpo_cli.generation.vllm.client import Server, ServerLost, wait_for
from grpo_cli.generation.vllm.requests import sampling_params
from grpo_cli.records import Completion, Prompt
from tests.fake_vllm import FakeVllm, Refused, serving, toy_completions

CONFIG: dict[str, Any] = {"hidden_size": 32, "vocab_size": 259, "rope_theta": 1e4}
PARAMS = sampling_params(Sampling(6), 3, [2], 5, None)


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    server = FakeVllm(CONFIG, {"w": torch.tensor([0.5, -1.5])})
    with serving(server):
        yield server


def to(fake: FakeVllm) -> Server:
    return Server(fake.url, key=fake.key)


def answers(status: int, message: str) -> Callable[[], None]:
    def act() -> None:
        raise Refused(status, message)

    return act


def generated(fake: FakeVllm, steps: Callable[[str], int] = lambda version: 0) -> list[Completion]:
    async def ask() -> list[Completion]:
        async with httpx2.AsyncClient(trust_env=False) as client:
            return await to(fake).generate(client, Prompt.from_ids([5, 6]), PARAMS, "run:3", steps)

    return asyncio.run(ask())


# Calls.


def test_refused_call(fake: FakeVllm) -> None:
    fake.faults["/pause"] = answers(400, "mode is not to my taste")
    with pytest.raises(TrainingError, match=r"/pause\?mode=x was refused: mode is not to") as error:
        to(fake).call("/pause?mode=x", {})
    assert error.value.alone, "no other process is told"


# Greeting.


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"config": CONFIG | {"hidden_size": 64}}, "some/model: hidden_size is 64 there and 32"),
        ({"quantization": "fp8"}, r"serves some/model quantized \(fp8\); it cannot take weights"),
    ],
    ids=["hidden size", "quantized"],
)
def test_unfit_server(fake: FakeVllm, state: dict[str, Any], said: str) -> None:
    fake.state |= state
    with pytest.raises(UserError, match=f"generation.vllm.servers: {fake.url} .*{said}"):
        to(fake).greet(CONFIG)


@pytest.mark.parametrize(("call", "status"), [("grpo_state", 403), ("/get_world_size", 404)])
def test_server_not_started_by_grpo(fake: FakeVllm, call: str, status: int) -> None:
    fake.faults[call] = answers(status, "Not Found")
    with pytest.raises(UserError, match=r"is up, and was not started by `grpo serve`.*Not Found"):
        to(fake).greet(CONFIG)


@pytest.mark.parametrize(
    ("call", "happens", "why"),
    [
        ("/health", lambda fake: answers(503, "not yet"), "/health failed: answered 503: not yet"),
        ("/get_world_size", lambda fake: fake.die, "/get_world_size failed: the connection broke"),
    ],
    ids=["503", "dies"],
)
def test_server_not_up_yet(fake: FakeVllm, call: str, happens: Any, why: str) -> None:
    fake.faults[call] = happens(fake)
    with pytest.raises(ServerLost, match=why):
        to(fake).greet(CONFIG)


def test_wrong_key_refused(fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path))
    key_file = tmp_path / "serve" / "key"
    server = Server(fake.url)
    with pytest.raises(ServerLost, match=f"asks for a key, and there is no {key_file}; set"):
        server.greet(CONFIG)  # which is tried again: the key may be on its way
    server_key.make_key()
    with pytest.raises(UserError, match=f"{fake.url} refuses the key of {key_file}; set"):
        server.greet(CONFIG)
    key_file.write_text(fake.key)
    assert server.greet(CONFIG)
    monkeypatch.setenv("GRPO_SERVER_KEY", "the-key-of-another-server")
    with pytest.raises(UserError, match=r"refuses the key of \$GRPO_SERVER_KEY; set"):
        to(fake).greet(CONFIG)
    assert fake.key not in repr(server)


# Completions.


def test_group_keeps_the_order_of_completions(fake: FakeVllm) -> None:
    drawn = toy_completions([5, 6], PARAMS)
    assert generated(fake, lambda version: 4 if version == "default" else -1) == [
        Completion(ids, logprobs, reason, sampled_at=4)  # type: ignore[arg-type]
        for ids, logprobs, reason in drawn
    ]
    salted = {"cache_salt": "run:3", "output_kind": 2}  # 2: final only
    assert fake.asked == [{"token_ids": [5, 6], **PARAMS, **salted}]


def test_age_of_a_completion(fake: FakeVllm) -> None:
    fake.versions = lambda: ["b", "a", "c"]
    found = generated(fake, lambda version: {"a": 3, "b": 5, "c": 4}[version])
    assert [c.sampled_at for c in found] == [3, 3, 3]


@pytest.mark.parametrize(
    ("drawn", "why"),
    [
        ([([5], [-1.0], "stop")] * 2, "3 completions were due, 2 came"),
        ([([5], [-1.0], "abort")] * 3, r"a completion was broken off \(abort\)"),
    ],
    ids=["too few", "broken off"],
)
def test_incomplete_group(fake: FakeVllm, drawn: Any, why: str) -> None:
    fake.complete = lambda ids, params: drawn
    with pytest.raises(ServerLost, match=why):
        generated(fake)


# Whether it lives, and until it does.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time passes by sleeping alone; `slept` may do something."""
    clock = SimpleNamespace(now=1000.0, slept=lambda: None)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        clock.slept()

    monkeypatch.setattr(client, "START_SECONDS", 7.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    return clock


def test_servers_are_waited_for(fake: FakeVllm, clock: SimpleNamespace) -> None:
    late = FakeVllm(CONFIG)
    late.end()
    said: list[str] = []
    clock.slept = lambda: late.start() if clock.now == 1006 else None
    with serving(late):
        servers = [to(fake), to(late)]
        wait_for(servers, CONFIG, said.append)
        assert [s.world_size for s in servers] == [1, 1]
    assert clock.now == 1006
    assert said == [f"waiting for {late.url}, 2 s more at most"]


def test_server_not_up_in_time(fake: FakeVllm, clock: SimpleNamespace) -> None:
    fake.end()
    with pytest.raises(UserError, match=r"is not up after 7 s\. .* failed: nothing listens there"):
        wait_for([to(fake)], CONFIG, lambda text: None)
    assert math.isclose(clock.now, 1007.5)


def test_server_left_in_an_update_is_refused(fake: FakeVllm, clock: SimpleNamespace) -> None:
    fake.updating = True
    with pytest.raises(UserError, match=r"in the middle of a weight update, .* start it again"):
        wait_for([to(fake)], CONFIG, print)
    assert clock.now == 1000
