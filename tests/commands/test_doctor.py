"""`grpo doctor`: what its checks find, what it prints and returns."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_cli import cli, sandbox
from grpo_cli.commands import doctor
from grpo_cli.commands.doctor import BROKEN, NOTE, OK, Line
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.settings import Dataset, HeldOut
from grpo_cli.models.settings import Adapter, Model, Optimizer
from grpo_cli.reporting.settings import Hub
from grpo_cli.scoring.settings import Reward
from tests.tables import table


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    two = [["H100, capability 9.0", 80 * gib, 80 * gib], ["L4", 10 * gib, 24 * gib]]
    facts = {"version": "2.13", "cuda": "13.0", "gpus": two}
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.1")
    monkeypatch.setattr(doctor, "_run", lambda program: ([json.dumps(facts)], ""))
    found = {f.name: f for f in doctor.devices()}
    assert found["torch"].value == "2.13 (CUDA 13.0), driver 580.1"
    assert found["GPU 0"] == Line("GPU 0", "H100, capability 9.0, 80.0 of 80.0 GiB free")
    assert (found["GPU 1"].status, found["GPU 1"].value) == (NOTE, "L4, 10.0 of 24.0 GiB free")
    facts["gpus"] = []
    found = {f.name: f for f in doctor.devices()}
    assert (found["GPUs"].status, found["GPUs"].value[:15]) == (NOTE, "torch sees none")


def test_variables_show_no_secret() -> None:
    found = doctor.variables({
        "HF_TOKEN": "hf_abc", "HF_HOME": "/x", "HOME": "/root", "RANK": "1", "MY_API_KEY": "secret",
        "https_proxy": "http://me:word@proxy:80", "NCCL_DEBUG": "INFO", "RANKS": "2",
    })  # fmt: skip
    assert {f.name: f.value for f in found} == {
        "HF_TOKEN": "(set, not shown)",
        "HF_HOME": "/x",
        "RANK": "1",
        "https_proxy": "http://(not shown)@proxy:80",
        "NCCL_DEBUG": "INFO",
    }


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_FREE_GB", 1e-9)
    found, *_ = doctor.disks(tmp_path / "outputs" / "x")
    assert (found.status, found.value.rpartition(": ")[0]) == (OK, f"{tmp_path}/outputs/x")
    assert not (tmp_path / "outputs").exists()
    monkeypatch.setattr(doctor, "LEAST_FREE_GB", 1e12)
    few, *_ = doctor.disks(tmp_path)
    assert (few.status, few.advice[:12]) == (NOTE, "a checkpoint")
    (tmp_path / "file").touch()
    broken, *_ = doctor.disks(tmp_path / "file" / "x")
    assert (broken.status, broken.value.rpartition(": ")[2]) == (BROKEN, "Not a directory")


def test_packages_too_old_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "4.0", "numpy": "none", "peft": "0.1", "vllm": "none"}
    monkeypatch.setattr(doctor, "installed_version", lambda *names: versions.get(names[0], "99"))
    found = {f.name: f for f in doctor.versions()}
    assert found["transformers"].status == BROKEN
    needed = found["transformers"].value.removeprefix("4.0; grpo needs ")
    assert found["transformers"].advice == f"pip install 'transformers{needed}'"
    assert (found["numpy"].status, found["numpy"].value[:5]) == (BROKEN, "none;")
    assert found["peft"].status == NOTE, "of an extra"
    assert "vllm" not in found
    versions["vllm"] = "99"
    monkeypatch.setattr(doctor, "_run", lambda program: ([], "ImportError: libx"))
    assert {f.name: f.value for f in doctor.versions()}["vllm"].endswith("ImportError: libx")


def recipe(**changes: Any) -> Recipe:
    rewards = {"math": Reward("math")}
    local = Dataset(train="pkg://grpo_cli/samples/arithmetic_test.jsonl", prompt="{question}")
    return Recipe(**{"recipe": "r", "dataset": local, "reward": rewards, **changes})


@table(
    ("changes", "name", "status", "said"),
    [
        ({"model": Model(path="no/such")}, "model.path", NOTE, "no/such is not cached"),
        ({"model": Model(path="./no")}, "model.path", BROKEN, "there is no such folder"),
        ({"dataset": Dataset(train="no/rows")}, "dataset.train", NOTE, "no/rows is not cached"),
        ({"dataset": Dataset(train="no.jsonl")}, "dataset.train", BROKEN, "no such file"),
        (
            {"dataset": Dataset(held_out={"a": HeldOut("no.jsonl")})},
            "dataset.held_out.a.data",
            BROKEN,
            "no such file",
        ),
        ({"reward": {"x": Reward("mth")}}, "reward.x", BROKEN, "there is no reward 'mth'"),
        ({"hub": Hub(repo="a/b")}, "hub", BROKEN, "no token"),
        ({"reward": {"c": Reward("code")}}, "reward.c.args.guards", BROKEN, "none works"),
        ({"optimizer": Optimizer("adm")}, "optimizer", BROKEN, "must be one of"),
        ({"adapter": Adapter("lora")}, "adapter", BROKEN, "peft is not installed"),
    ],
)
def test_what_a_recipe_lacks(
    changes: dict[str, Any], name: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(guards: str) -> None:
        raise sandbox.SandboxError("none works")

    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        patch.setattr("huggingface_hub.get_token", lambda: None)
        patch.setattr(sandbox, "find_level", refuse)
        if "adapter" in changes:
            patch.setattr("importlib.util.find_spec", lambda name: None)
        found = doctor.lacks(recipe(**changes))
    assert [(f.name, f.status) for f in found] == [(name, status)]
    assert said in found[0].value


def test_a_run_as_model_is_its_newest_checkpoint(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-2"
    saved.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (saved / name).touch()
    assert doctor.lacks(recipe(model=Model(path=str(tmp_path)))) == []


@pytest.mark.programs
def test_the_report_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise OSError("no\nsuch thing")

    monkeypatch.setenv("HF_HOME", f"{Path.home()}/x")
    monkeypatch.setattr(doctor, "sandbox_level", fails)
    assert cli.run_command(["doctor", "recipe=arithmetic_tiny"]) == 0
    out = capsys.readouterr().out
    assert "\n  HF_HOME                ~/x\n" in out
    assert "\n* sandbox                cannot be found out: OSError: no\n" in out
    assert "\nrecipes\n  recipe                 nothing is missing\n" in out
    assert max(map(len, out.splitlines())) <= 98

    disks = lambda folder: [Line("disk", "is read-only", BROKEN)]  # noqa: E731
    monkeypatch.setattr(doctor, "disks", disks)
    assert cli.run_command(["doctor", "recipe=arithmetic_tiny"]) == 1
    assert capsys.readouterr().err == "grpo: doctor: broken: disk.\n"
