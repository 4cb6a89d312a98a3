"""Stage tests: runs the tests marked `gpu`. The dry run only collects them."""

from __future__ import annotations

import re
import sys

from cases import ROOT, Case, Figures, Setting

MARK = "@pytest.mark.gpu"


def cases(setting: Setting) -> list[Case]:
    return [Case("tests", "pytest -m gpu", lambda: run(setting))]


def files() -> list[str]:
    """Returns the files that have tests marked `gpu`; to import all others takes long."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in found if MARK in path.read_text(encoding="utf-8")]


def run(setting: Setting) -> Figures:
    """Returns pytest's counts."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files()]
    command += ["--collect-only"] if setting.dry else ["--durations=5", "--tb=short"]
    code, printed = setting.run_program(command)
    counts = re.findall(r"(\d+)[/ ]?\d* (passed|failed|errors?|skipped|tests collected)", printed)
    figures: Figures = {what: int(count) for count, what in counts}
    if code:
        failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", printed, re.MULTILINE)
        figures |= {"status": "failed", "error": "; ".join(failed) or printed.strip()[-300:]}
    return figures
