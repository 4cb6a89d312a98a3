"""What a model says of rollouts: log-probabilities and entropies of their completion tokens.

By default each prompt is computed once for its completions, nothing is padded (`packing.py`), and
the logits are made and used up in chunks (`linear_logprobs.py`). Not every model can be computed
so. The first rollouts are therefore computed the plain way as well, rows padded and logits whole;
where the numbers differ, the next plainer way is taken, and the run says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli import attention, packing
from grpo_cli.budget import saved_bytes
from grpo_cli.linear_logprobs import Head, linear_logprobs
from grpo_cli.logprobs import token_entropy, token_logprobs
from grpo_cli.policy import inference
from grpo_cli.rollouts import Rollout, pad_right

CHECKED_ROLLOUTS = 4  # the first check computes so many, twice
# Largest and mean difference of log-probabilities, in nats, that is taken for arithmetic.
TOLERANCE = {torch.float64: (1e-6, 1e-7), torch.float32: (2e-3, 2e-4)}
TOLERANCE_OF_HALF = (0.5, 0.03)


@dataclass(frozen=True)
class Way:
    """How log-probabilities are computed."""

    packed: bool  # each prompt once and no padding; else rows padded to one width
    chunked: bool  # logits in chunks; else whole

    def __str__(self) -> str:
        rows = "each prompt once for its completions" if self.packed else "rows padded"
        return f"{rows}, logits {'in chunks' if self.chunked else 'whole'}"


PLAIN = Way(packed=False, chunked=False)


class Likelihood:
    """Scores rollouts under one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packed: bool = True,
        chunked: bool = True,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        say: Callable[[str], None] = print,
    ) -> None:
        """Changes what the model calls its attention, where it can be computed packed.

        Args:
            packed, chunked: whether to compute so where the model allows it.
            autocast: entered around every forward pass. say: is told of a plainer way.
        """
        self.model = model
        self.autocast = autocast
        self.say = say
        packed = packed and attention.install(model)
        self.ways = [
            Way(p, c)
            for p, c in ((True, True), (False, True), (True, False), (False, False))
            if (packed or not p) and (chunked or not c)
        ]
        self.checked = self.way == PLAIN

    @property
    def way(self) -> Way:
        """How it computes at present."""
        return self.ways[0]

    def micro_batches(
        self, rollouts: Sequence[Rollout], max_tokens: int
    ) -> Iterator[list[Rollout]]:
        """Rollouts split so that none holds more than `max_tokens` tokens, padding included."""
        split = packing.packed_micro_batches if self.way.packed else packing.padded_micro_batches
        return split(rollouts, max_tokens)

    def __call__(
        self,
        rollouts: Sequence[Rollout],
        temperature: float,
        *,
        entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of B rollouts' completion tokens, and entropies if asked for.

        Args:
            entropy_gradient: keep that of the entropies.

        Returns:
            (logprobs [B, C] with gradient, entropies [B, C] or None), in float32 at least; C is the
            longest completion, and what is behind a shorter one is 0.
        """
        assert self.checked, "the way has to be checked on some rollouts first"
        return self._by(self.way, rollouts, temperature, entropy, entropy_gradient)

    def check(self, rollouts: Sequence[Rollout], temperature: float) -> None:
        """Finds the first way whose numbers are those of the plain one. Does nothing later on."""
        if self.checked or not rollouts:
            return
        some = sample(rollouts)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with inference(self.model), self.autocast(), torch.random.fork_rng(devices):
            plain, _ = self._by(PLAIN, some, temperature)
            while self.way != PLAIN:
                why = self._objection(some, temperature, plain)
                if why is None:
                    break
                given_up = self.ways.pop(0)
                self.say(f"note: not {given_up} ({why}); instead {self.way}")
        self.checked = True

    def _objection(self, some: list[Rollout], temperature: float, plain: Tensor) -> str | None:
        """Why the present way will not do, or None."""
        try:
            found, _ = self._by(self.way, some, temperature)
            # Dropout in attention shows itself in training mode alone.
            self.model.train()
            self._by(self.way, some, temperature)
        except torch.OutOfMemoryError:
            raise
        except attention.UnsupportedModelError as error:
            return str(error)
        except Exception as error:  # a model's own code may do anything with what it is given
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            self.model.eval()
        return close(some, plain, self.model, found)

    def _by(
        self,
        way: Way,
        rollouts: Sequence[Rollout],
        temperature: float,
        entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        device = self.model.device
        inputs = (packing.pack if way.packed else packing.pad)(rollouts, device)
        with self.autocast():
            if way.chunked:
                found = self._chunked(inputs, temperature, entropy, entropy_gradient)
            else:
                found = self._whole(inputs, temperature, entropy, entropy_gradient)
        lengths = torch.tensor([[len(r.completion.ids)] for r in rollouts], device=device)
        there = torch.arange(int(lengths.max()), device=device) < lengths  # [B, C]

        def rows(flat: Tensor | None) -> Tensor | None:
            return None if flat is None else flat.new_zeros(there.shape).masked_scatter(there, flat)

        logprobs = rows(found[0])
        assert logprobs is not None
        return logprobs, rows(found[1])

    def _chunked(
        self, inputs: packing.Inputs, temperature: float, entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.model.base_model(**arguments(inputs)).last_hidden_state.flatten(0, 1)
        return linear_logprobs(
            hidden[inputs.predictors],  # [T, H]
            Head.of(self.model),
            inputs.targets,
            temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )

    def _whole(
        self, inputs: packing.Inputs, temperature: float, entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        predictors = inputs.predictors
        if inputs.layout is not None:
            keep = {"logits_to_keep": predictors}
            logits = self.model(**arguments(inputs), **keep).logits[0]  # [T, V]
        else:
            width = inputs.input_ids.shape[1]
            row, column = predictors // width, predictors % width
            first = int(column.min())
            kept = self.model(**arguments(inputs), logits_to_keep=width - first).logits
            logits = kept[row, column - first]  # [T, V]
        logprobs = token_logprobs(logits, inputs.targets, temperature)
        if not entropy:
            return logprobs, None
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            return logprobs, token_entropy(logits, temperature)


def arguments(inputs: packing.Inputs) -> dict[str, Any]:
    """What a model's forward is called with."""
    shared: dict[str, Any] = {
        "input_ids": inputs.input_ids,
        "position_ids": inputs.position_ids,
        "use_cache": False,
    }
    if inputs.layout is None:
        return shared | {"attention_mask": inputs.attention_mask}
    mask = attention.no_mask(inputs.input_ids.device)
    return shared | {"attention_mask": mask, "attending": inputs.layout}


def sample(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """A few rollouts, of two prompts if there are two, the shorter ones of at least two tokens."""
    groups = packing.by_prompt(rollouts)
    each = -(-CHECKED_ROLLOUTS // min(2, len(groups)))
    found = []
    for members in groups[:2]:
        candidates = sorted((rollouts[m] for m in members), key=lambda r: len(r.completion.ids))
        longer = [r for r in candidates if len(r.completion.ids) > 1] or candidates
        found += longer[:each]
    return found


def bytes_per_token(
    likelihood: Likelihood, rollouts: Sequence[Rollout], temperature: float
) -> float:
    """Bytes that a forward pass keeps for its backward, for each token that it computes."""
    some = sample(rollouts)
    with saved_bytes(likelihood.model) as kept, torch.enable_grad():
        logprobs, _ = likelihood(some, temperature)
    packed = likelihood.way.packed
    tokens = packing.unique_tokens(some)[0] if packed else sum(map(packing.length, some))
    del logprobs
    return kept() / tokens


def close(
    rollouts: Sequence[Rollout],
    plain: Tensor,
    model: PreTrainedModel,
    found: Tensor | None = None,
) -> str | None:
    """Why log-probabilities cannot be those of the plain way but for arithmetic, or None.

    Args:
        plain: [B, C]. found: the same; None: what the rollouts were sampled with.
    """
    lengths = [len(r.completion.ids) for r in rollouts]
    if found is None:
        sampled = [torch.tensor(r.completion.logprobs) for r in rollouts]
        found = pad_right(sampled, max(lengths)).to(plain.device)
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [B, C]
    difference = (found - plain).abs()[there.to(plain.device)].double()
    largest, mean = difference.max().item(), difference.mean().item()
    device = model.device.type
    half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else model.dtype
    highest, highest_mean = TOLERANCE.get(dtype, TOLERANCE_OF_HALF)
    if largest <= highest and mean <= highest_mean:
        return None
    return f"log-probabilities differ by {mean:.1e} on average, {largest:.1e} at most"
