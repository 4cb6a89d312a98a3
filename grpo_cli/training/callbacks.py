"""Calls a run's callbacks: objects with hooks for steps, evaluations and checkpoints.

`callbacks.NAME.path=my_module:MyCallback` names a class with one or more of these methods:

    on_start(event)                before the first step, also of a resumed run, and after an
                                   evaluation that precedes it
    on_rollouts(event)             when a step's completions are scored, before its first update
    on_step(event)                 after each step, before its metrics are written
    on_log(event)                  when the metrics of a step are written
    on_evaluate(event)             after each evaluation, also the one before the first step
    on_checkpoint(event)           after a checkpoint is complete, and before the next one begins
    on_end(event)                  after the last step and summary.json; not if a signal stops the
                                   run, which is resumed then
    state_dict()                   returns the state that a checkpoint stores
    load_state_dict(state)         restores that state when the run is resumed

The main process makes and calls them. With the class attribute `every_process = True` every process
has an object of its own. grpo's own features are callbacks too (`commands/train.py`); they come
before the recipe's. For example, of a class with `on_step` only:

    class Shorter:
        def on_step(self, event):
            shortest = min(len(r.completion.ids) for g in event.groups for r in g.rollouts)
            event.log("shortest", shortest)             # metric callbacks/NAME/shortest
            if event.metrics["reward"] > 0.99:
                event.stop("the reward is above 0.99")
"""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from grpo_cli.checkpoints import paths
from grpo_cli.config.interpolation import as_text
from grpo_cli.config.user_code import import_function
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError, listed, nearest
from grpo_cli.records import Group
from grpo_cli.training.settings import Callback

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_cli.training.run import Run

HOOKS = (
    "on_start", "on_rollouts", "on_step", "on_log", "on_evaluate", "on_checkpoint", "on_end",
)  # fmt: skip
# The hooks of transformers' TrainerCallback that have a counterpart.
OTHER_NAMES = {
    "on_train_begin": "on_start",
    "on_step_end": "on_step",
    "on_save": "on_checkpoint",
    "on_train_end": "on_end",
}
METRIC_NAME = r"[\w.@-]+(/[\w.@-]+)*"
PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)  # types that a checkpoint may hold


@dataclass
class HookOutcome:
    """Collects the results of one process's callbacks in one call of a hook."""

    metrics: dict[str, float] = field(default_factory=dict)  # by full name
    stop: str | None = None
    error: str | None = None  # message of a callback that has raised


@dataclass(frozen=True, kw_only=True)
class Event:
    """The argument of a hook. Its fields are read-only; `log` and `stop` act on the run."""

    name: str  # the callback's name in the recipe
    hook: str
    step: int  # completed steps; in on_checkpoint, the checkpoint's step
    steps: int  # number of steps of the run
    recipe: Mapping[str, Any]  # nested, as in the run's recipe.yaml
    folder: Path  # the run's folder
    metrics: Mapping[str, float]  # the newest step's; in on_evaluate, the evaluation's
    groups: Sequence[Group] = ()  # on_rollouts, on_step: this process's; see `grpo_cli/records.py`
    completions: Sequence[dict[str, Any]] = ()  # on_log: the rows, if the step's are stored
    checkpoint: Path | None = None  # on_checkpoint: its folder
    summary: Mapping[str, Any] | None = None  # on_end: summary.json
    policy: PreTrainedModel  # with distributed=fsdp2 a shard; its forward is then a collective
    tokenizer: PreTrainedTokenizerBase
    rank: int
    _outcome: HookOutcome = field(repr=False)

    def log(self, name: str, value: float) -> None:
        """Logs a number as `callbacks/NAME/name`, with the metrics of the next step that ends.

        In on_step that is the current step. If every process has the callback, the main process's
        number is logged.

        Raises:
            ValueError: the name is not a valid metric name, or the run has ended.
            TypeError: the value is not a number.
        """
        if not isinstance(name, str) or not re.fullmatch(METRIC_NAME, name):
            raise ValueError(
                f"{name!r}: is not a name of a metric; letters, digits and _ . @ - are allowed, "
                "and / between parts"
            )
        if self.hook == "on_end":
            raise ValueError(f"{name}: the last metrics are written before on_end")
        self._outcome.metrics[f"callbacks/{self.name}/{name}"] = float(value)

    def log_own(self, metrics: Mapping[str, float]) -> None:
        """Logs metrics of a feature of grpo, by their full names."""
        self._outcome.metrics.update(metrics)

    def stop(self, why: str) -> None:
        """Ends the run after this step, as if it were the last one; `why` is printed."""
        self._outcome.stop = self._outcome.stop or f"callbacks.{self.name}: {why}"


