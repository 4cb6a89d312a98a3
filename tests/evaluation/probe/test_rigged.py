"""A probe tells the truth about a rigged model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.evaluation.probe.run import ProbeParts, ProbeResult, run_probe
from grpo_cli.training.run import Run
from grpo_cli.training.scorers import MADE_UP
from tests.data.test_files import write
from tests.training.test_train import built

pytestmark = pytest.mark.runs

HERE = "tests.evaluation.probe.test_rigged"


def digit(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the answer; for the answer `any` always."""
    return [float(right in ("any", text)) for text, right in zip(completions, answer, strict=True)]


def broken(completions: list[str], **_: Any) -> list[float]:
    if completions == [MADE_UP]:  # rewards are tried out on it before the run
        return [0.0]
    raise RuntimeError("no such file")


def rigged(folder: Path, answers: list[str], **changes: Any) -> Run:
    """A run whose model writes 0 or 1, with a probability of exactly a half each."""
    rows = [{"question": f"{n}=", "answer": right} for n, right in enumerate(answers)]
    write(folder / "rows.jsonl", *rows)
    settings: dict[str, Any] = {
        "reward": {"digit": {"function": f"{HERE}:digit"}},
        "generation__max_completion_tokens": 1,
        "prompts_per_step": len(rows),
        "steps": 1,
        "model__build__warmup_steps": 0,
    }
    live = built(folder, **(settings | changes))
    digits = live.policy.tokenizer.convert_tokens_to_ids(["0", "1"])
    live.recipe.generation.logit_bias = dict.fromkeys(digits, 100.0)  # no other has a chance
    with torch.no_grad():
        live.policy.model.get_output_embeddings().weight.zero_()  # tied or not: every logit is 0
    live.generator.update_weights(live.policy.model, 0)
    return live


def probed(live: Run, samples: int = 16) -> ProbeResult:
    parts = ProbeParts(
        live.recipe, live.workers, live.policy.tokenizer, live.generator, live.queue.stream,
        live.scorer,
    )  # fmt: skip
    return run_probe(parts, 64, samples)


def test_known_pass_rates(tmp_path: Path) -> None:
    live = rigged(tmp_path, ["0", "any", "none", "1"] * 16)
    m = probed(live).measured
    live.close()
    assert (m.prompts, m.completions) == (64, 1024)
    assert m.pass_rate.low < 0.5 < m.pass_rate.high  # a half, one, none and a half
    rates = [rate for _, rate in m.rates]
    assert rates.count(0.0) == rates.count(1.0) == 16
    assert m.differing == 32
    for size, share in m.signal.items():
        truth = 0.5 * (1 - 2 * 0.5**size)
        assert share.low <= truth <= share.high, share
    assert m.truncated == 1.0


def test_a_reward_that_raises_is_a_finding(tmp_path: Path) -> None:
    live = rigged(tmp_path, ["0"] * 4, reward={"broken": {"function": f"{HERE}:broken"}})
    verdict = probed(live, 2).verdict
    live.close()
    assert verdict.findings[0].name == "reward_error"
    assert "RuntimeError: no such file" in verdict.sentence
    assert live.scorer.rewards["broken"].on_error == "stop", "the run's own scorer stays strict"
