"""Matches stored completions to a benchmark's problems, as if they had just been sampled.

`data/stored_completions.py` reads the file. The columns that the benchmark's reward needs come from
the file. Otherwise they come from the benchmark's data, by the completion's `row`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.data import images
from grpo_cli.data.prompts import other_columns
from grpo_cli.data.rows import Rows, check_columns, columns_named
from grpo_cli.data.stored_completions import Sample
from grpo_cli.data.stored_completions import find as find_file
from grpo_cli.data.stored_completions import load as load_file
from grpo_cli.errors import UserError, listed
from grpo_cli.evaluation import benchmarks
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.scoring import registry
from grpo_cli.scoring.bound_reward import Signature

if TYPE_CHECKING:
    from grpo_cli.records import Group, Prompt, Rollout

# Columns of stored completions that are not data columns.
OWN = (
    "advantage", "benchmark", "columns", "correct", "env_error", "finish_reason", "mode",
    "prompt_ids", "reward", "row", "sample", "sampled", "sampling_logprobs", "step",
    "token_advantages", "tool_calls", "tool_errors", "tool_timeouts",
)  # fmt: skip
COUNTED = ("tool_calls", "tool_errors", "tool_timeouts")
# Row of the benchmark's data (if unknown, in order of appearance), columns, all completions.
Problem = tuple[int, dict[str, Any], list[Sample]]


@dataclass(frozen=True)
class StoredGroups:
    """The completions of a file, grouped by problem."""

    groups: list[Group]  # in the order of the benchmark's rows
    rows: int | None  # number of rows of the benchmark's data, within the limit; None if not needed
    ends_known: bool  # whether the file has a finish reason for every completion
    is_benchmark: bool  # the problems are the benchmark's own rows, or `grpo eval` wrote the file


def load(
    path: Path,
    columns: Mapping[str, str],
    name: str,
    config: Benchmark,
    limit: int | None = None,
    mode: str | None = None,
    max_pixels: int | None = None,
) -> StoredGroups:
    """Loads the completions of a file by problem, in the order of the benchmark's rows.

    Completions belong to one problem if they have the same `row`, or without that column the same
    `id`, `question` or prompt. Otherwise each is a problem of its own. They are ordered by `sample`
    if there is such a column. Columns that the reward needs come from the file, or else from the
    benchmark's data, by `row` (line, from 0). Rows may lack completions; `StoredGroups.rows` is the
    number of rows.

    Args:
        path: .jsonl, .json, .csv or .parquet, perhaps .gz; or a folder that holds completions.
        columns: columns to rename in the file, as new name: old name.
        name: the benchmark's name.
        limit: number of the benchmark's rows, from the first, whose completions are loaded.
        mode: use only completions of this mode, if the file records modes.
        max_pixels: larger images in the benchmark's data are resized to it.

    Raises:
        UserError: a missing file or column, a completion that is not text, or a completion whose
            problem cannot be determined.
    """
    from grpo_cli.records import Group, Prompt

    path = find_file(path, "completions")
    samples = _of_task(load_file(path, columns, "completions"), path, name, mode)
    there = samples[0].columns
    # Columns with the source's names get the benchmark's, unless these are taken.
    names = {old: new for new, old in config.columns.items() if old in there and new not in there}
    if names:
        samples = [
            dataclasses.replace(s, columns={names.get(n, n): c for n, c in s.columns.items()})
            for s in samples
        ]
    there = samples[0].columns
    function = registry.resolve(config.reward, f"benchmark.{name}.reward")
    needs_ids = "completion_ids" in Signature.of(function).needed_standard
    if needs_ids and any(s.ids is None for s in samples):
        raise UserError(
            f"benchmark.{name}.reward: {config.reward} needs completion_ids, and {path} has no "
            "column of that name; what `grpo eval` has written has one."
        )
    rows = None
    if all(column in there for column in benchmarks.needed_columns(name, config)):
        problems = _with_own_answers(samples, path, name, config)
    else:
        rows = benchmarks.load(name, config)
        problems = _joined(samples, rows, path, name, config)
    needed = benchmarks.breakdown_columns(name, config)
    check_columns(needed, problems[0][1], str(path), "columns")
    problems = [p for p in sorted(problems, key=itemgetter(0)) if limit is None or p[0] < limit]
    if not problems:
        raise UserError(f"completions = {path}: none is of the first {limit} rows of {name}.")
    groups = []
    for row, cells, own in problems:
        first = own[0]
        text = first.prompt or _problem_text(cells, path, name, config, mode)
        others = other_columns(cells)
        if rows is not None:
            others |= images.of_columns(rows, row, others, max_pixels)
        pictures = first.images or tuple(images.in_columns(others))
        ids = _numbers(first.columns.get("prompt_ids"))
        prompt = Prompt(row, ids, text, others, prefill=first.prefill, images=pictures)
        groups.append(Group(row, prompt, [_rollout(prompt, sample) for sample in own]))
    ends = [s.columns.get("finish_reason") for _, _, own in problems for s in own]
    return StoredGroups(
        groups=groups,
        rows=None if rows is None else min(len(rows.rows), limit or len(rows.rows)),
        ends_known=all(ends),
        is_benchmark=rows is not None or "benchmark" in there,
    )


def _of_task(
    samples: Sequence[Sample], path: Path, name: str, mode: str | None
) -> Sequence[Sample]:
    """Selects the completions of one benchmark and mode, if the file records them."""
    if "benchmark" in samples[0].columns and "mode" in samples[0].columns:
        there = {s.columns["benchmark"] for s in samples}
        samples = [s for s in samples if s.columns["benchmark"] == name]
        if not samples:
            raise UserError(f"completions = {path}: are of {listed(there)}, not of {name}.")
        modes = {s.columns["mode"] for s in samples}
        if mode is None and len(modes) > 1:
            raise UserError(
                f"completions = {path}: those of {name} are of the modes {listed(modes)}; say of "
                "which, as eval.mode=cot."
            )
        samples = [s for s in samples if mode in (None, s.columns["mode"])]
        if not samples:
            raise UserError(
                f"completions = {path}: those of {name} are of mode {listed(modes)}, not {mode}."
            )
    return samples


def _by_problem(samples: Sequence[Sample], path: Path) -> list[list[Sample]]:
    """Groups completions by problem, in the order in which the problems appear.

    Raises:
        UserError: the problems have different numbers of completions.
    """
    key = next((k for k in ("row", "id", "question") if _has(samples[0], k)), None)
    groups: dict[Any, list[Sample]] = collections.defaultdict(list)
    for sample in samples:
        cell = _cell(sample, key, path) if key is not None else sample.prompt or sample.row
        is_nested = isinstance(cell, (list, dict))
        groups[json.dumps(cell, sort_keys=True, default=str) if is_nested else cell].append(sample)
    parts = [*groups.values()]
    few, many = min(parts, key=len), max(parts, key=len)
    if len(few) < len(many):
        raise UserError(
            f"completions = {path}: there are {len(few)} of the problem of line {few[0].row} and "
            f"{len(many)} of that of line {many[0].row} (counted from 0); there must be as many of "
            "each."
        )
    if _has(samples[0], "sample"):
        for group in parts:
            group.sort(key=lambda s: int(_cell(s, "sample", path)))
    return parts


def _has(sample: Sample, column: str) -> bool:
    return sample.columns.get(column) is not None


def _cell(sample: Sample, column: str, path: Path) -> Any:
    """Returns a cell that must not be null; `row` and `sample` become integers."""
    value = sample.columns[column]
    is_number = column in ("row", "sample")
    digits = str(value).removesuffix(".0")  # pandas makes floats of a column with an empty cell
    if value is None or (is_number and not digits.isdecimal()):
        must = "a whole number, 0 or more" if is_number else "a value"
        raise UserError(
            f"completions = {path}, row {sample.row}: {column} is {value!r}; it must be {must}."
        )
    return int(digits) if is_number else value


def _with_own_answers(
    samples: Sequence[Sample], path: Path, name: str, config: Benchmark
) -> list[Problem]:
    """Builds problems whose gold answers are in the file of completions."""
    gold = benchmarks.gold_columns(name, config)
    for column, sample in itertools.product(gold, samples):
        if benchmarks.is_missing(sample.columns.get(column)):
            raise UserError(
                f"completions = {path}, row {sample.row}: the column {column!r}, which the "
                f"reward {config.reward} needs, is null or empty."
            )
    problems = []
    for number, group in enumerate(_by_problem(samples, path)):
        first = group[0]
        for column, other in itertools.product(gold, group):
            if other.columns.get(column) != first.columns.get(column):
                raise UserError(
                    f"completions = {path}: rows {first.row} and {other.row} are of one problem "
                    f"and have different {column!r}."
                )
        row = _cell(first, "row", path) if _has(first, "row") else number
        columns = {
            column: cell
            for column, cell in first.columns.items()
            if column not in OWN and not column.startswith(("rewards/", "extras/"))
        }
        problems.append((row, columns, group))
    return problems


def _joined(
    samples: Sequence[Sample], rows: Rows, path: Path, name: str, config: Benchmark
) -> list[Problem]:
    """Builds problems whose gold answers are in the benchmark's data, `rows`.

    Raises:
        UserError: the file has no `row`, or there is no such row.
    """
    if not _has(samples[0], "row"):
        needed = benchmarks.needed_columns(name, config)[0]
        raise UserError(
            f"completions = {path}: has no column {needed!r}, and no `row` (line number, from 0) "
            f"to find it by in {rows.source}. Name one with columns.{needed}=NAME or "
            "columns.row=NAME."
        )
    problems = []
    for group in _by_problem(samples, path):
        first, number = group[0], _cell(group[0], "row", path)
        if number >= len(rows.rows):
            raise UserError(
                f"completions = {path}, row {first.row}: row is {number}; {rows.source} has no "
                "such row."
            )
        row = rows.rows[number]
        said, meant = first.columns.get("question"), row.get("question")
        if said is not None and meant is not None and str(said).split() != str(meant).split():
            raise UserError(
                f"completions = {path}, row {first.row}: the question is not that of row {number} "
                f"of {rows.source}."
            )
        problems.append((number, dict(row), group))
    return problems


def _problem_text(
    columns: Mapping[str, Any], path: Path, name: str, config: Benchmark, mode: str | None
) -> str:
    """Rebuilds the prompt for a file without prompts; "" if its columns are missing.

    Raises:
        UserError: the columns are missing and the reward needs the prompt.
    """
    for one, template in config.prompts.items():
        if mode not in (None, one):
            continue
        if all(column in columns for column in columns_named(template)):
            plain = dataclasses.replace(config, chat=False, shots=0)
            return str(benchmarks.problem_text(plain, one, columns))
    if config.args.get("continues_prompt"):
        raise UserError(
            f"benchmark.{name}.args.continues_prompt = true: {path} has no column `prompt` that "
            f"the completions continue; it has {listed(columns)}."
        )
    return ""


def _rollout(prompt: Prompt, sample: Sample) -> Rollout:
    from grpo_cli.records import Completion, Rollout, Turn

    columns, episode = sample.columns, sample.episode
    ids, logprobs, sampled = map(
        _numbers, (sample.ids, columns.get("sampling_logprobs"), columns.get("sampled"))
    )
    facts: dict[str, Any] = {n: columns[n] for n in COUNTED if isinstance(columns.get(n), int)}
    if episode is not None:
        facts |= {
            "messages": tuple(episode["messages"]),
            "turns": tuple(Turn(**turn) for turn in episode["turns"]),
            "stop_reason": episode["stop_reason"],
            "env_rewards": episode["rewards"],
            "env_metrics": episode["metrics"],
        }
    completion = Completion(
        ids,
        logprobs if len(logprobs) == len(ids) else [0.0] * len(ids),
        "length" if columns.get("finish_reason") == "length" else "stop",
        is_sampled=sampled if sampled and len(sampled) == len(ids) else None,
        **facts,
    )
    return Rollout(prompt, completion, sample.text)


def _numbers(cell: Any) -> list[Any]:
    """Returns a list of numbers; [] without any, as in CSV files."""
    return list(cell) if isinstance(cell, (list, tuple)) else []
