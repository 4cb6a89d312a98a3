"""Passes over rollouts without gradient: log-probabilities, and the selection of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_cli.algorithm import token_selection
from grpo_cli.algorithm.load_balancing import ExpertLoad
from grpo_cli.algorithm.losses import loss_function
from grpo_cli.algorithm.variants import knob_values, traits_of
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.families import num_experts
from grpo_cli.models.policy import Policy
from grpo_cli.models.policy_logprobs import PolicyLogprobs, inference
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import R, Rollout, TrainingSample, WeightedSample
from grpo_cli.training.run import Run

STREAM = -2  # random stream of Clip-Cov's noise, distinct from those of sampling


class TokenStats(NamedTuple):
    """The log-probabilities of a rollout's completion tokens under a model."""

    logprobs: Tensor  # [C]
    entropies: Tensor | None  # [C]


def token_stats(
    policy: Policy,
    policy_logprobs: PolicyLogprobs,
    rollouts: Sequence[Rollout],
    temperature: float,
    *,
    entropy: bool = False,
) -> list[TokenStats]:
    """Returns log-probabilities, and entropies if asked for, of each rollout, without gradient.

    Args:
        policy_logprobs: computes them, with the weights of the policy or of its reference.
    """
    if not rollouts and policy.workers.size == 1:  # several processes are interrupted together
        return []

    def compute(micro_batch: list[Rollout]) -> list[TokenStats]:
        logprobs, entropies = policy_logprobs(micro_batch, temperature, entropy=entropy)
        logprobs = logprobs.cpu()  # once a micro-batch: each copy makes the host wait
        entropies = None if entropies is None else entropies.cpu()
        lengths = [len(r.completion.ids) for r in micro_batch]
        return [
            TokenStats(logprobs[i, :n], None if entropies is None else entropies[i, :n])
            for i, n in enumerate(lengths)
        ]

    policy.micro_batches.calibrate(rollouts, temperature)
    with inference(policy_logprobs.model):
        return policy.micro_batches.map_each(compute, rollouts, policy_logprobs)


def with_old_logprobs(run: Run, rollouts: Sequence[R], needs: Callable[[Any], object]) -> list[R]:
    """Returns rollouts, those that need them with old log-probabilities.

    They are the current policy's, except that leftover and prefetched rollouts keep the ones of the
    policy that sampled them.
    """
    fresh = [r for r in rollouts if r.old_logprobs is None and needs(r)]
    if samples_as_trained(run):
        found = iter([torch.tensor(r.completion.sampling_logprobs) for r in fresh])
    else:
        temperature = run.recipe.generation.temperature
        stats = token_stats(run.policy, run.policy.logprobs, fresh, temperature)
        found = iter([s.logprobs for s in stats])
    return [
        replace(r, old_logprobs=next(found)) if r.old_logprobs is None and needs(r) else r
        for r in rollouts
    ]


def samples_as_trained(run: Run) -> bool:
    """Returns whether the sampler's log-probabilities are the policy's own, except for rounding."""
    recipe = run.recipe
    return (
        run.generator.samples_from_policy
        and recipe.rollout is None  # a function of the user's may sample from another distribution
        and Sampling.of(recipe.generation).is_unfiltered
        and recipe.mixed_precision == "no"
        and run.policy.model.dtype in (torch.float32, torch.float64)
        and recipe.loss.sampling_correction == "none"  # it measures how much the two differ
        and recipe.loss.off_policy_mask is None
    )


def with_ref_logprobs(
    policy: Policy,
    samples: Sequence[TrainingSample],
    needs: Callable[[Any], object],
    temperature: float,
) -> list[TrainingSample]:
    """Returns samples, those that need them with the reference policy's log-probabilities."""
    assert policy.reference is not None
    asked = [s for s in samples if needs(s)]
    found = iter(token_stats(policy, policy.reference.logprobs, asked, temperature))
    return [replace(s, ref_logprobs=next(found).logprobs) if needs(s) else s for s in samples]


