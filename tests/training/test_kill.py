"""A run that is killed again and again, at any moment, ends as the run that nothing happened to.

Each draw has a seed, which a failure names: GRPO_KILL_SEED=N draws others.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
import torch

from grpo_cli.checkpoints import checkpointer, paths
from grpo_cli.checkpoints.shards import Shards
from tests import programs
from tests.composed import SMALL, with_recipe
from tests.kill_harness import HANGS, entries
from tests.programs import ROOT
from tests.training.rollouts.test_stored_groups import same
from tests.vision_models import picture

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("GRPO_KILL_SEED", "1"))
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
STEPS = 6
TINY = [
    *SMALL,
    f"steps={STEPS}",
    "dataset.eval_limit=8",
    "generation.dynamic_sampling=true",  # with groups that are carried over
    "loss.beta=0.05",
    "loss.entropy_coef=0.01",
    "update.minibatches=2",
    "optimizer.schedule=cosine",
    "eval.every=2",
    "checkpoint.every=1",
    "log.completions_every=1",
]
# All that a run remembers: random streams, what adapts, a reference that moves.
HARD = [
    *TINY,
    "model.dropout=0.1",
    "loss.kl_target=1e-3",
    "loss.entropy_target=5.53",  # nats; above what the policy has, so that the bonus adapts
    "loss.reference_every=2",
    "loss.reference_alpha=0.5",
    "+reward.noisy.function=tests.kill_harness:noisy",
]
# What does not depend on the number of processes but for rounding.
PLAIN = [*TINY, "loss.kl_target=1e-3", "+reward.evens.function=tests.kill_harness:evens"]
SHARDED = [*HARD, "distributed=fsdp2"]
EPISODES = [
    *HARD,
    "dataset.chat=true",
    "dataset.max_prompt_tokens=64",
    "environment.path=tests.kill_harness:Talks",
    "environment.workers=1",
    "generation.max_completion_tokens=40",
    "episode.turn_tokens=6",
    "+reward.environment.function=environment",
]
IMAGES = [
    *HARD,
    "dataset.chat=true",
    "dataset.max_prompt_tokens=96",
    "model.build.vision_layers=1",
    "update.tokens_per_micro_batch=null",  # measured, and again with the first images
]
ADAPTED = [*HARD, "adapter=lora", "adapter.args.lora_dropout=0.1"]

# What can be the moment, and how often it comes in a step of one process, about.
HAPPENS = {
    "generate": 30,
    "reward function": 2,
    "old_logprobs": 2,
    "ref_logprobs": 4,
    "forward_backward": 6,
    "optimizer step": 4,
    "weights": 1,
    "evaluate": 4,
    "file": 30,
    "half a write": 40,
}
Straight = Callable[[Sequence[str], int], Path]


class Jobs:
    """tests/kill_harness.py, which runs one job at a time."""

    def __init__(self, folder: Path, hash_seed: int) -> None:
        """hash_seed: of Python's; sets are ordered otherwise with another."""
        self.folder = folder
        self.data = folder / "rows.jsonl"
        self.data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        self.pictures = folder / "pictures.jsonl"
        rows = [{**row, "image": None if n % 2 else f"{n}.png"} for n, row in enumerate(ROWS)]
        self.pictures.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for n in range(0, len(ROWS), 2):
            picture(n).save(folder / f"{n}.png")
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": str(hash_seed),
        }
        self.harness = subprocess.Popen(
            [sys.executable, "-u", "tests/kill_harness.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self.environment,
        )

    def job(
        self, run: Path, settings: Sequence[str], processes: int, *moments: dict[str, Any]
    ) -> dict[str, Any]:
        data = self.pictures if settings is IMAGES else self.data
        args = [f"output_dir={run}", f"dataset.train={data}", f"dataset.eval={data}"]
        return {
            "folder": str(run),
            "log": str(log_of(run)),
            "processes": processes,
            "moments": list(moments),
            "args": [*with_recipe(["train", *args, *settings])[1:], "resume=auto"],
        }

    def start(
        self, run: Path, settings: Sequence[str], processes: int, *moments: dict[str, Any]
    ) -> int:
        """Starts, or goes on with, a run; returns its exit code when it has ended, how ever."""
        job = self.job(run, settings, processes, *moments)
        self.harness.stdin.write(json.dumps(job) + "\n")
        self.harness.stdin.flush()
        answer = self.harness.stdout.readline()
        assert answer, "the harness is gone"
        return int(json.loads(answer)["code"])

    def close(self) -> None:
        self.harness.stdin.close()
        try:
            self.harness.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.harness.kill()


def log_of(run: Path) -> Path:
    return run.with_name(run.name + ".log")


def fired(run: Path) -> list[dict[str, Any]]:
    """The moments of a run that have come."""
    return [entry for entry in entries(log_of(run)) if "counts" not in entry]


def said(run: Path) -> str:
    """What all its starts have printed."""
    return log_of(run).with_suffix(".log.txt").read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("killed"), hash_seed=2)
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Straight]:
    """The run of some settings that nothing happens to; made once."""
    jobs = Jobs(tmp_path_factory.mktemp("straight"), hash_seed=1)
    made: dict[tuple[Any, ...], Path] = {}

    def run(settings: Sequence[str], processes: int) -> Path:
        key = (*settings, processes)
        if key not in made:
            made[key] = jobs.folder / f"run-{len(made)}"
            code = jobs.start(made[key], settings, processes)
            assert code == 0, said(made[key])[-3000:]
        return made[key]

    yield run
    jobs.close()


