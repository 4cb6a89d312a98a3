"""Computes a task's numbers from its scored completions, and a run's metrics from these. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.evaluation.estimates import Estimate, estimate, maj_at_k, pass_at_k
from grpo_cli.evaluation.majority import Ballot
from grpo_cli.evaluation.settings import Eval
from grpo_cli.evaluation.tasks import TaskResult
from grpo_cli.records import Group
from grpo_cli.reporting.rollout_metrics import mean

METRICS = ["mean", "pass", "maj"]  # defaults for several completions per problem


@dataclass(frozen=True)
class ProblemStats:
    """The facts of one problem with n completions, small enough to gather."""

    right: list[bool]  # [n]
    graded: list[bool]  # [n] whether the reward whose value 1 counts as right is neither 0 nor 1
    rewards: list[float]  # [n], NaN where no function applies
    parts: dict[str, list[float | None]]  # by reward function, [n]
    lengths: list[int]  # token counts of the completions that have tokens
    truncated: list[bool]  # [n]
    answered: list[bool] | None  # [n]; None if the reward judges no final answers
    votes: list[int] | None  # completions of each class of equal answers; None if not counted
    right_votes: list[int]  # indices of the right classes
    breakdown: dict[str, str]  # the problem's value in each breakdown column
    calls: list[int]  # [n] number of programs run
    failed_calls: list[int]
    late_calls: list[int]  # [n] number of failed programs that timed out
    turns: list[int]  # number of the model's turns, per completion that is an episode
    unscored: int  # number of episodes whose environment failed; they count as wrong

    @classmethod
    def of(
        cls,
        group: Group,
        right: str,
        breakdown: Sequence[str] = (),
        answers: Sequence[str | None] | None = None,
        ballot: Ballot | None = None,
    ) -> ProblemStats:
        """Extracts the facts of a scored group.

        Args:
            right: name of the reward whose value 1 counts as right.
            breakdown: columns by which the accuracy is broken down.
            answers: the completions' final answers, if the reward judges these.
            ballot: the counted answers.
        """
        rollouts, columns = group.rollouts, group.prompt.columns
        rights = rights_of(group, right)
        answered = None
        if answers is not None:
            answered = [a is not None or ok for a, ok in zip(answers, rights, strict=True)]
        return cls(
            right=rights,
            graded=[r.reward_parts[right] not in (0, 1, None) for r in rollouts],
            rewards=[r.reward for r in rollouts],
            parts={
                name: [r.reward_parts[name] for r in rollouts] for name in rollouts[0].reward_parts
            },
            lengths=[r.completion.sampled_tokens for r in rollouts if r.completion.ids],
            truncated=[r.completion.finish_reason == "length" for r in rollouts],
            answered=answered,
            votes=None if ballot is None else ballot.votes,
            right_votes=[] if ballot is None else sorted(ballot.right),
            breakdown={c: str(columns[c]) for c in breakdown if columns.get(c) is not None},
            calls=[r.completion.tool_calls for r in rollouts],
            failed_calls=[r.completion.tool_errors for r in rollouts],
            late_calls=[r.completion.tool_timeouts for r in rollouts],
            turns=[len(r.completion.model_turns) for r in rollouts if r.completion.is_episode],
            unscored=sum(r.completion.environment_failed for r in rollouts),
        )

    @property
    def accuracy(self) -> float:
        """Share of the problem's completions that are right."""
        return mean([float(right) for right in self.right])


def rights_of(group: Group, name: str) -> list[bool]:
    """Returns for each completion whether it is right: its reward `name` is 1."""
    return [r.reward_parts[name] == 1 for r in group.rollouts]


