"""A reward function cannot fork the run."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from grpo_cli.scoring.guards import contained
from grpo_cli.scoring.pool_worker import answer


def status_of_child(function: Callable[[], Any]) -> tuple[int, bool]:
    """The exit code of what `function` has forked, and whether this process is still the parent."""
    own = os.getpid()
    function()
    if os.getpid() != own:
        os._exit(77)  # a second run would go on here
    _, status = os.waitpid(-1, 0)
    return os.waitstatus_to_exitcode(status), True


def forks(**_: Any) -> list[float]:
    os.fork()
    return [1.0]


def forks_and_raises(**_: Any) -> list[float]:
    if os.fork() == 0:
        raise KeyboardInterrupt
    return [1.0]


async def forks_in_a_coroutine() -> list[float]:
    return forks()


@pytest.mark.programs
@pytest.mark.parametrize("function", [forks, forks_and_raises])
def test_a_child_ends_where_its_parent_returns(function: Callable[..., list[float]]) -> None:
    assert status_of_child(lambda: answer(function, {})) == (1, True)


@pytest.mark.programs
def test_a_child_of_a_coroutine_ends_there_too() -> None:
    assert status_of_child(lambda: asyncio.run(contained(forks_in_a_coroutine()))) == (1, True)
