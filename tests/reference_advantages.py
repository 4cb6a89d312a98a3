"""Every advantage rule once more, word for word from its paper: loops over plain floats.

It shares nothing with grpo_cli, so that an error has to be made twice to go unnoticed. A step is a
list of groups of any sizes; None is a rollout without a reward.

    group         DeepSeekMath, arXiv 2402.03300, section 4.1.2: (r_i − mean(r)) / std(r);
                  Dr. GRPO, arXiv 2503.20783: without std(r);
                  "Lite PPO", arXiv 2508.08221: with the std over the whole step
    rloo          arXiv 2402.14740: r_i − 1/(n−1) Σ_{j≠i} r_j
    reinforce_pp  arXiv 2501.03262: (r_i − mean) / std over the whole step; as REINFORCE++-baseline
                  r_i is first reduced by its group's mean
    opo           arXiv 2505.23585: r_i − Σ l_j r_j / Σ l_j
    pass_at_k     arXiv 2508.10751: the best of a k-subset is the reward of each member; a rollout's
                  advantage is the mean of those of the subsets that it is in, all of them counted
    max_rl        arXiv 2602.02710: (r_i − mean(r)) / mean(r)
    gdpo          arXiv 2601.05242: each reward normalised in the group, the weighted sum of these
                  normalised over the whole step
    process       DeepSeekMath, section 4.1.3: rewards of steps normalised over the group, summed
                  over the steps that end at a token or after it

What the papers leave open: a std has the divisor n − 1, and 1e-4 is added to it (TRL's choices); a
rollout without a reward takes no part and gets 0; so does one that there is nothing to compare to.
"""

import itertools
import math
from collections.abc import Sequence

EPS = 1e-4

Groups = Sequence[Sequence[float | None]]
Advantages = list[list[float]]


def group(groups: Groups, scale: str) -> Advantages:
    out = []
    for rewards in groups:
        center = mean(present(rewards))
        if scale == "group":
            divisor = std(present(rewards)) + EPS
        elif scale == "batch":
            divisor = std(everything(groups)) + EPS
        else:
            divisor = 1.0
        out.append([0.0 if r is None else (r - center) / divisor for r in rewards])
    return out


def rloo(groups: Groups) -> Advantages:
    out = []
    for rewards in groups:
        row = []
        for i, r in enumerate(rewards):
            others = present([other for j, other in enumerate(rewards) if j != i])
            row.append(0.0 if r is None or not others else r - mean(others))
        out.append(row)
    return out


def reinforce_pp(groups: Groups, baseline: str) -> Advantages:
    shaped: list[list[float | None]] = []
    for rewards in groups:
        subtracted = mean(present(rewards)) if baseline == "group" else 0.0
        shaped.append([None if r is None else r - subtracted for r in rewards])
    return over_the_step(shaped)


def opo(groups: Groups, lengths: Sequence[Sequence[int]]) -> Advantages:
    out = []
    for rewards, sizes in zip(groups, lengths, strict=True):
        above = below = 0.0
        for r, length in zip(rewards, sizes, strict=True):
            if r is not None:
                above += length * r
                below += length
        out.append([0.0 if r is None else r - above / below for r in rewards])
    return out


def pass_at_k(groups: Groups, k: int) -> Advantages:
    out = []
    for rewards in groups:
        there = [i for i, r in enumerate(rewards) if r is not None]
        values = {i: r for i, r in enumerate(rewards) if r is not None}
        subsets = list(itertools.combinations(there, min(k, len(there))))
        best = [max(values[i] for i in subset) for subset in subsets] if there else []
        row = [0.0] * len(rewards)
        if best and min(best) < max(best):
            center = mean(best)
            spread = math.sqrt(mean([(b - center) ** 2 for b in best]))
            for i in there:
                own = [b for b, subset in zip(best, subsets, strict=True) if i in subset]
                row[i] = mean([(b - center) / spread for b in own])
        out.append(row)
    return out


def max_rl(groups: Groups) -> Advantages:
    out = []
    for rewards in groups:
        center = mean(present(rewards))
        out.append([0.0 if r is None or center == 0 else (r - center) / center for r in rewards])
    return out


def gdpo(parts: Sequence[Groups], weights: Sequence[float]) -> Advantages:
    """parts: the groups once for each reward function, None where it did not apply."""
    normal = [group(groups, "group") for groups in parts]
    totals: list[list[float | None]] = []
    for p, rewards in enumerate(parts[0]):
        row: list[float | None] = []
        for i in range(len(rewards)):
            if all(groups[p][i] is None for groups in parts):
                row.append(None)
            else:
                row.append(sum(w * n[p][i] for w, n in zip(weights, normal, strict=True)))
        totals.append(row)
    return over_the_step(totals)


def process(
    steps: Sequence[Sequence[tuple[int, float]]], lengths: Sequence[int]
) -> list[list[float]]:
    """steps: (token at which it ends, reward) of each completion of a group."""
    every = [value for completion in steps for _, value in completion]
    out = []
    for completion, length in zip(steps, lengths, strict=True):
        row = []
        for token in range(length):
            later = [value for end, value in completion if end >= token]
            row.append(sum((value - mean(every)) / (std(every) + EPS) for value in later))
        out.append(row)
    return out


def over_the_step(groups: Groups) -> Advantages:
    """(r − mean) / std, both over all groups together."""
    every = everything(groups)
    return [
        [0.0 if r is None else (r - mean(every)) / (std(every) + EPS) for r in rewards]
        for rewards in groups
    ]


def everything(groups: Groups) -> list[float]:
    return [r for rewards in groups for r in present(rewards)]


def present(rewards: Sequence[float | None]) -> list[float]:
    return [r for r in rewards if r is not None]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((v - center) ** 2 for v in values) / (len(values) - 1))
