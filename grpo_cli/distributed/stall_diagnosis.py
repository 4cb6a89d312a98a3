"""Finds the process that stalls a job, from the states that all processes publish.

Pure functions for supervisor.py. Times are `time.monotonic` of the observing process, from the
moment at which a state was read, so that clocks need not agree.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from grpo_cli.distributed import heartbeat


@dataclass(frozen=True)
class Seen:
    """The published state of a process, and when this process first read it."""

    raw: bytes
    at: float
    done: bool  # whether the process has ended cleanly
    state: heartbeat.State

    @classmethod
    def of(cls, raw: bytes, now: float) -> Seen:
        """Parses a message of `status_message`."""
        _, done, *state = json.loads(raw)
        return cls(raw, now, done, heartbeat.State(*state))

    @property
    def beaten(self) -> float:
        """The time of its last heartbeat."""
        return self.at - self.state.quiet

    @property
    def doing(self) -> str:
        """Its stage and step, in words."""
        return doing(self.state)


def status_message(number: int, state: heartbeat.State, *, done: bool) -> str:
    """Formats one status message; the sequence number makes consecutive messages differ."""
    return json.dumps([number, done, *state])


def limit(states: Iterable[heartbeat.State], stall: float) -> float:
    """Returns the seconds without a heartbeat that count as a stall; longer during the start."""
    starts = any(state.stage == heartbeat.START for state in states)
    return stall * (heartbeat.START_TIMES if starts else 1.0)


def silent(running: Mapping[int, Seen], now: float, seconds: float) -> list[int]:
    """Returns the ranks without a new message for `seconds`, whose threads are blocked."""
    return [rank for rank, seen in running.items() if now - seen.at > seconds]


def quiet(running: Mapping[int, Seen], mute: Collection[int], now: float) -> float:
    """Returns the seconds since the last heartbeat of any process that is not in `mute`."""
    return now - max(seen.beaten for rank, seen in running.items() if rank not in mute)


def slowest(running: Mapping[int, Seen], mute: Collection[int], now: float) -> tuple[int, str]:
    """Finds the process that stalls a job.

    Args:
        running: the processes that have not ended, by rank; at least one.
        mute: the ranks returned by `silent`.

    Returns:
        (its rank, the message's text after its name).
    """
    busy = [rank for rank, seen in running.items() if rank in mute or not seen.state.waiting]
    rank = min(busy or running, key=lambda rank: running[rank].beaten)
    seen = running[rank]
    if rank in mute:
        what = f", last in {seen.doing}, has given no answer for {duration(now - seen.at)} "
        what += "(stopped, in code that holds the GIL, or its machine hangs)"
    else:
        what = f" has been in {seen.doing} for {duration(now - seen.at + seen.state.inside)}"
    others = len(busy) - 1
    if not busy:
        what += ", and all wait for one another"
    elif others > 0:
        what += f"; {others} more are busy, the others wait"
    elif len(running) > 1:
        what += ", the others wait"
    return rank, what


def doing(state: heartbeat.State) -> str:
    """Returns stage and step, as `reward of step 3`; only the stage before the first step."""
    return state.stage if state.step is None else f"{state.stage} of step {state.step}"


def duration(seconds: float) -> str:
    """Formats seconds as `40 s` or `12 minutes`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
