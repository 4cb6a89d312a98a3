"""`grpo score`: rewards tried out on completions that are there, without a model or a run."""

from __future__ import annotations

import collections
import json
import math
import re
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_cli import data, folders
from grpo_cli.config import Recipe
from grpo_cli.errors import TrainingError, UserError, listed, nearest
from grpo_cli.prepare import MADE_UP
from grpo_cli.progress import Bar
from grpo_cli.reward_calls import Crew, Sample, Term
from grpo_cli.scoring import Scorer, Sheet, Verdict

CHUNK = 256  # completions between two signs of progress
CHUNKS_AHEAD = 4
TRUE, FALSE = ("true", "yes", "1", "1.0", "correct"), ("false", "no", "0", "0.0", "incorrect")
READ = ("recipe", "reward", "scoring", "device")  # of a recipe, where the completions are there
WORDS = ("input", "label", "row", "split", "completion", "output", "threshold", "passes")


USAGE = """\
grpo score reward=NAME input=FILE              of the completions in a file, or stored with a run
grpo score recipe=NAME row=N completion=TEXT   of one completion of a row of the recipe's data

  columns.NEW=NAME   rename a column of the file; it needs `completion` and what the rewards take
  label=COLUMN       hold the rewards against a column of true and false
  threshold=0.5      a reward from here on counts as right
  passes=2           score everything so often, to see what changes (1 without label)
  output=FILE        where the scores go; by default outputs/score/INPUT.jsonl
  split=eval         take row=N from the held-out data; completion=- reads standard input

reward.NAME.args.ARG=..., reward.NAME.timeout=... and scoring.KEY=... set the rewards up:
"""


@dataclass
class Request:
    """What a command line asks for, besides the recipe."""

    input: str | None = None  # a file of completions, or a checkpoint with stored ones
    columns: dict[str, str] = field(default_factory=dict)  # new name -> name in the file
    label: str | None = None  # the column that says which completions are right
    row: int | None = None  # of the recipe's data, instead of a file
    split: str = "train"
    completion: str | None = None
    output: str | None = None  # where the scores go
    threshold: float = 0.5  # rewards from here on count as right
    passes: int | None = None  # times that everything is scored; null: 2 with labels, else 1


def is_own(word: str) -> bool:
    """Whether a word is one of this command's, and no part of a recipe."""
    key, equals, _ = word.partition("=")
    return bool(equals) and (key in WORDS or key.startswith("columns."))


def split_words(argv: Sequence[str]) -> tuple[Request, list[str]]:
    """(what the command line asks for, the words that compose the recipe).

    Raises:
        UserError: a word given twice, or with a value of another kind, or words that exclude one
            another.
    """
    request, rest, seen = Request(), [], set()
    for word in argv:
        key, equals, value = word.partition("=")
        if equals and key.startswith("columns."):
            name = key.removeprefix("columns.")
            if name in request.columns:
                raise UserError(f"{key}: is given twice.")
            if not (name and value):
                raise UserError(f"{word}: write columns.NEW_NAME=NAME.")
            request.columns[name] = value
        elif equals and key in WORDS:
            if key in seen:
                raise UserError(f"{key}: is given twice.")
            seen.add(key)
            if not value and key != "completion":
                raise UserError(f"{key}=: lacks a value.")
            setattr(request, key, _converted(key, value))
        else:
            rest.append(word)
    if (request.input is None) == (request.row is None):
        raise UserError(
            "grpo score: give completions with input=FILE, or row=N completion=TEXT for one."
        )
    if request.row is not None and request.completion is None:
        raise UserError('row: say what to score, as completion="..." (- reads standard input).')
    if request.row is None and (stray := seen & {"completion", "split"}):
        raise UserError(f"{min(stray)}: is only read with row=N.")
    if request.row is not None and (stray := seen & {"label", "output", "threshold", "passes"}):
        raise UserError(f"{min(stray)}: is only read with input=FILE.")
    if request.row is not None and request.columns:
        raise UserError("columns: are those of input=FILE; the recipe's are dataset.columns.")
    if "threshold" in seen and request.label is None:
        raise UserError("threshold: is only read with label=COLUMN.")
    if request.input is not None:
        for word in rest:
            key = re.split(r"[=.]", word.lstrip("+~"), maxsplit=1)[0]
            if key not in READ and not word.startswith("generation.max_completion_tokens="):
                raise UserError(
                    f"{word}: grpo score reads nothing of it; with input=FILE it reads "
                    f"{listed(READ)}."
                )
    if request.split not in ("train", "eval"):
        raise UserError(f"split = {request.split}: must be train or eval.")
    return request, rest


