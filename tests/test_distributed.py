"""Two and three gloo processes are one: same losses, same weights, whatever the split."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.test_train import ROWS

SETTINGS = [
    "device=cpu",
    "steps=5",
    "prompts_per_step=5",  # not a multiple of 2 or 3
    "model.build.hidden_size=32",
    "model.build.intermediate_size=64",
    "model.build.num_layers=2",
    "model.build.num_heads=2",
    "model.build.num_kv_heads=1",
    "model.build.warmup_steps=5",
    "dataset.solution='{answer}'",
    "generation.num_generations=4",
    "generation.max_completion_tokens=6",
    "optimizer.learning_rate=1e-3",
    "update.tokens_per_micro_batch=40",
    "log.plots=false",
    "log.completions_every=0",
    "reward=[]",
    "+reward.evens.function=tests.test_train:evens",
]


def launch(folder: Path, processes: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    grpo = [sys.executable, "-m", "grpo_cli", "train", f"output_dir={folder / str(processes)}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command = [*torchrun, f"--nproc-per-node={processes}", *grpo] if processes > 1 else grpo
    root = Path(__file__).parent.parent
    return subprocess.run(
        [*command, f"dataset.train={data}", f"dataset.eval={data}", *SETTINGS, *overrides],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )


def results(folder: Path, processes: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    run = folder / str(processes)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines, load_file(run / "checkpoints" / "step-5" / "model.safetensors")


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (2, ["loss=dapo"]),
        (3, ["loss=grpo", "update.minibatches=2"]),
        (2, ["prompts_per_step=1", "eval.at_ends=false", "loss=dapo"]),  # one has nothing to do
        (
            3,
            [
                "generation.dynamic_sampling=true",
                "reward.evens.function=tests.test_train:is_longest",
                "loss=clip_cov",
                "loss.cov_low=0",
                "loss.cov_share=0.2",
                "loss.top_entropy=0.5",
                "loss.beta=0.05",
                "loss.kl_target=1e-3",
                "loss.entropy_coef=0.01",
            ],
        ),
    ],
    ids=["two", "three-off-policy-kl", "an-idle-process", "three-dynamic-sampling"],
)
def test_processes_do_not_change_the_run(
    tmp_path: Path, processes: int, overrides: list[str]
) -> None:
    for number in (1, processes):
        done = launch(tmp_path, number, *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    one, weights_of_one = results(tmp_path, 1)
    many, weights_of_many = results(tmp_path, processes)
    moved = 0.0
    for a, b in zip(one, many, strict=True):
        for key in ("loss", "grad_norm", "reward", "entropy", "kl", "num_tokens", "beta"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-7), (a["step"], key)
        moved += abs(a["grad_norm"])
    assert moved > 0, "nothing was learnt, so nothing was compared"
    for name, tensor in weights_of_one.items():
        torch.testing.assert_close(weights_of_many[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_reward_that_raises_on_one_process_ends_all(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, "reward.evens.function=tests.test_distributed:raises_on_rank_1")
    assert done.returncode == 1
    assert "reward 'evens' raised RuntimeError: only here" in done.stdout + done.stderr


def raises_on_rank_1(completions: list[str], **_: Any) -> list[float]:
    if os.environ["RANK"] == "1":
        raise RuntimeError("only here")
    return [1.0] * len(completions)
