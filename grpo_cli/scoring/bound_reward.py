"""Binds a recipe's reward to its function by the signature, and calls it with a batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.data.rows import DATASET
from grpo_cli.data.sample import Sample
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.rewards import Traits, traits_of
from grpo_cli.scoring import registry
from grpo_cli.scoring.guards import CallResult, answer, no_exit
from grpo_cli.scoring.settings import Reward

ASYNC_TIMEOUT = 60.0  # default seconds per completion, if neither function nor recipe sets it
ASYNC_CONCURRENCY = 16  # default number of concurrent calls of an async function
# Arguments that any function may take besides the columns (TRL's calling convention).
STANDARD = (
    "prompts", "completions", "completion_ids", "episodes", "trainer_state", "log_metric",
    "log_extra",
)  # fmt: skip


@dataclass(frozen=True)
class TrainerState:
    """The run's progress, as passed to reward functions (with transformers' names)."""

    global_step: int = 0  # completed steps
    max_steps: int = 0  # steps of the complete run
    epoch: float = 0.0  # passes over the data, with fractions
    num_input_tokens_seen: int = 0  # prompt and completion tokens so far, over all processes
    best_metric: float | None = None  # best value of `eval.best`; None before an evaluation
    best_global_step: int | None = None  # step of the best metric
    log_history: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl


@dataclass(frozen=True)
class Signature:
    """The parameters of a reward function.

    Positional parameters are columns of the data set, required unless they have a default.
    Keyword-only parameters (after a `*`) are set by the recipe, never from a column.
    """

    standard: tuple[str, ...]  # parameters in STANDARD
    needed_standard: tuple[str, ...]  # parameters in STANDARD without a default
    required: tuple[str, ...]  # columns without a default
    optional: tuple[str, ...]  # columns with a default
    needed: tuple[str, ...]  # keyword-only parameters without a default
    arguments: tuple[str, ...]  # keyword-only parameters
    open_ended: bool  # has **kwargs, which receives every other column; **_ receives none

    @classmethod
    def of(cls, function: registry.RewardFunction) -> Signature:
        """Reads a function's signature."""
        found = inspect.signature(function).parameters.values()
        passed = [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        standard = [p for p in passed if p.name in STANDARD]
        own = [p for p in passed if p.name not in STANDARD]
        arguments = [p for p in own if p.kind is p.KEYWORD_ONLY]
        columns = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        required = _without_default(columns)
        return cls(
            standard=tuple(p.name for p in standard),
            needed_standard=_without_default(standard),
            required=required,
            optional=tuple(p.name for p in columns if p.name not in required),
            needed=_without_default(arguments),
            arguments=tuple(p.name for p in arguments),
            open_ended=any(p.kind is p.VAR_KEYWORD and p.name[0] != "_" for p in found),
        )

    @property
    def named(self) -> tuple[str, ...]:
        """The names that a recipe may set, without those that only **kwargs would accept."""
        return self.required + self.optional + self.arguments

    def takes(self, name: str) -> bool:
        """Returns whether a column of this name is passed to the function."""
        is_column = name in self.required + self.optional
        return is_column or (self.open_ended and name not in self.arguments)


def _without_default(parameters: Iterable[inspect.Parameter]) -> tuple[str, ...]:
    return tuple(p.name for p in parameters if p.default is p.empty)


@dataclass(frozen=True)
class BoundReward:
    """A recipe's reward, ready to be called."""

    name: str
    spec: Reward  # the recipe's entry
    path: str  # module:function
    function: registry.RewardFunction
    signature: Signature
    traits: Traits  # what the function declares
    args: Mapping[str, Any]  # arguments that the recipe and the run set
    is_async: bool
    timeout: float | None  # seconds per completion; None: called in this process with a batch
    on_error: str  # that of the recipe; the probe counts errors instead
    cache: bool
    concurrency: int  # concurrent calls of an async function

    def applies_to(self, sample: Sample) -> bool:
        """Returns whether the sample's data set matches and its environment worked."""
        if sample.environment_failed:
            return False
        named = self.spec.datasets
        return not named or sample.columns.get(DATASET) in (None, *named)

    def takes(self, name: str) -> bool:
        """Returns whether the function is called with this argument of STANDARD."""
        # A cached call must depend neither on the step nor on an unnamed argument.
        named = self.signature.standard if self.cache else STANDARD
        return name in named and (name in self.signature.standard or self.signature.open_ended)

    def arguments(self, samples: Sequence[Sample], state: TrainerState) -> dict[str, Any]:
        """Returns the function's arguments, with None for log_metric and log_extra."""
        chat = isinstance(samples[0].prompt, list)
        standard: dict[str, Any] = {
            "prompts": [s.prompt for s in samples],
            "completions": [_completion(s, chat) for s in samples],
            "trainer_state": state,
            "log_metric": None,
            "log_extra": None,
        }
        if all(s.ids is not None for s in samples):
            standard["completion_ids"] = [list(s.ids or ()) for s in samples]
        if "episodes" in self.signature.standard or any(s.episode is not None for s in samples):
            standard["episodes"] = [s.episode for s in samples]
        arguments = {name: value for name, value in standard.items() if self.takes(name)}
        for column in samples[0].columns:
            if column not in STANDARD and self.signature.takes(column):
                arguments[column] = [s.columns[column] for s in samples]
        return {**arguments, **self.args}

    def call(self, samples: Sequence[Sample], state: TrainerState) -> CallResult:
        """Calls the function in this process and waits for the result."""
        import torch  # late: slow

        # The grad mode is restored: a function may leave another.
        with no_exit(), torch.set_grad_enabled(torch.is_grad_enabled()):
            return answer(self.function, self.arguments(samples, state))


def _completion(sample: Sample, chat: bool) -> str | list[dict[str, Any]]:
    """Converts a completion to TRL's form: text, a message, or all messages of an episode."""
    if sample.episode is not None and sample.episode["messages"]:
        return list(sample.episode["messages"])
    text = sample.prefill + sample.text
    return [{"role": "assistant", "content": text}] if chat else sample.text


def bind_reward(name: str, spec: Reward, run: Mapping[str, Any]) -> BoundReward:
    """Binds a recipe's entry to its function.

    Raises:
        UserError: see `Scorer`.
    """
    function = registry.resolve(spec.function, f"reward.{name}.function")
    path = registry.path_of(spec.function)
    signature, traits = Signature.of(function), traits_of(function)
    arguments = {k: v for k, v in run.items() if k in signature.arguments} | spec.args
    _check_arguments(name, spec, signature, arguments)
    # An async function, or an object with an async __call__.
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    timeout = _timeout(name, spec, traits.timeout, is_async)
    if timeout and not is_async and sys.modules[path.partition(":")[0]].__spec__ is None:
        raise UserError(
            f"reward.{name}.timeout: its function is called in a worker process, which cannot "
            "import it from a notebook or a script; put the function into a module, and name it "
            f"as reward.{name}.function=my_module:my_function."
        )
    if spec.concurrency is not None and not is_async:
        raise UserError(
            f"reward.{name}.concurrency: is only read for async functions; "
            "scoring.workers says how many worker processes there are."
        )
    # Values that change with the step are not cached.
    cache = timeout is not None and traits.cache and "trainer_state" not in signature.standard
    return BoundReward(
        name=name,
        spec=spec,
        path=path,
        function=function,
        signature=signature,
        traits=traits,
        args=arguments,
        is_async=is_async,
        timeout=timeout,
        on_error=spec.on_error,
        cache=cache,
        concurrency=spec.concurrency or ASYNC_CONCURRENCY,
    )


def _check_arguments(
    name: str, spec: Reward, signature: Signature, arguments: Mapping[str, Any]
) -> None:
    for argument in spec.args:
        # **kwargs is for columns; an argument that only **kwargs would accept is a typo.
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


def _timeout(name: str, spec: Reward, default: float | None, is_async: bool) -> float | None:
    """Returns the time limit of a call in seconds; None: the function is called in this process."""
    timeout = default if spec.timeout is None else spec.timeout or None
    if is_async:
        if spec.timeout == 0:
            raise UserError(f"reward.{name}.timeout: an async function has one; must be > 0.")
        timeout = timeout or ASYNC_TIMEOUT
    return timeout
