"""Whole weights of a sharded model, for those that sample with them: there while they are used.

The cases are in `sharded.py`, and run on two and on three gloo processes.
"""

from __future__ import annotations

import pytest

from tests.sharded import CASES, outcome

OF_GATHERING = [
    "a_skeleton_is_filled_and_emptied",
    "every_weight_passes_whole_on_every_process",
    "servers_get_the_whole_weights",
    "what_is_sampled_is_the_whole_models",
    "episodes_of_a_sharded_policy_are_those_of_a_whole_one",
    "nothing_is_left_of_sampling_that_failed",
]


@pytest.mark.parametrize("name", OF_GATHERING)
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.xdist_group("sharded")  # they are started once for both files
@pytest.mark.slow
def test_processes(processes: int, name: str) -> None:
    assert name in CASES
    done, output = outcome(processes)
    assert name in done, output
