"""Keeps the results of check.py: a line for each case, and the files made from all lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # stage, case, status, seconds, figures, error


class Results:
    """Appends rows to `results.jsonl`, and rewrites `results.json` and `table.md` each time."""

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.machine = folder, machine
        self.rows: list[Row] = []
        (folder / "results.jsonl").write_text("", encoding="utf-8")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with (self.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        everything = {"machine": self.machine, "rows": self.rows}
        self._write("results.json", json.dumps(everything, indent=1) + "\n")
        self._write("table.md", table(self.machine, self.rows))

    def _write(self, name: str, text: str) -> None:
        """Writes a file that is complete whenever the program is ended."""
        new = self.folder / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.folder / name)


def table(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """Returns a Markdown table for each stage, with a column for each figure of its cases."""
    parts = [", ".join(f"{key} {value}" for key, value in machine.items())]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = [row for row in rows if row["stage"] == stage]
        names = list(dict.fromkeys(name for row in own for name in row["figures"]))
        lines = ["| " + " | ".join([stage, "status", *names]) + " |"]
        lines.append("| --- " * (2 + len(names)) + "|")
        for row in own:
            cells = [cell(row["figures"].get(name)) for name in names]
            lines.append("| " + " | ".join([row["case"], row["status"], *cells]) + " |")
        lines += [""] if any(row["error"] for row in own) else []
        lines += [f"- {row['case']}: {row['error']}" for row in own if row["error"]]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def cell(value: Any) -> str:
    """Writes a figure: three digits of a fraction, thousands apart."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
