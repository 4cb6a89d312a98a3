"""Reads stored completions as columns for the report's page, within limits of its size.

A table of two completions of one prompt:

    texts       ["2+3=", '{"answer": "5"}']      each prompt or columns string, once
    problems    [[4, 0]]                         row of the data set, its prompt in `texts`
    first_prompt                                 "2+3=": with what a chat template adds
    step, problem, columns                       [1, 1], [0, 0], [1, 1]
    completion, reward, advantage                ["5", "6"], [1, 0], [0.7, -0.7]
    parts                                        {"exact_match": [1, 0]}
    tokens                                       see `tokens_of`; null: without colours
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo_cli.config.interpolation import masked, masker
from grpo_cli.files import open_file, reading
from grpo_cli.reporting.report import facts, token_texts
from grpo_cli.reporting.report.curves import rounded
from grpo_cli.reporting.report.pictures import Pictures
from grpo_cli.reporting.run_folder import RunFolder

LEFT_OUT = "\n… {:,} characters left out …\n"
LEAST_CHARACTERS = 400  # kept of a completion, however many there are
EPISODE = ("messages", "turns", "stop_reason", "env_rewards", "env_metrics", "env_error")
# Steps in which values of tokens are rounded, to store them as short integers.
LOGPROB_STEP = 0.01
ADVANTAGE_STEP = 0.001
SHARED = ("characters", "tokens", "picture_bytes")  # limits that the runs of a report share


@dataclass(frozen=True)
class ReportLimits:
    """The most that a report holds; more would make it slow to open and to send."""

    completions: int = 20_000
    characters: int = 16_000_000  # of all completions, and of all episodes
    text: int = 20_000  # characters of one completion or prompt
    tokens: int = 1_000_000  # tokens that are stored with colours
    picture_bytes: int = 1_500_000  # of all thumbnails

    def divided(self, runs: int, completions: int) -> ReportLimits:
        """Returns the limits of each of several runs in a report of `completions` in all."""
        shares = {name: getattr(self, name) // runs for name in SHARED}
        return replace(self, completions=completions // runs, **shares)


def read(run: RunFolder, limits: ReportLimits) -> dict[str, Any]:
    """Returns the table of a run's completions, at most `limits`.

    Raises:
        UserError: a file is damaged.
    """
    import pyarrow.parquet

    files = {step: run.completions(step) for step in run.steps_with_completions()}
    counts = {}
    for step, path in files.items():
        with reading(path), open_file(path) as file:
            counts[step] = pyarrow.parquet.read_metadata(file).num_rows
    chosen = chosen_steps(counts, limits.completions)
    rows = [row for step, most in chosen.items() for row in read_rows(files[step], most)]
    table, kept_texts = columns_of(rows, facts.right(run.recipe), limits)
    tokens, used = tokens_of(rows, kept_texts, limits.tokens)
    tokenizer = token_texts.load(run) if rows else None
    if tokenizer and (ids := rows[0].get("prompt_ids")) is not None:
        prompt = tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        table["first_prompt"] = shortened(prompt, limits.text)[0]
    table["vocabulary"] = token_texts.texts_of(tokenizer, used) if tokenizer else None
    table["tokens"] = tokens if tokenizer else [None] * len(rows)
    table |= {"stored": sum(counts.values()), "stored_steps": len(counts)}
    return table | Pictures(limits.picture_bytes).columns(rows)


def chosen_steps(counts: Mapping[int, int], most: int) -> dict[int, int]:
    """Returns the number of completions to read by step: all, or those of evenly spread steps.

    Args:
        counts: number of completions by step.
    """
    total = sum(counts.values())
    if total <= most:
        return dict(counts)
    if most <= 0:
        return {}
    steps = sorted(counts)
    number = min(len(steps), max(2, int(len(steps) * most / total)))
    places = np.unique(np.linspace(0, len(steps) - 1, number).round().astype(int))
    return {steps[i]: min(counts[steps[i]], most // len(places)) for i in places}


def read_rows(path: Path, most: int) -> list[dict[str, Any]]:
    """Returns the first completions of a file; values of tokens are arrays."""
    import pyarrow
    import pyarrow.parquet

    with reading(path), open_file(path) as file:
        table = pyarrow.parquet.read_table(file).slice(0, most)
    columns: dict[str, Sequence[Any]] = {}
    for name in table.column_names:
        kind = table[name].type
        is_tokens = pyarrow.types.is_list(kind) and pyarrow.types.is_primitive(kind.value_type)
        columns[name] = table[name].to_numpy() if is_tokens else table[name].to_pylist()
    names = [*columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def shortened(text: str, longest: int) -> tuple[str, int]:
    """Returns a string, without its middle if too long, and the number of missing characters."""
    missing = len(text) - longest
    if missing <= 0:
        return text, 0
    half = longest // 2
    return text[:half] + LEFT_OUT.format(missing) + text[len(text) - (longest - half) :], missing


def columns_of(
    rows: Sequence[Mapping[str, Any]], right: str | None, limits: ReportLimits
) -> tuple[dict[str, Any], list[bool]]:
    """Returns the columns of completions, and for each whether it is uncut and shows no secret.

    Args:
        right: the reward whose value 1 counts as right.
    """
    longest = limits.text
    if rows:
        share = limits.characters // len(rows)
        longest = min(longest, max(LEAST_CHARACTERS, share))
    texts, mask = dict[str, int](), masker()  # prompts and columns, each with its index

    def place(text: str) -> int:
        return texts.setdefault(text, len(texts))

    problems: dict[tuple[int, int], int] = {}
    cut = [shortened(str(row.get("completion") or ""), longest) for row in rows]
    whole = [not missing and mask(text) == text for text, missing in cut]
    number = partial(_number, rows)
    problem = []
    for row in rows:
        key = (int(row.get("row") or 0), place(str(row.get("prompt") or "")))
        problem.append(problems.setdefault(key, len(problems)))
    names = dict.fromkeys(name for row in rows for name in row)
    parts = {n.removeprefix("rewards/"): number(n) for n in names if n.startswith("rewards/")}
    extras = {
        n.removeprefix("extras/"): [_short(row.get(n)) for row in rows]
        for n in names
        if n.startswith("extras/")
    }
    table = {
        "problems": [[row, prompt] for row, prompt in problems],
        "step": [int(row["step"]) for row in rows],
        "problem": problem,
        "sample": [row.get("sample") for row in rows],
        "columns": [place(row.get("columns") or "{}") for row in rows],
        "texts": [shortened(text, limits.text)[0] for text in texts],
        "completion": [text for text, _ in cut],
        "shortened": sum(missing > 0 for _, missing in cut),
        "reward": number("reward"),
        "advantage": number("advantage"),
        "parts": parts,
        "extras": extras,
        "finish": [row.get("finish_reason") for row in rows],
        "right": [value == 1 for value in parts[right]] if right in parts else None,
        "episodes": episodes(rows, limits),
    }
    return table, whole


def _number(rows: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    values = (row.get(name) for row in rows)
    return [rounded(v, 4) if isinstance(v, int | float) else None for v in values]


def _short(value: Any) -> Any:
    return shortened(value, LEAST_CHARACTERS)[0] if isinstance(value, str) else value


def episodes(rows: Sequence[Mapping[str, Any]], limits: ReportLimits) -> dict[str, dict[str, str]]:
    """Returns the stored cells (JSON) of episodes, by the index of the completion.

    Messages over the limits of length are left out; the page then shows the completion's text.
    """
    found: dict[str, dict[str, str]] = {}
    characters = 0
    for place, row in enumerate(rows):
        cells = {name: masked(row[name]) for name in EPISODE if row.get(name)}
        length = len(cells.get("messages", ""))
        if length > min(2 * limits.text, limits.characters - characters):
            del cells["messages"]
        else:
            characters += length
        if cells:
            found[str(place)] = cells
    return found


def tokens_of(
    rows: Sequence[Mapping[str, Any]], whole: Sequence[bool], most: int
) -> tuple[list[dict[str, list[int]] | None], list[int]]:
    """Returns the tokens of each completion, and the ids of all of them: the vocabulary.

    For example, {"ids": [0, 4], "logprobs": [21, 3], "foreign": [0, 1]}: the indices of the ids in
    the vocabulary; −log-probability in steps of 0.01; and 1 for each token that the model has not
    sampled. If tokens have advantages of their own, also "advantages" in steps of 0.001.

    Args:
        whole: completions whose tokens may be shown.
        most: largest number of tokens; above it, only every k-th completion keeps its tokens.
    """
    lengths = [
        len(r["completion_ids"]) if is_whole and _has_tokens(r) else 0
        for r, is_whole in zip(rows, whole, strict=True)
    ]
    every = max(1, -(-sum(lengths) // most))
    kept = [i for i, n in enumerate(lengths) if n and i % every == 0]
    if not kept:
        return [None] * len(rows), []
    used = np.unique(np.concatenate([rows[i]["completion_ids"] for i in kept]))
    found: list[dict[str, list[int]] | None] = [None] * len(rows)
    for i in kept:
        row = rows[i]
        cells = {"ids": np.searchsorted(used, row["completion_ids"])}
        cells["logprobs"] = -_numbers(row["sampling_logprobs"]) / LOGPROB_STEP
        if (own := row.get("token_advantages")) is not None:
            cells["advantages"] = _numbers(own) / ADVANTAGE_STEP
        if (sampled := row.get("sampled")) is not None:
            cells["foreign"] = 1 - _numbers(sampled)
        found[i] = {name: np.round(v).astype(int).tolist() for name, v in cells.items()}
    return found, used.tolist()


def _has_tokens(row: Mapping[str, Any]) -> bool:
    ids, logprobs = row.get("completion_ids"), row.get("sampling_logprobs")
    return ids is not None and logprobs is not None and len(ids) == len(logprobs)


def _numbers(values: Any) -> Any:
    """Returns numbers as an array, with 0 in place of NaN and ±99 in place of infinities."""
    return np.nan_to_num(np.asarray(values, np.float64), posinf=99, neginf=-99)
