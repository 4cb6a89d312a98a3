"""`grpo doctor --nodes`: what it says of nodes, and its processes on this machine, a node each."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.commands import doctor_nodes
from grpo_cli.commands.doctor_nodes import Facts, NodesOptions
from grpo_cli.errors import TrainingError
from tests import programs
from tests.programs import PATIENCE, ROOT, free_port

EQUAL = {"python": "3.11.2", "torch": "2.13.0"}
FACTS: Facts = {"problems": [], "free": 900.0}


def asked(nodes: str = "a,b,c", **changed: Any) -> NodesOptions:
    return NodesOptions(**{"nodes": nodes, **changed})


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ([{}, {"torch": "2.12.0"}, {}], ["b: torch is 2.12.0; 2.13.0 on a and c"]),
        ([{}, {}, {}], []),
        (
            [{"python": "3.11"}, {"python": "3.12"}, {"python": "3.13"}],
            ["b: python is 3.12; 3.11 on a", "c: python is 3.13; 3.11 on a"],
        ),
        ([{}, {}, {"problems": ["is slow", "is full"]}], ["c: is slow", "c: is full"]),
    ],
)  # fmt: skip
def test_what_nodes_say_of_themselves(facts: list[dict[str, Any]], lines: list[str]) -> None:
    reports = {
        rank: FACTS
        | {"equal": {key: changed.get(key, value) for key, value in EQUAL.items()}}
        | {key: value for key, value in changed.items() if key in FACTS}
        for rank, changed in enumerate(facts)
    }
    assert list(doctor_nodes.judge_facts(asked(), reports)) == lines


def test_a_node_that_has_not_arrived() -> None:
    facts = FACTS | {"equal": EQUAL}
    problems = doctor_nodes.judge_facts(asked(), {0: facts, 2: facts})
    assert list(problems) == ["b: has not arrived; a and c waited for it"]


def test_a_node_finds_its_problems(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = doctor_nodes.facts_of(asked(dir=str(tmp_path), gpus=99, min_free_gb=1e8))["problems"]
    assert found[0].endswith("GPUs, 99 are asked for")
    assert found[1].endswith(f" GB free in {tmp_path}, at least 1e+08 are needed")
    (found,) = doctor_nodes.facts_of(asked(dir=str(file / "run")))["problems"]
    assert found == f"cannot write to {file / 'run'}: Not a directory"


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    port = free_port()
    running: list[subprocess.Popen[str]] = []

    def start_node(rank: int, *words: str, nodes: str = "a,b,c", **environment: str) -> Any:
        options = [f"--nodes={nodes}", f"--rank={rank}", f"--master=127.0.0.1:{port}"]
        options.append("--min-free-gb=0")
        if not any(w.startswith("--dir") for w in words):
            options.append(f"--dir={tmp_path / 'run'}")
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_cli", "doctor", *options, *words],
            env=programs.environment(**environment), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        running.append(process)
        return process

    yield start_node
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def ends(*processes: subprocess.Popen[str]) -> tuple[list[int], list[str]]:
    said = [p.communicate(timeout=PATIENCE)[0] for p in processes]
    return [p.returncode for p in processes], said


@pytest.mark.programs
def test_two_nodes(start: Start, tmp_path: Path) -> None:
    free = f"--port=a:{free_port()}"
    codes, said = ends(*(start(rank, free, nodes="a,b") for rank in range(2)))
    assert codes == [0, 0], said
    assert said[0].startswith("doctor: a and b can train together: ")
    assert said[0].endswith(f" GB free in {tmp_path / 'run'}\n")
    assert said[1] == ""
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.programs
def test_everything_that_is_wrong_is_said_at_once(start: Start, tmp_path: Path) -> None:
    info = tmp_path / "other" / "transformers-4.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        codes, said = ends(
            start(0, "--gpus=0", f"--port=c:{port}"),
            start(1, f"--dir={tmp_path / 'elsewhere'}"),
            start(2, f"--port=c:{port}", PYTHONPATH=f"{info.parent}:{ROOT}"),
        )
    assert codes == [1, 1, 1], said
    lines = said[0].splitlines()
    assert lines[0].startswith("doctor: c: transformers is 4.0.0; ")
    assert lines[0].endswith(" on a and b")
    assert lines[1].startswith(f"doctor: b: {tmp_path / 'elsewhere'} is not the folder that a")
    assert lines[2] == f"doctor: c: port {port} is taken, and training needs it"
    assert lines[3:] == ["grpo: doctor: 3 things to put right before 3 nodes can train together"]
    assert said[1:] == ["", ""]


@pytest.mark.programs
def test_the_first_node_does_not_come() -> None:
    port = free_port()
    settings = asked("a,b", rank=1, master=f"127.0.0.1:{port}", timeout=0.5)
    with pytest.raises(TrainingError) as caught:
        doctor_nodes.join(settings)
    assert f"b: cannot reach a at 127.0.0.1:{port} within 0.5 s" in str(caught.value)
    assert "a has not started, or a firewall is between" in str(caught.value)


@pytest.mark.slow
def test_a_node_that_is_stopped_does_not_hold_the_others(start: Start) -> None:
    """It has arrived, and says no more, as one whose network breaks."""
    halts = (
        "import os, signal\nfrom grpo_cli.commands import doctor_nodes\n"
        "doctor_nodes.sum_over_nodes = lambda *a: os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    first = start(0, "--timeout=20", nodes="a,b")
    words = [w for w in map(str, first.args) if not w.startswith("--rank")][4:]  # type: ignore[arg-type]
    second = subprocess.Popen(
        [sys.executable, "-c", f"{halts}doctor_nodes.main({[*words, '--rank=1']!r})"],
        env=programs.environment(),
    )
    try:
        codes, said = ends(first)
    finally:
        second.kill()
        second.wait()
    assert codes == [1]
    assert "doctor: b: has not come back from the sum over all nodes\n" in said[0]
    assert "doctor: a: the sum over all nodes by gloo failed: " in said[0]
