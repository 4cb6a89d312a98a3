"""`grpo score`: calls reward functions on stored completions, without a model or a run."""

from __future__ import annotations

import collections
import json
import math
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from grpo_cli.config import parsing
from grpo_cli.config.command_line import split_options
from grpo_cli.config.compose import BARE, compose_and_call, given_keys
from grpo_cli.config.knob import knob
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.words import described, parse, split
from grpo_cli.data import stored_completions
from grpo_cli.data.conversations import text_of
from grpo_cli.data.prompts import prompt_text
from grpo_cli.data.rows import load_rows
from grpo_cli.data.sample import Sample
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.evaluation.estimates import quantile
from grpo_cli.reporting.progress import Bar
from grpo_cli.scoring.bound_reward import BoundReward
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.scorer import RewardResult, Scorer, ScoringSession
from grpo_cli.training.scorers import MADE_UP

CHUNK = 256  # completions between two updates of the progress bar
CHUNKS_AHEAD = 4
USAGE = """\
grpo score reward=NAME input=FILE              completions of a file or a run
grpo score recipe=NAME row=N completion=TEXT   one completion of a row

Prints what each reward function says. reward.NAME.args.ARG=...,
reward.NAME.timeout=... and scoring.KEY=... set the functions up.

"""


@dataclass
class ScoreOptions:
    """The arguments of `grpo score`; all others compose the recipe."""

    input: str | None = knob(
        None,
        "File of completions, or the folder of a run, a checkpoint or an evaluation; it needs the "
        "column `completion` and the columns that the rewards read.",
    )
    columns: dict[str, str] = knob({}, "Rename a column of the input: columns.NEW=OLD.")
    output: str | None = knob(
        None, "File to write the scores to, replaced if it exists; null: outputs/score/INPUT.jsonl."
    )
    row: int | None = knob(None, "Row of the recipe's data, from 0, instead of an input.", ge=0)
    split: str = knob("train", "Data that row=N is taken from.", choices=("train", "eval"))
    completion: str = knob("", "Completion to score with row=N; - reads standard input.")


HELP = USAGE + described(ScoreOptions)


def main(argv: list[str]) -> None:
    """Runs `grpo score`: the rewards of a recipe, or reward=NAME, on stored completions."""
    options, words = split_options(argv, "grpo score: scores once")
    has_recipe = any(w.startswith("recipe=") for w in words)
    own, rest = split(ScoreOptions, words)
    request = parse(ScoreOptions, own)
    if (request.input is None) == (request.row is None):
        raise UserError(
            "grpo score: give completions with input=FILE, or row=N completion=TEXT for one."
        )
    if request.row is not None and not any(w.startswith("completion=") for w in own):
        raise UserError('row: say what to score, as completion="..." (- reads standard input).')
    if not has_recipe and not any(w.lstrip("+").startswith("reward") for w in rest):
        raise UserError("grpo score: say what to score with: reward=NAME or recipe=NAME.")

    def task(cfg: DictConfig) -> None:
        score(request, parsing.parse(cfg, given_keys(cfg)), has_recipe)

    compose_and_call([*rest, *options], task, BARE)


def score(request: ScoreOptions, recipe: Recipe, own_recipe: bool) -> None:
    """Scores the completions of the request and prints the rewards.

    Args:
        own_recipe: whether the command line names a recipe; its length limit is then read.

    Raises:
        UserError: the file, a column or a reward does not exist.
        TrainingError: a reward failed on some completions; raised after all were scored.
    """
    # SIGTERM becomes an exception, so that `executor.close` runs.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    executor = RewardExecutor(recipe.scoring)
    if recipe.dataset.chat == "auto":  # the tokenizer is not loaded
        chat = own_recipe and recipe.model.path is not None
        recipe = replace(recipe, dataset=replace(recipe.dataset, chat=chat))
    run: dict[str, Any] = {"device": recipe.device}
    if own_recipe:
        run["max_completion_tokens"] = recipe.generation.max_completion_tokens
    try:
        if request.row is not None:
            _score_one(request, recipe, executor, run)
        else:
            _score_file(request, recipe, executor, run)
    finally:
        executor.close()
        signal.signal(signal.SIGTERM, before)


