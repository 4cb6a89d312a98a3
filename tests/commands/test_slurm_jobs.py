"""Jobs of `grpo slurm` on a real SLURM of this one machine: two nodes, a CPU each.

`make test-slurm` runs these. tests/slurm_cluster.sh starts the nodes, and ends them.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.test_workers import SETTINGS
from tests.programs import ROOT
from tests.training.test_train import ROWS

pytestmark = pytest.mark.slurm

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
STEPS = 12
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

# Rewards on the path of the jobs. They take their time, so that there is some to do things in.
REWARDS = """
import time


def evens(completions, **_):
    time.sleep(0.5)
    return [sum(c in "02468" for c in text) / 6 for text in completions]
"""


@dataclass
class Cluster:
    folder: Path
    environment: dict[str, str]

    def run(self, *command: object, seconds: float = 60) -> str:
        words = [str(c) for c in command]
        done = subprocess.run(
            words, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, run: Path, *words: str) -> "Job":
        """`grpo slurm --submit` with a run of seconds, in which a step takes half of one."""
        data = self.folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        known = [
            "gpus_per_node=0", "time=0:20:00", "grace=60", "check=false", "min_free_gb=0.1",
            "recipe=arithmetic_tiny", f"dataset.train={data}", f"dataset.eval={data}",
            *SETTINGS, f"steps={STEPS}", "+reward.evens.function=slurm_rewards:evens",
        ]  # fmt: skip
        by_key = {w.partition("=")[0]: w for w in [*known, f"output_dir={run}", *words]}
        said = self.run(sys.executable, "-m", "grpo_cli", "slurm", *by_key.values(), "--submit")
        return Job(self, int(said.rpartition("submitted: job ")[2]), run)


@dataclass
class Job:
    cluster: Cluster
    number: int
    run: Path

    def shown(self) -> dict[str, str]:
        """What scontrol says of it."""
        words = self.cluster.run("scontrol", "show", "job", self.number).split()
        return dict(w.partition("=")[::2] for w in words)

    def log(self) -> str:
        return "".join(f.read_text("utf-8", "replace") for f in self.run.glob("*.out"))

    def everything(self) -> str:
        """For a failure: what SLURM and all that ran in the job say."""
        files = [*self.run.glob("*.out"), *self.run.glob("logs/*")]
        texts = [f"--- {f}\n{f.read_text('utf-8', 'replace')[-6000:]}" for f in files]
        return "\n".join([str(self.shown()), *texts])

    def until(self, is_so: Callable[[], object], what: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            is_over = self.shown()["JobState"] in OVER
            if time.monotonic() > deadline or (is_over and not is_so()):
                pytest.fail(f"not {what} after at most {seconds} s\n{self.everything()}")
            time.sleep(0.3)

    def until_over(self, seconds: float = 180) -> str:
        self.until(lambda: self.shown()["JobState"] in OVER, "over", seconds)
        return self.shown()["JobState"]

    def until_step(self, step: int) -> None:
        metrics = self.run / "metrics.jsonl"
        self.until(
            lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= step, f"step {step}"
        )

    def steps(self) -> list[int]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def weights(self) -> bytes:
        return (self.run / "checkpoints" / f"step-{STEPS}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    script = ROOT / "tests" / "slurm_cluster.sh"
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm_rewards.py").write_text(REWARDS)
    path = os.pathsep.join([str(ROOT), str(folder)])
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
        "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    found = Cluster(folder, environment)
    try:
        try:
            found.run(script, "install", seconds=600)
            found.run(script, "up", folder, free_ports(3), seconds=120)
        except AssertionError as error:
            reason = f"no SLURM here: {error}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
        yield found
    finally:
        found.run(script, "down", folder, seconds=120)


def free_ports(number: int) -> int:
    """The first of so many free ports in a row, below those that connections are given."""
    for first in range(17100 + os.getpid() % 1000 * 5, 32000, 50):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + number):
                    held.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def unbroken(cluster: Cluster) -> Job:
    job = cluster.submit(cluster.folder / "unbroken", "nodes=2")
    assert job.until_over() == "COMPLETED", job.everything()
    return job


def test_a_job_trains_on_two_nodes(unbroken: Job) -> None:
    summary = json.loads((unbroken.run / "summary.json").read_text())
    assert (summary["processes"], summary["steps"]) == (2, STEPS)
    assert unbroken.steps() == list(range(1, STEPS + 1))
    assert "n1 and n2 can train together" in unbroken.log()
    assert not list(unbroken.run.glob(".doctor*"))


def test_a_job_goes_on_where_it_was(cluster: Cluster, unbroken: Job) -> None:
    job = cluster.submit(cluster.folder / "broken", "nodes=2")

    job.until_step(3)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # as before the time limit
    job.until(lambda: job.shown()["Restarts"] == "1", "requeued")
    assert "got USR1" in job.log()
    assert "the run has left early, and can go on" in job.log()
    reached = max(job.steps())
    assert reached < STEPS

    job.until_step(reached + 3)
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    job.until(lambda: job.shown()["Restarts"] == "2", "requeued")
    assert job.shown()["JobState"] in ("PENDING", "COMPLETING", "REQUEUED")
    assert max(job.steps()) < STEPS
    with contextlib.suppress(AssertionError):  # it may have come back by itself
        cluster.run("scontrol", "update", "nodename=n2", "state=resume")

    assert job.until_over() == "COMPLETED", job.everything()
    assert job.log().count("start ") >= 3
    assert job.steps() == list(range(1, STEPS + 1))
    assert job.weights() == unbroken.weights()


def test_a_job_that_is_cancelled_stays_so(cluster: Cluster) -> None:
    job = cluster.submit(cluster.folder / "cancelled", "nodes=2")
    job.until(lambda: "start 1 of job" in job.log(), "started")
    cluster.run("scancel", job.number)
    assert job.until_over() == "CANCELLED", job.everything()
    assert "requeue" not in job.log()


def test_a_node_that_does_not_come_is_named(cluster: Cluster) -> None:
    setup = cluster.folder / "dies.sh"
    setup.write_text('[ "$SLURMD_NODENAME" = n2 ] && exit 1\n')
    job = cluster.submit(
        cluster.folder / "alone", "nodes=2", f"setup={setup}", f"python={sys.executable}",
        "preflight_timeout=20",
    )  # fmt: skip
    assert job.until_over() == "FAILED", job.everything()
    assert "doctor: n2: has not arrived" in job.log()
    assert not (job.run / "recipe.yaml").exists()


def test_a_node_trains_and_another_serves(cluster: Cluster) -> None:
    if not VLLM_PYTHON.is_file():
        reason = "no .venv-vllm here: make test-vllm makes it"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    job = cluster.submit(
        cluster.folder / "serves", "vllm_nodes=1", "steps=2", f"python={VLLM_PYTHON}",
        "model.build.hidden_size=128",  # vLLM has no attention for narrower heads
    )  # fmt: skip
    assert job.until_over(500) == "COMPLETED", job.everything()
    assert job.steps() == [1, 2]
    lines = (job.run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["weights/servers"] for line in lines] == [1, 1]
    assert (job.run / "logs" / "vllm-n2.log").is_file()
    (said,) = job.run.glob("logs/serve-*.out")  # SLURM writes this machine's name for n2's
    assert "ready after" in said.read_text()
