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
from grpo_cli.config.keys import KNOBS, flagged, is_among
from grpo_cli.config.knob import flags_of, value_at
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError, listed
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.generation.settings import Tools

# Keys of knobs and sections that only training reads.
OF_TRAINING = flagged("training")


def check_read(overrides: Sequence[str]) -> None:
    """Refuses keys on the command line that only training reads."""
    as_in_training = "eval.sampling=training" in overrides
    sampling, inside = flagged("evaluated_if"), [*OF_TRAINING, "dataset.mixture"]
    for word in overrides:
        key = key_set_by(word)
        # An evaluation always resumes.
        if word == "resume=auto" or (as_in_training and key in sampling):
            continue
        if key in KNOBS and (instead := flags_of(KNOBS[key]).evaluated_as):
            raise UserError(f"{word}: is only read in training; evaluation reads {instead}.")
        if is_among(key, inside) or key in sampling:
            raise UserError(f"{word}: is only read in training.")


def check_rows(overrides: Sequence[str], recipe: Recipe) -> None:
    """Refuses keys of the held-out rows if benchmarks are evaluated instead."""
    for word in overrides:
        key = key_set_by(word)
        if recipe.dataset.test_split_size is None and key.startswith("dataset.train"):
            raise UserError(f"{word}: is only read in training.")
        of_rows = is_among(key, flagged("rows", "own")) and key not in flagged("rows", "any")
        if recipe.benchmark and of_rows:
            raise UserError(
                f"{word}: is about the recipe's held-out rows, and benchmarks are evaluated in "
                f"their place: {listed(recipe.benchmark)}."
            )


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
        if not any(is_among(key, ["model.args"]) for key in given):
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
        if not (runs_programs or any(is_among(key, ["generation.tools"]) for key in given)):
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
    for key in KNOBS:
        section, _, name = key.rpartition(".")
        if section and not _is_recorded(recipe, key) and value_at(values, section) is not None:
            value_at(values, section).pop(name, None)
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
        names += [key for key in flagged("rows", "own") if key in values]
    report = {name: values[name] for name in names}
    return {**as_text(report), "settings_hash": hash_of(report), "versions": versions()}


def _is_recorded(recipe: Recipe, key: str) -> bool:
    flags = flags_of(KNOBS[key])
    if flags.evaluated_if:
        other, value = flags.evaluated_if
        return bool(value_at(recipe, other) == value)
    return not (flags.training or flags.evaluated_as or flags.without_effect)


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