@dataclass(frozen=True)
class Loaded:
    """A callback of the recipe, or a feature of grpo."""

    name: str
    hooks: tuple[str, ...]  # the HOOKS that the class defines
    has_state: bool
    target: Any  # the object; None on a process that does not call it
    is_own: bool = False  # a feature of grpo: called by every process, with the same results

    @classmethod
    def feature(cls, target: Any) -> Loaded:
        """Returns a feature of grpo as a callback. Its class name is that of its state."""
        hooks = tuple(hook for hook in HOOKS if hasattr(target, hook))
        name = f"grpo:{type(target).__name__}"
        return cls(name, hooks, hasattr(target, "state_dict"), target, is_own=True)


@dataclass
class Callbacks:
    """The callbacks of a run. All processes call the same methods together."""

    loaded: Sequence[Loaded] = ()
    saving: bool = False  # whether a checkpoint was begun whose `on_checkpoint` was not called yet
    written: deque[Path] = field(default_factory=deque)  # checkpoints, complete; main process only
    _logged: dict[str, float] = field(default_factory=dict)  # for the next step's line
    _newest: Mapping[str, float] = field(default_factory=dict)  # metrics of the newest step
    _recipe: dict[str, Any] | None = None  # as plain values

    @cached_property
    def hooks(self) -> frozenset[str]:
        """The hooks that some callback has; the same on every process."""
        return frozenset(hook for callback in self.loaded for hook in callback.hooks)

    def call(self, run: Run, hook: str, **facts: Any) -> None:
        """Calls a hook of every callback that has it.

        Args:
            facts: fields of the event that are specific to this hook.

        Raises:
            TrainingError: a callback of the recipe has raised.
        """
        for callback in self.loaded:
            if hook not in callback.hooks:
                continue
            outcome = HookOutcome()
            if callback.is_own:
                getattr(callback.target, hook)(self._event(run, callback, hook, outcome, facts))
                self._merge(run, [outcome])
                continue
            if callback.target is not None:
                event = self._event(run, callback, hook, outcome, facts)
                try:
                    with heartbeat.inside("callbacks"):
                        getattr(callback.target, hook)(event)
                except (Exception, SystemExit) as error:  # a user's function may raise anything
                    self._failed(run, callback, hook, error, outcome)
            self._merge(run, run.workers.gather(outcome))

    def step(self, run: Run, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Calls `on_checkpoint` for new checkpoints, then `on_step`; adds what both have logged."""
        self.checkpoints(run)
        self._newest = metrics
        self.call(run, "on_step", groups=tuple(groups))
        metrics |= self._logged
        self._logged = {}

    def checkpoints(self, run: Run) -> None:
        """Calls `on_checkpoint` for each checkpoint that has become complete."""
        if not self.saving or "on_checkpoint" not in self.hooks:
            return
        found = run.workers.gather([self.written.popleft() for _ in range(len(self.written))])[0]
        self.saving = not found
        for path in found:
            self.call(run, "on_checkpoint", step=paths.step_of(path), checkpoint=path)

    def close(self) -> None:
        """Ends the features that hold resources, also after a failure."""
        for callback in self.loaded:
            if callback.is_own and hasattr(callback.target, "close"):
                callback.target.close()

    def states(self, run: Run) -> list[dict[str, Any]]:
        """Returns the states of the callbacks for a checkpoint, by process."""
        outcome, own = HookOutcome(), {}
        for callback in self.loaded:
            if callback.has_state and callback.target is not None:
                try:
                    own[callback.name] = plain(callback.target.state_dict())
                except (Exception, SystemExit) as error:
                    self._failed(run, callback, "state_dict", error, outcome)
        self._merge(run, run.workers.gather(outcome))
        return run.workers.gather({"states": own, "logged": self._logged})

    def restore(self, run: Run, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restores the state of each callback from a checkpoint.

        Raises:
            UserError: a callback does not take its state.
        """
        rank = run.workers.rank if len(saved) == run.workers.size else 0
        self._logged = dict(saved[rank]["logged"])
        states = saved[rank]["states"]
        with run.workers.raise_together():
            for callback in self.loaded:
                if callback.target is None or callback.name not in states:
                    continue
                try:
                    callback.target.load_state_dict(states[callback.name])
                except (Exception, SystemExit) as error:
                    raise UserError(
                        f"callbacks.{callback.name}: load_state_dict raised "
                        f"{type(error).__name__}: {error}; its state in the checkpoint is of "
                        "another version of it."
                    ) from error

    def _event(
        self, run: Run, callback: Loaded, hook: str, outcome: HookOutcome, facts: Mapping[str, Any]
    ) -> Event:
        self._recipe = self._recipe or as_text(asdict(run.recipe))
        metrics = facts.get("metrics", {**self._newest, **self._logged})
        known = {"step": run.state.step, **facts, "metrics": MappingProxyType(dict(metrics))}
        return Event(
            name=callback.name,
            hook=hook,
            steps=run.recipe.steps,
            recipe=self._recipe,
            folder=run.folder,
            policy=run.policy.model,
            tokenizer=run.policy.tokenizer,
            rank=run.workers.rank,
            _outcome=outcome,
            **known,
        )

    def _failed(
        self, run: Run, callback: Loaded, hook: str, error: BaseException, outcome: HookOutcome
    ) -> None:
        what = f"callbacks.{callback.name}: {hook} raised {type(error).__name__}"
        what += f" ({error})" if str(error) else ""
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # ours omitted
        lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        outcome.error = outcome.error or f"{what} at step {run.state.step}.\n{lines}"

    def _merge(self, run: Run, every: Sequence[HookOutcome]) -> None:
        """Merges the outcomes of all processes: the main process's metrics, and the first stop."""
        for of_one in every:
            if of_one.error is not None:
                raise TrainingError(of_one.error)
        self._logged |= every[0].metrics
        reasons = [of_one.stop for of_one in every if of_one.stop is not None]
        run.state.stop_reason = run.state.stop_reason or next(iter(reasons), None)


def load(configs: Mapping[str, Callback]) -> list[Loaded]:
    """Imports the classes of a recipe's callbacks and makes their objects.

    Raises:
        UserError: there is no such class, it has no hook or one that does not exist, or it cannot
            be made with its arguments.
    """
    return [load_one(name, config) for name, config in configs.items()]


def load_one(name: str, config: Callback) -> Loaded:
    """Makes one callback; see `load`."""
    where = f"callbacks.{name}.path = {config.path}"
    if ":" not in config.path:
        raise UserError(f"{where}: is not a class; give it as my_module:MyCallback.")
    found = import_function(config.path, where)
    if not inspect.isclass(found):
        raise UserError(f"{where}: is not a class; give one with the methods that are called.")
    hooks = tuple(hook for hook in HOOKS if callable(getattr(found, hook, None)))
    for method in (m for m in dir(found) if m.startswith("on_") and m not in HOOKS):
        meant = OTHER_NAMES.get(method)
        hint = f" It is called {meant} here." if meant else nearest(method, HOOKS)
        raise UserError(f"{where}: {method} is never called; there are {listed(HOOKS)}.{hint}")
    if not hooks:
        raise UserError(f"{where}: has nothing to call; it needs one or more of {listed(HOOKS)}.")
    for hook in hooks:
        function = getattr(found, hook)
        if inspect.iscoroutinefunction(function):
            raise UserError(f"{where}: {hook} is async; it must be an ordinary method.")
        is_static = isinstance(inspect.getattr_static(found, hook), (staticmethod, classmethod))
        try:
            inspect.signature(function).bind(*[None] * (1 if is_static else 2))
        except TypeError as error:
            raise UserError(
                f"{where}: {hook} must take one argument, the event ({error})."
            ) from error
    has_state = hasattr(found, "state_dict")
    if has_state != hasattr(found, "load_state_dict"):
        raise UserError(f"{where}: of state_dict and load_state_dict it has one; it needs both.")
    target = None
    if getattr(found, "every_process", False) or os.environ.get("RANK", "0") == "0":
        try:
            target = found(**config.args)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"callbacks.{name}.args: {config.path} cannot be made with them: "
                f"{type(error).__name__}: {error}"
            ) from error
    return Loaded(name, hooks, has_state, target)


def plain(value: Any) -> Any:
    """Returns a callback's state if a checkpoint can store it.

    Raises:
        TypeError: a value in it is neither plain nor a tensor.
    """
    if isinstance(value, dict):
        for entry in (*value, *value.values()):
            plain(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            plain(entry)
    elif type(value) not in PLAIN:
        raise TypeError(
            f"a state may hold numbers, text, None, tensors, and lists, tuples and dicts of them; "
            f"it has a {type(value).__module__}.{type(value).__qualname__}"
        )
    return value
