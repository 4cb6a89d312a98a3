"""Memory that runs out changes how a step is computed, never what comes out, and is said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli.checkpoints import checkpointer, paths
from grpo_cli.models.attention import Layout
from grpo_cli.training import loop, run
from tests.distributed.test_workers import launch, results
from tests.models.test_memory import CPU_ALLOCATOR
from tests.training.test_train import built, one_update, weights

ERRORS: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError(CPU_ALLOCATOR),
}
SAID = "note: out of memory: micro-batches of {} tokens from now on; the batch is done again"


class Allocator:
    """Fails in a model's packed passes over more than `most` tokens; those that keep a graph."""

    def __init__(
        self,
        model: PreTrainedModel,
        most: int,
        error: Callable[[], Exception] = ERRORS["cuda"],
        *,
        backward: bool = False,
        without_gradient: bool = False,
    ) -> None:
        """backward: fails there. without_gradient: fails in passes that keep no graph instead."""
        self.most = most
        self.error = error
        self.backward = backward
        self.with_gradient = not without_gradient
        self.model = model
        self.failures = 0
        self.had_gradients: list[int] = []  # weights that had one at a failure
        self.sizes: list[int] = []  # tokens of the passes that did not fail in forward
        first = model.base_model.layers[0]
        model.base_model.register_forward_pre_hook(self.begin, with_kwargs=True)
        first.register_forward_hook(self.watch)

    def begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.tokens = 0
        packed = isinstance(kwargs.get("attending"), Layout)
        if packed and torch.is_grad_enabled() == self.with_gradient:
            self.tokens = kwargs["input_ids"].numel()

    def watch(self, module: Any, args: Any, output: Any) -> None:
        if not self.tokens:
            return
        if self.tokens > self.most:
            if not self.backward:
                self.fail()
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda grad: self.fail())
        self.sizes.append(self.tokens)

    def fail(self) -> None:
        self.failures += 1
        self.had_gradients.append(sum(p.grad is not None for p in self.model.parameters()))
        raise self.error()


def doubled(folder: Path, **changes: Any) -> run.Run:
    """A run in float64, so that what is the same is the same to more than a rounding."""
    live = built(folder, overwrite=True, **changes)
    live.policy.model.double()
    if live.policy.reference is not None:
        live.policy.reference.logprobs.model.double()
    return live


def assert_same_update(
    found: tuple[list[torch.Tensor], dict[str, float]],
    expected: tuple[list[torch.Tensor], dict[str, float]],
) -> None:
    assert any(g.abs().max() > 1e-3 for g in expected[0])
    for a, b in zip(found[0], expected[0], strict=True):
        # Log-probabilities are float32: an element near zero is as exact as the largest.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()))
    assert found[1].keys() == expected[1].keys()
    for key, value in expected[1].items():
        assert found[1][key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


KL_OFF_POLICY_ENTROPY = {
    "loss__beta": 0.1,
    "update__num_iterations": 2,
    "loss__entropy_coef": 0.01,
    "loss__top_entropy": 0.5,
}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("error", "backward", "loss"), [("cuda", True, KL_OFF_POLICY_ENTROPY), ("cpu", False, {})]
)
def test_oom_leaves_the_update_unchanged(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: str,
    backward: bool,
    loss: dict[str, Any],
) -> None:
    expected = one_update(doubled(tmp_path, **loss))
    capsys.readouterr()
    live = doubled(tmp_path, **loss, update__tokens_per_micro_batch=80)
    # Micro-batches of up to 80 tokens: the first two are smaller than the third.
    allocator = Allocator(live.policy.model, 50, ERRORS[error], backward=backward)
    found = one_update(live)
    assert_same_update(found, expected)
    assert allocator.failures == 1
    assert live.policy.micro_batches.budget.tokens == 40
    assert max(allocator.sizes[-3:]) <= 40
    assert capsys.readouterr().out.count(SAID.format(40)) == 1
    if backward:
        assert allocator.had_gradients[0] >= 5, "what is taken back has been there"


@pytest.mark.runs
def test_no_grad_passes_are_retried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"loss__beta": 0.1, "loss__policy": "kl_cov", "loss__args": {"cov_share": 0.5}}
    expected = one_update(doubled(tmp_path, **changes))
    live = doubled(tmp_path, **changes, update__tokens_per_micro_batch=80)
    # In the passes of ref_logprobs and of the selection.
    in_reference = Allocator(live.policy.reference.logprobs.model, 60, without_gradient=True)
    in_policy = Allocator(live.policy.model, 30, ERRORS["cpu"], without_gradient=True)
    capsys.readouterr()
    assert_same_update(one_update(live), expected)
    assert (in_reference.failures, in_policy.failures) == (1, 1)
    assert live.policy.micro_batches.budget.tokens == 20
    out = capsys.readouterr().out
    assert [out.count(SAID.format(n)) for n in (40, 20)] == [1, 1]
    assert out.count("out of memory") == 2


@pytest.mark.runs
def test_halved_budget_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = built(tmp_path, output_dir=str(tmp_path / "limited"))
    allocator = Allocator(live.policy.model, 60, backward=True)
    seen: list[int | None] = []
    live.reporter.step = lambda step, *rest, write=live.reporter.step: (  # type: ignore[method-assign]
        write(step, *rest),
        seen.append(live.policy.micro_batches.budget.tokens),
    )
    loop.train(live)
    live.close()
    out = capsys.readouterr().out
    halved = live.policy.micro_batches.budget.tokens
    assert halved <= 60
    assert seen == [halved] * 4, "the first step finds it, the others keep to it"
    assert out.count("note: out of memory") == allocator.failures

    saved = checkpointer.load_state(paths.checkpoint_path(live.folder, 2))
    assert saved["run"]["micro_batch_tokens"] == [halved]
    resumed = built(
        tmp_path,
        output_dir=str(tmp_path / "limited"),
        resume=str(paths.checkpoint_path(live.folder, 2)),
    )
    assert resumed.policy.micro_batches.budget.tokens == halved
    again = Allocator(resumed.policy.model, 60)
    loop.train(resumed)
    resumed.close()
    assert again.failures == 0
    assert "out of memory" not in capsys.readouterr().out
    assert torch.equal(weights(resumed), weights(live)), "the same split, the same rounding"


@pytest.mark.slow
def test_oom_of_one_of_two_processes(tmp_path: Path) -> None:
    reward = "reward.evens.function=tests.models.test_memory:evens_and_a_failure"
    done = [launch(tmp_path, number, "loss=dapo", reward) for number in (1, 2)]
    assert [d.returncode for d in done] == [0, 0], done
    assert "out of memory" not in done[0].stdout + done[1].stdout
    said = (tmp_path / "2" / "logs" / "rank-1.log").read_text()
    assert said.count("process 1: " + SAID.format(20)) == 1, said
    assert said.count("out of memory") == 1
    (one, weights_of_one), (two, weights_of_two) = (results(tmp_path, n) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        for key in ("loss", "grad_norm", "reward", "num_tokens"):
            assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-7), (a["step"], key)
    for name, tensor in weights_of_one.items():
        torch.testing.assert_close(weights_of_two[name], tensor, rtol=1e-5, atol=1e-5)
    state = checkpointer.load_state(tmp_path / "2" / "checkpoints" / "step-5")
    assert state["run"]["micro_batch_tokens"] == [40, 20], "of each process"
