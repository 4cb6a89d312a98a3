"""Sampling from a sharded policy: a whole copy of it, which is there only while it samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from grpo_cli import policy, sharding
from grpo_cli.drafts import OnGroup, ignore
from grpo_cli.generation import TransformersGenerator
from grpo_cli.rollouts import Completion
from grpo_cli.sampling import Sampling


class GatheringGenerator(TransformersGenerator):
    """Decodes with the embedded engine on every process, each on its own whole copy.

    Sharded layers would be gathered anew for each token, and every process would have to decode as
    many tokens as the one with the longest completion.
    """

    def __init__(
        self,
        sharded: PreTrainedModel,
        eos_ids: Sequence[int],
        max_rows: int | None,
        dtype: torch.dtype,
        **settings: Any,
    ) -> None:
        """dtype: of the copy. settings: those of `TransformersGenerator`."""
        super().__init__(policy.skeleton(sharded), eos_ids, max_rows, **settings)
        self.sharded, self.dtype = sharded, dtype

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        sharding.fill(self.policy, self.sharded, self.dtype)
        try:
            return super().generate(prompts, num_generations, sampling, seeds, on_group)
        finally:
            sharding.empty(self.policy)

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.sharded = policy
        return {}
