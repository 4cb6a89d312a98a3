"""Measures how the cost of a step grows: `make bench-growth`.

    python scripts/bench_growth.py [AXIS ...] [--rounds 1] [--plot growth.svg] [--json FILE]
    python scripts/bench_growth.py --from FILE        prints and draws stored results

One axis at a time is changed: prompts of a step, completions of a prompt, tokens of a completion
and of a prompt, words of the vocabulary, parameters of the model. All completions have the same
length, and no group is skipped. Each run is a process of its own, forked from one that has imported
the program; the points of an axis take turns.

Times are seconds of the processor with one thread, so that other programs on the machine change
little. Memory is that of one more run, whose malloc gives freed memory back at once. Sampling and
update: what the run itself measures (plan.json, "measured"), above weights, gradients and optimizer
state, beside what `grpo plan` predicts. Process: the largest resident memory of the whole run above
that of the imported program.

The exponent b of y = a · x^b is a least-squares fit of the logarithms: 1 is proportional, 0 does
not grow. In brackets: the exponent between the last two points.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import GIVES_BACK, environment, machine, number, say
from bench_setup import MODELS, WARM_UP, Workload
from least_squares import fit_power
from plots import BLUE, ORANGE, neutral_pyplot

MIB = 2**20
STEPS = 2  # counted, in each round
BASE = Workload("growth", (32, 32), limit=32, min_tokens=32, model="width-128")
OVERRIDES = ("update.skip_zero_advantage=false", "dataset.max_prompt_tokens=1024")
PRELOADED = ("check_plan", "bench_probe", "grpo_cli.commands.train", "grpo_cli.train")
TIMES = ("sampling", "update", "step")
MEMORY = ("sampling MiB", "update MiB", "process MiB")
# mallopt(3), by the variable of the same meaning
MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_MMAP_MAX_": -4}

Point = dict[str, float]  # `value` on the axis, `tokens`, and the medians


@dataclass(frozen=True)
class Axis:
    """The values that one quantity takes, each with its workload."""

    name: str  # with its unit
    points: dict[int, Workload]


def shape_of(width: int, words: int) -> dict[str, int]:
    """Returns the arguments of a Qwen2 with two layers; one word ends a completion."""
    return {
        "vocab_size": words, "hidden_size": width, "intermediate_size": 8 * width // 3,
        "num_hidden_layers": 2, "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128, "eos": words,
    }  # fmt: skip


def parameters(shape: Mapping[str, int]) -> int:
    """Returns the number of weights of a Qwen2 with tied embeddings, without biases and norms."""
    hidden, kv = shape["hidden_size"], 64 * shape["num_key_value_heads"]
    layer = 2 * hidden * (hidden + kv) + 3 * hidden * shape["intermediate_size"]
    return shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]


WIDTHS = (128, 256, 384, 512, 768)
WORDS = (1024, 4096, 16_384, 65_536, 131_072)
# Here, for the process of each run imports this module.
MODELS |= {f"width-{width}": shape_of(width, 1024) for width in WIDTHS}
MODELS |= {f"words-{words}": shape_of(128, words) for words in WORDS}


def axes() -> dict[str, Axis]:
    """Returns the axes by their short names."""

    def along(values: Sequence[int], **changes: Any) -> dict[int, Workload]:
        """Returns a workload for each value; `changes` are functions of it."""
        return {n: replace(BASE, **{k: make(n) for k, make in changes.items()}) for n in values}

    def same(n: int) -> int:
        return n

    few = {"prompts": lambda _: 4}
    sizes = {parameters(MODELS[f"width-{w}"]): f"width-{w}" for w in WIDTHS}
    return {
        "prompts": Axis("prompts of a step", along((4, 8, 16, 32, 64), prompts=same)),
        "group": Axis("completions of a prompt", along((4, 8, 16, 32, 64), generations=same)),
        "completion": Axis(
            "tokens of a completion",
            along((32, 64, 128, 256, 512), limit=same, min_tokens=same, **few),
        ),
        "prompt": Axis(
            "tokens of a prompt", along((64, 128, 256, 512, 1024), prompt_tokens=lambda n: (n, n))
        ),
        "vocabulary": Axis(
            "words of the vocabulary",
            along(WORDS, model=lambda n: f"words-{n}", **few),
        ),
        "model": Axis("parameters", along([*sizes], model=sizes.__getitem__)),
    }


def tokens_of(workload: Workload) -> int:
    """Returns the tokens that an update computes: each prompt once for its completions."""
    return workload.prompts * (workload.prompt_tokens[0] + workload.generations * workload.limit)


def child(root: Path, workload: Workload, metered: bool) -> None:
    """Trains in this process, and writes `result.json`."""
    with (root / "log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if metered:
        for name, option in MALLOPT.items():
            ctypes.CDLL(None).mallopt(option, int(GIVES_BACK[name]))
    import torch
    from bench_probe import peak_memory
    from check_plan import Case, make, trained

    from grpo_cli.reporting.stage_clock import Clock
    from grpo_cli.training import step

    vars(step)["Clock"] = functools.partial(Clock, timer=time.process_time)
    steps = WARM_UP + (1 if metered else STEPS)
    case = Case(workload.model, workload, OVERRIDES, steps=steps)
    recipe = make(root, case)
    looking = peak_memory(torch.device("cpu")) if metered else contextlib.nullcontext([0, 0])
    with looking as seen:
        trained(root, replace(case, recipe=str(recipe)), steps)
    lines = (root / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = {
        "steps": [json.loads(line) for line in lines[WARM_UP:]],
        "plan": json.loads((root / "run" / "plan.json").read_text(encoding="utf-8")),
        "process": seen[1] - seen[0],
    }
    (root / "result.json").write_text(json.dumps(found), encoding="utf-8")


def run(workload: Workload, metered: bool) -> dict[str, Any]:
    """Returns what a run in a process of its own has measured."""
    with tempfile.TemporaryDirectory(prefix="grpo-growth-") as name:
        root = Path(name)
        process = multiprocessing.get_context("forkserver").Process(
            target=child, args=(root, workload, metered)
        )
        process.start()
        process.join()
        if process.exitcode:
            tail = "\n".join((root / "log").read_text(errors="replace").splitlines()[-30:])
            raise SystemExit(f"{workload}: ended with {process.exitcode}\n{tail}")
        found: dict[str, Any] = json.loads((root / "result.json").read_text(encoding="utf-8"))
    return found


def measure(axis: Axis, rounds: int) -> list[Point]:
    """Returns the medians of each point.

    The points take turns, so that a machine that becomes slower does not bend the curve.
    """
    timed: dict[int, list[Mapping[str, float]]] = {value: [] for value in axis.points}
    metered = {}
    for number_of_round in range(rounds):
        for value, workload in axis.points.items():
            timed[value] += run(workload, metered=False)["steps"]
            say(f"  {axis.name}: {value:,}, round {number_of_round + 1}")
    for value, workload in axis.points.items():
        metered[value] = run(workload, metered=True)
        say(f"  {axis.name}: {value:,}, memory")
    return [
        {"value": value, "tokens": tokens_of(workload)}
        | times_of(timed[value])
        | memory_of(metered[value])
        for value, workload in axis.points.items()
    ]


def times_of(steps: Sequence[Mapping[str, float]]) -> Point:
    """Returns the median seconds of the stages, and the spread of the step's."""
    of_step = [s["step_time"] for s in steps]
    return {
        "sampling": statistics.median(s["time/generate"] for s in steps),
        "update": statistics.median(
            s["time/forward_backward"] + s["time/optimizer"] for s in steps
        ),
        "step": statistics.median(of_step),
        "spread": (max(of_step) - min(of_step)) / statistics.median(of_step),
    }


