"""Writes the report of a run, or of two, as one HTML file that needs no network.

    write([read("outputs/a"), read("outputs/b")], Path("report.html"))

The page holds the data in blocks of gzip in base64, which the browser unpacks. No data of a run is
written into the HTML itself or becomes markup: the scripts only set text. The page's content
security policy allows these scripts, by their hashes, and no connection.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from grpo_cli import __version__
from grpo_cli.checkpoints import paths
from grpo_cli.config.interpolation import masker
from grpo_cli.files import write_text
from grpo_cli.reporting.report import completions, curves, facts
from grpo_cli.reporting.report.completions import ReportLimits
from grpo_cli.reporting.run_folder import RunFolder

if TYPE_CHECKING:
    from grpo_cli.training.callbacks import Event

# In the order in which they run.
SCRIPTS = (
    "vendor/uPlot.iife.min.js", "data.js", "elements.js", "charts.js", "overview.js", "curves.js",
    "time.js", "rewards.js", "tokens.js", "conversation.js", "completions.js", "recipe.js",
    "compare.js", "main.js",
)  # fmt: skip
NAME = "report.html"  # in the run's folder


@dataclass(frozen=True)
class RunData:
    """The parts of a run that the report shows."""

    head: dict[str, Any]  # facts and curves: small, read first
    completions: dict[str, Any]


class Report:
    """Writes report.html into the folder of a run that ends (`log.report`)."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def on_end(self, event: Event) -> None:
        if event.rank:
            return
        path = event.folder / NAME
        try:
            write([read(RunFolder(event.folder))], path)
        except Exception as error:  # whatever it is: the run is done; the report can be made later
            why, run = f"{type(error).__name__}: {error}", paths.shown(event.folder)
            self.say(f"{paths.shown(path)}: not written ({why}); grpo report {run} writes it")
        else:
            self.say(f"report: {paths.shown(path)}")


def read(run: RunFolder, limits: ReportLimits | None = None) -> RunData:
    """Reads the report's data from the folder of a run, finished or not.

    Raises:
        UserError: a file of the run is damaged.
    """
    metrics = run.metrics()
    head = {
        **facts.of_run(run, metrics),
        "curves": curves.columns(metrics),
        "alarms": run.alarms(),
        "plan": run.plan(),
    }
    return RunData(head, completions.read(run, limits or ReportLimits()))


def write(runs: Sequence[RunData], path: Path, compared: dict[str, Any] | None = None) -> int:
    """Writes the report of one run, or of two side by side; returns the size of the file in bytes.

    The file is replaced atomically: a reader sees the old one or the new one.

    Args:
        compared: for two runs, their paired evaluations and the differences of their recipes.
    """
    write_text(path, html(runs, compared))
    return path.stat().st_size


def is_report(path: Path) -> bool:
    """Returns whether a file is an earlier report."""
    with path.open("rb") as file:
        head = file.read(4096)
    return head.startswith(b"<!doctype html>") and b"grpo report</title>" in head


def html(runs: Sequence[RunData], compared: dict[str, Any] | None = None) -> str:
    """Returns the HTML of the page."""
    head = {
        "runs": [run.head for run in runs],
        "compared": compared,
        "version": __version__,
        "written": int(time.time()),
    }
    mask = masker()
    blocks = {"head": json_block(head, mask)}
    for number, run in enumerate(runs):
        blocks[f"completions-{number}"] = json_block(run.completions, mask)
    script = "\n".join(["(() => {", "'use strict';", *map(_asset, SCRIPTS), "})();"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    template = jinja2.Environment(
        loader=jinja2.PackageLoader("grpo_cli.reporting.report", "assets"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")
    return template.render(
        title=mask(" and ".join(run.head["name"] for run in runs))
        .encode("utf-8", "replace")
        .decode(),
        blocks={name: Markup(block) for name, block in blocks.items()},
        style=Markup("\n".join(map(_asset, ("vendor/uPlot.min.css", "style.css")))),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def json_block(value: Any, mask: Callable[[str], str]) -> str:
    """Returns a value as a block of the page, without the secrets of the environment."""
    text = json.dumps(
        masked_tree(value, mask), ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    data = gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)
    return base64.b64encode(data).decode("ascii")


def masked_tree(value: Any, mask: Callable[[str], str]) -> Any:
    """Returns a tree of JSON without the secrets of the environment, NaN and infinity."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        names = {key: "null" if key is None else str(key) for key in value}  # as JSON writes them
        return {mask(names[key]): masked_tree(one, mask) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked_tree(one, mask) for one in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
