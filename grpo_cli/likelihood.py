"""What a model says of rollouts: log-probabilities and entropies of their completion tokens.

By default each prompt is computed once for its completions, nothing is padded (`packing.py`), and
the logits are made and used up in chunks (`linear_logprobs.py`). Not every model can be computed
so. The first rollouts are therefore computed the plain way as well, rows padded and logits whole;
where the numbers differ, the next plainer way is taken, and the run says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli import attention, packing, sharding
from grpo_cli.budget import is_out_of_memory, saved_bytes
from grpo_cli.linear_logprobs import Head, linear_logprobs
from grpo_cli.logprobs import token_entropy, token_logprobs
from grpo_cli.policy import inference
from grpo_cli.rollouts import Completion, Rollout
from grpo_cli.weights import whole

CHECKED_ROLLOUTS = 4  # what is computed the plain way too, cut to so many tokens
CHECKED_TOKENS = 64  # of a prompt, and of a completion
# Largest and mean difference of log-probabilities, in nats, that is taken for arithmetic, and the
# relative difference of a gradient.
TOLERANCE = {torch.float64: (1e-6, 1e-7, 1e-5), torch.float32: (2e-3, 2e-4, 1e-2)}
TOLERANCE_OF_HALF = (0.5, 0.03, 0.3)


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
        agree: Callable[[str | None], str | None] = lambda objection: objection,
    ) -> None:
        """Changes what the model calls its attention, where it can be computed packed.

        Args:
            packed, chunked: whether to compute so where the model allows it.
            autocast: entered around every forward pass. say: is told of a plainer way.
            agree: makes one objection of those of several processes that have to go the same way.
        """
        self.model = model
        self.autocast = autocast
        self.say = say
        self.agree = agree
        if packed and not attention.install(model):
            packed = False
            say(f"note: rows are padded: the model's attention is {attention.name_of(model)}")
        self.ways = [
            Way(p, c)
            for p, c in ((True, True), (False, True), (True, False), (False, False))
            if (packed or not p) and (chunked or not c)
        ]
        self.checked = self.ways[0] == PLAIN

    @property
    def way(self) -> Way:
        """How it computes at present: plainly, until another way has been checked."""
        return self.ways[0] if self.checked else PLAIN

    def tokens(self, rollouts: Sequence[Rollout]) -> int:
        """Tokens that are computed for rollouts, in one micro-batch; padding aside."""
        if self.way.packed:
            return packing.unique_tokens(rollouts)[0]
        return sum(map(packing.length, rollouts))

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
        return self._by(self.way, rollouts, temperature, entropy, entropy_gradient)

    def check(self, rollouts: Sequence[Rollout], temperature: float) -> None:
        """Finds the first way whose numbers are those of the plain one, in value and gradient.

        Does nothing once that is known, and as long as the rollouts are too few to tell.
        """
        some = cut(rollouts)
        if self.checked or len(some) < 2 or max(len(r.completion.ids) for r in some) < 2:
            return
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with inference(self.model), self.autocast(), torch.random.fork_rng(devices):
            plain = self._with_gradient(PLAIN, some, temperature)
            while self.ways[0] != PLAIN:
                why = self.agree(self._objection(some, temperature, plain))
                if why is None:
                    break
                self.give_up(why)
        self.checked = True

    def begin_with(self, way: str) -> None:
        """Leaves out the ways before the one of this name, which the run had to give up before."""
        names = [str(way) for way in self.ways]
        if way in names:
            del self.ways[: names.index(way)]
            self.checked = self.checked or self.ways[0] == PLAIN

    def give_up(self, why: str) -> None:
        """Goes on to the next plainer way."""
        given_up = self.ways.pop(0)
        self.say(f"note: not {given_up} ({why}); instead {self.ways[0]}")

    def _objection(
        self, some: list[Rollout], temperature: float, plain: tuple[Tensor, Tensor | None]
    ) -> str | None:
        """Why the next way will not do, or None."""
        found: list[tuple[Tensor, Tensor | None]] = []

        def attempt() -> None:
            found.append(self._with_gradient(self.ways[0], some, temperature))
            # Dropout in attention shows itself in training mode alone.
            self.model.train()
            try:
                self._by(self.ways[0], some, temperature)
            finally:
                self.model.eval()

        why = objection(attempt)
        if why is not None:
            return why
        (logprobs, gradient), (plain_logprobs, plain_gradient) = found[0], plain
        why = difference(some, plain_logprobs, logprobs, self.model)
        if why is None and gradient is not None and plain_gradient is not None:
            relative = ((gradient - plain_gradient).norm() / plain_gradient.norm()).item()
            if not relative <= tolerance(self.model)[2]:
                return f"gradients differ by {relative:.1e}"
        return why

    def _with_gradient(
        self, way: Way, rollouts: Sequence[Rollout], temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities, and the gradient of a mixture of them for one of the weights."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            return self._by(way, rollouts, temperature)[0], None
        # A norm of the first layer: its gradient has come through every layer.
        first = next((p for p in trained if p.ndim == 1), trained[0])
        with torch.enable_grad():
            logprobs, _ = self._by(way, rollouts, temperature)
            signs = torch.arange(logprobs.numel(), device=logprobs.device) % 3 - 1
            mixed = (logprobs * signs.view_as(logprobs)).sum()
            if sharding.is_sharded(self.model):  # gradients come as the backward sums them
                mixed.backward()  # type: ignore[no-untyped-call]
                gradient = None if first.grad is None else whole(first.grad)
                self.model.zero_grad()
            else:
                (gradient,) = torch.autograd.grad(mixed, first, allow_unused=True)
        return logprobs.detach(), None if gradient is None else gradient.double()

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
                found = sharding.within(
                    self.model,
                    lambda: self._chunked(inputs, temperature, entropy, entropy_gradient),
                )
            else:
                found = self._whole(inputs, temperature, entropy, entropy_gradient)
        if not torch.is_grad_enabled():
            sharding.rest(self.model)
        lengths = torch.tensor([[len(r.completion.ids)] for r in rollouts])
        there = (torch.arange(int(lengths.max())) < lengths).to(device)  # [B, C]

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


def cut(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The beginnings of a few rollouts: the longest two of two prompts, if there are two."""
    groups = packing.by_prompt(rollouts)[:2]
    each = CHECKED_ROLLOUTS // max(len(groups), 1)
    found = []
    for members in groups:
        whole = sorted((rollouts[m] for m in members), key=lambda r: -len(r.completion.ids))
        prompt = replace(whole[0].prompt, ids=whole[0].prompt.ids[-CHECKED_TOKENS:])
        for r in whole[:each]:
            c = r.completion
            begun = Completion(c.ids[:CHECKED_TOKENS], c.logprobs[:CHECKED_TOKENS], "length")
            found.append(Rollout(prompt, begun, ""))
    return found


