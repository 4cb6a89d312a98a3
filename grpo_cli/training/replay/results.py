"""Holds the results of a replay, compares them with the record and returns them as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_cli.config.schema import Recipe
from grpo_cli.records import Group, Rollout
from grpo_cli.reporting.reporter import finite
from grpo_cli.training.replay import completion_terms
from grpo_cli.training.replay.completion_terms import Terms
from grpo_cli.training.replay.gradient_parts import Part

NO_PART = Part(0.0, 0.0)


@dataclass
class Explanation:
    """Explains one completion in one optimizer step."""

    terms: Terms | None = None  # None: nothing in it trains
    part: Part = NO_PART
    weight: float = 0.0  # of each token


@dataclass
class UpdateReport:
    """Holds the completions of one optimizer step, and how their gradients add up."""

    number: int
    completions: dict[tuple[int, int], Explanation] = field(default_factory=dict)
    # ^ by (prompt index, sample)
    rest: Part = NO_PART  # of the completions that were not chosen, together
    difference: float = math.nan  # ‖Σ g_i − g‖ / ‖g‖
    loss: float = math.nan
    norm: float = math.nan


@dataclass
class Replay:
    """Holds a recomputed step."""

    step: int  # counted from 1
    recipe: Recipe
    device: str
    processes: int  # that took the step
    metrics: dict[str, float]  # of its update, recomputed
    updates: list[UpdateReport]
    groups: list[Group]
    baselines: dict[tuple[int, int], tuple[float, float]]  # (baseline, divisor) of the advantage
    texts: dict[tuple[int, int], list[str]]  # the tokens of the chosen completions
    prompts: dict[int, str]
    has_dropout: bool


# Metrics of an update that are compared with the recorded ones. A step whose first two differ is
# not the step that was taken.
COMPARED = ("loss", "grad_norm", "policy_loss", "kl", "entropy", "aux_loss")
DECISIVE = COMPARED[:2]


def compared(
    recorded: Mapping[str, Any], recomputed: Mapping[str, float], tolerance: float
) -> list[dict[str, Any]]:
    """Returns the recorded and the recomputed metrics of an update, and whether they agree.

    Args:
        tolerance: largest difference; of a metric beyond 1, relative to it.

    A value that is not finite, or was not measured, is None.
    """
    out = []
    for name in COMPARED:
        if name in recorded or name in recomputed:
            values = [one.get(name) for one in (recorded, recomputed)]
            before, now = (None if value is None else finite(value) for value in values)
            agrees = before == now  # also if neither is finite, as with overflows of float16
            if before is not None and now is not None:
                agrees = abs(now - before) <= tolerance * max(1.0, abs(before))
            out.append({"name": name, "recorded": before, "recomputed": now, "agrees": agrees})
    return out


def as_data(found: Replay, checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a recomputed step as plain values, for --json and for printing."""
    return {
        "step": found.step,
        "device": found.device,
        "processes": found.processes,
        "dropout": found.has_dropout,
        "checks": list(checks),
        "updates": [_update(found, report) for report in found.updates],
    }


def _update(found: Replay, report: UpdateReport) -> dict[str, Any]:
    places = {(g.prompt_index, j): (g, r) for g in found.groups for j, r in enumerate(g.rollouts)}
    completions = [
        {**_completion(found, key, *places[key]), **_explained(found, key, own)}
        for key, own in report.completions.items()
    ]
    minibatches = found.recipe.update.minibatches
    shares = [own.part.share for own in report.completions.values()]
    return {
        "update": report.number + 1,
        "iteration": report.number // minibatches + 1,
        "minibatch": report.number % minibatches + 1,
        "loss": finite(report.loss),
        "grad_norm": finite(report.norm),
        "share_sum": finite(math.fsum([*shares, report.rest.share])),
        "share_of_others": finite(report.rest.share),
        "difference": finite(report.difference),  # None: the gradient is 0
        "completions": completions,
    }


def _completion(found: Replay, key: tuple[int, int], g: Group, r: Rollout) -> dict[str, Any]:
    rewards = [o.outcome_reward for o in g.rollouts if not math.isnan(o.outcome_reward)]
    baseline, divisor = found.baselines.get(key, (None, None))
    step_values = None if r.token_advantages is None else r.token_advantages
    return {
        "prompt_index": key[0],
        "row": g.prompt.row,
        "sample": key[1],
        "prompt": found.prompts[key[0]],
        "completion": r.text,
        "finish_reason": r.completion.finish_reason,
        "reward": None if math.isnan(r.reward) else r.reward,
        "outcome_reward": None if math.isnan(r.outcome_reward) else r.outcome_reward,
        "reward_parts": dict(r.reward_parts),
        "group_rewards": rewards,
        "advantage": r.advantage,
        "token_advantages": None if step_values is None else step_values.tolist(),
        "baseline": baseline,
        "divisor": divisor,
        "excluded": r.excluded,
        "tokens": len(r.completion.ids),
        "loss_tokens": r.loss_tokens,
    }


def _explained(found: Replay, key: tuple[int, int], own: Explanation) -> dict[str, Any]:
    share, norm = finite(own.part.share), finite(own.part.norm)
    values: dict[str, Any] = {"weight": own.weight, "share": share, "norm": norm}
    terms = own.terms
    if terms is None:
        return values
    trains = torch.tensor([mark != completion_terms.MASKED for mark in terms.marks])
    ratio = terms.ratio[trains]
    values |= {
        "ratio": {
            "mean": ratio.mean().item(),
            "min": ratio.min().item(),
            "max": ratio.max().item(),
        },
        "kl": None if terms.kl is None else terms.kl[trains].mean().item(),
        **{
            name: terms.marks.count(mark)
            for name, mark in (
                ("clipped", completion_terms.CLIPPED),
                ("masked", completion_terms.MASKED),
                ("left_out", completion_terms.LEFT_OUT),
            )
        },
    }
    if key in found.texts:
        r = next(g for g in found.groups if g.prompt_index == key[0]).rollouts[key[1]]
        values["token_values"] = [
            {
                "token": text,
                "id": r.completion.ids[t],
                "logprob": terms.logprobs[t].item(),
                "old_logprob": terms.old_logprobs[t].item(),
                "sampling_logprob": r.completion.sampling_logprobs[t],
                "ratio": terms.ratio[t].item(),
                "advantage": r.advantages[t].item(),
                "kl": None if terms.kl is None else terms.kl[t].item(),
                "pull": terms.pull[t].item(),
                "mark": terms.marks[t],
            }
            for t, text in enumerate(found.texts[key])
        ]
    return values
