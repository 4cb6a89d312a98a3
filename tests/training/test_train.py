"""The loop on a tiny model: it learns, its gradient ignores micro-batches, it stops and resumes."""

import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.algorithm.batch import collate
from grpo_cli.algorithm.loss import Coefficients, grpo_loss
from grpo_cli.checkpoints import paths, retention
from grpo_cli.commands import train
from grpo_cli.config import parsing
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.stop_signal import Interrupted
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.records import Group, TrainingSample, regrouped
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.scoring.bound_reward import TrainerState
from grpo_cli.training import build, loop, prepare, resume, run
from grpo_cli.training.evaluation import Evaluation
from grpo_cli.training.rollouts import collect as collecting
from grpo_cli.training.rollouts.collect import collect
from grpo_cli.training.rollouts.credit import weigh_samples
from grpo_cli.training.run import StepBatch
from grpo_cli.training.step import Step

pytestmark = pytest.mark.runs

CPU = torch.device("cpu")  # not conftest's: other processes import this file for its rewards
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def recipe(folder: Path, **changes: Any) -> Recipe:
    """A run of seconds: 25 sums, a model of 30,000 weights, a reward that any model can raise."""
    data = folder / "rows.jsonl"
    folder.mkdir(exist_ok=True)
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
                "warmup_steps": 5,
            }
        },
        "dataset": {
            "train": str(data),
            "eval": str(data),
            "prompt": "{question}",
            "chat": False,
            "solution": "{answer}",
            "max_prompt_tokens": 16,
        },
        "reward": {"evens": {"function": "tests.training.test_train:evens"}},
        "generation": {"num_generations": 4, "max_completion_tokens": 6},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every": 2},
        "log": {"report": False, "completions_every": 0},
    }
    for key, value in changes.items():
        node = tree
        *path, last = key.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return parsing.parse(tree)


