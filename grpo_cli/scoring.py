"""A recipe's rewards: looked up and checked, called on completions as they arrive, added up."""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from grpo_cli import heartbeat
from grpo_cli.config import Reward, Scoring
from grpo_cli.errors import TrainingError, UserError, listed, nearest
from grpo_cli.pool import Done
from grpo_cli.registry import Signature, TrainerState, import_modules, path_of, resolve
from grpo_cli.reward_calls import Crew, Sample, Term
from grpo_cli.rewards import traits_of
from grpo_cli.steps import check_steps, ending_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.distributed import Workers
    from grpo_cli.rollouts import Rollout

ASYNC_TIMEOUT = 60.0  # seconds for one completion, where neither function nor recipe says
ASYNC_CONCURRENCY = 16
GRACE = 60.0  # seconds beyond which an event loop that does not answer is taken for stuck
OWN_METRICS = ("mean", "std", "timeouts", "errors")


@dataclass(frozen=True)
class Verdict:
    """What one function says of one completion."""

    value: float | None = None  # of steps: their sum
    steps: list[tuple[int, float]] | None = None  # (position, value), where it rewards steps
    extras: dict[str, Any] = field(default_factory=dict)  # its log_extra
    seconds: float = 0.0
    error: str | None = None
    where: str | None = None  # what the error is about, where it is not this completion alone
    timed_out: bool = False


class Scorer:
    """The recipe's rewards, ready to be called."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        columns: Sequence[str],
        source: str,
        crew: Crew | None = None,
        run: Mapping[str, Any] | None = None,
        renaming: str = "dataset.columns",
    ) -> None:
        """Resolves and checks every function.

        Args:
            rewards: the recipe's rewards by name.
            columns: what the data set offers; source: what it is called in messages.
            crew: the processes that call them. run: what the run says where the recipe does not,
                for functions with a keyword-only argument of that name (max_completion_tokens,
                device). renaming: the key that renames a column, for messages.

        Raises:
            UserError: an unknown function, an argument it does not take, a column the data lacks, a
                setting that is of no use for this function, something that it needs and that is not
                there.
        """
        self.crew = crew or Crew(Scoring())
        import_modules(self.crew.config.modules, "scoring.modules")
        self.terms = {
            name: make_term(name, spec, columns, source, run or {}, renaming)
            for name, spec in rewards.items()
        }
        pooled = [t for t in self.terms.values() if t.timeout is not None and not t.is_async]
        self.crew.preload.update(module for term in pooled for module in term.preload)
        self.descriptions = [*self._described()]  # a sentence of each function that has one to say

    def begin(self, state: TrainerState | None = None) -> Sheet:
        """A sheet for the completions of one step."""
        return Sheet(self, state or TrainerState())

    def score(
        self, rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Sheet:
        """Scores rollouts that are all there; see `Sheet.finish`."""
        sheet = self.begin()
        sheet.add(rollouts)
        sheet.finish(rollouts, tokenizer)
        return sheet

    def try_out(self, sample: Sample) -> None:
        """Calls every function once, before anything expensive is loaded.

        Raises:
            UserError: a function raised, ran out of time, or returned no list of one number.
        """
        sheet = self.begin()
        sheet.start([sample])
        for name, term in self.terms.items():
            try:
                (verdict,) = sheet.verdicts(term, [sample])
            except TrainingError as error:
                raise UserError(str(error)) from error
            if verdict.error is not None and term.on_error == "stop":
                raise UserError(
                    f"reward.{name}: tried out on row {sample.row} with the completion "
                    f"{sample.text!r}: {verdict.error}"
                )

    def _described(self) -> Iterator[str]:
        for name, term in self.terms.items():
            describe = traits_of(term.function).describe
            if describe is None:
                continue
            try:
                yield f"reward {name}: {describe(**term.args)}"
            except Exception as error:  # such as a sandbox that cannot be had here
                raise UserError(f"reward.{name}: {error}") from error


def make_term(
    name: str,
    spec: Reward,
    columns: Sequence[str],
    source: str,
    run: Mapping[str, Any],
    renaming: str,
) -> Term:
    """A recipe's entry with the function it names; see `Scorer` for what is checked."""
    function = resolve(spec.function, f"reward.{name}.function")
    signature, traits = Signature.of(function), traits_of(function)
    arguments = {key: value for key, value in run.items() if key in signature.arguments}
    arguments |= spec.args
    for argument in spec.args:
        # **kwargs is there for columns; an argument that only it would take is a typo.
        if argument not in signature.named:
            raise UserError(
                f"reward.{name}.args.{argument}: {spec.function} takes no such argument; "
                f"it takes {listed(signature.named)}.{nearest(argument, signature.named)}"
            )
    for argument in signature.needed:
        if argument not in arguments:
            raise UserError(
                f"reward.{name}: {spec.function} needs the argument {argument!r}; set "
                f"reward.{name}.args.{argument}."
            )
    missing = [c for c in signature.required if c not in columns and c not in spec.args]
    if missing:
        raise UserError(
            f"reward.{name}: {spec.function} needs the column {missing[0]!r}, which "
            f"{source} lacks; it has {listed(columns)}. Rename one with "
            f"{renaming}.{missing[0]}=NAME."
        )
    is_async = inspect.iscoroutinefunction(function)
    timeout = traits.timeout if spec.timeout is None else spec.timeout or None
    if is_async:
        if spec.timeout == 0:
            raise UserError(f"reward.{name}.timeout: an async function has one; must be > 0.")
        timeout = timeout or ASYNC_TIMEOUT
    for knob in ("timeout_value", "cache"):
        if timeout is None and getattr(spec, knob) is not None:
            raise UserError(
                f"reward.{name}.{knob}: is only read with a timeout, and {spec.function} has none; "
                f"set reward.{name}.timeout."
            )
    if spec.concurrency is not None and not is_async:
        raise UserError(
            f"reward.{name}.concurrency: is only read for async functions; "
            "scoring.workers says how many worker processes there are."
        )
    remembered = timeout is not None and (traits.cache if spec.cache is None else spec.cache)
    if remembered and "trainer_state" in signature.standard:
        if spec.cache:
            raise UserError(
                f"reward.{name}.cache: {spec.function} takes trainer_state, so its values change "
                "with the step."
            )
        remembered = False
    return Term(
        name=name,
        path=path_of(spec.function),
        function=function,
        signature=signature,
        args=arguments,
        weight=spec.weight,
        positions=spec.positions,
        is_async=is_async,
        timeout=timeout,
        timeout_value=spec.timeout_value,
        on_error=spec.on_error,
        cache=remembered,
        concurrency=spec.concurrency or ASYNC_CONCURRENCY,
        preload=(path_of(spec.function).partition(":")[0], *traits.preload),
    )


