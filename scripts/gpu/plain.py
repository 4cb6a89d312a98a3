"""Does the same work with transformers alone, as TRL does: padded rows, complete logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from grpo_cli.records import Rollout


def generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    """Samples `tokens` tokens for each of B prompts of one length, [B, prompt + tokens].

    `model.generate` is called as TRL does: each prompt as often as it has completions.
    """
    ids = torch.tensor(prompts, device=model.device)  # [B, prompt]
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
    )
    with torch.no_grad():
        found: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
    return found


def backward(model: PreTrainedModel, rollouts: Sequence[Rollout], max_tokens: int) -> None:
    """Adds up the gradient of -advantage · logprob of every completion token, over micro-batches.

    All rows have the width of the longest, as TRL pads a batch.

    Args:
        max_tokens: of a micro-batch, padding included; it has at least one row.
    """
    widest_prompt = max(len(r.prompt.ids) for r in rollouts)
    widest = max(len(r.completion.ids) for r in rollouts)
    total = sum(len(r.completion.ids) for r in rollouts)
    rows = max(1, max_tokens // (widest_prompt + widest))
    for start in range(0, len(rollouts), rows):
        some = rollouts[start : start + rows]
        padded = [
            [0] * (widest_prompt - len(r.prompt.ids)) + r.prompt.ids + r.completion.ids
            + [0] * (widest - len(r.completion.ids))
            for r in some
        ]  # fmt: skip
        real = [
            [0] * (widest_prompt - len(r.prompt.ids))
            + [1] * (len(r.prompt.ids) + len(r.completion.ids))
            + [0] * (widest - len(r.completion.ids))
            for r in some
        ]
        ids = torch.tensor(padded, device=model.device)  # [B, P + C]
        mask = torch.tensor(real, device=model.device)
        advantages = torch.tensor([[r.advantage] for r in some], device=model.device)
        logits = model(ids, attention_mask=mask, logits_to_keep=widest + 1).logits
        logits = logits[:, :-1].float()  # [B, C, V]
        at_target = logits.gather(-1, ids[:, -widest:, None]).squeeze(-1)
        logprobs = at_target - logits.logsumexp(-1)  # [B, C]
        loss = -(logprobs * advantages * mask[:, -widest:]).sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
