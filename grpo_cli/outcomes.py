"""The few numbers of each rollout that the whole step is computed from, over all processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_cli.distributed import Workers
from grpo_cli.rollouts import Group, Rollout


class Outcome(NamedTuple):  # pickled three times as fast as a dataclass
    """The few numbers of a rollout that other processes need; small enough to gather."""

    reward: float
    outcome: float  # what the advantage rule is given
    reward_parts: dict[str, float | None]
    steps: dict[str, list[float]]  # values of rewarded steps, by function
    prompt_tokens: int
    tokens: int
    truncated: bool
    masked: bool

    @classmethod
    def of(cls, r: Rollout) -> Outcome:
        return cls(
            r.reward,
            r.outcome,
            r.reward_parts,
            {name: [value for _, value in steps] for name, steps in r.step_rewards.items()},
            len(r.prompt.ids),
            len(r.completion.ids),
            r.completion.finish_reason == "length",
            r.masked,
        )


WholeStep = dict[int, list[Outcome]]  # by the group's position, over all processes


def outcomes(groups: Sequence[Group]) -> list[tuple[int, list[Outcome]]]:
    """(position, outcomes) of each group."""
    return [(g.position, [Outcome.of(r) for r in g.rollouts]) for g in groups]


def gathered(workers: Workers, groups: Sequence[Group]) -> WholeStep:
    """Outcomes of every process's groups, on every process."""
    return {p: o for part in workers.gather(outcomes(groups)) for p, o in part}


def matrix(whole_step: WholeStep, value: Callable[[Outcome], float | None]) -> Tensor:
    """A value of every rollout as [P, G] float64 in the order of positions; NaN for None.

    Groups of different sizes, of which a step with carried groups may have some, end in NaN.
    """
    most = max(map(len, whole_step.values()))
    rows = []
    for _, group in sorted(whole_step.items()):
        values = [value(o) for o in group]
        rows.append([math.nan if v is None else float(v) for v in values])
        rows[-1] += [math.nan] * (most - len(group))
    return torch.tensor(rows, dtype=torch.float64)


def reward_tensors(whole_step: WholeStep, weights: Mapping[str, float]) -> dict[str, Tensor]:
    """What advantage rules are computed from, by the names that `advantages.py` lists."""

    def part(name: str) -> Callable[[Outcome], float | None]:
        return lambda o: None if name in o.steps else o.reward_parts[name]

    return {
        "rewards": matrix(whole_step, lambda o: o.outcome),
        "parts": torch.stack([matrix(whole_step, part(name)) for name in weights], dim=-1),
        "weights": torch.tensor(list(weights.values()), dtype=torch.float64),
        "lengths": matrix(whole_step, lambda o: o.tokens).nan_to_num(),
    }
