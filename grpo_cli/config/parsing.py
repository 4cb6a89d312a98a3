"""Turns a composed config into a checked `Recipe`, and reports its mistakes in the user's terms."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from grpo_cli.config import interpolation
from grpo_cli.config.contradictions import contradictions
from grpo_cli.config.keys import ENTRIES, KNOBS, entry_field, flagged, is_among
from grpo_cli.config.knob import (
    TYPES,
    allowed,
    as_written,
    flags_of,
    value_at,
    violation,
)
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.renamed import other_names
from grpo_cli.config.sources import has_splits
from grpo_cli.data.settings import HeldOut, MixturePart
from grpo_cli.errors import UserError, first_line, listed, nearest
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.scoring.settings import Reward
from grpo_cli.training.settings import Callback

E = TypeVar("E", Reward, Benchmark, Callback, HeldOut, MixturePart)

# Mappings whose keys appear in names of folders and metrics.
NAMED = ("benchmark", "dataset.mixture", "dataset.held_out", "callbacks")


def parse(
    cfg: DictConfig | dict[str, Any],
    given: Collection[str] = (),
    checks: Sequence[Callable[[Recipe, Collection[str]], Iterable[str]]] = (),
    *,
    complete: bool = True,
) -> Recipe:
    """Parses a composed config into a checked `Recipe`.

    Args:
        given: full keys set on the command line; an unread one is an error even at its default.
        checks: checks by higher-level packages, which yield messages; called only if all values
            have the right type and range.
        complete: whether values that contradict one another, or that are missing, are an error.

    Raises:
        UserError: an unknown key, a value of another type, a value out of its range, a knob that
            nothing reads, or values that contradict one another. Every violation is named.
    """
    try:
        # Plain values first: a config composed by Hydra would accept a key added with `+`.
        composed = OmegaConf.create(cfg)
        interpolation.note(composed)
        tree = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(tree, dict)
        if tree.get("mixed_precision") is False:
            tree["mixed_precision"] = "no"  # YAML reads `no` as false
        tracking = tree.get("tracking")
        if isinstance(tracking, dict) and isinstance(backend := tracking.get("backend"), str):
            tracking["backend"] = [name.strip() for name in backend.split(",")]
        typed = OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.create(tree))
        recipe = cast(Recipe, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        raise UserError(omegaconf_message(error) or str(error)) from error
    for mapping, kind in ENTRIES.items():
        entries = value_at(recipe, mapping)
        for name, value in list(entries.items()):
            del entries[name]
            if value is not None:
                entries[name] = _entry(kind, f"{mapping}.{name}", value)
    for name, reward in recipe.reward.items():
        reward.function = reward.function or name
    names = {f"{mapping}.{name}": name for mapping in NAMED for name in value_at(recipe, mapping)}
    names |= {f"benchmark.{n}.modes.{m}": m for n, b in recipe.benchmark.items() for m in b.modes}
    for key, name in names.items():
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"{key}: its name may have letters, digits, _, - and dots.")
    problems = [*_range_violations(recipe)]
    if not problems:
        for check in checks:
            problems += check(recipe, given)
    if recipe.dataset.chat != "auto":
        recipe.dataset.chat = bool(recipe.dataset.chat)
    problems += [*_unread(recipe, given), *_unread_of_files(recipe, given)]
    if not recipe.has_episodes:
        problems += unread_of_episodes(recipe, given, "with tools or an environment")
    if complete:
        problems += contradictions(recipe, given)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return recipe


def with_steps(recipe: Recipe, prompts: int) -> Recipe:
    """Sets a recipe's `steps` so that it takes all prompts `epochs` times.

    The last step is complete, so that it may take the first prompts of another epoch.
    """
    if recipe.epochs is None:
        return recipe
    # 1e-9: a rounding error must not add a step to a whole number of steps.
    steps = max(1, math.ceil(recipe.epochs * prompts / recipe.prompts_per_step - 1e-9))
    return dataclasses.replace(recipe, steps=steps)


_KINDS = {
    Reward: "reward", Benchmark: "benchmark", HeldOut: "held-out set",
    MixturePart: "data set of a mixture", Callback: "callback",
}  # fmt: skip


def _entry(kind: type[E], key: str, value: Any) -> E:
    """Parses an entry that the user names, such as a reward or a benchmark."""
    fields = [f.name for f in dataclasses.fields(kind)]
    if not isinstance(value, dict):
        raise UserError(f"{key} = {value!r}: must be a mapping of {listed(fields)}.")
    if unknown := sorted(value.keys() - set(fields)):
        raise UserError(
            f"{key}.{unknown[0]}: there is no such key; a {_KINDS[kind]} has "
            f"{listed(fields)}.{nearest(unknown[0], fields)}"
        )
    try:
        return cast(E, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), value)))
    except OmegaConfBaseException as error:
        raise UserError(str(omegaconf_message(error, within=f"{key}."))) from error


def _range_violations(node: Any, prefix: str = "") -> Iterator[str]:
    for f in dataclasses.fields(node):
        value, key = getattr(node, f.name), prefix + f.name
        if dataclasses.is_dataclass(value):
            yield from _range_violations(value, key + ".")
        elif key in ENTRIES:
            for name, entry in value.items():
                yield from _range_violations(entry, f"{key}.{name}.")
        elif isinstance(value, dict):
            for name, v in value.items():
                if allowed(f.metadata):
                    yield from violation(f"{key}.{name}", v, f.metadata)
        else:
            for v in value if isinstance(value, list) else [value]:
                if str(f.type).startswith("list[str]") and not isinstance(v, str):
                    raise UserError(f"{key} = {value}: must be a list of names; {v!r} is none.")
                yield from violation(key, v, f.metadata)


def _unread(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    """Yields messages about knobs that nothing reads, given the values of the others."""
    defaults = Recipe()
    for key in flagged("read_if"):
        if key.startswith("model.build."):
            continue
        if key.startswith("model.chat_template") and recipe.benchmark:
            continue  # the benchmark's prompt is a chat too
        if key.startswith("generation.tools.") and recipe.runs_programs:
            continue
        other, *values = flags_of(KNOBS[key]).read_if
        found = value_at(recipe, other)
        ways = [*found] if isinstance(found, list) else [found]
        choices = KNOBS[other].metadata["choices"]
        if choices and any(way not in choices for way in ways):
            continue  # reported elsewhere
        if any(v in values if values else v not in (None, False, 0, "none") for v in ways):
            continue
        shown = ", ".join(map(str, found)) if isinstance(found, list) else found
        wanted = " or ".join(map(as_written, values))
        when = f"with {other} = {wanted}; it is {as_written(shown)}"
        when = when if values else f"when {other} is set"
        yield from unread(recipe, key, value_at(defaults, key), given, when)


def unread(
    recipe: Recipe, key: str, default: Any, given: Collection[str], when: str
) -> Iterator[str]:
    """Yields the message about an unread knob if it is set or given.

    Args:
        when: "with KEY = VALUE; it is OTHER" or "when KEY is set".
    """
    value = value_at(recipe, key)
    if key in given:
        yield f"{key} = {as_written(value)}: is only read {when}."
    elif value != default:
        back = f"{key}={as_written(default)} takes it back."
        yield f"{key} = {as_written(value)}: is only read {when}. {back}"


def unread_of_episodes(recipe: Recipe, given: Collection[str], when: str) -> Iterator[str]:
    """Yields messages about unread knobs of environments and episodes.

    Args:
        when: see `unread`.
    """
    defaults = Recipe()
    sections = flagged("episodes")
    for key, f in KNOBS.items():
        if is_among(key, sections) and not f.metadata["kind"]:
            yield from unread(recipe, key, value_at(defaults, key), given, when)


def _unread_of_files(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    """Yields messages about hub and folder knobs that the command line sets for other sources."""
    train, held_out = recipe.dataset.train, recipe.dataset.eval
    sources = {
        "dataset.subset": [train, held_out],
        "dataset.train_split": [train],
        "dataset.eval_split": [held_out],
    }
    for name, benchmark in recipe.benchmark.items():
        if benchmark.data:  # otherwise reported elsewhere
            key = f"benchmark.{name}"
            sources |= {f"{key}.subset": [benchmark.data], f"{key}.split": [benchmark.data]}
    parts = {f"dataset.held_out.{name}": held for name, held in recipe.dataset.held_out.items()}
    parts |= {f"dataset.mixture.{name}": part for name, part in recipe.dataset.mixture.items()}
    for key, part in parts.items():
        if part.data:
            sources |= {f"{key}.subset": [part.data], f"{key}.split": [part.data]}
    for key in sorted(sources.keys() & set(given)):
        files = [source for source in sources[key] if source is not None]
        if not any(map(has_splits, files)):
            there = f"the recipe has files: {listed(files)}" if files else "the recipe has none"
            shown = as_written(value_at(recipe, key))
            yield f"{key} = {shown}: is only read for a hub data set or a folder; {there}."


def omegaconf_message(error: BaseException, within: str = "") -> str | None:
    """Formats OmegaConf's error as one message; None for other errors.

    Args:
        within: prefix of the full key, with a trailing dot, if only a part of a recipe was parsed.
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for e in reversed(chain):
        key = str(getattr(e, "full_key", None) or "")
        if key == "recipe":
            return (
                "the recipe has no base: begin it with `defaults: [chat, _self_]`, or with a list "
                "of defaults whose first entry is `schema`."
            )
        if isinstance(e, (ConfigKeyError, ConfigAttributeError)) and key:
            return no_such_key(within + key)
        if isinstance(e, ValidationError) and key:
            return _wrong_type(within + key, first_line(e))
    if not isinstance(error, OmegaConfBaseException):
        return None
    place = f"{error.full_key}: " if error.full_key else ""
    return f"{within}{place}{first_line(error)}"


