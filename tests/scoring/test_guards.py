"""A reward function can neither fork the run nor end it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from grpo_cli.scoring.guards import contained, no_second_run
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


def test_the_parent_goes_on() -> None:
    with no_second_run():
        pass
    assert answer(lambda: [1.0], {}).values == [1.0]


def test_a_coroutine_that_exits_raises_an_error_instead() -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        asyncio.run(contained(leaves()))
