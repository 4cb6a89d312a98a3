"""TRL 1.16.0's own first batch of completions: the same loss and norm of the gradient."""

import json
from pathlib import Path
from typing import Any

import pytest

import grpo_cli
from tests import trl_batch

pytest.importorskip("peft")


@pytest.mark.parametrize(
    "name",
    [pytest.param("tiny", marks=pytest.mark.runs), pytest.param("real", marks=pytest.mark.real)],
)
def test_loss_and_gradient_norm_are_those_of_trl(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = json.loads((trl_batch.GOLDENS / f"trl_batch_{name}.json").read_text())
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trl_batch.ROWS))
    model, adapter = trl_batch.make(name, tmp_path)

    def stored(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        encoded, ids = [trainer._encoded(prompt).ids for prompt in prompts], batch["completion_ids"]
        assert encoded[:: trl_batch.GENERATIONS] == batch["prompt_ids"]
        logprobs = [[0.0] * len(row) for row in ids]
        return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": logprobs}

    monkeypatch.setattr(trl_batch, "stored", stored, raising=False)
    settings: dict[str, Any] = {
        "model.path": model, "adapter": "lora", "adapter.path": adapter, "loss": "bnpo",
        "dataset.train": "rows.jsonl", "dataset.shuffle": False, "steps": 1, "device": "cpu",
        "rollout": "tests.trl_batch:stored", "prompts_per_step": len(trl_batch.ROWS),
        "generation.num_generations": trl_batch.GENERATIONS, "generation.max_logp_difference": None,
        "generation.max_completion_tokens": trl_batch.LIMIT, "log.report": False,
        "generation.temperature": trl_batch.TEMPERATURE, "reward.letters.weight": 0.5,
        "checkpoint.every": 0,
    }  # fmt: skip
    rewards = {"letters": trl_batch.letters, "near": trl_batch.near}
    grpo_cli.train("chat", rewards=rewards, **settings)
    (line,) = map(json.loads, Path("outputs/chat/metrics.jsonl").read_text().splitlines())
    for key in ("loss", "grad_norm"):
        assert line[key] == pytest.approx(batch[key], abs=1e-4, rel=1e-4), key
