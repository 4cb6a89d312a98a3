"""Stages speed, decoding and adapters: seconds, tokens per second, MFU and memory.

By model and length: packed against padded rows, CUDA graphs against decoding step by step, and all
against transformers alone (`plain.py`). Sampling by the number of rows. An update of all weights,
and one of a LoRA adapter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import plain
import torch
import workloads
from bench_probe import peak_memory
from cases import Case, Figures, Setting
from transformers import PreTrainedModel

from grpo_cli.config.schema import Adapter, Optimizer
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.embedded.graphs import CudaGraphs, FallbackGraphs
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models import adapters, optimizers
from grpo_cli.models.flops import peak_flops, rollout_flops
from grpo_cli.models.memory import is_out_of_memory, release
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.records import Prompt, Rollout

MICRO_BATCH = 16384  # tokens, halved as often as memory needs it
NEW_TOKENS = 64  # sampled at a length; a step samples all
ROWS = (1, 8, 32, 128, 512)  # decoded together
RANKS = {"all weights": 0, "LoRA of rank 16": 16}
PROMPTS = {512: 8, 2048: 8, 8192: 2}  # of a generation, by their length with the new tokens


def cases(setting: Setting) -> list[Case]:
    found = []
    for model in workloads.names(setting):
        for number, length in enumerate(workloads.lengths(setting)):
            measured: list[tuple[str, Callable[..., Figures], list[str]]]
            measured = [("update", update, ["packed", "padded", "plain"])]
            measured += [("generation", generation, ["ours", "steps", "plain"])]
            measured += [("step", step, ["ours", "plain"])] if number == 0 else []
            for what, call, ways in measured:
                for way in ways:
                    name = f"{model}, {length}, {what}, {way}"
                    found.append(Case("speed", name, partial(call, setting, model, length, way)))
    smallest, largest = workloads.names(setting)[0], workloads.names(setting)[-1]
    for rows in (1, 4) if setting.dry else ROWS:
        for way in ("ours", "steps", "plain"):
            name = f"{smallest}, {rows} rows, {way}"
            found.append(Case("decoding", name, partial(decode, setting, smallest, rows, way)))
    length = workloads.lengths(setting)[1]
    for what, rank in RANKS.items():
        call = partial(update, setting, largest, length, "packed", rank)
        found.append(Case("adapters", f"{largest}, {length}, {what}", call))
    return found


def update(setting: Setting, name: str, length: int, way: str, rank: int = 0) -> Figures:
    """Measures one optimizer step over random rollouts.

    Args:
        rank: of an adapter on all linear layers; 0: all weights are trained.
    """
    if rank:  # not the model that other cases share
        workloads.drop_model()
        model = workloads.make_model(name, setting.device)
        adapter = Adapter(method="lora", rank=rank)
        adapters.attach(model, adapters.config_of(adapter, "random", None), seed=0)
    else:
        model = workloads.model(name, setting)
    groups = workloads.GROUPS.get(length, 2)
    rollouts = workloads.rollouts(model.config.vocab_size, length, groups)
    return measured_update(setting, model, rollouts, way)


def measured_update(
    setting: Setting, model: PreTrainedModel, rollouts: list[Rollout], way: str
) -> Figures:
    """Returns the figures of one optimizer step: forward, backward and AdamW.

    Args:
        way: packed or padded rows of `PolicyLogprobs`, or plain.
    """
    optimizer = optimizers.make(Optimizer(learning_rate=1e-9), model)
    notes: list[str] = []
    own = PolicyLogprobs(
        model, packed=way == "packed", autocast=workloads.half(setting), say=notes.append
    )
    if way != "plain":
        own.check(rollouts, 1.0)
    tokens = MICRO_BATCH

    def take() -> None:
        if way == "plain":
            with workloads.half(setting)():
                plain.backward(model, rollouts, tokens)
        else:
            backward(own, rollouts, tokens)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    while True:
        try:
            seconds, peak = workloads.measure(setting, take)
            break
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or tokens < 512:
                raise
        optimizer.zero_grad(set_to_none=True)
        release()
        tokens //= 2
    return figures(setting, own, rollouts, seconds, peak, backward=True) | {
        "micro-batch": tokens, **({"note": notes[0]} if notes else {})
    }  # fmt: skip


def backward(policy_logprobs: PolicyLogprobs, rollouts: list[Rollout], max_tokens: int) -> None:
    """Adds up the gradient of -advantage · logprob of every completion token."""
    total = sum(len(r.completion.ids) for r in rollouts)
    for some in policy_logprobs.micro_batches(rollouts, max_tokens):
        logprobs, _ = policy_logprobs(some, 1.0)
        advantages = torch.tensor([[r.advantage] for r in some], device=logprobs.device)
        loss = -(logprobs * advantages).sum() / total
        loss.backward()  # type: ignore[no-untyped-call]


def figures(
    setting: Setting,
    policy_logprobs: PolicyLogprobs,
    rollouts: list[Rollout],
    seconds: float,
    peak: float,
    *,
    backward: bool,
) -> Figures:
    """Returns seconds, completion tokens per second, MFU and peak memory.

    The FLOPs count each prompt once and no padding, whatever was computed.
    """
    rate = peak_flops(torch.device(setting.device), torch.bfloat16)
    flops = rollout_flops(policy_logprobs.model, rollouts, backward=backward)
    return {
        "seconds": seconds,
        "tokens/s": sum(len(r.completion.ids) for r in rollouts) / seconds,
        "MFU %": 100 * flops / seconds / rate,
        "GiB": peak,
    }


def prompts_of(model: PreTrainedModel, count: int, length: int) -> list[Prompt]:
    """Returns random prompts of one length."""
    draws, words = random.Random(0), range(model.config.vocab_size)
    return [Prompt(n, draws.choices(words, k=length), "", {}) for n in range(count)]


@dataclass
class Sampler:
    """Samples completions of a fixed length as rollouts."""

    setting: Setting
    model: PreTrainedModel
    way: str  # ours, with CUDA graphs; steps, without them; or plain
    notes: list[str] = field(default_factory=list)  # of the engine

    def __post_init__(self) -> None:
        self.captured = 0  # steps, by the last call
        self.half = workloads.half(self.setting)
        self.generator = TransformersGenerator(
            self.model,
            [],
            autocast=self.half,
            say=self.notes.append,
            cuda_graphs=self.way != "steps",
        )
        if self.setting.dry and self.way == "ours":
            self.generator.graphs = FallbackGraphs(CudaGraphs(), self.notes.append, has_failed=True)

    def __call__(self, prompts: list[Prompt], size: int, tokens: int) -> list[Rollout]:
        """Returns `size` completions of `tokens` tokens for each prompt."""
        before = self._captures()
        if self.way == "plain":
            rows = [p.ids for p in prompts for _ in range(size)]
            with self.half():
                ids = plain.generate(self.model, rows, tokens)
            completions = [workloads.completion(row[-tokens:]) for row in ids.tolist()]
        else:
            settings = Sampling(max_tokens=tokens)
            found = self.generator.generate(prompts, size, settings, [*range(len(prompts))])
            completions = [c for group in found for c in group]
        self.captured = self._captures() - before
        each = [p for p in prompts for _ in range(size)]
        return [
            Rollout(p, c, "", reward=1.0, advantage=1.0 if n % 2 else -1.0)
            for n, (p, c) in enumerate(zip(each, completions, strict=True))
        ]

    def _captures(self) -> int:
        """Returns how many steps were captured so far."""
        graphs = self.generator.graphs
        return 0 if graphs is None else graphs.captures

    def verdict(self) -> Figures:
        """Returns the status of a case: wrong where the last call has captured no step."""
        if self.way != "ours" or self.setting.dry or self.captured:
            return {}
        reasons = [note for note in self.notes if "CUDA graphs" in note]
        return {"status": "wrong", "error": next(iter(reasons), "no step was captured")}


def generation(setting: Setting, name: str, length: int, way: str) -> Figures:
    """Measures the last tokens of completions whose rows are `length` tokens long at their end."""
    model = workloads.model(name, setting)
    new = 4 if setting.dry else NEW_TOKENS
    prompts = prompts_of(model, PROMPTS.get(length, 2), length - new)
    return measured_generation(setting, model, prompts, workloads.NUM_GENERATIONS, new, way)


def decode(setting: Setting, name: str, rows: int, way: str) -> Figures:
    """Measures sampling with groups of 8 completions, or of all rows if there are fewer."""
    model = workloads.model(name, setting)
    size = min(rows, workloads.NUM_GENERATIONS)
    prompt, new = (8, 4) if setting.dry else (128, NEW_TOKENS)
    prompts = prompts_of(model, rows // size, prompt)
    return measured_generation(setting, model, prompts, size, new, way)


def measured_generation(
    setting: Setting, model: PreTrainedModel, prompts: list[Prompt], size: int, new: int, way: str
) -> Figures:
    """Returns the figures of sampling `new` tokens, the prompts' forward pass included."""
    kept: list[list[Rollout]] = []
    sample = Sampler(setting, model, way)
    seconds, peak = workloads.measure(
        setting, lambda: kept.append(sample(prompts, size, new)), repeats=1
    )
    own = PolicyLogprobs(model)
    found: dict[str, Any] = figures(setting, own, kept[-1], seconds, peak, backward=False)
    return found | {"ms a token": 1e3 * seconds / new, "rows": len(kept[-1]), **sample.verdict()}


def step(setting: Setting, name: str, length: int, way: str) -> Figures:
    """Measures a step: samples whole completions and trains on them."""
    model = workloads.model(name, setting)
    new = length - length // 8
    prompts = prompts_of(model, workloads.PROMPTS_OF_STEP, length // 8)
    device = torch.device(setting.device)
    sample = Sampler(setting, model, way)
    sample(prompts, workloads.NUM_GENERATIONS, 4)  # checks the engine, which a run does once
    with peak_memory(device) as seen:
        start = workloads.now(device)
        rollouts = sample(prompts, workloads.NUM_GENERATIONS, new)
        generated = workloads.now(device) - start
    updated = measured_update(setting, model, rollouts, "packed" if way == "ours" else "plain")
    seconds = generated + updated["seconds"]
    return {
        "seconds": seconds,
        "tokens/s": len(rollouts) * new / seconds,
        "GiB": max(workloads.gib(device, seen), updated["GiB"]),
        "generation s": generated,
        "update s": updated["seconds"],
        **sample.verdict(),
    }
