"""Samples groups of rollouts in three ways, for training, the probe and evaluation.

Rollouter      one completion after each prompt
EpisodeLoop    turns with environments, or with programs that the model writes (`loop.py`)
TrlRollouts    a rollout function in TRL's manner (`trl_rollouts.py`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from transformers import PreTrainedTokenizerBase

from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion, Group, Prompt, Rollout

# The number of a prompt in a request, the prompt as each completion saw it, and the completions.
Sampled = tuple[int, Sequence[Prompt], list[Completion]]


class Rollouter:
    """Samples one completion after each prompt; a subclass takes turns."""

    takes_turns: bool = False  # whether it waits for other programs
    max_failed_share: float = 1.0  # share of a call's environments; more failures abort the call

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
            text = tokenizer.decode(completion.ids, skip_special_tokens=True)
            return Rollout(prompt, completion, text)

        with self.sample(generator, Request(own, num_generations, sampling, seeds)) as sampled:
            yield (
                Group(prompts[n][0], seen[0], [*map(rollout, seen, completions)])
                for n, seen, completions in sampled
            )

    def sample(
        self, generator: Generator, request: Request
    ) -> AbstractContextManager[Iterator[Sampled]]:
        """Samples while it is iterated; yields each prompt's completions once they are complete."""
        return single_turns(generator, request)

    def take_times(self) -> dict[str, float]:
        """Returns the time metrics since the last call, and resets them."""
        return {}

    def for_evaluation(self) -> Rollouter:
        """Returns a copy that measures its own times and keeps long prompts."""
        return self


@contextmanager
def single_turns(generator: Generator, request: Request) -> Iterator[Iterator[Sampled]]:
    """Samples one completion after each prompt."""
    with generator.session() as session:
        session.submit(request)
        yield (
            (number, [request.prompts[number]] * len(completions), completions)
            for _, number, completions in session.drain()
        )
