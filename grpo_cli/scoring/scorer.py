"""Resolves and checks a recipe's rewards, calls them on completions and sums their values."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from grpo_cli.config.interpolation import masked
from grpo_cli.data import stored_completions
from grpo_cli.data.prompts import other_columns
from grpo_cli.data.rows import Rows, check_columns
from grpo_cli.data.sample import Sample
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.scoring.bound_reward import BoundReward, Signature, TrainerState, bind_reward
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.guards import CallResult, keeps_files_open
from grpo_cli.scoring.registry import resolve
from grpo_cli.scoring.settings import Reward, Scoring
from grpo_cli.scoring.step_rewards import by_tokens, check_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.distributed.workers import Workers
    from grpo_cli.records import Rollout

GRACE = 60.0  # seconds past all deadlines after which an event loop counts as blocked
LARGEST = 1e100  # largest reward: squares of larger ones overflow in a standard deviation
OWN_METRICS = ("mean", "std", "advantage_share", "timeouts", "errors")  # rewards/NAME/METRIC


@dataclass(frozen=True)
class RewardResult:
    """The result of one reward function for one completion."""

    value: float | None = None  # the sum of step rewards; None: does not apply
    steps: list[tuple[int, float]] | None = None  # (position, value) of each step
    extras: dict[str, Any] = field(default_factory=dict)  # the function's log_extra
    seconds: float = 0.0
    error: str | None = None
    where: str | None = None  # subject of the error, if not this completion
    timed_out: bool = False

    def __post_init__(self) -> None:
        if self.error is not None:  # a server may repeat the key that it rejects
            object.__setattr__(self, "error", masked(self.error))


class Scorer:
    """A recipe's rewards, checked and ready to be called."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        columns: Sequence[str],
        source: str,
        executor: RewardExecutor | None = None,
        run: Mapping[str, Any] | None = None,
        renaming: str = "dataset.columns",
    ) -> None:
        """Resolves and checks every function.

        Args:
            rewards: the recipe's rewards by name.
            columns: the data set's columns.
            source: the data set's name in error messages.
            executor: the processes that call the functions.
            run: values of the run (max_completion_tokens, device). They fill keyword-only arguments
                of that name that the recipe does not set.
            renaming: the key that renames a column, for messages.

        Raises:
            UserError: a function is unknown, gets an argument it does not take, needs a missing
                column, has a setting that it does not read, or cannot run here.
        """
        check_columns(needed_columns(rewards), columns, source, renaming)
        self.executor = executor or RewardExecutor(Scoring())
        self.rewards = {name: bind_reward(name, spec, run or {}) for name, spec in rewards.items()}
        for reward in self.rewards.values():
            if reward.timeout is not None and not reward.is_async:
                module = reward.path.partition(":")[0]
                self.executor.preload.update((module, *reward.traits.preload))
        self.descriptions = [*self._described()]  # one sentence per function that has a description

    def takes(self, name: str) -> bool:
        """Returns whether any function is called with this argument of `bound_reward.STANDARD`."""
        return any(reward.takes(name) for reward in self.rewards.values())

    def begin(self, state: TrainerState | None = None) -> ScoringSession:
        """Opens a session for the completions of one step."""
        return ScoringSession(self, state or TrainerState())

    def try_out(self, sample: Sample) -> None:
        """Calls every function once on a sample, before anything expensive is loaded.

        Raises:
            UserError: a function raised, timed out, or did not return a list of one number.
        """
        session = self.begin()
        session.start([sample])
        for name, reward in self.rewards.items():
            try:
                with contextlib.chdir("."):  # paths are still relative
                    (result,) = session.results(reward, [sample])
            except TrainingError as error:
                raise UserError(str(error)) from error
            if result.error is not None and reward.on_error == "stop":
                raise UserError(
                    f"reward.{name}: tried out on row {sample.row} with the completion "
                    f"{sample.text!r}: {result.error}"
                )

    def refused(self, rows: Rows) -> dict[int, str]:
        """Returns the reason why a row's completions cannot be scored, by row number."""
        found: dict[int, str] = {}
        for name, reward in self.rewards.items():
            refuse = reward.traits.refuse
            for number, row in enumerate(rows.rows if refuse else ()):
                columns = {**other_columns(row), "prompts": row.get("prompt")}
                if why := refuse(**{**columns, **reward.args}):
                    found.setdefault(number, f"reward.{name}: {why}")
        return found

    def check_readable(self, columns: Sequence[Mapping[str, Any]], key: str = "") -> None:
        """Calls `stored_completions.check_readable` on the columns that reward functions take."""
        signatures = [reward.signature for reward in self.rewards.values()]
        names = dict.fromkeys(name for of_one in columns for name in of_one)
        taken = [name for name in names if any(s.takes(name) for s in signatures)]
        stored_completions.check_readable(({n: one.get(n) for n in taken} for one in columns), key)

    def _described(self) -> Iterator[str]:
        for name, reward in self.rewards.items():
            if (describe := reward.traits.describe) is None:
                continue
            try:
                yield f"reward {name}: {describe(**reward.args)}"
            except Exception as error:  # for example, a sandbox that does not work here
                raise UserError(f"reward.{name}: {error}") from error


