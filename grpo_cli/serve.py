"""`grpo serve`: vLLM's own OpenAI server, set up so that training can sample from it.

The processes, and who ends whom:

    grpo serve          checks, starts, reports; ends the rest when it is told to stop
    └ keep()            its child, leads a session of its own; ends the session when grpo is gone
      └ vLLM's server   and below it vLLM's engine and workers
"""

from __future__ import annotations

import dataclasses
import errno
import http.client
import importlib.util
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from grpo_cli.config import Recipe, allowed, knob
from grpo_cli.errors import TrainingError, UserError, listed, nearest
from grpo_cli.serve_log import KILLED, failure, log_path, phase_in, text_of
from grpo_cli.vllm_settings import REFUSED_ANYWHERE

MODULE = "vllm.entrypoints.openai.api_server"
EXTENSION = "grpo_cli.vllm_worker.WorkerExtension"
ROOT = Path(__file__).parent.parent  # where the server finds grpo_cli
GIB = 2**30

LOOK_EVERY = 0.2  # seconds between two looks at the server
SPEAK_EVERY = 5.0  # seconds between two lines while it starts
PATIENCE = 10.0  # seconds to end politely


@dataclass
class Settings:
    """The words of `grpo serve` itself; everything else on its command line is of the recipe."""

    model: str | None = knob(
        None, "Folder or hub name of the model; recipe=NAME instead takes that of a recipe."
    )
    host: str = knob("127.0.0.1", "Address to listen at; 0.0.0.0: all of this machine's.")
    port: int = knob(8000, "Port to listen at.", ge=1, le=65535)
    tensor_parallel: int = knob(1, "GPUs that share one copy of the model.", ge=1)
    data_parallel: int = knob(1, "Copies of the model.", ge=1)
    dtype: str | None = knob(
        None,
        "Type of weights and arithmetic; null: the recipe's; without one the model's own on a GPU, "
        "float32 on a CPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = knob(
        None,
        "Longest prompt with its completion, in tokens; null: the longest training prompt and "
        "completion of the recipe, without one the model's own.",
        ge=2,
    )
    memory: float = knob(0.9, "Share of each GPU's memory to use; GPUs only.", gt=0, le=1)
    kv_cache_gb: float | None = knob(
        None, "GiB for keys and values; null: what `memory` leaves on a GPU, 1 on a CPU.", gt=0
    )
    eager: bool | None = knob(None, "No compilation and no CUDA graphs; null: true on a CPU.")
    transfer: str = knob(
        "auto",
        "How the trainer sends weights; auto: nccl with CUDA, gloo without or where the recipe's "
        "device is cpu.",
        choices=("auto", "nccl", "ipc", "gloo", "disk"),
    )
    start_timeout: float = knob(900.0, "Seconds to be ready in.", gt=0)
    log: str | None = knob(None, "File for what the server says; null: in grpo's cache folder.")
    engine_args: dict[str, Any] = knob(
        {}, "Any other argument of vLLM's server, such as engine_args.max_num_seqs=512."
    )


WORDS = {f.name: f for f in dataclasses.fields(Settings)}
OF_RECIPES = {f.name for f in dataclasses.fields(Recipe)}

# Arguments of vLLM's that are not to be passed on: why, or what to write instead.
REFUSED = {
    **REFUSED_ANYWHERE,
    "enable_scale_out": "it is always set: the trainer sends and takes token ids",
    "api_key": "the trainer sends none; listen at 127.0.0.1 or in a private network",
    "uds": "the trainer speaks HTTP with a port",
    "root_path": "the trainer asks at the root",
    "pipeline_parallel_size": "weights are sent to engines without it; write tensor_parallel=N",
    "weight_transfer_config": "write transfer=NAME",
    "model": "write model=NAME",
    "host": "write host=ADDRESS",
    "port": "write port=N",
    "dtype": "write dtype=NAME",
    "max_model_len": "write max_model_len=N",
    "tensor_parallel_size": "write tensor_parallel=N",
    "data_parallel_size": "write data_parallel=N",
    "gpu_memory_utilization": "write memory=SHARE",
    "kv_cache_memory_bytes": "write kv_cache_gb=N",
    "enforce_eager": "write eager=true",
}
REFUSED_PREFIXES = {"spec_": REFUSED["speculative_config"], "ssl_": "the trainer speaks plain HTTP"}


