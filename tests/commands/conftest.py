"""Command lines that run in this process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_cli import cli
from tests.composed import with_recipe

RECIPES = ("train", "plan", "probe", "explain")  # commands that need a recipe
Grpo = Callable[..., tuple[int, str, str]]


@pytest.fixture
def grpo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Grpo:
    """Runs a command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["grpo"])  # Hydra replaces them

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.run_command(with_recipe(words) if words[0] in RECIPES else [*words])
        out, err = capfd.readouterr()
        return code, out, err

    return run
