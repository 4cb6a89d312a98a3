"""A run that has to end in the middle of a step resumes there, and ends as the same run."""

import math
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from grpo_cli.checkpoints import paths
from grpo_cli.distributed.stop_signal import Interrupts
from grpo_cli.training import loop, resume
from grpo_cli.training.run import Run
from tests.training.test_train import built, timeless, trained, weights

HARD = {  # all that a step can keep: several updates, a moving KL, carried groups, dropout
    "generation__dynamic_sampling": True, "generation__max_completion_tokens": 5,
    "loss__beta": 0.05, "loss__kl_target": 0.001, "loss__entropy_coef": 0.01,
    "loss__entropy_target": 2.0, "update__minibatches": 2, "update__num_iterations": 2,
    "update__tokens_per_micro_batch": 30, "model__dropout": 0.2, "eval__every": 2,
    "checkpoint__every": 2, "steps": 4,
}  # fmt: skip
IN_REWARD = {"loss__beta": 0.05, "loss__kl_in": "reward", "update__minibatches": 2, "steps": 3}


def leaving_at(run: Run, call: float) -> list[bool]:
    """Makes the run leave when it asks for the `call`-th time whether it has to.

    Returns:
        Its answers, one each time that it has asked.
    """
    answers: list[bool] = []

    def is_due() -> bool:
        answers.append(len(answers) + 1 >= call)
        if answers[-1]:
            run.interrupts.stop.signal = signal.SIGUSR1
        return answers[-1]

    run.interrupts.is_due = is_due  # type: ignore[method-assign]
    return answers


@pytest.mark.programs
@pytest.mark.parametrize(
    ("changes", "moments"),
    [pytest.param(HARD, 24, marks=pytest.mark.slow), (IN_REWARD, 8)],
    ids=["hard", "kl-in-reward"],
)
def test_resume_within_a_step(tmp_path: Path, changes: dict[str, Any], moments: int) -> None:
    straight = built(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    answers = leaving_at(straight, math.inf)
    loop.train(straight)
    straight.close()
    asked = len(answers)
    kept: set[str] = set()
    for call in range(2, asked, max(asked // moments, 1)):
        output = {"output_dir": str(tmp_path / f"left-{call}")}
        left = built(tmp_path, **output, **changes)
        leaving_at(left, call)
        loop.train(left)
        left.close()
        if left.recovery.interrupted is not None:
            kept.add(left.recovery.interrupted.name)
            state = (left.recovery.interrupted / paths.STATE).read_bytes()
            assert b"test_train:evens" not in state, "arguments of rewards may be secret"
        if left.recovery.unreported is not None:  # a run that was killed has logged the step since
            with left.reporter.metrics.path.open("a") as file:
                file.write(f'{{"step": {left.state.step}}}\n')
        resumed = trained(tmp_path, resume="auto", **output, **changes)
        assert torch.equal(weights(resumed), weights(straight)), call
        assert timeless(resumed) == timeless(straight), call
        assert not list(resumed.folder.glob("checkpoints/*interrupted*"))
        assert paths.steps_saved(resumed.folder) == paths.steps_saved(straight.folder)
    assert len(kept) >= 2, "it was left in several steps"


@pytest.mark.parametrize(
    ("writing", "told"),
    [
        (0.0, (6.0, 20.0)),  # the rest of the step, and the next save
        (4.0, (6.0, 20.0)),  # the one under way is done before the step is
        (15.0, (15.0, 20.0)),  # or it is not
    ],
)
def test_running_save_uses_time_left(writing: float, told: tuple[float, float]) -> None:
    heard: list[tuple[float, float]] = []
    stop = SimpleNamespace(is_requested=True, is_too_late=lambda *left: bool(heard.append(left)))
    interrupts = Interrupts(
        cast(Any, None), cast(Any, stop), lambda usual: min(writing, usual), save_seconds=20.0
    )
    interrupts._step_seconds.extend([8.0, 10.0])
    interrupts._step_began = time.monotonic() - 4
    assert not interrupts.is_due()
    assert heard == [pytest.approx(told, abs=1)]


@pytest.mark.runs
def test_resumed_run_keeps_its_fallbacks(tmp_path: Path) -> None:
    changes = {"loss__beta": 0.05, "loss__reference_every": 1, "checkpoint__every": 1, "steps": 3}
    straight = built(tmp_path, output_dir=str(tmp_path / "straight"), **changes)
    halted = built(tmp_path, output_dir=str(tmp_path / "halted"), **changes)
    for run in (straight, halted):
        run.generator.fall_back("it is told to")
        run.policy.logprobs.fall_back("it is told to")
    quick = "each prompt once for its completions, logits in chunks"
    expected = {
        "policy": {"mode": "rows padded, logits in chunks", "checked": "images"},
        "reference": {"mode": quick, "checked": "images"},
        "generator": {"decoder": "plain"},
    }

    def found(run: Run) -> dict[str, Any]:
        return {name: part for name, part in resume.checks(run).items() if name != "made"}

    loop.train(straight)
    assert found(straight) == expected
    leaving_at(halted, 40)
    loop.train(halted)
    for run in (straight, halted):
        run.close()
    assert 1 <= halted.state.step < 3
    resumed = trained(tmp_path, resume="auto", output_dir=str(tmp_path / "halted"), **changes)
    assert found(resumed) == expected
    assert torch.equal(weights(resumed), weights(straight))
    assert timeless(resumed) == timeless(straight)
