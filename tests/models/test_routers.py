"""The routers' outputs are read in every mode, and the load-balancing loss is transformers' own."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from grpo_cli.algorithm.load_balancing import ExpertLoad
from grpo_cli.checkpoints import paths
from grpo_cli.errors import UserError
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.routers import RouterRecorder, balancing_coefficient, experts_per_token
from grpo_cli.training.run import Run
from tests.models.families import BY_NAME, FAMILIES
from tests.models.test_architectures import flat_gradient, make, make_rollouts, two_steps
from tests.training.test_train import metrics, weights

BALANCED = [str(f) for f in FAMILIES if f.balanced]
OTHERS = ["llama", "glm4_moe", "deepseek_v3", "nemotron_h", "lfm2_moe", "kimi_linear"]


@pytest.mark.parametrize("name", BALANCED)
def test_balancing_loss_matches_transformers(name: str) -> None:
    model, rollouts = make(BY_NAME[name]), [replace(r, reward=1.0) for r in make_rollouts()]
    found = []
    for r in rollouts:
        ids = torch.tensor([r.prompt.ids + r.completion.ids])
        gates = model(ids, output_router_logits=True).router_logits
        predicting = slice(len(r.prompt.ids) - 1, ids.shape[1] - 1)
        found.append([g.reshape(ids.shape[1], -1)[predicting] for g in gates])
    rollouts[2] = replace(rollouts[2], excluded=True)  # it does not train
    del found[2]
    gates = tuple(map(torch.cat, zip(*found, strict=True)))
    k = experts_per_token(model)
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    expected = function(gates, gates[0].shape[-1], k)
    gradient = flat_gradient(model, expected)
    assert gradient.abs().max() > 1e-3, "something to balance"
    policy_logprobs = PolicyLogprobs(model, say=str)
    policy_logprobs.routers = RouterRecorder(model)
    policy_logprobs.check(rollouts, 1.0)
    for split in ([rollouts], [rollouts[:4], rollouts[4:5], rollouts[5:]]):
        routings: list[Any] = []
        for part in split:
            policy_logprobs(part, 1.0)
            routings.append(policy_logprobs.routing)
        assigned = sum(routing.assigned for routing in routings).tolist()
        load = ExpertLoad(assigned, float(sum(routing.tokens for routing in routings)))
        loss = sum(load.loss(routing) for routing in routings)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        mine = flat_gradient(model, loss)
        assert mine.shape == gradient.shape
        assert (mine - gradient).abs().max() < 1e-3 * gradient.abs().max()


def test_gradient_checkpointing_records_each_layer_once() -> None:
    model = make(BY_NAME["qwen3_moe"]).train()
    rollouts = [replace(r, reward=1.0) for r in make_rollouts()]
    policy_logprobs = PolicyLogprobs(model, say=str)
    policy_logprobs.routers = RouterRecorder(model)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy_logprobs(rollouts, 1.0)
        routing = policy_logprobs.routing
        load = ExpertLoad(routing.assigned.tolist(), routing.tokens.item())
        gradients.append(flat_gradient(model, load.loss(routing)))
    torch.testing.assert_close(*gradients)


def test_the_weight_is_the_models_own_by_default() -> None:
    model = make(BY_NAME["qwen3_moe"])
    model.config.router_aux_loss_coef = 0.02
    assert balancing_coefficient(model, None) == 0.02
    assert balancing_coefficient(model, 0.5) == 0.5
    assert balancing_coefficient(model, 0.0) == 0


@pytest.mark.parametrize("name", OTHERS)
def test_balancing_weight_without_experts_is_refused(name: str) -> None:
    model = make(BY_NAME[name])
    assert balancing_coefficient(model, None) == 0
    assert balancing_coefficient(model, 0.0) == 0
    why = "has no experts" if name == "llama" else "balances its experts otherwise"
    with pytest.raises(UserError, match=rf"loss.router_aux_loss_coef = 0.1: a {name} model {why}"):
        balancing_coefficient(model, 0.1)


def balanced_run(tokenizer: PreTrainedTokenizerFast, folder: Path, **changes: Any) -> Run:
    """A run of two steps, whose model's own config asks for balanced experts."""
    model = make(BY_NAME["qwen3_moe"], len(tokenizer))
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.25
    return two_steps(model, tokenizer, folder, **changes)


@pytest.mark.runs
def test_a_run_balances_by_its_models_config_and_resumes(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = balanced_run(tokenizer, tmp_path)
    printed = capsys.readouterr().out.replace("note: the tokenizer has a chat template", "")
    assert "note" not in printed, "neither engine nor packing is lost"
    for line in metrics(straight):
        assert line["aux_loss"] > 1.9
        assert line["loss"] == pytest.approx(line["policy_loss"] + 0.25 * line["aux_loss"])
    first = paths.checkpoint_path(straight.folder, 1)
    resumed = balanced_run(tokenizer, tmp_path, resume=str(first))
    assert torch.equal(weights(resumed), weights(straight))
