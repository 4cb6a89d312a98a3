"""A step under way is kept, loaded as plain data, and again what it was."""

import math
from typing import Any

from grpo_cli.algorithm.metric_sums import ReducedMetrics
from grpo_cli.data.prompts import PromptStream
from grpo_cli.records import RolloutStats, StepStats, rollout_stats
from grpo_cli.training.run import StepBatch, StepProgress
from tests.training.rollouts.test_stored_groups import (
    make_groups,
    make_stream,
    same,
    through_a_file,
)

HOW = "of this recipe"


def make_work(stream: PromptStream) -> StepProgress:
    """Of a process that has two of a step's three groups; a fourth was sampled and dropped."""
    own, others = make_groups(stream, 6, 2), make_groups(stream, 4)
    step_stats = dict(rollout_stats([*own, *others]))
    sampled = step_stats | dict(rollout_stats(make_groups(stream, 5)))
    totals = [
        ReducedMetrics({"loss": 0.5, "kl": 2.0}, {"kl": 8.0}, {"low": math.inf}, {"high": 1.5}),
        ReducedMetrics({"loss": -0.25, "kl": 1 / 3}, {"kl": 7.0}, {"low": -2.0}, {"high": 1e-30}),
    ]
    metrics = {"dynamic_sampling/dropped": 1.0, "rewards/right/mean": math.nan}
    return StepProgress(
        StepBatch(own, step_stats, sampled, metrics), totals, [0.75, 1 / 3], updates=3
    )


def kept(work: StepProgress) -> tuple[Any, Any]:
    shared, own = through_a_file((work.shared(), work.own(HOW)))
    return shared, own


def test_step_round_trip() -> None:
    work = make_work(make_stream())
    stream = make_stream()  # of the process that goes on
    found = StepProgress.restored(*kept(work), stream, HOW)
    assert same(found, work)
    assert [g.prompt_index for g in found.batch.groups] == [6, 2]
    assert all(g.prompt is r.prompt for g in found.batch.groups for r in g.rollouts)
    assert found.batch.groups[0].prompt is stream.prompt_at(6)
    for other, how in ((stream, "of another recipe"), (make_stream(seed=4), HOW)):
        assert StepProgress.restored(*kept(work), other, how) is None


def test_process_without_groups() -> None:
    # More processes than groups: what the others have is not its own to judge.
    shared, _ = kept(make_work(make_stream()))
    found = StepProgress.restored(shared, [], make_stream(), HOW)
    assert found.batch.groups == []
    step_stats: StepStats = make_work(make_stream()).batch.step_stats
    assert same(found.batch.step_stats, step_stats)
    assert all(isinstance(o, RolloutStats) for group in step_stats.values() for o in group)
