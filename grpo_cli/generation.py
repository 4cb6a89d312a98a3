"""The Generator protocol, and the generator that samples with the transformers model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli import attention, budget
from grpo_cli.drafts import Drafts, OnGroup, ignore
from grpo_cli.engine import Engine
from grpo_cli.likelihood import Likelihood, close
from grpo_cli.plain_decoding import PlainDecoder
from grpo_cli.policy import inference
from grpo_cli.rollouts import Completion, Group, Prompt, Rollout, derive_seed
from grpo_cli.sampling import Sampling


class Generator(Protocol):
    """Makes completions. Speaks token ids; what it returns was sampled, nothing is guessed."""

    samples_from_policy: bool  # whether its arithmetic is the policy module's own

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

    def update_weights(self, policy: PreTrainedModel) -> None:
        """Makes what is generated from now on come from `policy`."""
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
        # One autocast around all steps: it keeps its copies of the weights until it is left.
        with inference(self.policy), self.autocast():
            if self.decoder is None:
                self.decoder = self._checked(prompts)
            while len(groups) < len(prompts):
                missing = [n for n in range(len(prompts)) if n not in groups]

                def take(
                    k: int, completions: list[Completion], missing: list[int] = missing
                ) -> None:
                    groups[missing[k]] = completions
                    on_group(missing[k], completions)

                drafts = Drafts(
                    [prompts[n] for n in missing],
                    num_generations,
                    sampling,
                    [seeds[n] for n in missing],
                    self.eos_ids,
                    self.tokenizer,
                    take,
                )
                rows = self._rows(drafts)
                failed = None
                try:
                    self.decoder(self.policy, rows).decode(drafts)
                except (RuntimeError, MemoryError) as error:
                    if not budget.is_out_of_memory(error) or rows <= num_generations:
                        raise
                    failed = str(error)
                if failed is not None:  # here the frames that held memory are gone
                    del drafts
                    budget.release()
                    self.max_rows = max(rows // 2, 1)
                    self.say(
                        f"note: out of memory: {self.max_rows} completions at a time from now on; "
                        "those that were not whole are done again, and come out the same"
                    )
        return [groups[n] for n in range(len(prompts))]

    def update_weights(self, policy: PreTrainedModel) -> None:
        self.policy = policy

    def close(self) -> None:
        pass

    def _rows(self, drafts: Drafts) -> int:
        """Completions decoded at the same time."""
        wanted = len(drafts.prompts) * drafts.num_generations
        if self.max_rows is None:
            longest = max(map(len, drafts.prompts)) + drafts.sampling.max_tokens
            return min(wanted, budget.rows_that_fit(self.policy, longest))
        return min(wanted, self.max_rows)

    def _checked(self, prompts: Sequence[Sequence[int]]) -> type[Engine] | type[PlainDecoder]:
        """The engine, if a few tokens after the first prompts have the right log-probabilities."""
        why = None
        if not attention.install(self.policy):
            why = f"its attention is {self.policy.config._attn_implementation}"
        else:
            drafts = Drafts(prompts[:2], 2, Sampling(max_tokens=4), [0, 1], [])
            try:
                Engine(self.policy, 4).decode(drafts)
            except attention.UnsupportedModelError as error:
                why = str(error)
            except Exception as error:  # a model's own code may do anything with what it is given
                if budget.is_out_of_memory(error):
                    raise
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            else:
                rollouts = [
                    Rollout(Prompt(0, list(p), "", {}), c, "")
                    for p, group in zip(prompts, drafts.groups, strict=False)
                    for c in group
                ]
                plain = Likelihood(self.policy, packed=False, chunked=False)
                why = close(rollouts, plain(rollouts, 1.0)[0], self.policy)
        if why is None:
            return Engine
        self.say(f"note: decoding with transformers' own cache, not with the engine ({why})")
        return PlainDecoder
