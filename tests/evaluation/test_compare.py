"""`grpo eval compare`: what is paired, what it comes to, and what is refused."""

import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from grpo_cli.errors import UserError
from grpo_cli.evaluation.compare import compare
from grpo_cli.evaluation.paired import difference_interval, mcnemar, sign_flip

Completed = tuple[str, str, int, int, bool | None]  # benchmark, mode, row, sample, correct


def store(
    folder: Path,
    completed: list[Completed],
    *,
    known: dict[int, dict[str, Any]] | None = None,  # columns of each row
    report: dict[str, Any] | None = None,  # settings in eval.json
) -> Path:
    folder.mkdir(parents=True)
    names = dict.fromkeys(c[0] for c in completed)
    evaluation = {
        "checkpoint": "model",
        "benchmarks": {name: {"mode": "cot"} for name in names},
        "settings": {},
        "versions": {},
        **(report or {}),
    }
    path = folder / "eval.json"
    path.write_text(json.dumps(evaluation))
    columns: dict[str, list[Any]] = {
        name: [c[i] for c in completed]
        for i, name in enumerate(("benchmark", "mode", "row", "sample", "correct"))
    }
    columns["completion"] = ["so it is" for _ in completed]
    columns["columns"] = [json.dumps(known[c[2]] if known else {}) for c in completed]
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "completions.parquet")
    return path


def single(right: list[bool | None], name: str = "gsm8k", mode: str = "cot") -> list[Completed]:
    return [(name, mode, row, 0, correct) for row, correct in enumerate(right)]


def said() -> Console:
    return Console(file=io.StringIO(), width=200)


def text_of(console: Console) -> str:
    return console.file.getvalue()


def refusal(first: Path, second: Path) -> str:
    """The error of comparing two evaluations; "" where they can be compared."""
    try:
        compare(first, second, said())
    except UserError as error:
        return str(error)
    return ""


def test_single_completions(tmp_path: Path) -> None:
    first = store(tmp_path / "a", single([True, True, False, False, False, True]))
    second = store(tmp_path / "b", single([True, False, True, True, True, True]))
    console = said()
    found = compare(first, second, console)
    numbers = found["benchmarks"]["gsm8k"]["cot"]
    low, high = numbers.pop("interval_95")
    assert numbers == {
        "n": 6,
        "accuracy_first": 0.5,
        "accuracy_second": 5 / 6,
        "difference": pytest.approx(1 / 3),
        "p_value": 0.625,  # 2 * (1 + 4) / 16
        "test": "mcnemar",
        "flipped_to_right": [2, 3, 4],
        "flipped_to_wrong": [1],
        "unpaired": 0,
    }
    # Bonett and Price: (3 + 1) / 8 and (1 + 1) / 8; 0.25 ± 1.959964 * sqrt((0.75 - 0.0625) / 8)
    assert (low, high) == pytest.approx((-0.324565, 0.824565), abs=1e-6)
    assert "rows from wrong to right: 2, 3, 4\n" in text_of(console)
    assert "rows from right to wrong: 1\n" in text_of(console)
    assert "warning" not in text_of(console)
    assert "+33.3" in text_of(console)


def test_several_completions_a_row(tmp_path: Path) -> None:
    def of_row(row: int, right: int, judged: int) -> list[Completed]:
        return [("math", "tir", row, i, i < right) for i in range(judged)]

    # Shares 1/4, 1/2, 1, 0 and 3/4, 1/2, 1/2, 0, of 4 and of 2 completions.
    first = of_row(7, 1, 4) + of_row(8, 2, 4) + of_row(9, 4, 4) + of_row(10, 0, 4)
    second = of_row(10, 0, 2) + of_row(9, 1, 2) + of_row(8, 1, 2) + of_row(7, 3, 4)
    first.append(("math", "tir", 7, 4, None))  # was not judged
    found = compare(store(tmp_path / "a", first), store(tmp_path / "b", second), said())
    numbers = found["benchmarks"]["math"]["tir"]
    assert numbers["accuracy_first"] == 7 / 16
    assert numbers["accuracy_second"] == 7 / 16
    assert numbers["difference"] == 0
    # Squares 1/4 + 1/4 of two differing rows, s² = 1/4: half = z sqrt(1 / 6 / 6).
    assert numbers["interval_95"] == pytest.approx([-1.959964 / 6, 1.959964 / 6], abs=1e-6)
    assert (numbers["test"], numbers["p_value"]) == ("sign_flip", 1.0)
    # From 1 to 1/2 is not a flip.
    assert (numbers["flipped_to_right"], numbers["flipped_to_wrong"]) == ([7], [])