def _score_one(
    request: ScoreOptions, recipe: Recipe, executor: RewardExecutor, run: Mapping[str, Any]
) -> None:
    assert request.row is not None
    dataset = recipe.dataset
    rows = load_rows(dataset, request.split)
    if request.row >= len(rows.rows):
        raise UserError(
            f"row = {request.row}: {rows.source} has {len(rows.rows):,} rows, counted from 0."
        )
    text = sys.stdin.read() if request.completion == "-" else request.completion
    prompt = prompt_text(rows.rows[request.row], dataset, request.row)
    sample = Sample.of_row(rows, request.row, prompt, text, None, dataset.max_pixels)
    sample = replace(sample, row=request.row)
    scorer = Scorer(recipe.reward, rows.columns, rows.source, executor, run)
    scorer.check_readable([sample.columns])
    # A typed completion has no tokens: functions that need them are left out.
    left_out = [name for name, term in scorer.rewards.items() if needs_ids(term)]
    for name in left_out:
        del scorer.rewards[name]
    ((scored,),) = score_samples(scorer, [sample])
    console = Console(highlight=False)
    shown = sample.prompt
    shown = shown if isinstance(shown, str) else text_of(shown[-1]["content"])
    console.print(f"prompt: {_shortened(shown, 500)}", markup=False)
    for name, value in sample.columns.items():
        console.print(f"{name}: {_shortened(str(value), 200)}", markup=False)
    table = Table("reward", "value", "weight", "seconds", "")
    for name, verdict in scored.verdicts.items():
        weight = f"{recipe.reward[name].weight:g}"
        said = verdict.error or ", ".join(f"{k}: {v}" for k, v in verdict.extras.items())
        table.add_row(name, _shown(verdict.value), weight, f"{verdict.seconds:.3f}", said)
    for name in left_out:
        weight = f"{recipe.reward[name].weight:g}"
        table.add_row(name, "none", weight, "", "needs the tokens as sampled: left out")
    table.add_row("sum", _shown(scored.reward), "", "", "", style="bold")
    console.print(table)
    raise_if_failed(scorer, [scored])


def _score_file(
    request: ScoreOptions, recipe: Recipe, executor: RewardExecutor, run: Mapping[str, Any]
) -> None:
    assert request.input is not None
    path = stored_completions.find(Path(request.input).expanduser(), "input")
    samples = stored_completions.load(path, request.columns, "input")
    scorer = Scorer(recipe.reward, [*samples[0].columns], str(path), executor, run, "columns")
    check_ids(scorer, samples, path)
    scorer.check_readable([sample.columns for sample in samples], "input")
    scorer.try_out(replace(samples[0], text=MADE_UP))  # finds mistakes in the arguments
    console = Console(highlight=False)
    for description in scorer.descriptions:
        console.print(description, soft_wrap=True, markup=False)
    output = Path(request.output or default_output(path)).expanduser()
    if output.exists() and output.samefile(path):
        raise UserError(f"output = {output}: {path} is the input.")
    output.parent.mkdir(parents=True, exist_ok=True)
    bar = Bar(console, "score", len(samples))
    found: list[Scored] = []
    try:
        with output.open("w", encoding="utf-8") as file:
            for scored in score_samples(scorer, samples):
                for one in scored:
                    line = json.dumps(line_of(one), ensure_ascii=False, default=str)
                    file.write(line + "\n")
                    found.append(one)
                bar.update(len(found), "completions")
    finally:
        bar.close()
    summary = summarize(scorer, found)
    summary_path = output.with_suffix(".summary.json")
    summary_path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_summary(console, summary, str(path))
    console.print(f"every reward: {output}; summary: {summary_path}", soft_wrap=True)
    raise_if_failed(scorer, found)


def default_output(path: Path) -> str:
    """Returns the file for the scores of a file; for stored completions it names the run."""
    name, folder = Path(path.name.removesuffix(".gz")).stem, path.resolve().parent
    if folder.name == "completions":
        name = f"{folder.parent.name}-{name}"
    elif name == "completions" and (folder / "eval.json").exists():  # of an evaluation
        name = f"{folder.parent.parent.name}-{folder.name}"
    return f"outputs/score/{name}.jsonl"


@dataclass(frozen=True)
class Scored:
    """The results of all functions for one completion."""

    sample: Sample
    verdicts: dict[str, RewardResult]  # by reward
    reward: float | None  # weighted sum; None if no function applies


