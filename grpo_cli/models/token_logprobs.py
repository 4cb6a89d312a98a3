"""Log-probabilities and entropies of tokens, at least in float32: from logits, or fused.

`token_logprobs` and `token_entropy` take complete logits. `linear_logprobs` computes the same
values from hidden states, with the logits of only one chunk of tokens in memory at a time. Its
forward keeps one log-sum-exp per token, and its backward recomputes the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel

from grpo_cli.models.families import LOGIT_DIVISOR, LOGIT_SCALES, LOGIT_SOFTCAPS
from grpo_cli.models.output_head import Float32Linear

CHUNK_BYTES = 64 * 2**20  # maximum size of a chunk's logits: 110 tokens with V = 151,936


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Computes log softmax(logits / temperature) at the targets.

    Args:
        logits: [B, C, V], where logits[:, c] predict targets[:, c]. targets: [B, C] token ids.

    Returns:
        [B, C] float32 (float64 for float64). Differentiable.
    """
    assert logits.shape[:-1] == targets.shape, f"{tuple(logits.shape)} {tuple(targets.shape)}"
    logits = upcast(logits) / temperature
    at_target = logits.gather(-1, targets[..., None]).squeeze(-1)  # [B, C]
    return at_target - logits.logsumexp(-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Computes the entropy of softmax(logits / temperature) in nats, [B, C, V] -> [B, C].

    Differentiable.
    """
    log_p = (upcast(logits) / temperature).log_softmax(-1)  # [B, C, V]
    # A logit of -inf has probability 0 and contributes 0; 0 · -inf would be NaN.
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def upcast(logits: Tensor) -> Tensor:
    """Casts logits to float32, except float64: half precision is too coarse for ratios."""
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True, eq=False)
class Head:
    """A causal LM's output layer: logits = softcap(scale · (hidden @ weight.T + bias)).

    The scale is inside the softcap, as in the only model of transformers with both (Muse Glimmer).
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    scale: float = 1.0
    softcap: float | None = None  # c in c · tanh(x / c)
    in_float32: bool = False  # dtype of the product; False: the weight's or autocast's dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """Reads the layer between the base model's last hidden states and the logits.

        Raises:
            TypeError: the layer does more than multiply by its weight. It is quantized, or has an
                untrained adapter, which the self-check would not detect.
        """
        layer = model.get_output_embeddings()
        in_float32 = type(layer) is Float32Linear
        if not in_float32 and getattr(type(layer), "forward", None) is not nn.Linear.forward:
            raise TypeError(f"the output layer is a {type(layer).__name__}, not an nn.Linear")
        config = model.config.get_text_config(decoder=True)
        scale, softcap = logit_scale(config), logit_softcap(config)
        return cls(layer.weight, layer.bias, scale, softcap, in_float32)


def logit_scale(config: PretrainedConfig) -> float:
    """Returns the factor of the output layer's product; 1.0 for most families."""
    scale = _first(config, LOGIT_SCALES) or 1.0
    divisor = _first(config, (LOGIT_DIVISOR,)) or 1.0
    return scale * divisor if config.model_type == "hyperclovax" else scale / divisor


def logit_softcap(config: PretrainedConfig) -> float | None:
    """Returns c if logits are c · tanh(x / c), and None if they are not capped."""
    return _first(config, LOGIT_SOFTCAPS)


def _first(config: PretrainedConfig, names: tuple[str, ...]) -> float | None:
    values = (getattr(config, name, None) for name in names)
    return next((float(value) for value in values if value is not None), None)


def linear_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Computes log softmax(logits / temperature) at the targets, and its entropy in nats.

    The logits are computed in the weight's dtype, or in autocast's if it is enabled, unless the
    head or the hidden states are float32. Everything else is at least float32.

    Args:
        hidden: [N, H], where hidden[n] predicts targets[n]. targets: [N] token ids.
        entropy: also return the entropies.
        entropy_gradient: make the entropies differentiable, which needs memory for a second chunk.
        chunk_bytes: maximum size of one chunk's logits; a chunk has at least one token.

    Returns:
        (logprobs [N], entropies [N] or None), float32 (float64 for float64). Differentiable once,
        with respect to the hidden states, the weight and the bias.
    """
    shapes = f"{tuple(hidden.shape)} {tuple(head.weight.shape)} {tuple(targets.shape)}"
    assert hidden.shape == (len(targets), head.weight.shape[1]), shapes
    assert targets.ndim == 1, shapes
    device = hidden.device.type
    dtype = head.weight.dtype
    if hidden.dtype == torch.float32 and dtype.itemsize == 2:  # within `self_check.in_float32`
        dtype = torch.float32
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # autocast skips float64
        dtype = torch.get_autocast_dtype(device)
    if head.in_float32 and dtype != torch.float64:
        dtype = torch.float32
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    room = max(1, chunk_bytes // (head.weight.shape[0] * wide.itemsize))
    plan = _Plan(
        dtype=dtype,
        wide=wide,
        rows=-(-len(hidden) // max(1, -(-len(hidden) // room))),  # chunks of nearly equal size
        slope=head.scale / (head.softcap or temperature),
        cap=None if head.softcap is None else head.softcap / temperature,
        entropy=entropy,
        entropy_gradient=entropy and entropy_gradient,
    )
    result: tuple[Tensor, Tensor | None] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, plan
    )
    return result


@dataclass(frozen=True)
class _Plan:
    dtype: torch.dtype  # dtype of the logits' matrix product
    wide: torch.dtype  # dtype of everything else
    rows: int  # number of tokens in a chunk
    slope: float  # scores = logits / temperature = slope · x for the layer's outputs x; with a cap
    cap: float | None  # scores = cap · tanh(slope · x)
    entropy: bool
    entropy_gradient: bool


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = torch.empty(len(hidden), dtype=plan.wide, device=hidden.device)  # [N]
        log_sums = torch.empty_like(logprobs)  # [N], the scores' log-sum-exp
        entropies = torch.empty_like(logprobs) if plan.entropy else None  # [N]
        for rows, scores in _chunks(hidden, weight, bias, plan):
            top = scores.amax(-1, keepdim=True)  # [n, 1]
            at_target = scores.gather(-1, targets[rows, None])  # [n, 1]
            odds = scores.sub_(top).exp_()  # [n, V], in place
            total = odds.sum(-1)  # [n]
            logprobs[rows] = (at_target - top).squeeze(-1) - total.log()
            log_sums[rows] = top.squeeze(-1) + total.log()
            if entropies is not None:
                # entr(x) = -x ln x, 0 at 0: −Σ p ln p with p = odds / total, without a second chunk
                torch.special.entr(odds, out=odds)
                entropies[rows] = odds.sum(-1) / total + total.log()
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if entropies is not None and not plan.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(
            hidden, weight, bias, targets, log_sums, entropies if plan.entropy_gradient else None
        )
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets, log_sums, entropies = ctx.saved_tensors
        plan: _Plan = ctx.plan
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sums)
        slope = plan.slope * (plan.cap or 1.0)  # d scores / d x at x = 0, for the layer's output x
        second = None  # [rows, V], if scores and probabilities are needed at the same time
        if plan.cap is not None or grad_entropies is not None:
            second = torch.empty(plan.rows, len(weight), dtype=plan.wide, device=hidden.device)

        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden, dtype=plan.dtype) if to_hidden else None  # [N, H]
        grad_weight = torch.zeros_like(weight, dtype=plan.wide) if to_weight else None  # [V, H]
        grad_bias = torch.zeros_like(bias, dtype=plan.wide) if to_bias else None  # [V]
        cast = weight.to(plan.dtype)
        for rows, scores in _chunks(hidden, weight, bias, plan):
            by_logprob = slope * grad_logprobs[rows, None]  # [n, 1]
            log_sum = log_sums[rows, None]  # [n, 1]
            # With respect to the scores s, whose softmax is p and whose entropy is H:
            #   ∂ logprob = 1[target] − p,   ∂ H = −p (ln p + H),   ln p = s − log_sum
            # and a softcap multiplies the gradient by 1 − (s / cap)².
            at_target = by_logprob
            if second is None:
                p = scores.sub_(log_sum).exp_()
            else:
                p = torch.sub(scores, log_sum, out=second[: len(scores)]).exp_()
            if plan.cap is not None:
                through = 1 - (scores.gather(-1, targets[rows, None]) / plan.cap).square()
                at_target = by_logprob * through
                p.addcmul_(p, scores, value=1 / plan.cap)  # p (1 + s / cap)
                p.addcmul_(p, scores, value=-1 / plan.cap)  # times (1 − s / cap)
            if grad_entropies is None:
                grad = p.mul_(-by_logprob)
            else:
                by_entropy = slope * grad_entropies[rows, None]  # [n, 1]
                surprise = scores.sub_(log_sum - entropies[rows, None])  # ln p + H
                surprise.clamp_(min=-1e4)  # only where p = 0, since 0 · -inf would be NaN
                grad = p.mul_(surprise.mul_(-by_entropy).sub_(by_logprob))
            grad.scatter_add_(-1, targets[rows, None], at_target)
            narrow = grad.to(plan.dtype)  # [n, V]
            with torch.autocast(hidden.device.type, enabled=False):
                if grad_hidden is not None:
                    torch.mm(narrow, cast, out=grad_hidden[rows])
                if grad_weight is not None:
                    _add_product(grad_weight, narrow, hidden[rows].to(plan.dtype))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows, their scores [n, V]); the next chunk overwrites the scores' buffer."""
    buffer = torch.empty(plan.rows, len(weight), dtype=plan.wide, device=hidden.device)
    across = weight.to(plan.dtype).t()  # [H, V]
    offset = None if bias is None else bias.to(plan.dtype)
    for start in range(0, len(hidden), max(1, plan.rows)):
        rows = slice(start, min(start + plan.rows, len(hidden)))
        inputs = hidden[rows].to(plan.dtype)  # [n, H]
        scores = buffer[: len(inputs)]
        with torch.autocast(hidden.device.type, enabled=False):
            if plan.dtype != plan.wide:
                # Round as the model's own layer does, then scale.
                scores.copy_(nn.functional.linear(inputs, across.t(), offset)).mul_(plan.slope)
            elif offset is None:
                torch.addmm(scores, inputs, across, beta=0, alpha=plan.slope, out=scores)
            else:
                torch.addmm(offset, inputs, across, beta=plan.slope, alpha=plan.slope, out=scores)
        if plan.cap is not None:
            scores.tanh_().mul_(plan.cap)
        yield rows, scores


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Adds grad.T [V, n] @ hidden [n, H] to total [V, H], without a second [V, H]."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), hidden)
        return
    block = max(1, grad.numel() // hidden.shape[1])  # vocabulary rows, so block x H is a chunk
    for start in range(0, len(total), block):
        total[start : start + block] += grad[:, start : start + block].t() @ hidden
