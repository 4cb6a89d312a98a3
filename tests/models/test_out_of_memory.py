"""Memory that runs out changes how a step is computed, never what comes out, and is said."""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli import cli, train
from grpo_cli.checkpoints import checkpointer, paths
from grpo_cli.distributed.workers import exit_process
from grpo_cli.errors import TrainingError
from grpo_cli.generation.embedded.engine import Step
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.embedded.prefill import Prefill
from grpo_cli.models.attention import Layout
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.training import build, run
from grpo_cli.training.logprob_passes import token_stats
from grpo_cli.training.rollouts.collect import collect
from tests import programs
from tests.conftest import as_prompts
from tests.distributed.test_workers import launch, results
from tests.generation.embedded.test_generator import MANY_EOS, PROMPTS, SAMPLING, SEEDS, same
from tests.training.test_train import ROWS, built, metrics, one_update, updated, weights

ERRORS: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError,
}
SAID = "note: out of memory: micro-batches of {} tokens from now on; the batch is done again"
ONE_TOO_LONG = "out of memory with a completion of "


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
    live.policy.double()
    if live.reference is not None:
        live.reference.logprobs.model.double()
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


PLAIN: dict[str, Any] = {}
KL_OFF_POLICY_ENTROPY = {
    "loss__beta": 0.1,
    "update__num_iterations": 2,
    "loss__entropy_coef": 0.01,
    "loss__top_entropy": 0.5,
}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("error", "backward", "loss"),
    [
        ("cuda", False, PLAIN),
        ("cuda", True, KL_OFF_POLICY_ENTROPY),
        ("cpu", False, KL_OFF_POLICY_ENTROPY),
        ("cpu", True, PLAIN),
        ("python", True, PLAIN),
    ],
)
def test_a_failure_leaves_the_step_as_it_is(
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
    allocator = Allocator(live.policy, 50, ERRORS[error], backward=backward)
    found = one_update(live)
    assert_same_update(found, expected)
    assert allocator.failures == 1
    assert live.micro_batches.budget.tokens == 40
    assert max(allocator.sizes[-3:]) <= 40
    assert capsys.readouterr().out.count(SAID.format(40)) == 1
    if backward:
        assert allocator.had_gradients[0] >= 5, "what is taken back has been there"


@pytest.mark.runs
def test_passes_without_gradient_are_done_again_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"loss__beta": 0.1, "loss__policy": "kl_cov", "loss__args": {"cov_share": 0.5}}
    expected = one_update(doubled(tmp_path, **changes))
    live = doubled(tmp_path, **changes, update__tokens_per_micro_batch=80)
    assert live.reference is not None
    in_reference = Allocator(
        live.reference.logprobs.model, 60, without_gradient=True
    )  # ref_logprobs
    in_policy = Allocator(live.policy, 30, ERRORS["cpu"], without_gradient=True)  # the selection
    capsys.readouterr()
    assert_same_update(one_update(live), expected)
    assert (in_reference.failures, in_policy.failures) == (1, 1)
    assert live.micro_batches.budget.tokens == 20
    out = capsys.readouterr().out
    assert [out.count(SAID.format(n)) for n in (40, 20)] == [1, 1]
    assert out.count("out of memory") == 2


