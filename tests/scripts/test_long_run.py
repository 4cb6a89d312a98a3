"""The table of scripts/check_long_run.py."""

import sys

from tests.programs import ROOT

sys.path.append(str(ROOT / "scripts"))

import check_long_run


def test_table_compares_the_first_fifth_with_the_last() -> None:
    samples = [
        {"step": step, "resident MiB": 600 + step / 10, "processor seconds": step * 0.2}
        for step in (0, 5, *range(10, 210, 10))
    ]
    lines = check_long_run.table(samples, settled=5)
    assert lines[0] == "| | steps 10 to 30 | steps 170 to 190 |"
    assert lines[2:] == [
        "| resident MiB | 602.0 | 618.0 |",
        "| processor seconds a step | 0.200 | 0.200 |",
    ]
