"""Puts the sections of a recipe together, each declared in the `settings.py` of its package.

A composed YAML is turned into a `Recipe` once, by `parsing.parse`. After that, code passes these
dataclasses (or plain values) and never a raw config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_cli.algorithm.settings import Advantage, Loss
from grpo_cli.checkpoints.settings import Checkpoint
from grpo_cli.config.knob import knob, section
from grpo_cli.data.settings import Dataset
from grpo_cli.distributed.settings import HALF_TYPES, Distributed
from grpo_cli.environments.settings import EnvironmentSettings, EpisodeSettings
from grpo_cli.evaluation.settings import Eval
from grpo_cli.generation.settings import Generation
from grpo_cli.models.settings import Adapter, Model, Optimizer
from grpo_cli.reporting.settings import Hub, Log, Tracking
from grpo_cli.scoring.settings import Scoring, own_first
from grpo_cli.training.settings import RunSettings, Stop, Update


@dataclass
class Recipe(RunSettings):
    """One run."""

    model: Model = section(Model)
    adapter: Adapter = section(Adapter, training=True)
    dataset: Dataset = section(Dataset, rows="own")
    reward: dict[str, Any] = knob(
        {}, "Rewards by name; each has function, weight and args.", rows="own"
    )
    benchmark: dict[str, Any] = knob(
        {},
        "Benchmarks by name, such as benchmark=gsm8k,math; they replace dataset.eval in "
        "evaluation.",
    )
    scoring: Scoring = section(Scoring, without_effect=True)
    generation: Generation = section(Generation)
    tools: dict[str, str] = knob(
        {},
        "Tools that the model may call, by name: typed functions with docstrings, as "
        "my_module:my_function.",
        rows="own",
        decides="completions",
    )
    environment: EnvironmentSettings = section(
        EnvironmentSettings, rows="own", decides="completions", episodes=True
    )
    episode: EpisodeSettings = section(
        EpisodeSettings, rows="own", decides="completions", episodes=True
    )
    rollout: str | None = knob(
        None,
        "Function or subclass of Rollouter that makes the rollouts, as my_module:my_function; "
        "null: the model and its tools or environment take turns.",
        rows="own",
        decides="completions",
    )
    loss: Loss = section(Loss, training=True, decides="updates")
    advantage: Advantage = section(Advantage, training=True)
    optimizer: Optimizer = section(Optimizer, training=True)
    update: Update = section(Update, training=True, decides="updates")
    distributed: Distributed = section(Distributed, without_effect=True)
    eval: Eval = section(Eval)
    stop: Stop = section(Stop, training=True)
    checkpoint: Checkpoint = section(Checkpoint, training=True, without_effect=True)
    log: Log = section(Log, training=True, without_effect=True)
    tracking: Tracking = section(Tracking, training=True, without_effect=True)
    callbacks: dict[str, Any] = knob(
        {}, "Callbacks by name; each has path and args.", training=True
    )
    hub: Hub = section(Hub, training=True, without_effect=True)

    @property
    def arithmetic_dtype(self) -> str:
        """The data type of the forward computation, by its name in torch."""
        return HALF_TYPES.get(self.mixed_precision, self.model.dtype)

    @property
    def longest_completion(self) -> int:
        """The longest completion limit in tokens, over training and evaluation."""
        own = self.eval.max_completion_tokens
        of_benchmarks = [own or b.max_completion_tokens or 0 for b in self.benchmark.values()]
        return max(self.generation.max_completion_tokens, own or 0, *of_benchmarks)

    @property
    def evaluation_temperature(self) -> float:
        """The sampling temperature of evaluation."""
        if self.eval.sampling == "training":
            return self.generation.temperature
        return self.eval.drawn_at

    @property
    def runs_programs(self) -> bool:
        """Whether an evaluation runs programs that the model writes."""
        modes = (b.modes.get(m) for b in self.benchmark.values() for m in self.eval.mode)
        return any(mode is not None and mode.tools for mode in modes)

    @property
    def has_environment(self) -> bool:
        """Whether tools or an environment answer the model's turns."""
        of = self.environment
        return bool(self.tools or of.path or of.by_name or of.mcp)

    @property
    def has_episodes(self) -> bool:
        """Whether completions may be episodes of several turns."""
        return self.has_environment or self.rollout is not None

    @property
    def accuracies(self) -> list[str]:
        """The names of the rewards, first the one whose value 1 counts as correct."""
        names = own_first({name: reward.function for name, reward in self.reward.items()})
        return sorted(names, key=lambda name: name != self.eval.accuracy)

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward, by name."""
        return {name: reward.weight for name, reward in self.reward.items()}

    @property
    def needs_reference(self) -> bool:
        """Whether the run has a KL to a reference."""
        return self.loss.beta > 0
