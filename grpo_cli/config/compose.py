"""Composes a config from a command line with Hydra, and shortens Hydra's errors.

A recipe is a Hydra primary config: `recipe=NAME` becomes `--config-name NAME`, and
`recipe=./my.yaml` also adds its folder. Hydra handles the rest: override grammar, --cfg, --info,
--help, multirun, completion.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.algorithm.settings import Advantage, Loss
from grpo_cli.config import parsing
from grpo_cli.config.command_line import (
    DEFAULT_RECIPE,
    SHORT_OPTIONS,
    as_text,
    as_words,
    recipe_files,
    split_options,
    split_recipe,
)
from grpo_cli.config.keys import KNOBS, flat
from grpo_cli.config.knob import as_written, flagged
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.renamed import drop_schedules
from grpo_cli.data.settings import PROMPT_COLUMNS, Dataset
from grpo_cli.distributed.settings import Distributed
from grpo_cli.errors import UserError, listed, nearest, typed_line
from grpo_cli.files import read_yaml, reason
from grpo_cli.generation.settings import Generation, Vllm
from grpo_cli.models.settings import Adapter, Build, Model

RECIPES = "grpo_cli.recipes"  # package of the shipped recipes
BARE = "_bare"  # base of `grpo score`, and of `grpo eval` without a recipe
STORED = "_stored"  # name of a recipe stored by a run

# Hydra creates no folder and no logging: grpo makes the run's folder after its checks.
QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.searchpath=[pkg://grpo_cli.recipes]",
    "hydra.help.header='grpo COMMAND [recipe=NAME] [group=choice ...] [key=value ...]'",
    "hydra.help.footer='docs/knobs.md explains every key. --hydra-help: flags of Hydra.'",
)
# Hints for a value that is none of the group's choices.
INSTEAD_OF_A_CHOICE = {
    "model": " A model on the hub or in a folder: model.path={choice}.",
    "dataset": " A file or a hub name: dataset.train={choice}.",
    "reward": " A function of your own: reward.NAME.function=my_module:my_function.",
}
LISTED = ("reward", "benchmark")  # groups that accept several choices together
# Beginnings of overrides of mappings, in which the user chooses the key names.
OPEN_KEYS = tuple(
    key + sign
    for key, f in KNOBS.items()
    for sign in (".=" if key not in LISTED else ".")
    if str(f.type).startswith("dict")
)


def groups() -> list[str]:
    """Returns the config groups that ship with the tool."""
    folders = (p for p in recipe_files()[0].parent.iterdir() if p.is_dir())
    return sorted(p.name for p in folders if any(p.glob("*.yaml")))


def compose_and_call(
    argv: list[str],
    task: Callable[[DictConfig], None],
    default: str = DEFAULT_RECIPE,
    *,
    only_this_file: bool = False,
) -> None:
    """Composes the recipe that the command line names and calls `task` with it.

    Args:
        default: the recipe if the command line names none; `BARE` has no model and no data.
        only_this_file: reads only the named recipe, which a run has stored. Otherwise Hydra would
            prefer a schema.yaml beside the recipe over grpo's own.

    With --cfg, --info or --help, Hydra prints and `task` is not called. With --multirun `task` is
    called once per job, sequentially.

    Raises:
        UserError: no such recipe. Errors of `task`, Hydra and OmegaConf also propagate.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises instead of printing and exiting
    register_schema()
    folder, name, rest = split_recipe(as_words(argv), default)
    options, overrides = split_options(rest)
    sweeps = bool({"-m", "--multirun"} & {*options})
    overrides = [
        word if sweeps and re.search(r"=.*[,(]", word) else as_text(word) for word in overrides
    ]
    short = [o for o in options if re.match("-[^-]", o) and o.split("=")[0] not in SHORT_OPTIONS]
    problems = [f"{o}: there is no such option; write -{o}, or key=value." for o in short]
    left = {"--json", "--submit"} & {*options}  # the commands that have them have taken them
    problems += [f"{o}: this command has no such option." for o in left]
    problems += _problems_of_words(overrides, sweeps)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    overrides += _without_rows(overrides, folder, trees := _trees(folder, name))
    tree = {} if folder is None else trees[-1]
    names_itself, shown = bool(tree.get("recipe")), name
    if problems := [*_problems_of_sections(tree, _choices_of(trees[:-1]))]:
        raise UserError("\n".join(f"recipe = {name}: {problem}" for problem in problems))
    chosen = {word.lstrip("+").partition("=")[0] for word in overrides} & {*groups()}
    unnamed = chosen - {"benchmark", *_choices_of(trees)}
    choices = _choices_of(trees) | dict(w.lstrip("+").split("=", 1) for w in overrides if "=" in w)
    for group in {*choices} & {*groups()}:
        if folder is not None:  # a damaged file is refused before Hydra reads it
            _read(folder / group / f"{choices[group]}.yaml")
    if only_this_file or (names_itself and is_stored(tree)):
        drop_schedules(tree)
        # Choosing another group entry drops the stored arguments of the old one.
        for group in ("loss", "advantage", "optimizer"):
            if any(word.startswith(f"{group}=") for word in overrides):
                tree.get(group, {}).pop("args", None)
        name = STORED
    elif folder is not None and unnamed and tree.get("defaults"):
        # A choice needs an entry in the defaults, which the recipe's own values override.
        entries = [entry for entry in tree["defaults"] if entry != "_self_"]
        entries += [{group: None} for group in sorted(unnamed)]
        tree["defaults"] = [*entries, "_self_"]
        name = STORED
    if name == STORED:
        store: Any = ConfigStore.instance()
        store.store(name=name, node=tree)
    options += ["--config-name", name]
    if folder is not None and not only_this_file:
        # As config path, a user's recipe overrides a shipped one of the same name. A folder that
        # only adds groups cannot be the config path, which must hold the recipe.
        own = (folder / f"{shown}.yaml").is_file()
        options += ["--config-path" if own else "--config-dir", str(folder)]
    if not names_itself and "--hydra-help" not in options:
        overrides = [f"recipe={shown}", *overrides]
    # Hydra would print its own message for an error that passes through it; catch errors before.
    raised: list[BaseException] = []

    def guarded(cfg: DictConfig) -> None:
        if raised:  # a sweep ends with the first job that fails or stops
            return
        job = HydraConfig.get()
        if job.mode is RunMode.MULTIRUN:  # the jobs of a sweep must not share a folder
            cfg.output_dir = f"{cfg.output_dir}-{job.job.num}"
            if os.environ.get("RANK", "0") == "0":
                print(f"\njob {job.job.num}: {' '.join(job.overrides.task)}")
        _replace_rewards(cfg)
        try:
            task(cfg)
        except BaseException as error:
            raised.append(error)

    try:
        with tempfile.TemporaryDirectory(prefix="grpo-sweep-") as sweep:  # for multirun.yaml
            quiet = (*QUIET_HYDRA, f"hydra.sweep.dir='{sweep}'")
            sys.argv = ["grpo", *options, *quiet, *map(_allow_new_key, overrides)]
            hydra.main(version_base="1.3", config_path="pkg://grpo_cli.recipes", config_name=name)(
                guarded
            )()
    except yaml.YAMLError as error:  # for example, a duplicate key
        raise UserError(f"recipe = {shown}: cannot be read: {reason(error)}.") from error
    except (HydraException, OmegaConfBaseException):  # explained by `error_message`
        raise
    except Exception as error:  # raised by Hydra; errors of `task` are stored in `raised`
        cause = typed_line(error)
        raise UserError(f"recipe = {shown}: cannot be composed: {cause}.") from error
    except SystemExit as done:  # raised by --help
        if done.code:
            raise
    if raised:
        raise raised[0]


