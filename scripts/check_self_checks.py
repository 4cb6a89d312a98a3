"""Tries the self-checks on a real model: right computations, and faults built in on purpose.

    python scripts/check_self_checks.py --draws 200      # hours; --draws 5 takes a few minutes

Each precision and each computation (packed rows, logits in chunks, the engine, compiled layers) is
checked on `--draws` draws of prompts and completions, of which none may be rejected. Then each
fault is built in once, and has to be found. `make test-real` does five draws.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import half_products  # noqa: E402
import real_model  # noqa: E402

from grpo_cli.generation.embedded import decode_batch, direct_forward  # noqa: E402
from grpo_cli.generation.embedded.decode_batch import DecodeBatch  # noqa: E402
from grpo_cli.generation.embedded.direct_forward import DirectForward  # noqa: E402
from grpo_cli.generation.embedded.generator import TransformersGenerator  # noqa: E402
from grpo_cli.generation.sampling import Sampling  # noqa: E402
from grpo_cli.models import adapters, loading, packing, policy_logprobs, self_check  # noqa: E402
from grpo_cli.models.attention import Layout, Prefix  # noqa: E402
from grpo_cli.models.packing import PositionIds  # noqa: E402
from grpo_cli.models.policy import COMPILE_BACKEND  # noqa: E402
from grpo_cli.models.policy_logprobs import PolicyLogprobs  # noqa: E402
from grpo_cli.models.settings import Model  # noqa: E402
from grpo_cli.records import Prompt, Rollout, sampled_mask  # noqa: E402

PRECISIONS = ("float32", "bf16 autocast", "bf16 weights", "fp16 autocast", "QLoRA")
COMPUTATIONS = ("packed", "chunked", "engine", "compiled")
MOVED = 0.1  # nats that updates move the mean log-probability by
MOST_UPDATES = 500
LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
QUESTIONS = (
    "What is {a} + {b}?",
    "Write a sentence about the number {a}.",
    "A shop sells {a} pens for {b} dollars each. How much do all the pens cost?",
    "List {b} animals that live in the sea, and say one thing about each of them.",
    "Reply in JSON with the keys name and age for a person who is {a} years old.",
    "Explain in one short paragraph why the sky is blue, to a child of {b}.",
    "Is {a} a prime number?",
    "Translate into French: there are {a} houses and {b} trees.",
)

Fault = Callable[[PreTrainedModel, PreTrainedModel], contextlib.AbstractContextManager[Any]]


def autocast(precision: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    if precision in ("float32", "bf16 weights"):
        return contextlib.nullcontext
    dtype = torch.float16 if precision.startswith("fp16") else torch.bfloat16
    return partial(torch.autocast, "cpu", dtype=dtype)


def in_precision(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """Returns a copy of a model in the dtype of the weights, for QLoRA with an adapter in use."""
    if precision == "QLoRA":
        config = Model(quantization="nf4")
        model, _ = loading.load(config, real_model.folder(), half_type=torch.bfloat16)
        adapters.attach(model, LORA, seed=0)
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(p, std=0.01)
        return model.eval()
    dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
    return copy.deepcopy(model).to(dtype)


@contextlib.contextmanager
def computed_once() -> Iterator[None]:
    """Computes a mode in a precision once for all checks within, which must be of the same rows.

    A computation in float32 serves all precisions, whose weights are the same numbers.
    """
    in_float32, with_gradient = self_check.in_float32, self_check.with_gradient
    wide: list[PreTrainedModel] = []
    known: dict[tuple[Any, ...], Any] = {}

    @contextlib.contextmanager
    def widened(model: PreTrainedModel) -> Iterator[None]:
        wide.append(model)
        try:
            with in_float32(model):
                yield
        finally:
            wide.pop()

    def once(model: PreTrainedModel, rollouts: Sequence[Rollout], compute: Any) -> Any:
        with compute.func.__self__.autocast():
            narrow = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        dtype = torch.float32 if wide else narrow or model.dtype
        key = (adapters.attached_config(model) is None, dtype, compute.args[0])
        if key not in known:
            known[key] = with_gradient(model, rollouts, compute)
        return known[key]

    with patch.multiple(self_check, in_float32=widened, with_gradient=once):
        yield


def sample(model: PreTrainedModel, tokenizer: Any, count: int, seed: int) -> list[list[Rollout]]:
    """Returns groups of two completions of up to 64 tokens each, of `count` prompts."""
    random = torch.Generator().manual_seed(seed)
    prompts = []
    for n in range(count):
        a, b = torch.randint(2, 99, (2,), generator=random).tolist()
        text = QUESTIONS[n % len(QUESTIONS)].format(a=a, b=b)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        prompts.append(replace(Prompt.from_ids(list(ids)), row=n))
    generator = TransformersGenerator(model, [tokenizer.eos_token_id], say=lambda line: None)
    seeds = torch.randint(2**31, (count,), generator=random).tolist()
    found = generator.generate(prompts, 2, Sampling(max_tokens=64), seeds)
    return [[Rollout(p, c, "") for c in found[n]] for n, p in enumerate(prompts)]


def reason(
    computation: str, precision: str, model: PreTrainedModel, rollouts: Sequence[Rollout]
) -> str:
    """Returns the fault that the check of a computation reports; "" if none."""
    said: list[str] = []
    if computation == "engine":
        generator = TransformersGenerator(model, [], say=said.append, autocast=autocast(precision))
        generator.generate([r.prompt for r in rollouts[::2]], 1, Sampling(max_tokens=1), [0, 0])
    else:
        how: dict[str, Any] = {"autocast": autocast(precision), "say": said.append}
        if computation == "compiled":
            how["compile_backend"] = COMPILE_BACKEND
        own = PolicyLogprobs(model, packed=computation != "chunked", **how)
        own.check(rollouts, 1.0)
        assert own.checked
    return " ".join(said)


# The faults. Each takes the model and what it was before its updates.


def arguments(owner: Any, name: str, change: Callable[..., tuple[Any, ...]]) -> Fault:
    """Returns a fault in the positional arguments of a function or method."""
    own = getattr(owner, name)
    changed = lambda *given, **named: own(*change(*given), **named)  # noqa: E731
    return lambda model, base: patch.object(owner, name, changed)


def result(owner: Any, name: str, change: Callable[[Any], Any]) -> Fault:
    """Returns a fault in the result of a method."""
    own = getattr(owner, name)
    changed = lambda *given, **named: change(own(*given, **named))  # noqa: E731
    return lambda model, base: patch.object(owner, name, changed)


def joined(segments: list[Any], prefixes: list[Prefix], *rest: Any) -> Any:
    """Joins the last two completions of a row into one segment: one sees the other."""
    *others, (start, _), (_, end) = segments
    return [*others, (start, end)], prefixes, *rest


def stale_key(self: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
    """Replaces the key of each prompt's last token by that of the token before."""
    k = k.clone()
    for p in self.prefixes:
        k[p.end - 1] = k[p.end - 2]
    return self, layer, q, k, v, scale


