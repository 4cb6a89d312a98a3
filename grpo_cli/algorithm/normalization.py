"""Normalises token losses by counts of the optimizer batch.

The counts cover the complete optimizer batch on all processes, and are taken before the first
backward. The loss is then one sum, independent of its division into micro-batches and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def token_weight(
    normalize: str,
    tokens: int,
    group_tokens: int,
    counts: Mapping[str, float],
    max_completion_tokens: int,
) -> float:
    """Returns the factor of each token's loss in one completion.

    Args:
        normalize: a name in WEIGHTS.
        tokens: number of the completion's tokens that train, > 0.
        group_tokens: number of tokens that train in its group's completions in the batch.
        counts: "tokens" that train, "completions" and "prompts" of the optimizer batch. Completions
            without tokens that train also count, since they are among the paper's G.
        max_completion_tokens: the run's longest completion, for "constant".
    """
    return WEIGHTS[normalize](tokens, group_tokens, counts, max_completion_tokens)


Weight = Callable[[int, int, Mapping[str, float], int], float]

WEIGHTS: dict[str, Weight] = {
    # equal weight per token (DAPO, arXiv 2503.14476, eq. 8)
    "tokens": lambda tokens, group, counts, longest: 1 / counts["tokens"],
    # equal weight per completion: mean over its tokens (DeepSeekMath, arXiv 2402.03300, eq. 3)
    "completions": lambda tokens, group, counts, longest: 1 / (tokens * counts["completions"]),
    # equal weight per prompt: mean over its group's tokens (ScaleRL, arXiv 2510.13786)
    "prompts": lambda tokens, group, counts, longest: 1 / (group * counts["prompts"]),
    # constant divisor, independent of length (Dr. GRPO, arXiv 2503.20783, section 3.1)
    "constant": lambda tokens, group, counts, longest: 1 / (longest * counts["completions"]),
    # sum over a completion, proportional to its length (LUSPO, arXiv 2602.05261)
    "sums": lambda tokens, group, counts, longest: 1 / counts["completions"],
}
