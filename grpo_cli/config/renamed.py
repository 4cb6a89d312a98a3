"""Recipe keys that earlier versions knew by another name.

A command line or a recipe that sets an old key is refused with the new name. The `recipe.yaml` that
an earlier version has stored with a run is translated instead, since nobody wrote it by hand.
"""

from __future__ import annotations

import copy
import re
from typing import Any

RENAMED_KEYS = {
    "update.skip_silent": "update.skip_zero_advantage",
    "generation.max_rows": "generation.max_num_seqs",
    "generation.vllm.overlap": "generation.vllm.prefetch_steps",
    "generation.vllm.canary": "generation.vllm.check_weights",
    "generation.vllm.canary_tolerance": "generation.vllm.weights_tolerance",
}
# Names that other trainers give to a knob, by the last part of the key: TRL's GRPOConfig, verl's.
OTHER_NAMES = {
    "model_name_or_path": "model.path=NAME with model.build=null",
    "dataset_name": "dataset.train",
    "max_completion_length": "generation.max_completion_tokens",
    "generation_kwargs": "generation.presence_penalty, generation.logit_bias and so on",
    "max_new_tokens": "generation.max_completion_tokens",
    "max_response_length": "generation.max_completion_tokens",
    "max_prompt_length": "dataset.max_prompt_tokens",
    "max_steps": "steps",
    "batch_size": "prompts_per_step, the prompts of a step",
    "train_batch_size": "prompts_per_step, the prompts of a step",
    "per_device_train_batch_size": "prompts_per_step; micro-batches are chosen by themselves",
    "gradient_accumulation_steps": "prompts_per_step; micro-batches are chosen by themselves",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "buffer_size": "dataset.shuffle_buffer",
    "test_size": "dataset.test_split_size",
    "loss_type": "loss=NAME, such as loss=dapo",
    "scale_rewards": "advantage.scale",
    "importance_sampling_level": "loss.ratio_level",
    "loss_agg_mode": "loss.normalize",
    "clip_ratio_c": "loss.delta",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_scheduler_kwargs": "optimizer.min_learning_rate_ratio, optimizer.decay_ratio",
    "warmup_ratio": "optimizer.warmup_ratio",
    "optim": "optimizer=NAME, such as optimizer=adamw_8bit",
    "optim_args": "optimizer.args",
    "ppo_mini_batch_size": "update.minibatches, the number of minibatches",
    "ppo_epochs": "update.num_iterations",
    "sync_ref_model": "loss.reference_every",
    "ref_model_sync_steps": "loss.reference_every",
    "ref_model_mixup_alpha": "loss.reference_alpha",
    "mask_truncated_completions": "loss.mask_truncated",
    "reward_funcs": "reward=[NAME, ...]",
    "reward_weights": "reward.NAME.weight",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every",
    "eval_delay": "eval.delay",
    "metric_for_best_model": "eval.best",
    "greater_is_better": "eval.best_direction",
    "report_to": "tracking=NAME",
    "log_unique_prompts": "log.unique_prompts",
    "num_completions_to_print": "log.completions_shown",
    "push_to_hub": "hub.repo=OWNER/NAME",
    "hub_model_id": "hub.repo",
    "hub_strategy": "hub.strategy",
    "hub_private_repo": "hub.private",
    "hub_revision": "hub.revision",
    "log_completions_hub_repo": "hub.completions_repo",
    "use_vllm": "generation=vllm_colocate or generation=vllm_server",
    "vllm_mode": "generation=vllm_colocate or generation=vllm_server",
    "gpu_memory_utilization": "generation.vllm.memory",
    "bf16": "mixed_precision=bf16",
    "fp16": "mixed_precision=fp16",
    "torch_compile": "model.compile=true",
    "torch_compile_backend": "model.compile_backend",
    "torch_dtype": "model.dtype",
    "model_init_kwargs": "model.args",
}
PROMPT = re.compile(r"(benchmark\.[^.]+)\.(cot|tir)")


def renamed(key: str) -> str | None:
    """Returns the message for a key that has another name now, or None for any other key."""
    prefix = "schedules." if key.startswith("schedules.") else ""
    new = RENAMED_KEYS.get(key.removeprefix(prefix))
    if prompt := PROMPT.fullmatch(key):
        new = f"{prompt[1]}.modes.{prompt[2]}.prompt"
    return f"{key}: is called {prefix}{new} now; write that." if new else None


def translate(stored: dict[str, Any]) -> dict[str, Any]:
    """Returns a stored recipe with its old keys renamed; the argument stays as it is."""
    tree = copy.deepcopy(stored)
    for old, new in RENAMED_KEYS.items():
        for prefix in ("", "schedules."):
            _move(tree, prefix + old, prefix + new)
    optimizer = tree.get("optimizer") or {}
    if optimizer.get("weight_decay"):  # earlier versions decayed all parameters
        optimizer.setdefault("no_decay", [])
    tracking = tree.get("tracking") or {}
    if isinstance(tracking.get("backend"), str):  # until 0.1.0 there was one
        tracking["backend"] = [tracking["backend"]]
    for name in tree.get("benchmark") or {}:
        for mode in ("cot", "tir"):
            key = f"benchmark.{name}"
            _move(tree, f"{key}.{mode}", f"{key}.modes.{mode}.prompt")
    return tree


def is_stored(tree: dict[str, Any]) -> bool:
    """Returns whether a run has stored this recipe; else a user wrote it."""
    return list(tree.get("defaults") or [])[:2] == ["schema", "_self_"]


def _move(tree: dict[str, Any], old: str, new: str) -> None:
    *path, name = old.split(".")
    node: Any = tree
    for part in path:
        node = node.get(part)
        if not isinstance(node, dict):
            return
    if name not in node:
        return
    value = node.pop(name)
    *path, name = new.split(".")
    node = tree
    for part in path:
        node = node.setdefault(part, {})
    node.setdefault(name, value)
