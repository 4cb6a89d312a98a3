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
from grpo_cli.generation.vllm import client, server_key, server_log
from grpo_cli.generation.vllm.client import Server, ServerLost, wait_for
from grpo_cli.generation.vllm.requests import sampling_params
from grpo_cli.records import Completion, Prompt
from tests.conftest import as_scored
from tests.fake_vllm import GENERATE, FakeVllm, Refused, serving, toy_completions, toy_logprobs

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


def test_a_call_without_a_body_gets_and_one_with_a_body_posts(fake: FakeVllm) -> None:
    server = to(fake)
    assert server.call("/health") is None
    assert server.call("/get_world_size") == {"world_size": 1}
    assert server.call("/reset_prefix_cache", {}) == {"success": True}
    assert server.call("/update_weight_version", {"new_version": "v"})["new_version"] == "v"
    assert server.rpc("grpo_begin_update", "weights") == [None]
    assert fake.updating
    assert fake.calls[-1] == "grpo_begin_update"


@pytest.mark.parametrize(
    ("happens", "timeout", "why"),
    [
        (lambda fake: fake.fail, 30, "answered 500: EngineCore encountered an issue."),
        (lambda fake: fake.hang, 0.2, "no answer within 0.2 s."),
        (lambda fake: fake.die, 30, "the connection broke ("),
    ],
    ids=["500", "hangs", "dies"],
)
def test_a_failure_names_server_call_and_reason(
    fake: FakeVllm, happens: Any, timeout: float, why: str
) -> None:
    fake.faults["/health"] = happens(fake)
    with pytest.raises(ServerLost) as error:
        to(fake).call("/health", timeout=timeout)
    assert str(error.value).startswith(f"server {fake.url}: /health failed: {why}")


def test_what_a_server_refuses_is_no_failure_of_it(fake: FakeVllm) -> None:
    fake.faults["/pause"] = answers(400, "mode is not to my taste")
    with pytest.raises(TrainingError) as error:
        to(fake).call("/pause?mode=x", {})
    assert str(error.value) == (
        f"server {fake.url}: /pause?mode=x was refused: mode is not to my taste"
    )
    assert error.value.alone, "no other process is told"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "a", "code": 1}}, "a"),
        ({"error": "b"}, "b"),
        ({"detail": "c"}, "c"),
        ({"detail": [{"loc": "body"}]}, "[{'loc': 'body'}]"),
        ({"other": 1}, "{'other': 1}"),
        (["d"], "['d']"),
    ],
)
def test_what_a_server_says_is_wrong(body: Any, said: str) -> None:
    assert client.reason(httpx2.Response(500, json=body)) == said
    assert client.reason(httpx2.Response(500, text=" no\n JSON ")) == "no JSON"


def test_a_failure_ends_with_the_log_of_a_server_of_this_machine(fake: FakeVllm) -> None:
    log = server_log.log_path(fake.port)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("up\nCUDA out of memory\n", encoding="utf-8")
    said = str(to(fake).lost("/x", "it fell"))
    log.unlink()
    assert said.splitlines() == [
        f"server {fake.url}: /x failed: it fell.",
        "The last lines of its log:",
        "up",
        "CUDA out of memory",
    ]


# Greeting.


def test_a_server_is_greeted() -> None:
    fake = FakeVllm(CONFIG, workers=2, dtype="bfloat16", transfer="nccl", max_model_len=77)
    with serving(fake):
        server = to(fake)
        assert server.greet(CONFIG)
        assert server.worker_ids == [f"{fake.worker_id}-0", f"{fake.worker_id}-1"]
        assert (server.world_size, server.max_model_len) == (2, 77)
        assert (server.dtype, server.transfer) == ("bfloat16", "nccl")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            {"config": CONFIG | {"hidden_size": 64}},
            "serves another model than the policy, some/model: hidden_size is 64 there and 32 here",
        ),
        (
            {"config": CONFIG | {"rope_parameters": {"rope_theta": 5e5}}},
            "serves another model than the policy, some/model: rope_theta is 500000.0 there and ",
        ),
        (
            {"quantization": "fp8"},
            r"serves some/model quantized \(fp8\); it cannot take weights that are trained",
        ),
    ],
    ids=["hidden size", "rope", "quantized"],
)
def test_a_server_that_is_unfit(fake: FakeVllm, state: dict[str, Any], said: str) -> None:
    fake.state |= state
    with pytest.raises(UserError, match=f"generation.vllm.servers: {fake.url} {said}"):
        to(fake).greet(CONFIG)


@pytest.mark.parametrize("status", [403, 404, 500])
@pytest.mark.parametrize("call", ["grpo_state", "/get_world_size"])
def test_a_server_that_grpo_serve_has_not_started(fake: FakeVllm, call: str, status: int) -> None:
    fake.faults[call] = answers(status, "Not Found")
    with pytest.raises(UserError, match=r"is up, and was not started by `grpo serve`.*Not Found"):
        to(fake).greet(CONFIG)