def _converted(key: str, value: str) -> Any:
    kind = {"row": int, "passes": int, "threshold": float}.get(key)
    if kind is None:
        return value
    try:
        number = kind(value)
    except ValueError:
        number = math.nan
    lowest = {"row": 0, "passes": 1, "threshold": -math.inf}[key]
    if not (math.isfinite(number) and number >= lowest):
        name = "a number" if kind is float else f"a whole number, {lowest} or more"
        raise UserError(f"{key} = {value}: must be {name}.")
    return number


def score(request: Request, recipe: Recipe, own_recipe: bool) -> None:
    """Scores what is asked for and prints what was found.

    Args:
        own_recipe: whether the command line names a recipe, whose length limit then holds.

    Raises:
        UserError: the file, a column or a reward is not there.
        TrainingError: a reward failed on some completions; said after all were scored.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `crew.close`
    crew = Crew(recipe.scoring)
    run: dict[str, Any] = {"device": recipe.device}
    if own_recipe:
        run["max_completion_tokens"] = recipe.generation.max_completion_tokens
    try:
        if request.row is not None:
            _score_one(request, recipe, crew, run)
        else:
            _score_file(request, recipe, crew, run)
    finally:
        crew.close()
        signal.signal(signal.SIGTERM, before)


def _score_one(request: Request, recipe: Recipe, crew: Crew, run: Mapping[str, Any]) -> None:
    assert request.row is not None and request.completion is not None  # noqa: PT018
    rows = data.load_rows(recipe.dataset, request.split)
    if request.row >= len(rows.rows):
        raise UserError(
            f"row = {request.row}: {rows.source} has {len(rows.rows):,} rows, counted from 0."
        )
    row = rows.rows[request.row]
    text = sys.stdin.read() if request.completion == "-" else request.completion
    prompt = data.prompt_text(row, recipe.dataset, request.row)
    sample = Sample(request.row, prompt, text, None, data.other_columns(row))
    scorer = Scorer(recipe.reward, rows.columns, rows.source, crew, run)
    # What was typed has no tokens: those who need them sit out.
    sits_out = [name for name, term in scorer.terms.items() if needs_ids(term)]
    for name in sits_out:
        del scorer.terms[name]
    ((scored,),) = score_samples(scorer, [sample])
    console = Console(highlight=False)
    shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    console.print(f"prompt: {_shortened(shown, 500)}", markup=False)
    for name, value in sample.columns.items():
        console.print(f"{name}: {_shortened(str(value), 200)}", markup=False)
    table = Table("reward", "value", "weight", "seconds", "")
    for name, verdict in scored.verdicts.items():
        weight = f"{recipe.reward[name].weight:g}"
        said = verdict.error or ", ".join(f"{k}: {v}" for k, v in verdict.extras.items())
        table.add_row(name, _shown(verdict.value), weight, f"{verdict.seconds:.3f}", said)
    for name in sits_out:
        weight = f"{recipe.reward[name].weight:g}"
        table.add_row(name, "none", weight, "", "needs the tokens as sampled: left out")
    table.add_row("sum", _shown(scored.reward), "", "", "", style="bold")
    console.print(table)
    raise_if_failed(scorer, [scored])


def _score_file(request: Request, recipe: Recipe, crew: Crew, run: Mapping[str, Any]) -> None:
    assert request.input is not None
    path = find_completions(Path(request.input).expanduser())
    samples, columns = load_samples(path, request.columns)
    labels = None
    if request.label is not None:
        labels = labels_of(samples, request.label, columns, path)
        samples = [
            replace(s, columns={k: v for k, v in s.columns.items() if k != request.label})
            for s in samples
        ]
    scorer = Scorer(recipe.reward, [*samples[0].columns], str(path), crew, run, "columns")
    check_ids(scorer, samples, path)
    if recipe.scoring.try_out:  # a mistake in the arguments fails on any completion
        scorer.try_out(replace(samples[0], text=MADE_UP))
    console = Console(highlight=False)
    for description in scorer.descriptions:
        console.print(description, soft_wrap=True, markup=False)
    output = Path(request.output or default_output(path)).expanduser()
    check_output(output, path)
    passes = request.passes or (1 if labels is None else 2)
    bar = Bar(console, "score", len(samples) * passes)
    found: list[list[Scored]] = []
    try:
        for number in range(passes):
            crew.forget()  # a second pass is there to see whether it comes out the same
            found.append([])
            for scored in score_samples(scorer, samples):
                found[-1] += scored
                bar.update(number * len(samples) + len(found[-1]), "completions")
    finally:
        bar.close()
    first = found[0]
    write_scores(output, first, labels, request.threshold)
    summary = summarize(scorer, found)
    if labels is not None:
        summary["label"] = agreement(first, labels, request.threshold)
    summary_path = output.with_suffix(".summary.json")
    summary_path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_summary(console, summary, str(path))
    console.print(f"every reward: {output}; summary: {summary_path}", soft_wrap=True)
    raise_if_failed(scorer, [s for one_pass in found for s in one_pass])


def default_output(path: Path) -> str:
    """Where the scores of a file go; those of stored completions carry the run's name."""
    name, folder = Path(path.name.removesuffix(".gz")).stem, path.resolve().parent
    if folder.name == "completions":
        name = f"{folder.parent.name}-{name}"
    elif name == "completions":
        name = f"{folder.parent.parent.name}-{folder.name}"
    return f"outputs/score/{name}.jsonl"


