"""Who holds a job up, by what each process has told of itself. Pure; `watch.py` asks.

Seconds are those of `time.monotonic` on the process that judges: what another one tells counts from
the moment at which it was read, so that clocks need not agree.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from grpo_cli import heartbeat


@dataclass(frozen=True)
class Seen:
    """What a process has told of itself, and when this process saw that first."""

    raw: bytes
    at: float
    done: bool  # it has ended in good order
    state: heartbeat.State

    @classmethod
    def of(cls, raw: bytes, now: float) -> Seen:
        """From what it wrote: `told` of its state."""
        _, done, *state = json.loads(raw)
        return cls(raw, now, done, heartbeat.State(*state))

    @property
    def beaten(self) -> float:
        """When it last got on."""
        return self.at - self.state.quiet

    @property
    def doing(self) -> str:
        return doing(self.state)


def told(number: int, state: heartbeat.State, *, done: bool) -> str:
    """What a process writes of itself. The number makes each word of it a new one."""
    return json.dumps([number, done, *state])


def limit(states: Iterable[heartbeat.State], stall: float) -> float:
    """Seconds without a beat that are a stall; one that still starts holds up the others."""
    starts = any(state.stage == heartbeat.START for state in states)
    return stall * (heartbeat.START_TIMES if starts else 1.0)


def silent(running: Mapping[int, Seen], now: float, seconds: float) -> list[int]:
    """Ranks that have told nothing new for so long: their threads do not run."""
    return [rank for rank, seen in running.items() if now - seen.at > seconds]


def quiet(running: Mapping[int, Seen], now: float) -> float:
    """Seconds in which no process got on."""
    return now - max(seen.beaten for seen in running.values())


def slowest(running: Mapping[int, Seen], mute: Collection[int], now: float) -> tuple[int, str]:
    """Who holds up a job that stands still, and what there is to say after its name.

    Args:
        running: by rank, at least one. mute: of these, the silent ones.
    """
    busy = [rank for rank, seen in running.items() if rank in mute or not seen.state.waiting]
    rank = min(busy or running, key=lambda rank: running[rank].beaten)
    seen = running[rank]
    if rank in mute:
        what = f", last in {seen.doing}, has given no answer for {spelt(now - seen.at)} "
        what += "(stopped, in code that holds the GIL, or its machine hangs)"
    else:
        what = f" has been in {seen.doing} for {spelt(now - seen.at + seen.state.inside)}"
    others = len(busy) - 1
    if not busy:
        what += ", and all wait for one another"
    elif others > 0:
        what += f"; {others} more are busy, the others wait"
    else:
        what += ", the others wait"
    return rank, what


def missing(before: Mapping[int, Seen], after: Mapping[int, Seen]) -> tuple[int, str] | None:
    """Whom the others may have waited for in vain, and what it does; None: nobody stands out.

    Args:
        before, after: the others that still run, at two moments some polls apart.
    """
    mute = [rank for rank in after if rank in before and before[rank].raw == after[rank].raw]
    busy = [rank for rank in after if not after[rank].state.waiting]
    if not mute and not busy:
        return None
    rank = min(mute or busy, key=lambda rank: after[rank].beaten)
    verb = "has fallen silent, last in" if mute else "is in"
    return rank, f"{verb} {after[rank].doing}"


def doing(state: heartbeat.State) -> str:
    return state.stage if state.step is None else f"{state.stage} of step {state.step}"


def spelt(seconds: float) -> str:
    """`40 s` or `12 minutes`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
