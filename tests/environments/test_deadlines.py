"""Deadlines and random streams of calls that share a thread."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from grpo_cli.environments.deadlines import (
    GRACE,
    Deadlines,
    Mark,
    Run,
    Streams,
    seed_everything,
)


@pytest.fixture
def mark() -> Mark:
    with tempfile.TemporaryFile() as shared:
        shared.truncate(Mark.SIZE)
        return Mark(shared.fileno())


def run(number: int = 1, streams: Streams | None = None) -> Run:
    return Run(number, streams or Streams(), lambda: None)


def call(deadlines: Deadlines, coroutine: Coroutine[Any, Any, Any], number: int = 1) -> Any:
    return asyncio.run(deadlines.call(run(number), coroutine))


def test_the_mark_says_which_call_holds_the_thread_and_until_when(mark: Mark) -> None:
    deadlines = Deadlines(10.0, mark)
    seen = []

    async def looks() -> str:
        seen.append(mark.read())
        await asyncio.sleep(0)
        seen.append(mark.read())
        return "result"

    begun = time.monotonic()
    assert call(deadlines, looks(), 5) == "result"
    assert [number for number, *_ in seen] == [5, 5]
    assert all(begun + 10 <= until - GRACE <= time.monotonic() + 10 for _, until, _ in seen)
    assert mark.read()[0] == 0
    mark.beat()
    assert begun <= mark.read()[2] <= time.monotonic()


def test_random_streams_belong_to_sessions() -> None:
    deadlines = Deadlines()
    one, two = Streams(), Streams()

    async def seeds(seed: int) -> None:
        seed_everything(seed)

    async def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(np.random.randn())

    async def tries() -> list[Any]:
        found = []
        for streams, coroutine in (
            (one, seeds(1)), (two, seeds(1)), (one, draws()), (two, draws()), (two, draws()),
            (one, draws()),
        ):  # fmt: skip
            found.append(await deadlines.call(run(1, streams), coroutine))
        return found[2:]

    a, b, c, d = asyncio.run(tries())
    assert a == b
    assert c == d
    assert a != c