def test_what_is_refused(tmp_path: Path) -> None:
    good = store(tmp_path / "good", single([True]))
    assert "is missing" in refusal(good, tmp_path / "none" / "eval.json")
    (tmp_path / "other.json").write_text("{}")
    assert "other.json: cannot be read: it has no 'benchmarks'" in refusal(
        good, tmp_path / "other.json"
    )
    math_only = store(tmp_path / "math", single([True], "math"))
    assert "the first has gsm8k (cot), the second math (cot)" in refusal(good, math_only)
    own_rows = store(tmp_path / "own", [("rows", None, 5, 0, True)])
    assert refusal(good, own_rows).endswith(" the first has gsm8k (cot), the second rows.")
    later = store(tmp_path / "later", [("gsm8k", "cot", 5, 0, True)])
    assert "have no row in common" in refusal(good, later)
    pyarrow.parquet.write_table(
        pyarrow.table({"benchmark": ["gsm8k"]}), later.parent / "completions.parquet"
    )
    assert "completions.parquet: cannot be read" in refusal(good, later)


def question(text: str, **more: Any) -> dict[str, Any]:
    return {"question": text, **more}


def test_rows_of_different_problems_are_refused(tmp_path: Path) -> None:
    right = single([True, False, True])
    problems = {0: question("a", answer=1.0), 1: question("b", seed=7), 2: question("c")}
    first = store(tmp_path / "a", right, known=problems)

    def against(name: str, known: dict[int, dict[str, Any]]) -> str:
        return refusal(first, store(tmp_path / name, right, known=known))

    moved = {0: problems[0], 1: question("c"), 2: question("d")}
    said = "2 of the 3 rows that both have are different problems, the first of them row 1;"
    assert said in against("b", moved)
    # A column that one of them lacks says nothing.
    alike = {0: question("a", answer=1, level=3), 1: question("b"), 2: question("c", seed=8)}
    assert against("c", alike) == ""


def judged(**settings: Any) -> dict[str, Any]:
    return {"benchmark": {"gsm8k": {"data": "openai/gsm8k", **settings}}}


def test_different_judges_are_refused(tmp_path: Path) -> None:
    plain = store(tmp_path / "a", single([True]), report=judged())

    def against(name: str, report: dict[str, Any]) -> str:
        return refusal(plain, store(tmp_path / name, single([True]), report=report))

    said = "the reward of gsm8k differs, math and length; judge both alike"
    assert said in against("b", judged(reward="length"))
    assert "the args of gsm8k differs, {} and {'units': True};" in against(
        "c", judged(args={"units": True})
    )
    assert against("d", judged(reward="math", args={})) == "", "the defaults, said"
    assert against("e", judged(reward="grpo_cli.rewards.math:math")) == "", "the same by its path"
    assert against("f", {"benchmark": {"math": {"reward": "length"}}}) == "", "of another benchmark"
    assert against("g", {}) == "", "not known"


def test_settings_that_differ_are_noted(tmp_path: Path) -> None:
    evaluation = {"num_samples": 1, "temperature": None, "max_completion_tokens": None}
    generation = {"max_completion_tokens": 1024}
    report = {**judged(shots=4), "eval": evaluation, "generation": generation}
    first = store(tmp_path / "a", single([True]), report=report)

    def notes(name: str, report: dict[str, Any]) -> list[str]:
        console = said()
        compare(first, store(tmp_path / name, single([True]), report=report), console)
        return [line for line in text_of(console).splitlines() if line.startswith("note")]

    other = {
        **judged(max_completion_tokens=256),
        "eval": {**evaluation, "num_samples": 8},
        "generation": generation,
    }
    assert notes("b", other) == [
        "note: settings differ: eval.num_samples 1 and 8, benchmark.gsm8k.shots, "
        "benchmark.gsm8k.max_completion_tokens"
    ]
    assert notes("c", report) == []
    # A file may record fewer settings.
    assert notes("d", {"eval": {"num_samples": 2}}) == [
        "note: settings differ: eval.num_samples 1 and 2"
    ]
    assert notes("e", {}) == []
    # A benchmark has a limit of its own, and the recipes of two models have others.
    system = {"dataset": {"system": "Think. " * 20}, "mixed_precision": "no"}
    own = {**judged(shots=4, max_completion_tokens=512), "eval": evaluation, **system}
    first = store(tmp_path / "f", single([True]), report={**own, "generation": generation})
    bf16 = {"mixed_precision": "bf16", "dataset": {"system": None}}
    assert notes("g", {**own, **bf16, "generation": {"max_completion_tokens": 16}}) == [
        "note: settings differ: mixed_precision no and bf16, dataset.system"
    ]


