"""Computes the metrics of a step's rollouts, in TRL's names; docs/metrics.md defines them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from grpo_cli.algorithm.advantages import all_equal, group_std
from grpo_cli.distributed.workers import Workers
from grpo_cli.records import STOP_REASONS, Rollout, RolloutStats, StepStats, matrix


def rollout_metrics(step_stats: StepStats) -> dict[str, float]:
    """Returns the metrics of a step's rewards and lengths."""
    every = [o for position in sorted(step_stats) for o in step_stats[position]]
    rewards = matrix(step_stats, lambda o: o.reward)
    lengths = [o.sampled_tokens for o in every]
    ended = [o.sampled_tokens for o in every if not o.truncated] or [0]
    metrics = {
        "reward": mean([o.reward for o in every if not math.isnan(o.reward)]),
        "reward_std": group_std(rewards).mean().item(),
        "frac_reward_zero_std": all_equal(rewards).double().mean().item(),
        "rewards_none": float(sum(math.isnan(o.reward) for o in every)),
        "completions/mean_length": mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": mean([float(o.truncated) for o in every]),
        "completions/mean_terminated_length": mean(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }
    for name in every[0].reward_parts:
        values = [v for o in every if (v := o.reward_parts[name]) is not None]
        metrics[f"rewards/{name}/mean"] = mean(values)
        varies = len(set(values)) > 1  # rounding can leave equal values a spread above 0
        spread = torch.tensor(values, dtype=torch.float64).std() if varies else 0.0
        metrics[f"rewards/{name}/std"] = float(spread)
    return metrics | episode_metrics(every)


def episode_metrics(stats: Sequence[RolloutStats]) -> dict[str, float]:
    """Returns the metrics of tools, turns and environments; {} without episodes."""
    every = [o.episode for o in stats if o.episode is not None]
    if not every:
        return {}
    of_tools: dict[str, list[int]] = {}
    for e in every:
        for name, counts in e.calls_by_tool.items():
            known = of_tools.setdefault(name, [0, 0, 0])
            of_tools[name] = [a + b for a, b in zip(known, counts, strict=True)]
    calls, failures = sum(e.tool_calls for e in every), sum(e.tool_errors for e in every)
    reasons = Counter(e.stop_reason for e in every)
    turns = [e.turns for e in every]
    metrics = {}
    for name in sorted({name for e in every for name in e.env_metrics}):
        values = [e.env_metrics[name] for e in every if name in e.env_metrics]
        metrics[f"environment/{name}"] = mean(values)
    for name, counts in sorted(of_tools.items()):
        for kind, count in zip(("calls", "failures", "timeouts"), counts, strict=True):
            metrics[f"tools/{name}/{kind}"] = float(count)
    return {
        **metrics,
        "tools/call_frequency": calls / len(every),
        "tools/failure_frequency": failures / calls if calls else 0.0,
        "tools/parse_errors": float(sum(e.parse_errors for e in every)),
        "episode/turns/mean": mean(turns),
        "episode/turns/max": float(max(turns)),
        "episode/foreign_tokens": mean([o.tokens - o.sampled_tokens for o in stats if o.episode]),
        **{f"episode/stop/{r}": reasons[r] / len(every) for r in STOP_REASONS},
        "environment/retries": float(sum(e.env_retries for e in every)),
        "environment/unscored": float(sum(e.environment_failed for e in every)),
    }


def mixture_metrics(step_stats: StepStats, dataset_of: Mapping[int, str]) -> dict[str, float]:
    """Returns the mean reward and the number of prompts of each data set of a mixture in the step.

    Args:
        dataset_of: the name of the data set, by prompt index.
    """
    rewards: dict[str, list[float]] = {}
    for position, group in sorted(step_stats.items()):
        found = rewards.setdefault(dataset_of[position], [])
        found += [o.reward for o in group if not math.isnan(o.reward)]
    metrics = {f"mixture/{name}/reward": mean(found) for name, found in sorted(rewards.items())}
    counts = Counter(dataset_of[position] for position in step_stats)
    return metrics | {f"mixture/{n}/prompts": float(c) for n, c in sorted(counts.items())}


def staleness_metrics(
    rollouts: Sequence[Rollout], step: int, waited: float, sampled: float, workers: Workers
) -> dict[str, float]:
    """Returns the age of prefetched completions, and the time that prefetching saved.

    Args:
        rollouts: this process's rollouts.
        step: optimizer steps done so far.
        waited: seconds that the step waited for the completions.
        sampled: seconds that sampling took; NaN if they were not prefetched.
    """
    ages = [
        float(step - r.completion.sampled_at)
        for r in rollouts
        if r.completion.sampled_at is not None
    ]
    total = workers.sum({"age": math.fsum(ages), "number": float(len(ages))})
    metrics = {
        "staleness/mean": total["age"] / max(total["number"], 1.0),
        "staleness/max": workers.max(max(ages, default=0.0)),
    }
    if math.isfinite(sampled):
        metrics |= {"overlap/sampled": sampled, "overlap/gained": max(sampled - waited, 0.0)}
    return metrics


def mean(values: Sequence[float]) -> float:
    """Returns the arithmetic mean; NaN for an empty sequence."""
    return math.fsum(values) / len(values) if values else math.nan
