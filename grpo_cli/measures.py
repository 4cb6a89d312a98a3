"""What is logged of each policy loss besides its value; docs/metrics.md defines the names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from grpo_cli import losses
from grpo_cli.config import Loss
from grpo_cli.tally import Tally

Tensors = Mapping[str, Tensor]


def rows_that_train(mask: Tensor) -> Tensor:
    """1 for each row with a token that trains, [B, C] -> [B]."""
    return (mask.sum(-1) > 0).to(mask.dtype)


def measure_clipping(config: Loss, tensors: Tensors, tally: Tally) -> None:
    """clip_ratio/*: what the clip takes the gradient from, by tokens or, of one ratio, by rows."""
    in_log_space = config.policy == "gmpo"
    ratio = 1 + tensors["log_ratio"] if in_log_space else tensors["ratio"]
    flags = losses.clip_flags(ratio, tensors["advantages"], config.epsilon, config.epsilon_high)
    mask = tensors["mask"]
    rows = rows_that_train(mask)
    low, high = (flag.to(mask.dtype).expand_as(mask) for flag in flags)
    low_of, high_of = losses.sequence_mean(low, mask), losses.sequence_mean(high, mask)  # [B]
    if ratio.shape == mask.shape:
        tally.mean("clip_ratio/low_mean", low, mask)
        tally.mean("clip_ratio/high_mean", high, mask)
        tally.mean("clip_ratio/region_mean", low + high, mask)
    else:
        tally.mean("clip_ratio/low_mean", low_of, rows)
        tally.mean("clip_ratio/high_mean", high_of, rows)
        tally.mean("clip_ratio/region_mean", low_of + high_of, rows)
    tally.lowest("clip_ratio/low_min", low_of, rows)
    tally.highest("clip_ratio/high_max", high_of, rows)


def measure_cap(config: Loss, tensors: Tensors, tally: Tally) -> None:
    """cispo_clip_ratio: tokens with A > 0 whose weight the cap has cut."""
    cut = (tensors["ratio"] > config.ratio_cap) & (tensors["advantages"] > 0)
    mask = tensors["mask"]
    tally.mean("cispo_clip_ratio", cut.to(mask.dtype).expand_as(mask), mask)


def measure_phi(config: Loss, tensors: Tensors, tally: Tally) -> None:
    """vespo/phi_seq_mean: the mean of φ(w) over completions."""
    phi = losses.vespo_weight(
        tensors["log_ratio"],
        tensors["advantages"],
        tensors["mask"],
        tensors["log_correction"],
        (config.vespo_k_pos, config.vespo_k_neg),
        (config.vespo_lambda_pos, config.vespo_lambda_neg),
    )
    rows = rows_that_train(tensors["mask"])
    tally.mean("vespo/phi_seq_mean", losses.sequence_mean(phi, tensors["mask"]), rows)


def measure_selected(config: Loss, tensors: Tensors, tally: Tally) -> None:
    """cov_selected: share of tokens that were chosen by their covariance."""
    tally.mean("cov_selected", tensors["cov_selected"], tensors["mask"])


Measure = Callable[[Loss, Tensors, Tally], None]
MEASURES: dict[str, tuple[Measure, ...]] = {
    "clipped": (measure_clipping,),
    "gmpo": (measure_clipping,),
    "clip_cov": (measure_clipping, measure_selected),
    "kl_cov": (measure_selected,),
    "cispo": (measure_cap,),
    "vespo": (measure_phi,),
}
