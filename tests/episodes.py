"""Completions of several turns, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_cli.records import Completion, Rollout, Turn
from tests.conftest import make_rollout

CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "multiply", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
)


def make_episode(
    rewards: Sequence[float | None] = (None, None), reply: int = 2, **changes: Any
) -> Rollout:
    """Returns a rollout of turns of two tokens, each but the last with a reply.

    Args:
        rewards: of each turn of the model. reply: tokens of each reply.
        changes: fields of the completion.
    """
    turns: list[Turn] = []
    place = 0
    for k, value in enumerate(rewards):
        turns.append(Turn(place, place + 2, "model", value))
        place += 2
        if k < len(rewards) - 1:
            turns.append(Turn(place, place + reply, "environment"))
            place += reply
    sampled = [t.by == "model" for t in turns for _ in range(t.start, t.end)]
    fields: dict[str, Any] = {
        "is_sampled": sampled,
        "turns": tuple(turns),
        "stop_reason": "answered",
        "messages": MESSAGES,
    }
    ids = list(range(3, 3 + place))
    completion = Completion(ids, [-0.5 * s for s in sampled], "stop", **fields | changes)
    return replace(make_rollout(text="decoded"), completion=completion)
