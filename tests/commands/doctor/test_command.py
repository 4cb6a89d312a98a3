"""`grpo doctor`: each check's lines, its deadline, and what the command prints and returns."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_cli import cli, sandbox
from grpo_cli.commands.doctor import command, findings, machine, recipes, software
from grpo_cli.commands.doctor.findings import BROKEN, NOTE, OK, Check, Finding
from grpo_cli.config.schema import (
    Adapter,
    Build,
    Dataset,
    EnvironmentSettings,
    Hub,
    Model,
    Optimizer,
    Recipe,
    Reward,
)
from grpo_cli.training.plan import run_plan
from tests.tables import table


def test_a_check_that_raises_or_hangs_is_a_line() -> None:
    hang = threading.Event()

    def fails() -> Iterator[Finding]:
        yield Finding("first", "1")
        raise OSError("no\nsuch thing")

    def hangs() -> Iterator[Finding]:
        hang.wait(60)
        yield Finding("never", "")

    def leaves() -> Iterator[Finding]:
        raise SystemExit(3)

    checks = [
        Check("a", "fails", fails),
        Check("a", "hangs", hangs, 0.1),
        Check("b", "leaves", leaves),
        Check("b", "works", lambda: [Finding("one", "1"), Finding("two", "2")]),
    ]
    found = [(section, f.name, f.value, f.status) for section, fs in
             findings.run_all(checks) for f in fs]  # fmt: skip
    hang.set()
    assert found == [
        ("a", "fails", "cannot be found out: OSError: no", NOTE),
        ("a", "hangs", "no answer within 0.1 s", NOTE),
        ("b", "leaves", "cannot be found out: SystemExit: 3", NOTE),
        ("b", "one", "1", OK),
        ("b", "two", "2", OK),
    ]


def gpu(name: str, free: float = 80, peers: tuple[int, ...] = ()) -> dict[str, Any]:
    free, total = int(free * 2**30), 80 * 2**30
    return {"name": name, "free": free, "total": total, "peers": [*peers], "capability": "9.0"}


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "driver_version", lambda: "580.1")
    facts = {"version": "2.13", "cuda": "13.0", "threads": 8, "nccl": "2.27", "mps": False}
    two = [gpu("H100", peers=(1,)), gpu("H100 MIG 1g.10gb", free=10)]
    found = [*software.of_torch({**facts, "gpus": two})]
    assert [f.value for f in found] == [
        "2.13 (CUDA 13.0, NCCL 2.27), 8 threads",
        "580.1",
        "H100, capability 9.0, 80.0 of 80.0 GiB free, peer access to 1",
        "H100 MIG 1g.10gb, capability 9.0, 10.0 of 80.0 GiB free, a MIG instance, peer access to "
        "no other",
    ]
    assert [f.status for f in found] == [OK, OK, OK, NOTE]
    none = [*software.of_torch({**facts, "gpus": []})][-1]
    assert (none.status, none.value) == (NOTE, "torch sees none, though there is a driver")


@pytest.mark.parametrize(
    ("files", "own", "cores", "limit"),
    [
        ({}, "0::/a", None, None),
        ({"a/cpu.max": "max 100000", "a/memory.max": "max"}, "0::/a", None, None),
        (
            {"a/cpu.max": "400000 100000", "a/b/cpu.max": "250000 100000", "a/memory.max": "5000"},
            "0::/a/b",
            2.5,
            5000,
        ),
        (
            {
                "cpu/x/cpu.cfs_quota_us": "150000",
                "cpu/x/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/y/memory.limit_in_bytes": "7000",
            },
            "3:memory:/y\n2:cpu,cpuacct:/\n1:cpu:/x",
            1.5,
            7000,
        ),
    ],
)
def test_limits_of_cgroups(
    files: dict[str, str],
    own: str,
    cores: float | None,
    limit: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "OWN", tmp_path / "own")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.cpu_quota(tmp_path) == cores
    assert machine.memory_limit(tmp_path) == limit


def test_few_cores_by_the_cgroup_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.5)
    cores = next(f for f in machine.processor() if f.name == "cores")
    assert (cores.status, cores.advice) == (NOTE, "export OMP_NUM_THREADS=1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cores = next(f for f in machine.processor() if f.name == "cores")
    assert (cores.status, cores.advice) == (OK, "")


def test_variables_show_no_secret() -> None:
    found = machine.variables({
        "HF_TOKEN": "hf_abc", "HF_HOME": "/x", "HOME": "/root", "RANK": "1", "MY_API_KEY": "secret",
        "https_proxy": "http://me:word@proxy:80", "WANDB_API_KEY": "w", "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ID": "3", "SLURM_CONF": "x", "RANKS": "2",
    })  # fmt: skip
    assert {f.name: f.value for f in found} == {
        "HF_TOKEN": "(set, not shown)",
        "HF_HOME": "/x",
        "RANK": "1",
        "https_proxy": "http://(not shown)@proxy:80",
        "WANDB_API_KEY": "(set, not shown)",
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ID": "3",
    }


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, *_ = machine.disk("output_dir", tmp_path / "outputs" / "x", 1e-9)
    assert found.status == OK
    assert found.value.startswith(f"{tmp_path}/outputs/x (to be made in {tmp_path}): ")
    assert not (tmp_path / "outputs").exists()
    few, *_ = machine.disk("output_dir", tmp_path, 1e12)
    assert (few.status, few.advice[:12]) == (NOTE, "a checkpoint")
    (tmp_path / "file").touch()
    broken, *_ = machine.disk("output_dir", tmp_path / "file" / "x", 1.0)
    assert (broken.status, broken.value.rpartition(": ")[2]) == (BROKEN, "Not a directory")
    skew = [*machine.clock(tmp_path)][1]
    assert (skew.name, skew.status) == ("file system's time", OK)
    stat = os.stat
    late = type("Late", (), {"st_mtime": 0.0})
    monkeypatch.setattr(os, "stat", lambda p, **k: late if "/tmp" in str(p) else stat(p, **k))
    assert [*machine.clock(tmp_path)][1].status == NOTE


def test_packages_too_old_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "4.0", "numpy": "none", "peft": "0.1", "trackio": "none"}
    monkeypatch.setattr(software, "installed_version", lambda *names: versions.get(names[0], "99"))
    found = {f.name: f for f in software.packages()}
    assert found["transformers"].status == BROKEN
    needed = found["transformers"].value.removeprefix("4.0; grpo needs ")
    assert ">=5." in needed
    assert found["transformers"].advice == f"pip install 'transformers{needed}'"
    assert (found["numpy"].status, found["numpy"].value) == (BROKEN, "not installed")
    assert found["peft"].status == NOTE, "of an extra"
    assert "trackio (extra trackio)" in found["not installed"].value
    assert "trl 99" in found["others"].value


@pytest.mark.parametrize(
    ("version", "code", "status", "said"),
    [
        ("0.32.0", 0, OK, "0.32.0"),
        ("0.5.0", 0, NOTE, "0.5.0; grpo needs >=0.32"),
        ("0.32.0", 1, NOTE, "0.32.0, cannot be imported: ImportError: libx"),
        ("0.32.0", -4, NOTE, "0.32.0, cannot be imported: Illegal instruction"),
    ],
)
def test_vllm(
    version: str, code: int, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = "Traceback\nImportError: libx\n" if code == 1 else ""
    done = type("Done", (), {"returncode": code, "stderr": stderr, "stdout": ""})
    monkeypatch.setattr(software, "installed_version", lambda *names: version)
    monkeypatch.setattr("subprocess.run", lambda *a, **k: done)
    assert [(f.status, f.value) for f in software.vllm()] == [(status, said)]


@pytest.mark.parametrize(
    ("stdout", "code", "statuses"),
    [
        ("", 1, [BROKEN]),
        ("{}", -4, [OK, NOTE]),
        ("{}\nbfloat16", 0, [OK, OK]),
    ],
)
def test_a_torch_that_crashes(
    stdout: str, code: int, statuses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = type("Done", (), {"returncode": code, "stderr": "", "stdout": stdout})
    monkeypatch.setattr("subprocess.run", lambda *a, **k: done)
    monkeypatch.setattr(software, "of_torch", lambda facts: [Finding("torch", "2")])
    found = [*software.torch_and_gpus()]
    assert [f.status for f in found] == statuses
    if code == -4:
        assert "Illegal instruction" in found[1].value
        assert "ONEDNN_MAX_CPU_ISA" in found[1].advice


def recipe(**changes: Any) -> Recipe:
    rewards = {"math": Reward("math")}
    local = Dataset(train="pkg://grpo_cli/samples/arithmetic_test.jsonl", prompt="{question}")
    return Recipe(**{"recipe": "r", "dataset": local, "reward": rewards, **changes})


@table(
    ("changes", "name", "status", "said"),
    [
        ({"device": "cuda"}, "device", BROKEN, "torch sees no GPU"),
        ({"mixed_precision": "bf16"}, "device", NOTE, "no GPU"),
        ({"model": Model(path="no/such")}, "model.path", NOTE, "no/such is not in the cache"),
        ({"model": Model(path="./no")}, "model.path", BROKEN, "there is no such folder"),
        ({"dataset": Dataset(train="no/rows")}, "dataset.train", NOTE, "no/rows is not in the c"),
        ({"dataset": Dataset(train="no.jsonl")}, "dataset.train", BROKEN, "no such file"),
        ({"reward": {"x": Reward("mth")}}, "reward.x", BROKEN, "there is no reward 'mth'"),
        ({"hub": Hub(repo="a/b")}, "hub", BROKEN, "no token"),
        (
            {"environment": EnvironmentSettings(mcp="no-such-program --x")},
            "environment.mcp",
            BROKEN,
            "no-such-program is not on PATH",
        ),
        ({"reward": {"c": Reward("code")}}, "reward.c", BROKEN, "programs cannot be run: none"),
        ({"optimizer": Optimizer("adm")}, "optimizer", BROKEN, "must be one of"),
        ({"adapter": Adapter("lora")}, "adapter", BROKEN, "peft is not installed"),
    ],
)
def test_what_a_recipe_lacks(
    changes: dict[str, Any], name: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        patch.setattr("huggingface_hub.get_token", lambda: None)
        patch.setattr(sandbox, "find_level", refuse)
        if "adapter" in changes:
            patch.setattr("importlib.util.find_spec", lambda name: None)
        found = [*recipes.needs(recipe(**changes), gpus=[])]
    assert [(f.name, f.status) for f in found] == [(name, status)]
    assert said in found[0].value


def refuse(guards: str) -> None:
    raise sandbox.SandboxError("none")


def test_a_hub_name_offline_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = [*recipes.needs(recipe(model=Model(path="no/such")), gpus=["NVIDIA L4"])]
    assert [(f.name, f.status) for f in found] == [("model.path", BROKEN)]
    small = recipe(mixed_precision="bf16", model=Model(build=Build()))
    assert [*recipes.needs(small, gpus=["NVIDIA L4"])] == []


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = run_plan.plan_of(recipe(model=Model(build=Build())), run_plan.Request(gpu="l4"))
    big = dataclasses.replace(plan.plan, device=dataclasses.replace(plan.plan.device, memory=1e6))
    asked: list[run_plan.Request] = []

    def plan_of(recipe: Recipe, request: run_plan.Request) -> run_plan.Planned:
        asked.append(request)
        return dataclasses.replace(plan, plan=big)

    monkeypatch.setattr(run_plan, "plan_of", plan_of)
    tiny = recipe(model=Model(build=Build()))
    (found,) = recipes.needs(tiny, gpus=["NVIDIA L4", "NVIDIA L4"])
    assert asked == [run_plan.Request(gpu="l4", gpus=2)]
    assert (found.name, found.status) == ("memory", NOTE)
    assert found.advice == "grpo plan recipe=r gpu=l4 gpus=2 tells what to change"
    assert [*recipes.needs(tiny, gpus=["Some other GPU"])] == []


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the checks of the machine, and the shipped recipes by one."""

    def put(*findings: Finding) -> None:
        own = [Finding("torch", "2.13"), *findings]
        monkeypatch.setattr(machine, "checks", lambda *a: [Check("devices", "x", lambda: own)])

    shipped = [Path("arithmetic_tiny.yaml")]
    monkeypatch.setattr(command, "recipe_files", lambda: shipped)
    return put


