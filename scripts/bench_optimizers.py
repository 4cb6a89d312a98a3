"""Bytes per parameter and time of an optimizer step, for each way to keep weights and state.

    .venv/bin/python scripts/bench_optimizers.py [--rounds 5]

A random model of 110 M parameters gets random gradients, and AdamW steps. The bytes are counted
from the tensors: on the device, and on the host with an offload. Each way is timed in turn with the
first one, float32 weights, so that other work on the machine slows both; the ratio is the median of
the ratios of the rounds. On a machine without CUDA the host is also the device: the times of an
offload then have no transfers in them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from grpo_cli.config.schema import Optimizer
from grpo_cli.models import optimizers
from grpo_cli.models.master_weights import MASTER, MasterWeights

WAYS = {  # settings: weights' dtype, algorithm, rounding, offload
    "float32": ("float32", "adamw", "nearest", "none"),
    "float32, `adamw_8bit`": ("float32", "adamw_8bit", "nearest", "none"),
    "float32, `offload=optimizer`": ("float32", "adamw", "nearest", "optimizer"),
    "bfloat16, `rounding=nearest`": ("bfloat16", "adamw", "nearest", "none"),
    "bfloat16, `rounding=stochastic`": ("bfloat16", "adamw", "stochastic", "none"),
    "bfloat16, `offload=optimizer`": ("bfloat16", "adamw", "nearest", "optimizer"),
}


def make_model(dtype: str, device: str) -> transformers.PreTrainedModel:
    config = transformers.Qwen2Config(
        vocab_size=12_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=16,
        num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config).to(device, getattr(torch, dtype))


@dataclass
class Way:
    """One way: a model and its optimizer."""

    model: transformers.PreTrainedModel
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, name: str, device: str) -> Way:
        dtype, algorithm, rounding, offload = WAYS[name]
        model = make_model(dtype, device)
        config = Optimizer(algorithm=algorithm, rounding=rounding, learning_rate=1e-5)
        return cls(model, optimizers.make(config, model, offload=offload))

    def step(self) -> float:
        """Takes a step with random gradients; returns its seconds."""
        for p in self.model.parameters():
            p.grad = torch.randn_like(p).mul_(1e-3)
        synchronize()
        start = time.perf_counter()
        self.optimizer.step()
        synchronize()
        return time.perf_counter() - start

    def bytes_per_parameter(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counts (on the device, on the host) what is kept between steps, and the gradients."""
        parameters = list(self.model.parameters())
        state = list(self.optimizer.state.values())
        moments = sum(size(t) for s in state for k, t in s.items() if k != MASTER)
        device = {
            "weights": sum(map(size, parameters)),
            "gradients": sum(size(p.grad) for p in parameters if p.grad is not None),
        }
        host = {}
        if isinstance(self.optimizer, MasterWeights) and self.optimizer.on_host:
            masters = self.optimizer.masters.values()
            host = {"copy": sum(m.untyped_storage().nbytes() for m in masters), "moments": moments}
        else:
            device["moments"] = moments
        count = sum(p.numel() for p in parameters)
        return tuple({k: v / count for k, v in part.items()} for part in (device, host))  # type: ignore[return-value]


def size(value: object) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def shown(parts: dict[str, float]) -> str:
    if not parts:
        return "0"
    return f"{sum(parts.values()):.3g} ({', '.join(f'{k} {v:.3g}' for k, v in parts.items())})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="steps of each way that count")
    rounds = parser.parse_args().rounds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| weights and AdamW | bytes on the device | bytes on the host | step | to float32 |")
    print("| --- | --- | --- | --- | --- |")
    first = Way.of("float32", device)
    for name in WAYS:
        way = first if name == "float32" else Way.of(name, device)
        way.step()  # makes the state
        pairs = [(way.step(), first.step()) for _ in range(rounds)]
        on_device, on_host = way.bytes_per_parameter()
        seconds = statistics.median(own for own, _ in pairs)
        ratio = statistics.median(own / other for own, other in pairs)
        print(
            f"| {name} | {shown(on_device)} | {shown(on_host)} | {seconds * 1e3:.0f} ms | "
            f"{ratio:.2f}x |",
            flush=True,
        )


if __name__ == "__main__":
    main()