def stale_step(self: DecodeBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
    """Replaces the key of each completion's third token by that of the second."""
    if self.length == 2:
        k = self.seen_keys[layer][:, :, -2]
    return self, layer, q, k, v, scale


def rescaled(self: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
    return self, layer, q, k, v, 1.05 * scale


def of_neighbour(self: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
    return self, layer, q, k.roll(1, 0), v.roll(1, 0), scale


def without_prompt(self: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
    """Hides the prompt from a step, where it lies in a row's own cache."""
    if self.prompt_columns and layer == 0:
        own = slice(self.prompt_columns, None)
        self.seen_keys = [t[:, :, own] for t in self.seen_keys]
        self.seen_values = [t[:, :, own] for t in self.seen_values]
        self.seen_mask = None
    return self, layer, q, k, v, scale


@contextlib.contextmanager
def without_prefix(model: PreTrainedModel, base: PreTrainedModel) -> Iterator[None]:
    """Hides the prompt from the engine's steps, in a shared cache too."""
    alone = patch.object(decode_batch, "merge", lambda out, lse, *of_prompt: (out, lse))
    with alone, arguments(DecodeBatch, "attend", without_prompt)(model, base):
        yield


@contextlib.contextmanager
def around(module: nn.Module, begin: Callable[[], Any], end: Callable[[], Any]) -> Iterator[None]:
    """Calls `begin` before a packed or decoding forward of the module, and `end` after any."""

    def before(_: nn.Module, args: Any, named: dict[str, Any]) -> None:
        if "attending" in named:
            begin()

    with (
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(lambda *_: end(), always_call=True),
    ):
        yield


def with_data(model: nn.Module, of: Mapping[str, Tensor], data: Mapping[str, Tensor]) -> Any:
    """Gives tensors other data while a module computes, unseen by autograd."""
    own = {name: tensor.data for name, tensor in of.items()}

    def give(these: Mapping[str, Tensor]) -> None:
        for name, tensor in of.items():
            tensor.data = these[name].data

    return around(model, lambda: give(data), lambda: give(own))


def stale_layer(model: PreTrainedModel, base: PreTrainedModel) -> Any:
    """Gives the middle layer the weights from before the updates, where rows are packed."""
    number = len(model.model.layers) // 2
    layer, stale = (dict(m.model.layers[number].named_parameters()) for m in (model, base))
    return with_data(model.model.layers[number], layer, stale)


def stale_layer_of_engine(model: PreTrainedModel, base: PreTrainedModel) -> Any:
    """Makes the engine read the middle layer's weights from before the updates."""
    number = len(model.model.layers) // 2
    middle, make = model.model.layers[number], direct_forward.Layer.of

    def of(module: Any, *, prepacks: Any) -> Any:
        return make(base.model.layers[number] if module is middle else module, prepacks=prepacks)

    return patch.object(direct_forward.Layer, "of", of)


def without_adapter(model: PreTrainedModel, base: PreTrainedModel) -> Any:
    """Leaves the adapter out where rows are packed or the engine decodes."""
    own = adapters.tensors_of(model)
    return with_data(model.model, own, {name: torch.zeros_like(p) for name, p in own.items()})


OF_HEAD = partial(arguments, policy_logprobs, "linear_logprobs")
COLDER = OF_HEAD(lambda hidden, head, at, temperature: (hidden, head, at, 1.05 * temperature))
SWAPPED = OF_HEAD(lambda hidden, *rest: (hidden.flip(0), *rest))
FAULTS: dict[str, dict[str, Fault]] = {
    "packed": {
        "positions off by one": result(PositionIds, "add_prompt", lambda after: after + 1),
        "a row sees its neighbour": arguments(packing, "Layout", joined),
        "a missing prefix": arguments(packing, "Layout", lambda own, _, *rest: (own, [], *rest)),
        "scale 1.05": arguments(Layout, "attend", rescaled),
        "temperature 1.05": COLDER,
        "a stale key": arguments(Layout, "attend", stale_key),
        "swapped rows": SWAPPED,
        "one layer not updated": stale_layer,
    },
    "chunked": {"temperature 1.05": COLDER, "swapped rows": SWAPPED},
    "engine": {
        "positions off by one": result(DecodeBatch, "positions", lambda own: [p - 1 for p in own]),
        "a row sees its neighbour": arguments(DecodeBatch, "attend", of_neighbour),
        "a missing prefix": without_prefix,
        "scale 1.05": arguments(DecodeBatch, "attend", rescaled),
        "temperature 1.05": result(DirectForward, "__call__", lambda logits: logits / 1.05),
        "a stale key": arguments(DecodeBatch, "attend", stale_step),
        "swapped rows": result(DirectForward, "__call__", lambda logits: logits.roll(1, 0)),
        "one layer not updated": stale_layer_of_engine,
    },
}


def updated(
    model: PreTrainedModel, rollouts: Sequence[Rollout], dtype: torch.dtype, *, adapter: bool
) -> PreTrainedModel:
    """Returns a copy in a dtype, after updates in it that move the mean log-prob by `MOVED`."""
    moved = copy.deepcopy(model).to(dtype)
    if adapter:
        adapters.attach(moved, LORA, seed=0)
    trained = [p for p in moved.parameters() if p.requires_grad]
    rate = 1e-4 if adapter else 2e-6 if dtype == torch.float32 else 2e-5  # 16 bit rounds it away
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    policy = PolicyLogprobs(moved, packed=False, chunked=False)
    mask = sampled_mask(rollouts)
    start = None
    for _ in range(MOST_UPDATES):
        mean = policy(rollouts, 1.0)[0][mask].mean()
        start = mean.item() if start is None else start
        if mean.item() - start > MOVED:
            return moved
        optimizer.zero_grad()
        (-mean).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    raise RuntimeError(f"{MOST_UPDATES} updates move the mean log-probability by less than {MOVED}")


def draws_of(groups: list[list[Rollout]], count: int, seed: int) -> Iterator[list[Rollout]]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        one, other = torch.randperm(len(groups), generator=random)[:2].tolist()
        yield [*groups[one], *groups[other]]


def main() -> int:
    """Prints the table; returns 1 if a right computation was rejected or a fault not found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS[:3], choices=PRECISIONS)
    parser.add_argument("--computations", nargs="+", default=[*FAULTS], choices=COMPUTATIONS)
    given = parser.parse_args()
    half_products.install(always="fp16 autocast" in given.precisions)
    tokenizer = AutoTokenizer.from_pretrained(real_model.folder())
    loaded = AutoModelForCausalLM.from_pretrained(real_model.folder(), dtype=torch.float32)
    with torch.no_grad():
        groups = sample(loaded, tokenizer, max(8, min(given.draws, 64)), seed=0)
    groups = [g for g in groups if max(len(r.completion.ids) for r in g) > 8]
    models = {precision: in_precision(loaded, precision) for precision in given.precisions}
    wrong, begin = 0, time.monotonic()
    for n, rollouts in enumerate(draws_of(groups, given.draws, seed=0), 1):
        with computed_once():
            for (precision, model), computation in product(models.items(), given.computations):
                if found := reason(computation, precision, model, rollouts):
                    wrong += 1
                    print(f"{precision:14} {computation:8} draw {n} REJECTED {found}", flush=True)
        if n % 20 == 0:
            print(f"{n} draws, {time.monotonic() - begin:.0f} s, {wrong} rejected", flush=True)
    some = [*groups[0], *groups[1]]
    dtypes = {model.dtype for model in models.values()}
    moved = {(d, a): updated(loaded, some, d, adapter=a) for d in dtypes for a in (False, True)}
    rollouts = next(draws_of(groups, 1, seed=1))
    for precision, computation in product(given.precisions, given.computations):
        tried = dict(FAULTS.get(computation, {}) if precision in PRECISIONS[:3] else {})
        if "a stale key" in tried:
            tried["the adapter not applied"] = without_adapter
        for name, fault in tried.items():
            after = copy.deepcopy(moved[models[precision].dtype, fault is without_adapter])
            with fault(after, models[precision]):
                found = reason(computation, precision, after, rollouts)
            wrong += not found
            print(f"{precision:14} {computation:8} {name:24} {found or 'NOT FOUND'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
