"""Decides which keys of a checkpoint's stored recipe are trusted, since it can name code.

    own run        a run of this user has noted the folder: its recipe is obeyed
    another's      only the keys of `ALLOWED` are obeyed, which describe the model, its data and the
                   evaluation; every other key must have its default value, or needs trust=true

Notes are empty files in grpo's cache folder. Their names hash the recipe, the model's code and its
configs, which may name code or another model. A moved folder is therefore still recognized. Imports
nothing slow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_cli.checkpoints.paths import RUN_ID, TRAINING
from grpo_cli.config import sources
from grpo_cli.config.cache import cache_dir
from grpo_cli.config.compose import is_stored
from grpo_cli.config.interpolation import leaves
from grpo_cli.config.keys import ENTRIES
from grpo_cli.config.knob import as_written
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.words import RECIPE_KEYS
from grpo_cli.errors import UserError, listed
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.files import open_file, read_json
from grpo_cli.rewards import shipped_name

RECIPE = f"{TRAINING}/recipe.yaml"

Rule = Callable[[Any, Path], bool]  # takes a value and the checkpoint's folder


def _anything(value: Any, folder: Path) -> bool:
    return True


def _number(value: Any, folder: Path) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _word(value: Any, folder: Path) -> bool:
    """Returns whether a value is a single name: no module:function, no OWNER/KERNEL, no path."""
    return value is None or re.fullmatch(r"\w+", str(value), re.ASCII) is not None


def _optimizer(value: Any, folder: Path) -> bool:
    known = re.fullmatch(r"(torch|bitsandbytes)\.optim:\w+", str(value), re.ASCII)
    return known is not None or _word(value, folder)


def _never(value: Any, folder: Path) -> bool:
    return value in (None, False)


def _guards(value: Any, folder: Path) -> bool:
    # With `limits`, the model's programs run without protection of the user's files.
    return value in ("auto", "namespaces")


def _template(value: Any, folder: Path) -> bool:
    return value is None or "{" in str(value) or _inside(str(value), folder)


def _json_text(value: Any, folder: Path) -> bool:
    return value is None or str(value).lstrip().startswith("{")  # otherwise a file


def _schema(value: Any, folder: Path) -> bool:
    """Returns whether a schema is written in the recipe or lies in the folder."""
    return isinstance(value, dict) or _json_text(value, folder) or _inside(str(value), folder)


def _model(value: Any, folder: Path) -> bool:
    return value is None or _is_hub_name(str(value)) or _inside(str(value), folder)


def _data(value: Any, folder: Path) -> bool:
    """Returns whether rows come from the hub, from grpo itself or from the folder."""
    if value is None or re.fullmatch(r"pkg://grpo_cli/samples/(\w+/)?\w[\w.]*", str(value)):
        return True
    # A name without an owner may be a `datasets` loader, such as json, that reads the working
    # folder.
    is_named = "/" in str(value) and _is_hub_name(str(value))
    return is_named or _inside(str(value), folder)


def _is_hub_name(value: str) -> bool:
    is_name = re.fullmatch(r"\w[\w.-]{,99}(/\w[\w.-]{,99})?", value, re.ASCII) is not None
    return is_name and sources.local_path(value) is None


def _inside(value: str, folder: Path) -> bool:
    is_there = os.path.exists(value)  # False for text that is not a path
    return is_there and Path(value).resolve().is_relative_to(folder.resolve())


def _shipped(value: Any, folder: Path) -> bool:
    """Returns whether a reward is grpo's own and sends nothing to an address in the recipe."""
    return shipped_name(str(value)) not in (None, "judge")


def _these(names: str, **rules: Any) -> dict[str, Any]:
    """Returns rules of keys: any value for those in `names`, and a rule for each of the others."""
    return {**dict.fromkeys(names.split(), _anything), **rules}