def evens(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """The share of even token ids in a completion: half at first, and easy to raise."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


SEEN: list[TrainerState] = []


def watched(completion_ids: list[list[int]], trainer_state: TrainerState) -> list[float | None]:
    """As `evens`; keeps the states that it is called with."""
    if completion_ids != [[0]]:  # the completion on which rewards are tried out
        SEEN.append(trainer_state)
    return evens(completion_ids)


def built(folder: Path, **changes: Any) -> run.Run:
    prepared = prepare.for_training(recipe(folder, **changes))
    return build.build(prepared, ["grpo", "train"], features=train.features)


def evaluator(live: run.Run) -> Evaluator:
    targets = (callback.target for callback in live.callbacks.loaded)
    return next(target.evaluator for target in targets if isinstance(target, Evaluation))


def trained(folder: Path, **changes: Any) -> run.Run:
    live = built(folder, **changes)
    try:
        loop.train(live)
    finally:
        live.close()
    return live


def metrics(live: run.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in live.reporter.metrics.path.read_text().splitlines()]


def timeless(live: run.Run) -> list[dict[str, Any]]:
    """The metrics that do not depend on the clock."""
    timed = re.compile("time|per_second|mfu|seconds|overlap/")
    return [{k: v for k, v in m.items() if not timed.search(k)} for m in metrics(live)]


def weights(live: run.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in live.policy.model.parameters()])


def reference_weights(live: run.Run) -> torch.Tensor:
    return torch.cat([p.flatten() for p in live.policy.reference.logprobs.model.parameters()])


def test_resume_auto_says_that_it_finds_nothing(tmp_path: Path, capsys: Any) -> None:
    summary = tmp_path / "run" / "summary.json"
    summary.parent.mkdir()
    summary.write_text("{}")
    with pytest.raises(UserError, match="holds a finished run without its checkpoints"):
        built(tmp_path, resume="auto")
    summary.unlink()
    built(tmp_path, resume="auto").close()
    assert "resume=auto finds no checkpoint; the run starts at step 1" in " ".join(
        capsys.readouterr().out.split()
    )


Update = tuple[list[torch.Tensor], dict[str, float]]


def one_update(live: run.Run) -> Update:
    """Gradients and metrics of a step's updates; the run is closed."""
    with closing(live):
        step = step_with(live, collect(live, Clock(CPU)))
        groups = loop.make_samples(live, step, step.progress.batch)
        gradients = kept_gradients(live)
        return gradients, loop.update_policy(live, step, groups)


def kept_gradients(live: run.Run) -> list[torch.Tensor]:
    """A list that is given the gradients, by an optimizer that does nothing else."""
    found: list[torch.Tensor] = []
    live.policy.optimizer.step = lambda *a, **k: found.extend(  # type: ignore[method-assign]
        p.grad.clone() for p in live.policy.model.parameters()
    )
    return found


def step_with(live: run.Run, batch: StepBatch) -> Step:
    """The first step, once its rollouts are there."""
    step = Step(live, 0, Clock(CPU))
    step.keep(batch)
    return step


@pytest.mark.smoke
def test_reward_rises(tmp_path: Path) -> None:
    quick = {"dataset__eval": None, "checkpoint__every": 0, "optimizer__learning_rate": 5e-3}
    live = trained(tmp_path, steps=40, prompts_per_step=8, **quick)
    rewards = [m["reward"] for m in metrics(live)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards


def test_groups_without_signal_have_no_backward(tmp_path: Path) -> None:
    live = built(tmp_path)
    step = collect(live, Clock(CPU))
    every = [r for g in step.groups for r in g.rollouts]
    samples = [
        r.as_kind(TrainingSample, reward=1.0, advantage=float(i % 3 - 1))  # a third of them 0
        for i, r in enumerate(every)
    ]
    groups = regrouped(step.groups, samples)
    rollouts, tokens = weigh_samples(live.recipe, groups, live.workers)
    batch = collate(rollouts, CPU)
    plain = PolicyLogprobs(live.policy.model, packed=False, chunked=False)
    logprobs, entropies = plain(rollouts, 1.0, entropy=True)
    coefficients = Coefficients(0.0, 0.0, tokens)
    output = grpo_loss(live.recipe.loss, batch, logprobs, entropies, coefficients)
    output.loss.backward()  # type: ignore[no-untyped-call]
    expected = [p.grad.clone() for p in live.policy.model.parameters()]
    live.policy.optimizer.zero_grad()
    found = kept_gradients(live)
    live.recipe.optimizer.max_grad_norm = 1e9
    entropy = loop.update_policy(live, step_with(live, step), groups)["entropy"]
    live.close()
    assert entropy == pytest.approx(
        output.metrics.reduced(live.workers).figures["entropy"], rel=1e-5
    )
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_metrics_and_summary(tmp_path: Path) -> None:
    live = trained(tmp_path, reward={"exact_match": {}, "length": {"weight": 0.1}})
    lines = metrics(live)
    assert [m["step"] for m in lines] == [1, 2, 3, 4]
    assert all(math.isfinite(v) for m in lines for v in m.values())
    assert ["entropy" in m for m in lines] == [True, False, False, False], "it costs a softmax"
    assert {"rewards/exact_match/mean", "entropy", "grad_norm", "time/generate"} <= lines[0].keys()
    summary = json.loads((live.folder / "summary.json").read_text())
    assert summary["before"]["accuracy"] <= 1
    assert summary["last_checkpoint"].endswith("checkpoints/step-4")
    assert summary["after"]["interval_95"][0] <= summary["after"]["accuracy"]


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


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.smoke),
        {"loss__beta": 0.05, "update__minibatches": 2},
        {"loss__beta": 0.05, "loss__kl_target": 1e-4, "loss__reference_every": 2},
        {"loss__entropy_coef": 0.01, "loss__entropy_target": 5.5},
        {
            "generation__dynamic_sampling": True,
            "reward": {"longest": {"function": "tests.training.test_train:is_longest"}},
            "loss__beta": 0.05,
        },
        {
            "optimizer__algorithm": "muon",
            "optimizer__weight_decay": 0.1,
            "optimizer__max_grad_norm": None,
            "optimizer__schedule": "wsd",
        },
        {"optimizer__algorithm": "bitsandbytes.optim:AdamW8bit", "optimizer__warmup_steps": 2},
        {"model__dtype": "bfloat16", "model__head_dtype": "float32", "update__minibatches": 2},
    ],
    ids=[
        *("plain", "off-policy-kl", "moving-reference", "entropy", "dynamic-sampling"),
        *("muon", "8-bit", "bfloat16"),
    ],
)
def test_stop_and_resume_is_the_same_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    straight = trained(tmp_path, output_dir=str(tmp_path / "straight"), **changes)

    halted = built(tmp_path, output_dir=str(tmp_path / "halted"), **changes)
    write = halted.reporter.step

    def write_and_stop(step: int, *rest: Any) -> None:
        write(step, *rest)
        halted.interrupts.stop.signal = 15 if step == 3 else None

    halted.reporter.step = write_and_stop  # type: ignore[method-assign]
    loop.train(halted)
    halted.close()
    assert paths.steps_saved(halted.folder)[-1] == 3

    resumed = trained(tmp_path, output_dir=str(tmp_path / "halted"), resume="auto", **changes)
    assert torch.equal(weights(resumed), weights(straight))
    assert timeless(resumed) == timeless(straight)


