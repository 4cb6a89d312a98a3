"""Samples groups of rollouts in three ways, for training, the probe and evaluation.

Rollouter      one completion after each prompt
EpisodeLoop    turns with environments, or with programs that the model writes (`loop.py`)
TrlRollouts    a rollout function in TRL's manner (`trl_rollouts.py`)

A recipe's `rollout` can also name a subclass of your own, as my_module:MyRollouter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from grpo_cli.config.recipe import Recipe
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.loading import eos_ids
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion, Group, Prompt, Rollout, decoded

if TYPE_CHECKING:
    from grpo_cli.environments.sessions import Sessions
    from grpo_cli.models.loading import LoadedModel

# The number of a prompt in a request, the prompt as each completion saw it, and the completions.
Sampled = tuple[int, Sequence[Prompt], list[Completion]]


@dataclass(frozen=True)
class RolloutSetup:
    """The arguments that every kind of rollout is made with."""

    recipe: Recipe
    sessions: Sessions | None  # None: `has_environments` is false, or only benchmarks are evaluated
    loaded: LoadedModel
    max_prompt_tokens: int | None  # limit of a prompt with its first observation; None: no limit
    say: Callable[[str], None]  # prints a line for the user

    @property
    def eos_ids(self) -> set[int]:
        """The tokens that end a turn."""
        of_model = eos_ids(self.loaded.model.generation_config, self.loaded.tokenizer)
        return {*of_model, *self.recipe.generation.stop_token_ids}


class Rollouter:
    """Samples one completion after each prompt, also in evaluation; a subclass takes turns."""

    has_environments: bool = False  # whether tools or environments answer
    max_prompt_tokens: int | None = None  # limit of a prompt with its first observation
    takes_turns: bool = False  # whether it waits for other programs
    max_failed_share: float = 1.0  # share of a call's environments; more failures abort the call

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Raises a UserError if the recipe's settings do not fit this kind of rollout."""

    @classmethod
    def make(cls, setup: RolloutSetup) -> Rollouter:
        """Makes the rollouter of the recipe's own prompts; raises a UserError if it cannot."""
        return cls()

    @contextmanager
    def groups(
        self,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[tuple[int, Prompt]],
        num_generations: int,
        sampling: Sampling,
        seed: int,
    ) -> Iterator[Iterator[Group]]:
        """Yields an iterator over the prompts' groups, decoded and not yet scored.

        It samples while it is iterated, and yields each group once it is complete.

        Args:
            prompts: (prompt index, prompt) pairs.
            seed: each group's random stream depends on (seed, its prompt index).
        """
        own = [prompt for _, prompt in prompts]
        seeds = [derive_seed(seed, prompt_index) for prompt_index, _ in prompts]

        def rollout(prompt: Prompt, completion: Completion) -> Rollout:
            return Rollout(prompt, completion, decoded(tokenizer, completion.ids))

        with self.sample(generator, Request(own, num_generations, sampling, seeds)) as sampled:
            yield (
                Group(prompts[n][0], seen[0], [*map(rollout, seen, completions)])
                for n, seen, completions in sampled
            )

    @contextmanager
    def sample(self, generator: Generator, request: Request) -> Iterator[Iterator[Sampled]]:
        """Samples while it is iterated; yields each prompt's completions once they are complete."""
        with generator.session() as session:
            session.submit(request)
            yield (
                (number, [request.prompts[number]] * len(completions), completions)
                for _, number, completions in session.drain()
            )

    def take_times(self) -> dict[str, float]:
        """Returns the time metrics since the last call, and resets them."""
        return {}

    def for_evaluation(self) -> Rollouter:
        """Returns a copy that measures its own times and keeps long prompts."""
        found = copy.copy(self)
        found.max_prompt_tokens = None
        return found
