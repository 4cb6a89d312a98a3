"""A viewer follows the newest completions, and stays where a page was turned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_cli.reporting.live.following import Followed
from grpo_cli.reporting.live.pager import Pager
from grpo_cli.reporting.run_folder import RunFolder
from tests.reporting.live.test_completions import store


@pytest.fixture
def pager(tmp_path: Path) -> Pager:
    for step in (1, 10):
        store(tmp_path / "completions" / f"step-{step}.parquet", [0.0, 1.0, 0.9, 0.1])
    made = Pager(Followed(RunFolder(tmp_path)))
    look(made)
    return made


def look(pager: Pager) -> bool:
    pager.run.poll()
    return pager.load()


def add(pager: Pager, step: int) -> None:
    store(pager.run.folder.completions(step), [0.0, 1.0])


def test_newer_completions_are_shown_as_they_come(pager: Pager) -> None:
    assert (pager.step, pager.line("good"), pager.line("bad")) == (10, 1, 0)
    assert not look(pager)
    add(pager, 20)
    assert look(pager)
    assert pager.step == 20


def test_a_page_that_was_turned_stays(pager: Pager) -> None:
    pager.turn("good", 1)
    assert (pager.line("good"), pager.line("bad")) == (2, 0)
    pager.turn("good", 1)
    assert pager.line("good") == 2, "the last one"
    add(pager, 20)
    look(pager)
    assert (pager.step, pager.line("good")) == (10, 2)
    pager.follow()
    look(pager)
    assert (pager.step, pager.line("good")) == (20, 1)


def test_steps(pager: Pager) -> None:
    pager.turn_step(1)
    look(pager)
    assert pager.step == 10
    for expected in (1, 1):
        pager.turn_step(-1)
        look(pager)
        assert pager.step == expected
    pager.choose("bad", "all")
    pager.turn("bad", 3)
    assert pager.line("bad") == 3


def test_files_that_are_replaced_or_removed(pager: Pager) -> None:
    pager.turn("good", 1)
    path = pager.run.folder.completions(10)
    store(path, [0.0, 1.0])
    assert look(pager)
    assert (pager.step, pager.line("good")) == (10, 1)
    path.unlink()
    os.utime(path.parent, ns=(0, 0))
    assert look(pager)
    assert pager.step == 1
    pager.run.folder.completions(1).unlink()
    os.utime(path.parent, ns=(0, 1))
    assert look(pager)
    assert (pager.pages, pager.line("good"), pager.order("bad")) == (None, None, [])
    pager.turn("good", 1)
    pager.turn_step(-1)
    assert not look(pager)


def test_a_torn_file_leaves_what_was_shown(pager: Pager) -> None:
    path = pager.run.folder.completions(20)
    path.write_text("half a file", encoding="utf-8")
    look(pager)
    assert (pager.step, pager.line("good")) == (10, 1)
