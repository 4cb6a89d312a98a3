"""Passes over rollouts without gradient: log-probabilities, and which tokens are treated apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_cli import selection
from grpo_cli.config import Loss, Recipe
from grpo_cli.likelihood import Likelihood
from grpo_cli.policy import inference
from grpo_cli.rollouts import Group, Rollout, derive_seed
from grpo_cli.run import Run

STREAM = -2  # of the noise that Clip-Cov chooses by, apart from those of sampling


@dataclass(frozen=True)
class Surveyed:
    """What a model says of a rollout's completion tokens."""

    rollout: Rollout
    logprobs: Tensor  # [C]
    entropies: Tensor | None  # [C]


def logprobs_of(
    run: Run,
    recipe: Recipe,
    likelihood: Likelihood,
    rollouts: Sequence[Rollout],
    *,
    entropy: bool = False,
) -> list[Surveyed]:
    """Log-probabilities, and entropies if asked for, without gradient; in no order."""
    out: list[Surveyed] = []
    if not rollouts and run.workers.size == 1:  # of several all come: they leave together
        return out

    def attempt(max_tokens: int) -> None:
        for micro in run.micro_batches(likelihood, rollouts, max_tokens):
            logprobs, entropies = likelihood(micro, recipe.generation.temperature, entropy=entropy)
            logprobs = logprobs.cpu()  # once a micro-batch: each copy makes the host wait
            entropies = None if entropies is None else entropies.cpu()
            for i, r in enumerate(micro):
                own = (i, slice(len(r.completion.ids)))
                out.append(
                    Surveyed(r, logprobs[own], None if entropies is None else entropies[own])
                )

    run.get_ready(recipe, rollouts)
    with inference(likelihood.model):
        run.fitted(likelihood, attempt, rollouts, out.clear)
    return [seen for seen in out if seen.rollout is not run.filler]


def fill_old_logprobs(run: Run, recipe: Recipe, rollouts: Sequence[Rollout]) -> None:
    """Of the policy as it is, for rollouts without: carried ones keep those of their own policy."""
    late = [r for r in rollouts if r.old_logprobs is None]
    if run.sampled_as_trained(recipe):
        for r in late:
            r.old_logprobs = torch.tensor(r.completion.logprobs)
        return
    for seen in logprobs_of(run, recipe, run.likelihood, late):
        seen.rollout.old_logprobs = seen.logprobs


def fill_ref_logprobs(run: Run, recipe: Recipe, rollouts: Sequence[Rollout]) -> None:
    """Of the reference policy."""
    assert run.reference_likelihood is not None
    for seen in logprobs_of(run, recipe, run.reference_likelihood, rollouts):
        seen.rollout.ref_logprobs = seen.logprobs


def is_needed(config: Loss) -> bool:
    """Whether the loss treats tokens apart by what the policy says of the whole batch."""
    return config.top_entropy < 1 or config.policy in ("clip_cov", "kl_cov")


def select_tokens(run: Run, recipe: Recipe, groups: Sequence[Group], number: int) -> None:
    """Finds the tokens of an optimizer batch that are treated apart, over all processes.

    They are chosen by what the policy says of them now, before this optimizer step, so that neither
    micro-batches nor processes have a say in it. Costs one forward pass over the batch.

    Args:
        groups: this process's groups of the optimizer batch. number: of the optimizer step.
    """
    config = recipe.loss
    places = {id(r): (g.position, j) for g in groups for j, r in enumerate(g.rollouts)}
    rollouts = [r for g in groups for r in g.rollouts if r.loss_tokens]
    found = logprobs_of(run, recipe, run.likelihood, rollouts, entropy=config.top_entropy < 1)
    lengths = [len(seen.logprobs) for seen in found]
    if config.top_entropy < 1:
        own = flat([seen.entropies for seen in found if seen.entropies is not None])
        every, mine = run.workers.concatenate(own)
        chosen = every >= selection.entropy_threshold(every, config.top_entropy)
        for seen, tokens in zip(found, torch.split(chosen[mine].float(), lengths), strict=True):
            seen.rollout.high_entropy = tokens
    if config.policy in ("clip_cov", "kl_cov"):
        logprobs, mine = run.workers.concatenate(flat([s.logprobs for s in found]).double())
        advantages, _ = run.workers.concatenate(
            flat([s.rollout.advantages for s in found]).double()
        )
        cov = selection.covariance(logprobs, advantages)
        paths = [(recipe.seed, STREAM, number, *places[id(s.rollout)]) for s in found]
        draws = [uniform(derive_seed(*p), n) for p, n in zip(paths, lengths, strict=True)]
        noise, _ = run.workers.concatenate(flat(draws))
        if config.policy == "kl_cov":
            chosen = selection.top_share(cov, noise, config.cov_share)
        else:
            low, high = config.cov_low, config.cov_high
            chosen = selection.clip_cov(cov, noise, config.cov_share, low, high)
        for seen, tokens in zip(found, torch.split(chosen[mine].float(), lengths), strict=True):
            seen.rollout.cov_selected = tokens


def flat(rows: Sequence[Tensor]) -> Tensor:
    """Rows one after another, [N]; of nothing, an empty tensor."""
    return torch.cat(list(rows)) if rows else torch.zeros(0)


def uniform(seed: int, number: int) -> Tensor:
    """`number` draws in [0, 1), [number]."""
    return torch.rand(number, generator=torch.Generator().manual_seed(seed))