def score_samples(scorer: Scorer, samples: Sequence[Sample]) -> Iterator[list[Scored]]:
    """Yields the results of all samples in order, by chunks.

    A function that fails gives a result with the error, and the others continue. Some chunks are
    submitted ahead, so that a slow completion leaves no worker idle.
    """
    under_way: collections.deque[tuple[ScoringSession, Sequence[Sample]]] = collections.deque()
    for start in range(0, len(samples), CHUNK):
        chunk = samples[start : start + CHUNK]
        under_way.append((scorer.begin(), chunk))
        under_way[-1][0].start(chunk)
        if len(under_way) > CHUNKS_AHEAD:
            yield _collected(scorer, *under_way.popleft())
    while under_way:
        yield _collected(scorer, *under_way.popleft())


def _collected(scorer: Scorer, session: ScoringSession, samples: Sequence[Sample]) -> list[Scored]:
    verdicts = {name: session.results(term, samples) for name, term in scorer.rewards.items()}
    out = []
    for i, sample in enumerate(samples):
        own = {name: results[i] for name, results in verdicts.items()}
        terms = [(scorer.rewards[name].spec.weight, v.value) for name, v in own.items()]
        applied = [weight * value for weight, value in terms if value is not None]
        out.append(Scored(sample, own, math.fsum(applied) if applied else None))
    return out


def check_ids(scorer: Scorer, samples: Sequence[Sample], path: Path) -> None:
    """Raises a UserError if a function needs the sampled tokens and the file has none."""
    if all(sample.ids is not None for sample in samples):
        return
    for term in scorer.rewards.values():
        if needs_ids(term):
            raise UserError(
                f"reward.{term.name}: {term.function.__name__} needs completion_ids, and {path} "
                "has no column of that name; a run's stored completions have."
            )


def needs_ids(term: BoundReward) -> bool:
    """Returns whether a function needs the sampled tokens."""
    return "completion_ids" in term.signature.needed_standard or term.traits.positions == "tokens"


def line_of(scored: Scored) -> dict[str, Any]:
    """Returns the line of the output for one completion."""
    verdicts = scored.verdicts
    line: dict[str, Any] = {
        "row": scored.sample.row,
        "reward": scored.reward,
        "rewards": {name: v.value for name, v in verdicts.items()},
        "seconds": {name: round(v.seconds, 6) for name, v in verdicts.items()},
    }
    if errors := {name: v.error for name, v in verdicts.items() if v.error is not None}:
        line["errors"] = errors
    if extras := {name: v.extras for name, v in verdicts.items() if v.extras}:
        line["extras"] = extras
    return line


def summarize(scorer: Scorer, scored: Sequence[Scored]) -> dict[str, Any]:
    """Returns the mean, spread, failures and seconds of each function."""
    rewards = [s.reward for s in scored if s.reward is not None]
    summary: dict[str, Any] = {
        "completions": len(scored),
        "reward": {**_moments(rewards), "none": len(scored) - len(rewards)},
        "rewards": {},
    }
    for name in scorer.rewards:
        verdicts = [s.verdicts[name] for s in scored]
        values = [v.value for v in verdicts if v.value is not None]
        seconds = sorted(v.seconds for v in verdicts)
        summary["rewards"][name] = {
            **_moments(values),
            "none": len(verdicts) - len(values),
            "timeouts": sum(v.timed_out for v in verdicts),
            "errors": sum(v.error is not None and not v.timed_out for v in verdicts),
            "seconds_p50": quantile(seconds, 0.5),
            "seconds_p99": quantile(seconds, 0.99),
        }
    return summary


def _moments(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "std": None}
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": math.fsum(values) / len(values), "std": std}


def print_summary(console: Console, summary: Mapping[str, Any], source: str) -> None:
    """Prints the summary as a table."""
    heads = ("mean", "std", "none", "errors", "timeouts", "p50", "p99")
    table = Table("reward", *heads, title=f"{source}: {summary['completions']:,} completions")
    for name, one in summary["rewards"].items():
        counts = [str(one[key]) for key in ("none", "errors", "timeouts")]
        times = [f"{1000 * one[key]:.1f} ms" for key in ("seconds_p50", "seconds_p99")]
        table.add_row(name, _shown(one["mean"]), _shown(one["std"]), *counts, *times)
    if len(summary["rewards"]) > 1:
        own = summary["reward"]
        table.add_row("sum", _shown(own["mean"]), _shown(own["std"]), str(own["none"]))
    console.print(table)


def raise_if_failed(scorer: Scorer, scored: Sequence[Scored]) -> None:
    """Raises a TrainingError if a function with on_error=stop failed."""
    for name, term in scorer.rewards.items():
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
