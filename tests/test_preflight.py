"""`grpo preflight`: what it says of nodes, and processes of it on this machine, a node each."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_cli import preflight
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.preflight import Deadline, Facts, Seen, Settings
from tests.programs import PATIENCE

ROOT = Path(__file__).resolve().parent.parent

FACTS: Facts = {
    "grpo_cli": "0.1.0 (abc)", "python": "3.11.2", "torch": "2.13.0", "transformers": "5.19.0",
    "vllm": "none", "cuda": "13.0", "driver": "580.1", "gpus": 8, "gpu": "H200", "machine": "m",
    "address": "10.0.0.1", "listens": 4000, "taken": [], "folder": "/runs/a", "folder_error": None,
    "free": 900.0, "tmp": "/tmp", "free_tmp": 50.0,
}  # fmt: skip


def asked(nodes: str = "a,b,c", **changed: Any) -> Settings:
    settings = preflight.parse([f"--nodes={nodes}", "--rank=0"], {})
    return dataclasses.replace(settings, **changed)


def seen_by(*facts: dict[str, Any]) -> Seen:
    """What the first node has been told by nodes that see everybody, each with other facts."""
    everybody = list(range(len(facts)))
    return Seen(
        {r: FACTS | {"machine": f"m{r}"} | changed for r, changed in enumerate(facts)},
        {r: {"clock": 100.0, "unreachable": {}, "tokens": everybody} for r in everybody},
        dict.fromkeys(everybody, ""),
    )


def said_of(settings: Settings, seen: Seen) -> list[str]:
    judges = (preflight.judge_facts, preflight.judge_looks, preflight.judge_sums)
    return [line for judge in judges for line in judge(settings, seen)]


def test_nodes_that_are_alike_have_nothing_to_put_right() -> None:
    assert said_of(asked(gpus=8), seen_by({}, {}, {})) == []


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        (
            [{}, {"torch": "2.12.0"}, {}],
            ["b: torch is 2.12.0; 2.13.0 on a and c"],
        ),
        (
            [{"driver": "550.2"}, {}, {}],
            ["a: driver is 550.2; 580.1 on b and c"],
        ),
        (
            [{"python": "3.11"}, {"python": "3.12"}, {"python": "3.13"}],
            ["b: python is 3.12; 3.11 on a", "c: python is 3.13; 3.11 on a"],
        ),
        (
            [{}, {"gpus": 7}, {}],
            ["b: GPUs is 7; 8 on a and c", "b: shows 7 GPUs, 8 are asked for"],
        ),
        (
            [{}, {}, {"taken": ["port 5 is taken, and training needs it"]}],
            ["c: port 5 is taken, and training needs it"],
        ),
        (
            [{}, {}, {"free": 9.94, "free_tmp": 0.5}],
            [
                "c: 9.9 GB free in /runs/a, at least 10 are needed",
                "c: 0.5 GB free in /tmp, at least 1 are needed",
            ],
        ),
        (
            [{}, {"folder_error": "Permission denied"}, {}],
            ["b: cannot write to /runs/a: Permission denied"],
        ),
        (
            [{}, {"address": "none: its own name b is not known to it (no)"}, {}],
            ["b: has no address for others: its own name b is not known to it (no)"],
        ),
        (
            [{}, {"address": "127.0.1.1"}, {}],
            [
                "b: takes 127.0.1.1 for its address, at which no other node can reach it; name the "
                "interface with GLOO_SOCKET_IFNAME"
            ],
        ),
        # Several nodes of one machine reach one another there.
        ([{"address": "127.0.0.1", "machine": "m"}, {"machine": "m"}, {"machine": "m"}], []),
    ],
)  # fmt: skip
def test_what_nodes_say_of_themselves(facts: list[dict[str, Any]], lines: list[str]) -> None:
    assert said_of(asked(gpus=8), seen_by(*facts)) == lines


def test_a_node_that_has_not_arrived() -> None:
    seen = seen_by({}, {}, {})
    for told in (seen.facts, seen.looked, seen.reduced):
        del told[1]
    seen.looked[0]["tokens"] = seen.looked[2]["tokens"] = [0, 2]
    assert said_of(asked(), seen) == ["b: has not arrived; a and c waited for it"]


def test_a_node_that_falls_silent() -> None:
    seen = seen_by({}, {}, {})
    del seen.looked[2], seen.reduced[2]
    assert said_of(asked(), seen) == [
        "c: has arrived, and then said nothing more",
        "c: has not come back from the sum over all nodes",
    ]


def test_nodes_that_do_not_reach_one_another() -> None:
    seen = seen_by({}, {}, {})
    seen.looked[2]["unreachable"] = {"1": "10.0.0.2 (timed out)"}
    assert said_of(asked(), seen) == ["c: cannot connect to b at 10.0.0.2 (timed out)"]


@pytest.mark.parametrize("other", [0, 1, 2])
def test_a_folder_that_is_not_shared(other: int) -> None:
    seen = seen_by({}, {}, {})
    sharing = [r for r in range(3) if r != other]
    for rank, looked in seen.looked.items():
        looked["tokens"] = [other] if rank == other else sharing
    names = ["a", "b", "c"]
    assert said_of(asked(), seen) == [
        f"{names[other]}: /runs/a is not the folder that {names[sharing[0]]} and "
        f"{names[sharing[1]]} have under this name; it has to be on a file system that all share"
    ]


def test_clocks() -> None:
    seen = seen_by({}, {}, {})
    for rank, clock in enumerate((100.0, 104.0, 106.0)):
        seen.looked[rank]["clock"] = clock
    assert said_of(asked(), seen) == []
    seen.looked[2]["clock"] = 110.0
    assert said_of(asked(), seen) == ["c: its clock is 6 s ahead of the others'"]
    seen.looked[2]["clock"] = 40.0
    assert said_of(asked(), seen) == ["c: its clock is 60 s behind the others'"]


def test_sums_that_fail() -> None:
    seen = seen_by({}, {}, {})
    seen.reduced[1] = "the sum over all nodes by gloo failed: refused"
    assert said_of(asked(), seen) == ["b: the sum over all nodes by gloo failed: refused"]


def test_many_names_are_cut_short() -> None:
    nodes = ",".join(f"n{i}" for i in range(9))
    seen = seen_by(*({} for _ in range(8)), {"torch": "1"})
    assert said_of(asked(nodes), seen) == ["n8: torch is 1; 2.13.0 on n0, n1, n2 and 5 more"]


@pytest.mark.parametrize("size", [1, 2, 17, 18, 100, 1024])
def test_neighbours(size: int) -> None:
    """Few nodes connect to all; of many each to a few, which still hang together."""
    of_each = [preflight.neighbours(rank, size) for rank in range(size)]
    assert all(rank not in of_each[rank] for rank in range(size))
    assert max(map(len, of_each)) <= preflight.NEIGHBOURS
    if size <= preflight.NEIGHBOURS + 1:
        assert all(len(others) == size - 1 for others in of_each)
    assert preflight.neighbours(3, 40) == [4, 5, 7, 11, 19, 35]
    reached, new = {0}, {0}
    while new:
        new = {other for rank in new for other in of_each[rank]} - reached
        reached |= new
    assert reached == set(range(size))


# The command line.


def test_words() -> None:
    settings = preflight.parse(
        ["--nodes=a,b", "--rank=1", "--master=a:5", "--dir=/r", "--port=a:6", "--port=b:7",
         "--gpus=2", "--min-free-gb=3", "--min-free-tmp-gb=4", "--timeout=9"], {},
    )  # fmt: skip
    assert settings == Settings(
        ("a", "b"), 1, "a", 5, Path("/r"), (("a", 6), ("b", 7)), 2, 3.0, 4.0, 9.0
    )
    assert settings.name == "b"


def test_words_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && echo n3 && echo n4\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    known = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_NODEID": "1"}
    settings = preflight.parse([], known)
    assert (settings.nodes, settings.rank, settings.host) == (("n3", "n4"), 1, "n3")
    scontrol.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="scontrol does not say"):
        preflight.parse([], known)


def test_without_slurm_it_is_this_machine() -> None:
    settings = preflight.parse([], {})
    assert (settings.nodes, settings.rank) == ((socket.gethostname(),), 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes=a,a"], "--nodes = a,a: must be different names"),
        (["--nodes=a,"], "--nodes = a,: must be different names"),
        (["--nodes=a,b", "--rank=2"], "--rank = 2: must be from 0 to 1"),
        (["--nodes=a", "--master=a"], "--master = a: must be NAME:PORT."),
        (["--nodes=a", "--master=a:0"], "--master = a:0: must be NAME:PORT."),
        (["--nodes=a", "--port=b:5"], "--port: b is none of --nodes."),
        (["--nodes=a", "--timeout=1"], "--timeout = 1: must be at least 5 seconds."),
        (["--node=a"], "unrecognized arguments: --node=a"),
        (["--rank=x"], "argument --rank: invalid int value: 'x'"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        preflight.parse(words, {})
    assert message in str(caught.value)


# What a node finds out.


def test_ports_that_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert not preflight._is_free(port)
    assert preflight._is_free(port)


def test_the_address_of_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert preflight._own_address(asked()) in ("127.0.0.1", "::1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib77")
    assert preflight._own_address(asked()).startswith("none: there is no interface ib77")


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    there = {1: FACTS | {"address": "127.0.0.1", "listens": port}}
    found = preflight.unreachable(asked("a,b"), there, 5)
    assert found == {1: "127.0.0.1 (Connection refused)"}
    there[1]["address"] = "none: no"  # which has a line of its own
    assert preflight.unreachable(asked("a,b"), there, 5) == {}


# Processes.

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the process of a node, with other options and another environment if need be."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running: list[subprocess.Popen[str]] = []

    def start_node(rank: int, *words: str, nodes: str = "a,b,c", **environment: str) -> Any:
        known = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_cli", "preflight", f"--nodes={nodes}", f"--rank={rank}",
             f"--master=127.0.0.1:{port}", f"--dir={tmp_path / 'run'}", "--min-free-gb=0",
             "--min-free-tmp-gb=0", *words],
            env=known | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        running.append(process)
        return process

    yield start_node
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def ends(*processes: subprocess.Popen[str]) -> tuple[list[int], list[str]]:
    """(exit codes, what each said)."""
    said = [p.communicate(timeout=PATIENCE)[0] for p in processes]
    return [p.returncode for p in processes], said


def test_three_nodes(start: Start, tmp_path: Path) -> None:
    codes, said = ends(*(start(rank) for rank in range(3)))
    assert codes == [0, 0, 0], said
    assert said[0].startswith("preflight: 3 nodes see one another: ")
    assert f" GB free in {tmp_path / 'run'}, in " in said[0]
    assert said[1:] == ["", ""]
    assert list((tmp_path / "run").iterdir()) == []


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
    assert lines[0].startswith("preflight: c: transformers is 4.0.0; ")
    assert lines[0].endswith(" on a and b")
    assert lines[1] == f"preflight: c: port {port} is taken, and training needs it"
    assert lines[2].startswith(f"preflight: b: {tmp_path / 'elsewhere'} is not the folder that a")
    assert lines[3:] == ["grpo: preflight: 3 things to put right before 3 nodes can train together"]
    assert said[1:] == ["", ""]


@pytest.mark.slow
def test_a_node_that_does_not_come(start: Start) -> None:
    codes, said = ends(start(0, "--timeout=16"), start(2, "--timeout=16"))
    assert codes == [1, 1], said
    assert said[0].startswith("preflight: b: has not arrived; a and c waited for it\n")


def test_the_first_node_does_not_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = asked("a,b", rank=1, host="127.0.0.1", port=port, timeout=0.5)
    with pytest.raises(TrainingError) as caught, ended(Deadline(settings)) as deadline:
        preflight.join(settings, deadline)
    assert f"b: cannot reach a at 127.0.0.1:{port} within 0.5 s" in str(caught.value)
    assert "a has not started, or a firewall is between" in str(caught.value)


def test_a_port_of_its_own_that_is_taken() -> None:
    with socket.create_server(("", 0)) as held:
        settings = asked("a", host="127.0.0.1", port=held.getsockname()[1])
        with pytest.raises(TrainingError) as caught, ended(Deadline(settings)) as deadline:
            preflight.join(settings, deadline)
    assert f"a: cannot listen at 127.0.0.1:{settings.port}: " in str(caught.value)


@contextlib.contextmanager
def ended(deadline: Deadline) -> Iterator[Deadline]:
    try:
        yield deadline
    finally:
        deadline.timer.cancel()


@pytest.mark.slow
def test_a_node_that_is_stopped_does_not_hold_the_others(start: Start) -> None:
    """It has arrived, and says no more: as one whose network breaks."""
    halts = (
        "import os, signal\nfrom grpo_cli import preflight\n"
        "preflight.look = lambda *a: os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    first = start(0, "--timeout=20", nodes="a,b")
    words = [w for w in first.args if isinstance(w, str)][4:]  # type: ignore[union-attr]
    second = subprocess.Popen(
        [sys.executable, "-c", f"{halts}preflight.main({[*words, '--rank=1']!r})"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        codes, said = ends(first)
    finally:
        second.kill()
        second.wait()
    assert codes == [1]
    assert said[0].startswith("preflight: b: has arrived, and then said nothing more\n")


def test_a_hang_ends_with_its_time() -> None:
    """Whatever it is that hangs: here the code that tells the facts."""
    hangs = (
        "import time\nfrom grpo_cli import preflight\n"
        "preflight.facts_of = lambda *a: time.sleep(60)\n"
        "preflight.main(['--nodes=a', '--timeout=5'])\n"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", hangs], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "preflight: a: not done after 5 s; it hung in its attempt to start\n"
    assert time.monotonic() - begin < 50
