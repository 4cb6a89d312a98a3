"""`grpo slurm`: its words, and what the script does, run by bash with small stand-ins for SLURM.

tests/commands/test_slurm_jobs.py runs it on a real SLURM.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_cli.commands import slurm
from grpo_cli.errors import TrainingError, UserError
from tests.programs import until

NEEDED = ["gpus_per_node=0", "time=1:00:00"]
HERE = slurm.Place("/", "/", "/log", "python")


def text_of(*words: str, place: slurm.Place = HERE) -> str:
    settings, rest = slurm.split_words(words)
    return slurm.script(settings, rest, place, "grpo slurm")


def options_of(*words: str) -> list[str]:
    lines = text_of(*words).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_options_of_sbatch() -> None:
    whole = options_of(
        "recipe=math_qwen", "nodes=3", "vllm_nodes=2", "gpus_per_node=4", "time=2-00"
    )
    assert whole == [
        "--job-name=grpo-math_qwen", "--nodes=5", "--ntasks-per-node=1", "--gpus-per-node=4",
        "--exclusive", "--mem=0", "--time=2-00", "--signal=B:USR1@300", "--requeue",
        "--open-mode=append", "--output=/log",
    ]  # fmt: skip
    part = options_of(
        "recipe=./my.yaml", *NEEDED, "cpus_per_task=6", "mem=20G", "partition=gpu", "account=us",
        "qos=high", "job_name=mine", "grace=60", "sbatch.reservation=r", "sbatch.w=n[1-2]",
        "sbatch.mail_user=me",
    )  # fmt: skip
    assert part == [
        "--job-name=mine", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=6", "--mem=20G",
        "--time=1:00:00", "--signal=B:USR1@60", "--requeue", "--open-mode=append", "--output=/log",
        "--partition=gpu", "--account=us", "--qos=high", "--reservation=r", "-wn[1-2]",
        "--mail-user=me",
    ]  # fmt: skip
    assert "--mem" not in " ".join(options_of("recipe=a", *NEEDED, "cpus_per_task=6"))


def test_a_model_on_several_gpus_has_fewer_copies() -> None:
    words = ["recipe=a", "gpus_per_node=8", "time=1:30:00", "vllm_nodes=1"]
    assert "\nSERVE_WORDS=(\n  data_parallel=8\n)" in text_of(*words)
    text = text_of(*words, "serve.tensor_parallel=4")
    assert "\nSERVE_WORDS=(\n  data_parallel=2\n  tensor_parallel=4\n)" in text
    text = text_of(*words, "serve.data_parallel=1")
    assert "\nSERVE_WORDS=(\n  data_parallel=1\n)" in text


def command(*words: str) -> None:
    slurm.main(["recipe=arithmetic_tiny", *NEEDED, *words])


def test_the_command_checks_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    setup = tmp_path / "setup.sh"
    setup.write_text("module load cuda\n")
    command("steps=7", "vllm_nodes=1", f"setup={setup}")
    file = tmp_path / "outputs" / "arithmetic_tiny" / "train_and_serve.sbatch"
    text = file.read_text()
    assert f"submit it with: sbatch {file}" in capsys.readouterr().out
    assert f"\nRUN_DIR=${{GRPO_RUN_DIR:-{file.parent}/job-$SLURM_JOB_ID}}  #" in text
    assert f"\n#SBATCH --output={file.parent}/%x-%j.out\n" in text
    assert f"\nWORK_DIR={tmp_path}  #" in text
    assert "\nPYTHON=(python)  #" in text
    assert "\nsetup() {\n  module load cuda\n}\n" in text
    assert "\nWORDS=(\n  recipe=arithmetic_tiny\n  steps=7\n)\n" in text
    assert "#   grpo slurm recipe=arithmetic_tiny gpus_per_node=0 time=1:00:00 steps=7" in text

    command("output_dir=runs/a", "file=b.sbatch")
    text = (tmp_path / "b.sbatch").read_text()
    assert f"\nRUN_DIR=${{GRPO_RUN_DIR:-{tmp_path}/runs/a}}  #" in text
    assert f"\nPYTHON=({sys.executable})  #" in text
    assert "output_dir" not in text.partition("\nWORDS=")[2].partition(")")[0]


def test_the_command_finds_what_training_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"steps = 0: must be >= 1"):
        command("steps=0")
    with pytest.raises(UserError, match=r"no\.jsonl"):
        command("dataset.train=no.jsonl")
    assert not list(tmp_path.rglob("*.sbatch"))
    command("dataset.train=no.jsonl", "check=false")
    assert list(tmp_path.rglob("*.sbatch"))


@pytest.mark.smoke
def test_submitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", str(bin_dir))
    with pytest.raises(UserError, match="there is no sbatch here"):
        command("check=false", "--submit")
    sbatch = bin_dir / "sbatch"
    sbatch.write_text('#!/bin/sh\n[ "$1" = --parsable ] && [ -f "$2" ] && echo "17;cluster"\n')
    sbatch.chmod(0o755)
    command("check=false", "--submit")
    assert capsys.readouterr().out.endswith("submitted: job 17\n")
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    with pytest.raises(TrainingError, match="sbatch refused: sbatch: error: no such partition"):
        command("check=false", "--submit")


# The script, with stand-ins.

# In place of the nodes' Python; slurm_fakes/ has the programs of SLURM.
PYTHON = f"""#!{sys.executable} -SE
import json, os, pathlib, signal, sys, time
fake, run = pathlib.Path(os.environ["FAKE"]), pathlib.Path(os.environ["RUN"])
words = sys.argv[1:]
kind = "train" if "train" in words else words[2]
known = {{k: v for k, v in os.environ.items() if k.startswith(("GRPO_", "OMP", "PET", "S_"))}}
with open(fake / "calls", "a") as file:
    file.write(json.dumps([kind, words, known]) + "\\n")