# Arguments of the shipped rewards.
ARGS = _these(
    "style letters unclosed_think seconds total_seconds memory_mb partial continues_prompt "
    "site_packages max_completion_tokens correct_max correct_min wrong_min wrong_max exceed "
    "name episode_credit strip ignore_case script threshold target unit final forms "
    "units percent pattern mode dotall multiline compare ngram max_penalty label chat "
    "chat_template_kwargs eos max_length batch_tokens dtype device revision cache tags "
    "opening answer_tag",
    guards=_guards, model=_model, schema=_schema, trust_remote_code=_never,
)  # fmt: skip
ROWS = _these(
    "subset split columns prompt system limit weight solution rewards accuracy", data=_data
)
SCHEDULE = _these("to shape begin end")
# Trusted keys in another user's folder; "*" stands for any name. Any other key, such as one added
# to the schema later, must have its default value.
ALLOWED = _these(
    "recipe description seed steps epochs prompts_per_step device mixed_precision",
    model=_these(
        "revision freeze dtype quantization head_dtype response_template chat_template_kwargs "
        "gradient_checkpointing compile dropout",
        path=_model, attn_implementation=_word, chat_template=_template,
        build=_these(
            "hidden_size intermediate_size num_layers merges vision_layers warmup_steps "
            "warmup_target_loss warmup_batch warmup_weight_decay warmup_learning_rate"
        ),
    ),
    adapter=_these(
        "method rank alpha target_modules sync", path=_model,
        args=_these("lora_dropout target_parameters modules_to_save", init_lora_weights=_word),
    ),
    dataset=_these(
        "subset train_split eval_split columns prompt system chat final_assistant solution "
        "max_prompt_tokens max_pixels bad_rows shuffle streaming train_limit eval_limit "
        "test_split_size",
        train=_data, eval=_data, mixture={"*": ROWS}, held_out={"*": ROWS},
    ),
    reward={
        "*": _these(
            "weight datasets timeout on_error concurrency", function=_shipped, args=ARGS
        )
    },
    benchmark={
        "*": _these(
            "title column subset split columns system chat examples shots breakdown "
            "max_completion_tokens stop",
            data=_data, modes={"*": _these("prompt tools title published")}, reward=_shipped,
            args=ARGS,
        )
    },
    scoring=_these("workers worker_memory_gb"),
    generation=_these(
        "num_generations max_completion_tokens min_completion_tokens stop temperature top_p top_k "
        "min_p repetition_penalty presence_penalty frequency_penalty logit_bias stop_token_ids "
        "max_num_seqs max_logp_difference dynamic_sampling",
        engine=_word,
        vllm=_these(
            "regex check_weights tensor_parallel memory sleep dtype prefetch_steps in_flight",
            json_schema=_json_text,
        ),
        tools=_these("max_calls seconds", guards=_guards),
    ),
    episode=_these("max_turns turn_tokens reply_tokens order credit"),
    loss=_these(
        "ratio_level normalize epsilon epsilon_high mask_truncated beta kl_estimator kl_in "
        "kl_bias_correction kl_target reference_every reference_alpha entropy_coef entropy_target "
        "router_aux_loss_coef top_entropy sampling_correction sampling_cap sampling_floor "
        "off_policy_mask",
        policy=_word, args={"*": _number},
    ),
    advantage=_these("scale", rule=_word, args={"*": _number, "baseline": _word}),
    optimizer=_these(
        "learning_rate betas weight_decay no_decay max_grad_norm schedule warmup_steps "
        "min_learning_rate",
        algorithm=_optimizer, args={"*": _number},
    ),
    update=_these("num_iterations minibatches tokens_per_micro_batch"),
    schedules={"*": {**SCHEDULE, "*": SCHEDULE}},  # stored by section, parsed by full key
    distributed=_these("strategy reshard_after_forward offload stall_minutes"),
    eval=_these(
        "every at_start num_samples sampling temperature top_p max_completion_tokens accuracy "
        "mode metric k limit best patience"
    ),
)  # fmt: skip


def check(path: Path | str, found: Iterable[str], trust: str) -> None:
    """Raises a UserError if another user's checkpoint sets untrusted keys.

    Args:
        found: the untrusted entries, as `key = value`. trust: the word that allows them.
    """
    if names := [*dict.fromkeys(found)]:
        raise UserError(
            f"checkpoint = {path}: no run of yours has made it here, and it asks for what can run "
            f"code or reach other files and machines: {listed(names)}. If you trust who made it, "
            f"add {trust}."
        )


def note_own(path: Path) -> None:
    """Records a checkpoint or an exported model as this user's."""
    _note(path, _obeyed_files)


def is_own(path: Path) -> bool:
    """Returns whether this user wrote this checkpoint, or one with the same recipe and code."""
    return _is_noted(path, _obeyed_files)


def note_run(path: Path) -> None:
    """Records a run's folder as this user's; its checkpoints have their own notes.

    A shipped recipe is not unique to a user, so a random name is written beside it.
    """
    with suppress(OSError):
        if not (path / RUN_ID).exists():
            (path / RUN_ID).write_text(f"{uuid.uuid4()}\n", encoding="utf-8")
    _note(path, _recipe_of_run)


def _obeyed_files(path: Path) -> list[Path]:
    """Returns the recipe, the model's code and all its configs, all of which may name code."""
    found = [path / RECIPE] if (path / RECIPE).is_file() else []
    configs = (
        file
        for file in path.rglob("*.json")
        if file.parent != path / TRAINING  # skip the manifest and other hashes
        and not file.name.endswith(".index.json")
    )
    return found + sorted([*path.rglob("*.py"), *configs])


def _recipe_of_run(path: Path) -> list[Path]:
    return [path / "recipe.yaml", path / RUN_ID]


def _note(path: Path, files: Callable[[Path], list[Path]]) -> None:
    with suppress(OSError):  # without a note an evaluation requires trust=true
        note = _name(path, files(path))
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _is_noted(path: Path, files: Callable[[Path], list[Path]]) -> bool:
    try:
        return _name(path, files(path)).is_file()
    except OSError:
        return False


