"""Finds settings that are allowed but have less effect than expected."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import counted, listed

# bfloat16 has 8 bits of precision: a weight of 0.05 cannot change by less than 1e-4.
LOST_IN_BFLOAT16 = 1e-4


def notices(recipe: Recipe) -> Iterator[str]:
    """Yields a line about each such setting."""
    loss, g, optimizer = recipe.loss, recipe.generation, recipe.optimizer
    if recipe.steps > 1 and optimizer.warmup_steps >= recipe.steps:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps}: the warm-up is longer than the "
            f"run ({counted(recipe.steps, 'step')}), whose learning rate never reaches "
            f"{optimizer.learning_rate:g}."
        )
    late = [step for step in recipe.log.keep_steps if step > recipe.steps]
    if late:
        yield (
            f"log.keep_steps: the run has {counted(recipe.steps, 'step')}; there is no step "
            f"{', '.join(map(str, late))} to be kept."
        )
    dtype = recipe.model.dtype
    small = optimizer.learning_rate < LOST_IN_BFLOAT16
    if dtype != "float32" and small and recipe.adapter.method == "none":
        yield (
            f"model.dtype = {dtype}: updates with a learning rate of "
            f"{optimizer.learning_rate:g} are smaller than the weights' precision, and most are "
            "lost; use model.dtype=float32 with mixed_precision=bf16, or an adapter."
        )
    differs = []  # reasons for the sampler's probabilities to differ from the trainer's
    if g.top_p < 1 or g.top_k or g.min_p:
        differs.append(
            "with top_p, top_k or min_p the sampler renormalises over the tokens that it keeps, so "
            "that its probabilities are higher than the trainer's."
        )
    filters = ("top_p", "top_k", "min_p")
    if changed := [name for name in g.changed_by if name not in filters]:
        differs.append(
            f"with {listed(changed)} the sampler's distribution differs from the trainer's, "
            "softmax(logits / temperature)."
        )
    yield from loss.notices()
    is_scaled = recipe.advantage.rule == "group" and recipe.advantage.scale != "none"
    if loss.normalize == "constant" and is_scaled:
        yield "loss.normalize = constant is half of Dr. GRPO; advantage=centered is the other half."
    compared = {
        "loss.sampling_correction": loss.sampling_correction != "none",
        "loss.off_policy_mask": loss.off_policy_mask is not None,
    }
    for why in differs:
        yield from (f"{key}: {why}" for key, is_set in compared.items() if is_set)
    if g.vllm.prefetch_steps and loss.sampling_correction != "none":
        yield "loss.sampling_correction: is 1 for prefetched completions; use loss.off_policy_mask."
    in_loss = recipe.needs_reference and loss.kl_in == "loss"
    if in_loss and loss.kl_estimator == "k1" and not loss.kl_bias_correction:
        yield (
            "loss.kl_estimator = k1: in the loss its gradient is 0 on average; use k2 or k3, "
            "loss.kl_in=reward or loss.kl_bias_correction=true."
        )
