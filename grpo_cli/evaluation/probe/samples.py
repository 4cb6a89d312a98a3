"""Samples completions of some prompts as training does, and scores them."""

from __future__ import annotations

import copy
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from transformers import PreTrainedTokenizerBase

from grpo_cli.algorithm.advantages import level_rewards
from grpo_cli.config.schedules import at_step
from grpo_cli.config.schema import Recipe
from grpo_cli.data import PromptStream
from grpo_cli.data.stored_completions import Sample
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.rollouter import Rollouter
from grpo_cli.environments.trl_rollouts import TrlRollouts
from grpo_cli.generation.base import Generator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.attention import UnsupportedModelError
from grpo_cli.models.loading import inference
from grpo_cli.models.memory import LARGEST, MicroBatchBudget
from grpo_cli.models.packing import length
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.random_streams import derive_seed, rng_state, set_rng_state
from grpo_cli.records import Group, Prompt, Rollout
from grpo_cli.scoring.calls import BoundReward
from grpo_cli.scoring.registry import TrainerState
from grpo_cli.scoring.scorer import RewardResult, Scorer, ScoringSession

STREAM = "probe"  # random stream of the probe; training's are numbered by prompt index
MOST_SAMPLES = 64  # completions per prompt, unless more are requested
COMPARED = 32  # completions whose log-probabilities the trainer recomputes


@dataclass(frozen=True)
class Size:
    """The number of prompts, and of completions of each."""

    prompts: int
    samples: int

    @classmethod
    def of(cls, recipe: Recipe, prompts: int, samples: int | None, least: int) -> Size:
        """Returns the size; `samples` defaults to the group size.

        Args:
            least: lower bound of that default.
        """
        group = at_step(recipe, 0)[0].generation.num_generations
        return cls(prompts, samples or max(least, min(group, MOST_SAMPLES)))


@dataclass(frozen=True)
class Policy:
    """The objects of a run that a probe samples and scores with."""

    recipe: Recipe
    workers: Workers
    tokenizer: PreTrainedTokenizerBase
    logprobs: PolicyLogprobs  # the probe's own, so that the run's state is not changed
    generator: Generator
    stream: PromptStream
    scorer: Scorer
    episodes: EpisodeLoop | TrlRollouts | None = None
    state: TrainerState = field(default_factory=TrainerState)


@dataclass(frozen=True)
class Scored:
    """The groups of a probe and the results of their rewards, gathered on every process."""

    groups: list[Group]
    results: dict[str, list[RewardResult]]  # by reward, in the order of the rollouts
    gaps: list[float]  # |trainer's - sampler's log-probability| of some sampled tokens
    rounding: float  # mean 16-bit rounding error of the trainer's log-probabilities, in nats
    sampling_seconds: float  # maximum over processes
    scoring_seconds: float  # after everything was sampled

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of all groups."""
        return [r for g in self.groups for r in g.rollouts]


class RecordingSession(ScoringSession):
    """A scoring session that keeps the result of each reward, with its seconds and its error."""

    def __init__(self, scorer: Scorer, state: TrainerState) -> None:
        super().__init__(scorer, state)
        self.kept: dict[str, list[RewardResult]] = {}

    def results(self, reward: BoundReward, samples: Sequence[Sample]) -> list[RewardResult]:
        """Computes a function's result for each sample, and keeps the results."""
        self.kept[reward.name] = super().results(reward, samples)
        return self.kept[reward.name]


def tolerant(scorer: Scorer) -> Scorer:
    """Returns a copy of a scorer that counts failures of reward functions instead of raising."""
    other = copy.copy(scorer)
    other.rewards = {
        name: dataclasses.replace(reward, on_error="count")
        for name, reward in scorer.rewards.items()
    }
    return other


def choose_prompts(recipe: Recipe, stream: PromptStream, number: int) -> list[tuple[int, Prompt]]:
    """Chooses training prompts at random; returns (position, prompt) pairs.

    Each prompt occurs once. With streaming these are the first prompts, the only ones read.
    """
    if recipe.dataset.streaming:
        positions = list(range(min(number, len(stream.prompts))))
    else:
        total = min(recipe.steps * recipe.prompts_per_step, len(stream.prompts))
        chosen = random.Random(derive_seed(recipe.seed, STREAM))
        positions = sorted(chosen.sample(range(total), min(number, total)))
    found: dict[int, tuple[int, Prompt]] = {}
    for position in positions:
        prompt = stream.prompt_at(position)
        found.setdefault(prompt.row, (position, prompt))
    return list(found.values())


