"""Says which knobs an evaluation reads: others are refused, and eval.json records these.

Knobs that only training reads are reset to their defaults before the recipe is checked, so that
mistakes in them do not stop an evaluation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from grpo_cli.config.interpolation import as_text
from grpo_cli.config.parsing import value_at
from grpo_cli.config.recipe import Recipe, knobs
from grpo_cli.errors import UserError, listed
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.generation.settings import Tools

# Keys of knobs and sections that only training reads.
OF_TRAINING = [key for key, f in knobs() if f.metadata.get("training")]
MEANT = {  # keys of training -> the keys that evaluation reads instead
    "generation.temperature": "eval.temperature",
    "generation.top_p": "eval.top_p",
    "generation.num_generations": "eval.num_samples",
}
OF_SAMPLING = (  # read with eval.sampling=training
    "generation.temperature", "generation.top_p", "generation.top_k", "generation.min_p",
)  # fmt: skip
# Without effect on an evaluation's numbers; the model is the checkpoint.
WITHOUT_EFFECT = ("model.path", "generation.num_generations", "generation.max_num_seqs")
OF_ANY_ROWS = ("dataset.max_pixels", "dataset.bad_rows")  # also of a benchmark's rows
# Sections of the recipe's held-out rows, which benchmarks replace.
OF_ROWS = ("dataset", "reward", "environment", "episode", "tools", "rollout")
# Keys that are read when stored completions are scored.
READ_OF_COMPLETIONS = (
    "benchmark.", "scoring.workers", "scoring.worker_memory_gb",
    "eval.metric", "eval.mode", "eval.k", "eval.limit", "output_dir", "overwrite",
    "hydra.",
)  # fmt: skip
READ_OF_THEIR_BENCHMARK = (
    "data", "subset", "split", "columns", "modes", "reward", "args", "breakdown",
)  # fmt: skip


def check_read(overrides: Sequence[str]) -> None:
    """Refuses keys on the command line that only training reads."""
    as_in_training = "eval.sampling=training" in overrides
    for word in overrides:
        key = key_set_by(word)
        # An evaluation always resumes.
        if word == "resume=auto" or (as_in_training and key in OF_SAMPLING):
            continue
        if key in MEANT:
            raise UserError(f"{word}: is only read in training; evaluation reads {MEANT[key]}.")
        inside = [f"{known}." for known in (*OF_TRAINING, "dataset.mixture")]
        if f"{key}.".startswith(tuple(inside)) or key in OF_SAMPLING:
            raise UserError(f"{word}: is only read in training.")


def check_rows(overrides: Sequence[str], recipe: Recipe) -> None:
    """Refuses keys of the held-out rows if benchmarks are evaluated instead."""
    of_rows = [*(f"{section}." for section in OF_ROWS), "eval.accuracy"]
    for word in overrides:
        key = key_set_by(word)
        if recipe.dataset.test_split_size is None and key.startswith("dataset.train"):
            raise UserError(f"{word}: is only read in training.")
        if recipe.benchmark and is_among(key, of_rows) and key not in OF_ANY_ROWS:
            raise UserError(
                f"{word}: is about the recipe's held-out rows, and benchmarks are evaluated in "
                f"their place: {listed(recipe.benchmark)}."
            )


def check_read_of_completions(overrides: Sequence[str]) -> None:
    """Refuses keys that are not read when stored completions are scored."""
    for word in overrides:
        key = key_set_by(word)
        section, *rest = key.split(".")  # benchmark.NAME.KNOB
        known: Sequence[str] = READ_OF_COMPLETIONS
        of = ""
        if section == "benchmark" and len(rest) > 1:
            key, known, of = rest[1], READ_OF_THEIR_BENCHMARK, " of a benchmark"
        if key and not is_among(key, known):
            shown = listed(k.rstrip(".") for k in known if k != "hydra.")
            raise UserError(
                f"{word}: nothing is sampled with completions=FILE, and nothing reads it; what is "
                f"read{of} is {shown}."
            )


def is_among(key: str, known: Sequence[str]) -> bool:
    """Returns whether a key is in `known`, or in one of its sections."""
    sections = tuple(k for k in known if k.endswith("."))
    return key in known or f"{key}.".startswith(sections)


def key_set_by(word: str) -> str:
    """Returns the key that an override sets; "" for an option."""
    return "" if word.startswith("-") else word.lstrip("+~").partition("=")[0].partition("@")[0]


def without_training(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Resets the knobs of a composed recipe that only training reads to their defaults.

    generation.tools is also reset if no program is run, since a stored recipe may have run some.

    Args:
        overrides: the command line's overrides; knobs that they set and evaluation reads are kept.
    """
    defaults = OmegaConf.structured(Recipe())
    with open_dict(cfg):
        for key in OF_TRAINING:
            OmegaConf.update(cfg, key, OmegaConf.select(defaults, key), merge=False)
        given = [key_set_by(word) for word in overrides]
        if not any(is_among(key, ["model.args."]) for key in given):
            cfg.model.args = {}  # arguments of training's initial model
        if "overwrite" not in given:
            cfg.overwrite = False
        known = {name: mode.tools for name, mode in Benchmark().modes.items()}
        runs_programs = any(
            OmegaConf.select(entry, f"modes.{mode}.tools", default=known.get(mode, False))
            for entry in cfg.benchmark.values()
            for mode in cfg.eval.mode
            if entry is not None
        )
        if not (runs_programs or any(is_among(key, ["generation.tools."]) for key in given)):
            cfg.generation.tools = OmegaConf.structured(Tools())


