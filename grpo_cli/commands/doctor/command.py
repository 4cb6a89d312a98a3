"""`grpo doctor`: prints what this machine has, what is broken, and what recipes lack."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_cli.commands.doctor import machine, recipes
from grpo_cli.commands.doctor.findings import BROKEN, NOTE, OK, Check, Finding, run_all
from grpo_cli.config.compose import recipe_files
from grpo_cli.config.interpolation import publishable
from grpo_cli.config.knob import knob
from grpo_cli.config.schema import Recipe
from grpo_cli.config.words import check_recipe_words, described, parse, split, without_dashes
from grpo_cli.errors import TrainingError

USAGE = """\
grpo doctor [recipe=NAME] [key=value ...] [--json] [--network] [--report]

Prints the versions, devices, sandbox, disk, network, clock and variables of this machine, and what
is missing to train each shipped recipe, or the given one. Nothing is downloaded or changed. Exit
code 1 if something is broken, of the machine or of the given recipe.

"""
WIDTH = 98
NAME_WIDTH = 22
MARKS = {OK: " ", NOTE: "*", BROKEN: "!"}
RECIPES = "recipes"
REPORT = """\
**What I ran:**

**What I expected, and what happened instead (with the complete message):**

"""

Sections = dict[str, list[Finding]]


@dataclass
class Settings:
    """The options of `grpo doctor`."""

    json: bool = knob(False, "Print the findings as JSON.")
    network: bool = knob(False, "Also ask whether the Hugging Face Hub answers.")
    report: bool = knob(False, "Print the text of a bug report in Markdown, to be completed.")


def main(argv: list[str]) -> None:
    """Runs all checks and prints their findings.

    Raises:
        UserError: a mistake on the command line.
        TrainingError: something is broken.
    """
    if {"-h", "--help"} & {*argv}:
        print(USAGE + described(Settings, dashes=True), end="")
        return
    own, words = split(Settings, without_dashes(Settings, argv, "grpo doctor"))
    check_recipe_words(Settings, words)
    settings = parse(Settings, own)
    recipe = recipes.composed(words) if words else None
    folder = Path(recipe.output_dir if isinstance(recipe, Recipe) else "outputs")
    sections: Sections = {}
    for section, findings in run_all(machine.checks(folder, settings.network)):
        sections.setdefault(section, []).extend(findings)
    sections[RECIPES] = of_recipes(words, recipe, sections)
    if settings.json:
        found = {name: [asdict(f) for f in findings] for name, findings in sections.items()}
        print(json.dumps(publishable(found), indent=2, ensure_ascii=False))
    else:
        text = str(publishable("\n".join(lines(sections, words))))
        print(f"{REPORT}```text\n{text}\n```" if settings.report else text)
    if broken := [f.name for findings in sections.values() for f in findings if f.status == BROKEN]:
        raise TrainingError(f"doctor: broken: {', '.join(broken)}.")


def of_recipes(
    words: Sequence[str], recipe: Recipe | Finding | None, sections: Sections
) -> list[Finding]:
    """Returns what the given recipe lacks, line by line, or a line for each shipped one.

    Args:
        recipe: the given one, or what is wrong with it; None: all shipped ones.
        sections: what was found of the machine.
    """
    devices = {f.name: f for f in sections.get("devices", [])}
    if "torch" not in devices or devices["torch"].status == BROKEN:
        return [Finding("recipes", "not checked, since torch cannot be imported", NOTE)]
    gpus = [f.value.partition(",")[0] for name, f in devices.items() if name.startswith("GPU ")]
    if isinstance(recipe, Finding):
        return [recipe]
    if recipe is not None:
        found = within_time(recipe, gpus)
        return found or [Finding(recipe.recipe, "nothing is missing")]
    out = []
    for path in recipe_files():
        shipped = recipes.composed([f"recipe={path.stem}"])
        lacks = [shipped] if isinstance(shipped, Finding) else within_time(shipped, gpus)
        status = NOTE if lacks else OK  # not asked for: nothing that has to work here
        said = "; ".join(f.short or f"{f.name}: {f.value}" for f in lacks)
        out.append(Finding(path.stem, said or "nothing is missing", status))
    return out


def within_time(recipe: Recipe, gpus: Sequence[str]) -> list[Finding]:
    """Returns what a recipe lacks here, found within a deadline."""
    check = Check(RECIPES, recipe.recipe, lambda: recipes.needs(recipe, gpus), 60.0)
    return [f for _, findings in run_all([check]) for f in findings]


def lines(sections: Sections, words: Sequence[str]) -> Iterator[str]:
    """Yields the report, as text."""
    yield " ".join(["grpo doctor", *words]) + time.strftime(", %Y-%m-%d %H:%M %z")
    for name, findings in sections.items():
        yield f"\n{name}"
        for finding in findings:
            head = f"{MARKS[finding.status]} {finding.name:{NAME_WIDTH}} "
            text = finding.value + (f" -> {finding.advice}" if finding.advice else "")
            yield textwrap.fill(
                " ".join(text.split()), WIDTH, initial_indent=head,
                subsequent_indent=" " * (NAME_WIDTH + 3), break_on_hyphens=False,
                break_long_words=False,
            )  # fmt: skip
    yield "\n! broken   * may matter   -> what to do"
    yield (
        "Paste all of this into a bug report (--report: with the questions to answer). Secrets and "
        "your home\nfolder are left out."
    )