def test_the_report(
    light: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path.home()
    monkeypatch.setenv("MY_TOKEN", "abcdefgh")
    light(Finding("a path", f"{home}/x", NOTE, "move it"), Finding("seen", "abcdefgh"))
    assert cli.run_command(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "* a path                 ~/x -> move it\n" in out
    assert "  arithmetic_tiny        nothing is missing\n" in out
    assert "math_qwen" not in out
    assert "abcdefgh" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert cli.run_command(["doctor", "--report", "recipe=arithmetic_tiny"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("**What I ran:**")
    assert out.endswith("left out.\n```\n")


def test_something_broken_is_exit_code_1(
    light: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    light(Finding("disk", "is read-only", BROKEN))
    assert cli.run_command(["doctor", "--json", "recipe=arithmetic_tiny", "reward=[mth]"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["devices"][1] == {
        "name": "disk", "value": "is read-only", "status": "broken", "advice": "", "short": "",
    }  # fmt: skip
    assert "there is no reward/mth.yaml" in found["recipes"][0]["value"]
    assert printed.err == "grpo: doctor: broken: disk, recipe.\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--jsn"], "grpo doctor: --jsn: there is no such option"),
        (["recipes=x"], "recipes: there is no such word"),
        (["recipe=nowhere"], "recipe = nowhere: there is no such recipe"),
    ],
)
def test_mistakes(
    words: list[str], said: str, light: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    light()
    assert cli.run_command(["doctor", *words]) == (1 if "nowhere" in said else 2)
    printed = capsys.readouterr()
    assert said in " ".join((printed.out + printed.err).split())


@pytest.mark.programs
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["doctor", "recipe=arithmetic_tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == [
        "versions", "devices", "sandbox", "disk", "network", "clock", "environment", "recipes",
    ]  # fmt: skip
    every = [f for findings in found.values() for f in findings]
    assert not [
        f for f in every if "cannot be found out" in f["value"] or "no answer" in f["value"]
    ]
    assert found["recipes"] == [
        {"name": "arithmetic_tiny", "value": "nothing is missing", "status": "ok", "advice": "",
         "short": ""}
    ]  # fmt: skip
