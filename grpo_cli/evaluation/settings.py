"""Lists the knobs that an evaluation reads: others are refused, and eval.json records these.

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
from grpo_cli.config.schema import Benchmark, Eval, Recipe, Tools, knobs
from grpo_cli.errors import UserError, listed

# Keys, groups and sections (with a final dot) on which the numbers of any evaluation depend.
SAMPLING = (  # knobs of generation that evaluation reads as training does
    "stop", "stop_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "allowed_token_ids",
)  # fmt: skip
BEARING = (
    "seed", "mixed_precision", "model.revision", "model.dtype", "model.head_dtype",
    "model.quantization", "model.attn_implementation", "model.trust_remote_code",
    "model.chat_template", "model.dropout", "eval.num_samples", "eval.sampling",
    "eval.temperature", "eval.top_p", "eval.max_completion_tokens", "eval.mode", "eval.metric",
    "eval.k", "eval.limit", "generation.engine", "generation.max_completion_tokens",
    "generation.min_completion_tokens", *(f"generation.{name}" for name in SAMPLING),
    "generation.logit_bias.",
    "generation.vllm.regex", "generation.vllm.json_schema", "generation.vllm.dtype",
    "generation.tools.", "model.chat_template_kwargs.", "model.args.", "dataset.max_pixels",
)  # fmt: skip
# Additional settings for the recipe's held-out rows:
BEARING_OF_ROWS = (
    "dataset.eval", "dataset.subset", "dataset.eval_split", "dataset.columns", "dataset.prompt",
    "dataset.system", "dataset.chat", "dataset.eval_limit", "dataset.final_assistant", "reward.",
    "eval.accuracy", "dataset.bad_images",
)  # fmt: skip
# Additional settings for episodes of held-out rows:
BEARING_OF_EPISODES = (
    "rollout", "tools", "tools.", "environment.path", "environment.args", "environment.args.",
    "environment.by_name", "environment.by_name.", "environment.mcp",
    "episode.max_turns", "episode.turn_tokens", "episode.reply_tokens",
    "model.response_template",
)  # fmt: skip
# Additional settings for rows that were split off the training rows:
BEARING_OF_SPLIT = (
    "dataset.test_split_size", "dataset.train", "dataset.train_split",
    "dataset.train_limit",
)  # fmt: skip
# Additional settings for several held-out sets:
BEARING_OF_SETS = ("dataset.held_out",)
# Additional settings for completions that are sampled as in training:
BEARING_OF_SAMPLING = (
    "generation.temperature", "generation.top_p", "generation.top_k", "generation.min_p",
)  # fmt: skip
# Settings that evaluation also reads:
READ_OF_ROWS = (
    *BEARING_OF_ROWS, *BEARING_OF_SPLIT, *BEARING_OF_EPISODES, "dataset.held_out.", "dataset",
    "environment.", "episode.",
)  # fmt: skip
READ = (
    *BEARING, *READ_OF_ROWS, "recipe", "device", "output_dir", "overwrite", "model.path",
    "scoring.", "distributed.", "benchmark.", "generation", "generation.max_num_seqs",
    "generation.cuda_graphs", "generation.vllm.", "log.images", "hydra.",
)  # fmt: skip
ALWAYS = ("resume=auto",)  # accepted, since an evaluation always resumes
NOT_READ = (
    "generation.vllm.prefetch_steps", "generation.vllm.in_flight", "distributed.offload",
)  # fmt: skip
# Settings that are read when stored completions are scored.
READ_OF_COMPLETIONS = (
    "benchmark.", "scoring.workers", "scoring.worker_memory_gb",
    "eval.metric", "eval.mode", "eval.k", "eval.limit", "output_dir", "overwrite", "log.images",
    "hydra.",
)  # fmt: skip
READ_OF_THEIR_BENCHMARK = (
    "data", "subset", "split", "columns", "limit", "modes", "reward", "args", "breakdown",
)  # fmt: skip
MEANT = {  # keys of training -> the keys that evaluation reads instead
    "generation.temperature": "eval.temperature",
    "generation.top_p": "eval.top_p",
    "generation.num_generations": "eval.num_samples",
}
OF_TRAINING = (
    "loss", "advantage", "optimizer", "update", "stop", "alarms", "checkpoint", "log", "tracking",
    "hub",
)  # fmt: skip
OF_TRAINING_IN_EVAL = (
    "every", "at_start", "at_end", "best", "patience",
)  # fmt: skip


def check_read(overrides: Sequence[str]) -> None:
    """Refuses keys on the command line that only training reads.

    Raises:
        UserError: the command line sets such a key.
    """
    as_in_training = "eval.sampling=training" in overrides
    for word in overrides:
        key = key_set_by(word)
        if as_in_training and key in BEARING_OF_SAMPLING:
            continue
        if key in MEANT:
            raise UserError(f"{word}: is only read in training; evaluation reads {MEANT[key]}.")
        is_known = key in dict(knobs()) or key.startswith("schedules.")  # others are refused later
        is_read = is_among(key, READ) and key not in NOT_READ
        if is_known and not is_read and word not in ALWAYS:
            raise UserError(f"{word}: is only read in training.")


def check_rows(overrides: Sequence[str], recipe: Recipe) -> None:
    """Refuses keys of the held-out rows if benchmarks are evaluated instead.

    Raises:
        UserError: the command line sets such a key.
    """
    for word in overrides:
        key = key_set_by(word)
        if recipe.dataset.test_split_size is None and key.startswith("dataset.train"):
            raise UserError(f"{word}: is only read in training.")
        if recipe.benchmark and is_among(key, READ_OF_ROWS):
            raise UserError(
                f"{word}: is about the recipe's held-out rows, and benchmarks are evaluated in "
                f"their place: {listed(recipe.benchmark)}."
            )


def check_read_of_completions(overrides: Sequence[str]) -> None:
    """Refuses keys that are not read when stored completions are scored.

    Raises:
        UserError: the command line sets such a key.
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
    defaults = Recipe()
    with open_dict(cfg):
        images = OmegaConf.select(cfg, "log.images", default=defaults.log.images)
        for name in OF_TRAINING:
            cfg[name] = OmegaConf.structured(getattr(defaults, name))
        cfg.log.images = images  # decides the contents of completion files
        cfg.schedules = {}
        for name in OF_TRAINING_IN_EVAL:
            cfg.eval[name] = getattr(Eval(), name)
        for key in NOT_READ:
            OmegaConf.update(cfg, key, value_at(defaults, key))
        given = [key_set_by(word) for word in overrides]
        if not any(is_among(key, ["model.args."]) for key in given):
            cfg.model.args = {}  # arguments of training's initial model
        if "overwrite" not in given:
            cfg.overwrite = False
        tools_given = any(is_among(key, ["generation.tools."]) for key in given)
        if not tools_given and not _runs_programs(cfg):
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