def usage() -> str:
    """What `grpo serve --help` prints."""
    lines = [
        "grpo serve model=PATH [word=value ...]                    serve a folder or hub name",
        "grpo serve recipe=NAME [key=value ...] [word=value ...]   serve the model of a recipe",
        "",
        "Starts vLLM's server, so that `grpo train ... generation=vllm_server` can sample from it;",
        "it prints the exact words once it is ready. Ctrl-C ends it.",
        "",
    ]
    for name, f in WORDS.items():
        default = f.default if f.default is not dataclasses.MISSING else {}
        head = f"  {name}={'null' if default is None else default}"
        doc = f.metadata["doc"] + (f" ({', '.join(c)})" if (c := f.metadata["choices"]) else "")
        lines += textwrap.wrap(
            f"{head:24} {doc}", 98, subsequent_indent=" " * 25, break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def split_words(argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """(what is asked of this command, the words that compose the recipe: none without recipe=).

    Raises:
        UserError: a word that does not exist or is given twice, a value of another type or out of
            its range, an engine argument that grpo needs otherwise, no model.
    """
    has_recipe = any(word.startswith("recipe=") for word in argv)
    own: list[str] = []
    rest: list[str] = []
    seen: set[str] = set()
    for word in argv:
        key, equals, value = word.partition("=")
        first = re.split(r"[.@]", key.lstrip("+~"), maxsplit=1)[0]
        if has_recipe and first in OF_RECIPES and (key != "log"):
            rest.append(word)
            continue
        if key not in WORDS and not key.startswith("engine_args."):
            raise UserError(_unknown(word, key, first, has_recipe))
        if not (equals and value):
            raise UserError(f"{key}: lacks a value; write {key}=VALUE.")
        if key in seen:
            raise UserError(f"{key}: is given twice.")
        seen.add(key)
        own.append(word)
    settings = parse(own)
    if not has_recipe and settings.model is None:
        raise UserError("grpo serve: say what to serve: model=FOLDER_OR_HUB_NAME or recipe=NAME.")
    return settings, rest


def _unknown(word: str, key: str, first: str, has_recipe: bool) -> str:
    if key == word and not word.startswith(("+", "~")):
        return f"{word}: is no word=value; to serve that, write model={word}."
    if first in OF_RECIPES:
        hint = ", or write model=FOLDER_OR_HUB_NAME" if first == "model" else ""
        return f"{key}: is a key of recipes; add recipe=NAME{hint}."
    known = {*WORDS, *(OF_RECIPES if has_recipe else ("recipe",))}
    beside = " and the keys of the recipe" if has_recipe else ", recipe"
    return f"{key}: there is no such word; there are {listed(WORDS)}{beside}.{nearest(key, known)}"


def parse(words: Sequence[str]) -> Settings:
    """`word=value`s, values in YAML, as checked settings.

    Raises:
        UserError: as `split_words`.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from grpo_cli import parsing

    settings = Settings()
    for word in words:  # one by one, so that an error has its word
        key = word.partition("=")[0]
        if key in ("model", "host", "log"):  # of text; `log=1.0` and `log=a: b` are names of files
            value = word.removeprefix(f"{key}=")
            setattr(settings, key, None if value == "null" and key != "host" else value)
            continue
        try:
            typed = OmegaConf.merge(OmegaConf.structured(settings), OmegaConf.from_dotlist([word]))
            settings = cast(Settings, OmegaConf.to_object(typed))
        except OmegaConfBaseException as error:
            raise UserError(parsing.explain(error) or str(error)) from error
        except (yaml.YAMLError, AttributeError, TypeError) as error:
            raise UserError(f"{word}: the value is not YAML.") from error
    for name, f in WORDS.items():
        _check_range(name, getattr(settings, name), f)
    arguments = {name.replace("-", "_"): v for name, v in settings.engine_args.items()}
    if len(arguments) < len(settings.engine_args):
        raise UserError("engine_args: one of them is given twice, with - and with _.")
    for name in arguments:
        reasons = [why for prefix, why in REFUSED_PREFIXES.items() if name.startswith(prefix)]
        if why := REFUSED.get(name) or next(iter(reasons), None):
            raise UserError(f"engine_args.{name}: cannot be set: {why}.")
        if short := [full for full in REFUSED if full.startswith(name)]:  # vLLM takes it for that
            raise UserError(f"engine_args.{name}: is short for {short[0]}, which cannot be set.")
    return dataclasses.replace(settings, engine_args=arguments)


def _check_range(name: str, value: Any, f: dataclasses.Field[Any]) -> None:
    meta = f.metadata
    if value is None:
        return
    if meta["choices"]:
        if value not in meta["choices"]:
            hint = nearest(str(value), meta["choices"])
            raise UserError(f"{name} = {value}: must be {allowed(f)}.{hint}")
        return
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low = meta["ge"] is None or value >= meta["ge"]
        above = meta["gt"] is None or value > meta["gt"]
        high = meta["le"] is None or value <= meta["le"]
        if not (low and above and high and value < float("inf")):
            raise UserError(f"{name} = {value}: must be {allowed(f)}.")


@dataclass(frozen=True)
class Plan:
    """What the server is started with, once everything is known."""

    settings: Settings
    path: str  # of the model: a folder or a hub name
    dtype: str
    max_model_len: int | None  # None: the model's own
    transfer: str
    gpus: int
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def backend(self) -> str:
        """Which of vLLM's weight transfers; for `disk`, which needs none, that of the platform."""
        if self.transfer == "disk":
            return "nccl" if self.gpus else "gloo"
        return self.transfer

    def command(self) -> list[str]:
        """The server's command line."""
        s, on_cpu = self.settings, not self.gpus
        # -P: a random.py in the working folder is not Python's own.
        words = [sys.executable, "-P", "-m", MODULE, "--model", self.path]
        words += ["--host", s.host, "--port", str(s.port), "--dtype", self.dtype]
        words += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
        words += ["--enable-scale-out", "--worker-extension-cls", EXTENSION]
        words += ["--weight-transfer-config", json.dumps({"backend": self.backend})]
        words += ["--disable-uvicorn-access-log"]  # the log is for what goes wrong
        if self.max_model_len is not None:
            words += ["--max-model-len", str(self.max_model_len)]
        if s.tensor_parallel > 1:
            words += ["--tensor-parallel-size", str(s.tensor_parallel)]
        if s.data_parallel > 1:
            words += ["--data-parallel-size", str(s.data_parallel)]
        if not on_cpu:
            words += ["--gpu-memory-utilization", str(s.memory)]
        gib = 1.0 if s.kv_cache_gb is None and on_cpu else s.kv_cache_gb
        if gib is not None:
            words += ["--kv-cache-memory-bytes", str(int(gib * GIB))]
        if on_cpu if s.eager is None else s.eager:
            words += ["--enforce-eager"]
        if self.revision is not None:
            words += ["--revision", self.revision]
        if self.trust_remote_code:
            words += ["--trust-remote-code"]
        return [*words, *_flags(s.engine_args)]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The server's environment."""
        path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
        out = {**inherited, "PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"}
        if self.transfer == "ipc":
            out["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if not self.gpus:
            # Without them: half a minute of g++ at the first request, a process more.
            out.setdefault("TORCH_COMPILE_DISABLE", "1")
            out.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return out


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}"
            yield json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def make_plan(settings: Settings, recipe: Recipe | None, gpus: int) -> Plan:
    """Settles what the words leave open. The model of a recipe that builds one has the path "".

    Raises:
        UserError: the model is not there or is quantized, or what is asked for needs GPUs.
    """
    from grpo_cli import prepare

    transfer = settings.transfer
    if recipe is None:
        assert settings.model is not None, "checked with the other words"
        plan = Plan(settings, _find_model(settings.model), "", settings.max_model_len, "", gpus)
        dtype = "auto" if gpus else "float32"
    else:
        prepare.check_model_path(recipe)
        plan = Plan(
            settings,
            _absolute(recipe.model.path or ""),
            "",
            settings.max_model_len or recipe.dataset.max_prompt_tokens + recipe.longest_completion,
            "",
            gpus,
            recipe.model.revision,
            recipe.model.trust_remote_code,
        )
        dtype = "bfloat16" if recipe.mixed_precision == "bf16" else recipe.model.dtype
        if transfer == "auto" and recipe.generation.engine == "vllm_server":
            transfer = recipe.generation.vllm.transfer
    if transfer == "auto":
        on_cpu = not gpus or (recipe is not None and recipe.device == "cpu")
        transfer = "gloo" if on_cpu else "nccl"
    if transfer in ("nccl", "ipc") and not gpus:
        raise UserError(f"transfer = {transfer}: needs a GPU; use gloo or disk.")
    if settings.memory != WORDS["memory"].default and not gpus:
        raise UserError(f"memory = {settings.memory}: is of GPUs; on a CPU write kv_cache_gb=N.")
    wanted = settings.tensor_parallel * settings.data_parallel
    if gpus and wanted > gpus:
        raise UserError(
            f"tensor_parallel x data_parallel = {wanted}: this machine shows {gpus} "
            f"GPU{'s' if gpus > 1 else ''} (CUDA_VISIBLE_DEVICES)."
        )
    if "quantization_config" in (_config_of(plan.path, plan.revision) if plan.path else {}):
        raise UserError(
            f"model = {plan.path}: is quantized, and weights are sent as they are trained, which a "
            "quantized engine cannot take; serve the model it was made from."
        )
    return dataclasses.replace(plan, dtype=settings.dtype or dtype, transfer=transfer)


def _find_model(given: str) -> str:
    """The folder or hub name that model=... means.

    Raises:
        UserError: a shipped choice that is built, or a folder without a model.
    """
    import yaml

    from grpo_cli import folders
    from grpo_cli.compose import recipe_files

    path = Path(given).expanduser()
    choice = recipe_files()[0].parent / "model" / f"{given}.yaml"
    if choice.is_file() and not path.is_dir():
        named = yaml.safe_load(choice.read_text(encoding="utf-8")).get("path")
        if named is None:
            raise UserError(
                f"model = {given}: is built for a recipe's data; write recipe=NAME, such as "
                f"recipe=arithmetic_tiny, with model={given}."
            )
        return str(named)
    if path.is_dir():
        if not folders.is_model(path):
            raise UserError(
                f"model = {given}: the folder holds no model (config.json, *.safetensors)."
            )
    elif folders.looks_local(given):
        beside = [str(p) for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"model = {given}: there is no such folder.{nearest(given, beside)}")
    return _absolute(given)


def _absolute(path: str) -> str:
    folder = Path(path).expanduser()
    return str(folder.resolve()) if path and folder.is_dir() else path


def _config_of(path: str, revision: str | None) -> dict[str, Any]:
    """A model's config.json; {} where it cannot be had, which vLLM will say better."""
    file = Path(path) / "config.json"
    try:
        if not file.is_file():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path, "config.json", revision=revision))
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the hub's errors are OSErrors too
        return {}
    return found if isinstance(found, dict) else {}


