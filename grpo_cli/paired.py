"""`grpo eval compare`: two evaluations of the same rows, held against each other row by row.

Pairs take the difficulty of the rows out of the comparison, so that a difference shows that two
separate intervals would hide. A problem's value is the share of its completions that are right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from grpo_cli import registry
from grpo_cli.config import Benchmark, Eval
from grpo_cli.errors import UserError, listed
from grpo_cli.estimates import Z_95

USAGE = """\
grpo eval compare A/eval.json B/eval.json [output=FILE]

  how B differs from A on the rows that both have: accuracies, difference with a 95% interval,
  p-value, the rows that flipped. completions.parquet is read beside each eval.json; A and B may be
  the folders. Both have to be of the same problems, judged alike.
  flipped +G -L  of G rows less than half of the completions are right in A and more than half in B,
                 of L rows the other way round; exactly half, in either, is no flip
  output=FILE    where all of it goes as JSON, with every flipped row
"""

MOST_EXACT = 16  # differing problems, of whose differences all signs are tried
DRAWS = 100_000  # of signs, where there are more
DRAWS_AT_ONCE = 2_000
SEED = 0
QUESTION = "question"
LISTED = 10  # flipped rows each way, on the terminal
COLUMNS = ("benchmark", "mode", "row", "correct")
BATCH = 8192  # completions whose columns are in memory at once

# Right and all judged completions of a row, by (benchmark, mode) and row.
Counts = dict[tuple[str, str], dict[int, tuple[int, int]]]


@dataclass(frozen=True)
class Stored:
    """An evaluation as it lies on the disk."""

    path: Path
    report: Mapping[str, Any]  # eval.json
    benchmarks: Mapping[str, Mapping[str, Any]]  # of eval.json
    counts: Counts

    def section(self, key: str) -> Mapping[str, Any]:
        """Settings of eval.json; {} where it has none of that name."""
        found = self.report.get(key)
        return found if isinstance(found, dict) else {}

    def setting(self, name: str, key: str) -> Any:
        """A setting of a benchmark: eval.json leaves out what is at its default."""
        return self.section("benchmark")[name].get(key, getattr(Benchmark(), key))


def main(words: Sequence[str]) -> None:
    """`grpo eval compare`, with the words that follow it.

    Raises:
        UserError: the words are not two files and output=FILE, or see `compare`.
    """
    if {"-h", "--help"} & {*words}:
        print(USAGE, end="")
        return
    outputs = [w.removeprefix("output=") for w in words if w.startswith("output=")]
    files = [w for w in words if not w.startswith("output=")]
    if len(files) != 2:
        raise UserError(
            "grpo eval compare: give two files, such as A/eval.json B/eval.json, or two folders; "
            f"got {' and '.join(files) or 'none'}."
        )
    if len(outputs) > 1 or "" in outputs:
        raise UserError("output: give one file, as output=FILE.")
    if outputs and Path(outputs[0]).is_dir():
        raise UserError(f"output = {outputs[0]}: is a folder; give a file.")
    found = compare(Path(files[0]), Path(files[1]), Console(highlight=False))
    if outputs:
        path = Path(outputs[0])
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"output = {path}: cannot be written: {error.strerror}.") from error


def compare(first: Path, second: Path, console: Console) -> dict[str, Any]:
    """Compares the second evaluation with the first one and prints a table.

    Returns:
        {"first": path, "second": path, "benchmarks": {name: {mode: `paired`'s numbers and
        "unpaired", the rows that only one of the two has}}}.

    Args:
        first, second: an eval.json each, or the folder that holds it.

    Raises:
        UserError: a file is not of `grpo eval`, or its completions are missing; nothing is in both;
            the problems of a benchmark differ, or how they are judged.
    """
    one, other = read(first), read(second)
    first, second = one.path, other.path
    in_both = [key for key in one.counts if key in other.counts]
    if not in_both:
        names = [listed(f"{name} ({mode})" for name, mode in s.counts) for s in (one, other)]
        raise UserError(
            f"{first} and {second}: have no benchmark and mode in common; the first has "
            f"{names[0]}, the second {names[1]}."
        )
    lines = check_same_problems(one, other, in_both)
    check_same_judge(one, other, in_both)
    benchmarks: dict[str, dict[str, Any]] = {}
    table = Table("benchmark", "mode", "rows", "A", "B", "B - A", "95% interval", "p", "flipped")
    if differing := differing_settings(one, other, in_both):
        lines.append(f"note: settings differ: {', '.join(differing)}")
    for name, mode in in_both:
        rows, others = one.counts[name, mode], other.counts[name, mode]
        common = sorted(rows.keys() & others.keys())
        unpaired = len(rows.keys() ^ others.keys())
        if not common:
            lines.append(f"{name} ({mode}): no row is in both.")
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
                f"warning: {name} ({mode}): {unpaired} rows are in one of the two only and are "
                f"left out; {len(common)} are compared."
            )
        for flipped, how in ((gained, "wrong to right"), (lost, "right to wrong")):
            if flipped:
                more = len(flipped) - LISTED
                shown = ", ".join(map(str, flipped[:LISTED])) + (f" and {more} more" * (more > 0))
                lines.append(f"{name} ({mode}): rows from {how}: {shown}")
    if not benchmarks:
        raise UserError(f"{first} and {second}: have no row in common.")
    console.print(f"A: {first}\nB: {second}", markup=False, soft_wrap=True)
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return {"first": str(first), "second": str(second), "benchmarks": benchmarks}


def check_same_problems(
    one: Stored, other: Stored, in_both: Collection[tuple[str, str]]
) -> list[str]:
    """Checks that a row of the one is the same problem as that row of the other.

    It is where the fingerprints of the data are equal. Else, and where one has none, the questions
    have to be equal; where they are not known, every column that both files have.

    Args:
        in_both: (benchmark, mode) of what is compared.

    Returns:
        what is to be said of benchmarks whose questions are the same and their other columns not.

    Raises:
        UserError: a row is of different problems.
    """
    rows: dict[str, set[int]] = {}
    for key in in_both:
        common = one.counts[key].keys() & other.counts[key].keys()
        rows.setdefault(key[0], set()).update(common)
    entries = {name: [s.benchmarks.get(name, {}) for s in (one, other)] for name in rows}
    data = {name: [entry.get("data") for entry in both] for name, both in entries.items()}
    doubted = [name for name, (a, b) in data.items() if a is None or a != b]
    if not doubted:
        return []
    notes = []
    first, second = (
        read_columns(s.path.parent / "completions.parquet", doubted) for s in (one, other)
    )
    for name in doubted:
        held, different, otherwise = 0, dict[int, str](), dict[str, int]()
        for row in sorted(rows[name]):
            a, b = first[name].get(row, {}), second[name].get(row, {})
            unlike = [c for c in a if c in b and not same_json(a[c], b[c])]
            held += any(column in b for column in a)
            if QUESTION in a and QUESTION in b and QUESTION not in unlike:
                for column in unlike:
                    otherwise[column] = otherwise.get(column, 0) + 1
            elif unlike:
                different[row] = QUESTION if QUESTION in unlike else unlike[0]
        if different:
            row, column = next(iter(different.items()))
            raise UserError(
                f"{one.path} and {other.path}: {name} is of different data: {len(different)} of "
                f"the {len(rows[name])} rows that both have are different problems, the first of "
                f"them row {row} by its column {column!r}; evaluate both on one."
            )
        # With another limit the rows that both have may well be the same.
        as_many = entries[name][0].get("n") == entries[name][1].get("n")
        if not held and as_many and None not in data[name]:
            raise UserError(
                f"{one.path} and {other.path}: {name} is of different data, {data[name][0]} and "
                f"{data[name][1]}; evaluate both on one."
            )
        notes += [
            f"note: {name}: {count} of the {len(rows[name])} rows differ in {column!r}, not in "
            "their questions."
            for column, count in otherwise.items()
        ]
    return notes


def same_json(a: Any, b: Any) -> bool:
    """Whether two values of JSON are the same. NaN is not equal to itself, but its text is."""
    return bool(a == b) or json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def check_same_judge(one: Stored, other: Stored, in_both: Collection[tuple[str, str]]) -> None:
    """Checks that what is right is said by the same reward, with the same arguments.

    Raises:
        UserError: it is not.
    """
    for name in dict.fromkeys(name for name, _ in in_both):
        judges = [_judge(s, name) for s in (one, other)]
        if None in judges:
            continue  # an eval.json that does not say
        rewards, args = zip(*filter(None, judges), strict=True)
        for key, (a, b), same in (
            ("reward", rewards, len({*map(registry.full_name, rewards)}) == 1),
            ("args", args, same_json(*args)),
        ):
            if not same:
                raise UserError(
                    f"{one.path} and {other.path}: the {key} of {name} differs, {a} and {b}; "
                    "judge both alike (grpo eval completions=FOLDER judges completions anew)."
                )


def _judge(stored: Stored, name: str) -> tuple[str, Any] | None:
    """(reward, its arguments) by which a completion is right; None if that is not known."""
    if name in stored.section("benchmark"):
        return stored.setting(name, "reward"), stored.setting(name, "args")
    rewards = stored.section("reward")  # of the recipe, for its held-out rows
    found = rewards.get(stored.section("eval").get("accuracy") or next(iter(rewards), ""))
    return (found["function"], found["args"]) if isinstance(found, dict) else None


def differing_settings(
    one: Stored, other: Stored, in_both: Collection[tuple[str, str]]
) -> list[str]:
    """What is set differently and bears on the numbers, such as `eval.num_samples 1 and 8`."""
    found: list[str] = []

    def hold(what: str, values: Sequence[Any], *, shown: bool = True) -> None:
        a, b = values
        if None not in values and a != b:
            found.append(f"{what} {a} and {b}" if shown else what)

    both = (one, other)
    evals = [s.section("eval") for s in both]
    hold("eval.num_samples", [e.get("num_samples") for e in evals])
    if any("completions" in s.report for s in both):
        return found  # how they were made is not known
    hold("eval.temperature", [_temperature(e) for e in evals])
    for name in dict.fromkeys(name for name, _ in in_both):
        of_benchmark = all(name in s.section("benchmark") for s in both)
        longest = [_longest(s, name, of_benchmark) for s in both]
        hold(f"max_completion_tokens of {name}", longest)
        if of_benchmark:
            for mode in [m for n, m in in_both if n == name and m in ("cot", "tir")]:
                prompts = [s.setting(name, mode) for s in both]
                hold(f"the prompt benchmark.{name}.{mode}", prompts, shown=False)
            hold(f"benchmark.{name}.shots", [s.setting(name, "shots") for s in both])
    return found


def _temperature(settings: Mapping[str, Any]) -> float | None:
    """At which completions were drawn; None if that is not known."""
    if "num_samples" not in settings or "temperature" not in settings:
        return None
    drawn_at = Eval(
        num_samples=settings["num_samples"], temperature=settings["temperature"]
    ).drawn_at
    return float(drawn_at)


def _longest(stored: Stored, name: str, of_benchmark: bool) -> int | None:
    """Tokens that a completion may have; None if that is not known."""
    key = "max_completion_tokens"
    own = stored.setting(name, key) if of_benchmark else None
    found: int | None = (
        stored.section("eval").get(key) or own or stored.section("generation").get(key)
    )
    return found


def read(path: Path) -> Stored:
    """An eval.json, perhaps given as its folder, and the completions beside it.

    Raises:
        UserError: one of them is missing, or is not what `grpo eval` writes.
    """
    if path.is_dir():
        if not (path / "eval.json").is_file():
            raise UserError(f"{path}: holds no eval.json; give a folder that grpo eval has filled.")
        path = path / "eval.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is no eval.json of grpo eval: it is no text in UTF-8; give that file or its "
            "folder."
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: is no eval.json of grpo eval: it is no JSON: {error}.") from error
    benchmarks = found.get("benchmarks") if isinstance(found, dict) else None
    if not isinstance(benchmarks, dict) or not all(
        isinstance(b, dict) for b in benchmarks.values()
    ):
        raise UserError(f'{path}: is no eval.json of grpo eval: it holds no "benchmarks".')
    return Stored(path, found, benchmarks, read_counts(path.parent / "completions.parquet"))


def read_counts(path: Path) -> Counts:
    """How many completions of each row are right. Those that were not judged (null) do not count.

    Raises:
        UserError: the file is missing, or is not what `grpo eval` writes.
    """
    if not path.is_file():
        raise UserError(f"{path}: is missing; grpo eval compare needs it beside eval.json.")
    with opened(path) as file:
        missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
        columns = {} if missing else file.read(columns=list(COLUMNS)).to_pydict()
    if missing:
        raise UserError(f"{path}: lacks the column {missing[0]!r} that grpo eval writes.")
    counts: Counts = {}
    for name, mode, row, correct in zip(*(columns[name] for name in COLUMNS), strict=True):
        if correct is not None:
            of_mode = counts.setdefault((name, mode), {})
            right, judged = of_mode.get(row, (0, 0))
            of_mode[row] = right + bool(correct), judged + 1
    return counts


def read_columns(path: Path, names: Collection[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """What is known of each row of some benchmarks, as its first completion has it.

    Nothing of a file of an older version, which has no column `columns`.

    Raises:
        UserError: the file is not what `grpo eval` writes.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in names}
    with opened(path) as file:
        if "columns" not in file.schema_arrow.names:
            return found
        # In parts: a row's text, of some thousand characters, is there once for each completion.
        for batch in file.iter_batches(BATCH, columns=["benchmark", "row", "columns"]):
            keys = zip(batch["benchmark"].to_pylist(), batch["row"].to_pylist(), strict=True)
            for i, (name, row) in enumerate(keys):
                if name in found and row not in found[name]:
                    text = batch["columns"][i].as_py()
                    found[name][row] = {} if text is None else _mapping(text, path)
    return found


