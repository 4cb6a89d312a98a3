"""Every loss and every advantage rule learns the tiny arithmetic recipe, as do rewarded steps."""

from pathlib import Path

import pytest

from grpo_cli import cli
from scripts.learning_check import LONGER, result, variants, words

pytestmark = pytest.mark.slow

# With seed 0 rounding alone decides where rewarded steps end (docs/experiments.md).
SEEDS = {"rewarded steps": 1}


@pytest.mark.parametrize("name", variants())
def test_held_out_accuracy_rises(name: str, tmp_path: Path) -> None:
    seed, steps = SEEDS.get(name, 0), 40 * LONGER.get(name, 1)
    assert cli.run_command(["train", *words(name, seed, steps, tmp_path)]) == 0
    reached = result(tmp_path)
    assert reached["after"] > reached["before"] + 0.05, reached
