"""Converts groups for checkpoints, with a fingerprint of the settings that they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from grpo_cli.config import knob
from grpo_cli.config.keys import flagged
from grpo_cli.config.knob import value_at
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.prompts import PromptStream
from grpo_cli.records import Group, from_state, to_state
from grpo_cli.scoring.settings import Reward


def reward_fingerprint(recipe: Recipe) -> str:
    """Returns a string of the settings that a completion's rewards depend on."""
    names = knob.flagged(Reward, "decides", "rewards")
    return repr({n: [getattr(r, name) for name in names] for n, r in recipe.reward.items()})


def sampling_fingerprint(recipe: Recipe) -> str:
    """Returns a string of the settings, besides prompts and policy, that completions depend on."""
    return repr([value_at(recipe, k) for k in flagged("decides", "completions", "distribution")])


def step_fingerprint(recipe: Recipe) -> str:
    """Returns a string of the settings that the groups and updates of a step depend on."""
    how = (sampling_fingerprint(recipe), reward_fingerprint(recipe))
    return repr((*how, [value_at(recipe, k) for k in flagged("decides", "updates")]))


def digest(fingerprint: str) -> str:
    """Returns the hash of a fingerprint, for storage: arguments of rewards may be secret."""
    return hashlib.sha256(fingerprint.encode()).hexdigest()


def to_entries(groups: Sequence[Group], fingerprint: str) -> list[dict[str, Any]]:
    """Returns groups as plain values and tensors, each prompt as its index.

    Args:
        fingerprint: fingerprint of the settings that the groups depend on.
    """
    return [
        {
            "position": g.prompt_index,
            "prompt_ids": g.prompt.ids if g.prompt.row_ids is None else g.prompt.row_ids,
            "rewards": digest(fingerprint),
            "rollouts": [
                # Functions log values of any type, and a checkpoint holds plain values.
                {**to_state(r), "extras": json.dumps(r.extras)}
                for r in g.rollouts
            ],
        }
        for g in groups
    ]


def from_entries(
    saved: Sequence[dict[str, Any]], stream: PromptStream, fingerprint: str
) -> list[Group]:
    """Returns the stored groups that the resumed run can use.

    Groups with another prompt or fingerprint are left out: the run was resumed with other data,
    rewards or settings.

    Args:
        fingerprint: the current recipe's fingerprint.
    """
    groups = []
    for entry in saved:
        position = entry["position"]
        prompt = stream.prompt_at(position)
        if prompt.ids != entry["prompt_ids"] or entry["rewards"] != digest(fingerprint):
            continue
        rollouts = [
            from_state(prompt, {**values, "extras": json.loads(values["extras"])})
            for values in entry["rollouts"]
        ]
        groups.append(Group(position, rollouts[0].prompt, rollouts))
    return groups
