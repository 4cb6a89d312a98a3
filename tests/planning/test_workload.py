"""Lengths, micro-batches and steps of decoding, by hand."""

from dataclasses import replace

import pytest

from grpo_cli.planning.settings import Settings
from grpo_cli.planning.workload import MicroBatch, Workload, completion_lengths

STEP = Settings(
    strategy="ddp", prompts=4, num_generations=2, prompt_tokens=3, completion_tokens=4,
    max_completion_tokens=4, micro_tokens=20,
)  # fmt: skip


def test_lengths_at_the_limit_are_all_the_limit() -> None:
    assert completion_lengths(9, 8, 3) == [8, 8, 8]


def test_lengths_below_it_are_geometric() -> None:
    """Each token ends a completion with the same probability, here about 0.3."""
    assert completion_lengths(3, 8, 4) == [1, 2, 3, 6]
    many = completion_lengths(20, 64, 2000)
    assert sum(many) / 2000 == pytest.approx(20, rel=0.03)
    assert (min(many), max(many)) == (1, 64)
    assert completion_lengths(1, 64, 2) == [1, 1]


def test_packed_micro_batches_have_each_prompt_once() -> None:
    """A group has 3 + 2 · 3 tokens: two fit into 20. Pairs: 6, and for each row 3 · 3 + 6."""
    found = Workload(STEP, 1).micro_batches
    assert found == [MicroBatch(tokens=18, attended=2 * (6 + 2 * 15), logits=16)] * 2


def test_padded_micro_batches_count_every_place() -> None:
    """Rows of 7 places: two fit into 20; a place sees the places before it."""
    found = Workload(replace(STEP, packed=False), 1).micro_batches
    assert found == [MicroBatch(tokens=14, attended=2 * 28, logits=8)] * 4


def test_a_process_has_its_share_of_the_groups() -> None:
    work = Workload(STEP, 3)
    assert work.groups == 2
    assert work.tokens == 4 * 2 * (3 + 4)
    assert work.own_keys == 4 * (4 * 5 / 2)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, 3 * 8),  # all together; the first token comes with the prompts
        (4, 2 * 3 * 4),  # one half after the other
        (100, 3 * 8),
    ],
)
def test_steps_of_decoding(rows: int, expected: float) -> None:
    assert Workload(STEP, 1).decoding_seconds(rows, lambda n: n) == expected
    assert Workload(STEP, 1).decoding_seconds(8, lambda n: 1.0) == 3


def test_rows_leave_as_they_end() -> None:
    """Lengths 1, 2, 3 and 6 twice: 6 rows at the second token, 4 at the third, 2 at the last 3."""
    longer = replace(STEP, completion_tokens=3, max_completion_tokens=8)
    work = Workload(longer, 1)
    expected = sum(length - 1 for length in work.lengths)
    assert work.decoding_seconds(8, lambda n: n) == expected
    assert work.decoding_seconds(8, lambda n: 1.0) == max(work.lengths) - 1


def test_a_part_of_the_groups_stands_for_all() -> None:
    many = Workload(replace(STEP, prompts=400), 1)
    assert len(many.lengths) < 800
    assert many.decoding_seconds(800, lambda n: n) == pytest.approx(3 * 800)
    assert many.sampled_tokens == pytest.approx(3200)
