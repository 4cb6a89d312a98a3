"""How an optimizer batch is computed has no say in its gradient: under every loss, in float64.

Other micro-batches (and with them other padding), another order of rows, two and three gloo
processes with the whole model each or a share of it: all within 1e-9 of the gradient of one process
and one micro-batch. What is found is 1e-15.
"""

import functools
from collections.abc import Callable, Collection

import pytest
import torch

from grpo_cli.distributed.workers import Workers
from grpo_cli.models.packing import length
from tests import programs
from tests.optimizer_batch import VARIANTS, Found, all_gradients, cases, make_groups, share


@pytest.fixture(scope="module")
def whole() -> Found:
    """One process, one micro-batch."""
    return all_gradients(Workers("cpu"), make_groups(), tokens_per_micro_batch=10**6)


def assert_same(found: Found, whole: Found, names: Collection[str] | None = None) -> None:
    """names: of the cases that were computed; None: all."""
    assert found.keys() == set(names or cases())
    for name, (own, own_metrics) in found.items():
        gradient, metrics = whole[name]
        scale = gradient.abs().max()
        assert scale > 1e-4, f"{name}: nothing to compare"
        difference = (own - gradient).abs().max() / scale
        limit = 1e-5 if name == "router" else 1e-9  # Mixtral's router rounds to float32
        assert difference < limit, f"{name}: gradients differ by {difference:.1e} of the largest"
        assert own_metrics.keys() == metrics.keys()
        for key, value in metrics.items():
            assert own_metrics[key] == pytest.approx(value, rel=limit, abs=limit / 1e3), (name, key)


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.runs), 20, 60])
def test_micro_batches(whole: Found, tokens: int) -> None:
    assert_same(all_gradients(Workers("cpu"), make_groups(), tokens), whole)


def test_order(whole: Found) -> None:
    groups = make_groups()
    assert_same(all_gradients(Workers("cpu"), groups[3:] + groups[:3][::-1], 40), whole)


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.runs), 40])
def test_padded_rows(whole: Found, tokens: int) -> None:
    assert_same(all_gradients(Workers("cpu"), make_groups(), tokens, packed=False), whole)


# By processes: with three the second's groups are fewer too, and each has fewer rows than two have.
RUN = {2: list(VARIANTS), 3: ["ddp", "few cases", "an idle process"]}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Found]]:
    """Returns what so many processes find, by variant; they are started once."""

    @functools.cache
    def start(processes: int, *names: str) -> dict[str, Found]:
        out = tmp_path_factory.mktemp("found") / "found.pt"
        program = ["tests/optimizer_batch.py", str(out), *(names or RUN[processes])]
        done = programs.run(programs.torchrun(processes, *program))
        assert done.returncode == 0, done.stdout + done.stderr
        return torch.load(out, weights_only=True)

    return start


@pytest.mark.programs
@pytest.mark.parametrize(
    ("processes", "variant"),
    [
        pytest.param(number, name, marks=[pytest.mark.slow] if number > 2 else [])
        for number, names in RUN.items()
        for name in names
    ],
)
@pytest.mark.xdist_group("optimizer_batch")  # they are started once for all variants
def test_processes(
    whole: Found, computed: Callable[..., dict[str, Found]], processes: int, variant: str
) -> None:
    assert_same(computed(processes)[variant], whole, VARIANTS[variant].names)


@pytest.mark.smoke
def test_two_processes_and_one_agree(
    whole: Found, computed: Callable[..., dict[str, Found]]
) -> None:
    assert_same(computed(2, "few cases")["few cases"], whole, VARIANTS["few cases"].names)


@pytest.mark.parametrize("size", RUN)
def test_processes_have_unequal_shares(size: int) -> None:
    rollouts = [[r for g in share(rank, size) for r in g.rollouts] for rank in range(size)]
    assert len({len(own) for own in rollouts}) > 1
    assert len({sum(length(r) for r in own) for own in rollouts}) > 1
    assert share(size, size) == []


def test_the_losses_are_not_all_the_same(whole: Found) -> None:
    # Without this, the tests above could hold because a switch does nothing.
    gradients = {name: gradient for name, (gradient, _) in whole.items()}
    plain = gradients["bnpo"]
    del gradients["router"]  # of another model
    same = [n for n, g in gradients.items() if n != "bnpo" and torch.allclose(g, plain, rtol=1e-9)]
    assert same == [], "these do nothing, or nothing that this batch shows"