def check_output(output: Path, path: Path) -> None:
    """Raises a UserError if the scores cannot go there, before anything is scored."""
    for file in (output, output.with_suffix(".summary.json")):
        if file.exists() and path.exists() and file.samefile(path):
            raise UserError(f"output = {output}: {file} is the input.")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a"):
                pass
        except OSError as error:
            raise UserError(f"output = {output}: cannot be written: {error.strerror}.") from error


@dataclass(frozen=True)
class Scored:
    """What every function says of one completion."""

    sample: Sample
    verdicts: dict[str, Verdict]  # by reward
    reward: float | None  # weighted sum; None where none applies


def score_samples(scorer: Scorer, samples: Sequence[Sample]) -> Iterator[list[Scored]]:
    """Every function's verdict on each sample, by chunks of them, in order.

    A failure is a verdict, and stops none of the others. A chunk is begun before the one before it
    is waited for, so that a slow completion leaves no worker idle.
    """
    under_way: collections.deque[tuple[Sheet, Sequence[Sample]]] = collections.deque()
    for start in range(0, len(samples), CHUNK):
        chunk = samples[start : start + CHUNK]
        under_way.append((scorer.begin(), chunk))
        under_way[-1][0].start(chunk)
        if len(under_way) > CHUNKS_AHEAD:
            yield _collected(scorer, *under_way.popleft())
    while under_way:
        yield _collected(scorer, *under_way.popleft())


def _collected(scorer: Scorer, sheet: Sheet, samples: Sequence[Sample]) -> list[Scored]:
    verdicts = {name: sheet.verdicts(term, samples) for name, term in scorer.terms.items()}
    by_sample = [{name: verdicts[name][i] for name in verdicts} for i in range(len(samples))]
    return [
        Scored(sample, own, total(scorer, own))
        for sample, own in zip(samples, by_sample, strict=True)
    ]


def total(scorer: Scorer, verdicts: Mapping[str, Verdict]) -> float | None:
    """The weighted sum over the functions that apply; None if none does."""
    applied = [
        scorer.terms[name].weight * v.value for name, v in verdicts.items() if v.value is not None
    ]
    return math.fsum(applied) if applied else None


def find_completions(path: Path) -> Path:
    """A file, or the stored completions of a run, a checkpoint or an evaluation.

    Raises:
        UserError: a folder without any.
    """
    if not path.is_dir():
        return path
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    stored = [p / "completions.parquet" for p in (path, run / "eval" / path.name)]
    stored.append(run / "completions" / f"{path.name}.parquet")
    if run == path:
        steps = path.glob("completions/step-*.parquet")
        stored += sorted(steps, key=lambda p: folders.step_of(p), reverse=True)
    for file in stored:
        if file.is_file():
            return file
    raise UserError(
        f"input = {path}: holds no completions (completions/step-N.parquet of a run, "
        "completions.parquet of an evaluation)."
    )


