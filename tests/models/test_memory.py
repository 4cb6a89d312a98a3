"""Free memory to tokens of a micro-batch, in literal numbers; and what is done when it runs out."""

import os
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, first_line
from grpo_cli.models import memory
from grpo_cli.models.micro_batches import MicroBatchBudget
from tests.training.test_train import evens

CPU = torch.device("cpu")  # not conftest's: other processes import this file for its reward
BACKWARD = Workers.backward

MB = 10**6
# What the CPU's allocator says, with torch 2.9.
CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 140737488355328 bytes. Error code 12 (Cannot allocate memory)"
)


def has_free(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: number)


@pytest.mark.parametrize(
    ("free", "per_token", "expected"),
    [
        (10 * MB, 4000, 512),  # 0.4 · 10 MB / 4 kB = 1000
        (10_240_000, 4000, 1024),  # 1024
        (-5 * MB, 4000, 256),  # the smallest
        (10**12, 4000, 2048),  # the largest of a CPU
        (10**12, 2**20, 1024),  # at most 1.5 GiB of activations
        (10_240_000, 0.0, 2048),  # a model that keeps nothing
    ],
)
def test_tokens_that_fit(
    monkeypatch: pytest.MonkeyPatch, free: int, per_token: float, expected: int
) -> None:
    has_free(monkeypatch, free)
    assert memory.tokens_that_fit(CPU, per_token, state_to_come=0) == expected


def test_memory_of_an_empty_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000, bias=False)  # 4 MB, and a gradient and two moments are 12
    frozen = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    both = nn.Sequential(model, frozen)
    has_free(monkeypatch, 22_240_000)
    come = memory.bytes_to_come(torch.optim.AdamW(both.parameters()), CPU)
    assert come == 12_000_000
    assert memory.tokens_that_fit(CPU, 4000, state_to_come=come) == 1024  # of 10.24 MB: 1024
    has_free(monkeypatch, 11 * MB)  # less than nothing is left
    assert memory.tokens_that_fit(CPU, 4000, state_to_come=come) == 256


def test_cache_tokens_that_fit(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    # Keys and values, 2 layers, 2 heads of 8, float32: 256 bytes a token.
    for free, expected in [
        (640 * 7, 4),  # 0.4 · 4,480 / 256 = 7
        (640 * 8, 8),
        (640 * 9, 8),
        (0, 1),
    ]:
        has_free(monkeypatch, free)
        assert memory.cache_tokens_that_fit(model) == expected, free
    has_free(monkeypatch, 640 * 8)
    assert memory.cache_tokens_that_fit(model.double()) == 4


def cgroup(
    monkeypatch: pytest.MonkeyPatch, folder: Path, available: int, files: dict[str, str]
) -> None:
    """A machine with so much memory and these files in its cgroup."""
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(memory, "CGROUP", folder)
    fake = types.SimpleNamespace(available=available, total=2 * available)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: fake)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


LIMIT = {
    "memory.max": "8000\n",
    "memory.current": "5000\n",
    "memory.stat": "anon 3000\ninactive_file 1500\nactive_file 400\n",
}


@pytest.mark.parametrize(
    ("available", "files", "expected"),
    [
        (9000, LIMIT, 4500),  # 8000 − (5000 − 1500)
        (3000, LIMIT, 3000),  # the machine has less than the container may take
        (9000, LIMIT | {"memory.max": "max\n"}, 9000),
        (9000, {}, 9000),  # no such files: another system
    ],
)
def test_free_memory_of_a_container(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    available: int,
    files: dict[str, str],
    expected: int,
) -> None:
    cgroup(monkeypatch, tmp_path, available, files)
    assert memory.free_memory(CPU) == expected


def test_processes_share_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cgroup(monkeypatch, tmp_path, 9001, {})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (memory.free_memory(CPU), memory.total_memory.__wrapped__()) == (2250, 4500)
    cgroup(monkeypatch, tmp_path, 9001, LIMIT)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (memory.free_memory(CPU), memory.total_memory.__wrapped__()) == (1125, 2000)


def test_oom_halves_the_budget() -> None:
    said: list[str] = []
    tried: list[int] = []
    undone: list[int] = []

    def work(tokens: int) -> str:
        tried.append(tokens)
        if tokens > 30:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return f"done with {tokens}"

    own = MicroBatchBudget(100, said.append)
    assert own.with_oom_retry(work, [10] * 100, lambda: undone.append(len(tried))) == "done with 25"
    assert tried == [100, 50, 25]
    assert undone == [1, 2], "before each new attempt"
    assert own.tokens == 25
    assert ["50 tokens" in said[0], "25 tokens" in said[1], len(said)] == [True, True, 2]
    own.with_oom_retry(work, [10] * 100, lambda: undone.append(0))
    assert tried[3:] == [25]
    assert len(said) == len(undone) == 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it."),
        RuntimeError(CPU_ALLOCATOR),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[:12]}",
)
def test_out_of_memory_errors(error: Exception) -> None:
    tried: list[int] = []

    def work(tokens: int) -> None:
        tried.append(tokens)
        raise error

    with pytest.raises(TrainingError) as failed:
        MicroBatchBudget(64, str).with_oom_retry(work, [7, 12, 40], lambda: None)
    assert tried == [64, 29], "no attempt beyond one row at a time"
    reason = first_line(error)
    assert "out of memory with a completion of 40 tokens, prompt included" in str(failed.value)
    assert str(failed.value).endswith(f"({reason})")
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of")]
)
def test_other_errors_are_not_swallowed(error: Exception) -> None:
    tried: list[int] = []

    def work(tokens: int) -> None:
        tried.append(tokens)
        raise error

    def undo() -> None:
        raise AssertionError("nothing to take back")

    own = MicroBatchBudget(100, lambda text: pytest.fail(text))
    with pytest.raises(type(error), match=str(error)):
        own.with_oom_retry(work, [10], undo)
    assert (tried, own.tokens) == ([100], 100)


def test_failed_attempt_frees_its_tensors() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def work(tokens: int) -> None:
        seen.append(sum(ref() is not None for ref in alive))
        activation = torch.ones(tokens, requires_grad=True) * 2
        alive.append(weakref.ref(activation))
        if tokens > 30:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    MicroBatchBudget(100, str).with_oom_retry(work, [1] * 1000, lambda: None)
    assert seen == [0, 0, 0]


def evens_and_a_failure(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward for test_out_of_memory.py: the second process's third backward after it fails."""
    if os.environ.get("RANK") == "1" and Workers.backward is BACKWARD:
        calls: list[torch.Tensor] = []

        def failing(workers: Workers, loss: torch.Tensor) -> None:
            BACKWARD(workers, loss)
            calls.append(loss)
            if len(calls) == 3:
                raise RuntimeError(CPU_ALLOCATOR)

        Workers.backward = failing  # type: ignore[method-assign]
    return evens(completion_ids)
