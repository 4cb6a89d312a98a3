"""Checks grpo on a GPU: tests, a run, precision, speed, memory. `check.sh` starts it.

    python scripts/gpu/check.py --out FOLDER [--dry-run]

The stages run in the order of STAGES, the cases of a stage one after another in a process of their
own that stays (importing torch takes long). A case that raises, or ends the process, or takes
longer than its stage has left, becomes a row with the reason, and the next one runs. Every row is
written at once, so that a run that is cut off keeps what it has.

    FOLDER/results.jsonl   a row for each case
    FOLDER/results.json    the same, with the machine
    FOLDER/table.md        a Markdown table for each stage
    FOLDER/log             what the cases print
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import Case, Figures, Setting
from results import Results, Row

LIMIT = 525.0  # seconds of all stages together; check.sh has to install packages, too
STAGES = {  # the module of each stage, and its seconds at most
    "tests": ("suite", 75.0),
    "demo": ("training", 60.0),
    "precision": ("precision", 60.0),
    "speed": ("speed", 240.0),
    "decoding": ("decoding", 60.0),
    "adapters": ("adapter_cost", 45.0),
    "resume": ("training", 45.0),
}
START = 90.0  # seconds in which a worker has to have listed its cases
PATIENCE = 5.0  # seconds for a process that has closed its output to end
FAILED = ("failed", "wrong", "died", "cut off", "not begun")


class Worker:
    """Runs cases in a process of its own, one at a time."""

    def __init__(self, setting: Setting) -> None:
        command = [sys.executable, __file__, "--worker", "--out", str(setting.out)]
        command += ["--scratch", str(setting.scratch)]
        command += ["--dry-run"] if setting.dry else []
        # A group of its own, so that programs that a case has started end with it.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        self.unread = b""

    def run(self, number: int, seconds: float) -> Any:
        """Returns the row of a case; None if there is none after so many seconds.

        Raises:
            EOFError: the process has ended.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{number}\n".encode())
            self.process.stdin.flush()
        return self.answer(seconds)

    def answer(self, seconds: float) -> Any:
        """Returns the next line of the process, which is JSON; None if it takes too long."""
        assert self.process.stdout is not None
        pipe, end = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self.unread:
            ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0))
            if not ready:
                return None
            more = os.read(pipe, 2**16)
            if not more:
                raise EOFError
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def end(self, patience: float) -> int:
        """Ends the process and those that it has started; returns its exit code.

        Args:
            patience: seconds that it gets to end by itself.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return self.process.wait()


class Checker:
    """Runs the cases of stages with a worker, or with another one after it has ended."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.deadline = time.monotonic() + LIMIT
        self.results = Results(setting.out, machine())
        self.worker: Worker | None = None
        self.cases: list[list[str]] = []  # stage and name of each, once a worker has listed them

    def stage(self, stage: str) -> None:
        """Runs the cases of a stage, each as long as the stage has time.

        The start of a worker, which imports torch, does not count, except after one that is lost.
        """
        left = STAGES[stage][1]
        if error := self.start():
            self.add(row(stage, "start", "died", error=error))
            return
        for number, (its_stage, name) in enumerate(self.cases):
            if its_stage == stage:
                found = self.case(number, stage, name, left)
                self.add(found)
                left -= found["seconds"]

    def case(self, number: int, stage: str, name: str, seconds: float) -> Row:
        """Returns the row of a case, whatever happens to it, after so many seconds at most."""
        if min(seconds, self.left) <= 0:
            return row(stage, name, "not begun", error="no time was left")
        begin = time.monotonic()
        if error := self.start():
            return row(stage, name, "died", time.monotonic() - begin, error)
        assert self.worker is not None, "it has been started"
        seconds -= time.monotonic() - begin
        try:
            found: Row | None = self.worker.run(number, min(seconds, self.left))
        except EOFError:
            error = f"the process ended with {self.end_worker(PATIENCE)}; see the log"
            return row(stage, name, "died", time.monotonic() - begin, error)
        if found is None:
            self.end_worker()
            seconds = time.monotonic() - begin
            return row(stage, name, "cut off", seconds, f"not finished after {seconds:.0f} s")
        if found.pop("is_broken"):
            self.end_worker()
        return found

    @property
    def left(self) -> float:
        """Returns the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def start(self) -> str:
        """Starts a worker if there is none; returns why there is none, or ""."""
        if self.worker is not None:
            return ""
        self.worker = Worker(self.setting)
        try:
            cases = self.worker.answer(min(START, self.left))
        except EOFError:
            return f"the process ended with {self.end_worker(PATIENCE)}; see the log"
        if cases is None:
            self.end_worker()
            return "the process was not ready in time"
        self.cases = cases
        return ""

    def end_worker(self, patience: float = 0.0) -> int | None:
        """Ends the worker, if there is one; returns its exit code.

        Args:
            patience: seconds that it gets to end by itself.
        """
        worker, self.worker = self.worker, None
        return None if worker is None else worker.end(patience)

    def add(self, found: Row) -> None:
        self.results.add(found)
        line = f"{found['stage']:10} {found['status']:9} {found['seconds']:6.1f} s  {found['case']}"
        print(line, flush=True)


def row(
    stage: str,
    case: str,
    status: str,
    seconds: float = 0.0,
    error: str = "",
    figures: Figures | None = None,
) -> Row:
    return {
        "stage": stage, "case": case, "status": status, "seconds": round(seconds, 3),
        "error": error, "figures": figures or {},
    }  # fmt: skip


def work(setting: Setting) -> None:
    """Runs cases by their numbers on standard input, each answered by a row on standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    log = os.open(setting.out / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    modules = dict.fromkeys(module for module, _ in STAGES.values())
    cases: list[Case] = []
    for module in modules:
        cases += importlib.import_module(module).cases(setting)
    print(json.dumps([[case.stage, case.name] for case in cases]), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_case(cases[int(line)])), file=answers, flush=True)


