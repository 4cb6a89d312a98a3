"""Times the embedded engine on prompts of given lengths, for a plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli.generation.base import Request, ignore
from grpo_cli.generation.embedded.decode_batch import DecodeBatch
from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.direct_forward import DirectForward
from grpo_cli.generation.embedded.engine import Engine
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Prompt

MOST_STEPS = 8  # that are timed
ENOUGH = 0.5  # seconds after which no further step is timed


@torch.no_grad()
def decode_seconds(
    model: PreTrainedModel,
    prompts: int,
    prompt_tokens: int,
    num_generations: int,
    sampling: Sampling,
    *,
    context: int = 0,
    synchronize: Callable[[], object] = lambda: None,
) -> tuple[float, float]:
    """Returns the seconds of the pass over prompts, and of one step of decoding all their rows.

    Args:
        prompts: number of prompts of `prompt_tokens` random tokens each.
        context: tokens of each completion that are in its cache already.
        synchronize: waits for the device.
    """
    vocab = model.get_input_embeddings().num_embeddings
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (prompts, prompt_tokens), generator=draws).tolist()
    most = max(sampling.max_tokens, context + MOST_STEPS + 4)
    state = DecodingState(
        Request(
            [Prompt.from_ids(row) for row in ids],
            num_generations,
            replace(sampling, max_tokens=most, min_tokens=0, stop=()),
            list(range(prompts)),
        ),
        [],
        None,
        ignore,
    )
    engine, direct = Engine(model, prompts * num_generations), DirectForward.of(model)
    start = time.perf_counter()
    batches = engine._begin(state, list(range(prompts)), direct)
    synchronize()
    of_prompts = time.perf_counter() - start
    for batch in batches:
        lengthen(batch, context)
    seconds: list[float] = []
    while len(seconds) < MOST_STEPS and sum(seconds) < ENOUGH:
        start = time.perf_counter()
        engine._step(batches, direct)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return of_prompts, statistics.median(seconds)


def lengthen(batch: DecodeBatch, tokens: int) -> None:
    """Makes the rows of a batch as long as if `tokens` tokens had been decoded; keys are 0."""

    def fill(cache: Tensor, new: Tensor) -> None:
        new.zero_()

    if tokens:
        batch._move(batch.prompt_columns + tokens + MOST_STEPS + 2, fill)
        batch.length = tokens