def memory_of(found: Mapping[str, Any]) -> Point:
    """Returns MiB of the stages as measured and as planned, above the model's state."""
    plan, own = found["plan"], {"process MiB": found["process"] / MIB}
    for name, stage in (("sampling", "generate"), ("update", "forward_backward")):
        parts = plan["predicted"]["parts"][stage]
        state = sum(parts.get(part, 0) for part in ("weights", "gradients", "moments"))
        own[f"{name} MiB"] = (plan["measured"]["memory"][stage] - state) / MIB
        own[f"{name} plan"] = (sum(parts.values()) - state) / MIB
    return own


def table(name: str, points: Sequence[Point]) -> list[str]:
    """Returns a Markdown table of an axis, a row for each point."""
    header = [
        name, "tokens", "sampling time", "update time", "step time", "step time a token",
        "sampling memory", "planned for sampling", "update memory", "planned for the update",
        "process memory",
    ]  # fmt: skip
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    for p in points:
        cells = [f"{p['value']:,.0f}", f"{p['tokens']:,.0f}"]
        cells += [f"{number(p[stage])} s" for stage in TIMES]
        cells.append(f"{number(1e3 * p['step'] / p['tokens'])} ms")
        for stage in ("sampling", "update"):
            cells += [f"{number(p[f'{stage} {what}'])} MiB" for what in ("MiB", "plan")]
        cells.append(f"{number(p['process MiB'])} MiB")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def exponents(found: Mapping[str, Sequence[Point]]) -> list[str]:
    """Returns a Markdown table: the exponent of each measure along each axis."""
    header = [
        "exponents by", "sampling time", "update time", "step time", "step time a token",
        "sampling memory", "update memory", "process memory",
    ]  # fmt: skip
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    for axis, points in found.items():
        costs = [[p[stage] for p in points] for stage in (*TIMES, *MEMORY)]
        costs.insert(len(TIMES), [p["step"] / p["tokens"] for p in points])
        cells = [exponent([p["value"] for p in points], own) for own in costs]
        lines.append(f"| {axis} | {' | '.join(cells)} |")
    return lines


