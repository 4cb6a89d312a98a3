"""`grpo explain KEY`: prints the value of a knob in a recipe, and where it comes from."""

from __future__ import annotations

import dataclasses
import io
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.checkpoints import provenance
from grpo_cli.config import origins, parsing
from grpo_cli.config.compose import compose_and_call, split_options, split_recipe
from grpo_cli.config.interpolation import masked
from grpo_cli.config.knob import as_written
from grpo_cli.config.origins import NOTHING, Composition, Origin
from grpo_cli.config.renamed import OTHER_NAMES
from grpo_cli.config.schema import ENTRIES, Recipe, entry_field, knobs
from grpo_cli.config.words import expected
from grpo_cli.errors import UserError, listed
from grpo_cli.reporting.run_folder import RunFolder

USAGE = """\
grpo explain [RUN | recipe=NAME] [key=value ...] [KEY ...]

Prints the value of a knob, what it does, and the place that sets it: the default, a file of a
group, the recipe, or the command line; and below it the places that it takes precedence over.

  KEY                      Knob such as loss.epsilon_high, or a section such as loss; without one,
                           every knob that something sets.
  RUN                      Folder of a run, whose stored recipe is explained.
"""
WIDTH = 98
LONGEST_VALUE = 40  # characters of a value in a table


@dataclasses.dataclass(frozen=True)
class Explained:
    """A composed recipe with what is known about its knobs."""

    tree: dict[str, Any]  # its values, checked if it is without mistakes
    composition: Composition
    problem: str | None  # the first mistake of the recipe
    command: list[str]  # that the run was started with; [] for a recipe

    def value(self, key: str) -> Any:
        """Returns the value of a key; NOTHING if there is no such entry."""
        value: Any = self.tree
        for part in key.split("."):
            if value is None:
                return None
            if not isinstance(value, dict) or part not in value:
                return NOTHING
            value = value[part]
        return value

    def origins(self, key: str) -> list[Origin]:
        """Returns what sets a key, the last one counts; of a run, also its command line."""
        found = self.composition.origins(key)
        for word in self.command:
            name, is_set, _ = word.lstrip("+").partition("=")
            sets = f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")
            if is_set and sets and len(found) > 1:
                found[-1] = dataclasses.replace(found[-1], why=f"command line of the run: {word}")
        return found


def main(argv: list[str]) -> None:
    """Checks the command line and prints what it asks for.

    Raises:
        UserError: there is no such key, recipe or run.
    """
    if {"-h", "--help"} & {*argv}:
        print(USAGE, end="")
        return
    options, rest = split_options(argv)
    plain = [w for w in rest if "=" not in w and not w.startswith("~")]
    words = options + [w for w in rest if w not in plain]
    runs = [w for w in plain if "/" in w or (Path(w) / "recipe.yaml").is_file()]
    command: list[str] = []
    if runs:
        run = RunFolder.open(runs[0])
        if any(word.startswith("recipe=") for word in words):
            raise UserError(f"recipe: {runs[0]} has a recipe of its own; give one of the two.")
        if unusual := [*provenance.unusual(run.recipe)]:
            raise UserError(
                f"RUN = {run.path}: its recipe.yaml has entries that no run writes: "
                f"{listed(unusual)}; remove them."
            )
        words.append(f"recipe={run.path / 'recipe.yaml'}")
        command = shlex.split((run.commands() or [""])[-1])[2:]
    asked = [word for word in plain if word not in runs]

    def task(cfg: DictConfig) -> None:
        stored = words_file(words) if runs else None
        explained = of_composed(cfg, stored, command)
        if explained.problem:
            print(f"note: the recipe is refused as it stands: {masked(explained.problem)}\n")
        print("\n".join(described(explained, asked)))

    compose_and_call(words, task, only_this_file=bool(runs))


def words_file(words: Sequence[str]) -> Path | None:
    """Returns the recipe's file, if it lies outside."""
    folder, name, _ = split_recipe(words)
    return None if folder is None else folder / f"{name}.yaml"


def of_composed(cfg: DictConfig, stored: Path | None, command: list[str]) -> Explained:
    """Returns a composed recipe with its origins."""
    problem = None
    try:
        tree = dataclasses.asdict(parsing.parse(cfg))
    except UserError as error:
        problem = str(error).splitlines()[0]
        tree = as_it_stands(cfg)
    return Explained(tree, origins.composition(stored), problem, command)


def as_it_stands(cfg: DictConfig) -> dict[str, Any]:
    """Returns the values of a recipe that is refused, with interpolations where they fail."""
    try:
        return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException:
        return cast(dict[str, Any], OmegaConf.to_container(cfg))


