"""Checks grpo on a GPU: tests, a run, precision, speed, a resumed run. `check.sh` starts it.

    python scripts/gpu/check.py --out FOLDER [--dry-run] [--stages speed,precision]

The cases of a stage run one after another in one process (importing torch takes long). A case that
raises becomes a row with the reason, and the next one runs. If a case ends the process, the stage
continues with the next case in another process; after the stage's seconds it is cut off. Rows are
written at once: FOLDER/results.jsonl has a row for each case, FOLDER/table.md a Markdown table for
each stage, FOLDER/log what the cases print.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAGES = {  # the module of each stage, and its seconds at most: 530 in all
    "tests": ("training", 60.0),
    "demo": ("training", 60.0),
    "precision": ("precision", 90.0),
    "speed": ("training", 260.0),
    "resume": ("training", 60.0),
}

Row = dict[str, Any]  # stage, case, status, seconds, error, figures
Figures = dict[str, Any]  # a case's results by name; `status` if it is not "ok"
Cases = dict[str, Callable[[], Figures]]  # the cases of a stage by name, in order


@dataclass(frozen=True)
class Setting:
    """Holds the place and the size at which the cases run."""

    dry: bool  # tiny shapes on the CPU
    out: Path  # folder of the results
    scratch: Path  # folder of the runs, which is deleted at the end

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def run_program(self, command: Sequence[str]) -> str:
        """Runs a program; returns its output, which goes into the log at once."""
        log = self.out / "log"
        with log.open("ab") as file:
            start = file.tell()
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        printed = log.read_bytes()[start:].decode(errors="replace")
        if done.returncode:
            last = printed.strip().splitlines()[-1:] or [""]
            raise RuntimeError(f"{command[1:4]} ended with {done.returncode}: {last[0]}")
        return printed


def run_stage(stage: str, setting: Setting) -> list[Row]:
    """Runs the cases of a stage, in as many processes as they need; returns their rows."""
    deadline = time.monotonic() + STAGES[stage][1] * (10 if setting.dry else 1)
    rows: list[Row] = []
    while True:
        command = [sys.executable, __file__, f"--out={setting.out}", f"--scratch={setting.scratch}"]
        command += [f"--stages={stage}", f"--skip={len(rows)}"]
        command += ["--dry-run"] if setting.dry else []
        with (setting.out / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            begin = time.monotonic()
            try:
                code = process.wait(max(deadline - begin, 0))
                status, error = "died", f"the process ended with {code}; see the log"
            except subprocess.TimeoutExpired:
                status, error = "cut off", "the stage's seconds are over"
            finally:  # also ends the programs that a case has started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows = [found for found in read(setting.out) if found["stage"] == stage]
        if process.returncode == 0:
            return rows
        lines = (setting.out / "log").read_text("utf-8", errors="replace").splitlines()
        case = next((line[3:] for line in reversed(lines) if line.startswith("== ")), "start")
        rows.append(add(setting.out, stage, case, status, error, time.monotonic() - begin))
        if status == "cut off":
            return rows


def run_cases(stage: str, setting: Setting, skip: int) -> None:
    """Runs the cases of a stage in this process, except the first `skip`."""
    module = importlib.import_module(STAGES[stage][0])
    cases: Cases = module.cases(stage, setting)
    for name in [*cases][skip:]:
        print(f"\n== {name}", flush=True)
        begin = time.monotonic()
        status, error, figures = "ok", "", {}
        try:
            figures = cases[name]()
            status, error = figures.pop("status", "ok"), figures.pop("error", "")
        except Exception as failure:  # any case may fail in any way, and the next one shall run
            if "CUDA error" in str(failure):  # after it nothing runs in this process any more
                raise
            sentence = next(iter(str(failure).strip().splitlines()), "")
            status, error = "failed", f"{type(failure).__name__}: {sentence}"
            traceback.print_exc()
        seconds = time.monotonic() - begin
        add(setting.out, stage, name, status, error, seconds, figures)


def add(
    out: Path, stage: str, case: str, status: str, error: str, seconds: float, figures: Any = None
) -> Row:
    """Stores a row, and returns it."""
    row = {
        "stage": stage, "case": case, "status": status, "seconds": round(seconds, 3),
        "error": error, "figures": figures or {},
    }  # fmt: skip
    with (out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return row


def read(out: Path) -> list[Row]:
    """Returns the rows that are stored."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]


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


def machine() -> dict[str, Any]:
    """Returns the machine and the versions that the figures come from."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"), "gpu": output(query) or "none",
        "cores": os.cpu_count(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "commit": output(["git", "describe", "--always", "--dirty"]) or "unknown",
    }  # fmt: skip


def output(command: list[str]) -> str:
    """Returns the output of a program; "" if it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, cwd=ROOT, text=True).strip()
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_argument = parser.add_argument
    add_argument("--out", type=Path, required=True, help="folder of the results")
    add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    add_argument("--stages", default=",".join(STAGES), help="some of the stages")
    add_argument("--skip", type=int, default=0, help="cases that have run, with --scratch")
    add_argument("--scratch", type=Path, help="run one stage in this process, with this folder")
    given = parser.parse_args()
    stages, out = given.stages.split(","), given.out.resolve()
    if given.scratch:
        run_cases(stages[0], Setting(given.dry_run, out, given.scratch), given.skip)
        return
    if unknown := [stage for stage in stages if stage not in STAGES]:
        parser.error(f"--stages: there is no {', '.join(unknown)}; there are {', '.join(STAGES)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if given.dry_run:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Some machines announce instructions that they lack (docs/performance.md).
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the stage
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.jsonl").write_text("", encoding="utf-8")
    about, begin, bad = machine(), time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="grpo-gpu-check-") as scratch:
        for stage in stages:
            for found in run_stage(stage, Setting(given.dry_run, out, Path(scratch))):
                bad += found["status"] != "ok"
                print(f"{stage:10} {found['status']:9} {found['seconds']:6.1f} s  {found['case']}")
            (out / "table.md").write_text(table(about, read(out)), encoding="utf-8")
    print(f"{table(about, read(out))}\n{bad} not right, {time.monotonic() - begin:.0f} s")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
