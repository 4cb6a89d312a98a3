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

from grpo_cli import cli
from grpo_cli.training import loop

STEP = 3
entered: set[str] = set()
steps_begun = 0
take_step = loop.take_step


def note(frame: FrameType, event: str, argument: Any) -> None:
    if steps_begun == STEP and event == "call":
        entered.add(frame.f_globals.get("__name__", ""))


def counted(*given: Any, **named: Any) -> Any:
    global steps_begun
    steps_begun += 1
    return take_step(*given, **named)


def main() -> None:
    names_too = "--count" not in sys.argv
    loop.take_step = counted
    threading.setprofile(note)
    sys.setprofile(note)
    words = f"train recipe=arithmetic_tiny steps={STEP + 1} dataset.eval=null eval.every=0".split()
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        sys.argv = ["grpo", *words, "eval.at_start=false", f"output_dir={folder}", "overwrite=true"]
        with contextlib.suppress(SystemExit):
            cli.main()
    sys.setprofile(None)
    if steps_begun <= STEP:
        raise SystemExit(f"the run ended after {steps_begun} steps:\n{said.getvalue()[-2000:]}")
    modules = sorted(name for name in entered if name.startswith("grpo_cli"))
    for name in modules if names_too else ():
        print("  " * name.count(".") + name.rpartition(".")[2], f"({name})")
    print(f"{len(modules)} modules")


if __name__ == "__main__":
    main()
