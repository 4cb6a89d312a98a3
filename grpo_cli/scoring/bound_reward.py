"""Binds a recipe's reward to its function, and calls it with a batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.data.rows import DATASET
from grpo_cli.data.stored_completions import Sample
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.rewards import Traits, traits_of
from grpo_cli.scoring import registry
from grpo_cli.scoring.guards import no_exit
from grpo_cli.scoring.pool import CallResult
from grpo_cli.scoring.pool_worker import answer
from grpo_cli.scoring.settings import Reward

ASYNC_TIMEOUT = 60.0  # default seconds per completion, if neither function nor recipe sets it
ASYNC_CONCURRENCY = 16  # default number of concurrent calls of an async function


@dataclass(frozen=True)
class BoundReward:
    """A recipe's reward, ready to be called."""

    name: str
    spec: Reward  # the recipe's entry
    path: str  # module:function
    function: registry.RewardFunction
    signature: registry.Signature
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
        """Returns whether the function is called with this argument of registry.STANDARD."""
        # A cached call must depend neither on the step nor on an unnamed argument.
        named = self.signature.standard if self.cache else registry.STANDARD
        return name in named and (name in self.signature.standard or self.signature.open_ended)

    def arguments(self, samples: Sequence[Sample], state: registry.TrainerState) -> dict[str, Any]:
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
            if column not in registry.STANDARD and self.signature.takes(column):
                arguments[column] = [s.columns[column] for s in samples]
        return {**arguments, **self.args}

    def call(self, samples: Sequence[Sample], state: registry.TrainerState) -> CallResult:
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
    signature, traits = registry.Signature.of(function), traits_of(function)
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
    name: str, spec: Reward, signature: registry.Signature, arguments: Mapping[str, Any]
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