def needed_columns(rewards: Mapping[str, Reward]) -> dict[str, str]:
    """Returns the columns that rewards need, each with the key of a reward that needs it.

    Raises:
        UserError: a function is unknown, or needs a column that no function receives.
    """
    found: dict[str, str] = {}
    with contextlib.chdir("."):  # undoes a module's own chdir: data paths are still relative
        for name, spec in rewards.items():
            function = resolve(spec.function, f"reward.{name}.function")
            required = Signature.of(function).required
            for column in {*required} & {"prompt", "completion"} - {*spec.args}:
                raise UserError(
                    f"reward.{name}: no column is passed as {column!r}; call the parameter "
                    f"{column}s, the list of all {column}s."
                )
            found |= {c: f"reward.{name}" for c in required if c not in spec.args}
    return found


class ScoringSession:
    """The scores of one step's completions, computed as the completions arrive."""

    def __init__(self, scorer: Scorer, state: TrainerState) -> None:
        self.rewards, self.executor, self.state = scorer.rewards, scorer.executor, state
        # By function and sample: the future result, and whether it was cached.
        self._under_way: dict[tuple[str, int], tuple[Future[CallResult], bool]] = {}
        self._samples: dict[int, Sample] = {}  # by id of the rollout
        self.counts: Counter[str] = Counter()  # metrics that are summed
        self.errors: dict[str, str] = {}  # the first error by reward
        # Metrics that are averaged: (value, number of completions in its call).
        self.logged: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Starts the functions that take single completions, without waiting for them."""
        samples = [Sample.of(r) for r in rollouts]
        self._samples |= {id(r): s for r, s in zip(rollouts, samples, strict=True)}
        self.start(samples)

    def start(self, samples: Sequence[Sample]) -> None:
        """Starts the functions that take single completions on samples."""
        for reward in self.rewards.values():
            if reward.timeout is not None:
                for sample in filter(reward.applies_to, samples):
                    started = self.executor.start(reward, sample, self.state)
                    self._under_way[reward.name, id(sample)] = started

    def finish(
        self, rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> list[Rollout]:
        """Waits for all functions, and returns the rollouts with their rewards.

        Args:
            rollouts: all added rollouts, in the order in which functions receive them.
            tokenizer: converts characters to tokens for functions that reward steps by character.

        Raises:
            TrainingError: a function raised, or did not return a list of numbers or steps, and
                `on_error` is stop. Names the function, the row and the completion.
            WorkInterrupted: the run must end.
        """
        if not rollouts:
            return []
        samples = [self._samples[id(r)] for r in rollouts]
        found: list[dict[str, RewardResult]] = [{} for _ in rollouts]
        # Functions in this process come first, since the others run meanwhile.
        for reward in sorted(self.rewards.values(), key=lambda reward: reward.timeout is not None):
            heartbeat.beat()  # a call in this process cannot be interrupted
            results = self.results(reward, samples)
            for sample, own, result in zip(samples, found, results, strict=True):
                if result.error is not None and not result.timed_out and reward.on_error == "stop":
                    text = sample.text if len(sample.text) <= 300 else sample.text[:297] + "..."
                    where = f", for row {sample.row}, completion {text!r}"
                    where = where if result.where is None else result.where
                    raise TrainingError(f"reward {reward.name!r} {result.error}{where}")
                own[reward.name] = result
        pairs = zip(rollouts, found, strict=True)
        return [self._scored(rollout, own, tokenizer) for rollout, own in pairs]

    def _scored(
        self,
        rollout: Rollout,
        results: Mapping[str, RewardResult],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> Rollout:
        """Returns a rollout with the rewards that the functions gave it."""
        parts = {name: results[name].value for name in self.rewards}
        weights = {name: reward.spec.weight for name, reward in self.rewards.items()}
        applied = {name: weights[name] * v for name, v in parts.items() if v is not None}
        extras: dict[str, Any] = {}
        step_rewards: dict[str, list[tuple[int, float]]] = {}
        for name, result in results.items():
            if twice := extras.keys() & result.extras.keys():
                raise TrainingError(
                    f"reward {name!r} called log_extra({min(twice)!r}, ...), as another reward "
                    "did; choose another name."
                )
            extras |= result.extras
            if (steps := result.steps) is not None:
                if self.rewards[name].traits.positions == "characters":
                    assert tokenizer is not None, "finds characters"
                    steps = by_tokens(rollout, steps, tokenizer)
                step_rewards[name] = [(token, weights[name] * v) for token, v in steps]
        outcomes = [v for name, v in applied.items() if name not in step_rewards]
        return replace(
            rollout,
            reward_parts=parts,
            step_rewards=step_rewards,
            reward=math.fsum(applied.values()) if applied else math.nan,
            outcome_reward=math.fsum(outcomes) if outcomes else math.nan,
            extras=extras,
        )

    def results(self, reward: BoundReward, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns a function's result for each sample; failures become results with an error."""
        theirs = [s for s in samples if reward.applies_to(s)]
        if not theirs:
            return [RewardResult() for _ in samples]
        if reward.timeout is None:
            with heartbeat.calling(), keeps_files_open(reward.name):
                results = self._called_here(reward, theirs)
        else:
            rounds = 1 + len(theirs) / reward.concurrency
            end = time.monotonic() + reward.timeout * rounds + GRACE
            results = [self._awaited(reward, sample, end) for sample in theirs]
            self.counts[f"rewards/{reward.name}/timeouts"] += sum(v.timed_out for v in results)
        failed = [v.error for v in results if v.error is not None and not v.timed_out]
        if failed:
            self.errors.setdefault(reward.name, failed[0])
        if reward.on_error == "count":
            self.counts[f"rewards/{reward.name}/errors"] += len(failed)
        self.counts[f"time/rewards/{reward.name}"] += sum(v.seconds for v in results)  # type: ignore[assignment]
        left = iter(results)
        return [next(left) if reward.applies_to(s) else RewardResult() for s in samples]

    def _awaited(self, reward: BoundReward, sample: Sample, end: float) -> RewardResult:
        future, was_known = self._under_way.pop((reward.name, id(sample)))
        while True:
            # Workers enforce their own deadlines. A coroutine that never awaits cannot be stopped.
            left = max(0.0, end - time.monotonic()) if reward.is_async else math.inf
            try:
                done = future.result(min(1.0, left))
                break
            except TimeoutError:
                if time.monotonic() >= end and reward.is_async:
                    raise TrainingError(
                        f"reward {reward.name!r} blocks its event loop: its calls do not end at "
                        "their deadlines; an async function must await what takes time."
                    ) from None
                heartbeat.beat()
        (result,) = self._to_results(reward, done, [sample])
        return replace(result, seconds=0.0) if was_known else result

    def _called_here(self, reward: BoundReward, samples: Sequence[Sample]) -> list[RewardResult]:
        done = reward.call(samples, self.state)
        if done.error is not None and len(samples) > 1:
            # One by one, to find the samples that raise; the others form a batch again.
            alone = [reward.call([s], self.state) for s in samples]
            good = [s for s, one in zip(samples, alone, strict=True) if one.error is None]
            if len(good) == len(samples):
                where = ", for some completion of the batch (not one by itself)"
                return [RewardResult(error=f"raised {done.error}", where=where) for _ in samples]
            called = self._to_results(reward, reward.call(good, self.state), good) if good else []
            again = iter(called)
            return [
                next(again) if one.error is None else self._to_results(reward, one, [s])[0]
                for s, one in zip(samples, alone, strict=True)
            ]
        return self._to_results(reward, done, samples)

    def _to_results(
        self, reward: BoundReward, done: CallResult, samples: Sequence[Sample]
    ) -> list[RewardResult]:
        """Converts the result of one call to a result per sample."""
        seconds = done.seconds / len(samples)
        if done.error is not None:
            error = done.error if done.timed_out else f"raised {done.error}"
            if isinstance(samples[0].prompt, list) and "'list' object has no" in done.error:
                error += " (in a chat, a completion is a list of messages: [{'content': ...}])"
            value = reward.traits.timeout_value if done.timed_out else None
            one = RewardResult(value, error=error, seconds=seconds, timed_out=done.timed_out)
            return [one for _ in samples]
        values = done.values
        if not isinstance(values, Sequence) and hasattr(values, "tolist"):  # a tensor or an array
            values = values.tolist()

        def refused(problem: str) -> list[RewardResult]:
            return [RewardResult(error=problem, where="") for _ in samples]

        if not isinstance(values, (list, tuple)) or len(values) != len(samples):
            got = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
            return refused(
                f"must return a list of {len(samples)} values, one a completion; it returned {got}."
            )
        for name, value in done.metrics:
            key = f"rewards/{reward.name}/{name}"
            if name in OWN_METRICS:
                raise TrainingError(
                    f"reward {reward.name!r} called log_metric({name!r}, ...): {key} is a metric "
                    "already; choose another name."
                )
            self.logged[key].append((value, len(samples)))
        for column, entries in done.extras:
            if len(entries) != len(samples):
                return refused(
                    f"called log_extra({column!r}, ...) with {len(entries)} values for "
                    f"{len(samples)} completions."
                )
        results = []
        for i, (value, sample) in enumerate(zip(values, samples, strict=True)):
            extras = {column: entries[i] for column, entries in done.extras}
            try:
                value, steps = value_of(value, sample, reward.traits.positions)
                results.append(RewardResult(value, steps, extras, seconds))
            except ValueError as error:
                returned = f"returned {error}"
                results.append(RewardResult(error=returned, extras=extras, seconds=seconds))
        return results


