"""The probe before the first step: it says the truth about a rigged model, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli import train
from grpo_cli.errors import CannotLearn
from grpo_cli.evaluation.probe.run import Policy, ProbeResult, run_probe
from grpo_cli.training import probe
from grpo_cli.training.prepare import MADE_UP
from grpo_cli.training.run import Run
from tests.training.test_train import built, metrics, trained, weights

pytestmark = pytest.mark.runs

HERE = "tests.training.test_probe"


def digit(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the answer; for the answer `any` always."""
    return [float(right in ("any", text)) for text, right in zip(completions, answer, strict=True)]


def noisy(completions: list[str], **_: Any) -> list[float]:
    """Random numbers of the global stream."""
    return [torch.rand(()).item() for _ in completions]


def broken(completions: list[str], **_: Any) -> list[float]:
    if completions == [MADE_UP]:  # rewards are tried out on it before the run
        return [0.0]
    raise RuntimeError("no such file")


def rigged(folder: Path, answers: list[str], **changes: Any) -> Run:
    """A run whose model writes 0 or 1, with a probability of exactly a half each."""
    folder.mkdir(exist_ok=True)
    rows = [{"question": f"{n}=", "answer": right} for n, right in enumerate(answers)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    policy = Policy(
        live.recipe, live.workers, live.policy.tokenizer, probe.own_logprobs(live), live.generator,
        live.queue.stream, live.scorer,
    )  # fmt: skip
    return run_probe(policy, 64, samples)


def test_a_model_whose_rates_are_known(tmp_path: Path) -> None:
    live = rigged(tmp_path, ["0", "any", "none", "1"] * 16)
    m = probed(live).measured
    live.close()
    assert (m.prompts, m.completions) == (64, 1024)
    assert m.pass_rate is not None
    assert m.pass_rate.low < 0.5 < m.pass_rate.high  # a half, one, none and a half
    rates = [rate for _, rate in m.rates]
    assert rates.count(0.0) == rates.count(1.0) == 16
    assert m.differing == 32
    for share in m.signal:
        truth = 0.5 * (1 - 2 * 0.5**share.size)
        assert share.low <= truth <= share.high, share
    assert m.truncated == 1.0
    assert m.mismatch is not None
    # The trainer's distribution is over all tokens, the sampler's over two.
    assert m.mismatch.mean == pytest.approx(
        torch.tensor(len(live.policy.tokenizer) / 2).log().item(), rel=1e-4
    )


@pytest.mark.parametrize(("answer", "rate"), [("none", 0.0), ("any", 1.0)])
def test_nothing_to_learn(tmp_path: Path, answer: str, rate: float) -> None:
    live = rigged(tmp_path, [answer] * 64)
    result = probed(live)
    live.close()
    assert result.measured.pass_rate is not None
    assert result.measured.pass_rate.value == rate
    assert not result.verdict.can_learn
    assert result.measured.signal[2].share == 0.0
    assert result.measured.examples[0].rewards == {"digit": rate}


@pytest.mark.parametrize(
    "reward", [{"evens": {"function": "tests.training.test_train:evens"}},
               {"noisy": {"function": f"{HERE}:noisy"}}]
)  # fmt: skip
def test_weights_are_the_same_to_the_last_bit(tmp_path: Path, reward: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"reward": reward, "steps": 2, "dataset__eval": None}
    plain = trained(tmp_path / "plain", **changes)
    before = trained(tmp_path / "probed", **changes, probe=True)
    assert torch.equal(weights(plain), weights(before))
    same = ("reward", "loss", "grad_norm", "completions/mean_length")
    for a, b in zip(metrics(plain), metrics(before), strict=True):
        assert [a[key] for key in same] == [b[key] for key in same]
    assert not (plain.folder / "probe.json").exists()
    found = json.loads((before.folder / "probe.json").read_text())
    assert found["can_learn"]
    assert (found["prompts"], found["samples"]) == (12, 8)  # all that two steps train on
    assert found["rewards"].keys() == reward.keys()


def same_weights(folder: Path, **changes: Any) -> dict[str, Any]:
    """Trains with and without a probe, compares the weights, and returns probe.json."""
    plain = trained(folder / "plain", steps=2, dataset__eval=None, **changes)
    before = trained(folder / "probed", steps=2, dataset__eval=None, **changes, probe=True)
    assert torch.equal(weights(plain), weights(before))
    found: dict[str, Any] = json.loads((before.folder / "probe.json").read_text())
    assert found["mismatch"]["mean"] < 1e-4
    return found


def test_weights_are_the_same_with_an_environment(tmp_path: Path) -> None:
    found = same_weights(
        tmp_path,
        environment={"path": "grpo_cli.environments.examples:GuessNumber"},
        episode={"max_turns": 3, "turn_tokens": 4},
        reward={"environment": {}},
        dataset__chat=True,
        dataset__solution=None,
        dataset__max_prompt_tokens=128,
        generation__max_completion_tokens=24,
        model__build__warmup_steps=0,
    )
    assert found["stop_reasons"]["turn_tokens"] > 0.5
    assert found["findings"][0]["settings"] == ["episode.turn_tokens=16"]


def test_a_run_that_cannot_learn_is_stopped_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"reward": {"digit": {"function": f"{HERE}:digit"}}, "dataset__eval": None}
    live = built(tmp_path, **changes, probe="stop", generation__temperature=1e-3)
    with pytest.raises(CannotLearn, match=r"as it stands \(identical\), and probe = stop"):
        train.train(live)
    live.close()
    assert not json.loads((live.folder / "probe.json").read_text())["can_learn"]
    assert live.state.step == 0
    said = capsys.readouterr().out
    assert "with generation.temperature = 0.001" in said
    assert "Change: generation.temperature=1" in said


def test_a_reward_that_raises_is_a_finding(tmp_path: Path) -> None:
    live = rigged(tmp_path, ["0"] * 4, reward={"broken": {"function": f"{HERE}:broken"}})
    verdict = probed(live, 2).verdict
    live.close()
    assert verdict.findings[0].name == "reward_error"
    assert "RuntimeError: no such file" in verdict.sentence
    assert live.scorer.rewards["broken"].on_error == "stop", "the run's own scorer stays strict"