def load_samples(
    path: Path, columns: Mapping[str, str], key: str = "input"
) -> tuple[list[Sample], list[str]]:
    """The completions of a file, and the columns that it has.

    Args:
        columns: to rename, as new name: old name. key: what messages call the file by.

    Raises:
        UserError: a missing file or column, a malformed line, a completion that is no text.
    """
    table = data.load_file(path, key)
    table = data.rename_columns(table, columns, str(path), "columns")
    if "completion" not in table.column_names:
        raise UserError(
            f"{key} = {path}: has no column 'completion'; it has {listed(table.column_names)}. "
            f"Name it with columns.completion=NAME.{nearest('completion', table.column_names)}"
        )
    samples = []
    for number, row in enumerate(table):
        stored = stored_columns(row.pop("columns", None))
        own = {**row, **stored}
        prompt, text = own.pop("prompt", ""), own.pop("completion")
        if isinstance(text, list) and text and isinstance(text[-1], dict):  # a chat's messages
            text = text[-1].get("content")
        if not isinstance(text, str):
            raise UserError(
                f"{key} = {path}, row {number}: the completion is {text!r}; it must be text."
            )
        samples.append(Sample(number, prompt, text, own.pop("completion_ids", None), own))
    return samples, [*samples[0].columns]


def stored_columns(cell: Any) -> dict[str, Any]:
    """Stored completions keep the data set's columns in one of their own, perhaps as JSON text."""
    columns = cell
    if isinstance(cell, str) and cell.startswith("{"):
        try:
            columns = json.loads(cell)
        except ValueError:  # a text of the user's own
            return {}
    return columns if isinstance(columns, dict) else {}


def labels_of(
    samples: Sequence[Sample], label: str, columns: Sequence[str], path: Path
) -> list[bool]:
    """The true/false column of each sample.

    Raises:
        UserError: no such column, or a value that is neither.
    """
    if label not in columns:
        raise UserError(
            f"label = {label}: {path} has no such column; it has {listed(columns)}."
            f"{nearest(label, columns)}"
        )
    labels = []
    for sample in samples:
        value = str(sample.columns[label]).strip().lower()
        if value not in TRUE + FALSE:
            raise UserError(
                f"label = {label}: row {sample.row} has {sample.columns[label]!r}; it must be "
                "true or false (or 1 or 0)."
            )
        labels.append(value in TRUE)
    return labels


def check_ids(scorer: Scorer, samples: Sequence[Sample], path: Path) -> None:
    """Raises a UserError if a function needs the sampled tokens and they are not there."""
    if all(sample.ids is not None for sample in samples):
        return
    for term in scorer.terms.values():
        if needs_ids(term):
            raise UserError(
                f"reward.{term.name}: {term.function.__name__} needs completion_ids, and {path} "
                "has no column of that name; a run's stored completions have."
            )


def needs_ids(term: Term) -> bool:
    """Whether a function cannot do without the sampled tokens."""
    return "completion_ids" in term.signature.needed_standard or term.positions == "tokens"