def build_model(recipe: Recipe) -> Path:
    """The model that the recipe builds, from the cache in which training finds it too."""
    from rich.console import Console

    from grpo_cli import build, data

    return build.build_model(recipe, data.load_rows(recipe.dataset, "train"), Console())


def check_port(host: str, port: int) -> None:
    """Raises a UserError if nothing could listen there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port = {port}: is taken; choose another with port=N.") from error
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"host = {host}: is no address of this machine.") from error
        raise UserError(f"port = {port}: cannot be used: {error.strerror}.") from error


def count_gpus() -> int:
    """GPUs that the server would see."""
    import torch

    return torch.cuda.device_count()


def serve(settings: Settings, recipe: Recipe | None, words: Sequence[str]) -> int:
    """Starts the server, says when it is ready, and waits until a signal ends it.

    Args:
        words: those that composed the recipe, for the command line that trains.

    Returns:
        the signal.

    Raises:
        UserError: what is asked for cannot be served. TrainingError: the server did not come up,
            or ended by itself.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError("grpo serve: vLLM is not installed; pip install 'grpo-cli[vllm]'.")
    check_port(settings.host, settings.port)
    plan = make_plan(settings, recipe, count_gpus())
    log = prepare_log(settings)
    if not plan.path:
        assert recipe is not None
        plan = dataclasses.replace(plan, path=str(build_model(recipe)))
    begin = time.monotonic()
    with signals_noted() as noted, running(plan, log, noted) as server:
        say(f"starting vLLM with {plan.path} on port {settings.port}; its log: {log}")
        _wait_until_ready(server, settings, log, noted)
        if not noted:
            trains = training_words(plan, recipe, words)
            say(f"ready after {time.monotonic() - begin:.0f} s: {trains}")
        while not noted:
            if server.poll() is not None:
                raise TrainingError(failure("the server ended", log))
            time.sleep(LOOK_EVERY)
    return noted[0]