def _runs_programs(cfg: DictConfig) -> bool:
    """Returns whether a composed, unchecked recipe evaluates in a mode with tools."""
    known = {name: mode.tools for name, mode in Benchmark().modes.items()}
    return any(
        OmegaConf.select(entry, f"modes.{mode}.tools", default=known.get(mode, False))
        for entry in cfg.benchmark.values()
        for mode in cfg.eval.mode
        if entry is not None
    )


def settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings for eval.json.

    `settings_hash` covers everything that the numbers depend on except the model, the data and the
    code.
    """
    from grpo_cli.reporting.reporter import versions

    values = dataclasses.asdict(recipe)
    values["eval"]["temperature"] = recipe.evaluation_temperature
    recorded = {
        "model": (
            "revision", "dtype", "head_dtype", "quantization", "attn_implementation",
            "chat_template",
            "chat_template_kwargs",
            *(("args",) if recipe.model.args else ()),
        ),
        "eval": tuple(values["eval"]),
        "generation": (
            "engine", "max_completion_tokens", "min_completion_tokens", *SAMPLING, "logit_bias",
            *(("tools",) if recipe.runs_programs else ()),
        ),
    }  # fmt: skip
    report: dict[str, Any] = {
        "seed": recipe.seed,
        "mixed_precision": recipe.mixed_precision,
        **{name: {k: values[name][k] for k in keys} for name, keys in recorded.items()},
    }
    splits, sets = recipe.dataset.test_split_size is not None, recipe.dataset.held_out
    keys: tuple[str, ...] = BEARING
    if recipe.eval.sampling == "training":
        keys += BEARING_OF_SAMPLING
    if not recipe.benchmark:
        keys += BEARING_OF_ROWS
        keys += (BEARING_OF_SPLIT if splits else ()) + (BEARING_OF_SETS if sets else ())
        keys += BEARING_OF_EPISODES if recipe.has_episodes else ()
    bearing = {key: value_at(values, key) for key, _ in knobs() if is_among(key, keys)}
    if recipe.benchmark:
        defaults = bearing_of(Benchmark())
        bearing["benchmark"] = {name: bearing_of(b) for name, b in recipe.benchmark.items()}
        report["benchmark"] = {
            name: {k: v for k, v in values.items() if v != defaults[k]}
            for name, values in bearing["benchmark"].items()
        }
    else:
        key = "dataset.train" if splits else "dataset.eval"
        dataset = as_text(value_at(recipe, key), key)
        if sets:
            dataset = as_text({name: held.data for name, held in sets.items()}, "dataset.held_out")
        elif splits:
            dataset = f"{recipe.dataset.test_split_size:g} of {dataset}"
        report |= {"dataset": dataset, "reward": values["reward"]}
    return {**as_text(report), "settings_hash": hash_of(bearing), "versions": versions()}


def bearing_of(benchmark: Benchmark) -> dict[str, Any]:
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
