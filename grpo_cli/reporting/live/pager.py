"""The place of a viewer in the stored completions of a run that goes on."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from grpo_cli.reporting.live.completions import Pages, stamp
from grpo_cli.reporting.live.following import Followed


@dataclass
class Place:
    """The completion that one panel shows: its place in an order of the step's completions."""

    kind: str  # good, bad or all
    index: int = 0  # in that order


class Pager:
    """Shows the newest step's completions, until the viewer turns to a page: then that step's."""

    def __init__(self, run: Followed) -> None:
        self.run = run
        self.pages: Pages | None = None
        self.step = 0  # whose completions `pages` are
        self.kept: int | None = None  # the step that the viewer chose; None: the newest
        self.places = {"good": Place("good"), "bad": Place("bad")}

    def load(self) -> bool:
        """Reads the file of the step that is due; returns whether it is another than before."""
        stored = self.run.stored
        if self.kept not in stored:  # removed by overwrite=true
            self.kept = None
        wanted = self.kept if self.kept is not None else (stored[-1] if stored else None)
        if wanted is None:
            had_pages, self.pages = self.pages is not None, None
            return had_pages
        path = self.run.folder.completions(wanted)
        with contextlib.suppress(OSError, ValueError):
            shown = None if self.pages is None else (self.pages.path, self.pages.stamp)
            if shown == (path, stamp(path)):
                return False
            self.pages, self.step = Pages(path), wanted
            for place in self.places.values():
                place.index = 0
            return True
        return False

    def order(self, panel: str) -> list[int]:
        """Returns the lines that a panel pages through."""
        return [] if self.pages is None else self.pages.orders[self.places[panel].kind]

    def line(self, panel: str) -> int | None:
        """Returns the line of the file that a panel shows, None if there is none."""
        order, place = self.order(panel), self.places[panel]
        return order[min(place.index, len(order) - 1)] if order else None

    def turn(self, panel: str, by: int) -> None:
        """Moves a panel to another completion of the step, which is kept from now on."""
        self.keep()
        most = max(0, len(self.order(panel)) - 1)
        self.places[panel].index = min(max(0, self.places[panel].index + by), most)

    def choose(self, panel: str, kind: str) -> None:
        """Lets a panel page through another kind of completions, from their first."""
        self.places[panel] = Place(kind)

    def keep(self) -> None:
        """Stays with the step that is shown, whatever is stored later."""
        if self.pages is not None:
            self.kept = self.step

    def follow(self) -> None:
        """Shows the newest step's completions again, now and when newer ones are stored."""
        self.kept = None

    def turn_step(self, by: int) -> None:
        """Moves to the completions of an earlier (-1) or later (1) step."""
        stored = self.run.stored
        if self.pages is None or not stored:
            return
        later = [step for step in stored if step > self.step]
        earlier = [step for step in stored if step < self.step]
        if by < 0 and earlier:
            self.kept = earlier[-1]
        elif by > 0 and later:
            self.kept = later[0]
