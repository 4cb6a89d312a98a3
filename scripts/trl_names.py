"""Writes tests/config/trl_names.txt: what users of TRL type, from the installed TRL.

    .venv-bench/bin/python scripts/trl_names.py

The fields of GRPOConfig, with those of TrainingArguments, and of the arguments of TRL's scripts.
"""

import dataclasses
from pathlib import Path

import trl  # type: ignore[import-not-found]

KINDS = (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
NAMES = Path(__file__).resolve().parent.parent / "tests" / "config" / "trl_names.txt"

if __name__ == "__main__":
    names = sorted({field.name for kind in KINDS for field in dataclasses.fields(kind)})
    NAMES.write_text(f"# TRL {trl.__version__}\n" + "\n".join(names) + "\n", encoding="utf-8")
