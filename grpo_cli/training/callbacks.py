"""Calls a run's callbacks: objects of the user with hooks for steps, evaluations and checkpoints.

`callbacks.NAME.path=my_module:MyCallback` names a class with one or more of these methods:

    on_step(event)                 after each step, before its metrics are written
    on_evaluate(event)             after each evaluation, also the one before the first step
    on_checkpoint(event)           after a checkpoint is complete, and before the next one begins
    on_end(event)                  after the last step and summary.json; not if a signal stops the
                                   run, which is resumed then
    state_dict()                   returns the state that a checkpoint stores
    load_state_dict(state)         restores that state when the run is resumed

The main process makes and calls them. With the class attribute `every_process = True` every process
has an object of its own. For example, of a class with `on_step` only:

    class Shorter:
        def on_step(self, event):
            shortest = min(len(r.completion.ids) for g in event.groups for r in g.rollouts)
            event.log("shortest", shortest)             # metric callbacks/NAME/shortest
            if event.metrics["reward"] > 0.99:
                event.stop("the reward is above 0.99")
"""

from __future__ import annotations

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
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.records import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_cli.training.run import Run

HOOKS = ("on_step", "on_evaluate", "on_checkpoint", "on_end")
METRIC_NAME = r"[\w.@-]+(/[\w.@-]+)*"
PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)  # types that a checkpoint may hold


@dataclass
class Outcome:
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
    groups: Sequence[Group] = ()  # on_step: this process's rollouts, see `grpo_cli/records.py`
    checkpoint: Path | None = None  # on_checkpoint: its folder
    summary: Mapping[str, Any] | None = None  # on_end: summary.json
    policy: PreTrainedModel  # with distributed=fsdp2 a shard; its forward is then a collective
    tokenizer: PreTrainedTokenizerBase
    rank: int
    _outcome: Outcome = field(repr=False)

    def log(self, name: str, value: float) -> None:
        """Logs a number as `callbacks/NAME/name`, with the metrics of the next step that ends.

        In on_step that is the present step. If every process has the callback, the main process's
        number is logged.

        Raises:
            ValueError: the name is not a valid metric name, or the run has ended.
            TypeError: the value is not a number.
        """
        if not isinstance(name, str) or not re.fullmatch(METRIC_NAME, name):
            raise ValueError(
                f"{name!r}: is no name of a metric; letters, digits and _ . @ - are allowed, and / "
                "between parts"
            )
        if self.hook == "on_end":
            raise ValueError(f"{name}: the last metrics are written before on_end")
        self._outcome.metrics[f"callbacks/{self.name}/{name}"] = float(value)

    def stop(self, why: str) -> None:
        """Ends the run after this step, as if it were the last one; `why` is printed."""
        self._outcome.stop = self._outcome.stop or f"callbacks.{self.name}: {why}"


@dataclass(frozen=True)
class Loaded:
    """A callback of the recipe."""

    name: str
    hooks: tuple[str, ...]  # the HOOKS that the class defines
    has_state: bool
    target: Any  # the object; None on a process that does not call it


@dataclass
class Callbacks:
    """The callbacks of a run. All processes call the same methods together."""

    loaded: Sequence[Loaded] = ()
    written: deque[Path] = field(default_factory=deque)  # checkpoints, complete; main process only
    _logged: dict[str, float] = field(default_factory=dict)  # for the next step's line
    _newest: Mapping[str, float] = field(default_factory=dict)  # metrics of the newest step
    _recipe: dict[str, Any] | None = None  # as plain values

    @cached_property
    def hooks(self) -> frozenset[str]:
        """The hooks that some callback has; the same on every process."""
        return frozenset(hook for callback in self.loaded for hook in callback.hooks)

    def step(
        self, run: Run, metrics: Mapping[str, float], groups: Sequence[Group]
    ) -> dict[str, float]:
        """Calls `on_checkpoint` for new checkpoints, then `on_step`; returns their metrics.

        Raises:
            TrainingError: a callback has raised. Other hooks raise it too.
        """
        if not self.loaded:
            return {}
        self.checkpoints(run)
        self._newest = MappingProxyType(dict(metrics))
        self._call(run, "on_step", groups=tuple(groups))
        logged, self._logged = self._logged, {}
        return logged

    def evaluated(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Calls `on_evaluate`."""
        self._call(run, "on_evaluate", metrics=MappingProxyType(dict(metrics)))

    def checkpoints(self, run: Run) -> None:
        """Calls `on_checkpoint` for each checkpoint that has become complete."""
        if "on_checkpoint" not in self.hooks:
            return
        found = [self.written.popleft() for _ in range(len(self.written))]
        for path in run.workers.gather(found)[0]:
            self._call(run, "on_checkpoint", step=paths.step_of(path), checkpoint=path)

    def end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """Calls `on_end`."""
        self._call(run, "on_end", summary=summary)

    def states(self, run: Run) -> list[dict[str, Any]]:
        """Returns the states of the callbacks for a checkpoint, by process."""
        if not self.loaded:
            return []
        outcome, own = Outcome(), {}
        for callback in self.loaded:
            if callback.has_state and callback.target is not None:
                try:
                    own[callback.name] = plain(callback.target.state_dict())
                except (Exception, SystemExit) as error:
                    self._failed(run, callback, "state_dict", error, outcome)
        self._agree(run, outcome)
        return run.workers.gather({"states": own, "logged": self._logged})

    def restore(self, run: Run, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restores the state of each callback from a checkpoint.

        Raises:
            UserError: a callback does not take its state.
        """
        if not saved:
            return
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

    def _call(self, run: Run, hook: str, **facts: Any) -> None:
        if hook not in self.hooks:
            return
        outcome = Outcome()
        known: dict[str, Any] = {"step": run.state.step, "metrics": self._newest} | facts
        self._recipe = self._recipe or as_text(asdict(run.recipe))
        with heartbeat.inside("callbacks"):
            for callback in self.loaded:
                if hook not in callback.hooks or callback.target is None:
                    continue
                event = Event(
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
                try:
                    getattr(callback.target, hook)(event)
                except (Exception, SystemExit) as error:  # a user's function may raise anything
                    self._failed(run, callback, hook, error, outcome)
        self._agree(run, outcome)

    def _failed(
        self, run: Run, callback: Loaded, hook: str, error: BaseException, outcome: Outcome
    ) -> None:
        what = f"callbacks.{callback.name}: {hook} raised {type(error).__name__}"
        what += f" ({error})" if str(error) else ""
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # ours omitted
        lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        outcome.error = outcome.error or f"{what} at step {run.state.step}.\n{lines}"

    def _agree(self, run: Run, outcome: Outcome) -> None:
        """Merges the outcomes of all processes: the main process's metrics, and the first stop."""
        every = run.workers.gather(outcome)
        for of_one in every:
            if of_one.error is not None:
                raise TrainingError(of_one.error)
        self._logged |= every[0].metrics
        reasons = [of_one.stop for of_one in every if of_one.stop is not None]
        run.state.stop_reason = run.state.stop_reason or next(iter(reasons), None)


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
