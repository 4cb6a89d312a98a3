"""Time of a weight sync, by each way that runs on this machine, and of its weight check.

    .venv-vllm/bin/python scripts/bench_sync.py [--rounds 5] [--sizes tiny,110m] [--rank 16]

For each model: colocate in this process, then one server of `grpo serve` by gloo and by disk. After
every sync the engine's log-probabilities of what it samples are compared with the trainer's, so
that a sync that did nothing is not timed.

With --rank the model has a LoRA adapter of that rank, and each value of `adapter.sync` is timed:
merged weights (to a server by gloo), and the adapter only. The time of sampling 8 completions of 32
tokens for each of 8 prompts is printed too: an engine that applies an adapter is slower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_cli.cli import spin_count

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", str(spin_count()))

import httpx2
import torch
import transformers
from bench_setup import make_tokenizer

from grpo_cli.config.schema import Adapter, Recipe, Reward
from grpo_cli.distributed.workers import Workers
from grpo_cli.generation.base import EngineSetup
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Prompt

PORT = 8297
SIZES = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary
    "tiny": (128, 512, 4, 4, 2, 512),
    "110m": (768, 2048, 16, 12, 4, 12_000),
}
LARGEST = 1e-3  # mean difference of log-probabilities after a sync


def make(folder: Path, size: str) -> Any:
    """A random Qwen2 in a folder; returns it."""
    hidden, intermediate, layers, heads, shared, words = SIZES[size]
    config = transformers.Qwen2Config(
        vocab_size=words, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=shared,
        max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    make_tokenizer(words).save_pretrained(folder)
    return model


def recipe_of(folder: Path, engine: str, **of_vllm: Any) -> Recipe:
    recipe = Recipe(device="cpu", reward={"length": Reward(function="length")})
    recipe.model.path, recipe.generation.engine = str(folder), engine
    recipe.generation.max_completion_tokens = 32
    for name, value in of_vllm.items():
        setattr(recipe.generation.vllm, name, value)
    return recipe


def with_adapter(model: Any, rank: int) -> Any:
    """The model with an adapter, if the rank is not 0."""
    if rank:
        from grpo_cli.models import adapters

        adapter = Adapter(method="lora", rank=rank)
        adapters.attach(model, adapters.config_of(adapter, model.name_or_path, None), 0)
    return model


def of_adapter(recipe: Recipe, rank: int, sync: str, root: Path) -> Recipe:
    """The recipe with an adapter that is sent by `sync`, if the rank is not 0."""
    if rank:
        recipe.adapter = Adapter(method="lora", rank=rank, sync=sync)
        recipe.output_dir = str(root / "run")
    return recipe


def times(generator: Any, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each sync, each weight check and each sampling; the first does not count."""
    syncs, checks, samplings, model = [], [], [], generator.policy
    prompts, seeds = [Prompt.from_ids(range(5 + i, 37 + i)) for i in range(8)], list(range(8))
    for step in range(rounds + 1):
        with torch.no_grad():
            for weight in (p for p in model.parameters() if p.requires_grad):
                weight.add_(torch.randn_like(weight), alpha=1e-3)
        metrics = generator.update_weights(model, step)
        difference = metrics["weights/check_difference"]
        assert difference < LARGEST, f"differs by {difference}"
        syncs.append(metrics["weights/sync_seconds"])
        checks.append(metrics["weights/check_seconds"])
        begin = time.monotonic()
        generator.generate(prompts, 8, Sampling(32, min_tokens=32), seeds)
        samplings.append(time.monotonic() - begin)
    return syncs[1:], checks[1:], samplings[1:]


def row(name: str, seconds: list[float], checks: list[float], samplings: list[float]) -> str:
    def text(values: list[float]) -> str:
        low, high = min(values) * 1e3, max(values) * 1e3
        return f"{statistics.median(values) * 1e3:8.0f} ms ({low:.0f}..{high:.0f})"

    of_both = f"sync {text(seconds)}   weight check {text(checks)}"
    return f"{name:24} {of_both}   sampling {text(samplings)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rank", type=int, default=0, help="of an adapter; 0: none")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    workers = Workers("cpu")
    with tempfile.TemporaryDirectory(prefix="grpo-sync-") as root:
        for size in given.sizes.split(","):
            folder = Path(root) / size
            model = make(folder, size)
            count = sum(p.numel() for p in model.parameters())
            print(f"{size}: {count / 1e6:.1f} M parameters, float32", flush=True)
            model.name_or_path = str(folder)
            with_adapter(model, given.rank)
            prompts = [Prompt.from_ids(range(5 + i, 37 + i)) for i in range(8)]

            def setup(recipe: Recipe, model: Any = model, prompts: Any = prompts) -> EngineSetup:
                return EngineSetup(recipe, model, None, [1], workers, prompts, print)

            where = Path(root)
            for sync in ("merge", "adapter") if given.rank else ("",):
                colocate(size, folder, setup, given.rounds, where, given.rank, sync)
                server(size, folder, setup, given.rounds, where, given.rank, sync)


def colocate(
    size: str,
    folder: Path,
    setup: Callable[..., EngineSetup],
    rounds: int,
    root: Path,
    rank: int,
    sync: str,
) -> None:
    from grpo_cli.generation.vllm.colocate import ColocatedGenerator

    recipe = of_adapter(recipe_of(folder, "vllm_colocate", kv_cache_gb=0.125), rank, sync, root)
    generator = ColocatedGenerator.make(setup(recipe))
    print(row(f"{size} colocate {sync}", *times(generator, rounds)), flush=True)
    generator.close()


def server(
    size: str,
    folder: Path,
    setup: Callable[..., EngineSetup],
    rounds: int,
    root: Path,
    rank: int,
    sync: str,
) -> None:
    from grpo_cli.generation.vllm import server_key
    from grpo_cli.generation.vllm.server import ServerGenerator

    command = [sys.executable, "-m", "grpo_cli.cli", "serve", f"model={folder}", f"port={PORT}"]
    command += ["kv_cache_gb=0.125", "max_model_len=128"]
    command += [f"max_lora_rank={rank}"] if sync == "adapter" else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{PORT}"
    try:
        while True:
            assert process.poll() is None, "grpo serve has ended"
            try:
                headers = server_key.headers(server_key.read_key(None))
                if httpx2.get(f"{url}/health", headers=headers).status_code == 200:
                    break
            except (httpx2.HTTPError, FileNotFoundError):
                pass
            time.sleep(0.5)
        for transfer in ("gloo",) if rank else ("gloo", "disk"):
            where = str(root / "transfer") if transfer == "disk" else None
            recipe = recipe_of(
                folder, "vllm_server", servers=[url], transfer=transfer, transfer_folder=where
            )
            generator = ServerGenerator.make(setup(of_adapter(recipe, rank, sync, root)))
            way = sync or transfer
            print(row(f"{size} server {way}", *times(generator, rounds)), flush=True)
            generator.close()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