if kind == "train" and os.fork():  # torchrun: SLURM signals neither it nor what it starts
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
def save(name):
    (run / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
def leave():
    pathlib.Path(os.environ["GRPO_REQUEUE_FILE"]).touch()
def on_usr1(number, frame):
    (fake / "told").touch()
    leave()
    sys.exit()
def ready_for(*signals):
    for number in signals:
        signal.signal(number, on_usr1)
    (fake / f"in-{{kind}}").touch()
    time.sleep(60)
exec(os.environ.get("ON_" + kind, ""))
"""


@dataclass
class Batch:
    fake: Path
    run: Path
    environment: dict[str, str]
    file: Path
    words: tuple[str, ...] = ()
    said: str = ""
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, **does: str) -> subprocess.Popen[str]:
        """What the nodes' Python does: doctor, train, serve."""
        (self.fake / "state").write_text("RUNNING")
        for name in ("in-doctor", "in-train", "told"):
            (self.fake / name).unlink(missing_ok=True)
        process = subprocess.Popen(
            ["bash", str(self.file), *self.words], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
            env=self.environment | {f"ON_{k}": v for k, v in does.items()},
        )  # fmt: skip
        self.running.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> int:
        self.said, _ = process.communicate(timeout=40)
        return process.returncode

    def sit(self, **does: str) -> int:
        return self.end(self.start(**does))

    def until(self, name: str) -> None:
        until((self.fake / name).exists, name)

    def calls(self) -> list[tuple[str, list[str], dict[str, str]]]:
        file = self.fake / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def requeues(self) -> int:
        file = self.fake / "requeued"
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Batch]:
    def make_batch(*words: str, **environment: str) -> Batch:
        fake, run = tmp_path / "fake", tmp_path / "a run"
        shutil.copytree(Path(__file__).parent / "slurm_fakes", fake)
        (fake / "python").write_text(PYTHON)
        (fake / "python").chmod(0o755)
        place = slurm.Place(
            work_dir=f"'{tmp_path}'", run_dir=f"'{run}'", log="%j", python=str(fake / "python"),
            setup=": {{\nexport S_ET=up",
        )  # fmt: skip
        given = ["recipe=math_qwen", "gpus_per_node=2", "time=1:30:00", "grace=40", *words]
        file = tmp_path / "job.sbatch"
        file.write_text(text_of(*given, place=place))
        known = {
            "PATH": f"{fake}:{os.environ['PATH']}", "FAKE": str(fake), "RUN": str(run),
            "SLURM_JOB_ID": "8001", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_ON_NODE": "9",
            "TZ": "UTC",
        }  # fmt: skip
        batch = Batch(fake, run, known | environment, file)
        request.addfinalizer(lambda: [end_of(p) for p in batch.running])
        return batch

    return make_batch


