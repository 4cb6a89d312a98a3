"""The checks of `grpo doctor` of a machine: CPU, memory, sandbox, disk, network, clock."""

from __future__ import annotations

import fcntl
import locale
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from grpo_cli import sandbox
from grpo_cli.commands.doctor import software
from grpo_cli.commands.doctor.findings import BROKEN, NOTE, OK, Check, Finding
from grpo_cli.commands.preflight import GB, MAX_CLOCK_SKEW, is_free
from grpo_cli.config.cache import cache_dir
from grpo_cli.config.interpolation import SECRET

GIB = 2**30
TORCHRUN_PORT = 29500  # its default
LEAST_FREE_GB = 10.0
LEAST_SHARED_GB = 1.0  # of /dev/shm, by which processes pass tensors to one another
ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
VARIABLES = re.compile(
    r"(HF|HUGGINGFACE|CUDA|NVIDIA|NCCL|GLOO|OMP|GOMP|MKL|KMP|ONEDNN|TORCH|PYTORCH|TORCHELASTIC|VLLM|"
    r"TRANSFORMERS|TOKENIZERS|GRPO|MASTER|WANDB|XDG)_\w+|RANK|LOCAL_RANK|WORLD_SIZE|"
    r"LOCAL_WORLD_SIZE|SLURM_(JOB_ID|NNODES|NTASKS|JOB_PARTITION|GPUS\w*)|LD_LIBRARY_PATH|"
    r"LD_PRELOAD|PYTHONPATH|(?i:https?_proxy|no_proxy|all_proxy)"
)


def checks(folder: Path, network: bool) -> list[Check]:
    """Returns the checks, in the order of the report.

    Args:
        folder: that runs are written below.
        network: whether the hub may be asked.
    """
    return [
        Check("versions", "grpo", software.grpo),
        Check("versions", "packages", software.packages),
        Check("versions", "vllm", software.vllm, 90.0),
        Check("devices", "torch", software.torch_and_gpus, 90.0),
        Check("devices", "cpu", processor),
        Check("devices", "memory", memory),
        Check("sandbox", "sandbox", sandbox_level, 60.0),
        Check("disk", "output_dir", lambda: disk("output_dir", folder, LEAST_FREE_GB), 20.0),
        Check("disk", "temporary files", lambda: disk("temporary files", temporary(), 1.0), 20.0),
        Check("disk", "caches", caches, 20.0),
        Check("network", "names", names, 15.0),
        Check("network", "ports", ports),
        Check("network", "hub", lambda: hub(network), 20.0),
        Check("clock", "clock", lambda: clock(folder), 20.0),
        Check("environment", "terminal", terminal),
        Check("environment", "variables", lambda: variables(os.environ)),
    ]


def processor() -> Iterator[Finding]:
    """Finds the CPU, the cores that this process may use, and its number of threads."""
    model, flags = _cpu_info()
    yield Finding("CPU", model or platform.machine())
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    said = f"{usable} of {cores} usable"
    quota = cpu_quota()
    if quota is None:
        yield Finding("cores", said)
    else:
        few = quota < usable and "OMP_NUM_THREADS" not in os.environ
        yield Finding(
            "cores", f"{said}, {quota:g} by the cgroup", NOTE if few else OK,
            f"export OMP_NUM_THREADS={max(1, int(quota))}" if few else "",
        )  # fmt: skip
    if "amx_bf16" in flags:
        yield Finding("AMX", "announced; see `bfloat16 on the CPU`")


