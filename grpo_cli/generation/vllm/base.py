"""The base class of both vLLM engines, which have a copy of the policy's weights."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from grpo_cli.generation.base import EngineSetup, Generator, Request
from grpo_cli.generation.vllm.adapter_folder import rank_on
from grpo_cli.generation.vllm.checks import structured_outputs
from grpo_cli.generation.vllm.prompts import PromptCheck
from grpo_cli.generation.vllm.requests import sampling_params
from grpo_cli.generation.vllm.weight_check import WeightCheck, make_weight_check
from grpo_cli.generation.vllm.weights import AdapterWeights, Weights
from grpo_cli.models.families import placeholder_tokens
from grpo_cli.records import Prompt

FOLDER = "vllm_weights"  # folder name in a run's output_dir


class VllmGenerator(Generator, ABC):
    """Sends each weight update to engines, then checks that they compute with it."""

    accepts_images = True

    @classmethod
    def make(cls, setup: EngineSetup) -> Generator:
        return cls(setup, make_weight_check(setup))

    def __init__(self, setup: EngineSetup, weight_check: WeightCheck | None) -> None:
        self.config = setup.recipe.generation.vllm
        self.policy, self.workers, self.say = setup.model, setup.workers, setup.say
        self.eos_ids, self.weight_check = list(setup.eos_ids), weight_check
        self.structured = structured_outputs(self.config)
        self.longest_prompt = max(len(p.ids) for p in setup.prompts)
        self.longest = self.longest_prompt + setup.recipe.longest_completion
        self.step = 0  # step of the engines' weights
        # Largest rank if the engines apply the adapter; None: merged weights are sent.
        self.lora_rank = rank_on(setup.model, setup.recipe)
        self.prompt_check = PromptCheck(setup, self.lora_rank)
        # Engines read the adapter here, or the weights with transfer=disk.
        self.folder = Path(setup.recipe.output_dir).expanduser().resolve() / FOLDER

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        self.prompt_check(prompts, self.policy)

    def params(self, request: Request, seed: int) -> dict[str, Any]:
        """Returns the fields of vLLM's SamplingParams for a prompt with this seed."""
        sampling = replace(request.sampling, never=placeholder_tokens(self.policy.config))
        n = request.num_generations
        return sampling_params(sampling, n, self.eos_ids, seed, self.structured)

    def weights(self) -> Weights:
        """Returns the weights that an update sends: the adapter's, or all."""
        return Weights(self.policy) if self.lora_rank is None else AdapterWeights(self.policy)

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.policy = policy
        begin = time.monotonic()
        self.load(step)
        metrics = {"weights/sync_seconds": time.monotonic() - begin}
        if self.weight_check is not None:
            metrics |= self.weight_check.metrics(self.differences, lambda: self.load(step), step)
        return metrics

    @abstractmethod
    def load(self, step: int) -> None:
        """Loads the policy's weights into the engines. Every process calls it."""

    @abstractmethod
    def differences(self, trainer: list[list[float]]) -> dict[str, float]:
        """Returns each engine's difference from the trainer's log-probabilities, by engine name.

        Every process calls it, and all get the same result.
        """