def _name(path: Path, files: Iterable[Path]) -> Path:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with open_file(file) as opened:
            digest.update(opened.read())
    return cache_dir() / "own" / digest.hexdigest()


def is_own_run(path: Path) -> bool:
    """Returns whether a run of this user has made this folder."""
    return _is_noted(path, _recipe_of_run)


def check_links(path: Path, key: str) -> None:
    """Raises a UserError if a link in another user's folder points outside it.

    Args:
        path: folder of a run or an evaluation. key: name of the folder in error messages.
    """
    if not is_own_run(path):
        _refuse_links(path, path, key, "remove the link, or put a copy of the file in its place.")


def check_model_links(path: Path) -> None:
    """Raises a UserError if a link in another user's checkpoint points outside it.

    A model in the hub's cache consists of links to files of the cache, ../../blobs/HASH.
    """
    cache = path.absolute().parent.parent
    root = cache if is_cached(path) else path
    trust = "if you trust who made it, add --trust=true."
    _refuse_links(path, root, "checkpoint", trust)


def is_cached(path: Path) -> bool:
    """Returns whether a model's folder is a snapshot in the hub's cache, named by its commit."""
    *_, model, snapshots, _ = ("", "", *path.absolute().parts)
    return snapshots == "snapshots" and model.startswith("models--")


def _refuse_links(path: Path, root: Path, key: str, hint: str) -> None:
    for folder, folders, files in os.walk(path):
        for link in (Path(folder, name) for name in (*folders, *files)):
            if link.is_symlink() and not _is_below(link, root):
                raise UserError(
                    f"{key} = {path}: no run of yours has made it here, and its link "
                    f"{link.relative_to(path)} leads out of it, to {os.readlink(link)}; {hint}"
                )


def _is_below(link: Path, folder: Path) -> bool:
    try:
        return link.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop
        return False


def unusual(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields entries of a stored recipe that no run writes, since Hydra would follow them."""
    if not is_stored(tree):
        yield "defaults"
    for entry in tree.get("defaults") or []:
        if isinstance(entry, dict) and [*entry.values()] == [None]:
            continue
        if entry not in ("schema", "_self_"):
            yield f"defaults: {entry}"
    yield from (str(key) for key in tree if key != "defaults" and key not in RECIPE_KEYS)


def refused_model(key: str, name: Any, folder: Path) -> Iterator[str]:
    """Yields a model named in another user's folder, if it lies elsewhere on this machine."""
    if not _model(name, folder):
        yield f"{key} = {name}"


def refused_base(path: Path) -> Iterator[str]:
    """Yields an adapter's base model as `refused_model` does."""
    base = None
    with suppress(UserError):  # reported when the adapter is loaded
        base = read_json(path / sources.ADAPTER_CONFIG).get("base_model_name_or_path")
    yield from refused_model(f"{sources.ADAPTER_CONFIG}: base_model_name_or_path", base, path)


def refused(cfg: Any, folder: Path, given: Collection[str] = ()) -> Iterator[str]:
    """Yields a recipe's untrusted entries in another user's folder, as `key = value`.

    Args:
        cfg: a recipe, as composed by Hydra or as stored.
        folder: the checkpoint's folder. given: keys that the command line sets.
    """
    tree: Any = OmegaConf.to_container(OmegaConf.create(cfg))
    for section, function, default in (
        ("reward", "function", None), ("benchmark", "reward", Benchmark().reward),
    ):  # fmt: skip
        for name, entry in (tree.get(section) or {}).items():
            if isinstance(entry, dict):  # a reward without a function uses its entry's name
                entry[function] = entry.get(function) or default or name
    yield from _refused(tree, ALLOWED, dataclasses.asdict(Recipe()), "", folder, given)


def _refused(
    tree: Mapping[str, Any],
    allowed: Mapping[str, Any],
    defaults: Mapping[str, Any],
    prefix: str,
    folder: Path,
    given: Collection[str],
) -> Iterator[str]:
    kind = ENTRIES.get(prefix.rstrip("."))
    of_entry = dataclasses.asdict(kind()) if kind is not None else None
    for name, value in tree.items():
        key = f"{prefix}{name}"
        default = of_entry if of_entry is not None else defaults.get(name, ...)
        if key in given or value == default:
            continue
        rule = allowed.get(name, allowed.get("*"))
        if isinstance(value, dict) and not callable(rule):
            below = default if isinstance(default, dict) else {}
            yield from _refused(value, rule or {}, below, f"{key}.", folder, given)
            continue
        is_computed = any("${" in str(text) for _, text in leaves({"": value}))
        is_allowed = callable(rule) and not is_computed and rule(value, folder)
        is_removed = value is None and kind is not None
        if not (is_allowed or is_removed):
            yield f"{key} = {as_written(value)}"
