"""A resumed run computes in the modes that its checkpoint's run had come to."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.policy import Policy
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.training import resume
from grpo_cli.training.run import Run
from tests.conftest import as_prompts
from tests.models.families import Family
from tests.models.test_architectures import make
from tests.models.test_policy_logprobs import make_rollouts

PROMPTS = as_prompts([[5, 6, 7], [8, 9]])


def run_of(model: PreTrainedModel, said: list[str]) -> Run:
    """As much of a run as these checks need."""
    policy = object.__new__(Policy)
    policy.logprobs, policy.reference = PolicyLogprobs(model, say=said.append), None
    run = SimpleNamespace(
        policy=policy,
        generator=TransformersGenerator(model, [2], say=said.append),
        workers=SimpleNamespace(device=torch.device("cpu"), first=lambda value: value),
        reporter=SimpleNamespace(say=said.append),
    )
    return cast(Run, run)


def begun() -> tuple[PreTrainedModel, dict[str, dict[str, str]]]:
    """Returns a model, and what a run with it stores after its first step."""
    model, said = make(Family("llama")), list[str]()
    run = run_of(model, said)
    run.policy.logprobs.check(make_rollouts(), 1.0)
    run.generator.generate(PROMPTS, 2, Sampling(max_tokens=3), [0, 1])
    assert said == []
    return model, resume.checks(run)


def test_checks_are_restored_on_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    model, stored = begun()
    said: list[str] = []
    resumed = run_of(model, said)
    resume.restore_checks(resumed, stored)
    passes: list[int] = []
    model.base_model.register_forward_hook(lambda *_: passes.append(1))
    resumed.policy.logprobs.check(make_rollouts(), 1.0)
    assert (passes, said) == ([], [])
    assert resumed.policy.logprobs.mode.packed
    monkeypatch.setattr(TransformersGenerator, "_mismatch", lambda *_, **__: pytest.fail("again"))
    resumed.generator.generate(PROMPTS, 2, Sampling(max_tokens=3), [0, 1])
    assert resume.checks(resumed) == stored


@pytest.mark.parametrize("change", ["threads another -> 1", "device A100 -> H100"])
def test_elsewhere_the_checks_are_made_again(change: str) -> None:
    model, stored = begun()
    said: list[str] = []
    resumed = run_of(model, said)
    if change.startswith("threads"):
        stored["made"]["threads"] = "another"
        change = f"threads another -> {torch.get_num_threads()}"
    else:  # another process's
        resumed.workers.first = lambda value: change  # type: ignore[assignment,method-assign]
    resume.restore_checks(resumed, stored)
    (note,) = said
    assert f"since the checkpoint was written elsewhere ({change})" in note
    assert not resumed.policy.logprobs.checked
    assert resumed.generator.checks() == {}