def end_of(process: subprocess.Popen[str]) -> None:
    """Nothing of a sitting stays behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_run_to_its_end(make: Callable[..., Batch]) -> None:
    job = make("nodes=3", "steps=3", "dataset.prompt='a \"b\" $HOME'")
    job.words = ("seed=4",)
    assert job.sit() == 0, job.said
    (_, checks, _), (_, trains, environment) = job.calls()
    assert checks[3:] == [
        "--nodes=n1,n2,n3", "--rank=0", "--master=n1:23001", f"--dir={job.run}", "--gpus=2",
        "--port=n1:15001", "--min-free-gb=10", "--timeout=60",
    ]  # fmt: skip
    assert trains == [
        "-m", "torch.distributed.run", "--nnodes=3", "--node-rank=0", "--nproc-per-node=2",
        "--master-addr=n1", "--master-port=15001", "--max-restarts=0", "-m", "grpo_cli", "train",
        "recipe=math_qwen", "steps=3", "dataset.prompt='a \"b\" $HOME'", "seed=4",
        f'output_dir="{job.run}"', "resume=auto",
    ]  # fmt: skip
    assert environment == {
        "GRPO_END_TIME": "2000000000", "GRPO_GRACE": "40", "S_ET": "up", "OMP_NUM_THREADS": "4",
        "GRPO_REQUEUE_FILE": str(job.run / "logs" / "requeue"), "PET_SIGNALS_TO_HANDLE": "SIGINT",
    }  # fmt: skip
    steps = (job.fake / "steps").read_text().splitlines()
    of_all = "--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=n1,n2,n3"
    assert steps == [f"{of_all} --kill-on-bad-exit=0", f"{of_all} --kill-on-bad-exit=1"]
    assert job.requeues() == 0


def test_nodes_that_serve(make: Callable[..., Batch]) -> None:
    job = make("nodes=2", "vllm_nodes=1", "srun.container-image=a.sqsh")
    serve = "signal.signal(signal.SIGTERM, lambda *_: sys.exit((fake / 'ended').touch()))"
    ready = "(fake / 'in-serve').touch()"
    waits = "\nwhile not (fake / 'in-serve').exists(): time.sleep(0.01)"
    begin = time.monotonic()
    assert job.sit(train=waits, serve=f"{serve}; {ready}; time.sleep(60)") == 0, job.said
    assert time.monotonic() - begin < 15
    assert (job.fake / "ended").exists()  # as politely as it was asked to
    by_kind = {kind: words for kind, words, _ in job.calls()}
    assert by_kind["doctor"][7:10] == ["--gpus=2", "--port=n1:15001", "--port=n3:7001"]
    words = [
        "recipe=math_qwen", "generation=vllm_server",
        "generation.vllm.servers=[http://n3:7001]",
    ]  # fmt: skip
    assert by_kind["serve"][2:] == [
        "serve", *words, "data_parallel=2", "host=0.0.0.0", "port=7001",
        f"log={job.run}/logs/vllm-n1.log",
    ]  # fmt: skip
    assert by_kind["train"][2] == "--nnodes=2"
    assert by_kind["train"][11:] == [*words, f'output_dir="{job.run}"', "resume=auto"]
    keys = {environment["GRPO_SERVER_KEY"] for _, _, environment in job.calls()}
    (key,) = keys  # the servers' and the trainers'
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    written = [
        f.read_text()
        for f in [*job.run.rglob("*"), *job.run.parent.glob("*.sbatch")]
        if f.is_file()
    ]
    assert not any(key in text for text in [job.said, *written])
    options = sorted((job.fake / "steps").read_text().splitlines())
    assert all(line.endswith(" --container-image=a.sqsh") for line in options)
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=n3 --kill" in options[0]
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n1,n2 --kill" in options[1]


def test_unfit_nodes_do_not_train(make: Callable[..., Batch]) -> None:
    job = make()
    assert job.sit(doctor="sys.exit(1)") == 1
    assert "the nodes are not fit to train together; nothing was started" in job.said
    assert [kind for kind, _, _ in job.calls()] == ["doctor"]
    assert job.requeues() == 0


def test_an_error_is_not_tried_again(make: Callable[..., Batch]) -> None:
    job = make()
    assert job.sit(train="save('step-1'); sys.exit(3)") == 3
    assert job.requeues() == 0


def test_a_run_that_left_early_goes_on(make: Callable[..., Batch]) -> None:
    job = make()
    assert job.sit(train="save('step-9'); leave()") == 1
    assert "the run has left early, and can go on" in job.said
    assert (job.fake / "requeued").read_text() == "requeue 8001\n"
    # The file of that sitting says nothing of the next.
    assert job.sit(train="save('step-10')") == 0
    assert job.requeues() == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_run(make: Callable[..., Batch], number: signal.Signals) -> None:
    job = make()
    process = job.start(train="save('step-9'); ready_for(signal.SIGUSR1)")
    job.until("in-train")
    process.send_signal(number)
    job.end(process)
    assert f"got {number.name[3:]}: the run is to save and leave" in job.said
    assert (job.fake / "told").exists()
    assert job.requeues() == 1


@pytest.mark.programs
def test_a_summary_of_before_is_not_this_runs_end(make: Callable[..., Batch]) -> None:
    job = make()
    job.run.mkdir()
    (job.run / "summary.json").write_text("{}")
    leaves = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit())"
    process = job.start(train=f"{leaves}; (fake / 'in-train').touch(); time.sleep(60)")
    job.until("in-train")
    process.send_signal(signal.SIGUSR1)
    job.end(process)
    assert job.requeues() == 1


@pytest.mark.programs
def test_two_sittings_without_progress_are_enough(make: Callable[..., Batch]) -> None:
    job = make()
    job.sit(train="save('step-9'); leave()")
    job.sit(train="leave()")
    assert job.requeues() == 2
    assert job.sit(train="leave()") == 1
    assert "not requeued: two sittings in a row have saved nothing new" in job.said
    assert job.requeues() == 2


@pytest.mark.programs
def test_requeues_have_a_limit(make: Callable[..., Batch]) -> None:
    job = make("max_requeues=2", SLURM_RESTART_COUNT="2")
    assert job.sit(train="save('step-1'); leave()") == 1
    assert "not requeued: this was start 3, and MAX_REQUEUES is 2" in job.said
    assert f"to go on by hand: GRPO_RUN_DIR={job.run} sbatch FILE" in job.said
    job.environment["SLURM_RESTART_COUNT"] = "1"
    job.sit(train="save('step-2'); leave()")
    assert job.requeues() == 1


def test_a_dead_node_is_no_error_of_the_run(make: Callable[..., Batch]) -> None:
    job = make("nodes=3")
    (job.fake / "dead").write_text("n2")
    job.sit(train="save('step-1'); sys.exit(1)")
    assert "no answer any more from: n2" in job.said
    assert job.requeues() == 1
