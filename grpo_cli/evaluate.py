"""Evaluation: complete every problem of every task, score, and say how sure the numbers are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_cli.config import Eval
from grpo_cli.distributed import Workers
from grpo_cli.estimates import Estimate, estimate, maj_at_k, pass_at_k
from grpo_cli.generation import Generator, sample
from grpo_cli.journal import Journal
from grpo_cli.metrics import mean
from grpo_cli.registry import TrainerState
from grpo_cli.rollouts import Group, Prompt, Rollout
from grpo_cli.scoring import Sheet, metrics_of
from grpo_cli.tasks import Task
from grpo_cli.tools import ToolGenerator
from grpo_cli.votes import Ballot, answers_in_pool, count_in_pool

LONGEST_TOKEN = 32  # characters, as good as always
GIVES_ANSWER = re.compile(r"\\boxed|answer is|####|答案", re.IGNORECASE)
CHUNK = 64  # problems between two notes of what they are worth


@dataclass(frozen=True)
class Facts:
    """What the numbers are computed from, of one problem; small enough to gather."""

    right: list[bool]  # of each completion
    rewards: list[float]  # NaN where no function applies
    parts: dict[str, list[float | None]]
    lengths: list[int]  # tokens, where they are known
    truncated: list[bool]  # where that is known
    answered: list[bool] | None  # None: there are no answers to speak of
    votes: list[int] | None  # completions of each class of equal answers; None: not counted
    right_votes: list[int]  # the classes that are right
    breakdown: dict[str, str]  # what the problem is, by column
    calls: list[int]  # programs run
    failed_calls: list[int]
    late_calls: list[int]  # of these, those that ran out of time

    @classmethod
    def of(
        cls,
        group: Group,
        right: str,
        breakdown: Sequence[str] = (),
        answers: Sequence[str | None] | None = None,
        ballot: Ballot | None = None,
        *,
        ends_known: bool = True,
    ) -> Facts:
        """What counts of a scored group.

        Args:
            right: the reward of which 1 counts as right. breakdown: columns to be told apart.
            answers: the completions' final answers, where they have such. ballot: these counted.
            ends_known: whether finish reasons are more than a guess.
        """
        rollouts, columns = group.rollouts, group.prompt.columns
        rights = rights_of(group, right)
        answered = None
        if answers is not None:
            answered = [a is not None or ok for a, ok in zip(answers, rights, strict=True)]
        return cls(
            right=rights,
            rewards=[r.reward for r in rollouts],
            parts={
                name: [r.reward_parts[name] for r in rollouts] for name in rollouts[0].reward_parts
            },
            lengths=[len(r.completion.ids) for r in rollouts if r.completion.ids],
            truncated=[r.completion.finish_reason == "length" for r in rollouts if ends_known],
            answered=answered,
            votes=None if ballot is None else [len(v) for v in ballot.votes],
            right_votes=[] if ballot is None else sorted(ballot.right),
            breakdown={c: str(columns[c]) for c in breakdown if columns.get(c) is not None},
            calls=[r.completion.tool_calls for r in rollouts],
            failed_calls=[r.completion.tool_errors for r in rollouts],
            late_calls=[r.completion.tool_timeouts for r in rollouts],
        )


@dataclass(frozen=True)
class Result:
    """What was found of one task."""

    task: Task
    # accuracy, accuracy_low, accuracy_high, mean@8, level/3/accuracy ...: the same on every process
    metrics: dict[str, float]
    # All, in the order of the data; on the main process, where they were asked for.
    groups: list[Group]

    @property
    def problems(self) -> int:
        return int(self.metrics["n"])


@dataclass(frozen=True)
class Evaluator:
    """Solves tasks with whatever `generator` samples from."""

    config: Eval
    workers: Workers
    tokenizer: PreTrainedTokenizerBase | None  # None: nothing is sampled
    generator: Generator | None
    tasks: Sequence[Task]

    @property
    def problems(self) -> int:
        """Of all tasks."""
        return sum(len(t.prompts) for t in self.tasks)

    def run(
        self,
        progress: Callable[[int, str], None] = lambda done, text: None,
        state: TrainerState | None = None,
        leavable: Callable[[], AbstractContextManager[None]] = nullcontext,
        journal: Journal | None = None,
        keep_groups: bool = False,
    ) -> list[Result]:
        """Completes and scores every problem; they are divided over the processes.

        Args:
            state: what functions are told of the run, where there is one.
            progress: called with (problems done, a word about them).
            leavable: entered around what may be broken off.
            journal: keeps what is done, and what was done before.
            keep_groups: whether the main process's results are to hold all completions.

        Raises:
            TrainingError: a reward function failed, or the sandbox of a tool did.
        """
        results: list[Result] = []
        for task in self.tasks:
            before = sum(len(r.task.prompts) for r in results)

            def told(done: int, text: str, before: int = before, task: Task = task) -> None:
                progress(before + done, f"{task.label}: {text}" if task.mode else text)

            found, groups = self._solved(task, told, state, leavable, journal)
            kept: list[Group] = []
            if keep_groups:
                kept = [g for part in self.workers.gather_on_main(groups) for g in part]
                kept.sort(key=lambda g: g.position)
            results.append(Result(task, found, kept))
        return results

    def _solved(
        self,
        task: Task,
        progress: Callable[[int, str], None],
        state: TrainerState | None,
        leavable: Callable[[], AbstractContextManager[None]],
        journal: Journal | None,
    ) -> tuple[dict[str, float], list[Group]]:
        """(the numbers of a task, this process's completions)."""
        workers = self.workers
        known, prompts = [*(task.given or ())], []
        for prompt in task.prompts if task.given is None else ():
            group = journal.group(task.label, prompt) if journal is not None else None
            if group is None:
                prompts.append(prompt)
            else:
                known.append(group)
        groups = known[workers.rank :: workers.size]
        # What is drawn for a problem depends on its row, whatever else is evaluated with it.
        own = [(p.row, p) for p in prompts[workers.rank :: workers.size]]
        done = len(known)
        sheet = task.scorer.begin(state)
        if journal is not None and workers.is_main:  # by whichever process in earlier sittings
            for measured in journal.measured.get(task.label, ()):
                sheet.measure(measured)
        unscored = [g for g in groups if journal is None or not journal.is_scored(task.label, g)]
        for group in unscored:
            sheet.add(group.rollouts)

        def arrived(rollouts: list[Rollout]) -> None:
            nonlocal done
            done += workers.size
            for r in rollouts:
                r.text = judged_text(r, task.cut, task.asks)
            if journal is not None:
                journal.completed(task.label, rollouts)
            progress(min(done, len(task.prompts)), "rows completed")
            sheet.add(rollouts)

        in_rounds = task.tools is not None and workers.in_step  # every process's
        with nullcontext() if in_rounds else leavable():
            fresh = self._sampled(task, own, arrived) if task.given is None else []
        with leavable(), workers.together():
            for done in self._score(task, sheet, [*unscored, *fresh], journal):
                progress(min(done * workers.size, len(task.prompts)), "scored")
        groups = sorted([*groups, *fresh], key=lambda g: g.position)
        with workers.together():
            facts = self._facts(task, groups)
        of_rewards = {
            key: value
            for key, value in sorted(metrics_of([sheet], workers).items())
            if not key.startswith("time/")
        }
        everyones = [f for part in workers.gather(facts) for f in part]
        return summarize(everyones, self.config, task.num_samples) | of_rewards, groups

    def _sampled(
        self,
        task: Task,
        prompts: Sequence[tuple[int, Prompt]],
        arrived: Callable[[list[Rollout]], None],
    ) -> list[Group]:
        generator, tokenizer = self.generator, self.tokenizer
        assert generator is not None and tokenizer is not None, "there is a model"  # noqa: PT018
        tools = None
        if task.tools is not None:
            tools = ToolGenerator(generator, tokenizer, task.tools, go_on=self._go_on)
        try:
            return sample(
                tools or generator,
                tokenizer,
                prompts,
                task.num_samples,
                task.sampling,
                task.seed,
                arrived,
            )
        finally:
            if tools is not None:
                tools.stop()

    def _go_on(self, has_some: bool) -> bool:
        """Whether there is another round of generation, which may be everyone's."""
        if self.workers.in_step:  # weights are gathered for each round
            return self.workers.max(float(has_some)) > 0
        return has_some

    def _score(
        self, task: Task, sheet: Sheet, groups: Sequence[Group], journal: Journal | None
    ) -> Iterator[int]:
        """Scores completions; tells how many problems are done."""
        # Functions without a timeout see all in one call where nobody waits for a sign.
        size = CHUNK if journal is not None or task.given is not None else max(len(groups), 1)
        for start in range(0, len(groups), size):
            chunk = groups[start : start + size]
            before = sheet.measured() if journal is not None else None
            sheet.finish([r for g in chunk for r in g.rollouts], self.tokenizer)
            if journal is not None:
                journal.scored(task.label, chunk, sheet.measured(since=before))
            yield start + len(chunk)

    def _facts(self, task: Task, groups: Sequence[Group]) -> list[Facts]:
        facts_of = partial(
            Facts.of, right=task.right, breakdown=task.breakdown, ends_known=task.ends_known
        )
        if not task.has_votes:
            return [facts_of(g) for g in groups]
        texts = [r.text for g in groups for r in g.rollouts]
        flat = iter(answers_in_pool(texts, task.scorer.crew))
        answers = [[next(flat) for _ in g.rollouts] for g in groups]
        ballots: Sequence[Ballot | None] = [None] * len(groups)
        if task.num_samples > 1 and "maj" in chosen(self.config):
            rights = [rights_of(g, task.right) for g in groups]
            problems = list(zip(answers, rights, strict=True))
            args = task.scorer.terms[task.right].args
            how = {key: args[key] for key in ("units", "percent") if key in args}
            ballots, _ = count_in_pool(problems, task.scorer.crew, **how)
        return [
            facts_of(g, answers=said, ballot=ballot)
            for g, said, ballot in zip(groups, answers, ballots, strict=True)
        ]


def judged_text(rollout: Rollout, stops: Sequence[str], asks: Sequence[str] = ()) -> str:
    """A completion's text without the stop text that its last token has completed.

    Args:
        asks: stop texts that follow a problem in the prompt. What the model has written since the
            last blank line before one of them is a problem of its own, and goes too, unless an
            answer is given there.
    """
    text = rollout.text
    if rollout.completion.finish_reason == "stop":
        for stop in stops:
            at = text.rfind(stop)
            if at >= 0 and len(text) - at - len(stop) < LONGEST_TOKEN:
                own = text.rfind("\n\n", 0, at) if stop in asks else -1
                asked = own >= 0 and not GIVES_ANSWER.search(text, own, at)
                return text[: own if asked else at]
    return text


def rights_of(group: Group, name: str) -> list[bool]:
    """Whether each completion is right: its reward `name` is 1."""
    return [r.reward_parts[name] == 1 for r in group.rollouts]


def chosen(config: Eval) -> list[str]:
    """The kinds of numbers that are told of several completions a problem."""
    return config.metric or ["mean", "pass", "maj"]


def drawn_of(config: Eval, n: int) -> list[int]:
    """The k of pass@k and maj@k for n completions a problem."""
    if config.k:
        return sorted(config.k)
    powers = [2**i for i in range(n.bit_length()) if 2**i <= n]
    return sorted({*powers, n})


def summarize(facts: Sequence[Facts], config: Eval, n: int) -> dict[str, float]:
    """The numbers of a task; NAME_low and NAME_high are the ends of NAME's 95 % interval.

    Args:
        facts: of every problem. n: completions of each.
    """
    metrics: dict[str, float] = {"n": float(len(facts))}
    completions = sum(len(f.right) for f in facts)

    def put(name: str, of: Callable[[Facts], float], among: Sequence[Facts] = facts) -> None:
        found = estimate([of(f) for f in among], sum(len(f.right) for f in among))
        metrics.update(with_interval(name, found))

    put("accuracy", share_right)
    metrics["reward"] = mean([v for f in facts for v in f.rewards if not math.isnan(v)])
    metrics["mean_length"] = mean([float(v) for f in facts for v in f.lengths])
    metrics["clipped_ratio"] = mean([float(v) for f in facts for v in f.truncated])
    if any(f.answered is not None for f in facts):
        metrics["no_answer"] = mean([float(not a) for f in facts for a in f.answered or ()])
    for name in facts[0].parts if facts else ():
        values = [v for f in facts for v in f.parts[name] if v is not None]
        metrics[f"rewards/{name}/mean"] = mean(values)
    if n > 1:
        metrics["completions"] = float(completions)
        kinds, ks = chosen(config), drawn_of(config, n)
        if "mean" in kinds:
            put(f"mean@{n}", share_right)
        for k in ks if "pass" in kinds else ():
            put(f"pass@{k}", partial(_pass, k=k))
        if "maj" in kinds and all(f.votes is not None for f in facts):
            for k in ks:
                put(f"maj@{k}", partial(_maj, k=k))
    calls = sum(map(sum, (f.calls for f in facts)))
    if calls:
        metrics["tool_calls"] = calls / completions
        metrics["tool_errors"] = sum(map(sum, (f.failed_calls for f in facts))) / calls
        metrics["tool_timeouts"] = sum(map(sum, (f.late_calls for f in facts))) / calls
    for column in dict.fromkeys(c for f in facts for c in f.breakdown):
        for value in sorted({f.breakdown[column] for f in facts if column in f.breakdown}):
            among = [f for f in facts if f.breakdown.get(column) == value]
            put(f"{column}/{value}/accuracy", share_right, among)
            metrics[f"{column}/{value}/n"] = float(len(among))
    return metrics


def share_right(facts: Facts) -> float:
    """Of a problem's completions."""
    return mean([float(right) for right in facts.right])


def _pass(facts: Facts, k: int) -> float:
    return pass_at_k(sum(facts.right), len(facts.right), k)


def _maj(facts: Facts, k: int) -> float:
    assert facts.votes is not None, "counted"
    abstained = len(facts.right) - sum(facts.votes)
    return maj_at_k(facts.votes, facts.right_votes, abstained, k)


def with_interval(name: str, found: Estimate) -> dict[str, float]:
    """An estimate as three metrics."""
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def as_metrics(results: Sequence[Result]) -> dict[str, float]:
    """What training logs of an evaluation, by `eval/...`.

    Of benchmarks also their mean accuracy, each counting alike. Its interval is made of theirs by
    the squares of their arms, each side by itself (MOVER: Zou and Donner 2008, Stat. Med. 27:1693):
    of one benchmark it is that one's.
    """
    if len(results) == 1 and results[0].task.mode is None:
        metrics = {f"eval/{key}": value for key, value in results[0].metrics.items()}
        del metrics["eval/n"]
        return metrics
    metrics = {
        f"eval/{r.task.key}/{key}": value for r in results for key, value in r.metrics.items()
    }
    middle = mean([r.metrics["accuracy"] for r in results])
    down, up = (
        math.hypot(*(r.metrics[end] - r.metrics["accuracy"] for r in results)) / len(results)
        for end in ("accuracy_low", "accuracy_high")
    )
    both = with_interval("accuracy", Estimate(middle, middle - down, middle + up))
    metrics |= {f"eval/{key}": value for key, value in both.items()}
    for key in ("reward", "mean_length", "clipped_ratio"):
        metrics[f"eval/{key}"] = mean([r.metrics[key] for r in results])
    return metrics


def nested(metrics: Mapping[str, float]) -> dict[str, Any]:
    """A task's numbers as eval.json and summary.json have them: accuracy, interval_95, ..."""
    out: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    for key, value in metrics.items():
        parts = key.split("/")
        if key.endswith(("_low", "_high")):
            continue
        plain: float | int | None = None if math.isnan(value) else value  # JSON has no NaN
        if parts[-1] in ("n", "completions"):
            plain = int(value)
        bounds = (f"{key}_low", f"{key}_high")
        ends = [metrics[name] for name in bounds if name in metrics]
        if len(parts) > 2 and parts[0] != "rewards":  # level/3/accuracy
            column, kind, number = parts[0], "/".join(parts[1:-1]), parts[-1]
            inner = out.setdefault("by", {}).setdefault(column, {}).setdefault(kind, {})
            inner[number] = plain
            if ends:
                inner["interval_95"] = ends
            continue
        out[key] = plain
        if ends and key == "accuracy":
            out["interval_95"] = ends
        elif ends:
            intervals[key] = ends
    if intervals:
        out["intervals_95"] = intervals
    return out
