"""Two and three gloo processes are one: same losses, same weights, whatever the split.

Each with the whole model (ddp), or with a share of it (fsdp2).
"""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from grpo_cli.checkpoints import checkpointer
from grpo_cli.distributed.settings import Distributed
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError
from tests import programs
from tests.composed import SMALL
from tests.training.test_train import ROWS

SETTINGS = [
    *SMALL,
    "steps=5",
    "log.completions_every=2",
    "+reward.evens.function=tests.training.test_train:evens",
]


def launch(
    folder: Path, processes: int, *overrides: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    grpo = ["-m", "grpo_cli", "train", "recipe=arithmetic_tiny"]
    grpo += [f"output_dir={folder / str(processes)}"]
    grpo += [f"dataset.train={data}", f"dataset.eval={data}", *SETTINGS, *overrides]
    done = programs.run(programs.started(processes, *grpo), **(environment or {}))
    for stacks in sorted((folder / str(processes)).glob("logs/*.stacks.txt")):
        done.stderr += f"{stacks.name}:\n{stacks.read_text()}"  # of a process that crashed
    return done


def results(folder: Path, processes: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    run = folder / str(processes)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines, load_file(run / "checkpoints" / "step-5" / "model.safetensors")


# One process has nothing to do.
IDLE = ["prompts_per_step=1", "dataset.eval=null", "eval.every=0"]
COVARIANCE = ["loss=clip_cov", "loss.args.cov_low=0", "loss.args.cov_share=0.2"]
DYNAMIC_SAMPLING = [
    "generation.dynamic_sampling=true",
    "reward.evens.function=tests.training.test_train:is_longest",
    *COVARIANCE,
    "loss.top_entropy=0.5",
    "loss.beta=0.05",
    "loss.kl_target=1e-3",
    "loss.entropy_coef=0.01",
]


RUNS: dict[str, tuple[int, list[str]]] = {
    "two": (2, ["loss=dapo"]),
    "three, off-policy": (3, ["loss=grpo", "update.minibatches=2"]),
    "idle": (2, [*IDLE, *COVARIANCE, "loss.beta=0.1"]),
    "three, dynamic sampling": (3, DYNAMIC_SAMPLING),
    "shares": (
        3,
        [
            "distributed=fsdp2",
            "loss=grpo",
            "update.minibatches=2",
            "loss.beta=0.1",
            "loss.reference_every=2",
            "loss.reference_alpha=0.5",
            "model.gradient_checkpointing=true",
            "checkpoint.every=2",
        ],
    ),
    "shares, idle": (
        2,
        ["distributed=fsdp2", "distributed.reshard_after_forward=false", "loss=dapo", IDLE[0]],
    ),
    "shares, dynamic sampling": (2, ["distributed=fsdp2", *DYNAMIC_SAMPLING]),
}


@pytest.mark.programs
@pytest.mark.parametrize(
    "name", ["two", *(pytest.param(n, marks=pytest.mark.slow) for n in [*RUNS][1:])]
)
def test_processes_do_not_change_the_run(tmp_path: Path, name: str) -> None:
    processes, words = RUNS[name]
    alone = [word for word in words if not word.startswith("distributed")]
    for number, own in ((1, alone), (processes, words)):
        done = launch(tmp_path, number, *own)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path, processes)
    # A checkpoint is a model folder, and does not tell how the model was divided.
    for file in ("config.json", "generation_config.json"):
        one, many = ((tmp_path / str(n) / "checkpoints/step-5" / file) for n in (1, processes))
        assert many.read_text() == one.read_text(), file


def assert_same_run(folder: Path, processes: int) -> None:
    """The run of so many processes in a folder is that of one."""
    one, weights_of_one = results(folder, 1)
    many, weights_of_many = results(folder, processes)
    moved = 0.0
    for a, b in zip(one, many, strict=True):
        for key in ("loss", "grad_norm", "reward", "entropy", "kl", "num_tokens", "beta"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-7), (a["step"], key)
        moved += abs(a["grad_norm"])
    assert moved > 0, "nothing was learnt, so nothing was compared"
    for name, tensor in weights_of_one.items():
        torch.testing.assert_close(weights_of_many[name], tensor, rtol=1e-5, atol=1e-5)
    files = sorted((folder / "1" / "completions").glob("*.parquet"))
    assert [file.stem for file in files] == ["step-1", "step-2", "step-4"]
    for file in files:
        of_one, of_many = (
            pq.read_table(folder / str(n) / "completions" / file.name).to_pylist()
            for n in (1, processes)
        )
        for row in of_one:
            for key in ("advantage", "sampling_logprobs"):
                row[key] = pytest.approx(row[key], rel=1e-4, abs=1e-5)
        assert of_many == of_one, file.name


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_process_ends_all(tmp_path: Path, rank: int) -> None:
    done = launch(
        tmp_path,
        2,
        "distributed=fsdp2",
        "reward.evens.function=tests.distributed.test_workers:and_then_no_memory",
        environment={"NO_MEMORY_ON": str(rank)},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout + done.stderr
    (line,) = [line for line in said.splitlines() if line.startswith("grpo: ")]
    assert line.startswith(f"grpo: process {rank} on "), line
    assert "out of memory with micro-batches of 40 tokens; processes that share" in line
    assert "resume=auto update.tokens_per_micro_batch=20" in line
    assert "grpo_cli/training/loop.py" not in said, "a traceback of ours"


def and_then_no_memory(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """From now on one process has no memory for a backward."""
    if os.environ["RANK"] == os.environ["NO_MEMORY_ON"]:
        from grpo_cli.distributed.workers import Workers

        def fail(self: Workers, loss: torch.Tensor) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        Workers.backward = fail  # type: ignore[method-assign]
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


@pytest.mark.slow
def test_two_processes_are_refused_where_there_is_to_be_one(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, "distributed=single")
    said = done.stdout + done.stderr
    lines = {line for line in said.splitlines() if line.startswith("grpo: ")}
    assert lines == {
        "grpo: distributed = single: torchrun has started 2 processes; use distributed=ddp or "
        "distributed=fsdp2."
    }
    assert "exitcode  : 2" in said
    assert "grpo_cli/distributed/workers.py" not in said, "a traceback of ours"
    assert not (tmp_path / "2" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_failure_does_not_cost_a_checkpoint_that_is_nearly_written(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        2,
        "reward.evens.function=tests.distributed.test_workers:fails_while_saving",
        "checkpoint.every=1",
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "reward 'evens' raised RuntimeError: while it is being written" in said
    assert [p.name for p in (tmp_path / "2" / "checkpoints").iterdir()] == ["step-1"], said


def fails_while_saving(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """The first checkpoint takes 11 s to get its name; in the second step one process fails."""
    if trainer_state.global_step == 0:
        checkpointer.give_name = slowly_given
    elif os.environ["RANK"] == "1":
        raise RuntimeError("while it is being written")
    return [float(len(c)) for c in completions]


def slowly_given(partial: Path, path: Path) -> None:
    time.sleep(11)
    GIVE_NAME(partial, path)


GIVE_NAME = checkpointer.give_name


@pytest.mark.slow
def test_one_that_leaves_while_the_others_wait_for_it(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        2,
        "reward.evens.function=tests.distributed.test_workers:told_to_end",
        "distributed.stall_minutes=0.3",
        environment={"GRPO_GRACE": "0", "GRPO_REQUEUE_FILE": str(tmp_path / "again")},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "stopped in step 2" in said


async def told_to_end(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """In step 2 one process waits for its rewards, the other one for that process."""
    if os.environ["RANK"] == "0" and trainer_state.global_step == 1:
        if not TOLD:
            TOLD.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(5)
    return [float(len(c)) for c in completions]


TOLD: list[bool] = []


def test_offload_of_shards_takes_several_processes() -> None:
    config = Distributed(strategy="fsdp2", offload="all")
    with pytest.raises(UserError, match=r"offload = all: nothing is sharded in one process"):
        Workers("cpu", config=config)


def test_another_precision_in_one_process() -> None:
    for name, dtype in (("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with Workers("cpu", name).autocast():
            assert torch.is_autocast_enabled("cpu") == (dtype is not None)
            assert dtype in (None, torch.get_autocast_dtype("cpu"))