def exponent(values: Sequence[float], costs: Sequence[float]) -> str:
    """Returns the fitted exponent, its standard error, and that of the last two points.

    For example, "0.50 ± 0.29 (0.00)" for the costs 1, 2, 2 at 1, 2, 4.
    """
    last = fit_power(values[-2:], costs[-2:]).slope
    return f"{fit_power(values, costs).text()} ({last:.2f})"


def brief(value: float) -> str:
    """Returns a number of at most three digits, such as 16k for 16,384 and 1.7M for 1,702,912."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{0 if value >= 10 * size else 1}f}{letter}"
    return f"{value:.0f}"


def plot(path: Path, found: Mapping[str, Sequence[Point]], names: Mapping[str, str]) -> None:
    """Draws seconds and memory along each axis, on logarithmic scales."""
    plt = neutral_pyplot()
    from matplotlib.ticker import LogLocator

    figure, cells = plt.subplots(
        2, len(found), figsize=(2.3 * len(found), 4.4), squeeze=False, sharex="col", sharey="row"
    )
    shown = {"sampling": BLUE, "update": ORANGE}
    for column, (axis, points) in enumerate(found.items()):
        values = [p["value"] for p in points]
        upper, lower = cells[0][column], cells[1][column]
        for stage, color in shown.items():
            label = f"{stage} {fit_power(values, [p[stage] for p in points]).slope:.2f}"
            upper.loglog(values, [p[stage] for p in points], "o-", color=color, ms=3, label=label)
            own = [p[f"{stage} MiB"] for p in points]
            label = f"{stage} {fit_power(values, own).slope:.2f}"
            lower.loglog(values, own, "o-", color=color, ms=3, label=label)
            lower.loglog(values, [p[f"{stage} plan"] for p in points], ":", color=color)
        for cell in (upper, lower):
            cell.minorticks_off()
            cell.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            cell.yaxis.set_major_formatter("{x:g}")
            cell.set_xticks(values, labels=[brief(value) for value in values])
            cell.legend(frameon=False, fontsize=7)
        lower.set_xlabel(names[axis])
    cells[0][0].set_ylabel("seconds of a step")
    cells[1][0].set_ylabel("MiB above the model (dotted: planned)")
    figure.tight_layout()
    figure.savefig(path, dpi=110, transparent=True)


def arguments(short: Sequence[str]) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("axes", nargs="*", help=f"some of {', '.join(short)}; none: all")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each point for the times")
    parser.add_argument("--points", type=int, default=5, help="only the first points of each axis")
    parser.add_argument("--plot", type=Path, help="file of the curves, such as growth.svg")
    parser.add_argument("--json", type=Path, help="file of the medians")
    parser.add_argument("--from", type=Path, dest="stored", help="file of --json, to be shown")
    given = parser.parse_args()
    if unknown := [name for name in given.axes if name not in short]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(short)}")
    if given.points < 2 or given.rounds < 1:
        parser.error("--points: at least 2; --rounds: at least 1")
    return given


def main() -> None:
    named = axes()
    given = arguments([*named])
    found: dict[str, list[Point]] = {}
    if given.stored is not None:
        found = json.loads(given.stored.read_text(encoding="utf-8"))
    else:
        print(machine(), flush=True)
        os.environ |= environment(Path(tempfile.gettempdir()), metered=False)
        os.environ |= {"OMP_NUM_THREADS": "1"}
        os.environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
        multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    for short in [*(found or given.axes or named)]:
        axis = named[short]
        if short not in found:
            points = dict([*axis.points.items()][: given.points])
            found[short] = measure(replace(axis, points=points), given.rounds)
            if given.json is not None:
                given.json.write_text(json.dumps(found), encoding="utf-8")
        print("\n" + "\n".join(table(axis.name, found[short])) + "\n", flush=True)
    print("\n".join(exponents(found)))
    if given.plot is not None:
        plot(given.plot, found, {short: axis.name for short, axis in named.items()})


if __name__ == "__main__":
    main()
