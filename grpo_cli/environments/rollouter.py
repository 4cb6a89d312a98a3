"""Samples groups of rollouts from prompts; training and evaluation sample only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.trl_rollouts import TrlRollouts
from grpo_cli.generation.base import Generator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion, Group, Prompt, Rollout


class Rollouter:
    """Samples groups of rollouts with a generator, decoded and not yet scored.

    With `episodes`, rollouts are multi-turn, with environments or with programs that the model
    writes, or a rollout function makes them.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        episodes: EpisodeLoop | TrlRollouts | None = None,
    ) -> None:
        self.generator, self.tokenizer = generator, tokenizer
        self.episodes = episodes

    def rollouts(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        num_generations: int,
        sampling: Sampling,
        seed: int,
        arrived: Callable[[list[Rollout]], None],
    ) -> list[Group]:
        """Returns a group of `num_generations` rollouts for each (prompt index, prompt), in order.

        Args:
            seed: each group's random stream depends on (seed, its prompt index).
            arrived: called with a group's rollouts once they are complete.
        """
        groups: dict[int, Group] = {}

        def take(number: int, completions: list[Completion]) -> None:
            hand_over(number, [prompts[number][1]] * len(completions), completions)

        def hand_over(number: int, own: Sequence[Prompt], completions: list[Completion]) -> None:
            prompt_index = prompts[number][0]
            texts = (self.tokenizer.decode(c.ids, skip_special_tokens=True) for c in completions)
            rollouts = [
                Rollout(prompt, c, t) for prompt, c, t in zip(own, completions, texts, strict=True)
            ]
            groups[number] = Group(prompt_index, own[0], rollouts)
            arrived(rollouts)

        how = (
            [prompt for _, prompt in prompts],
            num_generations,
            sampling,
            [derive_seed(seed, prompt_index) for prompt_index, _ in prompts],
        )
        if self.episodes is None:
            self.generator.generate(*how, take)
        else:
            self.episodes.sample(self.generator, *how, hand_over)
        assert len(groups) == len(prompts), "a generator hands over every group once"
        return [groups[number] for number in range(len(prompts))]