def test_sign_flips_by_hand() -> None:
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([0.5, 0.5, 0.0]) == 0.5  # ++ and -- of four
    differences = [0.1, 0.2, -0.3, 0.4, 0.7]
    sums = [
        abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=5)
    ]
    assert sign_flip(differences) == sum(x >= 1.1 - 1e-9 for x in sums) / 32


def test_sign_flips_of_single_completions_are_mcnemar_s_test() -> None:
    for gained in range(9):
        for lost in range(8):
            differences = [1.0] * gained + [-1.0] * lost + [0.0] * 3
            assert sign_flip(differences) == pytest.approx(mcnemar(gained, lost), abs=1e-12)
    drawn = sign_flip([1.0] * 40 + [-1.0] * 25)
    expected = mcnemar(40, 25)  # 0.082
    assert abs(drawn - expected) < 5 * math.sqrt(expected / 100_000)
    assert drawn == sign_flip([1.0] * 40 + [-1.0] * 25)
    assert sign_flip([1.0] * 60) == 1 / 100_001


def test_interval_without_a_difference_is_no_point() -> None:
    # z * sqrt(2 / (n + 2)) / sqrt(n + 2)
    expected = 1.959964 * math.sqrt(2) / 100
    assert difference_interval([0.0] * 98) == pytest.approx((-expected, expected), abs=1e-7)
    # 1/3 - z * sqrt((3 / 3 - 1 / 9) / 3)
    assert difference_interval([1.0]) == (pytest.approx(-0.733536, abs=1e-6), 1.0)


HOLDS, CAUTIOUS = (0.93, 0.97), (0.95, 1.0)


@pytest.mark.parametrize(
    ("problems", "completions", "beta", "redrawn", "solved", "limits"),
    [
        # B is A with a share `redrawn` of the problems and a share `solved` of the wrong answers.
        (100, 1, (1.0, 1.0), 0.2, 0.1, HOLDS),
        (250, 1, (0.3, 0.3), 0.1, 0.05, HOLDS),
        (250, 1, (2.0, 0.1), 0.1, 0.0, HOLDS),  # 16 problems differ
        (100, 4, (1.0, 1.0), 0.0, 0.0, HOLDS),
        (100, 16, (0.3, 0.3), 0.1, 0.05, HOLDS),
        (250, 16, (8.0, 2.0), 0.0, 0.1, HOLDS),
        (30, 64, (1.0, 1.0), 0.2, 0.1, HOLDS),
        (30, 1, (0.3, 0.3), 0.1, 0.05, HOLDS),  # 7 problems differ
        (30, 1, (2.0, 0.1), 0.1, 0.0, CAUTIOUS),  # 2 do
        (100, 1, (2.0, 0.1), 0.0, 0.02, CAUTIOUS),
    ],
)
def test_the_interval_holds_the_true_difference(
    problems: int,
    completions: int,
    beta: tuple[float, float],
    redrawn: float,
    solved: float,
    limits: tuple[float, float],
) -> None:
    """Of 2,000 paired evaluations, each of other problems. What is found varies by 0.005."""
    a, b = beta
    rng = np.random.default_rng([problems, completions, int(10 * a), int(100 * redrawn)])
    size = (2000, problems)
    first = rng.beta(a, b, size)
    second = np.where(rng.random(size) < redrawn, rng.beta(a, b, size), first)
    second = second + solved * (1 - second)
    right = rng.binomial(completions, first), rng.binomial(completions, second)
    differences = ((right[1] - right[0]) / completions).tolist()
    truth = solved * (1 - a / (a + b))
    intervals = [difference_interval(row) for row in differences]
    share = sum(low <= truth <= high for low, high in intervals) / 2000
    assert limits[0] <= share <= limits[1], share
