"""Declares the knobs of the loss and of advantages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import above_0, at_least_0, knob, plain

CORRECTIONS = (  # level of the ratio, and what its bounds do
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_mean_truncate",
    "sequence_mean_mask",
)


@dataclass
class Loss:
    """The objective: policy, KL and entropy terms. docs/algorithm.md has the formulas."""

    policy: str = plain(
        "clipped",
        "Policy term: a function of algorithm/losses.py, or your own as my_module:my_loss.",
    )
    args: dict[str, Any] = plain(
        {}, "Arguments that only this policy loss has, such as ratio_cap of cispo."
    )
    ratio_level: str = knob(
        "token",
        "Importance ratio: per token, per completion (sequence, GSPO), or per completion with "
        "each token's own gradient (sequence_token, GSPO-token).",
        choices=("token", "sequence", "sequence_token"),
    )
    normalize: str = knob(
        "tokens",
        "Average over all tokens of the batch, over completion means, or over prompt means; "
        "or the sum of each completion, divided by max_completion_tokens (constant) or "
        "undivided (sums).",
        choices=("tokens", "completions", "prompts", "constant", "sums"),
    )
    epsilon: float = at_least_0(
        0.2,
        "Lower clip distance: the ratio is clipped below at 1 - epsilon (gmpo: its logarithm "
        "at -epsilon).",
        le=1,
        hint="For the upper bound: loss.epsilon_high.",
    )
    epsilon_high: float | None = at_least_0(
        None,
        "Upper clip distance: the ratio is clipped above at 1 + epsilon_high; null: epsilon.",
    )
    mask_truncated: bool = knob(
        False,
        "Exclude completions that reached the length limit from the loss; their rewards still "
        "count.",
    )
    beta: float = at_least_0(0.0, "Weight of the KL to the reference policy; 0 loads no reference.")
    kl_estimator: str = knob(
        "k3",
        "Estimator of the KL on sampled tokens.",
        choices=("k1", "k2", "k3"),
        read_if=("loss.beta",),
    )
    kl_in: str = knob(
        "loss",
        "Place of the KL: a term of the loss, or subtracted from the reward as a sum over tokens.",
        choices=("loss", "reward"),
        read_if=("loss.beta",),
    )
    kl_bias_correction: bool = knob(
        False, "Multiply the KL by the importance ratio (DeepSeek-V3.2).", read_if=("loss.beta",)
    )
    kl_target: float | None = above_0(
        None,
        "Mean KL per token that beta is adapted to; null: beta is fixed.",
        read_if=("loss.beta",),
    )
    reference_every: int = at_least_0(
        0,
        "Refresh the reference from the policy every N steps (iterative GRPO); 0: never.",
        read_if=("loss.beta",),
    )
    reference_alpha: float = above_0(
        1.0,
        "Share of the policy in a refreshed reference; 1 replaces the reference.",
        le=1,
        read_if=("loss.reference_every",),
    )
    entropy_coef: float = at_least_0(
        0.0,
        "Weight of the entropy bonus; its initial value if entropy_target is set.",
    )
    entropy_target: float | None = above_0(
        None,
        "Entropy, in nats per token, below which the entropy bonus acts; entropy_coef is "
        "adapted to hold it.",
    )
    router_aux_loss_coef: float | None = at_least_0(
        None,
        "Weight of the load-balancing loss of a mixture of experts; null: the weight in the "
        "model's own config.",
    )
    top_entropy: float = above_0(
        1.0,
        "Share of the batch's tokens that the policy term trains on: the ones with the highest "
        "entropy.",
        le=1,
    )
    sampling_correction: str = knob(
        "none",
        "Weight the policy term by the trainer's probability over the sampler's, per token, "
        "per completion or by its mean over the length; bounded (truncate) or set to 0 "
        "outside the bounds (mask).",
        choices=("none", *CORRECTIONS),
    )
    sampling_cap: float | None = above_0(
        3.0,
        "Upper bound of the ratio of sampling_correction; null: none.",
        read_if=("loss.sampling_correction",),
    )
    sampling_floor: float | None = at_least_0(
        None,
        "Lower bound of the ratio of sampling_correction; null: none.",
        read_if=("loss.sampling_correction",),
    )
    off_policy_mask: float | None = at_least_0(
        None,
        "Exclude the tokens with negative advantage of completions whose mean log-probability "
        "has fallen by more than this since sampling (DeepSeek-V3.2); null: keep them.",
    )

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        if self.kl_bias_correction and self.kl_in == "reward":
            yield "loss.kl_bias_correction: is only read with loss.kl_in = loss; it is reward."
        floor, cap = self.sampling_floor, self.sampling_cap
        if floor is not None and cap is not None and floor > cap:
            yield f"loss.sampling_floor = {floor:g}: must be <= loss.sampling_cap = {cap:g}."
        if self.entropy_target is not None and self.entropy_coef > 1:
            yield (
                f"loss.entropy_coef = {self.entropy_coef}: must be <= 1, since loss.entropy_target "
                "moves it between 0 and 1."
            )

    def notices(self) -> Iterator[str]:
        """Yields notices about values that are allowed but have another effect than expected."""
        if self.ratio_level == "sequence" and self.normalize in ("tokens", "constant"):
            yield (
                f"loss.ratio_level = sequence with loss.normalize = {self.normalize}: completions "
                "count by their length; GSPO counts them alike (loss.normalize=completions)."
            )
        if self.ratio_level == "token" and self.normalize == "sums":
            yield (
                "loss.normalize = sums with loss.ratio_level = token: LUSPO sums with one ratio a "
                "completion (loss.ratio_level=sequence)."
            )


@dataclass
class Advantage:
    """Rewards to advantages."""

    rule: str = plain(
        "group", "Rule: a function of algorithm/advantages.py, or your own as my_module:my_rule."
    )
    args: dict[str, Any] = plain({}, "Arguments that only this rule has, such as k of pass_at_k.")
    scale: str = knob(
        "group",
        "Divide by the standard deviation of the group, of the complete step (batch), or not "
        "at all (none).",
        choices=("group", "batch", "none"),
    )