class Sheet:
    """The scores of a step's completions, being filled in."""

    def __init__(self, scorer: Scorer, state: TrainerState) -> None:
        self.terms, self.crew, self.state = scorer.terms, scorer.crew, state
        # By function and sample: what comes of the call, and whether that was known already.
        self._under_way: dict[tuple[str, int], tuple[Future[Done], bool]] = {}
        self._samples: dict[int, Sample] = {}  # by rollout
        self.counts: Counter[str] = Counter()  # metrics that are summed up
        # Metrics that are averaged: values, each with the completions that its call saw.
        self.logged: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Has the functions begin that take one completion at a time. Returns at once."""
        samples = [Sample.of(r) for r in rollouts]
        self._samples |= {id(r): s for r, s in zip(rollouts, samples, strict=True)}
        self.start(samples)

    def start(self, samples: Sequence[Sample]) -> None:
        """The same for samples that are no rollouts."""
        for term in self.terms.values():
            if term.timeout is not None:
                for sample in samples:
                    started = self.crew.start(term, sample, self.state)
                    self._under_way[term.name, id(sample)] = started

    def measured(self, since: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What was counted and logged so far, or since then, as plain values."""
        counts, logged = dict(self.counts), {k: list(v) for k, v in self.logged.items()}
        if since is not None:
            counts = {k: v - since["counts"].get(k, 0) for k, v in counts.items()}
            logged = {k: v[len(since["logged"].get(k, ())) :] for k, v in logged.items()}
        return {"counts": counts, "logged": logged}

    def measure(self, measured: Mapping[str, Any]) -> None:
        """Adds what another sheet has `measured`."""
        self.counts.update(measured["counts"])
        for name, values in measured["logged"].items():
            self.logged[name] += [(value, count) for value, count in values]

    def finish(
        self, rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Fills in what functions say of each rollout, and its reward; waits where it must.

        Args:
            rollouts: all that were added, in the order in which functions are to see them.
            tokenizer: finds the token of a character, where a function rewards steps by characters.

        Raises:
            TrainingError: a function raised, or returned something that is no list of numbers or
                steps, and `on_error` is stop; names the function, the row and the completion.
            Leave: the run has to end.
        """
        if not rollouts:
            return
        samples = [self._samples[id(r)] for r in rollouts]
        for rollout in rollouts:
            rollout.extras = {}
        # First those that are called here: the others are under way meanwhile.
        for term in sorted(self.terms.values(), key=lambda term: term.timeout is not None):
            heartbeat.beat()  # one that is called here cannot be left
            verdicts = self.verdicts(term, samples)
            for rollout, sample, verdict in zip(rollouts, samples, verdicts, strict=True):
                if verdict.error is not None and not verdict.timed_out and term.on_error == "stop":
                    where = _where(sample) if verdict.where is None else verdict.where
                    raise TrainingError(f"reward {term.name!r} {verdict.error}{where}")
                self._fill_in(term, rollout, verdict, tokenizer)
        for rollout in rollouts:
            rollout.reward_parts = {name: rollout.reward_parts[name] for name in self.terms}
            applied = {
                name: self.terms[name].weight * value
                for name, value in rollout.reward_parts.items()
                if value is not None
            }
            outcomes = [v for name, v in applied.items() if name not in rollout.step_rewards]
            rollout.outcome = math.fsum(outcomes) if outcomes else math.nan
            rollout.reward = math.fsum(applied.values()) if applied else math.nan

    def _fill_in(
        self,
        term: Term,
        rollout: Rollout,
        verdict: Verdict,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        name, ids = term.name, rollout.completion.ids
        if verdict.steps is not None:
            assert tokenizer is not None or term.positions == "tokens", "finds characters"
            size = len(rollout.text)
            rollout.step_rewards[name] = [
                (ending_token(at, size, term.positions, ids, tokenizer), term.weight * value)  # type: ignore[arg-type]
                for at, value in verdict.steps
            ]
        rollout.reward_parts[name] = verdict.value
        if twice := rollout.extras.keys() & verdict.extras.keys():
            raise TrainingError(
                f"reward {name!r} called log_extra({min(twice)!r}, ...), as another reward did; "
                "choose another name."
            )
        rollout.extras |= verdict.extras

    def verdicts(self, term: Term, samples: Sequence[Sample]) -> list[Verdict]:
        """What a function says of each sample; a failure is a verdict with an error."""
        if term.timeout is None:
            verdicts = self._called_here(term, samples)
        else:
            rounds = 1 + len(samples) / term.concurrency
            end = time.monotonic() + term.timeout * rounds + GRACE
            verdicts = [self._awaited(term, sample, end) for sample in samples]
            self.counts[f"rewards/{term.name}/timeouts"] += sum(v.timed_out for v in verdicts)
        if term.on_error == "count":
            failed = sum(v.error is not None and not v.timed_out for v in verdicts)
            self.counts[f"rewards/{term.name}/errors"] += failed
        self.counts[f"time/rewards/{term.name}"] += sum(v.seconds for v in verdicts)  # type: ignore[assignment]
        return verdicts

    def _awaited(self, term: Term, sample: Sample, end: float) -> Verdict:
        future, was_known = self._under_way.pop((term.name, id(sample)))
        # Workers have deadlines of their own. Nothing can stop a coroutine that never awaits.
        patience = max(0.0, end - time.monotonic()) if term.is_async else None
        try:
            done = _awaited_result(future, patience)
        except TimeoutError:
            raise TrainingError(
                f"reward {term.name!r} blocks its event loop: its calls do not end at their "
                "deadlines; an async function must await what takes time."
            ) from None
        (verdict,) = self._verdict(term, done, [sample])
        return replace(verdict, seconds=0.0) if was_known else verdict

    def _called_here(self, term: Term, samples: Sequence[Sample]) -> list[Verdict]:
        done = term.call(samples, self.state)
        if done.error is not None and len(samples) > 1:
            # One by one, to find those at which it raises; the others are a batch without them.
            alone = [term.call([s], self.state) for s in samples]
            good = [s for s, one in zip(samples, alone, strict=True) if one.error is None]
            if len(good) == len(samples):
                where = ", for some completion of the batch (not one by itself)"
                return [Verdict(error=f"raised {done.error}", where=where) for _ in samples]
            again = iter(self._verdict(term, term.call(good, self.state), good) if good else [])
            return [
                next(again) if one.error is None else self._verdict(term, one, [s])[0]
                for s, one in zip(samples, alone, strict=True)
            ]
        return self._verdict(term, done, samples)

    def _verdict(self, term: Term, done: Done, samples: Sequence[Sample]) -> list[Verdict]:
        """One call's outcome as a verdict on each of its samples."""
        if done.timed_out:
            value, seconds = term.timeout_value, done.seconds
            return [Verdict(value, error=done.error, seconds=seconds, timed_out=True)]
        if done.error is not None:
            seconds = done.seconds / len(samples)
            return [Verdict(error=f"raised {done.error}", seconds=seconds) for _ in samples]
        values = done.values
        if not isinstance(values, Sequence) and hasattr(values, "tolist"):  # a tensor or an array
            values = values.tolist()
        if not isinstance(values, (list, tuple)) or len(values) != len(samples):
            got = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
            message = (
                f"must return a list of {len(samples)} values, one a completion; it returned {got}."
            )
            return [Verdict(error=message, where="") for _ in samples]
        for name, value in done.metrics:
            self._log(term, name, value, len(samples))
        for column, entries in done.extras:
            if len(entries) != len(samples):
                message = (
                    f"called log_extra({column!r}, ...) with {len(entries)} values for "
                    f"{len(samples)} completions."
                )
                return [Verdict(error=message, where="") for _ in samples]
        return [
            self._one(
                term,
                value,
                sample,
                {column: entries[i] for column, entries in done.extras},
                done.seconds / len(samples),
            )
            for i, (value, sample) in enumerate(zip(values, samples, strict=True))
        ]

    def _one(
        self, term: Term, value: Any, sample: Sample, extras: dict[str, Any], seconds: float
    ) -> Verdict:
        try:
            if isinstance(value, (list, tuple)):
                size = len(sample.ids or ()) if term.positions == "tokens" else len(sample.text)
                pairs = check_steps(value, size, term.positions)
                steps = [(at, v) for at, v in ((at, number(v)) for at, v in pairs) if v is not None]
                return Verdict(math.fsum(v for _, v in steps), steps, extras, seconds)
            return Verdict(number(value), None, extras, seconds)
        except ValueError as error:
            return Verdict(error=f"returned {error}", extras=extras, seconds=seconds)

    def _log(self, term: Term, name: str, value: float, completions: int) -> None:
        if name in OWN_METRICS:
            raise TrainingError(
                f"reward {term.name!r} called log_metric({name!r}, ...): "
                f"rewards/{term.name}/{name} is a metric already; choose another name."
            )
        self.logged[f"rewards/{term.name}/{name}"].append((value, completions))


def metrics_of(sheets: Sequence[Sheet], workers: Workers) -> dict[str, float]:
    """Counts and logged metrics of every process's sheets, the same on every process.

    A call weighs what it saw: however completions are divided over calls and processes, a mean over
    each call's is the mean over all.
    """
    counts: Counter[str] = Counter()
    logged: dict[str, list[tuple[float, int]]] = defaultdict(list)
    everyones = workers.gather([(dict(s.counts), dict(s.logged)) for s in sheets])
    for own_counts, own_logged in (sheet for own in everyones for sheet in own):
        counts.update(own_counts)
        for name, values in own_logged.items():
            logged[name] += values
    means = {
        name: math.fsum(v * n for v, n in values) / sum(n for _, n in values)
        for name, values in sorted(logged.items())
    }
    return {name: float(value) for name, value in counts.items()} | means


def number(value: Any) -> float | None:
    """What a function gave for a completion, as a float.

    Raises:
        ValueError: it is not a finite number, nor None.
    """
    if value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if isinstance(value, (str, bytes)) or not math.isfinite(found):
        raise ValueError(
            f"{value!r}, which is not a finite number, a list of (position, value) or None"
        )
    return found


def _awaited_result(future: Future[Done], patience: float | None) -> Done:
    """What a call has come to; says every second that this process is alive.

    Raises:
        TimeoutError: it has not come to an end within `patience` seconds.
    """
    end = math.inf if patience is None else time.monotonic() + patience
    while True:
        try:
            return future.result(max(0.0, min(1.0, end - time.monotonic())))
        except TimeoutError:
            if time.monotonic() >= end:
                raise
            heartbeat.beat()


def _where(sample: Sample) -> str:
    text = sample.text if len(sample.text) <= 300 else sample.text[:297] + "..."
    return f", for row {sample.row}, completion {text!r}"
