"""`grpo serve`: vLLM's own OpenAI server, set up so that training can sample from it."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import shlex
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from grpo_cli.checkpoints import lookup
from grpo_cli.config import parsing, sources
from grpo_cli.config.command_line import split_options
from grpo_cli.config.compose import compose_and_call, given_keys
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.words import RECIPE_KEYS, check_recipe_words, described, parse, split, unknown
from grpo_cli.errors import Stopped, TrainingError, UserError, counted
from grpo_cli.generation.vllm import lora, server_key
from grpo_cli.generation.vllm.checks import REFUSED_ANYWHERE
from grpo_cli.generation.vllm.launch import (
    POLL_SECONDS,
    ServerPlan,
    ServerSettings,
    check_port,
    prepare_log,
    running,
    say,
    signals_noted,
    wait_until_ready,
)
from grpo_cli.generation.vllm.server_log import failure

# Arguments of vLLM that are refused: why, or what to write instead.
REFUSED = {
    **REFUSED_ANYWHERE,
    "enable_scale_out": "it is always set: the trainer sends and takes token ids",
    "api_key": "every route asks for grpo's own key; set GRPO_SERVER_KEY",
    "middleware": "grpo puts the check of the key there",
    "uds": "the trainer speaks HTTP with a port",
    "root_path": "the trainer asks at the root",
    "pipeline_parallel_size": "weights are sent to engines without it; write tensor_parallel=N",
    "weight_transfer_config": "write transfer=NAME",
    **{word: f"write {word}=VALUE" for word in ("model", "host", "port", "dtype", "max_model_len")},
    "tensor_parallel_size": "write tensor_parallel=N",
    "data_parallel_size": "write data_parallel=N",
    "gpu_memory_utilization": "write memory=SHARE",
    "enforce_eager": "write eager=true",
    "enable_lora": "write max_lora_rank=N",
    "max_lora_rank": "write max_lora_rank=N",
}
REFUSED_PREFIXES = {"spec_": REFUSED["speculative_config"], "ssl_": "the trainer speaks plain HTTP"}


USAGE = """\
grpo serve model=PATH [word=value ...]      serve a folder or hub name
grpo serve recipe=NAME [key=value ...]      serve the model of a recipe

Starts vLLM's server, so that `grpo train ... generation=vllm_server` can sample
from it. Once the server is ready, the command line that trains with it is
printed. Ctrl-C ends the server.

"""


MAIN = (
    "model", "host", "port", "tensor_parallel", "data_parallel", "memory", "max_model_len",
    "engine_args",
)  # fmt: skip
ALL = USAGE + described(ServerSettings)
HELP = f"{USAGE}{described(ServerSettings, names=MAIN)}\n`grpo help serve` lists all words.\n"


def main(argv: list[str]) -> None:
    """`grpo serve`: starts vLLM's server with a model, or with that of a recipe."""
    options, words = split_options(argv, "grpo serve: serves one model")
    settings, rest = split_words(words)
    if options and not rest:
        raise UserError(f"{options[0]}: is an option of recipes; add recipe=NAME.")

    def task(cfg: DictConfig | None) -> None:
        recipe = None if cfg is None else parsing.parse(cfg, given_keys(cfg))
        ended_by = serve(settings, recipe, rest)
        raise Stopped(ended_by, f"the server on port {settings.port} is stopped")

    if rest:
        compose_and_call([*rest, *options], task)
    else:
        task(None)


def split_words(argv: Sequence[str]) -> tuple[ServerSettings, list[str]]:
    """Returns (the settings of the server, the words that compose the recipe, if there is one).

    Raises:
        UserError: a word that does not exist or is given twice, a value of another type or out of
            its range, an engine argument that grpo sets itself, no model.
    """
    has_recipe = any(word.startswith("recipe=") for word in argv)
    own, rest = split(ServerSettings, argv, skip=("model",) if has_recipe else ())
    if has_recipe:
        check_recipe_words(ServerSettings, rest)
    elif rest:
        raise UserError(
            unknown(ServerSettings, rest[0], RECIPE_KEYS, "; with recipe=NAME, its keys")
        )
    settings = parse_words(own)
    if not has_recipe and settings.model is None:
        raise UserError("grpo serve: say what to serve: model=FOLDER_OR_HUB_NAME or recipe=NAME.")
    return settings, rest


def parse_words(words: Iterable[str]) -> ServerSettings:
    """Returns checked settings."""
    settings = parse(ServerSettings, words)
    arguments = {name.replace("-", "_"): v for name, v in settings.engine_args.items()}
    if len(arguments) < len(settings.engine_args):
        raise UserError("engine_args: one of them is given twice, with - and with _.")
    for name in arguments:
        reasons = [why for prefix, why in REFUSED_PREFIXES.items() if name.startswith(prefix)]
        if why := REFUSED.get(name) or next(iter(reasons), None):
            raise UserError(f"engine_args.{name}: cannot be set: {why}.")
        if short := [full for full in REFUSED if full.startswith(name)]:  # vLLM expands it
            raise UserError(f"engine_args.{name}: is short for {short[0]}, which cannot be set.")
    return dataclasses.replace(settings, engine_args=arguments)


