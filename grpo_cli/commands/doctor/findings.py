"""The findings of `grpo doctor`, and the deadline that each of its checks has."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

OK, NOTE, BROKEN = "ok", "note", "broken"


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    name: str
    value: str
    status: str = OK  # note: may matter; broken: keeps grpo, or the given recipe, from running
    advice: str = ""  # what to do
    short: str = ""  # the value in a list of several findings


@dataclass(frozen=True)
class Check:
    """A part of the report: a function that finds its lines, and the seconds that it may take."""

    section: str
    name: str  # of the line that is printed if the check itself fails
    find: Callable[[], Iterable[Finding]]
    seconds: float = 10.0


def run_all(checks: Sequence[Check]) -> Iterator[tuple[str, list[Finding]]]:
    """Runs all checks at the same time; yields the section and the findings of each, in order.

    A check that raises, or is not done at its deadline, is one line. Its thread is a daemon, so
    that a file system which hangs does not keep the command from ending.
    """
    began = time.monotonic()
    started = [(check, _start(check)) for check in checks]
    for check, results in started:
        left = check.seconds - (time.monotonic() - began)
        try:
            yield check.section, results.get(timeout=max(left, 0.01))
        except queue.Empty:
            said = f"no answer within {check.seconds:g} s"
            yield check.section, [Finding(check.name, said, NOTE)]


def _start(check: Check) -> queue.Queue[list[Finding]]:
    results: queue.Queue[list[Finding]] = queue.Queue()

    def find() -> None:
        try:
            found = [*check.find()]
        except (Exception, SystemExit) as error:  # a line, whatever is wrong with the machine
            first = (str(error).splitlines() or [""])[0][:200]
            found = [Finding(check.name, f"cannot be found out: {type(error).__name__}: {first}",
                             NOTE)]  # fmt: skip
        results.put(found)

    threading.Thread(target=find, name=f"doctor-{check.name}", daemon=True).start()
    return results
