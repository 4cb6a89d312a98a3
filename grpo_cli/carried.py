"""Groups carried over to the next step, as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from grpo_cli.data import PromptStream
from grpo_cli.rollouts import Completion, Group, Rollout


def packed(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Carried groups as plain values and tensors, for a checkpoint; prompts by their position."""
    return [
        {
            "position": g.position,
            "prompt_ids": g.prompt.ids,
            "rollouts": [
                {
                    "ids": r.completion.ids,
                    "logprobs": r.completion.logprobs,
                    "finish_reason": r.completion.finish_reason,
                    "text": r.text,
                    "reward_parts": r.reward_parts,
                    "step_rewards": r.step_rewards,
                    "reward": r.reward,
                    "outcome": r.outcome,
                    "masked": r.masked,
                    "old_logprobs": r.old_logprobs,
                }
                for r in g.rollouts
            ],
        }
        for g in groups
    ]


def unpacked(
    saved: Sequence[dict[str, Any]], stream: PromptStream, rewards: Collection[str]
) -> list[Group]:
    """What `packed` was given, but for groups of another prompt or of other rewards.

    A run may go on with other data or other rewards; what was scored before then means nothing.

    Args:
        rewards: names of the recipe's rewards as they are now.
    """
    groups = []
    for entry in saved:
        ((position, prompt),) = stream.take(entry["position"], 1)
        scored = [values["reward_parts"].keys() for values in entry["rollouts"]]
        if prompt.ids != entry["prompt_ids"] or any(names != set(rewards) for names in scored):
            continue
        rollouts = []
        for values in entry["rollouts"]:
            known = dict(values)
            ids, logprobs = known.pop("ids"), known.pop("logprobs")
            completion = Completion(ids, logprobs, known.pop("finish_reason"))
            rollouts.append(Rollout(prompt, completion, **known))
        groups.append(Group(position, prompt, rollouts))
    return groups