def write_scores(
    path: Path, scored: Sequence[Scored], labels: Sequence[bool] | None, threshold: float
) -> None:
    """One JSON object a completion, in the order of the input."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for i, one in enumerate(scored):
            line: dict[str, Any] = {
                "row": one.sample.row,
                "reward": one.reward,
                "rewards": {name: v.value for name, v in one.verdicts.items()},
                "seconds": {name: round(v.seconds, 6) for name, v in one.verdicts.items()},
            }
            errors = {name: v.error for name, v in one.verdicts.items() if v.error is not None}
            extras = {name: v.extras for name, v in one.verdicts.items() if v.extras}
            if errors:
                line["errors"] = errors
            if extras:
                line["extras"] = extras
            if labels is not None:
                line |= {"label": labels[i], "agrees": says(one, threshold) is labels[i]}
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


def says(scored: Scored, threshold: float) -> bool | None:
    """Whether a completion counts as right; None if no function applies to it."""
    return None if scored.reward is None else scored.reward >= threshold


def summarize(scorer: Scorer, passes: Sequence[Sequence[Scored]]) -> dict[str, Any]:
    """What all the scores amount to, by function."""
    first = passes[0]
    rewards = [s.reward for s in first if s.reward is not None]
    summary: dict[str, Any] = {
        "completions": len(first),
        "passes": len(passes),
        "reward": {**_moments(rewards), "none": len(first) - len(rewards)},
    }
    for name in scorer.terms:
        verdicts = [s.verdicts[name] for s in first]
        values = [v.value for v in verdicts if v.value is not None]
        seconds = sorted(s.verdicts[name].seconds for one in passes for s in one)
        by_row = zip(*([s.verdicts[name].value for s in one] for one in passes), strict=True)
        summary.setdefault("rewards", {})[name] = {
            **_moments(values),
            "none": len(verdicts) - len(values),
            "timeouts": sum(v.timed_out for v in verdicts),
            "errors": sum(v.error is not None and not v.timed_out for v in verdicts),
            "seconds_p50": quantile(seconds, 0.5),
            "seconds_p99": quantile(seconds, 0.99),
            "changed_between_passes": sum(len(set(values)) > 1 for values in by_row),
        }
    return summary


def _moments(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "std": None}
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": math.fsum(values) / len(values), "std": std}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def agreement(scored: Sequence[Scored], labels: Sequence[bool], threshold: float) -> dict[str, Any]:
    """How often the reward says what the label says; no reward agrees with neither."""
    counts = collections.Counter(
        (says(one, threshold), label) for one, label in zip(scored, labels, strict=True)
    )
    agreed = counts[True, True] + counts[False, False]
    return {
        "agreement": agreed / len(labels),
        "agreed": agreed,
        "labelled_true": sum(labels),
        "labelled_false": len(labels) - sum(labels),
        "false_positives": counts[True, False],
        "false_negatives": counts[False, True],
        "no_reward": counts[None, True] + counts[None, False],
        "threshold": threshold,
    }


def print_summary(console: Console, summary: Mapping[str, Any], source: str) -> None:
    """The summary as a table, and the line `agreement: ...` where there are labels."""
    heads = ("mean", "std", "none", "errors", "timeouts", "p50", "p99")
    table = Table("reward", *heads, title=f"{source}: {summary['completions']:,} completions")
    for name, one in summary["rewards"].items():
        table.add_row(name, *_cells(one))
    if len(summary["rewards"]) > 1:
        own = summary["reward"]
        table.add_row("sum", _shown(own["mean"]), _shown(own["std"]), str(own["none"]))
    console.print(table)
    if summary["passes"] > 1:
        for name, one in summary["rewards"].items():
            changed = one["changed_between_passes"]
            said = f"{changed} of {summary['completions']:,} values" if changed else "no value"
            console.print(f"{name}: {said} changed between {summary['passes']} passes")
    if (labels := summary.get("label")) is not None:
        silent = f", {labels['no_reward']} without a reward" if labels["no_reward"] else ""
        console.print(
            f"agreement: {labels['agreement']:.4f} ({labels['agreed']:,} of "
            f"{summary['completions']:,}; {labels['false_positives']} false positives of "
            f"{labels['labelled_false']:,}, {labels['false_negatives']} false negatives of "
            f"{labels['labelled_true']:,}{silent})",
            soft_wrap=True,
        )


def _cells(one: Mapping[str, Any]) -> Iterator[str]:
    yield _shown(one["mean"])
    yield _shown(one["std"])
    yield from (str(one[key]) for key in ("none", "errors", "timeouts"))
    yield from (f"{1000 * one[key]:.1f} ms" for key in ("seconds_p50", "seconds_p99"))


def raise_if_failed(scorer: Scorer, scored: Sequence[Scored]) -> None:
    """Raises a TrainingError if a function failed that would stop a run."""
    for name, term in scorer.terms.items():
        failed = [
            s for s in scored if (v := s.verdicts[name]).error is not None and not v.timed_out
        ]
        if failed and term.on_error == "stop":
            first = failed[0]
            raise TrainingError(
                f"reward {name!r} failed on {len({s.sample.row for s in failed})} of "
                f"{len({s.sample.row for s in scored})} completions; the first, row "
                f"{first.sample.row}: it {first.verdicts[name].error}"
            )


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
