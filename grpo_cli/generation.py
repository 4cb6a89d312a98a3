"""The Generator protocol, and the generator that samples with the transformers model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli import attention, budget
from grpo_cli.drafts import Drafts, OnGroup, ignore
from grpo_cli.engine import Engine
from grpo_cli.errors import TrainingError
from grpo_cli.likelihood import CHECKED_TOKENS, Likelihood, difference, objection
from grpo_cli.plain_decoding import PlainDecoder
from grpo_cli.policy import inference
from grpo_cli.rollouts import Completion, Group, Prompt, Rollout, derive_seed, pad_right
from grpo_cli.sampling import Sampling


class Generator(Protocol):
    """Makes completions. Speaks token ids; what it returns was sampled, nothing is guessed."""

    samples_from_policy: bool  # whether its arithmetic is the policy module's own
    computes_here: bool  # on this process's device, so that its FLOPs are the device's
    cache_tokens: int | None  # room in its caches, once measured: other batches round differently

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        """`num_generations` completions for each prompt, in the order of the prompts.

        Args:
            prompts: token ids. seeds: one a prompt; completion j of a prompt depends on
                (its seed, j) and the weights, not on the other prompts.
            on_group: called with (number of the prompt, its completions) as soon as they are all
                there, while others are still being made; it must be quick.
        """
        ...

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        """Makes what is generated from now on come from `policy`, as it is after `step` steps.

        Every process calls it. Returns what is to be logged.

        Raises:
            TrainingError: it did not come to pass; what was generated before is sound.
        """
        ...

    def rest(self) -> None:
        """Nothing is generated for a while: gives memory back that the update can use."""
        ...

    def close(self) -> None:
        """Gives back processes and memory."""
        ...


def sample(
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, Prompt]],
    num_generations: int,
    sampling: Sampling,
    seed: int,
    arrived: Callable[[list[Rollout]], None],
) -> list[Group]:
    """A group of rollouts, decoded and not yet scored, for each (position, prompt).

    Args:
        arrived: called with a group's rollouts while others are still being sampled.
    """
    groups: dict[int, Group] = {}

    def take(number: int, completions: list[Completion]) -> None:
        position, prompt = prompts[number]
        texts = (tokenizer.decode(c.ids, skip_special_tokens=True) for c in completions)
        rollouts = [Rollout(prompt, c, t) for c, t in zip(completions, texts, strict=True)]
        groups[number] = Group(position, prompt, rollouts)
        arrived(rollouts)

    generator.generate(
        [prompt.ids for _, prompt in prompts],
        num_generations,
        sampling,
        [derive_seed(seed, position) for position, _ in prompts],
        take,
    )
    assert len(groups) == len(prompts), "a generator hands over every group once"
    return [groups[number] for number in range(len(prompts))]


class TransformersGenerator:
    """Decodes with the policy's own module: no second copy of the weights, none to be stale.

    With the embedded engine (`engine.py`), if what that says of its first completions is what the
    model says of them; else with transformers' own cache.
    """

    samples_from_policy = True
    computes_here = True

    def __init__(
        self,
        policy: PreTrainedModel,
        eos_ids: Sequence[int],
        max_rows: int | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        say: Callable[[str], None] = print,
    ) -> None:
        """Changes what the model calls its attention, where the engine can decode it.

        Args:
            max_rows: completions decoded at the same time; None: by free memory.
            tokenizer: finds stop strings. autocast: the arithmetic. say: is told of what changes.
        """
        self.policy = policy
        self.eos_ids = list(eos_ids)
        self.max_rows = max_rows
        self.tokenizer = tokenizer
        self.autocast = autocast
        self.say = say
        self.cache_tokens: int | None = None
        self.decoder: type[Engine] | type[PlainDecoder] | None = None  # found by the first prompts

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        groups: dict[int, list[Completion]] = {}
        if not prompts:  # more processes than prompts
            return []
        handing_over = False

        def take(numbers: list[int], k: int, completions: list[Completion]) -> None:
            nonlocal handing_over
            groups[numbers[k]] = completions
            handing_over = True
            on_group(numbers[k], completions)
            handing_over = False

        # One autocast around all steps: it keeps its copies of the weights until it is left.
        with inference(self.policy), self.autocast():
            if self.decoder is None:
                why = self._objection(prompts)
                self.decoder = Engine
                if why is not None:
                    self.decode_plainly(why)
            while len(groups) < len(prompts):
                missing = [n for n in range(len(prompts)) if n not in groups]
                drafts = Drafts(
                    [prompts[n] for n in missing],
                    num_generations,
                    sampling,
                    [seeds[n] for n in missing],
                    self.eos_ids,
                    self.tokenizer,
                    partial(take, missing),
                )
                longest = max(map(len, drafts.prompts)) + sampling.max_tokens
                rows = self._rows(len(missing) * num_generations, longest)
                failed = None
                try:
                    self.decoder(self.policy, rows).decode(drafts)
                except attention.UnsupportedModelError as error:  # longer than what was checked
                    self.decode_plainly(str(error))
                except (RuntimeError, MemoryError) as error:
                    if handing_over or not budget.is_out_of_memory(error):
                        raise
                    failed = (str(error).strip() or type(error).__name__).splitlines()[0]
                if failed is not None:  # here the frames that held memory are gone
                    del drafts
                    budget.release()
                    self._halve(rows, num_generations, longest, failed)
        return [groups[n] for n in range(len(prompts))]

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.policy = policy
        return {}

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _rows(self, wanted: int, longest: int) -> int:
        """Completions decoded at the same time, of up to `longest` tokens with their prompts."""
        if self.max_rows is not None:
            return min(wanted, self.max_rows)
        if self.cache_tokens is None:
            self.cache_tokens = budget.cache_tokens_that_fit(self.policy)
        return min(wanted, max(self.cache_tokens // longest, 1), budget.most_rows(self.policy))

    def _halve(self, rows: int, num_generations: int, longest: int, reason: str) -> None:
        """After `rows` did not fit."""
        if rows <= num_generations:
            raise TrainingError(
                f"out of memory while {num_generations} completions of a prompt were sampled, the "
                "smallest number that is: use a smaller generation.num_generations or "
                f"generation.max_completion_tokens, or model.dtype=bfloat16. ({reason})",
                alone=True,
            )
        fewer = max(rows // 2, num_generations)
        if self.max_rows is None:
            self.cache_tokens = fewer * longest
        else:
            self.max_rows = fewer
        self.say(
            f"note: out of memory: {fewer} completions at a time from now on; those that were not "
            "whole are done again, and come out the same"
        )

    @property
    def is_plain(self) -> bool:
        """Whether the engine was given up."""
        return self.decoder is PlainDecoder

    def decode_plainly(self, why: str) -> None:
        """Gives the engine up."""
        self.say(f"note: decoding with transformers' own cache, not with the engine ({why})")
        self.decoder = PlainDecoder

    def _objection(self, prompts: Sequence[Sequence[int]]) -> str | None:
        """Why the engine will not do; None if the log-probabilities of a few tokens are right."""
        if not attention.install(self.policy):
            return f"its attention is {attention.name_of(self.policy)}"
        begun = [p[-CHECKED_TOKENS:] for p in prompts[:2]]
        drafts = Drafts(begun, 2, Sampling(max_tokens=4), [0, 1], [])
        why = objection(lambda: Engine(self.policy, 4).decode(drafts))
        if why is not None:
            return why
        rollouts = [
            Rollout(Prompt(0, list(p), "", {}), c, "")
            for p, group in zip(begun, drafts.groups, strict=True)
            for c in group
        ]
        plain, _ = Likelihood(self.policy, packed=False, chunked=False)(rollouts, 1.0)
        sampled = [torch.tensor(r.completion.logprobs) for r in rollouts]
        return difference(rollouts, plain, pad_right(sampled, plain.shape[1]), self.policy)
