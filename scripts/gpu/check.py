"""Checks grpo on a GPU: tests, a run, precision, speed, memory. `check.sh` starts it.

    python scripts/gpu/check.py --out FOLDER [--dry-run] [--stages speed,decoding]

The cases run one after another in a process of their own that stays (importing torch takes long). A
case that raises, ends the process or takes longer than its stage has left becomes a row with the
reason, and the next one runs. Every row is written at once: FOLDER/results.jsonl has a row for each
case, FOLDER/table.md a Markdown table for each stage, FOLDER/log what the cases print.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cases import Case, Figures, Setting

LIMIT = 525.0  # seconds of all stages together; check.sh has to install packages, too
STAGES = {  # the module of each stage, and its seconds at most
    "tests": ("training", 75.0),
    "demo": ("training", 60.0),
    "precision": ("precision", 60.0),
    "speed": ("speed", 240.0),
    "decoding": ("speed", 60.0),
    "adapters": ("speed", 45.0),
    "resume": ("training", 45.0),
}
START = 90.0  # seconds in which a worker has to have listed its cases
PATIENCE = 5.0  # seconds for a process that has closed its connection to end
FAILED = ("failed", "wrong", "died", "cut off", "not begun")

Row = dict[str, Any]  # stage, case, status, seconds, error, figures


class Worker:
    """Runs cases in a process of its own, one at a time."""

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, setting), daemon=True)
        self.process.start()
        other.close()

    def run(self, number: int, seconds: float) -> Any:
        """Returns the row of a case; None if there is none after so many seconds.

        Raises:
            EOFError: the process has ended.
        """
        with contextlib.suppress(BrokenPipeError):
            self.link.send(number)
        return self.answer(seconds)

    def answer(self, seconds: float) -> Any:
        """Returns what the process sends next; None if it takes too long."""
        try:
            return self.link.recv() if self.link.poll(max(seconds, 0)) else None
        except ConnectionResetError:
            raise EOFError from None

    def end(self, patience: float) -> int | None:
        """Ends the process and the programs that it has started; returns its exit code."""
        self.process.join(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


class Checker:
    """Runs the cases of stages with a worker, or with another one after it has ended."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.deadline = time.monotonic() + LIMIT
        self.machine = machine()
        self.rows: list[Row] = []
        self.worker: Worker | None = None
        self.cases: list[list[str]] = []  # stage and name of each, once a worker has listed them
        setting.out.mkdir(parents=True, exist_ok=True)
        (setting.out / "results.jsonl").write_text("", encoding="utf-8")

    def stage(self, stage: str) -> None:
        """Runs the cases of a stage, each as long as the stage has time."""
        left = STAGES[stage][1]
        if error := self.start():
            self.add(row(stage, "start", "died", error=error))
            return
        for number, (its_stage, name) in enumerate(self.cases):
            if its_stage == stage:
                begin = time.monotonic()
                found = self.case(number, stage, name, left)
                found["seconds"] = round(time.monotonic() - begin, 3)
                self.add(found)
                left -= found["seconds"]

    def case(self, number: int, stage: str, name: str, seconds: float) -> Row:
        """Returns the row of a case, whatever happens to it, after so many seconds at most."""
        seconds = min(seconds, self.deadline - time.monotonic())
        if seconds <= 0:
            return row(stage, name, "not begun", "no time was left")
        if error := self.start():
            return row(stage, name, "died", error)
        assert self.worker is not None, "it has been started"
        try:
            found: Row | None = self.worker.run(number, seconds)
        except EOFError:
            return row(stage, name, "died", f"the process ended with {self.end(PATIENCE)}")
        if found is None:
            self.end()
            return row(stage, name, "cut off", f"not finished after {seconds:.0f} s")
        if found.pop("is_broken"):
            self.end()
        return found

    def start(self) -> str:
        """Starts a worker if there is none; returns why there is none, or ""."""
        if self.worker is not None:
            return ""
        self.worker = Worker(self.setting)
        try:
            cases = self.worker.answer(min(START, self.deadline - time.monotonic()))
        except EOFError:
            return f"the process ended with {self.end(PATIENCE)}; see the log"
        if cases is None:
            self.end()
            return "the process was not ready in time"
        self.cases = cases
        return ""

    def end(self, patience: float = 0.0) -> int | None:
        """Ends the worker, if there is one; returns its exit code."""
        worker, self.worker = self.worker, None
        return None if worker is None else worker.end(patience)

    def add(self, found: Row) -> None:
        """Prints and stores a row."""
        self.rows.append(found)
        with (self.setting.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        text = table(self.machine, self.rows)
        (self.setting.out / "table.md").write_text(text, encoding="utf-8")
        line = f"{found['stage']:10} {found['status']:9} {found['seconds']:6.1f} s  {found['case']}"
        print(line, flush=True)


def row(stage: str, case: str, status: str, error: str = "", figures: Figures | None = None) -> Row:
    return {
        "stage": stage, "case": case, "status": status, "seconds": 0.0, "error": error,
        "figures": figures or {},
    }  # fmt: skip


def table(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """Returns a Markdown table for each stage, with a column for each figure of its cases."""
    parts = [", ".join(f"{key} {value}" for key, value in machine.items())]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = [row for row in rows if row["stage"] == stage]
        names = list(dict.fromkeys(name for row in own for name in row["figures"]))
        lines = ["| " + " | ".join([stage, "status", *names]) + " |"]
        lines.append("| --- " * (2 + len(names)) + "|")
        for row in own:
            cells = [cell(row["figures"].get(name, "")) for name in names]
            lines.append("| " + " | ".join([row["case"], row["status"], *cells]) + " |")
        lines += [""] if any(row["error"] for row in own) else []
        lines += [f"- {row['case']}: {row['error']}" for row in own if row["error"]]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def cell(value: Any) -> str:
    """Writes a figure: three digits of a fraction, thousands apart."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def work(link: Connection, setting: Setting) -> None:
    """Runs the cases whose numbers come through a connection, and answers each with its row."""
    os.setpgid(0, 0)  # so that programs that a case has started end with it
    log = os.open(setting.out / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    cases: list[Case] = []
    for module in dict.fromkeys(module for module, _ in STAGES.values()):
        cases += importlib.import_module(module).cases(setting)
    link.send([[case.stage, case.name] for case in cases])
    with contextlib.suppress(EOFError):
        while True:
            link.send(run_case(cases[link.recv()]))


def run_case(case: Case) -> Row:
    """Returns the row of a case; `is_broken` if the process cannot run another one."""
    import torch

    from grpo_cli.models.memory import is_out_of_memory, release

    print(f"\n== {case.stage}: {case.name}", flush=True)
    is_broken, error, status = False, "", "ok"
    figures: Figures = {}
    try:
        figures = case.run()
        status = figures.pop("status", "ok")
        error = figures.pop("error", "")
    except Exception as failure:  # any case may fail in any way, and the next one shall run
        sentence = next(iter(str(failure).strip().splitlines()), "")
        status, error = "failed", f"{type(failure).__name__}: {sentence}"
        traceback.print_exc()
        # After an error of a kernel nothing runs in this process any more.
        is_broken = "CUDA error" in str(failure) and not is_out_of_memory(failure)
    if not is_broken:
        release()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
    return row(case.stage, case.name, status, error, figures) | {"is_broken": is_broken}


def machine() -> dict[str, Any]:
    """Returns the machine and the versions that the figures come from."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "gpu": output(query) or "none",
        "cores": os.cpu_count(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "commit": output(git) or "unknown",
    }


def output(command: list[str]) -> str:
    """Returns what a program prints; "" if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of the stages")
    given = parser.parse_args()
    only = given.stages.split(",")
    if unknown := [stage for stage in only if stage not in STAGES]:
        parser.error(f"--stages: there is no {', '.join(unknown)}; there are {', '.join(STAGES)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if given.dry_run:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Some machines announce instructions that they lack (docs/performance.md).
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the worker
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="grpo-gpu-check-") as scratch:
        checker = Checker(Setting(given.dry_run, given.out.resolve(), Path(scratch)))
        try:
            for stage in only:
                checker.stage(stage)
        finally:
            checker.end()
    bad = [found for found in checker.rows if found["status"] in FAILED]
    print(table(checker.machine, checker.rows))
    print(f"{len(checker.rows)} cases, {len(bad)} not right, {time.monotonic() - begin:.0f} s")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
