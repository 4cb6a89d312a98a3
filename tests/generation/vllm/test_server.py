"""Servers as the generator: nothing is lost when one is, and none samples with stale weights."""

import contextlib
import copy
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.base import Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.vllm import base, client, server, weight_transfer
from grpo_cli.generation.vllm.requests import sampling_params
from grpo_cli.generation.vllm.server import ServerGenerator
from grpo_cli.generation.vllm.weights import Weights
from grpo_cli.images import StoredImage
from grpo_cli.models import adapters
from grpo_cli.models.settings import Adapter
from grpo_cli.records import Completion, Prompt
from tests.conftest import as_prompts
from tests.conversations import Conversations
from tests.fake_vllm import (
    EOS,
    GENERATE,
    Drawn,
    FakeVllm,
    Process,
    Refused,
    generator_for,
    recipe_for,
    serving,
    toy_completions,
)

PROMPTS = [[5 + i, 6, 7] for i in range(12)]
SEEDS = list(range(100, 112))
SAMPLING = Sampling(max_tokens=6)


@pytest.fixture
def fakes(model: PreTrainedModel) -> Iterator[list[FakeVllm]]:
    config = model.config.get_text_config().to_dict()
    servers = [FakeVllm(config), FakeVllm(config)]
    with serving(*servers):
        yield servers


Start = Callable[..., ServerGenerator]


@pytest.fixture
def start(fakes: list[FakeVllm], model: PreTrainedModel) -> Iterator[Start]:
    """Makes generators that have sent their first weights, and closes them afterwards."""
    with contextlib.ExitStack() as stack:

        def make(servers: Sequence[FakeVllm] | None = None, **how: Any) -> ServerGenerator:
            generator = generator_for(servers or fakes, model, **how)
            stack.callback(generator.close)
            generator.update_weights(model, 0)
            return generator

        yield make


def expected(step: int = 0, number: int = len(PROMPTS)) -> list[list[Completion]]:
    """What the servers draw, whichever of them it is."""
    return [
        [
            Completion(*drawn, sampled_at=step)  # type: ignore[arg-type]
            for drawn in toy_completions(ids, sampling_params(SAMPLING, 3, [EOS], seed, None))
        ]
        for ids, seed in zip(PROMPTS[:number], SEEDS, strict=False)
    ]


def generated(generator: ServerGenerator, number: int = len(PROMPTS)) -> list[list[Completion]]:
    """Three completions a prompt."""
    with generator.session() as session:
        session.submit(Request(as_prompts(PROMPTS[:number]), 3, SAMPLING, SEEDS[:number]))
        found = [(done.number, done.completions) for done in session.drain()]
    assert len(found) == number, "each once"
    return [completions for _, completions in sorted(found, key=itemgetter(0))]


def move(policy: PreTrainedModel) -> None:
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.5)


def assert_has_weights(fake: FakeVllm, policy: PreTrainedModel) -> None:
    expected = dict(policy.named_parameters())
    for held in fake.held:
        assert held.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(held[name], weight), name


def updated(generator: ServerGenerator, policy: PreTrainedModel, step: int) -> float:
    """Moves the policy and sends it; returns how many servers have it."""
    move(policy)
    return generator.update_weights(policy, step)["weights/servers"]


# Sampling.


def test_prompts_are_spread_over_servers(fakes: list[FakeVllm], model: PreTrainedModel) -> None:
    generator = generator_for(fakes, model)
    generator.update_weights(model, 4)
    assert generated(generator) == expected(step=4)
    assert [len(fake.asked) for fake in fakes] == [6, 6]
    asked = [a["token_ids"] for fake in fakes for a in fake.asked]
    assert sorted(asked) == PROMPTS, "each once"
    assert generated(generator, 1) == expected(4, 1)
    assert {a["cache_salt"] for fake in fakes for a in fake.asked} == {fakes[0].version}
    assert generator.generate([], 3, SAMPLING, []) == []
    generator.close()


def test_images_of_a_stream_are_refused_in_flight(start: Start) -> None:
    """At the start only the first rows are known."""
    image = Prompt(7, [5], "", {}, images=(StoredImage(b"", ""),))
    said = "generation.vllm.in_flight = true: a server's completions cannot go on over new weights"
    generator = start(in_flight=True)
    with pytest.raises(TrainingError, match=f"row 7 is the first with images: {said}"):
        generator.generate([image], 3, SAMPLING, [0])
    with pytest.raises(UserError, match=f"^{said}"):
        generator.prompt_check.check_settings(generator.policy)