def sample_and_score(
    policy: Policy,
    size: Size,
    progress: Callable[[int, str], None] = lambda done, text: None,
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Scored:
    """Samples and scores `size` completions; restores the state of every random stream.

    Args:
        progress: called with (number of prompts done, name of the phase).
        interruptible: entered around the interruptible parts.

    Raises:
        TrainingError: the engine, a sandbox or the event loop of a reward failed.
        Interrupted: the run has to end first.
    """
    random_numbers = rng_state()
    try:
        with heartbeat.inside("probe"):
            return _sample_and_score(policy, size, progress, interruptible)
    finally:
        policy.scorer.executor.forget()  # training must not reuse the probe's cached rewards
        set_rng_state(random_numbers)


def _sample_and_score(
    policy: Policy,
    size: Size,
    progress: Callable[[int, str], None],
    interruptible: Callable[[], AbstractContextManager[None]],
) -> Scored:
    workers = policy.workers
    recipe = at_step(policy.recipe, 0)[0]
    scorer = tolerant(policy.scorer)
    prompts = choose_prompts(recipe, policy.stream, size.prompts)
    own = prompts[workers.rank :: workers.size]
    session = RecordingSession(scorer, policy.state)
    done = 0

    def arrived(rollouts: list[Rollout]) -> None:
        nonlocal done
        done = min(done + workers.size, len(prompts))
        progress(done, "prompts completed")
        session.add(rollouts)

    # A copy, since training reads the waiting times of its own episodes.
    episodes = None if policy.episodes is None else dataclasses.replace(policy.episodes)
    rollouter = Rollouter(policy.generator, policy.tokenizer, episodes)
    # Episodes run in rounds that all processes join.
    in_rounds = workers.runs_in_lockstep and episodes is not None
    began = time.monotonic()
    with nullcontext() if in_rounds else interruptible():
        groups = rollouter.rollouts(
            own,
            size.samples,
            Sampling.of(recipe.generation),
            derive_seed(recipe.seed, STREAM),
            arrived,
        )
    sampled = time.monotonic()
    rollouts = [r for g in groups for r in g.rollouts]
    with interruptible(), workers.raise_together():
        session.finish(rollouts, policy.tokenizer)
        scored = time.monotonic()
    level_rewards(groups, {name: reward.weight for name, reward in recipe.reward.items()})
    for r in rollouts:
        r.excluded = recipe.loss.mask_truncated and r.completion.finish_reason == "length"
    gathered = workers.gather((groups, session.kept))
    every = sorted(chain.from_iterable(part[0] for part in gathered), key=_position)
    # Taken from one process, so that all reach the same verdict.
    gaps = workers.gather(sampler_gaps(policy, recipe, spread(every, COMPARED)))[0]
    return Scored(
        every,
        _in_order(gathered, every, [*scorer.rewards], size.samples),
        gaps,
        workers.max(policy.logprobs.rounding),
        workers.max(sampled - began),
        workers.max(scored - sampled),
    )


def _position(group: Group) -> int:
    return group.prompt_index


def _in_order(
    gathered: Sequence[tuple[list[Group], dict[str, list[RewardResult]]]],
    groups: Sequence[Group],
    names: Sequence[str],
    samples: int,
) -> dict[str, list[RewardResult]]:
    """Returns the results of all processes in the order of the groups."""
    found: dict[tuple[str, int], list[RewardResult]] = {}
    for own, kept in gathered:
        for name in names if own else ():
            for number, group in enumerate(own):
                part = kept[name][number * samples : (number + 1) * samples]
                found[name, group.prompt_index] = part
    return {n: [result for g in groups for result in found[n, g.prompt_index]] for n in names}


def spread(groups: Sequence[Group], number: int) -> list[Rollout]:
    """Returns rollouts spread over the groups: the first of each, then the second of each."""
    by_sample = zip(*(g.rollouts for g in groups), strict=True)
    return list(islice(chain.from_iterable(by_sample), number))


def sampler_gaps(policy: Policy, recipe: Recipe, rollouts: Sequence[Rollout]) -> list[float]:
    """Returns |trainer's - sampler's log-probability| of each sampled token of rollouts.

    Every process computes the same rollouts, so that sharded models run in lockstep.
    """
    reported = [r for r in rollouts if r.completion.ids]
    if not reported:
        return []
    logprobs, temperature = policy.logprobs, recipe.generation.temperature
    largest = LARGEST.get(policy.workers.device.type, LARGEST["cpu"])
    budget = MicroBatchBudget(
        recipe.update.tokens_per_micro_batch or largest,
        lambda text: None,
        runs_in_lockstep=policy.workers.runs_in_lockstep,
    )

    def compute(max_tokens: int) -> list[float]:
        gaps: list[float] = []
        for micro_batch in logprobs.micro_batches(reported, max_tokens):
            found = logprobs(micro_batch, temperature)[0].cpu()  # [B, C]
            for r, row in zip(micro_batch, found, strict=True):
                own = torch.tensor(r.completion.sampling_logprobs)  # [C]
                gap = (row[: len(own)] - own).abs()[r.completion.sampled_mask]
                gaps += gap[~gap.isnan()].tolist()
        return gaps

    lengths = [length(r) for r in reported]
    logprobs.check(reported, temperature)
    with inference(logprobs.model):
        while True:
            try:
                return budget.with_oom_retry(compute, lengths, lambda: None)
            except UnsupportedModelError as error:  # longer than the checked lengths
                logprobs.fall_back(str(error))