def run_case(case: Case) -> Row:
    """Returns the row of a case; `is_broken` if the process cannot run another one."""
    import torch

    from grpo_cli.models.memory import is_out_of_memory, release

    print(f"\n== {case.stage}: {case.name}", flush=True)
    start, is_broken, error, status = time.monotonic(), False, "", "ok"
    figures: Figures = {}
    try:
        figures = case.run()
        status = figures.pop("status", "ok")
        error = figures.pop("error", "")
    except Exception as failure:  # any case may fail in any way, and the next one shall run
        sentence = next(iter(str(failure).strip().splitlines()), "")
        status, error = "failed", f"{type(failure).__name__}: {sentence}"
        import traceback

        traceback.print_exc()
        # After an error of a kernel nothing runs in this process any more.
        is_broken = "CUDA error" in str(failure) and not is_out_of_memory(failure)
    if not is_broken:
        release()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
    found = row(case.stage, case.name, status, time.monotonic() - start, error, figures)
    return found | {"is_broken": is_broken}


def machine() -> dict[str, Any]:
    """Returns the machine and the versions that the figures come from."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "gpu": output(query) or "none",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    only = given.stages.split(",")
    if unknown := [stage for stage in only if stage not in STAGES]:
        parser.error(f"--stages: there is no {', '.join(unknown)}; there are {', '.join(STAGES)}")
    scratch = given.scratch or Path(tempfile.mkdtemp(prefix="grpo-gpu-check-"))
    setting = Setting(given.dry_run, given.out.resolve(), scratch)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if setting.dry:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Some machines announce instructions that they lack (docs/performance.md).
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if given.worker:
        work(setting)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the worker
    begin, checker = time.monotonic(), Checker(setting)
    try:
        for stage in only:
            checker.stage(stage)
    finally:
        checker.end_worker()
        shutil.rmtree(scratch, ignore_errors=True)
    rows = checker.results.rows
    bad = [found for found in rows if found["status"] in FAILED]
    print((setting.out / "table.md").read_text(encoding="utf-8"))
    print(f"{time.monotonic() - begin:.0f} s, results in {setting.out}")
    if bad:
        sys.exit(f"{len(bad)} of {len(rows)} cases did not pass")


if __name__ == "__main__":
    main()
