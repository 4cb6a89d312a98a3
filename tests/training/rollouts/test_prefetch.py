"""Completions begun ahead: handed over once, as old as they may be, kept by a checkpoint.

The runs are whole ones. Their servers are fakes that sample with the weights they were sent.
"""

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli import cli
from grpo_cli.checkpoints import paths
from grpo_cli.checkpoints.checkpointer import load_state
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.policy_logprobs import PolicyLogprobs, inference
from grpo_cli.records import Completion, Group, Prompt, Rollout
from grpo_cli.reporting.rollout_metrics import staleness_metrics
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.training import loop, resume, run
from grpo_cli.training.rollouts import queue
from grpo_cli.training.rollouts.collect import collect, with_samplers_logprobs
from grpo_cli.training.rollouts.queue import PrefetchedGroups
from grpo_cli.training.step import Step
from tests.conftest import as_prompts, make_group, make_rollout
from tests.fake_vllm import Drawn, FakeVllm, Process, serving
from tests.training.test_train import built, metrics, timeless, weights


def groups_at(*positions: int) -> list[Group]:
    return [make_group(p, [make_rollout((p,)), make_rollout((p,))]) for p in positions]


def test_groups_are_handed_over_while_sampling() -> None:
    first, second = groups_at(3, 4)
    taken, go_on = threading.Event(), threading.Event()

    def sample() -> Iterator[Group]:
        yield first
        assert taken.wait(30), "nobody waits for the second"
        yield second
        assert go_on.wait(30)

    batch = PrefetchedGroups(nullcontext(sample()))
    assert not batch.is_done
    groups = batch.take()
    assert next(groups) == first
    taken.set()
    assert next(groups) == second
    go_on.set()
    assert list(groups) == []
    assert batch.is_done
    assert batch.groups() == [first, second], "still there, for a checkpoint"
    assert batch.seconds > 0


def test_sampling_error_is_raised_by_take() -> None:
    error = TrainingError("no server is left", alone=True)
    (group,) = groups_at(3)

    def sample() -> Iterator[Group]:
        yield group
        raise error

    batch = PrefetchedGroups(nullcontext(sample()))
    groups = batch.take()
    assert next(groups) == group
    with pytest.raises(type(error)) as caught:
        next(groups)
    assert caught.value is error
    with pytest.raises(type(error)):
        batch.groups()


def test_interrupt_while_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "POLL_SECONDS", 0.01)
    beats, go_on = 0, threading.Event()

    def leave() -> bool:
        nonlocal beats
        beats += 1
        return beats > 5

    def sample() -> Iterator[Group]:
        assert go_on.wait(30)
        heartbeat.beat_of_main()  # says nothing: it is another thread's
        yield from ()

    batch = PrefetchedGroups(nullcontext(sample()))
    monkeypatch.setattr(heartbeat, "leave", leave)
    for wait in (lambda: list(batch.take()), batch.groups, batch.has_failed):
        beats = 0
        with pytest.raises(heartbeat.WorkInterrupted):
            wait()
        assert beats == 6
    monkeypatch.setattr(heartbeat, "leave", None)
    go_on.set()
    assert list(batch.take()) == []


def aged(*sampled_at: int | None) -> list[Rollout]:
    return [
        Rollout(Prompt(0, [1], "", {}), Completion([5], [-0.5], "stop", step), "")
        for step in sampled_at
    ]


@pytest.mark.parametrize(
    ("rollouts", "mean", "most"),
    [
        (aged(7, 7, 5, 6), 3 / 4, 2),
        (aged(7, None, 4), 3 / 2, 3),  # of an engine that does not say
        ([], 0, 0),
    ],
    ids=["all", "some", "nothing"],
)
def test_staleness_metrics(rollouts: list[Rollout], mean: float, most: float) -> None:
    found = staleness_metrics(rollouts, 7, 1.0, math.nan, Process())
    assert found == {"staleness/mean": pytest.approx(mean), "staleness/max": most}


@pytest.mark.parametrize(("waited", "gained"), [(1.0, 2.0), (4.0, 0.0)])
def test_overlap_metrics(waited: float, gained: float) -> None:
    found = staleness_metrics(aged(7), 7, waited, 3.0, Process())
    assert (found["overlap/sampled"], found["overlap/gained"]) == (3.0, gained)


@pytest.mark.parametrize(("sampled_at", "kept"), [(6, True), (7, False), (None, False)])
def test_old_logprobs_of_an_earlier_policy(sampled_at: int | None, kept: bool) -> None:
    (rollout,) = (with_samplers_logprobs(r, 7) for r in aged(sampled_at))
    assert (rollout.old_logprobs is not None) == kept
    if rollout.old_logprobs is not None:
        assert rollout.old_logprobs.tolist() == [-0.5]