def summarize(problems: Sequence[ProblemStats], config: Eval, n: int) -> dict[str, float]:
    """Returns a task's numbers; NAME_low and NAME_high are the ends of NAME's 95 % interval.

    Args:
        problems: all problems of the task, from every process.
        n: number of completions per problem.
    """
    metrics: dict[str, float] = {"n": float(len(problems))}
    completions = sum(len(p.right) for p in problems)

    def put(name: str, values: Sequence[float], among: Sequence[ProblemStats] = problems) -> None:
        found = estimate(values, sum(len(p.right) for p in among))
        metrics.update(with_interval(name, found))

    accuracies = [p.accuracy for p in problems]
    put("accuracy", accuracies)
    metrics["reward"] = mean([v for p in problems for v in p.rewards if not math.isnan(v)])
    if any(any(p.graded) for p in problems):
        metrics["graded"] = mean([float(v) for p in problems for v in p.graded])
    metrics["mean_length"] = mean([float(v) for p in problems for v in p.lengths])
    metrics["clipped_ratio"] = mean([float(v) for p in problems for v in p.truncated])
    if any(p.answered is not None for p in problems):
        metrics["no_answer"] = mean([float(not a) for p in problems for a in p.answered or ()])
    for name in problems[0].parts if problems else ():
        values = [v for p in problems for v in p.parts[name] if v is not None]
        metrics[f"rewards/{name}/mean"] = mean(values)
    if n > 1:
        metrics["completions"] = float(completions)
        kinds = config.metric or METRICS
        powers = {2**i for i in range(n.bit_length()) if 2**i <= n}
        ks = sorted(config.k or powers | {n})
        if "mean" in kinds:
            put(f"mean@{n}", accuracies)
        for k in ks if "pass" in kinds else ():
            put(f"pass@{k}", [pass_at_k(sum(p.right), len(p.right), k) for p in problems])
        voted = [
            (v, p.right_votes, len(p.right) - sum(v))
            for p in problems
            if (v := p.votes) is not None
        ]
        for k in ks if "maj" in kinds and len(voted) == len(problems) else ():
            put(f"maj@{k}", [maj_at_k(*votes, k) for votes in voted])
    calls = sum(sum(p.calls) for p in problems)
    if calls:
        metrics["tool_calls"] = calls / completions
        metrics["tool_errors"] = sum(sum(p.failed_calls) for p in problems) / calls
        metrics["tool_timeouts"] = sum(sum(p.late_calls) for p in problems) / calls
    if any(p.turns for p in problems):
        metrics["turns"] = mean([float(v) for p in problems for v in p.turns])
        metrics["unscored"] = float(sum(p.unscored for p in problems))
    for column in dict.fromkeys(c for p in problems for c in p.breakdown):
        for value in sorted({p.breakdown[column] for p in problems if column in p.breakdown}):
            among = [p for p in problems if p.breakdown.get(column) == value]
            put(f"{column}/{value}/accuracy", [p.accuracy for p in among], among)
            metrics[f"{column}/{value}/n"] = float(len(among))
    return metrics


def with_interval(name: str, found: Estimate) -> dict[str, float]:
    """Returns an estimate as three metrics: its value and the ends of its interval."""
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def as_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Returns the metrics `eval/...` that training logs.

    For benchmarks and several held-out sets these include the mean accuracy, with equal weights.
    Its interval combines the squared arms of theirs, each side separately (MOVER: Zou and Donner
    2008, Stat. Med. 27:1693). For one benchmark it is that benchmark's interval.
    """
    if len(results) == 1 and not results[0].task.key:
        metrics = {f"eval/{key}": value for key, value in results[0].metrics.items()}
        del metrics["eval/n"]
        return metrics
    metrics = {
        f"eval/{r.task.key}/{key}": value for r in results for key, value in r.metrics.items()
    }
    middle = mean([r.metrics["accuracy"] for r in results])
    down, up = (
        math.hypot(*(r.metrics[end] - r.metrics["accuracy"] for r in results)) / len(results)
        for end in ("accuracy_low", "accuracy_high")
    )
    both = with_interval("accuracy", Estimate(middle, middle - down, middle + up))
    metrics |= {f"eval/{key}": value for key, value in both.items()}
    for key in ("reward", "mean_length", "clipped_ratio"):
        metrics[f"eval/{key}"] = mean([r.metrics[key] for r in results])
    if any("graded" in r.metrics for r in results):
        metrics["eval/graded"] = mean([r.metrics.get("graded", 0.0) for r in results])
    return metrics
