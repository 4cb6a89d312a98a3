"""Compiled decoder layers compute what the plain ones do, packed and padded, only in the update.

The backends stand in for inductor, which takes a C++ compiler and half a minute.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from grpo_cli.distributed import fsdp
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.models import policy
from grpo_cli.models.activation_bytes import bytes_per_token
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from tests.conftest import as_prompts
from tests.generation.embedded.test_generator import SEEDS, Sampling
from tests.sharded import gradients, make_rollouts, weighted
from tests.training.test_train import test_stop_and_resume_is_the_same_run as stop_and_resume
from tests.training.test_train import trained

pytestmark = pytest.mark.runs

FIRST = "each prompt once for its completions, logits in chunks, layers compiled"
calls: list[int] = []  # inputs of each compiled graph that was run


def counting(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    def run(*inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph.forward(*inputs)

    return run


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "COMPILE_BACKEND", "eager")
    torch.compiler.reset()
    calls.clear()


def notes_of(
    model: PreTrainedModel, backend: Any, **modes: bool
) -> tuple[PolicyLogprobs, list[str]]:
    notes: list[str] = []
    compiled = PolicyLogprobs(model, compile_backend=backend, say=notes.append, **modes)
    compiled.check(make_rollouts(), 1.0)
    return compiled, notes


@pytest.mark.parametrize(
    ("packed", "checkpointing", "backend"),
    [(True, True, "aot_eager"), (True, False, "eager"), (False, False, "eager")],
)
def test_compiled_layers_match_plain_ones(
    model: PreTrainedModel, packed: bool, checkpointing: bool, backend: str
) -> None:
    plain = PolicyLogprobs(copy.deepcopy(model), packed=packed)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    names = list(model.state_dict())
    compiled, notes = notes_of(model, backend, packed=packed)
    assert not notes
    assert compiled.mode.compiled
    shown = str(compiled.mode)
    assert shown == (FIRST if packed else "rows padded, logits in chunks, layers compiled")
    plain.check(make_rollouts(), 1.0)
    for number in (8, 3, 12):
        rollouts = make_rollouts(number)
        found = [p(rollouts, 1.0)[0] for p in (compiled, plain)]
        assert (found[0] - found[1]).abs().max() < 1e-5
        for policy_logprobs, logprobs in zip((compiled, plain), found, strict=True):
            policy_logprobs.model.zero_grad()
            weighted(rollouts, logprobs).backward()
        expected = gradients(plain.model)
        for name, gradient in gradients(model).items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm()
    assert bytes_per_token(compiled, make_rollouts(), 1.0) > 0
    assert list(model.state_dict()) == names, "checkpoints keep the names of weights"


def test_only_the_update_is_compiled(model: PreTrainedModel) -> None:
    compiled, notes = notes_of(model, counting)
    assert not notes
    before = len(calls)
    assert before > 0
    generator = TransformersGenerator(model, [], 100)
    generator.generate(as_prompts([[5, 6, 7]]), 2, Sampling(max_tokens=4), SEEDS[:1])
    assert len(calls) == before, "the engine decodes with plain layers"
    compiled(make_rollouts(), 1.0)
    assert len(calls) > before


def test_failing_backend_falls_back(model: PreTrainedModel) -> None:
    def broken(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise RuntimeError("no C++ compiler\nis installed")

    compiled, notes = notes_of(model, broken)
    assert not compiled.mode.compiled
    assert compiled.mode.packed
    (note,) = notes
    assert f"note: {FIRST} is off (torch.compile fails: no C++ compiler)" in note
    compiled(make_rollouts(), 1.0)
    assert not any("forward" in vars(layer) for layer in fsdp.layers(model))


def test_a_resumed_run_is_the_same_and_that_of_plain_layers(tmp_path: Path) -> None:
    # The reference is compiled too.
    stop_and_resume(tmp_path, {"model__compile": True, "loss__beta": 0.05})
    plain = trained(tmp_path, output_dir=str(tmp_path / "plain"), loss__beta=0.05)
    one, other = (
        load_file(tmp_path / run / "checkpoints" / "step-4" / "model.safetensors")
        for run in ("plain", "straight")
    )
    assert one.keys() == other.keys()
    assert all((one[name] - other[name]).abs().max() < 1e-5 for name in one)
    assert not plain.policy.logprobs.mode.compiled