def _cpu_info() -> tuple[str, set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor(), set()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else "", set(flags[1].split()) if flags else set()


def memory() -> Iterator[Finding]:
    """Finds the memory of the machine, and what its cgroup leaves of it."""
    found = psutil.virtual_memory()
    said = f"{found.total / GIB:.1f} GiB, {found.available / GIB:.1f} GiB available"
    limit = memory_limit()
    if limit is not None and limit < found.total:
        said += f", limited to {limit / GIB:.1f} GiB by the cgroup"
    yield Finding("memory", said)
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total / GB) < LEAST_SHARED_GB:
        advice = "docker run --shm-size=8g, or --ipc=host"
        yield Finding("/dev/shm", f"{size * 1000:.0f} MB, too little for NCCL", NOTE, advice)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns the number of cores that the cgroup allows; None without a limit."""
    found = []
    for folder in _cgroups(root, "cpu"):
        if (text := _text(folder / "cpu.max")) and not text.startswith("max"):
            quota, period = text.split()
            found.append(int(quota) / int(period))
        quota = _text(folder / "cpu.cfs_quota_us")
        if quota and int(quota) > 0:
            found.append(int(quota) / int(_text(folder / "cpu.cfs_period_us") or 100_000))
    return min(found, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the bytes that the cgroup allows; None without a limit."""
    found = []
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name)
            if text.isdigit() and int(text) < 2**60:  # version 1 writes a huge number for none
                found.append(int(text))
    return min(found, default=None)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's cgroup and those above it, of both versions."""
    for line in _text(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            own = top / path.lstrip("/")
            yield from (f for f in (own, *own.parents) if f.is_relative_to(top))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def sandbox_level() -> Iterator[Finding]:
    """Finds the guards under which programs run here, by running one."""
    try:
        yield Finding("sandbox", sandbox.describe("auto").removeprefix("sandbox: "))
    except sandbox.SandboxError as error:
        yield Finding("sandbox", str(error), NOTE, "needed by reward=code and eval.mode=tir")


def temporary() -> Path:
    """Returns the folder of temporary files."""
    return Path(tempfile.gettempdir())


def disk(name: str, folder: Path, least: float) -> Iterator[Finding]:
    """Finds whether a folder can be written and locked, its free space and its file system.

    Args:
        least: GB that should be free.
    """
    there = existing(folder)
    shown = f"{folder}" if there == folder else f"{folder} (to be made in {there})"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = ""
            except OSError:
                locks = ", without locks: nothing keeps two runs out of one folder"
    except OSError as error:
        reason = error.strerror or str(error)
        yield Finding(name, f"{shown}: cannot be written: {reason}", BROKEN, "choose another one")
        return
    free = shutil.disk_usage(there).free / GB
    kind = file_system(there)
    few = free < least
    yield Finding(
        name, f"{shown}: {free:.1f} GB free, {kind}{locks}", NOTE if few or locks else OK,
        f"a checkpoint takes three times the weights; at least {least:g} GB" if few else "",
    )  # fmt: skip


def existing(folder: Path) -> Path:
    """Returns a folder, or the nearest above it that exists."""
    there = folder.expanduser().absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there


def file_system(path: Path) -> str:
    """Returns the type of the file system that holds a path, such as `ext4` or `nfs4`."""
    mounts = [p for p in psutil.disk_partitions(all=True) if path.is_relative_to(p.mountpoint)]
    found = max(mounts, key=lambda p: len(p.mountpoint), default=None)
    return found.fstype if found else "unknown file system"


def caches() -> Iterator[Finding]:
    """Finds the caches of the hub and of grpo."""
    from huggingface_hub import constants

    for name, folder in (
        ("cache of the hub", Path(constants.HF_HUB_CACHE)),
        ("cache of grpo", cache_dir()),
    ):
        yield from disk(name, folder, LEAST_FREE_GB)


def names() -> Iterator[Finding]:
    """Finds whether localhost and this machine's name resolve, as torchrun and gloo need it."""
    for name in ("localhost", socket.gethostname()):
        try:
            addresses = {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
            yield Finding(name, ", ".join(sorted(addresses)))
        except OSError as error:
            yield Finding(
                name, f"does not resolve: {error.strerror or error}", NOTE,
                "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME and --master",
            )  # fmt: skip


def ports() -> Iterator[Finding]:
    """Finds whether this process can listen, and whether torchrun's default port is free."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
    except OSError as error:
        reason = error.strerror or str(error)
        yield Finding("ports", f"cannot listen on localhost: {reason}", BROKEN)
        return
    if is_free(TORCHRUN_PORT):
        yield Finding("ports", f"can listen; {TORCHRUN_PORT}, torchrun's default, is free")
    else:
        said = f"{TORCHRUN_PORT}, torchrun's default, is taken"
        yield Finding("ports", said, NOTE, "torchrun --standalone, or --master-port")


def hub(network: bool) -> Iterator[Finding]:
    """Finds whether there is a token, and with `network` whether the hub answers."""
    from huggingface_hub import HfApi, constants, get_token

    yield Finding("token of the hub", "there is one" if get_token() else "none")
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", f"{constants.ENDPOINT}, not asked: HF_HUB_OFFLINE is set")
    elif not network:
        yield Finding("hub", f"{constants.ENDPOINT}, not asked; --network asks")
    else:
        began = time.monotonic()
        try:
            HfApi().model_info("openai-community/gpt2", timeout=10)
        except Exception as error:  # of several libraries
            first = (str(error).splitlines() or [type(error).__name__])[0][:150]
            yield Finding("hub", f"{constants.ENDPOINT} does not answer: {first}", NOTE)
        else:
            yield Finding("hub", f"{constants.ENDPOINT}, {time.monotonic() - began:.1f} s")


def clock(folder: Path) -> Iterator[Finding]:
    """Finds whether the clock is synchronised, and whether the file system has the same time."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    said = software.output("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    known = {"yes": ", synchronised", "no": ", not synchronised"}.get(said, "")
    yield Finding("clock", now + known, NOTE if said == "no" else OK)
    with tempfile.NamedTemporaryFile(dir=existing(folder)) as file:
        os.utime(file.name)  # by the clock of the server, where there is one
        skew = os.stat(file.name).st_mtime - time.time()
    off = abs(skew) > MAX_CLOCK_SKEW
    yield Finding("file system's time", f"{skew:+.1f} s from the clock", NOTE if off else OK)


def terminal() -> Iterator[Finding]:
    """Finds the encoding of the output, the locale and the size of the terminal."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    size = shutil.get_terminal_size()
    kind = f"{size.columns}x{size.lines}" if sys.stdout.isatty() else "no terminal"
    said = f"{kind}, TERM={os.environ.get('TERM', '')}, {sys.stdout.encoding}"
    said += f", locale {'.'.join(filter(None, locale.getlocale())) or 'C'}"
    strange = encoding != "utf8"
    advice = "export PYTHONUTF8=1" if strange else ""
    yield Finding("terminal", said, NOTE if strange else OK, advice)


def variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Finds the variables that matter to a run; of a secret, only that it is set."""
    for name, value in sorted(environment.items()):
        if VARIABLES.fullmatch(name):
            shown = re.sub(r"//[^/@\s]+@", "//(not shown)@", value)
            yield Finding(name, "(set, not shown)" if SECRET.search(name) else shown)
