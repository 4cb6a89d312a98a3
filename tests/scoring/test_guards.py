"""A reward function can neither fork the run, nor end it, nor close its files without a word."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from grpo_cli.scoring import guards
from grpo_cli.scoring.guards import answer, contained, keeps_files_open, no_exit


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


def test_os_exit_exits_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(guards, "_exit", ended.append)
    with no_exit():
        with no_exit():
            pass
        with pytest.raises(SystemExit):
            os._exit(1)
        monkeypatch.setattr(os, "getpid", lambda: -1)  # a child
        os._exit(2)
    monkeypatch.undo()
    monkeypatch.setattr(guards, "_exit", ended.append)
    os._exit(3)
    assert ended == [2, 3]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(guards, "_exit", lambda code: said.append(f"exit {code}"))
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, text: said.append(text.decode()) if fd == 2 else write(fd, text)
    )
    return said


def test_closed_descriptors_end_the_run_by_name(ended: list[str]) -> None:
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)  # the next one gets its number
    with pytest.raises(OSError, match="Bad file descriptor"), keeps_files_open("mine"):
        os.close(free)
    assert ended[0].startswith("grpo: reward 'mine' has closed file descriptors of the run; ")
    assert ended[1:] == ["exit 1"]


def test_a_closed_output_ends_the_run_by_name(ended: list[str]) -> None:
    kept = os.dup(1)
    try:
        with keeps_files_open("mine"):
            os.close(1)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert ended[1:] == ["exit 1"]


def test_a_function_may_close_what_it_has_opened(ended: list[str]) -> None:
    with keeps_files_open("mine"):
        os.close(os.open(os.devnull, os.O_RDONLY))
    assert ended == []
