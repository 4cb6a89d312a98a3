"""Compares two evaluations of the same rows, row by row: `grpo eval compare`.

Pairing removes the difficulty of the rows from the comparison. It shows differences that two
separate intervals would hide (`paired.py` has the statistics).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from grpo_cli.errors import UserError, listed
from grpo_cli.evaluation.paired import paired
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.files import open_file, read_json, reading
from grpo_cli.scoring import registry
from grpo_cli.scoring.settings import function_of, own_first

USAGE = """\
grpo eval compare A/eval.json B/eval.json

Prints how B differs from A on the rows that both have: the accuracies, their difference with a 95%
interval and a p-value, and the rows that flipped. A and B are evaluations of the same problems,
judged by the same rules; completions.parquet is read beside each eval.json. A and B may also be
the folders.

In `flipped +G -L`, G rows went from less than half of their completions right in A to more than
half in B, and L rows the other way round; exactly half, in either, is not a flip.
"""

QUESTION = "question"
LISTED = 10  # flipped rows shown in each direction
LIMIT = "generation.max_completion_tokens"  # without eval's limit, and the benchmark's own
SETTINGS = (  # of eval.json that are compared
    *("mixed_precision", "model.dtype", "model.quantization"),
    *("dataset.prompt", "dataset.system", "dataset.chat"),
    *("eval.num_samples", "eval.temperature", "eval.top_p", "eval.max_completion_tokens"),
    *("eval.sampling", LIMIT),
)
LONGEST_SHOWN = 60  # characters of the two values of a setting
COLUMNS = ["benchmark", "mode", "row", "correct", "columns"]


@dataclass(frozen=True)
class Stored:
    """A stored evaluation: eval.json and the counts of its completions."""

    path: Path
    report: Mapping[str, Any]  # eval.json
    # (right completions, judged completions) of each row, by (benchmark, mode) and row
    counts: dict[tuple[str, str], dict[int, tuple[int, int]]]
    problems: dict[str, dict[int, str]]  # data columns as JSON, by benchmark and row

    def section(self, key: str) -> Mapping[str, Any]:
        """Returns a section of eval.json; {} if it is missing."""
        found = self.report.get(key)
        return found if isinstance(found, dict) else {}


def main(words: Sequence[str]) -> None:
    """Runs `grpo eval compare` with the words that follow it.

    Raises:
        UserError: the words are not two files; also as in `compare`.
    """
    if {"-h", "--help"} & {*words}:
        print(USAGE, end="")
        return
    if len(words) != 2:
        raise UserError(
            "grpo eval compare: give two files, such as A/eval.json B/eval.json, or two folders; "
            f"got {' and '.join(words) or 'none'}."
        )
    compare(Path(words[0]), Path(words[1]), Console(highlight=False))


def compare(first: Path, second: Path, console: Console) -> dict[str, Any]:
    """Compares the second evaluation with the first one and prints a table.

    Args:
        first, second: an eval.json each, or the folder that holds it.

    Returns:
        {"first": path, "second": path, "benchmarks": {name: {mode: `paired`'s numbers and
        "unpaired", the rows that only one of the two has}}}.

    Raises:
        UserError: a file was not written by `grpo eval`, or its completions are missing; the
            evaluations have no benchmark in common; a benchmark's problems or judges differ.
    """
    one, other = read(first), read(second)
    first, second = one.path, other.path
    in_both = [key for key in one.counts if key in other.counts]
    if not in_both:
        names = [listed(_label(*key) for key in s.counts) for s in (one, other)]
        raise UserError(
            f"{first} and {second}: have no benchmark and mode in common; the first has "
            f"{names[0]}, the second {names[1]}."
        )
    check_same_problems(one, other, in_both)
    check_same_judge(one, other, in_both)
    lines = []
    benchmarks: dict[str, dict[str, Any]] = {}
    # Fold long names: truncated, one could stand for several benchmarks.
    name_column = Column("benchmark", overflow="fold")
    table = Table(name_column, "mode", "rows", "A", "B", "B - A", "95% interval", "p", "flipped")
    if differing := differing_settings(one, other):
        lines.append(f"note: settings differ: {', '.join(differing)}")
    for name, mode in in_both:
        label = _label(name, mode)
        rows, others = one.counts[name, mode], other.counts[name, mode]
        common = sorted(rows.keys() & others.keys())
        unpaired = len(rows.keys() ^ others.keys())
        if not common:
            lines.append(f"{label}: no row is in both.")
            continue
        numbers = paired({row: rows[row] for row in common}, {row: others[row] for row in common})
        benchmarks.setdefault(name, {})[mode] = {**numbers, "unpaired": unpaired}
        gained, lost = numbers["flipped_to_right"], numbers["flipped_to_wrong"]
        low, high = numbers["interval_95"]
        table.add_row(
            *(name, mode, str(numbers["n"])),
            *(f"{100 * numbers[key]:.1f}" for key in ("accuracy_first", "accuracy_second")),
            f"{100 * numbers['difference']:+.1f}",
            f"{100 * low:+.1f} to {100 * high:+.1f}",
            f"{numbers['p_value']:.2g}",
            f"+{len(gained)} -{len(lost)}",
        )
        if unpaired:
            lines.append(
                f"warning: {label}: {unpaired} rows are in one of the two only and are "
                f"left out; {len(common)} are compared."
            )
        for flipped, how in ((gained, "wrong to right"), (lost, "right to wrong")):
            if flipped:
                more = len(flipped) - LISTED
                shown = ", ".join(map(str, flipped[:LISTED])) + (f" and {more} more" * (more > 0))
                lines.append(f"{label}: rows from {how}: {shown}")
    if not benchmarks:
        raise UserError(f"{first} and {second}: have no row in common.")
    console.print(f"A: {first}\nB: {second}", markup=False, soft_wrap=True)
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return {"first": str(first), "second": str(second), "benchmarks": benchmarks}


def _label(name: str, mode: str | None) -> str:
    """Formats a benchmark and mode for messages; held-out rows have no mode."""
    return name if mode is None else f"{name} ({mode})"


def check_same_problems(one: Stored, other: Stored, in_both: Collection[tuple[str, str]]) -> None:
    """Checks that a row number means the same problem in both evaluations.

    The questions must be equal, or, in data without questions, all columns that both have.

    Args:
        in_both: the (benchmark, mode) pairs that are compared.

    Raises:
        UserError: a row holds different problems.
    """
    for key in in_both:
        name, common = key[0], one.counts[key].keys() & other.counts[key].keys()
        different = []
        for row in sorted(common):
            a, b = (json.loads(stored.problems[name][row] or "{}") for stored in (one, other))
            shared = [QUESTION] if QUESTION in a and QUESTION in b else [c for c in a if c in b]
            if any(not same_json(a[column], b[column]) for column in shared):
                different.append(row)
        if different:
            raise UserError(
                f"{one.path} and {other.path}: {name} is of different data: {len(different)} of "
                f"the {len(common)} rows that both have are different problems, the first of "
                f"them row {different[0]}; evaluate both on one."
            )


def same_json(a: Any, b: Any) -> bool:
    """Returns whether two JSON values are the same, NaN included."""
    return bool(a == b) or json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def check_same_judge(one: Stored, other: Stored, in_both: Collection[tuple[str, str]]) -> None:
    """Checks that both evaluations use the same reward with the same arguments.

    Raises:
        UserError: they differ.
    """
    for name in dict.fromkeys(name for name, _ in in_both):
        judges = [_judge(s, name) for s in (one, other)]
        if None in judges:
            continue  # eval.json does not record its judge
        rewards, args = zip(*filter(None, judges), strict=True)
        for key, (a, b), same in (
            ("reward", rewards, len({*map(registry.full_name, rewards)}) == 1),
            ("args", args, same_json(*args)),
        ):
            if not same:
                raise UserError(
                    f"{one.path} and {other.path}: the {key} of {name} differs, {a} and {b}; judge "
                    "both alike."
                )


def _judge(stored: Stored, name: str) -> tuple[str, Any] | None:
    """Returns the reward that judges completions and its arguments; None if not recorded."""
    if (settings := stored.section("benchmark").get(name)) is not None:
        default = Benchmark()  # eval.json leaves out settings at their defaults
        return settings.get("reward", default.reward), settings.get("args", default.args)
    rewards = stored.section("reward")  # the recipe's rewards, which judge its held-out rows
    named = stored.section("eval").get("accuracy")
    names = [named] if named else own_first({n: function_of(r) for n, r in rewards.items()})
    found = rewards.get(next(iter(names), ""))
    return (found["function"], found["args"]) if isinstance(found, dict) else None


def differing_settings(one: Stored, other: Stored) -> list[str]:
    """Lists the settings that differ: `eval.num_samples 1 and 8`."""
    found = []
    for key in SETTINGS:
        section, _, name = key.rpartition(".")
        a, b = (s.section(section) if section else s.report for s in (one, other))
        is_read = key != LIMIT or reads_limit_of_generation(one) or reads_limit_of_generation(other)
        if is_read and name in a and name in b and a[name] != b[name]:
            values = f"{a[name]} and {b[name]}"
            found.append(f"{key} {values}" if len(values) <= LONGEST_SHOWN else key)
    settings = one.section("benchmark"), other.section("benchmark")
    return found + [
        f"benchmark.{name}.{key}"
        for name in settings[0]
        if name in settings[1]
        for key in ("modes", "shots", "max_completion_tokens")
        if settings[0][name].get(key) != settings[1][name].get(key)
    ]


def reads_limit_of_generation(stored: Stored) -> bool:
    """Returns whether completions were limited by generation.max_completion_tokens."""
    name, benchmarks = "max_completion_tokens", stored.section("benchmark").values()
    has_own = bool(benchmarks) and all(benchmark.get(name) for benchmark in benchmarks)
    return not (has_own or stored.section("eval").get(name))


def read(path: Path) -> Stored:
    """Reads an eval.json, given as a file or its folder, and the completions beside it.

    Raises:
        UserError: a file is missing or was not written by `grpo eval`.
    """
    from pyarrow import parquet

    if path.is_dir():
        path = path / "eval.json"
    if not path.is_file():
        raise UserError(f"{path}: is missing; give a folder that grpo eval has filled.")
    report = read_json(path, "benchmarks")
    file = path.with_name("completions.parquet")
    with reading(file), open_file(file) as opened:
        # As a dictionary, since the text of a row is repeated in each of its completions.
        table = parquet.read_table(opened, columns=COLUMNS, read_dictionary=["columns"])
    found = Stored(path, report, {}, {})
    names, texts = COLUMNS[:-1], table["columns"]
    completions = zip(*(table[name].to_pylist() for name in names), strict=True)
    for i, (name, mode, row, correct) in enumerate(completions):
        if correct is None:  # not judged
            continue
        of_mode = found.counts.setdefault((name, mode), {})
        right, judged = of_mode.get(row, (0, 0))
        of_mode[row] = right + correct, judged + 1
        problems = found.problems.setdefault(name, {})
        if row not in problems:
            problems[row] = texts[i].as_py()
    return found