def shipped(name: str) -> dict[str, Any] | None:
    """Returns a shipped recipe, without overrides, as nested dicts; None if there is none."""
    if name not in {path.stem for path in recipe_files()}:
        return None
    register_schema()
    of_run, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # it looks elsewhere
    with hydra.initialize_config_module("grpo_cli.recipes", version_base="1.3"):
        cfg = hydra.compose(name)
    GlobalHydra.instance().hydra = of_run
    tree: Any = OmegaConf.to_container(cfg)
    return {"recipe": name, **{k: v for k, v in tree.items() if k != "recipe"}}


def _replace_rewards(cfg: DictConfig) -> None:
    """Drops the recipe's own rewards and their arguments if the command line chooses `reward=`.

    Hydra merges a recipe's values over a group's choice. A reward that is no longer chosen would
    stay if the recipe gives it an argument.
    """
    words, of_hydra = HydraConfig.get().overrides.task, HydraConfig.get().overrides.hydra
    if not any(word.startswith("reward=") for word in words):
        return
    own = [word for word in words if re.match(r"\+{0,2}reward[=.]", word)]
    loader = GlobalHydra.instance().config_loader()
    chosen = loader.load_configuration(BARE, [*of_hydra, *own], RunMode.RUN).reward
    removed = [w[len("~reward.") :].partition("=")[0] for w in words if w.startswith("~reward.")]
    cfg.reward = {name: chosen[name] for name in chosen or {} if name not in removed}


