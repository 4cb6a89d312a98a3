"""The check of an engine's weights: engine and trainer must agree on a few fixed tokens.

An engine may receive an update and still compute with other weights: a tied head in a packed copy,
a sleeping engine that woke with its old weights, a layer whose name did not match. So both compute
the log-probabilities of the same tokens after every update. In float32 these differ by about 1e-6;
with the weights of the previous step they differ by 1e-3 or more.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import EngineSetup
from grpo_cli.generation.vllm.checks import dtype_of
from grpo_cli.generation.vllm.prompts import ComparedPrompt, fixed_rows
from grpo_cli.models.families import placeholder_tokens
from grpo_cli.models.policy_logprobs import PolicyLogprobs, inference
from grpo_cli.records import Completion, Rollout

FACTOR = 4.0  # the tolerance is this factor times the difference at the start
FLOOR = {"float32": 5e-5}  # minimum tolerance, by the engine's dtype
FLOOR_16_BIT = 5e-3
LARGEST_AT_START = {"float32": 1e-3}  # a larger difference is more than rounding
LARGEST_AT_START_16_BIT = 0.5


@dataclass
class WeightCheck:
    """Compares engines with the trainer on fixed tokens, and holds the measured tolerances."""

    rows: list[ComparedPrompt]
    trainer_logprobs: Callable[[], list[list[float]]]  # for each row's scored tokens
    dtype: str  # the engine's compute dtype
    measured: dict[str, float] = field(default_factory=dict)  # first difference of each engine

    def difference(self, trainer: list[list[float]], engine: list[list[float]]) -> float:
        """Returns the mean over tokens of |difference of log-probabilities|; inf for NaN."""
        pairs = zip(itertools.chain(*trainer), itertools.chain(*engine), strict=True)
        found = [abs(a - b) for a, b in pairs]
        mean = math.fsum(found) / len(found)
        return mean if math.isfinite(mean) else math.inf

    def allowed(self, engine: str) -> float:
        """Returns the tolerance: the largest mean difference of an engine that is rounding."""
        floor = FLOOR.get(self.dtype, FLOOR_16_BIT)
        return max(floor, FACTOR * self.measured.get(engine, 0.0))

    def agrees(self, engine: str, difference: float) -> bool:
        """Returns whether an engine has the trainer's weights; the first difference is the scale.

        Raises:
            TrainingError: the first difference is more than rounding, as with another model.
        """
        if engine in self.measured:
            return difference <= self.allowed(engine)
        limit = LARGEST_AT_START.get(self.dtype, LARGEST_AT_START_16_BIT)
        if difference > limit:
            raise TrainingError(
                f"{engine} and the trainer differ by {difference:.3g} (mean difference of the "
                f"log-probabilities of the same tokens) with the same weights, in {self.dtype}; at "
                f"most {limit:g} is rounding. Another model, or engine arguments that change what "
                "it computes?"
            )
        self.measured[engine] = difference
        return True

    def metrics(
        self,
        differences: Callable[[list[list[float]]], dict[str, float]],
        send_again: Callable[[], None],
        step: int,
    ) -> dict[str, float]:
        """Compares all engines after an update; sends it once more if one disagrees.

        Args:
            differences: maps the trainer's log-probabilities to each engine's difference.

        Raises:
            TrainingError: an engine disagrees after the second update too.
        """
        begin = time.monotonic()
        trainer = self.trainer_logprobs()
        found = differences(trainer)
        if self._disagreeing(found):
            send_again()
            found = differences(trainer)
            if disagreeing := self._disagreeing(found):
                engine = max(disagreeing, key=found.__getitem__)
                raise TrainingError(
                    f"{engine} does not compute with the weights of step {step}: the "
                    "log-probabilities of the same tokens differ by "
                    f"{found[engine]:.3g} in the mean, at most {self.allowed(engine):.3g} is "
                    "rounding. It was sent them twice."
                )
        return {
            "weights/check_difference": max(found.values()),
            "weights/check_seconds": time.monotonic() - begin,
        }

    def _disagreeing(self, found: dict[str, float]) -> list[str]:
        # A list, not any(): `agrees` must store the first difference of every engine.
        return [engine for engine, d in found.items() if not self.agrees(engine, d)]


def make_weight_check(setup: EngineSetup) -> WeightCheck | None:
    """Returns the check on the ends of a run's first prompts; None if the recipe disables it."""
    model, autocast = setup.model, setup.workers.autocast
    if not setup.recipe.generation.vllm.check_weights:
        return None
    rows = fixed_rows(setup.prompts, placeholder_tokens(model.config))
    rollouts = []
    for row in rows:
        begin, scored = row.prompt.ids[: -row.num_tokens], row.prompt.ids[-row.num_tokens :]
        completion = Completion(scored, [0.0] * len(scored), "stop")
        rollouts.append(Rollout(dataclasses.replace(row.prompt, ids=begin), completion, ""))
    # Padded and unchunked, whichever mode the run uses for its own rollouts.
    policy_logprobs = PolicyLogprobs(model, packed=False, chunked=False, autocast=autocast)

    def trainer_logprobs() -> list[list[float]]:
        with inference(model):
            logprobs, _ = policy_logprobs(rollouts, 1.0)
        both = zip(logprobs.tolist(), rollouts, strict=True)
        return [row[: len(r.completion.ids)] for row, r in both]

    return WeightCheck(rows, trainer_logprobs, dtype_of(setup.recipe))