def test_without_a_largest_norm_nothing_is_clipped(tmp_path: Path) -> None:
    def update(name: str, norm: float | None) -> tuple[torch.Tensor, float]:
        folder = str(tmp_path / name)
        live = built(tmp_path, optimizer__max_grad_norm=norm, output_dir=folder)
        gradients, found = one_update(live)
        return torch.cat([g.flatten() for g in gradients]), found["grad_norm"]

    whole, norm = update("null", None)
    small, same_norm = update("small", 1e-3)
    assert norm == same_norm == pytest.approx(float(whole.norm()))
    assert float(small.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_trainer_state_after_resume(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "reward": {"watched": {"function": "tests.training.test_train:watched"}},
        "eval": {"every": 1, "best": "reward"},
    }

    def states() -> list[dict[str, Any]]:
        seen = [asdict(state) for state in SEEN]
        SEEN.clear()
        for line in (line for state in seen for line in state["log_history"]):
            for key in [k for k in line if re.search("time|per_second|mfu", k)]:
                del line[key]
        return seen

    live = trained(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    straight = states()
    # Each step scores its completions and evaluates; an evaluation precedes the first step.
    assert [s["global_step"] for s in straight] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert [len(s["log_history"]) for s in straight] == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    lines = metrics(live)
    assert [m["step"] for m in straight[-1]["log_history"]] == [1, 2, 3]
    for state in straight[3::2]:
        line = lines[state["global_step"] - 1]
        assert state["log_history"][-1]["reward"] == line["reward"]
        assert state["num_input_tokens_seen"] == line["num_tokens"]
        known = [straight[0]["best_metric"], *(m["eval/reward"] for m in state["log_history"])]
        assert state["best_metric"] >= max(v for v in known if v is not None)
    assert straight[0]["best_metric"] is straight[0]["best_global_step"] is None

    halted = built(tmp_path, output_dir=str(tmp_path / "halted"), **changes)
    evaluate = evaluator(halted).run

    def stop_in_step_2(**kwargs: Any) -> Any:
        if halted.state.step == 2:
            raise Interrupted
        return evaluate(**kwargs)

    object.__setattr__(evaluator(halted), "run", stop_in_step_2)
    loop.train(halted)
    halted.close()
    left = paths.resumable(halted.folder)[0]  # the latest
    trained(tmp_path, output_dir=str(tmp_path / "moved"), resume=str(left), **changes)
    assert states() == straight


def test_resume_cuts_the_metrics_back_to_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = trained(tmp_path, log__completions_every=1)
    first = str(paths.checkpoint_path(live.folder, 2))
    with monkeypatch.context() as patch:
        patch.setattr(retention, "set_aside", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            built(tmp_path, resume=first)
    assert len(metrics(live)) == 4, "a run that is killed here still has the checkpoint of step 4"
    torn = live.reporter.metrics.path
    torn.write_text(torn.read_text() + '{"step": 5, "rewa')
    resumed = built(tmp_path, resume=first)
    assert prepare.finished(recipe(tmp_path, resume="auto")) is None, "not if it is killed here"
    assert [m["step"] for m in metrics(resumed)] == [1, 2]
    assert {p.stem for p in live.folder.glob("completions/*")} == {"step-1", "step-2"}
    assert paths.steps_saved(live.folder) == [2], "resume=auto must not find another course"
    loop.train(resumed)
    resumed.close()
    assert [m["step"] for m in metrics(resumed)] == [1, 2, 3, 4]


def test_a_gradient_that_is_not_finite_stops_before_the_step(tmp_path: Path) -> None:
    live = built(tmp_path)
    before = weights(live)
    live.policy.model.model.norm.register_forward_hook(
        lambda module, args, out: out * math.nan if torch.is_grad_enabled() else out
    )
    with pytest.raises(
        TrainingError,
        match=r"step 1: the loss is nan .*learning_rate = 0\.001; .* checkpoint is none",
    ):
        loop.train(live)
    live.close()
    assert torch.equal(before, weights(live))


def raises_at_three(completions: list[str], question: list[str]) -> list[float]:
    return [1 / (0 if q.startswith("3") else 1) for q in question]


def test_reward_that_changes_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "elsewhere"))
    # A stream is read in blocks, so that the file is opened again.
    monkeypatch.setattr("grpo_cli.data.streaming.BLOCK_ROWS", 3)
    changes: dict[str, Any] = {"dataset__streaming": True}
    changes |= {"model__build__warmup_steps": 0, "dataset__solution": None}
    live = trained(
        Path("here"),
        steps=3,
        **changes,
        reward={"leaves": {"function": "tests.training.test_train:leaves"}},
    )
    assert live.state.step == 3
    assert Path.cwd() == tmp_path / "elsewhere"
    assert not [*Path.cwd().iterdir()]
    assert live.folder.is_relative_to(tmp_path / "here")
    assert paths.steps_saved(live.folder) == [2, 3]


def leaves(completions: list[str]) -> list[float]:
    os.chdir(os.environ["ELSEWHERE"])
    return [float(len(c)) for c in completions]


def test_rows_without_a_reward(tmp_path: Path) -> None:
    live = built(tmp_path, reward={"none": {"function": "tests.training.test_train:never_applies"}})
    before = weights(live)
    loop.train(live)
    live.close()
    assert metrics(live)[0]["rewards_none"] == 24
    assert torch.equal(before, weights(live))


def never_applies(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def test_truncated_completions_can_be_masked(tmp_path: Path) -> None:
    live = built(tmp_path, loss__mask_truncated=True)
    rollouts = [r for g in collect(live, Clock(CPU)).groups for r in g.rollouts]
    live.close()
    cut = [r for r in rollouts if r.completion.finish_reason == "length"]
    assert 0 < len(cut) < len(rollouts)
    assert all(r.loss_tokens == 0 and not math.isnan(r.reward) for r in cut)
    assert all(r.loss_tokens for r in rollouts if r.completion.finish_reason == "stop")


def is_longest(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for completions that were cut off: groups of all or none of them have no signal."""
    return [float(len(ids) == 6) for ids in completion_ids]


DYNAMIC: dict[str, Any] = {
    "generation__dynamic_sampling": True,
    "reward": {"longest": {"function": "tests.training.test_train:is_longest"}},
}


def test_dynamic_sampling(tmp_path: Path) -> None:
    live = built(tmp_path, **DYNAMIC)
    drawn = 0
    for _ in range(3):
        waiting = {g.prompt_index for g in live.queue.leftover}
        step = collect(live, Clock(CPU))
        found = step.metrics
        assert len(step.groups) == 6
        assert all(len({r.reward for r in g.rollouts}) > 1 for g in step.groups)
        assert waiting <= {g.prompt_index for g in step.groups}, "carried groups come first"
        spare = len(live.queue.leftover)
        used = found["dynamic_sampling/sampled"] - found["dynamic_sampling/dropped"]
        assert used + found["dynamic_sampling/carried"] == 6 + spare
        assert found["dynamic_sampling/attempts"] >= 1
        drawn += int(found["dynamic_sampling/sampled"])
        assert live.queue.position == drawn
        for g in live.queue.leftover:
            assert all(r.old_logprobs is not None for r in g.rollouts)
    live.close()


def test_dynamic_sampling_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MAX_ATTEMPTS", 3)
    same = {"same": {"function": "tests.training.test_train:always_one"}}
    live = built(tmp_path, generation__dynamic_sampling=True, reward=same)
    before = weights(live)
    loop.train(live)
    live.close()
    assert torch.equal(before, weights(live)), "nothing to train on, and no step was taken"
    for m in metrics(live):
        assert m["dynamic_sampling/attempts"] == 3
        assert m["dynamic_sampling/missing"] == 6
        assert m["reward"] == 1


def always_one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_carried_groups_keep_their_policy(tmp_path: Path) -> None:
    live = trained(tmp_path, **DYNAMIC, optimizer__learning_rate=5e-2, steps=3)
    ratios = [m["clip_ratio/region_mean"] for m in metrics(live)]
    carried = [m["dynamic_sampling/carried"] for m in metrics(live)]
    assert any(carried), carried
    assert all((ratio > 0) == (number > 0) for ratio, number in zip(ratios, carried, strict=True))


def test_the_reference_is_refreshed(tmp_path: Path) -> None:
    moving = {"loss__beta": 0.01, "loss__reference_every": 2, "loss__reference_alpha": 0.25}
    live = built(tmp_path, **moving, steps=2, optimizer__learning_rate=1e-2)
    first = weights(live)
    loop.train(live)
    live.close()
    torch.testing.assert_close(reference_weights(live), 0.25 * weights(live) + 0.75 * first)
    assert not torch.equal(weights(live), first)


def test_beta_follows_its_target(tmp_path: Path) -> None:
    changes = {"loss__beta": 0.1, "loss__kl_target": 1e-9, "optimizer__learning_rate": 5e-3}
    betas = [m["beta"] for m in metrics(trained(tmp_path, **changes))]
    # In the first step the KL is 0, a full fifth of the gain below; then far above.
    assert betas == pytest.approx([0.1, 0.098, 0.098 * 1.02, 0.098 * 1.02**2])


def test_moved_reference_is_restored(tmp_path: Path) -> None:
    moved = trained(tmp_path, steps=2, loss__beta=0.1, loss__reference_every=1)
    for steps in (3, 4):  # saved and loaded twice, with nothing that moves it on
        later = trained(tmp_path, steps=steps, loss__beta=0.1, resume="auto")
        assert torch.equal(reference_weights(moved), reference_weights(later))


def test_beta_or_best_metric_changed_on_resume(tmp_path: Path) -> None:
    target = {"loss__kl_target": 1e-9}
    trained(tmp_path, steps=2, loss__beta=0.1, **target)
    same = built(tmp_path, steps=3, loss__beta=0.1, resume="auto", **target)
    same.close()
    assert same.state.beta.value(same.recipe.loss) not in (0.1, 0.5)
    changes = {"loss__beta": 0.5, "eval__best": "reward"}
    other = built(tmp_path, steps=3, resume="auto", **changes, **target)
    other.close()
    assert other.state.beta.value(other.recipe.loss) == 0.5
    assert (same.state.best_step, other.state.best_step) == (2, None)
    assert other.state.best_value == -math.inf


def test_scoring_overlaps_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    arguments = {"answer": [str(notes)]}
    counted = {"function": "tests.pool_rewards:counted", "timeout": 60, "args": arguments}
    live = built(tmp_path, reward={"r": counted}, generation__max_num_seqs=4)
    sample = live.queue.sample
    seen: list[int] = []

    @contextmanager
    def waits_for_scores(*args: Any) -> Iterator[Iterator[Group]]:
        def groups(sampled: Iterator[Group]) -> Iterator[Group]:
            for group in sampled:
                yield group
                end = time.monotonic() + 60
                while notes.read_text().count("\0") < 4 * (len(seen) + 1):  # a null for each call
                    assert time.monotonic() < end, "scoring waits for the last group"
                    time.sleep(0.01)
                seen.append(group.prompt_index)

        with sample(*args) as sampled:
            yield groups(sampled)

    monkeypatch.setattr(live.queue, "sample", waits_for_scores)
    collected = collect(live, Clock(CPU))
    live.close()
    assert len(seen) == len(collected.groups) > 1
    assert all(r.reward == 1.0 for g in collected.groups for r in g.rollouts)


def test_state_of_another_version_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, steps=1)
    monkeypatch.setattr(resume, "FORMAT", 0)
    with pytest.raises(UserError, match=r"of another version of grpo; .* model\.path="):
        trained(tmp_path, steps=2, resume="auto")


def test_plan_of_a_run(tmp_path: Path) -> None:
    """What was measured, and the prediction for it."""
    path = trained(tmp_path).folder / "plan.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    predicted, measured = found["predicted"], found["measured"]
    sizes = {"tokens_per_step", "tokens_per_micro_batch", "completion_tokens"}
    assert {*measured} & {*predicted} >= {"memory", "peak"} | sizes
    assert measured["steps_measured"] == 3, "the first step does not count"
    assert predicted["completion_tokens"] == measured["completion_tokens"]
    assert measured["tokens_per_step"] == pytest.approx(predicted["tokens_per_step"], rel=0.1)