def test_at_most_max_rows_requests_at_once(fakes: list[FakeVllm], start: Start) -> None:
    """Of groups of 3, two fit into 6 rows."""
    recipe = recipe_for(fakes)
    recipe.generation.max_num_seqs = 6
    generator = start(recipe=recipe)
    most: list[int] = []
    for fake in fakes:
        full = threading.Event()

        def complete(
            ids: list[int],
            params: dict[str, Any],
            fake: FakeVllm = fake,
            full: threading.Event = full,
        ) -> Drawn:
            if fake.under_way == 2:
                full.set()
            assert full.wait(30), "as many as may be are asked for"
            time.sleep(0.03)  # for one too many to come
            most.append(fake.under_way)
            return toy_completions(ids, params)

        fake.complete = complete
    assert generated(generator) == expected()
    assert max(most) == 2


def conversations(**how: Any) -> Conversations:
    return Conversations(PROMPTS, 3, SAMPLING, 3, **how)


def test_conversations_stay_on_their_server(fakes: list[FakeVllm], start: Start) -> None:
    generator, in_rounds = start(), conversations()
    in_rounds.run(generator)
    for fake in fakes:
        fake.asked.clear()
    slow = conversations(is_repeatable=False, held=4)
    slow.run(generator)
    assert slow.ids == in_rounds.ids
    others = [i for i, (what, n) in enumerate(slow.log) if what == "asked" and n != 4]
    assert max(others) < slow.log.index(("asked", 4)), "all others were through"
    homes = [{tuple(body["token_ids"][:3]) for body in fake.asked} for fake in fakes]
    assert homes[0].isdisjoint(homes[1])
    assert len(homes[0]) == len(homes[1]) == 6


# A server that is lost.


@pytest.mark.programs
@pytest.mark.parametrize(
    ("fault", "good_calls", "why"),
    [
        ("die", 2, "(the connection broke|nothing listens there)"),
        ("fail", 0, "answered 500: EngineCore encountered an issue."),
        ("hang", 2, "no answer within 1.5 s."),
    ],
)
def test_prompts_of_a_lost_server_move(
    fakes: list[FakeVllm],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    good_calls: int,
    why: str,
) -> None:
    said: list[str] = []
    if fault == "hang":
        monkeypatch.setattr(client, "REQUEST_SECONDS", 1.5)
    generator = start(say=said.append)
    bad, good = fakes
    bad.faults[GENERATE] = bad.after(good_calls, getattr(bad, fault))
    assert generated(generator) == expected()
    (note,) = said
    assert re.match(f"note: server {bad.url}: {GENERATE} failed: {why}", note)
    assert note.endswith("The other servers go on; it joins again once it is back.")
    asked = len(good.asked)
    assert 12 - good_calls <= asked <= 12, "what is known stays, unless it came too late"
    assert generated(generator) == expected()
    assert len(good.asked) == asked + 12, "it is not asked again before the next update"