def metrics_of(sessions: Sequence[ScoringSession], workers: Workers) -> dict[str, float]:
    """Reduces counts and logged metrics over all sessions and processes; collective.

    A value is weighted by the number of completions in its call. The mean then does not depend on
    the division of completions into calls and processes.
    """
    counts: Counter[str] = Counter()
    logged: dict[str, list[tuple[float, int]]] = defaultdict(list)
    everyones = workers.gather([(dict(s.counts), dict(s.logged)) for s in sessions])
    for own_counts, own_logged in (session for own in everyones for session in own):
        counts.update(own_counts)
        for name, values in own_logged.items():
            logged[name] += values
    means = {
        name: math.fsum(v * n for v, n in values) / sum(n for _, n in values)
        for name, values in sorted(logged.items())
    }
    return {name: float(value) for name, value in counts.items()} | means


def value_of(
    value: Any, sample: Sample, unit: str
) -> tuple[float | None, list[tuple[int, float]] | None]:
    """Checks a function's value for a completion, which may be a list of steps.

    Args:
        unit: the unit of the steps' positions, "characters" or "tokens".

    Returns:
        (the value, the sum of the steps if there are any; the steps, or None).

    Raises:
        ValueError: the value is neither a number, None nor a list of steps.
    """
    if not isinstance(value, (list, tuple)):
        return number(value), None
    if (sample.episode or {}).get("messages") and unit == "characters":
        raise ValueError(
            "steps by characters, which are not defined for an episode of several messages; return "
            'places in completion_ids, with @reward(positions="tokens")'
        )
    size = len(sample.ids or ()) if unit == "tokens" else len(sample.prefill + sample.text)
    pairs = ((at, number(v)) for at, v in check_steps(value, size, unit))
    steps = [(at, v) for at, v in pairs if v is not None]
    return math.fsum(v for _, v in steps), steps


def number(value: Any) -> float | None:
    """Converts a function's value for a completion to a float; None stays None.

    Raises:
        ValueError: the value is neither a finite number within ±1e100 nor None.
    """
    if value is None:
        return None
    try:
        converted = float(value)
    except (TypeError, ValueError):
        converted = math.nan
    except OverflowError:  # such as 10**400
        converted = LARGEST * 10
    if isinstance(value, (str, bytes)) or not math.isfinite(converted):
        raise ValueError(
            f"{value!r}, which is not a finite number, a list of (position, value) or None"
        )
    if abs(converted) > LARGEST:
        raise ValueError(f"a number beyond ±{LARGEST:g}; scale the reward down")
    return converted
