"""Writes tests/config/trl_names.txt: the names of TRL's settings, from the installed TRL.

.venv-bench/bin/python scripts/trl_names.py
"""

import dataclasses
from pathlib import Path

import trl  # type: ignore[import-not-found]

NAMES = Path(__file__).resolve().parent.parent / "tests" / "config" / "trl_names.txt"

if __name__ == "__main__":
    kinds = (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
    names = sorted({field.name for kind in kinds for field in dataclasses.fields(kind)})
    NAMES.write_text(f"# TRL {trl.__version__}\n" + "\n".join(names) + "\n", encoding="utf-8")