def test_failed_health_check(
    fakes: list[FakeVllm], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's API server may be up when its engine is gone: requests hang."""
    monkeypatch.setattr(client, "PROBE", 0.01)
    said: list[str] = []
    generator = start(say=said.append)
    fakes[0].faults |= {GENERATE: fakes[0].hang, "/health": fakes[0].fail}
    assert generated(generator) == expected()
    assert "/health failed: answered 500, 3 times in a row" in said[0]


@pytest.mark.parametrize(("times", "lost"), [(1, 0), (2, 1)])
def test_broken_connection(fakes: list[FakeVllm], start: Start, times: int, lost: int) -> None:
    """Unless it breaks again."""
    generator = start()
    breaks = iter(range(times))

    def abort() -> None:
        if next(breaks, None) is not None:
            raise ConnectionAbortedError

    fakes[0].faults[GENERATE] = abort
    assert generated(generator, 1) == expected(number=1)
    assert len(generator.live) == 2 - lost
    assert [len(fake.asked) for fake in fakes] == ([1, 0] if not lost else [0, 1])


def test_prompts_move_when_an_update_fails(
    fakes: list[FakeVllm], model: PreTrainedModel, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be up, and hold on to what it was asked."""
    monkeypatch.setattr(server, "BEAT", 0.02)
    generator = start(in_flight=True)
    bad, begun = fakes[0], threading.Barrier(6 + 1, timeout=30)  # its share, and this test

    def complete(ids: list[int], params: dict[str, Any]) -> Drawn:
        begun.wait()
        bad.over.wait(60)
        return toy_completions(ids, params)

    bad.complete = complete
    bad.faults["/finish_weight_update"] = bad.fail
    with ThreadPoolExecutor(1) as pool:
        completions = pool.submit(generated, generator)
        begun.wait()
        assert updated(generator, model, 1) == 1
        found = completions.result()
    assert [[c.ids for c in g] for g in found] == [[c.ids for c in g] for g in expected()]
    assert len(fakes[1].asked) == 12


# Whose weights they are.


def test_stale_weights(fakes: list[FakeVllm], model: PreTrainedModel, start: Start) -> None:
    generator = start(fakes[:1])
    first = fakes[0].version
    assert updated(generator, model, 1) == 1
    fakes[0].versions = lambda: [first]
    with pytest.raises(TrainingError, match=f"it sampled with weights .'{first}'., which this run"):
        generated(generator, 1)


def test_weights_of_another_run(fakes: list[FakeVllm], model: PreTrainedModel) -> None:
    ours, theirs = generator_for(fakes[:1], model), generator_for(fakes[:1], model)
    ours.update_weights(model, 0)
    theirs.update_weights(model, 0)
    with pytest.raises(TrainingError, match="another run sends it weights too"):
        generated(ours, 1)
    assert generated(theirs, 1) == expected(0, 1)
    theirs.close()
    ours.close()


@pytest.mark.parametrize("in_flight", [True, False])
def test_completions_during_an_update(
    fakes: list[FakeVllm],
    model: PreTrainedModel,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    in_flight: bool,
) -> None:
    """In flight: their first tokens are of the old policy. Else the update waits for them."""
    monkeypatch.setattr(weight_transfer, "BEAT", 0.01)
    (fake,) = fakes[:1]
    generator = start([fake], in_flight=in_flight)
    first, begun, go_on = fake.version, threading.Event(), threading.Event()

    def complete(ids: list[int], params: dict[str, Any]) -> Drawn:
        begun.set()
        go_on.wait(30)
        return toy_completions(ids, params)

    fake.complete = complete
    fake.versions = lambda: [first, fake.version]
    with ThreadPoolExecutor(2) as pool:
        completions = pool.submit(generated, generator, 1)
        begun.wait(30)
        if in_flight:
            assert updated(generator, model, 1) == 1
            assert_has_weights(fake, model)
            go_on.set()
        else:
            fake.pausing.clear()
            update = pool.submit(updated, generator, model, 1)
            assert fake.pausing.wait(30)
            assert fake.version == first
            beaten = threading.Event()
            monkeypatch.setattr(heartbeat, "touch", beaten.set)
            assert beaten.wait(10), "a long wait is no stall"
            go_on.set()
            assert update.result() == 1
        assert completions.result() == expected(0, 1)
    assert fake.pauses == ["keep" if in_flight else "wait"] * 2
    assert fake.calls.count("/reset_prefix_cache") == (0 if in_flight else 2), "it is in use"
    fake.complete, fake.versions = toy_completions, lambda: [fake.version]
    assert generated(generator, 1) == expected(1, 1)


# Updates.


def test_server_comes_back(fakes: list[FakeVllm], model: PreTrainedModel, start: Start) -> None:
    said: list[str] = []
    generator = start(say=said.append)
    back = fakes[0]
    back.end()
    assert generated(generator) == expected()
    assert updated(generator, model, 1) == 1
    back.start()
    assert generated(generator) == expected(step=1)
    assert back.asked == [], "it has not the weights yet"
    said.clear()
    assert updated(generator, model, 2) == 2
    assert said == [f"{back.url} is back, and has the weights from now on"]
    for fake in fakes:
        assert_has_weights(fake, model)
    assert generated(generator) == expected(step=2)
    assert len(back.asked) == 6


def test_slow_server_stays(fakes: list[FakeVllm], model: PreTrainedModel, start: Start) -> None:
    said: list[str] = []
    generator = start(say=said.append)
    fakes[0].faults[GENERATE] = fakes[0].fail
    assert generated(generator) == expected()
    fakes[0].faults.clear()
    assert updated(generator, model, 1) == 2
    assert len(fakes[0].inits) == 1
    assert_has_weights(fakes[0], model)


def test_interrupted_update(fakes: list[FakeVllm], model: PreTrainedModel, start: Start) -> None:
    said: list[str] = []
    generator = start(say=said.append)
    fakes[0].faults["/finish_weight_update"] = fakes[0].fail
    assert updated(generator, model, 1) == 1
    assert f"server {fakes[0].url}: /finish_weight_update failed" in said.pop()
    fakes[0].faults.clear()
    before = len(fakes[0].calls)
    why = "weight update failed: one was broken off; it has to be started again."
    for step in (2, 3):
        assert updated(generator, model, step) == 1
        looks = ["/health", "grpo_state", "/get_world_size"] * (step - 1)
        assert fakes[0].calls[before:] == looks, "left alone"
        assert said == [f"note: server {fakes[0].url}: {why}"], "once"
    fakes[1].faults["/pause"] = fakes[1].fail
    with pytest.raises(TrainingError) as error:
        updated(generator, model, 4)
    assert f"server {fakes[0].url}: {why}" in str(error.value)
    assert f"server {fakes[1].url}: /pause?mode=wait failed" in str(error.value)


# At the start.


@pytest.mark.parametrize(("of_eval", "needed"), [(5, 16), (9, 19)])
def test_too_short_a_server(
    fakes: list[FakeVllm], model: PreTrainedModel, of_eval: int | None, needed: int
) -> None:
    recipe = recipe_for(fakes)
    recipe.eval.max_completion_tokens = of_eval
    fakes[1].state["max_model_len"] = needed
    generator_for(fakes, model, recipe=recipe)
    fakes[1].state["max_model_len"] = needed - 1
    pattern = rf"{fakes[1].url} was started with max_model_len = {needed - 1}; .*_len={needed}\."
    with pytest.raises(UserError, match=pattern):
        generator_for(fakes, model, recipe=recipe)


# Several processes.


def both(processes: Sequence[Any], do: Callable[[Any], Any]) -> list[Any]:
    """What each process returns or raises."""
    with ThreadPoolExecutor(len(processes)) as pool:
        futures = [pool.submit(do, process) for process in processes]
    return [future.exception() or future.result() for future in futures]


def two_processes(
    fakes: list[FakeVllm], model: PreTrainedModel, **of_vllm: Any
) -> list[ServerGenerator]:
    return both(
        Process.several(2),
        lambda process: generator_for(fakes, copy.deepcopy(model), process=process, **of_vllm),
    )


def test_one_process_sends_weights(
    fakes: list[FakeVllm], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: Counter[int] = Counter()

    class Counted(Weights):
        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            yield from super().__iter__()
            passes[id(self.model)] += 1

    monkeypatch.setattr(base, "Weights", Counted)
    main, other = two_processes(fakes, model)
    both([main, other], lambda g: g.update_weights(g.policy, 0))
    for fake in fakes:
        assert fake.calls.count("/update_weights") == 1
        assert_has_weights(fake, main.policy)
    assert other.live == main.live == {fake.url for fake in fakes}
    assert other.links == {}
    assert passes[id(other.policy)] == 1, "a sharded policy is gathered by all"
    assert generated(other) == generated(main) == expected()
    for fake in fakes:
        fake.asked.clear()
    generated(main, 1)
    assert [len(fake.asked) for fake in fakes] == [1, 0]
    generated(other, 1)
    assert [len(fake.asked) for fake in fakes] == [1, 1], "each begins with another"
    main.close()
    other.close()


def test_server_lost_by_one_process(fakes: list[FakeVllm], model: PreTrainedModel) -> None:
    said: list[str] = []
    main, other = two_processes(fakes, model, say=said.append)
    both([main, other], lambda g: g.update_weights(g.policy, 0))
    fakes[1].faults[GENERATE] = fakes[1].fail
    assert generated(other) == expected()
    said.clear()
    assert (len(main.live), len(other.live)) == (2, 1)
    fakes[1].end()
    fakes[1].start()
    fakes[1].faults.clear()
    both([main, other], lambda g: g.update_weights(g.policy, 1))
    assert said[0].startswith(f"note: process 1: server {fakes[1].url}: {GENERATE} failed: answ")
    assert main.live == other.live == {fake.url for fake in fakes}
    assert_has_weights(fakes[1], main.policy)
    main.close()


def test_failure_stops_every_process(fakes: list[FakeVllm], model: PreTrainedModel) -> None:
    main, other = two_processes(fakes[:1], model)
    both([main, other], lambda g: g.update_weights(g.policy, 0))
    fakes[0].end()
    for error in both([main, other], lambda g: g.update_weights(g.policy, 1)):
        assert isinstance(error, TrainingError)
        assert f"no server is left. server {fakes[0].url}: /pause?mode=wait failed" in str(error)
    main.close()


def test_interrupted_run_cancels_requests(
    fakes: list[FakeVllm], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BEAT", 0.02)
    generator = start()
    for fake in fakes:
        fake.faults[GENERATE] = fake.hang
    asked = 0

    def leave() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5

    monkeypatch.setattr(heartbeat, "leave", leave)
    with pytest.raises(heartbeat.WorkInterrupted):
        generated(generator)
    assert asked == 6
    assert not any(generator.in_flight.rows.values()), "nothing is being asked any more"
    for fake in fakes:
        del fake.faults[GENERATE]
    # What is begun ahead, in a thread, is nothing to leave for.
    assert both([0], lambda _: generated(generator)) == [expected()]
    assert asked == 6


# Adapters that the servers apply.


@pytest.fixture
def adapted(model: PreTrainedModel) -> PreTrainedModel:
    """The policy with an adapter that changes it."""
    config = adapters.config_of(Adapter(method="lora", rank=3), "base", None)
    adapters.attach(model, config, 0)
    move_adapter(model)
    return model


@torch.no_grad()
def move_adapter(policy: PreTrainedModel) -> None:
    for p in adapters.tensors_of(policy).values():
        p.add_(torch.randn_like(p) * 0.1)


def recipe_of_adapter(fakes: Sequence[FakeVllm], folder: Path, **of_vllm: Any) -> Recipe:
    for fake in fakes:
        fake.state["max_lora_rank"] = 8
    recipe = recipe_for(fakes, **of_vllm)
    recipe.adapter, recipe.output_dir = Adapter(method="lora", sync="adapter"), str(folder)
    return recipe


def assert_has_adapter(fake: FakeVllm, policy: PreTrainedModel) -> None:
    (held,) = fake.adapters.values()
    expected = adapters.file_tensors(policy, adapters.tensors_of(policy))
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())


def test_sends_adapter(fakes: list[FakeVllm], adapted: PreTrainedModel, tmp_path: Path) -> None:
    generator = generator_for(fakes, adapted, recipe=recipe_of_adapter(fakes, tmp_path))
    for step in range(3):
        move_adapter(adapted)
        assert generator.update_weights(adapted, step)["weights/servers"] == 2
        for fake in fakes:
            assert_has_adapter(fake, adapted)
            assert (fake.held, fake.version) == ([{}], f"{generator.run}:{step}")
        assert generated(generator) == expected(step=step)
    for fake in fakes:
        assert {asked["model"] for asked in fake.asked} == {generator.run} == {*fake.adapters}
        loads = [c for c in fake.calls if "load" in c]
        assert loads == [
            "/v1/unload_lora_adapter", "/v1/load_lora_adapter", *["grpo_load_adapter"] * 2
        ]  # fmt: skip
        assert fake.calls.count("/reset_prefix_cache") == 3
    generator.close()
    assert [fake.adapters for fake in fakes] == [{}, {}]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_adapter_rejoins(fakes: list[FakeVllm], adapted: PreTrainedModel, tmp_path: Path) -> None:
    generator = generator_for(fakes, adapted, recipe=recipe_of_adapter(fakes, tmp_path))
    generator.update_weights(adapted, 0)
    fakes[0].end()
    move_adapter(adapted)
    assert generator.update_weights(adapted, 1)["weights/servers"] == 1
    fakes[0].start()
    generator._drop(fakes[1].url, "as if it were gone")  # it still has the adapter's name
    move_adapter(adapted)
    assert generator.update_weights(adapted, 2)["weights/servers"] == 2
    for fake in fakes:
        assert_has_adapter(fake, adapted)
    assert generated(generator) == expected(step=2)
    generator.close()


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [
        (None, r"applies no adapter, and adapter\.sync = adapter needs rank 3; start it "
               r"with max_lora_rank=3, or use adapter\.sync=merge, which sends merged weights\.$"),
        (1, r"applies adapters up to rank 1, and adapter\.sync = adapter needs rank 3"),
    ],
)  # fmt: skip
def test_a_server_without_room_for_the_adapter(
    fakes: list[FakeVllm], adapted: PreTrainedModel, tmp_path: Path, rank: int, sentence: str
) -> None:
    recipe = recipe_of_adapter(fakes, tmp_path)
    fakes[1].state["max_lora_rank"] = rank
    with pytest.raises(UserError, match=rf"^generation\.vllm\.servers: {fakes[1].url} {sentence}"):
        generator_for(fakes, adapted, recipe=recipe)


def test_refused_adapter(fakes: list[FakeVllm], adapted: PreTrainedModel, tmp_path: Path) -> None:
    def refuse() -> None:
        raise Refused(500, "expected target modules in {'qkv_proj'} but received ['gate']")

    fake = fakes[0]
    fake.faults["/v1/load_lora_adapter"] = refuse
    generator = generator_for([fake], adapted, recipe=recipe_of_adapter([fake], tmp_path))
    pattern = r"no server is left\. .*/v1/load_lora_adapter failed: .*\nIf .* adapter.sync=merge"
    with pytest.raises(TrainingError, match=pattern):
        generator.update_weights(adapted, 0)
    generator.close()