class SamplingVllm(FakeVllm):
    """Draws and scores with the weights that it was sent."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.config.get_text_config().to_dict())
        self.model, self.lock = copy.deepcopy(model), threading.Lock()
        self.sampler: TransformersGenerator | None = None
        self.complete, self.score = self.draw, self.say

    def load(self) -> PreTrainedModel:
        self.model.load_state_dict(self.held[0], strict=False)  # without the tied head
        return self.model

    def draw(self, ids: list[int], params: dict[str, Any]) -> Drawn:
        with self.lock:
            self.load()
            self.sampler = self.sampler or TransformersGenerator(
                self.model, params["stop_token_ids"], say=lambda text: None
            )
            sampling = Sampling(params["max_tokens"], params["temperature"])
            (group,) = self.sampler.generate(
                as_prompts([ids]), params["n"], sampling, [params["seed"]]
            )
        return [(c.ids, c.sampling_logprobs, c.finish_reason) for c in group]

    def say(self, ids: list[int]) -> list[float]:
        whole = Rollout(Prompt(0, ids[:1], "", {}), Completion(ids[1:], [], "stop"), "")
        with self.lock, inference(self.load()):
            logprobs, _ = PolicyLogprobs(self.model, packed=False, chunked=False)([whole], 1.0)
        return logprobs[0].tolist()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """What runs begin with."""
    live = built(tmp_path_factory.mktemp("first"))
    live.close()
    return live.policy.model


@pytest.fixture
def fakes(policy: PreTrainedModel) -> Iterator[list[FakeVllm]]:
    servers: list[FakeVllm] = [SamplingVllm(policy), SamplingVllm(policy)]
    with serving(*servers):
        yield servers


def serve(fakes: list[FakeVllm], **of_vllm: Any) -> dict[str, Any]:
    """Changes of the recipe for a run with these servers."""
    known = {"servers": [fake.url for fake in fakes], "transfer": "gloo"}
    changes: dict[str, Any] = {f"generation__vllm__{k}": v for k, v in (known | of_vllm).items()}
    return changes | {"generation__engine": "vllm_server", "optimizer__learning_rate": 5e-3}


Drawing = list[tuple[int, list[list[int]], list[int | None]]]


def trained(
    folder: Path, stop_after: int | None = None, **changes: Any
) -> tuple[run.Run, list[Drawing]]:
    """The run, and for each step the (position, tokens, ages) that it has trained on.

    What is begun ahead is waited for before each update, so that it is as old as it can be.
    """
    live = built(folder, **changes)
    update, write = live.generator.update_weights, live.reporter.step
    take_step = loop.take_step
    steps: list[Drawing] = []

    def update_later(policy: PreTrainedModel, step: int) -> dict[str, float]:
        for batch in live.queue.prefetched:
            batch.groups()
        return update(policy, step)

    def note(live: run.Run, step: Step) -> None:
        take_step(live, step)
        groups = step.batch.groups if step.batch else []
        steps.append(
            [
                (
                    g.prompt_index,
                    [r.completion.ids for r in g.rollouts],
                    [r.completion.sampled_at for r in g.rollouts],
                )
                for g in sorted(groups, key=lambda g: g.prompt_index)
            ]
        )

    def stop(step: int, found: dict[str, float]) -> None:
        write(step, found)
        live.interrupts.stop.signal = 15 if step == stop_after else None

    live.generator.update_weights = update_later  # type: ignore[method-assign]
    live.reporter.step = stop  # type: ignore[method-assign]
    loop.take_step = note
    try:
        loop.train(live)
    finally:
        loop.take_step = take_step
        live.close()
    return live, steps


@pytest.mark.runs
def test_servers_match_the_embedded_engine(tmp_path: Path, fakes: list[FakeVllm]) -> None:
    served, drawn = trained(tmp_path / "served", steps=2, **serve(fakes))
    plain, expected = trained(tmp_path / "plain", steps=2, optimizer__learning_rate=5e-3)
    assert [[d[:2] for d in step] for step in drawn] == [[d[:2] for d in s] for s in expected]
    torch.testing.assert_close(weights(served), weights(plain), rtol=0, atol=1e-4)
    for here, there in zip(metrics(served), metrics(plain), strict=True):
        assert here["reward"] == there["reward"]
        assert here["sampling/sampling_logp_difference/max"] < 1e-4
        assert here["sampling/kl"] < 1e-6
        assert here["weights/servers"] == 2
        assert here["weights/check_difference"] < 1e-4
        assert not {"staleness/max", "staleness/logp_difference"} & here.keys()
    assert [a for step in drawn for d in step for a in d[2]] == [0] * 24 + [1] * 24


@pytest.mark.runs
def test_completions_are_as_old_as_the_recipe_allows(tmp_path: Path, fakes: list[FakeVllm]) -> None:
    ages = [0, 1, 2, 2]
    live, drawn = trained(tmp_path, dataset__eval=None, **serve(fakes, prefetch_steps=2))
    found = metrics(live)
    assert [m["staleness/max"] for m in found] == [m["staleness/mean"] for m in found] == ages
    assert [[d[0] for d in step] for step in drawn] == [
        list(range(6 * n, 6 * n + 6)) for n in range(4)
    ]
    for step, (groups, age) in enumerate(zip(drawn, ages, strict=True)):
        assert {a for d in groups for a in d[2]} == {step - age}
    assert live.queue.position == 24, "nothing is begun that no step takes"
    assert len(live.queue.prefetched) == 0
    for m, age in zip(found, ages, strict=True):
        assert m["epoch"] == pytest.approx(6 * m["step"] / 25), "of what was trained on"
        assert ("overlap/gained" in m) == (m["step"] > 1)
        if age:  # the sampler's are the old ones, and the policy has moved on
            assert m["sampling/sampling_logp_difference/max"] == 0
            assert m["staleness/logp_difference"] > 1e-3
        else:
            assert m["staleness/logp_difference"] < 1e-4


@pytest.mark.runs
def test_stop_and_resume_is_the_same_run(tmp_path: Path, fakes: list[FakeVllm]) -> None:
    changes = {"dataset__eval": None, **serve(fakes, prefetch_steps=2)}
    straight, expected = trained(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    halted, first = trained(tmp_path, stop_after=2, output_dir=str(tmp_path / "halted"), **changes)
    assert len(halted.queue.prefetched) == 2
    resumed, rest = trained(tmp_path, output_dir=str(tmp_path / "halted"), resume="auto", **changes)
    assert first + rest == expected
    assert {a for d in rest[0] for a in d[2]} == {0}, "of the policy before the stop"
    assert torch.equal(weights(resumed), weights(straight))
    assert timeless(resumed) == timeless(straight)


@pytest.mark.runs
def test_stopped_run_does_not_wait(tmp_path: Path, fakes: list[FakeVllm]) -> None:
    """Of steps 2 and 3, the first is done; the other is sampled anew, from the same place."""
    changes = {"steps": 4, "dataset__eval": None, **serve(fakes, prefetch_steps=2)}
    live = built(tmp_path, **changes)
    go_on = threading.Event()

    def unfinished() -> Iterator[Group]:
        go_on.wait(60)
        yield from ()

    begun = live.queue.sample(6), live.queue.sample(6)
    live.queue.prefetched += [
        PrefetchedGroups(begun[0]),
        PrefetchedGroups(nullcontext(unfinished())),
    ]
    first = live.queue.prefetched[0].groups()
    resume.save(live, wait=False)
    assert live.queue.position == 12, "as long as it goes on itself"
    assert live.queue.epoch == 0
    go_on.set()
    live.close()
    resumed = built(tmp_path, resume="auto", **changes)
    assert resumed.queue.position == 6
    assert [g.prompt_index for g in first] == list(range(6))
    (kept,) = resumed.queue.prefetched
    assert [[r.completion for r in g.rollouts] for g in kept.groups()] == [
        [r.completion for r in g.rollouts] for g in first
    ]
    assert [p for p, _ in resumed.queue.take_prompts(6)] == list(range(6, 12))
    resumed.close()


@pytest.mark.runs
def test_failed_batch_does_not_fail_the_checkpoint(tmp_path: Path, fakes: list[FakeVllm]) -> None:
    live = built(tmp_path, dataset__eval=None, **serve(fakes, prefetch_steps=2))

    def fails() -> Iterator[Group]:
        raise TrainingError("no server is left")
        yield

    first, _ = live.queue.sample(6), live.queue.take_prompts(6)
    live.queue.prefetched += map(PrefetchedGroups, (first, nullcontext(fails())))
    resume.save(live)
    assert live.checkpointer.wait() is None
    live.close()
    saved = load_state(paths.checkpoint_path(live.folder, 0))
    assert [list(map(len, parts)) for parts in saved["ahead"]] == [[6]]
    assert saved["run"]["position"] == 6


@pytest.fixture(scope="module")
def halted(
    policy: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, FakeVllm]:
    """A run that was stopped after its first step, with those of two more steps begun."""
    folder, fake = tmp_path_factory.mktemp("halted"), SamplingVllm(policy)
    changes = serve([fake], prefetch_steps=2)
    trained(folder, stop_after=1, dataset__eval=None, **changes)
    return folder, fake


def going_on(halted: tuple[Path, FakeVllm], **changes: Any) -> run.Run:
    folder, fake = halted
    known = serve([fake], prefetch_steps=2)
    live = built(folder, resume="auto", dataset__eval=None, **(known | changes))
    live.close()
    return live


@pytest.fixture(scope="module")
def resumed(halted: tuple[Path, FakeVllm]) -> run.Run:
    """A run whose prefetched groups a test replaces."""
    return going_on(halted)


Parts = list[list[dict[str, Any]]]


def begun(live: run.Run) -> list[Parts]:
    """As its checkpoint has it: of each batch what each process had."""
    return load_state(paths.checkpoint_path(live.folder, 1))["ahead"]


def test_changed_recipe(halted: tuple[Path, FakeVllm], capsys: pytest.CaptureFixture[str]) -> None:
    live = going_on(halted, generation__temperature=0.9)
    assert list(live.queue.prefetched) == []
    assert live.queue.position == 6
    said = " ".join(capsys.readouterr().out.split())
    assert "prefetched completions are of another recipe: sampled again" in said


def test_unrelated_changes_keep_completions(halted: tuple[Path, FakeVllm]) -> None:
    live = going_on(halted, generation__max_num_seqs=4, reward={"length": {}})
    assert [len(b.groups()) for b in live.queue.prefetched] == [6, 6]
    assert live.queue.position == 18


def test_resumed_without_prefetching(
    halted: tuple[Path, FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"generation__vllm__prefetch_steps": 0, "generation__dynamic_sampling": True}
    live = going_on(
        halted, reward={"longest": {"function": "tests.training.test_train:is_longest"}}, **changes
    )
    monkeypatch.setattr(live.queue, "sample", lambda *_: nullcontext(iter(())))
    found = collect(live, Clock(torch.device("cpu")))
    assert found.metrics["dynamic_sampling/attempts"] == 10, "prefetched groups are taken once"
    old = [r.old_logprobs for g in found.groups for r in g.rollouts]
    assert old
    assert None not in old, "the policy has moved on since"


def one_of(rank: int, size: int, there: float) -> Any:
    """A process of several that have so many groups together."""
    return SimpleNamespace(rank=rank, size=size, sum=lambda values: {"groups": there})


@pytest.mark.parametrize(
    ("had", "expected"),
    [
        ([6], [[6, 8, 10], [7, 9, 11]]),  # one process then: they take turns
        ([2, 4], [[6, 7], [8, 9, 10, 11]]),  # as many as now: each has its own again
    ],
    ids=str,
)
def test_prefetched_groups_are_divided(
    resumed: run.Run, had: list[int], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = resumed
    saved = [split(parts[0], had) for parts in begun(live)]
    if len(had) != 2:
        saved = [parts[::-1] for parts in saved]  # turns are taken in the order of positions
    for rank in (0, 1):
        live.queue.prefetched.clear()
        monkeypatch.setattr(live, "workers", one_of(rank, 2, 6.0))
        resume._restore_prefetched(live, saved)
        found = [[g.prompt_index for g in b.groups()] for b in live.queue.prefetched]
        assert found == [expected[rank], [p + 6 for p in expected[rank]]]


def split(entries: list[dict[str, Any]], numbers: list[int]) -> Parts:
    left = iter(entries)
    return [[next(left) for _ in range(number)] for number in numbers]


def test_complete_batches_are_kept(resumed: run.Run) -> None:
    live = resumed
    saved = begun(live)
    saved[1][0][3]["prompt_ids"] = [1, 2, 3]  # its row is another one now
    live.queue.prefetched.clear()
    resume._restore_prefetched(live, saved)
    assert [[g.prompt_index for g in b.groups()] for b in live.queue.prefetched] == [
        list(range(6, 12))
    ]
    assert live.queue.position == 12


@pytest.mark.runs
def test_prefetched_step_is_replayed(tmp_path: Path, fakes: list[FakeVllm]) -> None:
    live, _ = trained(
        tmp_path, log__keep_steps=[3], loss__beta=0.05, **serve(fakes, prefetch_steps=1)
    )
    for fake in fakes:
        fake.end()
    assert metrics(live)[2]["staleness/max"] == 1
    assert cli.run_command(["replay", str(live.folder), "--step=3"]) == 0
