"""Reward: what the environment of an episode has given."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import one_of
from grpo_cli.rewards._text import Completions

Steps = list[tuple[int, float]]
CREDITS = ("sum", "turns")


@reward(positions="tokens")
def environment(
    completions: Completions,
    completion_ids: list[list[int]] | None = None,
    episodes: Sequence[Mapping[str, Any] | None] | None = None,
    *,
    name: str | None = None,
    episode_credit: str = "sum",
    **_: Any,
) -> list[float | Steps | None]:
    """Returns the rewards that the environment gave for turns and for the whole episode, summed.

    0.0 where it gave none, as an environment does that pays only for success; None for a completion
    that is not an episode.

    Recipe args:
        name: "turns": only the sum of the rewards of turns. Another name: only the episode's reward
            of this name, such as the name of an environment's class, and None for an episode
            without it. null: all.
        episode_credit: "sum", or "turns": each turn of the model has its reward, and the last one
            also those of the episode. The run's own (episode.credit) unless it is set.
    """
    one_of("environment: episode_credit", episode_credit, CREDITS)
    values: list[float | Steps | None] = []
    for i in range(len(completions)):
        episode = episodes[i] if episodes is not None else None
        parts = None if episode is None else _parts(episode, name)
        if episode is None or parts is None:
            values.append(None)
        elif episode_credit == "sum":
            values.append(sum(parts))
        else:
            ends = [t["end"] for t in episode["turns"] if t["by"] == "model"]
            if not ends:
                ends = [len(completion_ids[i]) if completion_ids is not None else 1]
            values.append(
                [(max(0, end - 1), value) for end, value in zip(ends, parts, strict=True)]
            )
    return values


def _parts(episode: Mapping[str, Any], name: str | None) -> list[float] | None:
    """Returns the reward of each turn of the model, the episode's in the last; None without any."""
    if name not in (None, "turns", *episode["rewards"]):
        return None
    turns = [t["reward"] for t in episode["turns"] if t["by"] == "model"] or [None]
    parts = [float(r or 0.0) if name in (None, "turns") else 0.0 for r in turns]
    parts[-1] += sum(v for key, v in episode["rewards"].items() if name in (None, key))
    return parts
