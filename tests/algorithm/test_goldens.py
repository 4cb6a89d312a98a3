"""TRL 1.16.0's policy loss on random inputs, in float64: the same loss and gradient to 1e-6.

tests/goldens/policy_loss.json holds the cases; GRPO_GOLDENS names another file of the same form.
Each case goes through what training goes through: the loss's own YAML, `token_weight`, `grpo_loss`.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from grpo_cli.algorithm.batch import Batch, token_weight
from grpo_cli.algorithm.loss import AdaptiveEntropyBonus, Coefficients, grpo_loss
from grpo_cli.algorithm.settings import Loss
from grpo_cli.algorithm.token_selection import entropy_threshold
from grpo_cli.algorithm.variants import POLICY, own_arguments
from tests.conftest import ALONE, make_loss
from tests.programs import ROOT

FILE = Path(os.environ.get("GRPO_GOLDENS") or ROOT / "tests" / "goldens" / "policy_loss.json")
GOLDENS = json.loads(FILE.read_text("utf-8"))
LONGEST = 16  # TRL's max_completion_length in these cases

# TRL's names of our knobs that have another one; epsilon is set apart, since our YAMLs hold the
# papers' values.
KNOBS = {
    "importance_sampling_level": "ratio_level",
    "top_entropy_quantile": "top_entropy",
    "off_policy_mask_threshold": "off_policy_mask",
    "use_bias_correction_kl": "kl_bias_correction",
}
OTHERS = {"loss_type", "on_policy", "epsilon", "epsilon_high", "max_completion_length"}
OURS = {f.name for f in dataclasses.fields(Loss)}
OURS |= {name for loss in POLICY.values() for name in own_arguments(loss, Loss())}


def config_of(settings: dict[str, Any]) -> Loss:
    """Our settings for TRL's."""
    given = {KNOBS.get(key, key): value for key, value in settings.items() if key not in OTHERS}
    unknown = given.keys() - OURS
    assert not unknown, f"the case sets {unknown}, which this test does not know"
    path = ROOT / "recipes" / "loss" / f"{settings['loss_type']}.yaml"
    ours = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    del ours["defaults"]
    ours |= {"beta": 0.0, "ratio_level": "token"}  # TRL's defaults, where a YAML has the paper's
    epsilon = settings.get("epsilon", 0.2)
    ours |= {"epsilon": epsilon, "epsilon_high": settings.get("epsilon_high", epsilon)}
    ours["ratio_cap"] = ours["epsilon_high"]  # which TRL calls epsilon_high for cispo
    return make_loss(**(ours | given))


def weights_of(config: Loss, mask: Tensor, longest: int) -> Tensor:
    """[B, C]; one process and one micro-batch, each row a group of its own."""
    lengths = [int(n) for n in mask.sum(-1).tolist()]
    counts = {"tokens": sum(lengths), "completions": len(lengths), "prompts": len(lengths)}
    weights = [token_weight(config.normalize, n, n, counts, longest) if n else 0.0 for n in lengths]
    return mask * torch.tensor(weights, dtype=mask.dtype)[:, None]


@pytest.mark.parametrize("case", GOLDENS, ids=lambda c: f"{c['id']}-{c['settings']['loss_type']}")
def test_loss_and_gradient_are_those_of_trl(case: dict[str, Any]) -> None:
    settings, expected = case["settings"], case["expected"]
    config = config_of(settings)
    given = {k: torch.tensor(v, dtype=torch.float64) for k, v in case["inputs"].items()}
    logprobs, mask = given["logprobs"].requires_grad_(), given["mask"]
    entropies = given["entropies"].requires_grad_()
    high_entropy = None
    if config.top_entropy < 1:
        bound = entropy_threshold(entropies.detach()[mask.bool()].float(), config.top_entropy)
        high_entropy = (entropies.detach() >= bound) * mask
    batch = Batch(
        old_logprobs=None if settings.get("on_policy") else given["old_logprobs"] * mask,
        sampling_logprobs=given.get("sampling_logprobs", given["old_logprobs"]) * mask,
        ref_logprobs=given["ref_logprobs"] * mask if config.beta else None,
        advantages=given["advantages"][:, None].expand_as(mask),
        loss_mask=mask,
        weights=weights_of(config, mask, settings.get("max_completion_length", LONGEST)),
        high_entropy=high_entropy,
        cov_selected=None,
    )
    trained = (mask if high_entropy is None else high_entropy).sum().item()
    coefficient = AdaptiveEntropyBonus().value(config)
    coefficients = Coefficients(config.beta, coefficient, trained)
    output = grpo_loss(config, batch, logprobs, entropies, coefficients)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert output.loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    for tensor, name in ((logprobs, "grad"), (entropies, "grad_entropies")):
        if name in expected:
            wanted = torch.tensor(expected[name], dtype=torch.float64)
            torch.testing.assert_close(tensor.grad, wanted, rtol=0, atol=1e-6)

    ours = output.metrics.reduced(ALONE).figures
    for name, value in expected.get("metrics", {}).items():
        # TRL flags clipped tokens after it has held the ratio to delta: one below 1 + epsilon hides
        # that the upper clip took the gradient. We flag by the ratio itself.
        hidden = config.args.get("delta") is not None and name.startswith("clip_ratio/")
        if name != "entropy_coef" and not hidden:
            assert ours[name] == pytest.approx(value, abs=1e-6), name