def _wrong_type(key: str, reason: str) -> str:
    """Returns the message for a value of the wrong type, given OmegaConf's reason."""
    if "is not a ListConfig" in reason:
        return f"{key}: must be a list, in quotes for the shell: '{key}=[...]'."
    entry = entry_field(key)
    field = entry[0] if entry else KNOBS.get(key)
    if field and "DictConfig" in reason and str(field.type).startswith("str"):
        return f'{key}: must be text, in quotes: "{{...}}".'
    kind, _, optional = str(field.type).partition(" | ") if field else ("", "", "")
    below = next((name for name in KNOBS if name.startswith(f"{key}.")), None)
    if field is None or kind.startswith("list") or (entry and entry[1]):
        return f"{key}: {reason}."
    if below or kind.startswith("dict"):
        return f"{key}: is a section, which takes no value; write {below or key + '.NAME'}=VALUE."
    given = re.search(r"[Vv]alue '(.*)' (?:of type|is not|for field)", reason)
    value = given[1] if given else "null"  # "is not Optional"
    what = ", ".join(filter(None, [TYPES.get(kind, "text"), allowed(field.metadata)]))
    or_null = ", or null" if optional else ""
    return f"{key} = {'null' if value == 'None' else value}: must be {what}{or_null}."


def no_such_key(key: str) -> str:
    """Returns the message for an unknown key, with the nearest known key."""
    return f"{key}: there is no such key.{nearest_key(key)}"


def nearest_key(key: str, known: Collection[str] = ()) -> str:
    """Suggests the knob meant by a misspelt key, among `known` or all knobs; "" without any."""
    known = known or KNOBS
    section, _, last = key.rpartition(".")
    for name in (key, last):
        if name in other_names():
            return other_names()[name].hint(name)
    beside = [k for k in known if k.rpartition(".")[0] == section]
    same = [k for k in known if k.rpartition(".")[2] == last]  # same name in another section
    initials = {k: "".join(word[0] for word in k.rpartition(".")[2].split("_")) for k in known}
    short = [k for k in known if initials[k] == last]  # lr: learning_rate
    chosen = same or [k for k in short if k in beside] or short
    if chosen:
        return f" Did you mean {' or '.join(chosen)}?"
    return nearest(key, beside) or nearest(key, known)
