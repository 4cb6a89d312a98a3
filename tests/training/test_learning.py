"""Every loss and every advantage rule learns the tiny arithmetic recipe, as do rewarded steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_cli import cli
from tests.programs import ROOT

pytestmark = pytest.mark.slow

# Two optimizer steps a batch, so that ratios leave 1 and the losses differ.
RUN = [
    "recipe=arithmetic_tiny", "loss=dapo", "update.minibatches=2", "eval.every=0",
    "checkpoint.every=0", "log.report=false", "log.completions_every=0", "steps=40",
]  # fmt: skip
# A token's own credit is a weaker signal at first, hence more steps. With seed 0 rounding alone
# decides where they end (docs/experiments.md).
REWARDED_STEPS = [
    "reward.exact_match.weight=0",  # measured, and no part of the reward
    "reward.digits.function=tests.training.test_learning:digits",
    "eval.accuracy=exact_match",
    "steps=80",
    "seed=1",
]
VARIANTS = [
    [f"{group}={path.stem}"]
    for group in ("loss", "advantage")
    for path in sorted((ROOT / "recipes" / group).glob("*.yaml"))
]


def digits(completions: list[str], answer: list[str], **_: Any) -> list[list[tuple[int, float]]]:
    """1 at each digit that is right; 0 at a wrong one, a needless one, and one that is missing.

    A missing digit has to cost something, at the end: steps are normalised together, so where later
    ones are harder than the first, stopping after the first would be the best policy.
    """
    return [
        [
            (min(i, len(text) - 1), float(text[i : i + 1] == right[i : i + 1]))
            for i in range(max(len(text), len(right)) if text else 0)
        ]
        for text, right in zip(completions, map(str, answer), strict=True)
    ]


@pytest.mark.parametrize("words", [*VARIANTS, REWARDED_STEPS], ids=lambda words: words[0])
def test_held_out_accuracy_rises(words: list[str], tmp_path: Path) -> None:
    assert cli.run_command(["train", *RUN, *words, f"output_dir={tmp_path}"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    before, after = (summary[when]["accuracy"] for when in ("before", "after"))
    assert after > before + 0.05, (before, after)
