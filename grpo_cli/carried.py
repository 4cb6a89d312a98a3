"""Groups carried over to the next step, as a checkpoint keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grpo_cli.data import PromptStream
from grpo_cli.rollouts import Completion, Group, Rollout

OF_TOOLS = ("sampled", "tool_calls", "tool_errors", "tool_timeouts")


def packed(groups: Sequence[Group], rewards: str) -> list[dict[str, Any]]:
    """Carried groups as plain values and tensors, for a checkpoint; prompts by their position.

    Args:
        rewards: says by which rewards they were scored.
    """
    return [
        {
            "position": g.position,
            "prompt_ids": g.prompt.ids,
            "rewards": rewards,
            "rollouts": [
                {
                    "ids": r.completion.ids,
                    "logprobs": r.completion.logprobs,
                    "finish_reason": r.completion.finish_reason,
                    "sampled_at": r.completion.sampled_at,
                    **{name: getattr(r.completion, name) for name in OF_TOOLS},
                    "text": r.text,
                    "reward_parts": r.reward_parts,
                    "step_rewards": r.step_rewards,
                    "reward": r.reward,
                    "outcome": r.outcome,
                    # Whatever functions logged, of whatever type: a checkpoint holds plain values.
                    "extras": json.dumps(r.extras),
                    "masked": r.masked,
                    "old_logprobs": r.old_logprobs,
                }
                for r in g.rollouts
            ],
        }
        for g in groups
    ]


def unpacked(saved: Sequence[dict[str, Any]], stream: PromptStream, rewards: str) -> list[Group]:
    """What `packed` was given, but for groups of another prompt or of other rewards.

    A run may go on with other data or other rewards; what was scored before then means nothing.

    Args:
        rewards: as for `packed`, of the recipe as it is now.
    """
    groups = []
    for entry in saved:
        position = entry["position"]
        prompt = stream.prompt_at(position)
        if prompt.ids != entry["prompt_ids"] or rewards != entry["rewards"]:
            continue
        rollouts = []
        for values in entry["rollouts"]:
            known = dict(values)
            ids, logprobs = known.pop("ids"), known.pop("logprobs")
            known["extras"] = json.loads(known.get("extras", "{}"))
            reason, sampled_at = known.pop("finish_reason"), known.pop("sampled_at", None)
            of_tools = {name: known.pop(name) for name in OF_TOOLS if name in known}
            completion = Completion(ids, logprobs, reason, sampled_at, **of_tools)
            rollouts.append(Rollout(prompt, completion, **known))
        groups.append(Group(position, prompt, rollouts))
    return groups