def make_plan(settings: ServerSettings, recipe: Recipe | None, gpus: int) -> ServerPlan:
    """Returns the plan for starting the server; its path is "" if the recipe builds its model.

    Raises:
        UserError: there is no such model or it is quantized, or the settings need GPUs.
    """
    from grpo_cli.training import prepare

    transfer = settings.transfer
    if recipe is None:
        assert settings.model is not None, "checked with the other words"
        plan = ServerPlan(
            settings, _find_model(settings.model), "", settings.max_model_len, "", gpus,
            max_lora_rank=settings.max_lora_rank,
        )  # fmt: skip
        dtype = "auto" if gpus else "float32"
    else:
        recipe = prepare.resolved(recipe)
        prepare.check_model_path(recipe)
        longest = recipe.dataset.max_prompt_tokens + recipe.longest_completion
        plan = ServerPlan(
            settings, _absolute(recipe.model.path or ""), "", settings.max_model_len or longest, "",
            gpus, recipe.model.revision, recipe.model.trust_remote_code,
            head_dtype=recipe.model.head_dtype,
        )  # fmt: skip
        dtype, rank = recipe.arithmetic_dtype, settings.max_lora_rank
        if rank is None and recipe.adapter.sync == "adapter":
            config = prepare.check_adapter(recipe)
            rank = None if config is None else lora.largest_rank(config)
        plan = dataclasses.replace(plan, max_lora_rank=rank)
        if transfer == "auto":
            transfer = recipe.generation.vllm.transfer
    if transfer == "auto":
        on_cpu = not gpus or (recipe is not None and recipe.device == "cpu")
        transfer = "gloo" if on_cpu else "nccl"
    if transfer in ("nccl", "ipc") and not gpus:
        raise UserError(f"transfer = {transfer}: needs a GPU; use gloo or disk.")
    wanted = settings.tensor_parallel * settings.data_parallel
    if gpus and wanted > gpus:
        shown = f"this machine shows {counted(gpus, 'GPU')} (CUDA_VISIBLE_DEVICES)"
        raise UserError(f"tensor_parallel x data_parallel = {wanted}: {shown}.")
    return dataclasses.replace(plan, dtype=settings.dtype or dtype, transfer=transfer)


def _find_model(given: str) -> str:
    """Returns the folder or hub name that model=... means.

    Raises:
        UserError: a folder without a model, or with an adapter.
    """
    lookup.check_model_folder("model", given)
    if sources.is_adapter(Path(given).expanduser()):
        raise UserError(
            f"model = {given}: is an adapter; serve its base model, or what `grpo export --merge` "
            "makes of it."
        )
    return _absolute(given)


def _absolute(path: str) -> str:
    folder = Path(path).expanduser()
    return str(folder.resolve()) if path and folder.is_dir() else path


def build_model(recipe: Recipe) -> Path:
    """Builds the model of the recipe, in the cache where training also finds it."""
    from rich.console import Console

    from grpo_cli.environments.factory import open_sessions
    from grpo_cli.training import inputs, prepare

    train, _ = prepare.train_rows_of(recipe)
    sessions = open_sessions(recipe, prepare.parts_of(train, {}))
    try:
        return inputs.build_model(recipe, train, sessions, Console())
    finally:
        if sessions is not None:
            sessions.close()


def count_gpus() -> int:
    """Returns the number of GPUs that the server would see."""
    import torch

    return torch.cuda.device_count()


def serve(settings: ServerSettings, recipe: Recipe | None, words: Sequence[str]) -> int:
    """Starts the server, prints when it is ready, and waits until a signal ends it.

    Args:
        words: the words that compose the recipe, for the command line that trains.

    Returns:
        the number of the signal.

    Raises:
        UserError: the settings cannot be served. TrainingError: the server did not start, or ended
            by itself.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError("grpo serve: vLLM is not installed; pip install 'vllm>=0.32'.")
    check_port(settings.host, settings.port)
    plan = make_plan(settings, recipe, count_gpus())
    plan = dataclasses.replace(plan, key=server_key.make_key())
    log = prepare_log(settings)
    if not plan.path:
        assert recipe is not None
        plan = dataclasses.replace(plan, path=str(build_model(recipe)))
    begin = time.monotonic()
    with signals_noted() as noted, running(plan, log, noted) as server:
        say(f"starting vLLM with {plan.path} on port {settings.port}; its log: {log}")
        say(f"trainers need the key of {server_key.source()}")
        if (warning := exposure(settings.host)) is not None:
            say(warning)
        wait_until_ready(server, plan, log, noted)
        if not noted:
            trains = training_words(plan, recipe, words)
            say(f"ready after {time.monotonic() - begin:.0f} s: {trains}")
        while not noted:
            if server.poll() is not None:
                raise TrainingError(failure("the server ended", log))
            time.sleep(POLL_SECONDS)
    return noted[0]


def exposure(host: str) -> str | None:
    """Returns a warning about exposing the server; None for an address of this machine only."""
    with suppress(ValueError):  # a name
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return None
    return (
        f"warning: host = {host}: others on this machine and its network reach the server. Whoever "
        "has the key can change the weights and run code as you, and prompts, weights and the key "
        "itself travel unencrypted: listen in private networks only (docs/security.md)"
    )


def training_words(plan: ServerPlan, recipe: Recipe | None, words: Sequence[str]) -> str:
    """Returns the command line that trains with this server."""
    host = plan.settings.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    url = f"http://{f'[{host}]' if ':' in host else host}:{plan.settings.port}"
    own = ("generation", "generation.engine", "generation.vllm.servers", "generation.vllm.transfer")
    kept = [w for w in words if w.partition("=")[0].lstrip("+") not in own]
    needed = ["generation=vllm_server", f"generation.vllm.servers=[{url}]"]
    on_cpu = not plan.gpus or (recipe is not None and recipe.device == "cpu")
    if plan.transfer != ("gloo" if on_cpu else "nccl"):  # the trainer's default
        needed.append(f"generation.vllm.transfer={plan.transfer}")
    beginning = ["grpo", "train", *kept] if recipe is not None else ["grpo", "train", "..."]
    return " ".join(w if w == "..." else shlex.quote(w) for w in [*beginning, *needed])
