"""The checks of `grpo doctor` of recipes: what is missing here to train them.

Nothing is downloaded, and no model is loaded. Imports torch where a recipe's own checks do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_cli import sandbox
from grpo_cli.checkpoints import lookup, paths
from grpo_cli.commands.doctor.findings import BROKEN, NOTE, Finding
from grpo_cli.commands.preflight import GB
from grpo_cli.config import parsing, sources
from grpo_cli.config.compose import compose_and_call, error_message, given_keys
from grpo_cli.config.schema import Recipe
from grpo_cli.errors import UserError


def composed(words: Sequence[str]) -> Recipe | Finding:
    """Returns the checked recipe of a command line, or what is wrong with it."""
    found: list[Recipe] = []

    def task(cfg: DictConfig) -> None:
        found.append(parsing.parse(cfg, given_keys(cfg)))

    try:
        compose_and_call([*words], task)
    except UserError as error:
        return Finding("recipe", str(error), BROKEN)
    except (HydraException, OmegaConfBaseException) as error:
        return Finding("recipe", error_message(error), BROKEN)
    return found[0]


def needs(recipe: Recipe, gpus: Sequence[str]) -> Iterator[Finding]:
    """Yields what is missing here, or may be, to train a recipe.

    Args:
        gpus: names of those that torch sees.
    """
    yield from _refusals(recipe)
    if recipe.device == "cuda" and not gpus:
        yield Finding("device", "cuda, and torch sees no GPU", BROKEN, "device=auto takes the CPU")
    elif recipe.mixed_precision != "no" and not gpus and recipe.device in ("auto", "cpu"):
        said = "no GPU: trains on the CPU, which is for tiny models"
        advice = f"grpo plan recipe={recipe.recipe} gpu=NAME tells what fits"
        yield Finding("device", said, NOTE, advice, "no GPU")
    lacking = [*_model(recipe), *_data(recipe)]
    yield from lacking
    if not any(finding.name == "model.path" for finding in lacking):
        yield from _memory(recipe, gpus)
    yield from _sandbox(recipe)
    if command := recipe.environment.mcp:
        program = command.split()[0]
        if not command.startswith("http") and shutil.which(program) is None:
            yield Finding("environment.mcp", f"{program} is not on PATH", BROKEN)
    yield from _pushes(recipe)


def _refusals(recipe: Recipe) -> Iterator[Finding]:
    """Yields what the checks at the start of a run would refuse, of packages and names."""
    from grpo_cli.generation import factory
    from grpo_cli.models import adapters, optimizers, quantization
    from grpo_cli.reporting import tracking
    from grpo_cli.scoring import registry
    from grpo_cli.training import callback_loading

    model = recipe.model
    checks: dict[str, Callable[[], object]] = {
        "generation": lambda: factory.engine_class(recipe.generation.engine).require(),
        "optimizer": lambda: optimizers.optimizer_class(recipe.optimizer),
        "tracking": lambda: tracking.require(recipe.tracking.backend),
        "callbacks": lambda: callback_loading.load(recipe.callbacks),
    }
    for name, reward in recipe.reward.items():
        key = f"reward.{name}"
        checks[key] = lambda f=reward.function, key=key: registry.resolve(f, key)  # type: ignore[misc]
    if recipe.adapter.method != "none":
        checks["adapter"] = adapters.require
    if model.quantization != "none":
        checks["model.quantization"] = quantization.require
    if model.path is not None:
        path = model.path
        checks["model.path"] = lambda: lookup.check_model_folder("model.path", path)
    for name, check in checks.items():
        try:
            check()
        except UserError as error:
            yield Finding(name, str(error), BROKEN)


def _model(recipe: Recipe) -> Iterator[Finding]:
    path = recipe.model.path
    if path is None or recipe.model.build is not None or paths.looks_local(path):
        return
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json", revision=recipe.model.revision)
    folder = Path(found).parent if isinstance(found, str) else None
    if folder is None or not any(folder.glob("*.safetensors")):
        yield _not_cached("model.path", path, f"hf download {path}")


def _memory(recipe: Recipe, gpus: Sequence[str]) -> Iterator[Finding]:
    """Yields a line if the recipe is predicted not to fit into this machine's GPUs."""
    from grpo_cli.planning import devices
    from grpo_cli.training.plan import run_plan

    listed = [name for name, (card, *_) in devices.GPUS.items() if card in gpus[:1]]
    if not listed or recipe.device == "cpu":
        return
    try:
        plan = run_plan.plan_of(recipe, run_plan.Request(gpu=listed[0], gpus=len(gpus))).plan
    except UserError:  # a model whose shape is not described
        return
    if not plan.fits:
        peak, most = plan.memory.peak / GB, plan.device.memory / GB
        said = f"predicted to take {peak:.0f} of {most:.0f} GB of a GPU"
        advice = f"grpo plan recipe={recipe.recipe} gpu={listed[0]} gpus={len(gpus)}"
        short = f"needs {peak:.0f} GB of a GPU"
        yield Finding("memory", said, NOTE, f"{advice} tells what to change", short)


def _data(recipe: Recipe) -> Iterator[Finding]:
    dataset = recipe.dataset
    named = {"dataset.train": dataset.train, "dataset.eval": dataset.eval}
    named |= {f"dataset.mixture.{name}.data": p.data for name, p in dataset.mixture.items()}
    named |= {f"dataset.held_out.{name}.data": p.data for name, p in dataset.held_out.items()}
    named |= {f"benchmark.{name}.data": b.data for name, b in recipe.benchmark.items()}
    missing: set[str] = set()
    for key, source in named.items():
        if not source or source in missing:
            continue
        path = sources.local_path(source)
        if path is None:
            if not _dataset_is_cached(source):
                yield _not_cached(key, source, f"hf download --repo-type dataset {source}")
                missing.add(source)
        elif not path.exists() and not sources.is_pattern(path):
            yield Finding(key, f"{source}: there is no such file or folder", BROKEN)
            missing.add(source)


def _dataset_is_cached(name: str) -> bool:
    """Whether the hub's cache, or that of `datasets`, holds something of a data set."""
    from datasets import config
    from huggingface_hub import constants

    downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    prepared = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___").lower()
    return downloaded.is_dir() or prepared.is_dir()


def _not_cached(key: str, name: str, advice: str) -> Finding:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        said = f"{name} is not in the cache, and HF_HUB_OFFLINE is set"
        return Finding(key, said, BROKEN, advice, f"{name} not in the cache")
    said = f"{name} is not in the cache: downloaded when a run starts"
    return Finding(key, said, NOTE, advice, f"{name} to be downloaded")


def _sandbox(recipe: Recipe) -> Iterator[Finding]:
    guards = {
        f"reward.{name}": str(reward.args.get("guards", "auto"))
        for name, reward in recipe.reward.items()
        if reward.function == "code"
    }
    if recipe.runs_programs:
        guards["eval.mode"] = recipe.generation.tools.guards
    for key, wanted in guards.items():
        try:
            sandbox.find_level(wanted)
        except sandbox.SandboxError as error:
            yield Finding(key, f"programs cannot be run: {error}", BROKEN)


def _pushes(recipe: Recipe) -> Iterator[Finding]:
    from huggingface_hub import get_token

    pushes = recipe.hub.repo is not None or recipe.hub.completions_repo is not None
    if pushes and not (os.environ.get("HF_TOKEN") or get_token()):
        yield Finding("hub", "there is no token to push with", BROKEN, "hf auth login, or HF_TOKEN")
