"""Which knobs an evaluation reads: others are refused, and these are what eval.json tells.

A recipe is about training as well. What it says of that is put back to the defaults before the
recipe is checked, so that no mistake is found in what an evaluation does not read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from grpo_cli.config import Benchmark, Eval, Recipe, Tools, knobs
from grpo_cli.errors import UserError, listed
from grpo_cli.parsing import value_at

# Keys, groups, and sections, which end with a dot. What numbers depend on, of any model:
BEARING = (
    "seed", "mixed_precision", "model.revision", "model.dtype", "model.attn_implementation",
    "model.trust_remote_code", "model.chat_template", "model.dropout", "eval.num_samples",
    "eval.temperature", "eval.top_p", "eval.max_completion_tokens", "eval.mode", "eval.metric",
    "eval.k", "eval.limit", "generation.engine", "generation.max_completion_tokens",
    "generation.min_completion_tokens", "generation.stop", "generation.repetition_penalty",
    "generation.vllm.regex", "generation.vllm.json_schema", "generation.vllm.dtype",
    "generation.tools.",
)  # fmt: skip
# Of the recipe's held-out rows alone:
BEARING_OF_ROWS = (
    "dataset.eval", "dataset.subset", "dataset.eval_split", "dataset.columns", "dataset.prompt",
    "dataset.system", "dataset.chat", "dataset.eval_limit", "reward", "reward.", "eval.accuracy",
)  # fmt: skip
# How they are come by:
READ = (
    *BEARING, "recipe", "device", "output_dir", "overwrite", "model.path", "scoring.",
    "distributed", "distributed.", "benchmark", "benchmark.", "generation", "generation.max_rows",
    "generation.vllm.", "hydra.",
)  # fmt: skip
READ_OF_ROWS = (*BEARING_OF_ROWS, "dataset")
ALWAYS = ("resume=auto",)  # what an evaluation does anyway
NOT_READ = ("generation.vllm.overlap", "generation.vllm.in_flight")
# Of completions that are there. The templates are those of the prompts stored beside them.
READ_OF_COMPLETIONS = (
    "benchmark", "benchmark.", "scoring.workers", "scoring.worker_memory_gb", "scoring.modules",
    "eval.metric", "eval.mode", "eval.k", "eval.limit", "output_dir", "overwrite", "hydra.",
)  # fmt: skip
READ_OF_THEIR_BENCHMARK = (
    "data", "subset", "split", "columns", "limit", "cot", "tir", "reward", "args", "breakdown",
)  # fmt: skip
MEANT = {  # by evaluation, which samples in its own way
    "generation.temperature": "eval.temperature",
    "generation.top_p": "eval.top_p",
    "generation.num_generations": "eval.num_samples",
}
OF_TRAINING = ("loss", "advantage", "optimizer", "update", "checkpoint", "log", "tracking")
OF_TRAINING_IN_EVAL = ("every", "at_start", "at_end", "best", "patience")


def check_read(overrides: Sequence[str]) -> None:
    """Refuses what the command line sets and only training reads.

    Raises:
        UserError: it does.
    """
    for word in overrides:
        key = key_set_by(word)
        if key in MEANT:
            raise UserError(f"{word}: is only read in training; evaluation reads {MEANT[key]}.")
        is_read = is_among(key, READ) or is_among(key, READ_OF_ROWS)
        # What is no key at all is told, with the nearest, where it is looked up.
        if is_knob(key) and (not is_read or key in NOT_READ) and word not in ALWAYS:
            raise UserError(f"{word}: is only read in training.")


def check_rows(overrides: Sequence[str], recipe: Recipe) -> None:
    """Refuses what is about the held-out rows where benchmarks are evaluated in their place.

    Raises:
        UserError: the command line sets such.
    """
    for word in overrides if recipe.benchmark else ():
        if is_among(key_set_by(word), READ_OF_ROWS):
            raise UserError(
                f"{word}: is about the recipe's held-out rows, and benchmarks are evaluated in "
                f"their place: {listed(recipe.benchmark)}."
            )


def check_read_of_completions(overrides: Sequence[str]) -> None:
    """Refuses what nothing reads where completions are scored that are there.

    Raises:
        UserError: the command line sets such.
    """
    for word in overrides:
        key = key_set_by(word)
        why = f"{word}: nothing is sampled with completions=FILE, and nothing reads it; what is "
        if key and not is_among(key, READ_OF_COMPLETIONS):
            shown = dict.fromkeys(k.rstrip(".") for k in READ_OF_COMPLETIONS if k != "hydra.")
            raise UserError(f"{why}read is {listed(shown)}.")
        section, *rest = key.split(".")  # benchmark.NAME.KNOB
        if section == "benchmark" and len(rest) > 1 and rest[1] not in READ_OF_THEIR_BENCHMARK:
            raise UserError(f"{why}read of a benchmark is {listed(READ_OF_THEIR_BENCHMARK)}.")


def is_knob(key: str) -> bool:
    """Whether there is such a key, section or schedule."""
    return key in dict(knobs()) or key.startswith("schedules.")


def is_among(key: str, known: Sequence[str]) -> bool:
    """Whether a key is one of those known, or is or lies in one of the sections among them."""
    sections = tuple(k for k in known if k.endswith("."))
    return key in known or f"{key}.".startswith(sections)


def key_set_by(word: str) -> str:
    """The key that an override sets; "" of an option."""
    return "" if word.startswith("-") else word.lstrip("+~").partition("=")[0].partition("@")[0]


def without_training(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Puts back to the defaults what a composed recipe says of training.

    Programs too, where none are run: a stored recipe may have been evaluated with them.

    Args:
        overrides: what the command line sets stays, where evaluation reads it.
    """
    defaults = Recipe()
    with open_dict(cfg):
        for name in OF_TRAINING:
            cfg[name] = OmegaConf.structured(getattr(defaults, name))
        cfg.schedules = {}
        for name in OF_TRAINING_IN_EVAL:
            cfg.eval[name] = getattr(Eval(), name)
        for key in NOT_READ:
            OmegaConf.update(cfg, key, value_at(defaults, key))
        given = [key_set_by(word) for word in overrides]
        if "overwrite" not in given:
            cfg.overwrite = False
        if "tir" not in cfg.eval.mode and not any(
            is_among(k, ["generation.tools."]) for k in given
        ):
            cfg.generation.tools = OmegaConf.structured(Tools())