def described(explained: Explained, asked: Sequence[str]) -> Iterator[str]:
    """Yields the lines to print.

    Raises:
        UserError: a key does not exist.
    """
    known = dict(knobs())
    for number, key in enumerate(asked):
        yield from [""] * (number > 0)
        parts = below(explained, key)
        if parts:
            yield from table(explained, parts)
        elif key in known or entry_field(key) or explained.value(key) is not NOTHING:
            yield from one(explained, key)
        else:
            raise UserError(parsing.no_such_key(key))
    if not asked:
        names = [f.name for f in dataclasses.fields(Recipe)]
        every = [k for name in names for k in below(explained, name) or [name]]
        yield from table(explained, [k for k in every if len(explained.origins(k)) > 1])


def below(explained: Explained, key: str) -> list[str]:
    """Returns the keys of a section, or of the entries of a mapping; [] for a knob."""
    found = [k for k, _ in knobs() if k.startswith(f"{key}.")]
    sections = {k.rpartition(".")[0] for k in found}
    parts = [k for k in found if k not in sections]
    if key in ENTRIES:
        entries = explained.value(key)
        names = entries if isinstance(entries, dict) else {}
        return [k for name in names for k in below(explained, f"{key}.{name}")]
    mapping = key.rpartition(".")[0]
    if mapping in ENTRIES and isinstance(explained.value(key), dict):
        fields = (f.name for f in dataclasses.fields(ENTRIES[mapping]))
        return [f"{key}.{field}" for field in fields]
    return [inner for k in parts for inner in (below(explained, k) if k in ENTRIES else [k])]


def one(explained: Explained, key: str) -> Iterator[str]:
    """Yields the lines about one knob."""
    found, value = explained.origins(key), explained.value(key)
    yield masked(f"{key} = {written(value)}")
    yield ""
    yield from facts(explained, key)
    yield ""
    last, *before = reversed(found)
    yield f"  set by       {place(last, value)}"
    for number, origin in enumerate(o for o in before if o.value is not NOTHING):
        yield f"  {'' if number else 'in place of':13}{place(origin, NOTHING)}"
    if key == "steps" and explained.value("epochs") is not None:
        yield "  computed     from `epochs` and the number of prompts, once the data are read"


def facts(explained: Explained, key: str) -> Iterator[str]:
    """Yields what a knob is: its sentence, what it takes, whether this recipe reads it."""
    field = dict(knobs()).get(key)
    if field is None and (entry := entry_field(key)) is not None and not entry[1]:
        field = entry[0]
    if field is None:
        yield "  An entry of a mapping, whose names are the user's or of what reads it."
        return
    sentence = textwrap.fill(field.metadata["doc"], WIDTH - 2, break_on_hyphens=False)
    yield from textwrap.indent(sentence, "  ").splitlines()
    yield f"  takes        {expected(field)}{' or null' if 'None' in str(field.type) else ''}"
    if (why := unread(explained, [key]).get(key)) is not None:
        yield f"  not read     it is {why}"
    if others := [name for name, ours in OTHER_NAMES.items() if ours == key]:
        yield f"  called       {', '.join(others)} by other trainers"


def table(explained: Explained, keys: Sequence[str]) -> Iterator[str]:
    """Yields a table of knobs: key, value, and the place that sets it."""
    ignored = unread(explained, keys)
    rows = [("key", "value", "set by")]
    for key in keys:
        origin = explained.origins(key)[-1]
        shown = written(explained.value(key))
        shown = shown if len(shown) <= LONGEST_VALUE else f"{shown[: LONGEST_VALUE - 1]}…"
        why = origin.why.partition(": ")[0]
        by = f"{origin.place} ({why})" if why else origin.place
        rows.append((key, shown, by + ("; not read" if key in ignored else "")))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, by in rows:
        yield masked(f"{key:{widths[0]}}  {value:{widths[1]}}  {by}")


def unread(explained: Explained, keys: Sequence[str]) -> dict[str, str]:
    """Returns, for each key that this recipe does not read, when it would be read."""
    if explained.problem is not None:
        return {}
    checks = []
    if any(key.startswith(("loss.", "advantage.")) for key in keys):
        from grpo_cli.algorithm import objective  # late: it imports torch

        checks.append(objective.problems)
    try:
        parsing.parse(explained.tree, keys, checks)
    except UserError as error:
        found = {}
        for line in str(error).splitlines():
            subject, is_unread, when = line.partition(": is only read ")
            if is_unread:
                found[subject.partition(" = ")[0]] = f"only read {when}"
        return found
    return {}


def place(origin: Origin, final: Any) -> str:
    """Returns an origin as a line, with its value; an interpolation also with the result."""
    raw = written(origin.value)
    why = f" ({origin.why})" if origin.why else ""
    resolved = f" = {written(final)}" if "${" in raw and final is not NOTHING else ""
    return masked(f"{origin.place}: {raw}{resolved}{why}")


def written(value: Any) -> str:
    """Returns a value as YAML writes it, on one line."""
    if value is NOTHING:
        return "none"
    if isinstance(value, (list, dict)):
        stream = io.StringIO()
        yaml.safe_dump(
            value, stream, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True
        )
        return stream.getvalue().strip()
    return as_written(value).replace("\n", "\\n") or "''"