def without_unread_data(cfg: DictConfig) -> DictConfig:
    """Returns a copy of a composed recipe without unread data and rewards."""
    out = cfg.copy()
    with open_dict(out):
        if out.benchmark:  # evaluated instead of the recipe's own rows
            out.reward, out.dataset.eval, out.dataset.held_out = {}, None, {}
        if out.benchmark or out.dataset.test_split_size is None:
            out.dataset.train = None
            for part in filter(None, out.dataset.mixture.values()):
                part.data = ""
    return out


def settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings for eval.json.

    `settings_hash` covers them: everything that the numbers depend on except the model, the data
    and the code.
    """
    from grpo_cli.reporting.reporter import versions

    values = dataclasses.asdict(recipe)
    values["eval"]["temperature"] = recipe.evaluation_temperature
    if recipe.eval.sampling != "training":
        for key in ("temperature", "top_p", "top_k", "min_p"):
            del values["generation"][key]
    for key in (*OF_TRAINING, *WITHOUT_EFFECT):
        section, _, name = key.rpartition(".")
        if section:
            del value_at(values, section)[name]
    vllm = values["generation"]["vllm"]
    values["generation"]["vllm"] = {k: vllm[k] for k in ("regex", "json_schema", "dtype")}
    names = ["seed", "mixed_precision", "model", "eval", "generation"]
    if recipe.benchmark:
        defaults = as_recorded(Benchmark())
        values["benchmark"] = {
            name: {k: v for k, v in as_recorded(one).items() if v != defaults[k]}
            for name, one in recipe.benchmark.items()
        }
        values["max_pixels"] = recipe.dataset.max_pixels
        names += ["benchmark", "max_pixels"]
    else:
        names += OF_ROWS
    report = {name: values[name] for name in names}
    return {**as_text(report), "settings_hash": hash_of(report), "versions": versions()}


def as_recorded(benchmark: Benchmark) -> dict[str, Any]:
    """Returns a benchmark's settings that its numbers depend on, without titles and figures."""
    values = dataclasses.asdict(benchmark)
    del values["title"], values["column"]
    modes = {
        name: {"prompt": m.prompt, "tools": m.tools}
        for name, m in benchmark.modes.items()
        if m.prompt is not None
    }
    return {**values, "modes": modes}


def hash_of(values: Any) -> str:
    """Returns a 16-digit hexadecimal hash of values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
