"""The loop on a tiny model: it learns, its gradient ignores micro-batches, it stops and goes on."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_cli import config, folders, prepare, run, train
from grpo_cli.errors import TrainingError
from grpo_cli.rollouts import collate

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def recipe(folder: Path, **changes: Any) -> config.Recipe:
    """A run of seconds: 25 sums, a model of 30,000 weights, a reward that any model can raise."""
    data = folder / "rows.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    tree: dict[str, Any] = {
        "recipe": "test",
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "steps": 4,
        "prompts_per_step": 6,
        "model": {
            "build": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_layers": 2,
                "num_heads": 2,
                "num_kv_heads": 1,
                "warmup_steps": 5,
            }
        },
        "dataset": {
            "train": str(data),
            "eval": str(data),
            "prompt": "{question}",
            "solution": "{answer}",
            "max_prompt_tokens": 16,
        },
        "reward": {"evens": {"function": "tests.test_train:evens"}},
        "generation": {"num_generations": 4, "max_completion_tokens": 6},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every": 2},
        "log": {"plots": False, "completions_every": 0},
    }
    for key, value in changes.items():
        node = tree
        *path, last = key.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return config.parse(tree)


def evens(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """The share of even token ids in a completion: half at first, and easy to raise."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def built(folder: Path, **changes: Any) -> run.Run:
    return run.build(prepare.for_training(recipe(folder, **changes)), ["grpo", "train"])


def trained(folder: Path, **changes: Any) -> run.Run:
    live = built(folder, **changes)
    try:
        train.train(live)
    finally:
        live.close()
    return live


def metrics(live: run.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in live.reporter.metrics_file.read_text().splitlines()]


def weights(live: run.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in live.policy.parameters()])


def one_update(live: run.Run) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients (kept, by an optimizer that does nothing) and metrics of a step's first update."""
    groups = train.sample(
        live.generator, live.tokenizer, live.prompts(0), 4, live.sampling, live.recipe.seed
    )
    live.scorer.score([r for g in groups for r in g.rollouts])
    train.assign_advantages(groups, dict(train.outcomes(groups)), "group")
    if live.reference is not None:
        for r, logprobs in train.logprobs_of(
            live.reference, [r for g in groups for r in g.rollouts], live
        ):
            r.ref_logprobs = logprobs
    gradients: list[torch.Tensor] = []
    live.optimizer.step = lambda *a, **k: gradients.extend(  # type: ignore[method-assign]
        p.grad.clone() for p in live.policy.parameters()
    )
    found = train.update(live, groups, 0)
    return gradients, found