def _trees(folder: Path | None, name: str, above: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Returns a recipe's file and those that its defaults name, the base first."""
    tree, found = _read(_file(folder, name)), []
    for entry in tree.get("defaults") or []:
        if isinstance(entry, str) and entry not in ("schema", "_self_", name, *above):
            found += _trees(folder, entry, (*above, name))
    return [*found, tree]


def _file(folder: Path | None, name: str) -> Path:
    """Returns the file of a recipe or of a group's choice: the user's own before the shipped."""
    shipped = recipe_files()[0].parent / f"{name}.yaml"
    own = shipped if folder is None else folder / f"{name}.yaml"
    return own if own.is_file() else shipped


def _choices_of(trees: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the choice of each group that these recipes name."""
    entries = [e for tree in trees for e in tree.get("defaults") or [] if isinstance(e, dict)]
    return {key.rpartition(" ")[2]: choice for e in entries for key, choice in e.items()}


def _without_rows(
    overrides: Sequence[str], folder: Path | None, trees: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Returns the words that drop the recipe's own rows where dataset.train gives others.

    What its choice of `dataset` says of them goes with them, unless it is given too; a note says
    so.
    """
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    choice = _choices_of(trees).get("dataset")
    is_other = "dataset.train" in given and "dataset.train=null" not in overrides
    if not is_other or "dataset" in given or not choice:
        return []
    own: set[str] = set().union(*(tree.get("dataset") or {} for tree in trees))
    of_choice = _read(_file(folder, f"dataset/{choice}"))
    defaults = dataclasses.asdict(Dataset())
    kept = {*own, *(key.removeprefix("dataset.") for key in given)}
    gone = [
        k
        for k in flagged(Dataset, "of_train")
        if k not in kept and of_choice.get(k, defaults[k]) != defaults[k]
    ]
    words = [f"dataset.{key}={as_written(defaults[key])}" for key in gone if key != "columns"]
    columns = {f"dataset.columns.{name}" for name in of_choice.get("columns", ())}
    words += [f"~{key}" for key in sorted(columns - given) if "columns" in gone]
    if str(of_choice.get("prompt")).strip("{}") in PROMPT_COLUMNS:
        gone = [key for key in gone if key != "prompt"]  # found by its name in other rows too
    if gone and os.environ.get("RANK", "0") == "0":
        names = listed(f"dataset.{key}" for key in gone)
        print(f"note: with dataset.train, dataset={choice} leaves out {names}", file=sys.stderr)
    others = re.compile(r"eval\.every$|dataset\.(eval$|test_split_size|held_out)|benchmark")
    own_rows = {"held_out", "test_split_size"} & own or any("benchmark" in tree for tree in trees)
    if "eval" in gone and not own_rows and not any(map(others.match, given)):
        words.append("eval.every=0")
    return words


def _problems_of_sections(tree: Mapping[str, Any], inherited: Collection[str]) -> Iterator[str]:
    """Yields a message for each group whose choice stands where its section should.

    Args:
        inherited: the groups that the bases of this recipe name, so that it overrides them.
    """
    for group in groups():
        value = tree.get(group)
        if value is None or isinstance(value, dict) or "${" in str(value):
            continue
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
        shown = f"[{', '.join(names)}]" if isinstance(value, list) else names[0]
        meant = INSTEAD_OF_A_CHOICE.get(group, "").format(choice=shown)
        if not meant or {*names} <= {*_choices(group)}:
            entry = f"{'override ' * (group in inherited)}{group}: {shown}"
            meant = f" A choice is an entry of the defaults, before _self_: `- {entry}`."
        yield f"{group} = {shown}: is a section, which takes no value.{meant}"


def _problems_of_words(overrides: Iterable[str], sweeps: bool) -> Iterator[str]:
    """Yields a message for each word that is no choice of a group and no value of a knob.

    Args:
        sweeps: whether a value may be a list of values to try.
    """
    stray = [word for word in overrides if "=" not in word and not word.startswith("~")]
    if stray:
        runs = [word for word in stray if Path(word, "recipe.yaml").is_file()]
        yield (
            f"{listed(stray)}: write key=value or --key value, recipe=NAME or FILE.yaml; a list is "
            "one word, such as optimizer.betas=[0.9,0.95]."
            + (f" resume={runs[0]} continues the run." if runs else "")
        )
        return
    typed = OmegaConf.structured(Recipe(model=Model(build=Build())))
    for word in overrides:
        key, equals, value = word.partition("=")
        known = _choices(key)
        several = key not in LISTED and re.fullmatch(r"\[.*,.*\]", value)
        if known and equals and (several or re.fullmatch(r"|null|true|false|[\d.]+", value)):
            yield f"{word}: must be one of {listed(known)}."
        elif re.match(r"[a-z]", key) and not (known or "/" in key or "@" in key or sweeps):
            yield from _problems_of_value(typed, word)


def _problems_of_value(typed: DictConfig, word: str) -> Iterator[str]:
    """Yields the message about a word whose key is not a knob, or whose value has another type."""
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
        if not (override.is_sweep_override() or word.startswith(("hydra.", *OPEN_KEYS))):
            OmegaConf.update(typed, override.key_or_group, override.value())
    except (HydraException, OmegaConfBaseException) as error:
        yield error_message(error)


def _choices(group: str) -> list[str]:
    """Returns the shipped choices of a group; [] if there is no such group."""
    return [p.stem for p in (recipe_files()[0].parent / group).glob("*.yaml")] if group else []


@functools.cache
def register_schema() -> None:
    """Registers the typed `Recipe` with Hydra as `schema`, the first default of every recipe.

    The choices of adapter, loss, advantage, distributed and generation begin with `_defaults`.
    These reset the values of an earlier choice, for example in a stored recipe. For generation they
    cover only the engine's own knobs; for adapter also the model's quantization.
    """
    store: Any = ConfigStore.instance()
    store.store(name="schema", node=Recipe)
    nothing: dict[str, Any] = {"model": {"path": "none"}, "dataset": {"train": "none"}}
    engine = Generation.engine
    groups = ["schema", {"reward": None}, {"generation": engine}, {"distributed": "ddp"}]
    groups.append({"adapter": "none"})
    store.store(name=BARE, node={"defaults": [*groups, "_self_"], **nothing})
    adapter = {"adapter": Adapter, "model": {"quantization": Model.quantization}}
    store.repo.setdefault("adapter", _Unlisted())
    store.store(group="adapter", name="_defaults", node=adapter, package="_global_")
    for group, node in (
        ("loss", Loss),
        ("advantage", Advantage),
        ("distributed", Distributed),
        ("generation", {"vllm": Vllm}),
    ):
        store.repo.setdefault(group, _Unlisted())
        store.store(group=group, name="_defaults", node=node)


class _Unlisted(dict[str, Any]):
    """A group of Hydra's store that hides `_defaults` from help and completion."""

    def keys(self) -> Any:
        return [name for name in self if not name.startswith("_")]


def given_keys(cfg: DictConfig) -> frozenset[str]:
    """Returns the full keys whose values the current job's command line changes.

    A key that the recipe sets and the command line resets to its default is excluded, since this is
    how to undo the recipe's value.

    Args:
        cfg: the job's composed config.
    """
    job = HydraConfig.get()
    choices: list[str] = []
    given: set[str] = set()
    for override in OverridesParser.create().parse_overrides(list(job.overrides.task)):
        key, value = override.key_or_group, override.value()
        if "." not in key and not isinstance(value, dict):
            choices.append(override.input_line or "")
            if key in ("steps", "epochs") and value is not None:  # only one of the two can be given
                given.add(key)
        elif not override.is_delete():
            given |= flat({key: value}).keys()
    defaults = OmegaConf.structured(Recipe)
    at_default = {k for k in given if _value_at(cfg, k) == _value_at(defaults, k)}
    if at_default:
        # Compose again with the command line's choices but without its values.
        loader = GlobalHydra.instance().config_loader()
        words = [*job.overrides.hydra, *choices]
        before = loader.load_configuration(job.job.config_name, words, RunMode.RUN)
        given -= {k for k in at_default if _value_at(before, k) != _value_at(defaults, k)}
    return frozenset(given)


def _value_at(cfg: DictConfig, key: str) -> Any:
    return OmegaConf.select(cfg, key, throw_on_missing=False)


def _allow_new_key(override: str) -> str:
    """Prefixes an override that may add a reward, benchmark or renamed column."""
    if override.startswith(OPEN_KEYS) or re.match(r"[\w.]+=\{", override):
        return f"++{override}"
    group, equals, choices = override.partition("=")
    if group == "benchmark" and equals and choices != "null":  # in no recipe's defaults
        for name in choices.strip("[]").split(","):
            if name not in (known := _choices("benchmark")) and "." in name:
                raise UserError(
                    f"benchmark = {name}: there are {listed(known)}; give a file as "
                    "benchmark.NAME.data=FILE."
                )
        return f"+benchmark=[{choices.strip('[]')}]"
    return override


def _read(path: Path) -> dict[str, Any]:
    """Parses a recipe's file; {} if there is no such file."""
    return read_yaml(path) if path.is_file() else {}


def is_stored(tree: Mapping[str, Any]) -> bool:
    """Returns whether a run stored this recipe; otherwise a user wrote it."""
    return list(tree.get("defaults") or [])[:2] == ["schema", "_self_"]


def error_message(error: BaseException) -> str:
    """Formats an error of Hydra or OmegaConf as one message: key, value, nearest known name."""
    plain = parsing.omegaconf_message(error)
    if plain is not None:
        return plain
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: cannot be read; in a list, text with special characters has quotes "
            """of its own, such as 'generation.stop=["</s>"]'."""
        )
    override = getattr(error, "override", None)
    if match := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", str(error)):
        key, values = match.groups()
        return f"{key} = {values}: write a list as {key}=[{values}]; with -m each value has a run."
    given = f"{override}: " if override else ""
    text = " ".join(f"{given}{error} {error.__cause__ or ''}".split())
    unknown = re.search(r"(?:In .* full_key: |Could not override ')([^\s'=]+)(?:[\s']|$)", text)
    if unknown and not _choices(unknown[1]):  # for a group, Hydra explains how to add it
        return parsing.no_such_key(unknown[1])
    if match := re.search(r"Could not (?:find|load) '([^'/]+)/([^']+)'", text):
        group, choice = match.groups()
        options = _choices(group)
        meant = INSTEAD_OF_A_CHOICE.get(group, "").format(choice=choice)
        return (
            f"{group} = {choice}: there is no {group}/{choice}.yaml; there are "
            f"{listed(options)}.{nearest(choice, options)}{meant}"
        )
    return text


def complete(argv: list[str], commands: Iterable[str]) -> None:
    """Completes a command line in the shell: Hydra's words, the subcommands, the recipes."""
    register_schema()
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    current = "" if line.endswith(" ") or not words else words[-1]
    before = words[1:-1] if current else words[1:]
    names = [p.stem for p in recipe_files()]
    asked = "query" in argv[-1]
    if asked and not before:
        print(" ".join(c for c in commands if c.startswith(current)))
        return
    if asked and current.startswith("recipe="):
        print(" ".join(f"recipe={name}" for name in names))
        return
    chosen = [w.removeprefix("recipe=") for w in before if w.startswith("recipe=")]
    name = next((n for n in chosen if n in names), DEFAULT_RECIPE)
    overrides = [w for w in before[1:] if not w.startswith("recipe=")]
    os.environ["COMP_LINE"] = " ".join(["grpo", *overrides, current])
    sys.argv = ["grpo", *argv]
    hydra.main(version_base="1.3", config_path="pkg://grpo_cli.recipes", config_name=name)(
        lambda cfg: None
    )()
