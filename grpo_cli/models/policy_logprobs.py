"""Computes log-probabilities and entropies of rollouts' completion tokens under a model.

By default each prompt is computed once for its completions without padding (`packing.py`), and the
logits are computed one chunk at a time (`token_logprobs.py`). Not every model supports this. The
first rollouts are therefore also computed in the simplest mode, with padded rows and complete
logits. If the results differ beyond rounding (`self_check.py`), the run falls back to the next
simpler mode and prints a note.

With `model.compile` the decoder layers' forwards are compiled in place, not wrapped, so that weight
names are unchanged and a backward with gradient checkpointing recomputes the compiled forward. The
embedded engine decodes with the same layers uncompiled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from grpo_cli.algorithm.load_balancing import Routing
from grpo_cli.distributed import fsdp, heartbeat
from grpo_cli.errors import first_line
from grpo_cli.models import attention, packing, self_check
from grpo_cli.models.attention import mismatch
from grpo_cli.models.families import (
    BIDIRECTIONAL,
    RECURRENT,
    has_bidirectional_images,
    is_recurrent,
    without_router_logits,
)
from grpo_cli.models.routers import RouterRecorder
from grpo_cli.models.self_check import Outcome
from grpo_cli.models.token_logprobs import Head, linear_logprobs, token_entropy, token_logprobs
from grpo_cli.models.vision import takes_images
from grpo_cli.records import Completion, Rollout, has_images

CHECKED_ROLLOUTS = 4  # rollouts in the check against the simplest mode
CHECKED_TOKENS = 64  # maximum tokens of a prompt, and of a completion, in that check
# Maximum compiled variants of a layer: with and without gradient, packed and padded, and so on.
MOST_VARIANTS = 64


@dataclass(frozen=True)
class ForwardMode:
    """The mode of computing log-probabilities; checkpoints store its string."""

    packed: bool  # True: each prompt once and no padding; False: padded rows
    chunked: bool  # True: logits in chunks; False: all logits at once
    compiled: bool = False  # whether decoder layers run with torch.compile

    def __str__(self) -> str:
        rows = "each prompt once for its completions" if self.packed else "rows padded"
        layers = ", layers compiled" if self.compiled else ""
        return f"{rows}, logits {'in chunks' if self.chunked else 'whole'}{layers}"


SIMPLEST = ForwardMode(packed=False, chunked=False)


class PolicyLogprobs:
    """Computes rollouts' log-probabilities under one model: `policy_logprobs(rollouts, T)`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packed: bool = True,
        chunked: bool = True,
        compile_backend: str | None = None,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        say: Callable[[str], None] = print,
        agree_on: Callable[[str | None], str | None] = lambda mismatch: mismatch,
    ) -> None:
        """Replaces the model's attention function if it supports packed rows.

        Args:
            packed, chunked: whether to use these modes if the model supports them.
            compile_backend: torch.compile backend for the decoder layers; None: no compilation.
            autocast: makes the context for every forward pass.
            say: receives a line for each fallback.
            agree_on: reduces the reasons for a fallback over all processes to one, so that all
                processes use the same mode.
        """
        self.model = model
        self.autocast = autocast
        self.say = say
        self.agree_on = agree_on
        self.routers: RouterRecorder | None = None  # set for a load-balancing loss
        self.routing: Routing | None = None  # routing of the last rollouts, with `routers`
        self.constant: dict[str, Any] = {
            "use_cache": False,
            **without_router_logits(model),
        }
        self.is_recurrent = is_recurrent(model)
        if packed and self.is_recurrent:
            packed = False
            say(f"note: rows are padded: the model's {RECURRENT}")
        elif packed and not attention.install(model):
            packed = False
            say(f"note: rows are padded: the model's attention is {attention.name_of(model)}")
        self.compile_backend = compile_backend
        self.modes = [
            ForwardMode(p, c, compiled)
            for p, c in ((True, True), (False, True), (True, False), (False, False))
            for compiled in ([False] if compile_backend is None else [True, False])
            if (packed or not p) and (chunked or not c)
        ]
        self.checked = self.modes[0] == SIMPLEST
        self.checked_images = self.checked or not takes_images(model.config)

    @property
    def mode(self) -> ForwardMode:
        """The current mode: the simplest one until another mode has been checked."""
        return self.modes[0] if self.checked else SIMPLEST

    def tokens(self, rollouts: Sequence[Rollout]) -> int:
        """Returns the number of tokens of rollouts in one micro-batch, without padding."""
        if self.mode.packed:
            return packing.unique_tokens(rollouts)[0]
        return sum(map(packing.length, rollouts))

    def micro_batches(
        self, rollouts: Sequence[Rollout], max_tokens: int
    ) -> Iterator[list[Rollout]]:
        """Splits rollouts into micro-batches of at most `max_tokens` tokens with padding."""
        split = packing.packed_micro_batches if self.mode.packed else packing.padded_micro_batches
        return split(rollouts, max_tokens)

    def __call__(
        self,
        rollouts: Sequence[Rollout],
        temperature: float,
        *,
        entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes log-probabilities, and optionally entropies, of B rollouts' completion tokens.

        Args:
            rollouts: B rollouts.
            temperature: sampling temperature.
            entropy: also return the entropies, in nats.
            entropy_gradient: make the entropies differentiable.

        Returns:
            (logprobs [B, C] with gradient, entropies [B, C] or None), at least float32. C is the
            length of the longest completion. Places after a shorter completion and tokens that were
            not sampled are 0, since logits are computed only for sampled tokens.
        """
        return self._by(self.mode, rollouts, temperature, entropy, entropy_gradient)

    def check(self, rollouts: Sequence[Rollout], temperature: float) -> None:
        """Chooses the first mode whose values and gradient match the simplest mode's.

        Does nothing if a mode has been chosen before, except with the first images, or if there are
        too few rollouts. Every process calls it.
        """
        some = cut(rollouts)
        images = has_images(r.prompt for r in some)
        if self.checked and (self.checked_images or not images):
            return
        if images and self.modes[0].packed and has_bidirectional_images(self.model):
            self.modes = [mode for mode in self.modes if not mode.packed]
            self.say(f"note: rows are padded: the model's {BIDIRECTIONAL}")
        if len(some) < 2 or max(len(r.completion.ids) for r in some) < 2:
            return
        device = fsdp.device_of(self.model)
        devices = [device] if device.type == "cuda" else []
        with inference(self.model), self.autocast(), torch.random.fork_rng(devices):
            simplest = self._with_gradient(SIMPLEST, some, temperature)
            right: list[Outcome] = []

            def compute_in_float32() -> None:
                with self._in_float32():
                    right.append(self._with_gradient(SIMPLEST, some, temperature))

            failed = None
            if self_check.is_16_bit(self.model):
                failed = self.agree_on(mismatch(compute_in_float32))
            while self.modes[0] != SIMPLEST:
                reason = failed or self.agree_on(
                    self._fault(some, temperature, simplest, right[0] if right else None)
                )
                if reason is None:
                    break
                self.fall_back(reason)
        heartbeat.detail("")
        self.checked = True
        self.checked_images = self.checked_images or images or self.modes[0] == SIMPLEST

    def checks(self) -> dict[str, str]:
        """Returns the mode, and whether it was checked on "text" or "images", for a checkpoint."""
        if not self.checked:
            return {"mode": str(self.modes[0])}
        return {"mode": str(self.modes[0]), "checked": "images" if self.checked_images else "text"}

    def restore_checks(self, stored: Mapping[str, str]) -> None:
        """Restores the mode that `checks` has stored, so that a resumed run rounds as before."""
        names = [str(mode) for mode in self.modes]
        if stored["mode"] not in names:
            return
        del self.modes[: names.index(stored["mode"])]
        is_simplest = self.modes[0] == SIMPLEST
        self.checked = self.checked or is_simplest or "checked" in stored
        is_known = is_simplest or stored.get("checked") == "images"
        self.checked_images = self.checked_images or is_known

    def fall_back(self, reason: str) -> None:
        """Switches to the next simpler mode and prints the reason."""
        dropped = self.modes.pop(0)
        self.say(
            f"note: {dropped} is off ({reason}); {self.modes[0]} gives the same result, slower"
        )

    def _fault(
        self, some: list[Rollout], temperature: float, simplest: Outcome, right: Outcome | None
    ) -> str | None:
        """Returns why the first mode is wrong, or None.

        Args:
            simplest: the simplest mode's outcome. right: the same in float32, for 16 bit only.
        """
        mode = self.modes[0]
        heartbeat.detail(f"checking the {'packed' if mode.packed else 'padded'} forward")
        found: list[Outcome] = []

        def attempt() -> None:
            found.append(self._with_gradient(mode, some, temperature))
            # Dropout in attention is only visible in training mode.
            self.model.train()
            try:
                self._by(mode, some, temperature)
            finally:
                self.model.eval()
            if right is not None:  # uncompiled, to avoid compiling the layers for float32 too
                with self._in_float32():
                    uncompiled = replace(mode, compiled=False)
                    found.append(self._with_gradient(uncompiled, some, temperature))

        reason = mismatch(attempt)
        if reason is not None:
            return reason
        if right is None:
            return self_check.difference(found[0], simplest, self.model.dtype)
        in_float32 = self_check.difference(found[1], right, torch.float32)
        return in_float32 or self_check.excess(found[0], simplest, right)

    @contextlib.contextmanager
    def _in_float32(self) -> Iterator[None]:
        """Computes in float32 within the context."""
        autocast = self.autocast

        @contextlib.contextmanager
        def entered() -> Iterator[None]:  # `autocast` may also replace an adapter
            with autocast(), torch.autocast(fsdp.device_of(self.model).type, enabled=False):
                yield

        self.autocast = entered
        try:
            with self_check.in_float32(self.model):
                yield
        finally:
            self.autocast = autocast

    def _with_gradient(
        self, mode: ForwardMode, some: Sequence[Rollout], temperature: float
    ) -> Outcome:
        return self_check.with_gradient(
            self.model, some, partial(self._by, mode, some, temperature)
        )

    def _by(
        self,
        mode: ForwardMode,
        rollouts: Sequence[Rollout],
        temperature: float,
        entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        device = fsdp.device_of(self.model)
        if mode.packed:
            inputs = packing.pack(rollouts, device, self.model)
        else:
            inputs = packing.pad(rollouts, device, self.model, right=self.is_recurrent)
        router_logits: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            if self.routers is not None:
                router_logits = stack.enter_context(self.routers.recording())
            stack.enter_context(self.autocast())
            stack.enter_context(explained())
            if self.compile_backend is not None:
                compile_layers(self.model, mode.compiled, self.compile_backend)
            if mode.chunked:
                flat = fsdp.within(
                    self.model,
                    lambda: self._chunked(inputs, temperature, entropy, entropy_gradient),
                )
            else:
                flat = self._unchunked(inputs, temperature, entropy, entropy_gradient)
        if self.routers is not None:
            predicting = [t.flatten(0, -2)[inputs.predictors] for t in router_logits]  # [T, E] each
            k = self.routers.experts_per_token
            self.routing = Routing.of(predicting, k, packing.trains(rollouts, device))
        if inputs.layout is not None and not inputs.layout.is_used:  # sequences were not separated
            raise attention.UnsupportedModelError(attention.NOT_PASSED_ON)
        if not torch.is_grad_enabled():
            fsdp.reshard(self.model)
        logprobs = in_rows(flat[0], rollouts)
        return logprobs, None if flat[1] is None else in_rows(flat[1], rollouts)

    def _chunked(
        self, inputs: packing.Inputs, temperature: float, entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        output = self.model.base_model(**self._arguments(inputs))
        hidden = output.last_hidden_state.flatten(0, 1)
        return linear_logprobs(
            hidden[inputs.predictors],  # [T, H]
            Head.of(self.model),
            inputs.targets,
            temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )

    def _arguments(self, inputs: packing.Inputs) -> dict[str, Any]:
        """Returns the arguments of the model's forward."""
        shared: dict[str, Any] = self.constant | inputs.arguments
        shared |= {"input_ids": inputs.input_ids}
        if inputs.layout is None:
            return shared | {"attention_mask": inputs.attention_mask}
        mask = attention.no_mask(inputs.input_ids.device)
        return shared | {"attention_mask": mask, "attending": inputs.layout}

    def _unchunked(
        self, inputs: packing.Inputs, temperature: float, entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        predictors, arguments = inputs.predictors, self._arguments(inputs)
        if inputs.layout is not None:
            logits = self.model(**arguments, logits_to_keep=predictors).logits[0]  # [T, V]
        else:
            width = inputs.input_ids.shape[1]
            row, column = predictors // width, predictors % width
            first = int(column.min()) if len(column) else width - 1
            kept = self.model(**arguments, logits_to_keep=width - first).logits
            logits = kept[row, column - first]  # [T, V]
        logprobs = token_logprobs(logits, inputs.targets, temperature)
        if not entropy:
            return logprobs, None
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            return logprobs, token_entropy(logits, temperature)


def in_rows(values: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
    """Returns the values [T] of sampled tokens as rows [B, C], 0 at other places."""
    shape = len(rollouts), max(len(r.completion.ids) for r in rollouts)
    places = packing.as_places(sampled_places(rollouts), values.device)  # [T] in [B · C]
    return values.new_zeros(math.prod(shape)).index_copy(0, places, values).view(shape)


def sampled_places(rollouts: Sequence[Rollout]) -> list[int]:
    """Returns the indices of the ones in `sampled_mask`, flattened row by row."""
    width = max(len(r.completion.ids) for r in rollouts)
    places: list[int] = []
    for i, r in enumerate(rollouts):
        row = range(i * width, i * width + len(r.completion.ids))
        sampled = r.completion.is_sampled
        places += row if sampled is None else compress(row, sampled)
    return places


def compile_layers(model: PreTrainedModel, compiled: bool, backend: str) -> None:
    """Compiles the decoder layers' forwards, or restores the originals."""
    for layer in fsdp.layers(model):
        if not compiled:
            layer.__dict__.pop("forward", None)
        elif "forward" not in layer.__dict__:
            torch._dynamo.config.recompile_limit = MOST_VARIANTS  # no argument in torch 2.11
            layer.forward = torch.compile(  # type: ignore[method-assign]
                layer.forward, dynamic=True, backend=backend
            )


def cut(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Selects and shortens rollouts for a check: the two longest of each of two prompts."""
    # Prompts with images come first, since they are more likely to reveal errors.
    groups = packing.by_prompt(rollouts)
    groups = sorted(groups, key=lambda members: not rollouts[members[0]].prompt.images)[:2]
    each = CHECKED_ROLLOUTS // max(len(groups), 1)
    shortened = []
    for members in groups:
        longest = sorted((rollouts[m] for m in members), key=lambda r: -len(r.completion.ids))
        prompt = longest[0].prompt
        if not prompt.images:  # image tokens must not be cut
            prompt = replace(prompt, ids=prompt.ids[-CHECKED_TOKENS:])
        for r in longest[:each]:
            c = r.completion
            beginning = Completion(
                c.ids[:CHECKED_TOKENS], c.sampling_logprobs[:CHECKED_TOKENS], "length"
            )
            shortened.append(Rollout(prompt, beginning, ""))
    return shortened


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Converts errors of torch.compile to UnsupportedModelError, which triggers a fallback."""
    try:
        yield
    except TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)  # the backend's own exception
        said = f"torch.compile fails: {first_line(cause)}"
        raise attention.UnsupportedModelError(said) from error


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Disables gradients and dropout within the context, then restores the module's mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