def bytes_per_token(
    likelihood: Likelihood, rollouts: Sequence[Rollout], temperature: float
) -> float:
    """Bytes that a forward pass keeps for its backward, for each token that it computes.

    The difference of two passes, so that what does not grow with the tokens, such as copies of the
    weights in another precision, is left out. With gradient checkpointing a layer's share is added,
    for a layer at a time is computed again in the backward.
    """
    model = likelihood.model
    kept = _slope(likelihood, rollouts, temperature)
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
        whole = _slope(likelihood, rollouts, temperature)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        kept += whole / model.config.get_text_config(decoder=True).num_hidden_layers
    return kept


def _slope(likelihood: Likelihood, rollouts: Sequence[Rollout], temperature: float) -> float:
    some = cut(rollouts)
    sizes = []
    for rows in (some, some[:1]):
        with saved_bytes(likelihood.model) as kept, torch.enable_grad():
            logprobs, _ = likelihood(rows, temperature)
        del logprobs
        sharding.rest(likelihood.model)
        sizes.append((kept(), likelihood.tokens(rows)))
    (more, tokens), (less, fewer) = sizes
    if tokens > fewer and more > less:
        return (more - less) / (tokens - fewer)
    return more / tokens


def objection(attempt: Callable[[], object]) -> str | None:
    """Why something with a model's own code in it fails, or None; memory aside."""
    try:
        attempt()
    except attention.UnsupportedModelError as error:
        return str(error)
    except Exception as error:  # that code may do anything with what it is given
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def tolerance(model: PreTrainedModel) -> tuple[float, float, float]:
    """What is taken for arithmetic, by the precision that a model computes in."""
    device = model.device.type
    half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else model.dtype
    return TOLERANCE.get(dtype, TOLERANCE_OF_HALF)


def difference(
    rollouts: Sequence[Rollout], plain: Tensor, found: Tensor, model: PreTrainedModel
) -> str | None:
    """Why log-probabilities [B, C] are not the plain ones but for arithmetic, or None."""
    lengths = torch.tensor([[len(r.completion.ids)] for r in rollouts])
    there = (torch.arange(plain.shape[1]) < lengths).to(plain.device)  # [B, C]
    apart = (found.to(plain.device) - plain).abs()[there].double()
    largest, mean = apart.max().item(), apart.mean().item()
    highest, highest_mean, _ = tolerance(model)
    if largest <= highest and mean <= highest_mean:
        return None
    return f"log-probabilities differ by {mean:.1e} on average, {largest:.1e} at most"