# What two runs are compared by.


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    timed = re.compile("time|per_second|mfu|seconds")
    return [{k: v for k, v in json.loads(s).items() if not timed.search(k)} for s in lines]


def state(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, but for what is measured."""
    found = checkpointer.load_state(path)
    run = found.pop("run")
    for measured in ("seconds", "cache_tokens"):
        del run[measured]
    return found | {f"run.{name}": value for name, value in run.items()}


def differences(run: Path, straight: Path) -> list[str]:
    """What is not as in the run that nothing happened to, in a few words each."""
    found = []
    ours, theirs = metrics(run), metrics(straight)
    if [m["step"] for m in ours] != [m["step"] for m in theirs]:
        found.append(f"metrics are of the steps {[m['step'] for m in ours]}")
    for a, b in zip(ours, theirs, strict=False):
        found += [f"step {b['step']}: {k}" for k in {*a, *b} if not same(a.get(k), b.get(k))]
    saved = paths.steps_saved(run)
    if saved[-1:] != [STEPS]:
        found.append(f"its checkpoints are {saved}")
    for step in sorted({*saved} & {*paths.steps_saved(straight)}):
        found += [f"step-{step}: {what}" for what in _unlike(run, straight, step)]
    for path in sorted((straight / "completions").glob("*.parquet")):
        own = run / "completions" / path.name
        if not (own.exists() and same(completions(own), completions(path))):
            found.append(f"completions/{path.name}")
    found += [p.name for p in run.glob("checkpoints/*") if p.name.endswith(".interrupted")]
    summary = json.loads((run / "summary.json").read_text())
    found += [] if summary["steps"] == STEPS else ["summary.json"]
    return found


def completions(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of completions, but for what is measured."""
    rows = pyarrow.parquet.read_table(path).to_pylist()
    for row in rows:
        if row.get("turns"):
            row["turns"] = re.sub(r'"seconds": [-+.e\d]+', "", row["turns"])
    return rows


def _unlike(run: Path, straight: Path, step: int) -> Iterator[str]:
    own, other = (paths.checkpoint_path(folder, step) for folder in (run, straight))
    try:
        shards, others = Shards(own), Shards(other)
    except OSError:  # a checkpoint of the best step, or an old one whose removal was killed
        assert step != STEPS
        return
    (name,) = (path.name for path in other.glob("*.safetensors"))
    if (own / name).read_bytes() != (other / name).read_bytes():
        yield name
    if set(shards.tensors) != set(others.tensors):
        yield "names of tensors"
        return
    yield from (n for n in shards.tensors if not torch.equal(shards.read(n), others.read(n)))
    a, b = state(own), state(other)
    yield from (name for name in b if not same(a[name], b[name]))


def assert_same(run: Path, straight: Path, seed: int) -> None:
    found = differences(run, straight)
    assert not found, (
        f"seed {seed}: {found[:12]} ({len(found)} in all) after {fired(run)}\n{said(run)[-3000:]}"
    )


# Kills.


def drawn(rng: random.Random, processes: int, what: str, **more: Any) -> dict[str, Any]:
    """A moment in the next two steps."""
    number = rng.randint(max(1, HAPPENS[what] // 2), 2 * HAPPENS[what])
    rank = 0 if what == "file" else rng.randrange(processes)  # the others write few files
    return {"what": what, "number": number, "rank": rank, **more}


def chain(
    jobs: Jobs,
    straight: Path,
    settings: Sequence[str],
    processes: int,
    seed: int,
    plan: Sequence[list[dict[str, Any]]],
) -> list[Path]:
    """Starts a run for each entry of a plan, which says what happens to it, and then to its end.

    A run that is done before anything happens is compared, and the entry is the next one's.

    Returns:
        The runs.
    """
    runs: list[Path] = []
    left = list(plan)
    has_fired = False
    while left or has_fired:
        if not has_fired:
            runs.append(jobs.folder / f"{straight.name}-{processes}-{seed}-{len(runs)}")
            shutil.rmtree(runs[-1], ignore_errors=True)
        moments = left[0] if left else []
        before = len(fired(runs[-1]))
        code = jobs.start(runs[-1], settings, processes, *moments)
        has_fired = len(fired(runs[-1])) > before
        told = f"seed {seed}, {moments}: ended with {code}\n{said(runs[-1])[-3000:]}"
        assert code == 0 or (has_fired and code != HANGS), told
        if has_fired:
            del left[0]
        else:
            assert_same(runs[-1], straight, seed)
        assert len(runs) <= 2 * len(plan), "moments that do not come"
    return runs


def happened(runs: Sequence[Path], number: int) -> list[dict[str, Any]]:
    """The moments that came with a signal."""
    return [m for run in runs for m in fired(run) if m.get("signal", signal.SIGKILL) == number]


@pytest.mark.parametrize(
    ("settings", "processes"),
    [(HARD, 1), (HARD, 2), (ADAPTED, 1), (EPISODES, 1), (IMAGES, 1)],
    ids=["one", "two", "adapter", "episodes", "images"],
)
def test_killed_run_is_the_same_run(
    jobs: Jobs, straight: Straight, settings: list[str], processes: int
) -> None:
    rng = random.Random(SEED)
    reference = straight(settings, processes)
    took = json.loads((reference / "summary.json").read_text())["seconds"]
    carried = [m["dynamic_sampling/carried"] for m in metrics(reference)]
    assert any(carried), "no group is carried over, so nothing shows that they are kept"
    plan = [[drawn(rng, processes, what, of=rng.choice(["one", "all"]))] for what in HAPPENS]
    plan += [[{"after": rng.uniform(took / 6, took / 2), "of": "all"}] for _ in range(2)]
    rng.shuffle(plan)
    runs = chain(jobs, reference, settings, processes, SEED, plan)
    killed = happened(runs, signal.SIGKILL)
    assert len(killed) == len(plan)
    assert {"generate", "reward", "forward_backward", "optimizer"} <= {m["stage"] for m in killed}


def test_run_killed_after_each_checkpoint(jobs: Jobs, straight: Straight) -> None:
    reference, run = straight(IMAGES, 1), jobs.folder / "each"
    for _ in range(STEPS):
        jobs.start(run, IMAGES, 1, {"what": "named", "number": 1, "of": "all"})
    assert jobs.start(run, IMAGES, 1) == 0, said(run)[-3000:]
    assert_same(run, reference, 0)


def test_damaged_checkpoint_is_skipped(jobs: Jobs, straight: Straight) -> None:
    reference, run = straight(HARD, 2), jobs.folder / "damaged"
    second = {"what": "named", "number": 2, "of": "all"}  # a step further than the last good one
    for number, (name, damage) in enumerate(DAMAGES.items(), start=2):
        jobs.start(run, HARD, 2, second)
        newest = paths.checkpoint_path(run, number)
        assert paths.steps_saved(run)[-1] == number, said(run)[-3000:]
        if name == "manifest.json":
            damage(newest / "training" / name)
        else:
            files = json.loads((newest / "training" / "manifest.json").read_text())["files"]
            damage(newest / max((f for f in files if name in f), key=lambda f: files[f]["bytes"]))
    assert jobs.start(run, HARD, 2) == 0, said(run)[-3000:]
    for number, name in enumerate(DAMAGES, start=2):
        skipped = rf"checkpoints/step-{number} is damaged \(\S*{re.escape(name)}.*\): skipped"
        assert re.search(skipped, said(run)), (skipped, said(run))
        assert f"checkpoints/step-{number - 1}, step {number - 1}" in said(run)
    assert_same(run, reference, 0)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "state.pt": cut,
    ".distcp": flip,
    ".metadata": Path.unlink,
    "model.safetensors": lambda path: os.truncate(path, 0),
    "manifest.json": Path.unlink,
}


# Runs that are told to end, with no time left for the step that they are in.


@pytest.mark.parametrize(
    ("settings", "processes"), [(HARD, 1), (HARD, 2), (SHARDED, 2)], ids=["one", "two", "sharded"]
)
def test_interrupted_step_is_resumed(
    jobs: Jobs, straight: Straight, settings: list[str], processes: int
) -> None:
    rng = random.Random(SEED + 100)
    signals = [signal.SIGUSR1, signal.SIGTERM]

    def leaving(what: str) -> dict[str, Any]:
        of = rng.choice(["one", "workers"])
        return drawn(rng, processes, what, signal=int(rng.choice(signals)), of=of)

    plan = [[leaving(what)] for what in ("generate", "ref_logprobs", "evaluate")]
    plan += [[leaving("forward_backward")] for _ in range(2)]
    # Killed while what there is of the step is being kept.
    killed = {"what": "file", "number": rng.randint(1, 25), "rank": 0, "of": "all"}
    plan += [[{**leaving("forward_backward"), "rank": 0}, killed]]
    rng.shuffle(plan)
    # The first step has an evaluation before it, which is not to be made again.
    plan.insert(0, [{"what": "forward_backward", "number": 6, "signal": int(signal.SIGUSR1)}])
    grace = rng.choice([0, 0.3])
    hasty = [*settings, f"checkpoint.grace={grace}"]
    runs = chain(jobs, straight(settings, processes), hasty, processes, SEED + 100, plan)
    text = "".join(map(said, runs))
    assert len(re.findall(r"stopped in step", text)) >= 2, text[-3000:]
    assert re.search(r"resuming from \S*interrupted, in step", text), text[-3000:]


# With another number of processes, or divided otherwise.


def test_resume_with_other_processes(jobs: Jobs, straight: Straight) -> None:
    rng = random.Random(SEED + 200)
    reference, run = straight(PLAIN, 1), jobs.folder / "elastic"
    sharded = "distributed=fsdp2"
    starts = [(2, []), (1, []), (2, []), (3, []), (2, [sharded]), (2, []), (1, [])]
    stages = ["forward_backward", "generate", "forward_backward", "ref_logprobs"]
    for number, (processes, more) in enumerate(starts):
        moments = []
        if number < len(starts) - 1:
            what = stages[number % len(stages)]
            count = rng.randint(HAPPENS[what] // 2, HAPPENS[what])
            moments = [{"what": what, "number": count, "signal": int(signal.SIGUSR1)}]
        jobs.start(run, [*PLAIN, *more, "checkpoint.grace=0"], processes, *moments)
    starts_said = re.findall(r"processes then (\d), now (\d)", said(run))
    assert starts_said == [("2", "1"), ("1", "2"), ("2", "3"), ("3", "2"), ("2", "1")], said(run)
    ours, theirs = metrics(run), metrics(reference)
    assert [m["step"] for m in ours] == [m["step"] for m in theirs], said(run)[-3000:]
    for a, b in zip(ours, theirs, strict=True):
        for key in ("loss", "reward", "num_tokens", "completions/mean_length"):
            # Beside 1e-6 the rounding of a sum of terms about 1, in float32.
            assert a[key] == pytest.approx(b[key], rel=1e-6, abs=2e-7), (b["step"], key, SEED)
    assert any(m["grad_norm"] for m in theirs), "nothing was learnt"


# As a user starts it.


def test_torchrun_restarts(jobs: Jobs, straight: Straight) -> None:
    run = jobs.folder / "restarted"
    gone = {"what": "named", "number": 2, "rank": 0, "start": 1, "of": "all"}
    one = {"what": "forward_backward", "number": 40, "rank": 1, "start": 0}
    job = jobs.job(run, HARD, 2, one, gone)
    job["args"].remove("resume=auto")

    def started(job: dict[str, Any], restarts: int) -> int:
        program = ["tests/kill_harness.py", json.dumps(job)]
        with log_of(run).with_suffix(".log.txt").open("a") as log:
            torchrun = subprocess.Popen(
                programs.torchrun(2, f"--max-restarts={restarts}", *program),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=jobs.environment,
            )
            try:
                return torchrun.wait(programs.PATIENCE)
            except subprocess.TimeoutExpired:  # what it hangs in is then in logs/rank-N.stacks.txt
                for worker in psutil.Process(torchrun.pid).children():
                    worker.send_signal(signal.SIGABRT)
                time.sleep(2)
                torchrun.terminate()
                torchrun.wait(programs.PATIENCE)
                return HANGS

    code = started(job, restarts=2)  # whose second attempt ends with torchrun itself
    assert code == -signal.SIGKILL, (code, said(run)[-3000:])
    assert [m["start"] for m in fired(run)] == [0, 1], said(run)[-3000:]
    assert paths.steps_saved(run)[-1] < STEPS, "something is left for the third"
    assert "resuming from" in said(run), "the second attempt has gone on from a checkpoint"
    assert started(jobs.job(run, HARD, 2), restarts=0) == 0, said(run)[-3000:]
    assert_same(run, straight(HARD, 2), 0)
