"""Prints the modules of grpo_cli of which a function is entered in step 3 of arithmetic_tiny.

python scripts/step_modules.py          # a tree by package, all threads; --count: the number alone
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from types import FrameType
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

from grpo_cli import cli, train

STEP = 3
entered: set[str] = set()
steps_begun = 0
take_step = train.take_step


def note(frame: FrameType, event: str, argument: Any) -> None:
    """Notes the module of a function that is called; a profiler's hook."""
    if steps_begun == STEP and event == "call":
        entered.add(frame.f_globals.get("__name__", ""))


def counted(*given: Any, **named: Any) -> Any:
    """Takes a step and counts it."""
    global steps_begun
    steps_begun += 1
    return take_step(*given, **named)


def main() -> None:
    only_count = "--count" in sys.argv
    train.take_step = counted
    threading.setprofile(note)
    sys.setprofile(note)
    words = ["train", "recipe=arithmetic_tiny", f"steps={STEP + 1}", "dataset.eval=null"]
    words += ["eval.every=0"]
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        sys.argv = ["grpo", *words, "eval.at_start=false", f"output_dir={folder}", "overwrite=true"]
        with contextlib.suppress(SystemExit):
            cli.main()
    sys.setprofile(None)
    if steps_begun <= STEP:
        raise SystemExit(f"the run ended after {steps_begun} steps:\n{said.getvalue()[-2000:]}")
    modules = sorted(name for name in entered if name.startswith("grpo_cli"))
    if not only_count:
        for name in modules:
            print("  " * name.count(".") + name.rpartition(".")[2], f"({name})")
    print(f"{len(modules)} modules")


if __name__ == "__main__":
    main()