def test_reward_rises(tmp_path: Path) -> None:
    live = trained(tmp_path, steps=25, prompts_per_step=8, optimizer__learning_rate=5e-3)
    rewards = [m["reward"] for m in metrics(live)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards


@pytest.mark.parametrize("loss", [{}, {"loss__beta": 0.1, "loss__normalize": "completions"}])
def test_micro_batches_leave_the_gradient_alone(tmp_path: Path, loss: dict[str, Any]) -> None:
    whole, found = one_update(built(tmp_path, **loss, overwrite=True))
    split, found_split = one_update(
        built(tmp_path, **loss, overwrite=True, update__tokens_per_micro_batch=30)
    )
    assert any(g.abs().max() > 1e-3 for g in whole)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    for key, value in found.items():
        assert found_split[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_groups_without_signal_are_measured_without_a_backward(tmp_path: Path) -> None:
    live = built(tmp_path)
    groups = train.sample(live.generator, live.tokenizer, live.prompts(0), 4, live.sampling, 0)
    rollouts = [r for g in groups for r in g.rollouts]
    for i, r in enumerate(rollouts):
        r.reward, r.advantage = 1.0, float(i % 3 - 1)  # a third of them 0
    tokens = sum(r.loss_tokens for r in rollouts)
    batch = collate(rollouts, torch.device("cpu"))
    counts = {"tokens": float(tokens), "completions": float(len(rollouts))}
    loss, sums, _ = train.objective(live, live.policy, batch, counts)
    loss.backward()
    expected = [p.grad.clone() for p in live.policy.parameters()]
    live.optimizer.zero_grad()
    found: list[torch.Tensor] = []
    live.optimizer.step = lambda *a, **k: found.extend(  # type: ignore[method-assign]
        p.grad.clone() for p in live.policy.parameters()
    )
    live.recipe.optimizer.max_grad_norm = 1e9
    entropy = train.update(live, groups, 0)["entropy"]
    live.close()
    assert entropy == pytest.approx(sums["entropy"] / tokens, rel=1e-5)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_metrics_have_one_line_a_step_and_the_summary_before_and_after(tmp_path: Path) -> None:
    live = trained(tmp_path, reward={"exact_match": {}, "length": {"weight": 0.1}})
    lines = metrics(live)
    assert [m["step"] for m in lines] == [1, 2, 3, 4]
    assert all(math.isfinite(v) for m in lines for v in m.values())
    assert {"rewards/exact_match/mean", "entropy", "grad_norm", "time/generate"} <= lines[0].keys()
    summary = json.loads((live.folder / "summary.json").read_text())
    assert summary["before"]["accuracy"] <= 1
    assert summary["last_checkpoint"].endswith("checkpoints/step-4")
    assert summary["after"]["interval_95"][0] <= summary["after"]["accuracy"]


def test_on_policy_the_ratio_is_one_and_the_sampler_agrees(tmp_path: Path) -> None:
    for m in metrics(trained(tmp_path)):
        assert m["clip_ratio/region_mean"] == 0
        assert m["sampling/sampling_logp_difference/max"] < 1e-4


def test_off_policy_updates_clip(tmp_path: Path) -> None:
    live = trained(
        tmp_path,
        update__num_iterations=3,
        update__minibatches=2,
        loss__epsilon=0.01,
        optimizer__learning_rate=5e-3,
    )
    assert all(m["clip_ratio/region_mean"] > 0 for m in metrics(live))
    assert "time/old_logprobs" in metrics(live)[0]


def test_kl_is_to_the_frozen_reference(tmp_path: Path) -> None:
    lines = metrics(trained(tmp_path, loss__beta=0.05, optimizer__learning_rate=5e-3))
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 1e-4


def test_the_checkpoint_is_a_model_with_the_generators_logprobs(tmp_path: Path) -> None:
    live = trained(tmp_path)
    prompts = [p.ids for _, p in live.prompts(0)]
    groups = live.generator.generate(prompts, 3, live.sampling, list(range(len(prompts))))
    model = AutoModelForCausalLM.from_pretrained(folders.checkpoint_path(live.folder, 4)).eval()
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + c.ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(c.ids)), c.ids]
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"loss__beta": 0.05, "update__minibatches": 2}])
def test_stop_and_resume_is_the_same_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    straight = trained(tmp_path, output_dir=str(tmp_path / "straight"), **changes)

    halted = built(tmp_path, output_dir=str(tmp_path / "halted"), **changes)
    write = halted.reporter.step

    def write_and_stop(step: int, *rest: Any) -> None:
        write(step, *rest)
        halted.stop.signal = 15 if step == 3 else None

    halted.reporter.step = write_and_stop  # type: ignore[method-assign]
    train.train(halted)
    halted.close()
    assert folders.steps_saved(halted.folder)[-1] == 3

    resumed = trained(tmp_path, output_dir=str(tmp_path / "halted"), resume="auto", **changes)
    assert torch.equal(weights(resumed), weights(straight))
    timeless = [
        {k: v for k, v in m.items() if "time" not in k and "per_second" not in k}
        for live in (resumed, straight)
        for m in metrics(live)
    ]
    assert timeless[:4] == timeless[4:]


def test_resume_cuts_the_metrics_back_to_the_checkpoint(tmp_path: Path) -> None:
    live = trained(tmp_path)
    torn = live.reporter.metrics_file
    torn.write_text(torn.read_text() + '{"step": 5, "rewa')
    resumed = built(tmp_path, resume=str(folders.checkpoint_path(live.folder, 2)))
    assert [m["step"] for m in metrics(resumed)] == [1, 2]
    assert folders.steps_saved(live.folder) == [2], "resume=auto must not find another course"
    train.train(resumed)
    resumed.close()
    assert [m["step"] for m in metrics(resumed)] == [1, 2, 3, 4]


def test_a_gradient_that_is_not_finite_stops_before_the_step(tmp_path: Path) -> None:
    live = built(tmp_path)
    before = weights(live)
    live.policy.register_forward_hook(
        lambda module, args, out: (
            setattr(out, "logits", out.logits * math.nan) if torch.is_grad_enabled() else None
        )
    )
    with pytest.raises(TrainingError, match="step 1: the loss is nan"):
        train.train(live)
    live.close()
    assert torch.equal(before, weights(live))


def test_a_reward_that_raises_names_row_and_completion(tmp_path: Path) -> None:
    live = built(tmp_path, reward={"bad": {"function": "tests.test_train:raises_at_three"}})
    with pytest.raises(TrainingError, match=r"'bad' raised ZeroDivisionError.*row \d+, completion"):
        train.train(live)
    live.close()


def raises_at_three(completions: list[str], question: list[str]) -> list[float]:
    return [1 / (0 if q.startswith("3") else 1) for q in question]


def test_rows_without_any_reward_train_on_nothing(tmp_path: Path) -> None:
    live = built(tmp_path, reward={"none": {"function": "tests.test_train:never_applies"}})
    before = weights(live)
    train.train(live)
    live.close()
    assert metrics(live)[0]["rewards_none"] == 24
    assert torch.equal(before, weights(live))


def never_applies(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def test_masked_rows_do_not_reach_the_batch_loss(tmp_path: Path) -> None:
    live = built(tmp_path)
    groups = train.sample(live.generator, live.tokenizer, live.prompts(0), 4, live.sampling, 0)
    batch = collate([r for g in groups for r in g.rollouts], torch.device("cpu"))
    live.close()
    assert batch.loss_mask.sum() == 0, "unscored rollouts have a NaN reward"