@pytest.mark.parametrize(
    ("call", "happens", "why"),
    [
        ("/health", lambda fake: answers(503, "not yet"), "/health failed: answered 503: not yet"),
        ("grpo_state", lambda fake: answers(503, "x"), "/collective_rpc failed: answered 503: x"),
        ("grpo_state", lambda fake: fake.die, "/collective_rpc failed: the connection broke"),
        ("/get_world_size", lambda fake: fake.die, "/get_world_size failed: the connection broke"),
    ],
    ids=["health", "503", "dies", "dies later"],
)
def test_a_server_that_is_not_up_yet(fake: FakeVllm, call: str, happens: Any, why: str) -> None:
    fake.faults[call] = happens(fake)
    with pytest.raises(ServerLost, match=why):
        to(fake).greet(CONFIG)


def test_a_server_refuses_another_key(
    fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_group_is_what_the_server_drew_in_the_order_of_its_numbers(fake: FakeVllm) -> None:
    drawn = toy_completions([5, 6], PARAMS)
    assert generated(fake, lambda version: 4 if version == "default" else -1) == [
        Completion(ids, logprobs, reason, sampled_at=4)  # type: ignore[arg-type]
        for ids, logprobs, reason in drawn
    ]
    salted = {"cache_salt": "run:3", "output_kind": 2}  # 2: final only
    assert fake.asked == [{"token_ids": [5, 6], **PARAMS, **salted}]


def test_a_completion_is_as_old_as_its_oldest_token(fake: FakeVllm) -> None:
    fake.versions = lambda: ["b", "a", "c"]
    found = generated(fake, lambda version: {"a": 3, "b": 5, "c": 4}[version])
    assert [c.sampled_at for c in found] == [3, 3, 3]


@pytest.mark.parametrize("versions", [["good", "other"], ["other"], []], ids=str)
def test_weights_that_the_run_has_not_sent(fake: FakeVllm, versions: list[str]) -> None:
    fake.versions = lambda: versions
    with pytest.raises(ServerLost) as error:
        generated(fake, lambda version: 0 if version == "good" else -1)
    assert str(error.value) == (
        f"server {fake.url}: {GENERATE} failed: it sampled with weights {sorted(versions)}, which "
        "this run has not sent in time; it was restarted, or another run sends it weights too."
    )


@pytest.mark.parametrize(
    ("drawn", "why"),
    [
        ([([5], [-1.0], "stop")] * 2, "3 completions were due, 2 came"),
        ([([5], [-1.0], "stop")] * 4, "3 completions were due, 4 came"),
        ([([5], [-1.0], "abort")] * 3, r"a completion was broken off \(abort\)"),
    ],
    ids=["too few", "too many", "broken off"],
)
def test_a_group_that_is_not_whole(fake: FakeVllm, drawn: Any, why: str) -> None:
    fake.complete = lambda ids, params: drawn
    with pytest.raises(ServerLost, match=why):
        generated(fake)


@pytest.mark.parametrize(
    ("happens", "kind", "why"),
    [
        (lambda fake: fake.hang, ServerLost, "no answer within 2 s"),
        (lambda fake: answers(400, "too long"), TrainingError, "refused: too long"),
    ],
    ids=["hangs", "400"],
)
def test_generation_that_fails(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, happens: Any, kind: type, why: str
) -> None:
    monkeypatch.setattr(client, "REQUEST_SECONDS", 2.0)
    fake.faults[GENERATE] = happens(fake)
    with pytest.raises(kind, match=f"server {fake.url}: {GENERATE} .*{why}"):
        generated(fake)


def test_scores_are_those_of_each_rows_own_tokens(fake: FakeVllm) -> None:
    rows = [[3, 4, 5], [9, 8], [7, 7, 7, 1]]
    found = to(fake).score(as_scored(rows))
    assert found == [toy_logprobs({"w": torch.tensor([1.0])}, row) for row in rows]
    assert found[0] == pytest.approx([-1.04, -1.05])


# Whether it lives, and until it does.


def watched(fake: FakeVllm) -> str:
    async def watch() -> ServerLost:
        async with httpx2.AsyncClient(trust_env=False) as client:
            return await to(fake).watch(client)

    return str(asyncio.run(asyncio.wait_for(watch(), 30)))


def test_a_server_is_given_up_after_three_looks_in_a_row(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PROBE", 0.001)
    looks = iter([503, 503, None, 503, None, 503, 503, 503])
    fake.faults["/health"] = lambda: None if (s := next(looks)) is None else answers(s, "ill")()
    assert watched(fake) == (f"server {fake.url}: /health failed: answered 503, 3 times in a row.")
    assert next(looks, "none are left") == "none are left"


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
    assert said == [f"waiting for {late.url}, {left} s more at most" for left in (2,)]


def test_a_server_that_is_not_up_in_time(fake: FakeVllm, clock: SimpleNamespace) -> None:
    fake.end()
    with pytest.raises(UserError) as error:
        wait_for([to(fake)], CONFIG, lambda text: None)
    assert str(error.value) == (
        f"generation.vllm.servers: {fake.url} is not up after 7 s. "
        f"server {fake.url}: /health failed: nothing listens there."
    )
    assert math.isclose(clock.now, 1007.5)


def test_a_server_in_the_middle_of_an_update_is_not_waited_for(
    fake: FakeVllm, clock: SimpleNamespace
) -> None:
    fake.updating = True
    with pytest.raises(UserError) as error:
        wait_for([to(fake)], CONFIG, print)
    assert str(error.value) == (
        f"generation.vllm.servers: {fake.url} was left in the middle of a weight update, by a run "
        "that ended; start it again."
    )
    assert clock.now == 1000