def select_tokens(
    run: Run, samples: Sequence[WeightedSample], number: int, tokens: float
) -> tuple[list[WeightedSample], float]:
    """Selects tokens of an optimizer batch by entropy or covariance, over all processes.

    The selection uses the policy as it is before this optimizer step, so that it depends neither on
    micro-batches nor on the number of processes. It costs one forward pass over the batch.

    Args:
        samples: this process's samples of the optimizer batch.
        number: number of the optimizer step in the run.
        tokens: loss tokens of the optimizer batch.

    Returns:
        The samples with their selections, and the number of tokens that the policy term trains.
    """
    config, selected = run.recipe.loss, [*samples]
    by_entropy = config.top_entropy < 1
    temperature = run.recipe.generation.temperature
    found = token_stats(run.policy, run.policy.logprobs, samples, temperature, entropy=by_entropy)
    masks = [s.completion.sampled_mask for s in samples]  # tokens to select from
    if by_entropy:
        entropies = [
            s.entropies[m] for s, m in zip(found, masks, strict=True) if s.entropies is not None
        ]
        every, mine = run.workers.concatenate(flat(entropies))
        chosen = every >= token_selection.entropy_threshold(every, config.top_entropy)
        kept = at_places(masks, chosen[mine].float())
        selected = [replace(s, high_entropy=k) for s, k in zip(selected, kept, strict=True)]
        tokens = run.workers.sum({"tokens": chosen[mine].double().sum().item()})["tokens"]
    select = traits_of(loss_function(config)).select_tokens
    if select is not None:

        def everyones(rows: Sequence[Tensor]) -> tuple[Tensor, slice]:
            return run.workers.concatenate(flat([v[m] for v, m in zip(rows, masks, strict=True)]))

        logprobs, mine = everyones([s.logprobs for s in found])
        advantages, _ = everyones([s.advantages for s in samples])
        cov = token_selection.covariance(logprobs.double(), advantages.double())
        seeds = [derive_seed(run.recipe.seed, STREAM, number, *s.place) for s in samples]
        noise, _ = everyones([uniform(seed, len(m)) for seed, m in zip(seeds, masks, strict=True)])
        chosen = select(cov, noise, **knob_values(select, config))
        kept = at_places(masks, chosen[mine].float())
        selected = [replace(s, cov_selected=k) for s, k in zip(selected, kept, strict=True)]
    return selected, tokens


def load_of_experts(policy: Policy, rollouts: Sequence[Rollout], temperature: float) -> ExpertLoad:
    """Counts the tokens of each expert in an optimizer batch, over all processes.

    The count does not depend on micro-batches or on the number of processes. It costs one forward
    pass over the batch.
    """
    experts = num_experts(policy.model.config.get_text_config(decoder=True))
    assert experts is not None, "checked when the run was built"

    def count(micro_batch: list[Rollout]) -> list[float]:
        policy.logprobs(micro_batch, temperature)
        routing = policy.logprobs.routing
        assert routing is not None, "the policy's routers are recorded"
        return [*routing.assigned.tolist(), routing.tokens.item()]

    with inference(policy.model):
        counts = policy.micro_batches.map(count, rollouts, policy.logprobs)
    columns = zip(*counts, strict=True) if counts else [[]] * (experts + 1)
    sums = policy.workers.sum({str(i): math.fsum(column) for i, column in enumerate(columns)})
    *assigned, tokens = sums.values()
    return ExpertLoad(assigned, tokens)


def flat(rows: Sequence[Tensor]) -> Tensor:
    """Concatenates rows, [N]; no rows give an empty tensor."""
    return torch.cat(list(rows)) if rows else torch.zeros(0)


def at_places(masks: Sequence[Tensor], values: Tensor) -> list[Tensor]:
    """Scatters values [N] to the ones of masks [C], which have N ones in all; the rest is 0."""
    parts = torch.split(values, [int(m.sum()) for m in masks])
    empty = [values.new_zeros(len(m)) for m in masks]
    return [e.masked_scatter(m, p) for e, m, p in zip(empty, masks, parts, strict=True)]


def uniform(seed: int, number: int) -> Tensor:
    """Returns `number` draws in [0, 1), [number]."""
    return torch.rand(number, generator=torch.Generator().manual_seed(seed))
