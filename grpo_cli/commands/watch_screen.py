"""The screen of `grpo watch`, built with textual: panels, keys, a look at the files each second.

The figures come from `reporting/live/figures.py`, the panels from `reporting/live/panels.py`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widgets import Static

from grpo_cli.reporting.live import figures, panels
from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.live.pager import Pager

WIDE = 120  # columns from which good and bad completions stand side by side
TALL = 40  # rows from which curves have several lines
CURVE_ROWS, ALARMS = 3, 4  # lines of a curve, and of alarms, on a tall screen
FOOTER = "n/p page  ↑↓ scroll  g good  b bad  a all  [ ] step  l newest  ? keys  q quit"
HELP = """\
n →    next completion             p ←    the one before
g      from the highest reward     b      from the lowest reward
a      all, in the order of prompts
↑ ↓    scroll, also PgUp, PgDn, Home, End
tab    the other panel             f      all of the prompt, or its end
[      completions of the step before those shown
]      completions of the step after those shown
l      the newest step, and each newer one as it is stored
q      quit

A page that was turned stays: newer completions are shown after l.
good: above the mean reward of the step; bad: below it.
"""


class Help(ModalScreen[None]):
    """The list of keys; any key closes it."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help Static { width: auto; height: auto; border: round $primary; padding: 0 1; }
    """

    def compose(self) -> ComposeResult:
        yield Static(Text(HELP.rstrip()))

    def on_key(self) -> None:
        self.dismiss()


class Panel(VerticalScroll, can_focus=False):
    """A completion that can be scrolled; its title is on the line above it."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.shown = Static(markup=False)
        self.what: tuple[object, ...] = ()  # identifies what is drawn

    def compose(self) -> ComposeResult:
        yield self.shown


class WatchApp(App[Exception | None]):
    """The live view of a run. Returns the error with which it ended, which `main` raises."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    Static { height: auto; }
    #completions { height: 1fr; }
    Panel { width: 1fr; border-top: solid ansi_bright_black; scrollbar-size-vertical: 1;
            border-title-style: bold; }
    Panel.other { display: none; }
    Screen.wide Panel.other { display: block; }
    Screen.wide Panel.chosen { border-top: solid ansi_green; }
    #keys { color: ansi_bright_black; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "quit", "quit", priority=True),
        Binding("n,right", "turn(1)"),
        Binding("p,left", "turn(-1)"),
        Binding("g", "choose('good')"),
        Binding("b", "choose('bad')"),
        Binding("a", "all"),
        Binding("tab", "other", priority=True),
        Binding("f", "whole_prompt"),
        Binding("left_square_bracket", "turn_step(-1)"),
        Binding("right_square_bracket", "turn_step(1)"),
        Binding("l", "follow"),
        Binding("up,k", "scroll_by(-1)"),
        Binding("down,j", "scroll_by(1)"),
        Binding("pageup", "scroll_by(-10)"),
        Binding("pagedown,space", "scroll_by(10)"),
        Binding("home", "scroll_by(-100000)"),
        Binding("end", "scroll_by(100000)"),
        Binding("question_mark,h", "help"),
    ]

    def __init__(self, followed: Followed, every: float) -> None:
        super().__init__(ansi_color=True)  # the colours of the user's terminal
        self.followed, self.every = followed, every
        self.pager = Pager(followed)
        self.chosen = "good"  # the panel that keys act on
        self.whole_prompt = False
        self.is_looking = False
        self.shape = Size(80, 24)
        self.top, self.curves, self.stages, self.parts = (Static() for _ in range(4))
        self.keys = Static(id="keys")
        self.panels = {"good": Panel("good"), "bad": Panel("bad")}

    def compose(self) -> ComposeResult:
        yield from (self.top, self.curves, self.stages, self.parts)
        with Horizontal(id="completions"):
            yield from self.panels.values()
        yield self.keys

    async def on_mount(self) -> None:
        await self.look()
        self.set_interval(self.every, self.look)

    async def look(self) -> None:
        """Reads what has changed, in a thread: a file system may hang for a while."""
        if self.is_looking:
            return
        self.is_looking = True
        try:
            await asyncio.to_thread(self._read)
        except Exception as error:  # textual would print it with all variables, secrets too
            self.exit(error)
        self.is_looking = False
        self.draw()

    def _read(self) -> None:
        self.followed.poll()
        self.pager.load()

    def on_resize(self, event: Resize) -> None:
        self.shape = event.size
        self.screen.set_class(event.size.width >= WIDE, "wide")
        self.draw()

    def draw(self) -> None:
        """Draws the panels; textual sends the terminal only what is different."""
        try:
            self._draw()
        except Exception as error:
            self.exit(error)

    def _draw(self) -> None:
        run, width = self.followed, self.shape.width
        is_tall = self.shape.height >= TALL
        rows, most_alarms = (CURVE_ROWS, ALARMS) if is_tall else (1, 1)
        self.top.update(panels.header(run, figures.health(run), width, most_alarms))
        self.curves.update(panels.curves(run, width, rows))
        self.stages.update(panels.stages(run, width))
        parts = panels.parts(run, width)
        self.parts.update(parts)
        self.parts.display = is_tall and bool(parts)
        self.keys.update(panels.stacked([Text(FOOTER)], width))
        for name, panel in self.panels.items():
            panel.set_class(name == self.chosen, "chosen")
            panel.set_class(name != self.chosen, "other")
            self._draw_completion(name, panel)

    def _draw_completion(self, name: str, panel: Panel) -> None:
        pager, place = self.pager, self.pager.places[name]
        number, count = pager.line(name), len(pager.order(name))
        title = panels.completion_title(place.kind, pager.step, place.index, count)
        panel.border_title = Text(title + (" (kept)" if pager.kept is not None else "")).markup
        stamp = None if pager.pages is None else (pager.pages.path, pager.pages.stamp)
        what = (stamp, number, self.whole_prompt, count or len(self.followed.recipe))
        if what == panel.what:
            return
        panel.what = what
        if number is None or pager.pages is None:
            panel.shown.update(panels.note(self.followed))
        else:
            lines = panels.completion(pager.pages, number, whole_prompt=self.whole_prompt)
            panel.shown.update(Group(*lines))
        panel.scroll_home(animate=False)

    def action_turn(self, by: int) -> None:
        self.pager.turn(self.chosen, by)
        self.draw()

    def action_choose(self, kind: str) -> None:
        self.chosen = kind
        if self.pager.places[kind].kind != kind:
            self.pager.choose(kind, kind)
        self.draw()

    def action_all(self) -> None:
        self.pager.choose(self.chosen, "all")
        self.draw()

    def action_other(self) -> None:
        self.chosen = "bad" if self.chosen == "good" else "good"
        self.draw()

    def action_whole_prompt(self) -> None:
        self.whole_prompt = not self.whole_prompt
        self.draw()

    def action_scroll_by(self, rows: int) -> None:
        self.pager.keep()
        self.panels[self.chosen].scroll_relative(y=rows, animate=False)
        self.draw()

    async def action_turn_step(self, by: int) -> None:
        self.pager.turn_step(by)
        await self.look()

    async def action_follow(self) -> None:
        self.pager.follow()
        await self.look()

    def action_help(self) -> None:
        self.push_screen(Help())
