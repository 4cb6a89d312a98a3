"""The default tier: of a long test without a marker of a slower tier a warning tells."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

# The markers in pyproject.toml: `smoke` belongs to the default tier, the others are left out of it.
MARKERS = ("smoke", "runs", "programs", "slow", "gpu", "vllm", "slurm", "real")
SECONDS = 2.0  # of processor time


def processor_seconds() -> float:
    """Returns the processor time of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    begin = processor_seconds()
    result = yield
    taken = processor_seconds() - begin
    # A warning, no failure: the same test takes several times longer on a machine that others use.
    if taken > SECONDS and not any(item.get_closest_marker(name) for name in MARKERS):
        item.warn(
            pytest.PytestWarning(
                f"the test took {taken:.1f} s of processor time; in the default tier a test takes "
                f"at most {SECONDS:g} s. Make it smaller, or mark it by what it starts: "
                "pytest.mark.runs (builds or trains a run), pytest.mark.programs (processes and "
                "servers) or pytest.mark.slow (minutes)."
            )
        )
    return result
