"""How an optimizer batch is computed has no say in its gradient: under every loss, in float64.

Other micro-batches (and with them other padding), another order of rows, two and three gloo
processes: all within 1e-6 of the gradient of one process and one micro-batch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_cli.distributed import Workers
from tests.optimizer_batch import Found, all_gradients, cases, make_groups

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def whole() -> Found:
    """One process, one micro-batch."""
    return all_gradients(Workers("cpu"), make_groups(), tokens_per_micro_batch=10**6)


def assert_same(found: Found, whole: Found) -> None:
    assert found.keys() == whole.keys() == cases().keys()
    for name, (gradient, metrics) in whole.items():
        scale = gradient.abs().max()
        assert scale > 1e-4, f"{name}: nothing to compare"
        difference = (found[name][0] - gradient).abs().max() / scale
        assert difference < 1e-6, f"{name}: gradients differ by {difference:.1e} of the largest"
        assert found[name][1].keys() == metrics.keys()
        for key, value in metrics.items():
            assert found[name][1][key] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, key)


@pytest.mark.parametrize("tokens", [1, 20, 60])
def test_micro_batches(whole: Found, tokens: int) -> None:
    assert_same(all_gradients(Workers("cpu"), make_groups(), tokens), whole)


def test_order(whole: Found) -> None:
    groups = make_groups()
    assert_same(all_gradients(Workers("cpu"), groups[3:] + groups[:3][::-1], 40), whole)


def test_what_is_not_computed_has_no_gradient(whole: Found) -> None:
    whole = dict(whole)
    every = all_gradients(Workers("cpu"), make_groups(), 40, skip_silent=False)
    # What is measured of tokens leaves out those that were not computed; but for the entropy, which
    # every step of this test asks for.
    of_all = ("loss", "policy_loss", "grad_norm", "entropy", "learning_rate")
    for found in (every, whole):
        for name, (gradient, metrics) in found.items():
            found[name] = gradient, {k: v for k, v in metrics.items() if k in of_all}
    assert_same(every, whole)


@pytest.mark.parametrize("tokens", [1, 40])
def test_padded_rows(whole: Found, tokens: int) -> None:
    assert_same(all_gradients(Workers("cpu"), make_groups(), tokens, packed=False), whole)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes(whole: Found, processes: int, tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={processes}", "tests/optimizer_batch.py", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(torch.load(out, weights_only=True), whole)


def test_the_losses_are_not_all_the_same(whole: Found) -> None:
    # Without this, the tests above could hold because a switch does nothing.
    gradients = {name: gradient for name, (gradient, _) in whole.items()}
    plain = gradients["bnpo"]
    same = [n for n, g in gradients.items() if n != "bnpo" and torch.allclose(g, plain, rtol=1e-9)]
    assert same == [], "these do nothing, or nothing that this batch shows"
