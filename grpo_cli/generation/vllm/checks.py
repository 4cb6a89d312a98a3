"""Checks the settings of vLLM before anything starts. vLLM need not be installed."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.config.recipe import Recipe
from grpo_cli.files import open_file
from grpo_cli.generation.settings import Vllm

START_SECONDS = 1200.0  # for a server to be ready: a large model takes long to load

# Engine arguments that no engine accepts, with the reason or the setting to use instead.
REFUSED_ANYWHERE = {
    "quantization": "weights are sent as they are trained, which a quantized engine cannot take",
    "quantization_config": "weights are sent as they are trained, which a quantized engine cannot "
    "take",
    "logprobs_mode": "a token's log-probability must be that of the distribution it was drawn from",
    "speculative_config": "of drafted tokens vLLM does not report the log-probability they were "
    "drawn with",
    "enable_lora": "write adapter.sync=adapter, so that vLLM applies the policy's adapter",
    "max_lora_rank": "it follows from the adapter's rank, with adapter.sync=adapter",
    "max_loras": "the policy has one adapter",
    "max_cpu_loras": "the policy has one adapter",
    "generation_config": "how completions are sampled is the trainer's to say",
    "tokenizer": "it is the model's",
    "skip_tokenizer_init": "stop strings and grammars need the tokenizer",
    "worker_extension_cls": "grpo puts its own there",
}
# The same for an engine in the trainer's processes.
REFUSED = {
    **REFUSED_ANYWHERE,
    "load_format": "the engine begins with the model's own weights",
    "weight_transfer_config": "the weights are loaded in place",
    "distributed_executor_backend": "it follows from the number of processes",
    "data_parallel_size": "each training process has an engine of its own already",
    "pipeline_parallel_size": "use generation.vllm.tensor_parallel",
    "seed": "write seed",
    "model": "write model.path",
    "revision": "write model.revision",
    "trust_remote_code": "write model.trust_remote_code",
    "dtype": "write generation.vllm.dtype",
    "tensor_parallel_size": "write generation.vllm.tensor_parallel",
    "gpu_memory_utilization": "write generation.vllm.memory",
    "enable_sleep_mode": "write generation.vllm.sleep",
    "max_num_seqs": "write generation.max_num_seqs",
}


def contradictions_of_colocate(recipe: Recipe) -> Iterator[str]:
    """Yields a message for each setting that an engine in the trainer's processes refuses."""
    vllm = recipe.generation.vllm
    yield from _contradictions_of_both(recipe)
    for name in vllm.engine_args.keys() & REFUSED.keys():
        yield f"generation.vllm.engine_args.{name}: cannot be set: {REFUSED[name]}."
    if type(most := vllm.engine_args.get("max_model_len", 2)) is not int or most < 2:
        key = "generation.vllm.engine_args.max_model_len"
        yield f"{key} = {most}: must be a whole number of tokens, 2 or more."
    if vllm.sleep and recipe.device == "cpu":
        yield f"generation.vllm.sleep = {vllm.sleep}: vLLM sleeps on GPUs only; device is cpu."
    if recipe.runs_programs and vllm.tensor_parallel > 1:
        yield (
            f"eval.mode = {', '.join(recipe.eval.mode)}: programs are not run with "
            f"generation.vllm.tensor_parallel = {vllm.tensor_parallel}; set it to 1, or "
            "use generation=vllm_server."
        )
    if recipe.has_episodes and vllm.tensor_parallel > 1:
        yield (
            f"generation.vllm.tensor_parallel = {vllm.tensor_parallel}: the processes of one "
            "engine cannot take turns with tools, environments or rollout functions; set it to 1, "
            "or use generation=vllm_server."
        )
    if vllm.sleep == 2 and recipe.adapter.sync == "adapter":
        yield (
            "adapter.sync = adapter: generation.vllm.sleep = 2 frees the base model's weights, "
            "which are not sent again; set it to 1, or use adapter.sync=merge."
        )


def _contradictions_of_both(recipe: Recipe) -> Iterator[str]:
    vllm = recipe.generation.vllm
    if vllm.regex is not None and vllm.json_schema is not None:
        yield "generation.vllm.regex: json_schema is set too; a completion follows one of the two."
    try:
        structured_outputs(vllm)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: expanding ~nobody
        yield f"generation.vllm.json_schema = {vllm.json_schema}: {error}."


def contradictions_of_servers(recipe: Recipe) -> Iterator[str]:
    """Yields a message for each setting that sampling from servers refuses."""
    generation, vllm = recipe.generation, recipe.generation.vllm
    yield from _contradictions_of_both(recipe)
    if not vllm.servers:
        yield (
            "generation.vllm.servers: is empty; start one with `grpo serve` and name its address, "
            "such as [http://127.0.0.1:8000]."
        )
    for url in vllm.servers:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield (
                f"generation.vllm.servers: {url!r} is not an address of a server, such as "
                "http://127.0.0.1:8000."
            )
        elif importlib.util.find_spec("vllm") is None and is_unused_here(url):
            yield (
                f"generation.vllm.servers: nothing listens at {url}, and vLLM is not installed "
                "here: pip install 'vllm>=0.32', then grpo serve recipe=NAME; or name a server."
            )
    if len({url.rstrip("/") for url in vllm.servers}) < len(vllm.servers):
        yield "generation.vllm.servers: names a server twice."
    if not vllm.prefetch_steps:
        return
    if generation.dynamic_sampling:
        yield (
            "generation.vllm.prefetch_steps: completions cannot be begun ahead with "
            "generation.dynamic_sampling, which sees a step's rewards before it knows how many "
            "prompts the step needs; set one of the two."
        )
    for name in generation.changed_by:
        yield (
            f"generation.{name}: with generation.vllm.prefetch_steps the sampler's "
            "log-probabilities are the old policy's, and so must be of its whole distribution; "
            "set one of the two."
        )


def is_unused_here(url: str) -> bool:
    """Returns whether an address is this machine's and nothing listens there."""
    found = re.fullmatch(r"https?://(127\.0\.0\.1|localhost):(\d{1,4}|[1-5]\d{4})/?", url)
    with socket.socket() as tried:
        return found is not None and tried.connect_ex((found[1], int(found[2]))) != 0


def structured_outputs(vllm: Vllm) -> dict[str, Any] | None:
    """Returns vLLM's `structured_outputs` for a regex or JSON schema; None without a constraint.

    Raises:
        OSError, ValueError: the schema's file does not exist, or is not JSON.
    """
    if vllm.regex is not None:
        return {"regex": vllm.regex}
    if vllm.json_schema is None:
        return None
    if vllm.json_schema.lstrip().startswith("{"):
        return {"json": json.loads(vllm.json_schema)}
    with open_file(Path(vllm.json_schema).expanduser()) as file:
        return {"json": json.load(file)}


def of_head(head_dtype: str, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine argument that sets the dtype of vLLM's output head."""
    given = engine_args.get("hf_overrides") or {}
    if head_dtype == "auto" or not isinstance(given, Mapping):
        return {}
    return {"hf_overrides": {"head_dtype": head_dtype, **given}}


def dtype_of(recipe: Recipe) -> str:
    """Returns the engine's compute dtype."""
    given = recipe.generation.vllm.dtype
    return recipe.arithmetic_dtype if given == "auto" else given
