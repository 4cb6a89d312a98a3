"""What a recipe asks of vLLM: contradictions found before anything starts. Needs no vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_cli.config import Recipe, Vllm

# Engine arguments that cannot be passed through, and why or what to write instead: to no engine,
REFUSED_ANYWHERE = {
    "quantization": "weights are sent as they are trained, which a quantized engine cannot take",
    "quantization_config": "weights are sent as they are trained, which a quantized engine cannot "
    "take",
    "logprobs_mode": "a token's log-probability must be that of the distribution it was drawn from",
    "speculative_config": "of drafted tokens vLLM does not report the log-probability they were "
    "drawn with",
    "enable_lora": "the policy has no adapters: all of its weights are sent",
    "generation_config": "how completions are sampled is the trainer's to say",
    "tokenizer": "it is the model's",
    "skip_tokenizer_init": "stop strings and grammars need the tokenizer",
    "worker_extension_cls": "grpo puts its own there",
}
# and to one in the trainer's processes.
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
    "max_model_len": "write generation.vllm.max_model_len",
    "tensor_parallel_size": "write generation.vllm.tensor_parallel",
    "gpu_memory_utilization": "write generation.vllm.memory",
    "kv_cache_memory_bytes": "write generation.vllm.kv_cache_gb",
    "enforce_eager": "write generation.vllm.eager",
    "enable_sleep_mode": "write generation.vllm.sleep",
    "model_impl": "write generation.vllm.model_impl",
    "max_num_seqs": "write generation.max_rows",
}


def contradictions(recipe: Recipe) -> Iterator[str]:
    """What cannot be, one sentence each, with the keys to change."""
    generation, vllm = recipe.generation, recipe.generation.vllm
    if generation.engine == "transformers":
        return
    if vllm.regex is not None and vllm.json_schema is not None:
        yield "generation.vllm.regex: json_schema is set too; a completion follows one of the two."
    try:
        structured_outputs(vllm)
    except (OSError, ValueError, RuntimeError) as error:  # the last of ~nobody
        yield f"generation.vllm.json_schema = {vllm.json_schema}: {error}."
    if vllm.canary_tolerance is not None and not vllm.canary:
        yield "generation.vllm.canary_tolerance: is only read with generation.vllm.canary = true."
    if generation.engine == "vllm_colocate":
        for name in vllm.engine_args.keys() & REFUSED.keys():
            yield f"generation.vllm.engine_args.{name}: cannot be set: {REFUSED[name]}."
        if vllm.sleep and recipe.device == "cpu":
            yield f"generation.vllm.sleep = {vllm.sleep}: vLLM sleeps on GPUs only; device is cpu."
    else:
        yield from _of_servers(recipe)


def _of_servers(recipe: Recipe) -> Iterator[str]:
    generation, vllm = recipe.generation, recipe.generation.vllm
    if not vllm.servers:
        yield (
            "generation.vllm.servers: is empty; start one with `grpo serve` and name its address, "
            "such as [http://127.0.0.1:8000]."
        )
    for url in vllm.servers:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield (
                f"generation.vllm.servers: {url!r} is no address of a server, such as "
                "http://127.0.0.1:8000."
            )
    if len({url.rstrip("/") for url in vllm.servers}) < len(vllm.servers):
        yield "generation.vllm.servers: names a server twice."
    if vllm.transfer == "disk" and vllm.transfer_folder is None:
        yield "generation.vllm.transfer = disk: needs generation.vllm.transfer_folder."
    if not vllm.overlap:
        return
    if generation.dynamic_sampling:
        yield (
            "generation.vllm.overlap: completions cannot be begun ahead with "
            "generation.dynamic_sampling, which sees a step's rewards before it knows how many "
            "prompts the step needs; set one of the two."
        )
    moved = {
        "top_p": generation.top_p < 1,
        "top_k": generation.top_k > 0,
        "min_p": generation.min_p > 0,
        "repetition_penalty": generation.repetition_penalty != 1,
        "min_completion_tokens": generation.min_completion_tokens > 0,
        "vllm.regex": vllm.regex is not None,
        "vllm.json_schema": vllm.json_schema is not None,
    }
    for name, is_set in moved.items():
        if not (is_set or f"generation.{name}" in recipe.schedules):
            continue
        yield (
            f"generation.{name}: with generation.vllm.overlap the sampler's log-probabilities are "
            "the old policy's, and so must be of its whole distribution; set one of the two."
        )


def structured_outputs(vllm: Vllm) -> dict[str, Any] | None:
    """What completions must match, as vLLM's `structured_outputs`; None: nothing.

    Raises:
        OSError, ValueError: the schema's file is not there, or it is not JSON.
    """
    if vllm.regex is not None:
        return {"regex": vllm.regex}
    if vllm.json_schema is None:
        return None
    text = vllm.json_schema
    if not text.lstrip().startswith("{"):
        text = Path(text).expanduser().read_text(encoding="utf-8")
    return {"json": json.loads(text)}


def dtype_of(recipe: Recipe) -> str:
    """Type of the engine's arithmetic."""
    if recipe.generation.vllm.dtype != "auto":
        return recipe.generation.vllm.dtype
    return "bfloat16" if recipe.mixed_precision == "bf16" else recipe.model.dtype
