"""Samples groups of rollouts from prompts; training and evaluation sample only here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_cli.environments.loop import EpisodeLoop, Sampled
from grpo_cli.environments.trl_rollouts import TrlRollouts
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion, Group, Prompt, Rollout


@dataclass(frozen=True)
class Rollouter:
    """Samples groups of rollouts with a generator, decoded and not yet scored.

    With `episodes`, rollouts are multi-turn, with environments or with programs that the model
    writes, or a rollout function makes them.
    """

    generator: Generator
    tokenizer: PreTrainedTokenizerBase
    episodes: EpisodeLoop | TrlRollouts | None = None

    @contextmanager
    def groups(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        num_generations: int,
        sampling: Sampling,
        seed: int,
    ) -> Iterator[Iterator[Group]]:
        """Yields an iterator over the prompts' groups, each with `num_generations` rollouts.

        It samples while it is iterated, and yields each group once it is complete.

        Args:
            prompts: (prompt index, prompt) pairs.
            seed: each group's random stream depends on (seed, its prompt index).
        """
        own = [prompt for _, prompt in prompts]
        seeds = [derive_seed(seed, prompt_index) for prompt_index, _ in prompts]
        sample = single_turns if self.episodes is None else self.episodes.sample
        with sample(self.generator, Request(own, num_generations, sampling, seeds)) as sampled:
            yield (
                Group(prompts[n][0], seen[0], [*map(self._rollout, seen, completions)])
                for n, seen, completions in sampled
            )

    def _rollout(self, prompt: Prompt, completion: Completion) -> Rollout:
        text = self.tokenizer.decode(completion.ids, skip_special_tokens=True)
        return Rollout(prompt, completion, text)


@contextmanager
def single_turns(generator: Generator, request: Request) -> Iterator[Iterator[Sampled]]:
    """Samples completions, as `EpisodeLoop.sample` samples episodes."""
    with generator.session() as session:
        session.submit(request)
        yield (
            (number, [request.prompts[number]] * len(completions), completions)
            for _, number, completions in session.drain()
        )
