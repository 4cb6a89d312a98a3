"""Samples and scores completions for every problem of every task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_cli.distributed.workers import Workers
from grpo_cli.environments.programs import program_loop
from grpo_cli.environments.rollouter import Rollouter
from grpo_cli.errors import TrainingError
from grpo_cli.evaluation.benchmarks import asking
from grpo_cli.evaluation.journal import Journal
from grpo_cli.evaluation.majority import Ballot, answers_in_pool, count_in_pool
from grpo_cli.evaluation.settings import Eval
from grpo_cli.evaluation.summary import METRICS, ProblemStats, rights_of, summarize
from grpo_cli.evaluation.tasks import Task, TaskResult
from grpo_cli.generation.base import Generator
from grpo_cli.records import Group, Prompt, Rollout, regrouped
from grpo_cli.scoring.bound_reward import TrainerState
from grpo_cli.scoring.scorer import metrics_of

LONGEST_TOKEN = 32  # characters; longer than almost every token
ANSWER = re.compile(r"\\boxed|answer is|####|答案", re.IGNORECASE)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the model that `generator` samples from on tasks."""

    config: Eval
    workers: Workers
    tokenizer: PreTrainedTokenizerBase
    generator: Generator
    tasks: Sequence[Task]
    rollouter: Rollouter = field(default_factory=Rollouter)  # used for held-out rows

    @property
    def problems(self) -> int:
        """Number of problems of all tasks."""
        return sum(len(t.prompts) for t in self.tasks)

    def run(
        self,
        progress: Callable[[int, str], None] = lambda done, text: None,
        state: TrainerState | None = None,
        interruptible: Callable[[bool], AbstractContextManager[Any]] = nullcontext,
        journal: Journal | None = None,
        keep_groups: bool = False,
    ) -> list[TaskResult]:
        """Completes and scores every problem, divided over the processes.

        Args:
            progress: called with (number of problems done, name of the phase).
            state: the training run's state, for reward functions that take it.
            interruptible: entered around the interruptible parts, see `Interrupts`.
            journal: stores completions, and returns those stored before a restart.
            keep_groups: whether the main process's results hold all completions.

        Raises:
            TrainingError: a reward function or the sandbox of a tool failed.
        """
        results: list[TaskResult] = []
        for task in self.tasks:
            before = sum(len(r.task.prompts) for r in results)

            def show(done: int, text: str, before: int = before, task: Task = task) -> None:
                progress(before + done, f"{task.label}: {text}" if task.mode else text)

            results.append(self._evaluate(task, show, state, interruptible, journal, keep_groups))
        return results

    def _evaluate(
        self,
        task: Task,
        progress: Callable[[int, str], None],
        state: TrainerState | None,
        interruptible: Callable[[bool], AbstractContextManager[Any]],
        journal: Journal | None,
        keep_groups: bool,
    ) -> TaskResult:
        workers = self.workers
        known: list[Group] = []
        prompts: list[Prompt] = []
        for prompt in task.prompts:
            group = journal.group(task.label, prompt) if journal is not None else None
            if group is None:
                prompts.append(prompt)
            else:
                known.append(group)
        groups = known[workers.rank :: workers.size]
        # Seeded by row, so that a problem's completions do not depend on the other problems.
        own = [(p.row, p) for p in prompts[workers.rank :: workers.size]]
        done = len(known)
        session = task.scorer.begin(state)
        for group in groups:
            session.add(group.rollouts)

        rollouter = self._rollouter_of(task)
        with (
            interruptible(rollouter.takes_turns),
            rollouter.groups(
                self.generator, self.tokenizer, own, task.num_samples, task.sampling, task.seed
            ) as sampled,
        ):
            for group in sampled:
                done += workers.size
                if task.benchmark is not None:
                    how = (task.benchmark.stop, asking(task.benchmark))
                    judged = [replace(r, text=judged_text(r, *how)) for r in group.rollouts]
                    group = replace(group, rollouts=judged)
                if journal is not None:
                    journal.completed(task.label, group.rollouts)
                progress(min(done, len(task.prompts)), "rows completed")
                session.add(group.rollouts)
                groups.append(group)
        groups.sort(key=lambda g: g.prompt_index)
        with interruptible(False), workers.raise_together():
            scored = session.finish([r for g in groups for r in g.rollouts], self.tokenizer)
            groups = regrouped(groups, scored)
            progress(min(len(groups) * workers.size, len(task.prompts)), "scored")
        with workers.raise_together():
            facts = self._facts(task, groups)
        of_rewards = {
            key: value
            for key, value in sorted(metrics_of([session], workers).items())
            if not key.startswith("time/")
        }
        everyones = [f for part in workers.gather(facts) for f in part]
        limit, total = rollouter.max_failed_share, len(task.prompts) * task.num_samples
        failed = sum(f.unscored for f in everyones)  # they count as wrong
        if failed > limit * total:
            errors = [r.completion.env_error for g in groups for r in g.rollouts]
            last = next(filter(None, reversed(errors)), "of another process")
            raise TrainingError(
                f"evaluation of {task.label}: the environments of {failed} of {total} episodes "
                f"failed, more than environment.max_failed_share = {limit:g}; "
                f"the last error: {last}"
            )
        found = summarize(everyones, self.config, task.num_samples) | of_rewards
        kept: list[Group] = []
        if keep_groups:
            kept = [g for part in workers.gather_on_main(groups) for g in part]
            kept.sort(key=lambda g: g.prompt_index)
        return TaskResult(task, found, kept)

    def _rollouter_of(self, task: Task) -> Rollouter:
        if task.tools is not None:
            return program_loop(self.tokenizer, task.tools)
        return Rollouter() if task.benchmark is not None else self.rollouter.for_evaluation()

    def _facts(self, task: Task, groups: Sequence[Group]) -> list[ProblemStats]:
        facts_of = partial(
            ProblemStats.of,
            right=task.right,
            breakdown=task.benchmark.breakdown if task.benchmark is not None else (),
        )
        if not task.has_votes:
            return [facts_of(g) for g in groups]
        texts = [r.text for g in groups for r in g.rollouts]
        args = task.scorer.rewards[task.right].args
        reading = {key: args[key] for key in ("final", "unclosed_think") if key in args}
        flat = iter(answers_in_pool(texts, task.scorer.executor, **reading))
        answers = [[next(flat) for _ in g.rollouts] for g in groups]
        ballots: Sequence[Ballot | None] = [None] * len(groups)
        if task.num_samples > 1 and "maj" in (self.config.metric or METRICS):
            rights = [rights_of(g, task.right) for g in groups]
            problems = list(zip(answers, rights, strict=True))
            how = {key: args[key] for key in ("forms", "units") if key in args}
            ballots = count_in_pool(problems, task.scorer.executor, **how)
        return [
            facts_of(g, answers=said, ballot=ballot)
            for g, said, ballot in zip(groups, answers, ballots, strict=True)
        ]


def judged_text(rollout: Rollout, stops: Sequence[str], asks: Sequence[str] = ()) -> str:
    """Returns a completion's text without the stop string that ended it.

    Args:
        asks: stop strings that follow the problem in a prompt. The text between the last blank line
            and such a string is a problem that the model made up. It is removed too, unless it
            holds an answer.
    """
    text = rollout.text
    if rollout.completion.finish_reason == "stop":
        for stop in stops:
            at = text.rfind(stop)
            if at >= 0 and len(text) - at - len(stop) < LONGEST_TOKEN:
                own = text.rfind("\n\n", 0, at) if stop in asks else -1
                asked = own >= 0 and not ANSWER.search(text, own, at)
                return text[: own if asked else at]
    return text
