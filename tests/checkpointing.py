"""Saves and loads under several strategies; run by torchrun, for tests/checkpoints."""

import copy
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_cli.checkpoints import checkpointer
from grpo_cli.checkpoints.checkpointer import Checkpointer, Parts
from grpo_cli.distributed.workers import Workers, exit_process
from grpo_cli.models import tiny
from tests.conftest import BUILD

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
TOKENIZER = tiny.make_tokenizer(BUILD, [])


def make_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = tiny.make_model(BUILD, TOKENIZER)
    model.few = torch.nn.Parameter(torch.randn(2, 3))  # fewer rows than processes; never trained
    return model


def make_parts(model: PreTrainedModel, strategy: str, size: int) -> Parts:
    reference = copy.deepcopy(model).requires_grad_(False)
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (size,))
        for m in (model, reference):
            for layer in m.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(m, mesh=mesh, reshard_after_forward=False)
    return Parts(model, torch.optim.AdamW(model.parameters(), lr=1e-2), reference)


def train(parts: Parts, steps: int) -> None:
    """On the same batch everywhere: the mean over processes, which FSDP2 takes, is their own."""
    for _ in range(steps):
        parts.model(IDS, labels=IDS).loss.backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    with torch.no_grad():
        for p in parts.reference.parameters():
            p.mul_(0.5)
        parts.model(IDS)  # the root's parameters are left gathered


def whole(parts: Parts) -> dict[str, torch.Tensor]:
    return {
        name: t.full_tensor() if isinstance(t, DTensor) else t.clone()
        for name, t in parts.tensors().items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def save(saver: Checkpointer, path: Path, parts: Parts, **settings: Any) -> None:
    saver.save(path, parts, {"by": path.name}, "steps: 1\n", TOKENIZER, **settings)


def two_processes(folder: Path, workers: Workers) -> None:
    """Saves with each of two strategies what the other then loads, and fails on one process."""
    lines: list[str] = []
    saver = Checkpointer(workers, lines.append)
    replicated = make_parts(make_model(0), "ddp", 2)
    train(replicated, 2)
    expected = whole(replicated)
    save(saver, folder / "ddp", replicated, with_model=True)
    train(replicated, 1)  # while it is written
    assert saver.wait() is None, saver.error
    if workers.is_main:
        torch.save(expected, folder / "expected.pt")

    sharded = make_parts(make_model(1), "fsdp2", 2)
    checkpointer.load(folder / "ddp", sharded)
    assert same(whole(sharded), expected), "fsdp2 has not loaded what ddp saved"
    for plain in (True, False):
        save(saver, folder / f"fsdp2-{plain}", sharded, with_model=plain)
        assert saver.wait() is None, saver.error
    again = make_parts(make_model(2), "ddp", 2)
    checkpointer.load(folder / "fsdp2-True", again)
    assert same(whole(again), expected), "ddp has not loaded what fsdp2 saved"
    train(sharded, 1)  # continues as the first did
    gathered = whole(sharded)
    for name, tensor in whole(replicated).items():
        torch.testing.assert_close(gathered[name], tensor, rtol=1e-4, atol=1e-5)

    # Of two processes one may write no file of this size.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if workers.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    save(saver, folder / "failed", replicated, with_model=True)
    error = saver.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error is not None, "a process could not write its shards"
    assert "checkpoint failed could not be written: process 1: File too large" in error, error
    assert lines == ([f"{error}; the run continues"] if workers.is_main else []), lines
    dist.barrier()
    assert not list(folder.glob("failed*")), "a failed checkpoint leaves nothing"
    save(saver, folder / "after", replicated, with_model=False)
    assert saver.wait() is None, "the next one is written as if nothing had been"

    # Damage that the second process finds in its share of the files.
    if workers.is_main:
        damaged = folder / "after" / "training" / "shards" / "__1_0.distcp"
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    lines.clear()
    found = checkpointer.choose([folder / "after", folder / "fsdp2-True"], workers, lines.append)
    assert found == folder / "fsdp2-True", found
    assert len(lines) == workers.is_main, lines
    assert all("__1_0.distcp: its contents have changed" in line for line in lines), lines


def three_processes(folder: Path, workers: Workers) -> None:
    """Loads what two have saved, with more processes than some tensors have rows, and saves it."""
    expected = torch.load(folder / "expected.pt", weights_only=True)
    saver = Checkpointer(workers, print)
    for name in ("ddp", "fsdp2-False"):
        parts = make_parts(make_model(3), "fsdp2", 3)
        checkpointer.load(folder / name, parts)
        assert same(whole(parts), expected), f"{name} is loaded otherwise by three processes"
    save(saver, folder / "three", parts, with_model=True)
    assert saver.wait() is None, saver.error


if __name__ == "__main__":
    workers = Workers("cpu")
    {2: two_processes, 3: three_processes}[workers.size](Path(sys.argv[1]), workers)
    workers.close()
    exit_process(0)
