"""A real chat model, whose rounding is larger than a random model's, sampled from by real vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import programs
from tests.vllm_engines import grpo_train, run_metrics

sys.path.insert(0, str(programs.ROOT / "scripts"))
import real_model

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


def test_vllm_samples_from_a_real_model_as_it_is_trained(tmp_path: Path) -> None:
    grpo_train(
        "recipe=chat_sums", f"model.path={real_model.folder()}", "device=cpu",
        "generation=vllm_colocate", "steps=2", "prompts_per_step=2", "generation.num_generations=4",
        "generation.max_completion_tokens=16", "checkpoint.every=0", f"output_dir={tmp_path}",
    )  # fmt: skip
    for metrics in run_metrics(tmp_path):
        assert metrics["weights/check_difference"] < 1e-3
