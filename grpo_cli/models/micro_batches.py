"""Runs computations over rollouts in micro-batches, which are halved when memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import torch

from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.stop_signal import Interrupts
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, first_line
from grpo_cli.models import attention
from grpo_cli.models.activation_bytes import bytes_per_token
from grpo_cli.models.attention import UnsupportedModelError
from grpo_cli.models.memory import (
    SMALLEST,
    bytes_to_come,
    is_out_of_memory,
    release,
    tokens_that_fit,
)
from grpo_cli.models.packing import length, packed_micro_batches, unique_tokens
from grpo_cli.models.policy_logprobs import PolicyLogprobs, cut
from grpo_cli.models.reference import Reference
from grpo_cli.models.vision import VisionProcessor, parameters_of_images
from grpo_cli.records import Completion, Prompt, R, Rollout, WeightedSample, has_images

T = TypeVar("T")


class MicroBatchBudget:
    """The number of tokens per micro-batch, including padding, on this process."""

    def __init__(
        self, tokens: int | None, say: Callable[[str], None], *, runs_in_lockstep: bool = False
    ) -> None:
        """Starts with a known or unknown number of tokens.

        Args:
            tokens: None if it must be measured.
            say: prints a line when memory runs out.
            runs_in_lockstep: passes are collective, so that no process can repeat one alone.
        """
        self.tokens = tokens
        self.counts_images = tokens is not None  # True: a given number is not measured again
        self.say = say
        self.runs_in_lockstep = runs_in_lockstep

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"micro_batch_tokens": self.tokens, "counts_images": self.counts_images}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self.tokens, self.counts_images = state["micro_batch_tokens"], state["counts_images"]

    def take_measured(self, tokens: int, *, with_images: bool) -> None:
        """Sets the measured number of tokens, or lowers it if images need more memory."""
        before, self.counts_images = self.tokens, with_images
        self.tokens = tokens if before is None else min(before, tokens)
        if before is not None and self.tokens < before:
            self.say(
                f"note: micro-batches of {self.tokens:,} tokens from now on, not {before:,}: the "
                "first images take more memory than texts"
            )

    def with_oom_retry(
        self,
        work: Callable[[int], T],
        lengths: Sequence[int],
        undo: Callable[[], None],
        total: int | None = None,
    ) -> T:
        """Returns `work(tokens)`; retries with half the tokens when memory runs out.

        Args:
            lengths: tokens of each row; a micro-batch has at least one row.
            undo: reverts the effects of a failed attempt.
            total: tokens of all rows together, if rows share some.

        Raises:
            TrainingError: a single row does not fit.
        """
        while True:
            tokens = SMALLEST if self.tokens is None else self.tokens
            try:
                return work(tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # After the except block: the traceback, whose frames held memory, has been freed.
            undo()
            release()
            if tokens <= max(lengths, default=0):  # without rows only dummies are computed
                raise TrainingError(
                    f"out of memory with a completion of {max(lengths):,} tokens, prompt included: "
                    "use model.gradient_checkpointing=true, mixed_precision=bf16 or a smaller "
                    f"generation.max_completion_tokens. ({reason})",
                    alone=True,
                )
            if self.runs_in_lockstep:
                raise TrainingError(
                    f"out of memory with micro-batches of {tokens:,} tokens; processes that share "
                    "a model cannot repeat one by themselves: resume with resume=auto "
                    f"update.tokens_per_micro_batch={tokens // 2}. ({reason})",
                    alone=True,
                )
            # At most half of all tokens; half of a larger budget would fail again.
            self.tokens = max(min(tokens, sum(lengths) if total is None else total) // 2, 1)
            self.say(
                f"note: out of memory: micro-batches of {self.tokens:,} tokens from now on; the "
                "batch is done again, and comes out the same"
            )


class MicroBatcher:
    """Applies a function to micro-batches; retries with fewer tokens when memory runs out.

    With sharded models the processes run in lockstep. All compute the same number of micro-batches,
    with a dummy if they have no more, and none can repeat one alone. Each also encodes
    images in every micro-batch, if necessary the dummy's.
    """

    def __init__(
        self,
        workers: Workers,
        interrupts: Interrupts,
        budget: MicroBatchBudget,
        optimizer: torch.optim.Optimizer,
        policy_logprobs: PolicyLogprobs,
        reference: Reference | None = None,
        vision: VisionProcessor | None = None,
    ) -> None:
        """vision: the model's processor if the data has images, else None."""
        self.vision = vision if workers.runs_in_lockstep else None
        self.workers = workers
        self.interrupts = interrupts
        self.budget = budget
        self.optimizer = optimizer
        self.policy_logprobs = policy_logprobs
        self.has_reference = reference is not None
        self.asked = (
            [policy_logprobs] if reference is None else [policy_logprobs, reference.logprobs]
        )

    @cached_property
    def dummy(self) -> WeightedSample:
        """The sample of a process that has none left while other processes do."""
        prompt = Prompt.from_ids([0]) if self.vision is None else self.vision.dummy_prompt()
        return dummy_sample(prompt, reference=self.has_reference)

    def map(
        self,
        compute: Callable[[list[R]], T],
        rollouts: Sequence[R],
        policy_logprobs: PolicyLogprobs,
        undo: Callable[[], None] = lambda: None,
    ) -> list[T]:
        """Returns the result of `compute` for each micro-batch, including dummies.

        Args:
            policy_logprobs: called by `compute`; its mode determines how rollouts are arranged.
            undo: reverts the effects of an incomplete attempt, before a retry with fewer tokens or
                in a simpler mode.

        Raises:
            TrainingError: a single rollout does not fit into memory.
            Interrupted: the run was interrupted.
        """

        def attempt(max_tokens: int) -> list[T]:
            return [compute(m) for m in self._split(rollouts, policy_logprobs, max_tokens)]

        lengths = [length(r) for r in rollouts]
        if self.workers.runs_in_lockstep:  # later, no process can change its mode by itself
            longest = self.workers.max(max(lengths, default=0))
            window = attention.narrowest_window(policy_logprobs.model)
            if policy_logprobs.mode.packed and longest > window:
                policy_logprobs.fall_back(f"its attention sees {window:g} tokens and no more")
        while True:
            alone = not self.workers.runs_in_lockstep
            try:
                with self.interrupts.interruptible() if alone else contextlib.nullcontext():
                    return self.budget.with_oom_retry(
                        attempt, lengths, undo, policy_logprobs.tokens(rollouts)
                    )
            except UnsupportedModelError as error:  # longer than the checked rollouts
                undo()
                policy_logprobs.fall_back(str(error))

    def map_each(
        self,
        compute: Callable[[list[R]], list[T]],
        rollouts: Sequence[R],
        policy_logprobs: PolicyLogprobs,
    ) -> list[T]:
        """Returns one value for each rollout, in order.

        Args:
            compute: returns the values of a micro-batch's rollouts.
        """
        numbers = {id(r): i for i, r in enumerate(rollouts)}
        found: dict[int, T] = {}

        def keep(micro_batch: list[R]) -> None:
            for r, value in zip(micro_batch, compute(micro_batch), strict=True):
                found[numbers.get(id(r), -1)] = value  # -1: a dummy

        self.map(keep, rollouts, policy_logprobs)
        return [found[i] for i in range(len(rollouts))]

    def _split(
        self, rollouts: Sequence[R], policy_logprobs: PolicyLogprobs, max_tokens: int
    ) -> Iterator[list[R]]:
        """Yields micro-batches; in lockstep, the same number on every process."""
        if self.vision is not None:
            max_tokens = max(max_tokens - length(self.dummy), 1)
        dummy = cast(R, self.dummy)  # it has the fields of every kind of rollout
        own = cast(list[list[R]], [*policy_logprobs.micro_batches(rollouts, max_tokens)])
        most = int(self.workers.lockstep_max(len(own)))
        for micro_batch in (*own, *[[dummy]] * (most - len(own))):
            heartbeat.beat()  # a process may be interrupted here
            if self.workers.runs_in_lockstep:  # all processes are interrupted together
                self.interrupts.interrupt_together()
            if self.vision is not None and not has_images(r.prompt for r in micro_batch):
                micro_batch = [*micro_batch, dummy]
            yield micro_batch

    def drop_dummy_gradients(self, rollouts: Sequence[Rollout]) -> None:
        """Drops gradients that come only from dummy images, after a backward without images.

        The optimizer skips a weight whose gradient is None, but not one whose gradient is 0.
        """
        if self.vision is None or not self.workers.lockstep_max(bool(rollouts)):
            return
        if not self.workers.lockstep_max(has_images(r.prompt for r in rollouts)):
            for p in parameters_of_images(self.policy_logprobs.model):
                p.grad = None

    def calibrate(self, rollouts: Sequence[Rollout], temperature: float) -> None:
        """Checks the forward modes, and measures how many tokens fit, before the first rollouts.

        Repeats both before the first rollouts with images, which take more memory than text.
        """
        if self.budget.tokens is not None and all(m.checked for m in self.asked):
            has_new = has_images(r.prompt for r in rollouts)
            knows_images = self.budget.counts_images and all(m.checked_images for m in self.asked)
            if knows_images or not self.workers.lockstep_max(has_new):
                return
        some = cut(rollouts)
        if self.workers.runs_in_lockstep:  # the same rollouts on every process
            gathered = self.workers.gather(some)
            some = max(gathered, key=lambda own: (has_images(r.prompt for r in own), len(own)))
        if not some:
            return

        def attempt(max_tokens: int) -> None:
            few = next(packed_micro_batches(some, max_tokens))
            few = few if len(few) > 1 else some[:2]  # the check needs two rollouts
            for policy_logprobs in self.asked:
                policy_logprobs.check(few, temperature)
            images = has_images(r.prompt for r in few)
            is_new = self.budget.tokens is None or (images and not self.budget.counts_images)
            if is_new and self.policy_logprobs.checked:
                fitting = self._tokens_that_fit(few, temperature)
                self.budget.take_measured(fitting, with_images=images)

        # Even these few may not fit at once. A separate budget leaves the run's own unchanged.
        quiet = MicroBatchBudget(
            sum(map(length, some)),
            lambda text: None,
            runs_in_lockstep=self.workers.runs_in_lockstep,
        )
        lengths = [length(r) for r in some]
        quiet.with_oom_retry(attempt, lengths, lambda: None, unique_tokens(some)[0])

    def _tokens_that_fit(self, rollouts: Sequence[Rollout], temperature: float) -> int:
        device, optimizer = self.workers.device, self.optimizer
        to_come = 0 if optimizer.state else bytes_to_come(optimizer, device)
        per_token = bytes_per_token(self.policy_logprobs, rollouts, temperature)
        fitting = tokens_that_fit(device, per_token, state_to_come=to_come)
        return -int(self.workers.lockstep_max(-fitting))


def dummy_sample(prompt: Prompt, *, reference: bool) -> WeightedSample:
    """Returns a sample that does not train, since no reward applies to it.

    Args:
        reference: whether it has log-probabilities under a reference, as the others have.
    """
    return WeightedSample(
        prompt,
        Completion([0], [0.0], "stop"),
        text="",
        ref_logprobs=torch.zeros(1) if reference else None,
        place=(-1, 0),
        weight=0.0,
    )
