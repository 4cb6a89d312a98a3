"""Runs the canonical solutions of HumanEval and MBPP on their own tests, in the sandbox.

    python scripts/check_code.py /path/to/data [--guards namespaces] [--workers 2] [--seconds 20]

The folder holds humaneval/test.jsonl (fields id, prompt, entry_point, solution, test) and
mbpp/mbpp.jsonl (id, solution, tests, test_setup_code). Each is scored by the reward `code`, as the
text of a completion. Prints what does not pass, and how long one takes. (One of MBPP's solutions
computes for 3 s.)
"""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli import sandbox
from grpo_cli.rewards.code import code


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--guards", default="auto", choices=sandbox.GUARDS)
    parser.add_argument("--workers", type=int, default=2, help="programs at a time")
    parser.add_argument("--seconds", type=float, default=20, help="wall time of one test")
    options = parser.parse_args()
    print(sandbox.describe(options.guards))
    seconds = {"seconds": options.seconds, "total_seconds": 3 * options.seconds}
    score = partial(share, guards=options.guards, **seconds)
    failed = check("HumanEval", options.data / "humaneval/test.jsonl", score, options.workers)
    failed += check("MBPP", options.data / "mbpp/mbpp.jsonl", score, options.workers)
    raise SystemExit(failed > 0)


def share(row: dict[str, Any], **arguments: Any) -> float:
    if "entry_point" in row:
        columns = {"tests": row["test"], "entry_point": row["entry_point"]}
        columns["prompts"] = row["prompt"]
    else:
        columns = {"tests": row["tests"], "test_setup_code": row["test_setup_code"]}
    values = code(
        [row["solution"]],
        **{name: [cell] for name, cell in columns.items()},
        continues_prompt="prompts" in columns,
        **arguments,
    )
    return float(values[0])


def check(name: str, path: Path, score: Callable[[dict[str, Any]], float], workers: int) -> int:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]

    def timed(row: dict[str, Any]) -> tuple[float, float]:
        start = time.perf_counter()
        return score(row), time.perf_counter() - start

    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(timed, rows))
    took = time.perf_counter() - start
    failed = [(row["id"], part) for row, (part, _) in zip(rows, results, strict=True) if part != 1]
    each = sorted(seconds * 1000 for _, seconds in results)
    print(f"{name}: {len(rows) - len(failed)} of {len(rows)} pass")
    print(f"  {workers} at a time, {took:.1f} s in all", end="; ")
    print(f"one takes {each[len(each) // 2]:.0f} ms (median), {each[-1]:.0f} ms (longest)")
    for row_id, part in failed:
        print(f"  {row_id}: {part:.2f}")
    return len(failed)


if __name__ == "__main__":
    main()
