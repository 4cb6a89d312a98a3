"""Reward functions for tests of the pool: modules of their own, light to import in a worker."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_cli.rewards import reward
from tests.environments.samples import fault


def size(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def batch_size(completions: list[str]) -> list[float]:
    return [float(len(completions))] * len(completions)


def does(completions: list[str], answer: list[Any] | None = None) -> list[Any]:
    """What the completion says: hang, die, raise, ...; the process's number otherwise."""
    (text,) = completions
    if text == "fork":
        os.fork()
        return [float(os.getpid())]
    if text == "two":
        return [1.0, 2.0]
    if text == "unpicklable":
        return [lambda: 0]
    if text == "nan":
        return [float("nan")]
    if text.startswith(("children", "session", "daemon")):
        own_session = not text.startswith("children")
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=own_session
        )
        Path(text.partition(" ")[2]).write_text(f"{os.getpid()} {child.pid}")
        if not text.startswith("daemon"):
            time.sleep(3600)
    return [float(fault(text))]


def logs(
    completions: list[str],
    log_metric: Callable[[str, float], None],
    log_extra: Callable[[str, list[Any]], None],
) -> list[float]:
    log_metric("length", len(completions[0]))
    log_extra("shouted", [c.upper() for c in completions])
    return [1.0] * len(completions)


def clashes(completions: list[str], log_metric: Callable[[str, float], None]) -> list[float]:
    log_metric("advantage_share", 1.0)
    return [1.0] * len(completions)


def miscounts(completions: list[str], log_extra: Callable[[str, list[Any]], None]) -> list[float]:
    log_extra("one", [1])
    return [1.0] * len(completions)


def log_of(completions: list[str], trainer_state: Any) -> list[float]:
    """The sum of `x` over the lines of the log."""
    return [sum(line["x"] for line in trainer_state.log_history)] * len(completions)


def counted(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Notes in a file what it was called with, each behind a null byte."""
    with Path(answer[0]).open("a") as file:
        file.write("\0" + completions[0])
    if completions == ["raise"]:
        raise RuntimeError("counted")
    return [1.0]


MOST = 0  # async calls under way at once, at most
NOW = 0


async def waits(completions: list[str], answer: list[str] | None = None) -> list[float]:
    global MOST, NOW
    NOW += 1
    MOST = max(MOST, NOW)
    try:
        await asyncio.sleep(3600 if completions == ["hang"] else 0.02)
    finally:
        NOW -= 1
    if completions == ["raise"]:
        raise RuntimeError("in a coroutine")
    if completions == ["timeout"]:
        raise TimeoutError
    return [float(len(c)) for c in completions]


async def ends(completions: list[str]) -> list[float]:
    async def leave() -> None:
        sys.exit(3)

    if completions == ["exit"]:
        sys.exit(3)
    if completions == ["interrupt"]:
        raise KeyboardInterrupt
    while completions == ["stubborn"]:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
    if completions == ["cancel"]:
        raise asyncio.CancelledError
    await asyncio.gather(asyncio.create_task(leave()))
    return [1.0]


def batch_without_raise(
    completions: list[str], log_metric: Callable[[str, float], None]
) -> list[float]:
    assert "raise" not in completions
    log_metric("size", len(completions))
    return [float(len(completions))] * len(completions)


async def blocks(completions: list[str]) -> list[float]:
    time.sleep(0.1)
    return [1.0]


def levels(*, level: int = 1) -> str:
    if level > 3:
        raise RuntimeError(f"no such level: {level}")
    return f"capitals, level {level}"


@reward(name="shouting", timeout=30, describe=levels)
def is_shouted(completions: list[str], *, level: int = 1) -> list[float]:
    """1.0 where the completion is in capitals."""
    return [float(c.isupper()) * level for c in completions]


# The same, with what `@reward` declares.


@reward(timeout=30, timeout_value=-1.0)
def does_or_minus_1(completions: list[str]) -> list[Any]:
    return does(completions)


@reward(timeout=30, timeout_value=-2.0)
async def waits_or_minus_2(completions: list[str]) -> list[float]:
    return await waits(completions)


@reward(timeout=30)
def counted_once(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return counted(completions, answer)


@reward(timeout=30)
def logs_once(
    completions: list[str],
    log_metric: Callable[[str, float], None],
    log_extra: Callable[[str, list[Any]], None],
) -> list[float]:
    return logs(completions, log_metric, log_extra)


@reward(timeout=30)
def slowly_once(completions: list[str]) -> list[float]:
    time.sleep(0.05)
    return [1.0]
