"""Finds the process that stalls a job, from the states that all processes publish.

Pure functions for supervisor.py. Times are `time.monotonic` of the observing process, from the
moment at which a state was read, so that clocks need not agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from grpo_cli.distributed import heartbeat


@dataclass(frozen=True)
class PublishedState:
    """The published state of a process, and when this process first read it."""

    raw: bytes
    at: float
    done: bool  # whether the process has ended cleanly
    state: heartbeat.Activity

    @classmethod
    def of(cls, raw: bytes, now: float) -> PublishedState:
        """Parses a message of `status_message`."""
        _, done, *state = json.loads(raw)
        return cls(raw, now, done, heartbeat.Activity(*state))

    @property
    def beaten(self) -> float:
        """The time of its last heartbeat."""
        return self.at - self.state.quiet

    @property
    def doing(self) -> str:
        """Its stage and step, as `reward of step 3`; only the stage before the first step."""
        stage, step, *_ = self.state
        return stage if step is None else f"{stage} of step {step}"


def status_message(number: int, state: heartbeat.Activity, *, done: bool) -> str:
    """Formats one status message; the sequence number makes consecutive messages differ."""
    return json.dumps([number, done, *state])


def silent(running: Mapping[int, PublishedState], now: float, seconds: float) -> list[int]:
    """Returns the ranks without a new message for `seconds`, whose threads are blocked."""
    return [rank for rank, seen in running.items() if now - seen.at > seconds]


def diagnose(
    running: Mapping[int, PublishedState],
    mute: Collection[int],
    now: float,
    stall: float,
    name: Callable[[int], str],
) -> tuple[int, str] | None:
    """Finds the process that stalls a job.

    Args:
        running: the processes that have not ended, by rank; one at least is not in `mute`.
        mute: the ranks returned by `silent`.
        stall: seconds without a heartbeat of any process that count as a stall;
            `heartbeat.START_TIMES` as many while a process starts.
        name: returns the name of a process.

    Returns:
        (its rank, a message); None if there is no stall.
    """
    starts = any(seen.state.stage == heartbeat.START for seen in running.values())
    limit = stall * (heartbeat.START_TIMES if starts else 1.0)
    if now - max(seen.beaten for rank, seen in running.items() if rank not in mute) <= limit:
        return None
    busy = [rank for rank, seen in running.items() if rank in mute or not seen.state.waiting]
    rank = min(busy or running, key=lambda rank: running[rank].beaten)
    seen = running[rank]
    text = f"stalled for {duration(limit)}: {name(rank)}"
    if rank in mute:
        text += f", last in {seen.doing}, has given no answer for {duration(now - seen.at)} "
        text += "(stopped, in code that holds the GIL, or its machine hangs)"
    else:
        text += f" has been in {seen.doing} for {duration(now - seen.at + seen.state.inside)}"
    others = len(busy) - 1
    if not busy:
        text += ", and all wait for one another"
    elif others > 0:
        text += f"; {others} more are busy, the others wait"
    elif len(running) > 1:
        text += ", the others wait"
    return rank, text


def duration(seconds: float) -> str:
    """Formats seconds as `40 s` or `12 minutes`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