def settings(recipe: Recipe) -> dict[str, Any]:
    """What eval.json says of how its numbers came about.

    `settings_hash` stands for all of it but the versions: whatever the numbers depend on besides
    the model, the data and the code.
    """
    from grpo_cli.versions import versions

    generation = ["engine", "max_completion_tokens", "min_completion_tokens", "stop"]
    generation += ["repetition_penalty", *(["tools"] if "tir" in recipe.eval.mode else [])]
    model = ("revision", "dtype", "attn_implementation", "chat_template")
    told: dict[str, Any] = {
        "seed": recipe.seed,
        "mixed_precision": recipe.mixed_precision,
        "model": {name: getattr(recipe.model, name) for name in model},
        "eval": {**dataclasses.asdict(recipe.eval), "temperature": recipe.eval.drawn_at},
        "generation": {name: plain(getattr(recipe.generation, name)) for name in generation},
    }
    bearing = {**_values_of(recipe, BEARING), "eval.temperature": recipe.eval.drawn_at}
    if recipe.benchmark:
        told["benchmark"] = {
            name: {k: v for k, v in plain(b).items() if v != getattr(Benchmark(), k)}
            for name, b in recipe.benchmark.items()
        }
        bearing["benchmark"] = plain(recipe.benchmark)
    else:
        told["dataset"] = recipe.dataset.eval
        told["reward"] = plain(recipe.reward)
        bearing |= _values_of(recipe, BEARING_OF_ROWS)
    return {**told, "settings_hash": hash_of(bearing), "versions": versions()}


def _values_of(recipe: Recipe, known: Sequence[str]) -> dict[str, Any]:
    """What a recipe says of the keys among those known."""
    return {k: plain(value_at(recipe, k)) for k, _ in knobs() if is_among(k, known)}


def plain(value: Any) -> Any:
    """Records as mappings."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_record else value  # type: ignore[arg-type]


def hash_of(values: Any) -> str:
    """16 hexadecimal digits that stand for values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