@pytest.mark.runs
def test_what_a_failed_pass_has_found_is_not_kept(tmp_path: Path) -> None:
    live = built(tmp_path, update__tokens_per_micro_batch=40)
    groups = collect(live, live.recipe, Clock(live.workers.device)).groups
    rollouts = [r for g in groups for r in g.rollouts]
    live.micro_batches.calibrate(rollouts, live.recipe.generation.temperature)
    passes: list[int] = []

    def third_fails(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            raise ERRORS["cpu"]()

    live.policy.base_model.register_forward_pre_hook(third_fails)
    found = token_stats(live, live.recipe, live.policy_logprobs, rollouts)
    live.close()
    assert live.micro_batches.budget.tokens == 20
    assert [len(s.logprobs) for s in found] == [len(r.completion.ids) for r in rollouts]


@pytest.mark.runs
def test_the_budget_stays_halved_and_goes_into_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = built(tmp_path, output_dir=str(tmp_path / "whole"))
    train.train(whole)
    whole.close()
    assert whole.micro_batches.budget.tokens == 2048
    capsys.readouterr()

    live = built(tmp_path, output_dir=str(tmp_path / "limited"))
    allocator = Allocator(live.policy, 60, backward=True)
    seen: list[int | None] = []
    live.reporter.step = lambda step, *rest, write=live.reporter.step: (  # type: ignore[method-assign]
        write(step, *rest),
        seen.append(live.micro_batches.budget.tokens),
    )
    train.train(live)
    live.close()
    out = capsys.readouterr().out
    halved = live.micro_batches.budget.tokens
    assert halved is not None
    assert halved <= 60
    assert seen == [halved] * 4, "the first step finds it, the others keep to it"
    assert out.count("note: out of memory") == allocator.failures
    for line in out.splitlines():
        assert out.count(line) == 1 or "out of memory" not in line
    for a, b in zip(metrics(live), metrics(whole), strict=True):
        for key in ("loss", "grad_norm", "reward", "entropy"):
            if key in b:
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key
    torch.testing.assert_close(weights(live), weights(whole), rtol=1e-4, atol=1e-5)

    saved = checkpointer.load_state(paths.checkpoint_path(live.folder, 2))
    assert saved["run"]["micro_batch_tokens"] == [halved]
    resumed = built(
        tmp_path,
        output_dir=str(tmp_path / "limited"),
        resume=str(paths.checkpoint_path(live.folder, 2)),
    )
    assert resumed.micro_batches.budget.tokens == halved
    again = Allocator(resumed.policy, 60)
    train.train(resumed)
    resumed.close()
    assert again.failures == 0
    assert "out of memory" not in capsys.readouterr().out
    assert torch.equal(weights(resumed), weights(live)), "the same split, the same rounding"


@pytest.mark.runs
def test_a_budget_that_is_set_anew_holds_on_resume(tmp_path: Path) -> None:
    live = built(tmp_path, steps=2)
    Allocator(live.policy, 60)
    train.train(live)
    live.close()
    resumed = built(tmp_path, steps=4, resume="auto", update__tokens_per_micro_batch=33)
    resumed.close()
    assert resumed.micro_batches.budget.tokens == 33


def test_other_errors_of_a_step_are_not_swallowed(tmp_path: Path) -> None:
    live = built(tmp_path, update__tokens_per_micro_batch=80)
    updated(live)  # what fails in the check of the first rollouts is not computed so
    allocator = Allocator(live.policy, 0, lambda: RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        one_update(live)
    assert allocator.failures == 1
    assert live.micro_batches.budget.tokens == 80


EXPLICIT = {"update__tokens_per_micro_batch": 1000}  # in place of a measured budget


@pytest.mark.runs
@pytest.mark.parametrize(("explicit", "error"), [({}, "cuda"), (EXPLICIT, "cpu")])
def test_the_first_rollouts_do_not_have_to_fit_all_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], explicit: dict[str, Any], error: str
) -> None:
    # The way is checked on a few rollouts, and what a token takes is measured on them.
    expected = one_update(doubled(tmp_path, **explicit))
    live = doubled(tmp_path, **explicit)
    with_gradient = Allocator(live.policy, 14, ERRORS[error])
    without = Allocator(live.policy, 14, ERRORS[error], without_gradient=True)
    capsys.readouterr()
    assert_same_update(one_update(live), expected)
    assert live.policy_logprobs.mode.packed
    said = capsys.readouterr().out.count("note: out of memory")
    # Of the failures of the check nothing is said: no micro-batch is smaller for them.
    assert with_gradient.failures + without.failures > said


@pytest.mark.runs
@pytest.mark.parametrize(
    ("error", "without_gradient", "changes"),
    [
        ("cuda", False, EXPLICIT),
        ("cpu", False, {}),
        ("python", True, {"update__num_iterations": 2, "update__old_logprobs": "computed"}),
    ],
)
def test_a_completion_that_does_not_fit_alone_ends_the_run(
    tmp_path: Path, error: str, without_gradient: bool, changes: dict[str, Any]
) -> None:
    live = built(tmp_path, **changes)
    allocator = Allocator(live.policy, 3, ERRORS[error], without_gradient=without_gradient)
    with pytest.raises(TrainingError, match=ONE_TOO_LONG):
        train.train(live)
    live.close()
    assert 1 < allocator.failures < 15


@pytest.mark.runs
def test_the_command_line_says_it_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make = build.build

    def with_little_memory(*args: Any) -> run.Run:
        live = make(*args)
        Allocator(live.policy, 3, ERRORS["cpu"])
        return live

    monkeypatch.setattr(build, "build", with_little_memory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo"])
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    command = [
        "train",
        "model.build.hidden_size=32",
        "model.build.warmup_steps=5",
        f"dataset.train={data}",
        f"dataset.eval={data}",
        "eval.at_start=false",
        "eval.at_end=false",
        "reward=[]",
        "+reward.evens.function=tests.training.test_train:evens",
        "output_dir=run",
    ]
    assert cli.run_command(command) == 1
    out, err = capfd.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("grpo: ")]
    assert line.startswith(f"grpo: {ONE_TOO_LONG}")
    assert "model.gradient_checkpointing=true" in line
    assert "can't allocate memory" in line
    assert "Traceback" not in out + err


