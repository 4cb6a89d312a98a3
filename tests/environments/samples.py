"""Environments and tools for tests of sessions: light to import in a worker process."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from grpo_cli.environments.protocol import Message, Observation


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


async def wait_for(text: str, seconds: float = 0.0) -> str:
    """Returns a text after a while.

    Args:
        text: the text.
        seconds: how long it takes.
    """
    await asyncio.sleep(seconds)
    return text


def does(what: str) -> Any:
    """Does what a fault does.

    Args:
        what: the fault.
    """
    return fault(what)


def fault(what: str) -> Any:
    """Does what a word says: hang, die, raise, ...; returns the process's number otherwise."""
    if what == "hang":
        while True:
            pass
    if what == "sleep":
        time.sleep(3600)
    if what == "deaf":  # no exception ends it
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(3600)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        os._exit(0)
    if what == "exit":
        sys.exit(3)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "raise":
        raise RuntimeError("on purpose")
    if what == "memory":
        return bytearray(64 * 2**30)
    if what == "fork" and os.fork() == 0:
        time.sleep(3600)
    if what == "bytes":
        return b"\xff\x00abc\xd8"
    if what == "control":
        return "a\x00b\x1b[31mc\ud800d\n\t"
    if what == "none":
        return None
    if what == "object":
        return lambda: 0
    if what == "number":  # too long to be written
        return 10**5000
    if what == "print":
        print("printed by an environment")
    return os.getpid()


class Guess:
    def __init__(self, limit: int = 32) -> None:
        self.limit = limit

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.number = random.Random(seed).randrange(self.limit)
        return Observation([{"role": "user", "content": f"Below {self.limit}?"}])

    def step(self, message: Message) -> Observation:
        guess = int(message["content"])
        if guess == self.number:
            return Observation(reward=1.0, done=True)
        hint = "higher" if guess < self.number else "lower"
        return Observation([{"role": "user", "content": hint}], reward=0.0)


class Counter:
    def reset(self, start: int = 0, **columns: Any) -> str | None:
        self.count = start
        self.columns = columns
        return f"You are at {start}." if start else None

    def increment(self, step: int) -> int:
        """Counts.

        Args:
            step: by how much.
        """
        self.count += step
        return self.count

    async def later(self, step: int) -> int:
        """Counts later.

        Args:
            step: by how much.
        """
        await asyncio.sleep(0)
        return self.increment(step)

    def get_reward(self) -> float:
        return float(self.count)


class Draws:
    """Draws global random numbers, at reset and at each step; takes no seed."""

    def reset(self, row: dict[str, Any]) -> Observation:
        return Observation([{"role": "user", "content": self.draw()}])

    def step(self, message: Message) -> Observation:
        return Observation([{"role": "user", "content": self.draw()}])

    def draw(self) -> str:
        return f"{random.random()} {np.random.rand()} {np.random.randn()}"


class Faulty:
    """Does in one of its methods what the row says: {"in": "step", "what": "hang"}."""

    def __init__(self, init: str = "") -> None:
        fault(init)

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.row = row
        return self.does("reset")

    def step(self, message: Message) -> Any:
        self.row = {**self.row, **message.get("row", {})}
        return self.does("step")

    def get_reward(self) -> Any:
        if "reward" in self.row:
            return self.row["reward"]
        self.does("get_reward")
        return 1.0

    def does(self, where: str) -> Any:
        if "returns" in self.row and self.row.get("in") == where:
            return self.row["returns"]
        result = fault(self.row.get("what", "") if self.row.get("in") == where else "")
        if isinstance(result, int):
            return Observation([{"role": "user", "content": str(result)}])
        return Observation([{"role": "user", "content": result}])


class Flaky:
    """Pays for each turn by its length; in a third of the groups it breaks at the second turn."""

    def reset(self, row: Any, seed: int) -> Observation:
        self.turns, self.breaks = 0, seed % 3 == 0
        return Observation([{"role": "user", "content": "Go on."}])

    def step(self, message: Any) -> Observation:
        self.turns += 1
        if self.breaks and self.turns == 2:
            raise RuntimeError("the server is gone")
        reply = [{"role": "user", "content": "More."}]
        return Observation(reply, reward=len(message["content"]) % 4 / 4, done=self.turns == 3)


class Waits:
    """An environment that waits on the network, as it were."""

    now = most = 0

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.row = row
        return Observation()

    async def step(self, message: Message) -> Observation:
        if message["content"] == "block":
            time.sleep(self.row["seconds"])
            return Observation()
        Waits.now += 1
        Waits.most = max(Waits.most, Waits.now)
        try:
            await asyncio.sleep(self.row["seconds"])
        finally:
            Waits.now -= 1
        return Observation(metrics={"most": float(Waits.most)})

    async def get_reward(self) -> float:
        return 0.5


class Numbered:
    made = 0

    def __init__(self) -> None:
        Numbered.made += 1
        self.number = Numbered.made

    def reset(self) -> str:
        return str(self.number)


class Closes:
    """Writes a file when it is closed, and raises an error."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.file = self.folder / str(row["n"])
        return Observation()

    def step(self, message: Message) -> Observation:
        return Observation()

    def close(self) -> None:
        self.file.write_text("")
        raise RuntimeError("never opened")
