"""Holds the size of the project against `[tool.budget]` in pyproject.toml; part of `make lint`.

python scripts/check_budget.py          # fails where a number is above its budget
python scripts/check_budget.py --write  # lowers each budget to today's number

A line of code is one that is not blank and belongs to no comment, docstring or import.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
CODE_SHARE = (0.60, 0.68)  # of the lines of grpo_cli: no docstring pays for a budget
DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(source: str) -> int:
    """Counts the lines of a Python file that hold code."""
    left: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            left.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in left
        for number, line in enumerate(source.splitlines(), 1)
    )


def measured() -> dict[str, int]:
    """Returns today's numbers by their names in the budget."""
    found: Counter[str] = Counter()
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), names.splitlines()):
        top, suffix = name.split("/")[0], Path(name).suffix
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        if suffix == ".py" and top in ("grpo_cli", "rewards", "scripts", "tests"):
            found[top] += len(text.splitlines())
            if top == "grpo_cli":
                package = name.split("/")[1] if name.count("/") > 1 else "root"
                found[f"grpo_cli/{package}"] += len(text.splitlines())
                found["code"] += lines_of_code(text)
        elif suffix == ".js":
            found["javascript"] += len(text.splitlines())
        elif suffix == ".md" and (top == "docs" or "/" not in name):
            found["words"] += len(text.split())
    return dict(sorted((found | knobs()).items()))


def knobs() -> dict[str, int]:
    """Counts the leaves of a recipe, and those with the fields of named entries such as rewards."""
    from grpo_cli.config.keys import ENTRIES, KNOBS

    leaves = sum(not any(other.startswith(f"{name}.") for other in KNOBS) for name in KNOBS)
    fields = sum(len(dataclasses.fields(entry)) for entry in ENTRIES.values())
    return {"knobs": leaves, "knobs with entries": leaves + fields}


def main() -> int:
    pyproject = PYPROJECT.read_text(encoding="utf-8")
    budget = tomllib.loads(pyproject)["tool"]["budget"]
    found = measured()
    if "--write" in sys.argv:
        for name, number in found.items():
            line = f'"{name}" = {min(number, budget.get(name, number))}'
            pyproject = re.sub(rf'^"{name}" = \d+', line, pyproject, flags=re.M)
        PYPROJECT.write_text(pyproject, encoding="utf-8")
        return 0
    above = [name for name in found if found[name] > budget.get(name, 0)]
    for name in above:
        print(f"{name}: {found[name]:,}, and the budget is {budget.get(name, 0):,}")
    share = found["code"] / found["grpo_cli"]
    if is_off := not CODE_SHARE[0] <= share <= CODE_SHARE[1]:
        print(f"lines of code are {share:.2f} of the lines of grpo_cli: {CODE_SHARE} is meant")
    return int(is_off or bool(above))


if __name__ == "__main__":
    sys.exit(main())