# ------------------------------------------------------------------------------------ generation


def test_generation_halves_its_rows_and_keeps_what_is_whole(
    model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = TransformersGenerator(model, MANY_EOS, 100)
    expected = whole.generate(as_prompts(PROMPTS), 2, SAMPLING, SEEDS)
    came: list[int] = []
    begun: list[list[int]] = []  # lengths of the prompts of each prefill
    before: list[list[int]] = []  # groups that had come at each failure
    generator = TransformersGenerator(model, MANY_EOS, 100)
    generator.decoder = whole.decoder

    def allocate(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        attending = kwargs.get("attending")
        if isinstance(attending, Prefill):
            begun.append(attending.lengths)
        if isinstance(attending, Step) and sum(attending.sizes) > 2 and came:
            before.append(list(came))
            raise ERRORS["cuda"]()

    model.register_forward_pre_hook(allocate, with_kwargs=True)
    found = generator.generate(as_prompts(PROMPTS), 2, SAMPLING, SEEDS, lambda n, _: came.append(n))
    assert sorted(came) == [0, 1, 2, 3, 4], "each group is handed over once"
    for a, b in zip(found, expected, strict=True):
        assert all(same(c, d) for c, d in zip(a, b, strict=True))
    assert len(before) >= 1
    assert 0 < len(before[0]) < 5, "some were whole when memory ran out, some were not"
    assert capsys.readouterr().out.count("note: out of memory") == len(before)
    # Every prompt is begun once; after a failure those that had not come are, and no others.
    left = [sorted(len(p) for n, p in enumerate(PROMPTS) if n not in done) for done in before]
    assert begun[0] == sorted(map(len, PROMPTS))
    assert sum(map(len, begun)) <= 5 + sum(map(len, left))
    whole_before = {len(PROMPTS[n]) for n in before[0]} - set(left[0])
    assert whole_before
    assert not whole_before & {length for lengths in begun[1:] for length in lengths}


# ------------------------------------------------------------------------- processes of their own


def as_program(*argv: str, **environment: str) -> str:
    """Starts this file as a program; returns what it has printed."""
    done = programs.run(programs.started(1, __file__, *argv), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_of_two_processes_says_which_ran_out_of_memory(tmp_path: Path) -> None:
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


# Kept for the backward of 48 completions of up to 100 tokens: about 100 kB a token, 450 MB.
WIDE = {
    "steps": 3,
    "prompts_per_step": 6,
    "generation__num_generations": 8,
    "generation__max_completion_tokens": 100,
    "model__build__hidden_size": 32,
    "model__build__intermediate_size": 4096,
    "model__build__warmup_steps": 0,
    "eval__at_start": False,
    "eval__at_end": False,
    "optimizer__learning_rate": 1e-4,
    "update__tokens_per_micro_batch": 10**6,
}


def train_with_a_limit(folder: str, room: int) -> None:
    """Trains; from the first optimizer step on `room` bytes more may be had. 0: no limit."""
    live = built(Path(folder), **WIDE)
    accumulate = train.accumulate

    def limited(*args: Any) -> Any:
        if room and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + room
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return accumulate(*args)

    train.accumulate = limited
    train.train(live)
    live.close()
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MB")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep to RLIMIT_AS")
def test_the_allocator_itself_fails(tmp_path: Path) -> None:
    lines = {}
    for room in (0, 220 * 2**20):
        folder = tmp_path / str(room)
        said = as_program(str(folder), str(room), MALLOC_ARENA_MAX="1")
        assert ("note: out of memory: micro-batches of " in said) == (room > 0), said
        text = (folder / "run" / "metrics.jsonl").read_text()
        lines[room > 0] = [json.loads(line) for line in text.splitlines()]
    assert len(lines[True]) == 3
    for limited, free in zip(lines[True], lines[False], strict=True):
        assert free["grad_norm"] > 0
        for key in ("loss", "grad_norm"):
            assert limited[key] == pytest.approx(free[key], rel=1e-5, abs=1e-6), key


if __name__ == "__main__":
    train_with_a_limit(sys.argv[1], int(sys.argv[2]))
    exit_process(0)
