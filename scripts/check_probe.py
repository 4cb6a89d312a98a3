"""Probes recipes of which half can learn and half cannot, and compares the verdicts.

    python scripts/check_probe.py [--only NAME ...] [--words prompts=12 samples=8]

Prints a table: what was changed, the verdict that is right, the verdict that `grpo probe` gave, the
name of its first finding, and seconds. Exit code 1 if a verdict is wrong. On two cores it takes
about five minutes the first time, most of them to build the tiny models, which are then in grpo's
cache.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_cli import cli


@dataclass(frozen=True)
class Case:
    """A recipe, the verdict that is right, and the finding that has to come first."""

    name: str
    words: tuple[str, ...]
    finding: str | None = None  # None: it can learn


REGEX = ("reward=[regex]",)
CASES = (
    Case("arithmetic_tiny", ("recipe=arithmetic_tiny",)),
    Case("arithmetic_tiny_lora", ("recipe=arithmetic_tiny_lora",)),
    Case("gsm8k_tiny", ("recipe=gsm8k_tiny",)),
    Case("calculator", ("recipe=calculator",)),
    Case("guess_number", ("recipe=guess_number",)),
    Case("shapes_tiny", ("recipe=shapes_tiny",)),
    Case(
        "the reward reads another column",
        (
            "dataset.train=rows.jsonl",
            "dataset.columns={right: answer, answer: id}",
            "dataset.solution='{right}'",
            "dataset.eval=null",
            "eval.every=0",
        ),
        "constant",
    ),
    Case("the reward accepts everything", (*REGEX, "reward.regex.args.pattern='.*'"), "solved"),
    Case(
        "a form that the model never writes",
        (*REGEX, r"reward.regex.args.pattern='<answer>\\d+</answer>'"),
        "constant",
    ),
    Case(
        "completions too short to end",
        ("generation.max_completion_tokens=1",),  # nearly all answers have two digits
        "truncated",
    ),
    Case("temperature near 0", ("generation.temperature=0.001",), "identical"),
    Case(
        "every prompt is cut",
        ("dataset.max_prompt_tokens=2", "dataset.overlong_prompts=cut"),
        "prompts_cut",
    ),
)


def write_rows(path: Path) -> None:
    """Writes the rows of arithmetic_tiny with a further column, `id`."""
    import grpo_cli

    rows = Path(grpo_cli.__file__).parent / "samples" / "arithmetic_train.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, line in enumerate(rows.read_text("utf-8").splitlines()):
            file.write(json.dumps({**json.loads(line), "id": f"row-{number}"}) + "\n")


def probed(case: Case, more: Sequence[str]) -> tuple[int, str, float]:
    """Returns (exit code, name of the first finding, seconds)."""
    words = (
        case.words
        if case.words[0].startswith("recipe=")
        else ("recipe=arithmetic_tiny", *case.words)
    )
    out, began = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out):
        code = cli.run_command(["probe", *words, *more, "device=cpu", "--json"])
    found = json.loads(out.getvalue())["findings"] if code in (0, 3) else []
    first = ", ".join(f"{f['kind']} {f['name']}" for f in found) or "none"
    return code, first, time.monotonic() - began


def main() -> int:
    """Probes the cases and prints the table; returns 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--words", nargs="*", default=[], help="such as prompts=12 samples=8")
    chosen, more = vars(parser.parse_args()).values()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    wrong = 0
    table = Table("recipe", "right", "verdict", "findings", "s")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_rows(Path("rows.jsonl"))
        for case in CASES:
            if chosen and case.name not in chosen:
                continue
            code, found, seconds = probed(case, more)
            first = found.split(",")[0].removeprefix("stops ")
            is_right = code == (0 if case.finding is None else 3)
            is_right = is_right and case.finding in (None, first)
            wrong += not is_right
            verdict = {0: "can learn", 3: "cannot learn"}.get(code, f"exit code {code}")
            table.add_row(
                case.name,
                "can learn" if case.finding is None else "cannot learn",
                verdict if is_right else f"{verdict} (WRONG)",
                found,
                f"{seconds:.0f}",
            )
            print(f"{case.name}: {verdict}: {found}", file=sys.stderr, flush=True)
    Console(width=140).print(table)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
