"""Writes the table of modules and lines per package in docs/architecture.md.

python scripts/count_lines.py            prints the table
python scripts/count_lines.py --write    writes it into docs/architecture.md
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- lines: python scripts/count_lines.py --write -->", "<!-- end of lines -->"
# (modules, lines) of commit dd5be77, whose modules lay in one folder; each counts for the package
# that it moved to.
BEFORE = {
    "(root)": (7, 901),
    "commands": (8, 3384),
    "training": (11, 2051),
    "evaluation": (10, 2923),
    "planning": (1, 686),
    "reporting": (6, 709),
    "checkpoints": (7, 1529),
    "generation": (11, 1996),
    "generation/vllm": (10, 2238),
    "scoring": (6, 1405),
    "sandbox": (2, 1511),
    "models": (9, 2012),
    "algorithm": (11, 1159),
    "data": (1, 394),
    "distributed": (8, 1736),
    "config": (5, 1974),
}


def table() -> str:
    """Returns the table as Markdown; an empty `__init__.py` counts as no module."""
    modules: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    source = ROOT / "grpo_cli"
    for path in sorted(source.rglob("*.py")):
        number = len(path.read_text("utf-8").splitlines())
        package = path.parent.relative_to(source).as_posix()
        package = "(root)" if package == "." else package
        modules[package] += number > 0
        lines[package] += number
    rows = [
        f"| `{name}` | {BEFORE.get(name, (0, 0))[0]} | {BEFORE.get(name, (0, 0))[1]:,} "
        f"| {modules[name]} | {lines[name]:,} |\n"
        for name in in_order(set(lines) - set(BEFORE))
    ]
    before = [sum(column) for column in zip(*BEFORE.values(), strict=True)]
    total = f"| **all** | {before[0]} | {before[1]:,} | {modules.total()} | {lines.total():,} |\n"
    head = "| package | modules before | lines before | modules | lines |\n"
    return head + "| --- | --- | --- | --- | --- |\n" + "".join(rows) + total


def in_order(added: set[str]) -> list[str]:
    """Returns the packages from the top layer down, each added one behind its parent."""
    names = list(BEFORE)
    for name in sorted(added):
        parent = name.rpartition("/")[0]
        names.insert(names.index(parent) + 1 if parent in names else len(names), name)
    return names


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    before, begin, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} must hold {BEGIN}"
    assert end, f"{PAGE} must hold {END}"
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
