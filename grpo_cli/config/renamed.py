"""Maps the names that other trainers, and earlier versions, use to our knobs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from grpo_cli.errors import UserError
from grpo_cli.files import read_yaml


class OtherName(NamedTuple):
    """A row of other_names.yaml: names for one knob, or names without a counterpart."""

    names: list[str]  # last part of a key, or a complete key
    here: str = ""  # our words, in Markdown; "" if there is no counterpart
    but: str = ""  # how the two differ, or why there is no counterpart

    def hint(self, name: str) -> str:
        """Returns the sentence that follows "there is no such key."."""
        ours = self.here.format(name=name)
        text = f"It is called {ours} here" if ours else "It has no counterpart here"
        return f" {text}{f': {self.but}' if self.but else ''}.".replace("`", "")


def sections() -> dict[str, list[OtherName]]:
    """Returns the rows of other_names.yaml by section, in the order of the file."""
    entries = read_yaml(Path(__file__).with_name("other_names.yaml"))
    return {name: [OtherName(**row) for row in rows] for name, rows in entries.items()}


@cache
def other_names() -> dict[str, OtherName]:
    """Returns the row of each name."""
    return {name: row for rows in sections().values() for row in rows for name in row.names}


def drop_schedules(tree: dict[str, Any]) -> None:
    """Drops the section `schedules` of a stored recipe; a UserError if it is not empty."""
    if tree.pop("schedules", None):
        raise UserError(
            "schedules: knobs no longer follow the step; delete this section of the stored "
            "recipe.yaml, and resume with the new value at the step where it should change."
        )