def say(text: str) -> None:
    """A line for whoever waits, who may be reading a file."""
    print(text, flush=True)


def prepare_log(settings: Settings) -> Path:
    """Makes room for the log, also where the trainer looks for it.

    Raises:
        UserError: it cannot be written.
    """
    usual = log_path(settings.port)
    log = Path(settings.log).expanduser() if settings.log else usual
    try:
        for path in (usual, log):
            path.parent.mkdir(parents=True, exist_ok=True)
        usual, log = (path.parent.resolve() / path.name for path in (usual, log))
        usual.unlink(missing_ok=True)  # an earlier server's; of a link, what it names stays
        log.write_bytes(b"")
        if log != usual:
            usual.symlink_to(log)
    except OSError as error:
        raise UserError(f"log = {log}: cannot be written: {error.strerror}.") from error
    return log


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Inside, Ctrl-C and SIGTERM are only added to the list."""
    noted: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, frame: noted.append(number)) for n in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def running(plan: Plan, log: Path, noted: list[int]) -> Iterator[subprocess.Popen[bytes]]:
    """The server, and everything that it starts, for as long as the block takes."""
    command, environment = plan.command(), plan.environment(os.environ)
    with log.open("wb") as file:
        file.write(f"{shlex.join(command)}\n".encode())
        file.flush()
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", "from grpo_cli.serve import keep; keep()", *command],
            stdin=subprocess.PIPE,  # of which the other end closes when this process is gone
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,  # Ctrl-C is for grpo, and a kill is for all of it
        )
    try:
        yield server
    finally:
        first = len(noted)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        # A second signal while it ends: at once.
        while server.poll() is None and time.monotonic() < deadline and len(noted) == first:
            time.sleep(LOOK_EVERY)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        assert server.stdin is not None
        server.stdin.close()


def keep() -> None:
    """Runs the command that it is given, and never leaves anything of it behind.

    Leads the session that all of it is in. When the command has ended, or this process's parent
    has, so that standard input is at its end, the whole session is ended, this process with it.
    """
    # Not ignored: what is ignored would be so in the command too.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while server.poll() is None:
        readable, _, _ = select.select([0], [], [], LOOK_EVERY)
        if readable:
            os.killpg(0, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(PATIENCE)
            break
    else:
        if server.returncode < 0:
            name = signal.Signals(-server.returncode).name
            say(f"{KILLED}{name}")
    os.killpg(0, signal.SIGKILL)


def _wait_until_ready(
    server: subprocess.Popen[bytes], settings: Settings, log: Path, noted: list[int]
) -> None:
    begin = spoken = time.monotonic()
    while not noted:
        if server.poll() is not None:
            raise TrainingError(failure("the server ended while it started", log))
        if is_healthy(settings.host, settings.port):
            return
        now = time.monotonic()
        if now - begin > settings.start_timeout:
            phase = phase_in(text_of(log))
            what = f"start_timeout = {settings.start_timeout:g}: the server is not ready ({phase})"
            raise TrainingError(failure(what, log))
        if now - spoken >= SPEAK_EVERY:
            spoken = now
            say(f"  {now - begin:.0f} s: {phase_in(text_of(log))}")
        time.sleep(LOOK_EVERY)


def is_healthy(host: str, port: int) -> bool:
    """Whether the server there answers that it can be used. No proxy is asked."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def training_words(plan: Plan, recipe: Recipe | None, words: Sequence[str]) -> str:
    """The command line that trains with this server."""
    host = plan.settings.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    url = f"http://{f'[{host}]' if ':' in host else host}:{plan.settings.port}"
    own = ("generation", "generation.engine", "generation.vllm.servers", "generation.vllm.transfer")
    kept = [w for w in words if w.partition("=")[0].lstrip("+") not in own]
    needed = ["generation=vllm_server", f"generation.vllm.servers=[{url}]"]
    on_cpu = not plan.gpus or (recipe is not None and recipe.device == "cpu")
    if plan.transfer != ("gloo" if on_cpu else "nccl"):  # what the trainer takes by itself
        needed.append(f"generation.vllm.transfer={plan.transfer}")
        folder = "generation.vllm.transfer_folder="
        if plan.transfer == "disk" and not any(w.startswith(folder) for w in kept):
            needed.append(f"{folder}FOLDER")
    beginning = ["grpo", "train", *kept] if recipe is not None else ["grpo", "train", "..."]
    return " ".join(w if w == "..." else shlex.quote(w) for w in [*beginning, *needed])