def _mapping(text: Any, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path}: the column 'columns' is not the JSON that grpo eval writes.")
    return found


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A Parquet file, to be read within.

    Raises:
        UserError: it cannot be.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as parquet: {error}") from error


def paired(
    first: Mapping[int, tuple[int, int]], second: Mapping[int, tuple[int, int]]
) -> dict[str, Any]:
    """Numbers of one benchmark.

    A row flips where its share of right completions is below one half in the one and above it in
    the other; one half itself is neither. With one completion a row, that is from wrong to right or
    from right to wrong.

    Args:
        first, second: (right completions, completions) of the same rows, one at least.
    """
    rows = list(first)
    a = np.array([first[row][0] / first[row][1] for row in rows])
    b = np.array([second[row][0] / second[row][1] for row in rows])
    differences = b - a
    single = all(side[row][1] == 1 for side in (first, second) for row in rows)
    to_right, to_wrong = (a < 0.5) & (b > 0.5), (a > 0.5) & (b < 0.5)
    if single:
        p_value = mcnemar(int(to_right.sum()), int(to_wrong.sum()))
    else:
        p_value = sign_flip(differences.tolist())
    return {
        "n": len(rows),
        "accuracy_first": math.fsum(a) / len(rows),
        "accuracy_second": math.fsum(b) / len(rows),
        "difference": math.fsum(differences) / len(rows),
        "interval_95": list(difference_interval(differences.tolist())),
        "p_value": p_value,
        "test": "mcnemar" if single else "sign_flip",
        "flipped_to_right": [row for row, flipped in zip(rows, to_right, strict=True) if flipped],
        "flipped_to_wrong": [row for row, flipped in zip(rows, to_wrong, strict=True) if flipped],
    }


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean difference over problems.

    The adjusted Wald interval of paired shares (Bonett and Price 2012, J. Educ. Behav. Stat.
    37(4):479): Wald's after two more problems, one with the difference +1 and one with -1. It holds
    with few differing problems and with none, where Wald's is a point. With several completions a
    problem differences are smaller than 1, and so are those of the two: ±s, s² the mean square of
    those that are not 0 (1 without any), which with one completion is Bonett and Price's.

    In simulations (`tests/test_paired.py`) it holds the true difference in 93 to 97% of evaluations
    where some 7 problems differ or more, and in more where fewer do.

    Args:
        differences: of each problem's share of right completions, in [-1, 1]; one at least.
    """
    n = len(differences)
    squares = math.fsum(d * d for d in differences)
    differing = sum(d != 0 for d in differences)
    of_two = 2 * (squares / differing if differing else 1.0)
    centre = math.fsum(differences) / (n + 2)
    variance = (squares + of_two) / (n + 2) - centre**2
    half = Z_95 * math.sqrt(variance / (n + 2))
    return max(-1.0, centre - half), min(1.0, centre + half)


def mcnemar(to_right: int, to_wrong: int) -> float:
    """Two-sided p-value of the flips of single completions: the exact binomial test with 1/2.

    McNemar 1947, Psychometrika 12:153. The hypothesis is that either way is as likely.
    """
    flips = to_right + to_wrong
    tail = sum(math.comb(flips, i) for i in range(min(to_right, to_wrong) + 1))
    return min(1.0, 2 * tail / (1 << flips))


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean difference: how often it is as large with signs by lot.

    Fisher's permutation test of pairs (Fisher 1935, The Design of Experiments, sec. 21); over all
    signs where no more than `MOST_EXACT` problems differ, else over `DRAWS` seeded draws, with
    (b + 1) / (m + 1) for b of m draws (Phipson and Smyth 2010, arXiv 1603.05766), which is never 0.
    """
    differing = np.array([d for d in differences if d != 0])  # [D]
    count = len(differing)
    # Sums of the same differences in another order are equal but for rounding.
    least = abs(math.fsum(differing)) - 1e-9
    if count <= MOST_EXACT:
        numbers = np.arange(2**count, dtype=np.uint32)
        bits = (numbers[:, None] >> np.arange(count, dtype=np.uint32)) & 1  # [2^D, D]
        return int(_at_least(bits, differing, least).sum()) / (1 << count)
    rng = np.random.default_rng(SEED)
    as_large = 0
    for _ in range(DRAWS // DRAWS_AT_ONCE):
        drawn = rng.integers(0, 256, (DRAWS_AT_ONCE, -(-count // 8)), dtype=np.uint8)
        signs = np.unpackbits(drawn, axis=1)[:, :count]  # [draws, D]
        as_large += int(_at_least(signs, differing, least).sum())
    return (as_large + 1) / (DRAWS + 1)


def _at_least(
    bits: NDArray[Any], differing: NDArray[np.float64], least: float
) -> NDArray[np.bool_]:
    """Which of the rows of bits [M, D], a 1 for a minus, give a sum of that size."""
    sums = (1.0 - 2.0 * bits) @ differing
    found: NDArray[np.bool_] = np.abs(sums) >= least
    return found
