"""Captured steps on static buffers sample what the engine samples step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from grpo_cli.generation.base import Request
from grpo_cli.generation.embedded import static_decoding
from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.engine import Engine
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.embedded.graphs import FallbackGraphs
from grpo_cli.generation.sampling import Sampling, pick
from grpo_cli.records import Completion, Prompt
from tests.generation.embedded.test_direct_forward import CONFIGS, model_of

PROMPTS = [Prompt.from_ids([5 + n, 6, 7, *range(8, 8 + n)]) for n in range(5)]
LONG = Sampling(max_tokens=24)
aten = torch.ops.aten
# Operations by which the host learns a value, or hands one over.
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.lift_fresh, aten.masked_select, aten.equal}
BY_MASK = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the arguments that an operation writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += tensors_in(given)
    return found


class Recorder(TorchDispatchMode):
    """Keeps the operations that are called inside, and what tensors held before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: set[int] = set()  # storages that the function has allocated
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        given = tensors_in((args, kwargs))
        by_mask = packet in BY_MASK and any(t.dtype == torch.bool for t in tensors_in(args[1]))
        if packet in WAITING or by_mask:
            raise RuntimeError(f"{func} waits for the device, or hands it a value of the host")
        for tensor in written(func, args, kwargs):
            storage = tensor.untyped_storage().data_ptr()
            if storage not in self.made and storage not in self.before:
                whole = tensor.as_strided(
                    (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0
                )
                self.before[storage] = whole, whole.clone()
        out = func(*args, **kwargs)
        outs = tensors_in(out)
        known = {t.untyped_storage().data_ptr() for t in given}
        new = [t for t in outs if t.untyped_storage().data_ptr() not in known]
        self.made |= {t.untyped_storage().data_ptr() for t in new}
        self.calls.append((func, args, kwargs, outs))
        return out


class RecordingGraphs:
    """Stands in for CUDA graphs: keeps a function's operations and runs them again by themselves.

    As with a CUDA graph, capturing changes nothing, a replay calls no Python of the function, and
    every tensor and number is the one of the capture: a function that replaces a buffer, or reads
    something in Python that changes, gives other results. What waits for the device is refused.
    """

    def __init__(self) -> None:
        self.captures: list[Any] = []
        self.replays = 0

    def capture(self, key: Hashable, function: Callable[[], None]) -> Callable[[], object]:
        recorder = Recorder()
        with recorder:
            function()
        for tensor, before in recorder.before.values():
            tensor.copy_(before)
        self.captures.append(key)

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, outs in recorder.calls:
                again = tensors_in(func(*args, **kwargs))
                for out, value in zip(outs, again, strict=True):
                    if out.data_ptr() != value.data_ptr():  # neither in place nor a view
                        out.copy_(value)

        return replay


class EagerGraphs:
    def capture(self, key: object, function: Callable[[], None]) -> Callable[[], None]:
        return function


def sample(
    model: PreTrainedModel, graphs: Any, sampling: Sampling = LONG, rows: int = 15, eos: int = 4
) -> list[Completion]:
    """Samples three completions of each of PROMPTS."""
    fallback = None if graphs is None else FallbackGraphs(graphs, pytest.fail)
    return decoded(Engine(model, rows, graphs=fallback), sampling, eos)


def decoded(engine: Engine, sampling: Sampling = LONG, eos: int = 4) -> list[Completion]:
    request = Request(PROMPTS, 3, sampling, [*range(len(PROMPTS))])
    finished = engine.decode([DecodingState(request, [eos], None)])
    found = {done.number: done.completions for some in finished for done in some}
    return [completion for n in range(len(PROMPTS)) for completion in found[n]]


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for mine, right in zip(found, expected, strict=True):
        assert (mine.ids, mine.finish_reason) == (right.ids, right.finish_reason)
        logprobs = (torch.tensor(c.sampling_logprobs) for c in (mine, right))
        torch.testing.assert_close(*logprobs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("worth", "how"),
    [
        (2**20, {"top_p": 0.9, "temperature": 0.7}),
        (-1, {"top_k": 9, "min_p": 0.02, "logit_bias": ((4, 4.0),), "never": (11,)}),
        (-1, {"temperature": 0.0}),
    ],
    ids=["top_p", "others", "greedy"],
)
def test_replays_match_steps(
    monkeypatch: pytest.MonkeyPatch, worth: int, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(static_decoding, "WORTH", worth)
    model, graphs = model_of(CONFIGS["qwen3"]), RecordingGraphs()
    sampling = replace(LONG, **how)
    expected = sample(model, None, sampling)
    found = sample(model, graphs, sampling)
    assert_same(found, expected)
    assert found == sample(model, EagerGraphs(), sampling)
    if sampling.temperature:
        lengths = {len(c.ids) for c in expected}
        assert len(lengths) > 3, "rows end at several steps"
    assert graphs.replays > 2 * len(graphs.captures)
    assert len({*graphs.captures}) == len(graphs.captures), "one for each bucket"


def test_under_autocast() -> None:
    model, graphs = model_of(CONFIGS["qwen2"]), RecordingGraphs()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = sample(model, graphs), sample(model, None)
    assert graphs.captures
    # Rounded to 8 bits, some tokens differ, after which all do.
    same = [a.ids == b.ids for a, b in zip(found, expected, strict=True)]
    assert sum(same) > len(same) / 2


@pytest.mark.parametrize("worth", [2**20, -1], ids=["copied", "shared"])
def test_prompts_take_the_place_of_finished_rows(
    monkeypatch: pytest.MonkeyPatch, worth: int
) -> None:
    monkeypatch.setattr(static_decoding, "WORTH", worth)
    model, graphs = model_of(CONFIGS["llama"]), RecordingGraphs()
    assert_same(sample(model, graphs, rows=6), sample(model, None, rows=6))
    assert len(graphs.captures) > 1, "and rows move"


def test_top_p_of_a_large_vocabulary_does_not_wait_for_the_device() -> None:
    scores = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    sampling, uniforms = Sampling(1, top_p=0.97), torch.tensor([0.1, 0.5, 0.9])
    found = torch.zeros(2, 3)

    def draw() -> None:
        found.copy_(torch.stack(pick(scores, sampling, uniforms, at_once=True)))

    RecordingGraphs().capture("key", draw)()
    assert torch.equal(found, torch.stack(pick(scores, sampling, uniforms)))


class Failing:
    """Fails as the driver does when something cannot be captured."""

    def capture(self, key: object, function: object) -> Any:
        raise RuntimeError("CUDA error: operation not permitted\nCUDA kernel errors might be")


def test_failed_capture_falls_back() -> None:
    model, notes = model_of(CONFIGS["llama"]), list[str]()
    failing: Any = Failing()
    graphs = FallbackGraphs(failing, notes.append)
    for _ in range(2):
        assert_same(decoded(Engine(model, 15, graphs=graphs)), sample(model, None))
    (note,) = notes
    assert note.endswith("without CUDA graphs (CUDA error: operation not permitted)")


@pytest.mark.parametrize("rule", [{"repetition_penalty": 1.2}, {"min_tokens": 3}])
def test_penalties_are_not_captured(rule: dict[str, Any]) -> None:
    model, graphs = model_of(CONFIGS["llama"]), RecordingGraphs()
    sampling = replace(LONG, **rule)
    assert sample(model, graphs, sampling) == sample(model, None, sampling)
    assert not graphs.captures


def generator_of(model: PreTrainedModel, notes: list[str]) -> TransformersGenerator:
    """Returns a generator that has checked captured steps, as on a GPU with the first prompts."""
    generator = TransformersGenerator(model, [4], say=notes.append)
    recording: Any = RecordingGraphs()
    generator.check_graphs(FallbackGraphs(recording, notes.append), PROMPTS)
    return generator


def test_generator_uses_checked_graphs() -> None:
    notes = list[str]()
    generator = generator_of(model_of(CONFIGS["llama"]), notes)
    found = generator.generate(PROMPTS, 3, LONG, [*range(len(PROMPTS))])
    graphs = generator.graphs
    assert graphs is not None
    assert isinstance(graphs.graphs, RecordingGraphs)
    assert graphs.graphs.captures[0][1] == 4, "the check's rows"
    assert graphs.graphs.captures[1][1] == 16, "those that are asked for"
    assert_same([c for group in found for c in group], sample(generator.policy, None))
    assert not notes


def test_generator_rejects_wrong_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(t: Tensor, *ends: Any, **how: Any) -> tuple[Tensor, Tensor]:
        token, logprob = pick(t, *ends, **how)
        return token, logprob + 0.1

    monkeypatch.setattr(static_decoding, "pick", shifted)
    notes = list[str]()
    generator = generator_of(model_of(CONFIGS["llama"]), notes)
    generator.generate(PROMPTS, 1, LONG, [*range(len(PROMPTS))])
    assert generator.checks() == {"decoder": "engine", "graphs": "off"}
    resumed = TransformersGenerator(generator.policy, [4])
    resumed.restore_checks(generator.checks())
    assert resumed.graphs is not None
    assert resumed.graphs.has_failed
    assert len(notes) == 1
    assert "without CUDA graphs (log-probabilities differ" in notes[0]
