"""Throughput of the reward workers: `python scripts/bench_rewards.py ROWS.jsonl[.gz] [rounds]`.

Holds 2,000 worked solutions against the answers of the rows after them (columns `solution` and
`answer`) with the `math` reward, with one worker and with two in turn, and prints the ratio of each
round. Then the same with a completion that never ends among them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path

from grpo_cli.commands.score import score_samples
from grpo_cli.config.schema import Reward, Scoring
from grpo_cli.data.files import load_file
from grpo_cli.data.stored_completions import Sample
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.pool import Call
from grpo_cli.scoring.scorer import Scorer

COMPLETIONS = 2000


def hangs(completions: list[str]) -> list[float]:
    """Never returns where the completion says so."""
    while completions == ["hang"]:
        pass
    return [1.0] * len(completions)


def scorer(workers: int) -> Scorer:
    """One with its workers started and warm."""
    executor = RewardExecutor(Scoring(workers=workers))
    made = Scorer({"math": Reward("math", cache=False)}, ["answer"], "the file", executor)
    gold = "x^2 + 1"
    samples = [
        Sample(i, "", rf"\boxed{{1 + x^{{2}} + {i} - {i}}}", None, {"answer": gold})
        for i in range(50)
    ]
    for _ in score_samples(made, samples):
        pass
    return made


def seconds(made: Scorer, samples: list[Sample]) -> float:
    start = time.perf_counter()
    rewards = [one.reward for chunk in score_samples(made, samples) for one in chunk]
    taken = time.perf_counter() - start
    assert None not in rewards, "every completion has a reward"
    return taken


def main() -> None:
    rows = load_file(Path(sys.argv[1]), "the file")
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    # Against the answer of the row after it: equal texts and plain numbers would take no time.
    chosen = [r for r in rows if not r["answer"].lstrip("-").isdigit()][: COMPLETIONS + 1]
    samples = [
        Sample(i, "", r["solution"], None, {"answer": after["answer"]})
        for i, (r, after) in enumerate(itertools.pairwise(chosen))
    ]
    one, two = scorer(1), scorer(2)
    ratios = []
    for number in range(rounds):
        alone, together = seconds(one, samples), seconds(two, samples)
        ratios.append(alone / together)
        print(
            f"round {number + 1}: {len(samples)} completions; 1 worker {alone:.2f} s, "
            f"2 workers {together:.2f} s, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    hanging = two.executor.pool.submit(Call("bench_rewards:hangs", {"completions": ["hang"]}, 5.0))
    start = time.perf_counter()
    others = [
        two.executor.pool.submit(Call("bench_rewards:hangs", {"completions": ["x"]}, 5.0))
        for _ in range(COMPLETIONS)
    ]
    for future in others:
        assert future.result().error is None
    print(f"{COMPLETIONS} others beside one that hangs: {time.perf_counter() - start:.2f} s")
    assert hanging.result().timed_out
    print(f"the one that hangs: ended after {time.perf_counter() - start:.2f} s, deadline 5 s")
    one.executor.close()
    two.executor.close()


if __name__ == "__main__":
    main()
