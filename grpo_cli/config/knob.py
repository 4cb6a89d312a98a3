"""Declares a knob with its default, help sentence and range, and checks values against these."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from grpo_cli.errors import nearest

T = TypeVar("T")
TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false"}
BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True)
class Arg:
    """Metadata of an argument of one loss or rule, declared in its signature.

    `slope: Annotated[float, Arg("Steepness of the gate.", gt=0)] = 2.0` is set by
    `loss.args.slope`.
    """

    doc: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str | bool, ...] | None = None
    hint: str = ""  # appended to the message about an out-of-range value


@dataclass(frozen=True)
class Flags:
    """Describes which commands read a knob and what depends on it. Knobs inherit their section's.

    Attributes:
        read_if: (key, value, ...): the knob is read only if the knob `key` has one of the values (a
            list must contain one) or, without values, if it is set. Setting an unread knob is an
            error.
        episodes: read only if tools or an environment answer the model's turns.
        training: only training reads the knob; an evaluation refuses it.
        evaluated_as: what an evaluation reads instead of the knob.
        evaluated_if: (key, value): an evaluation reads the knob only if `key` has this value.
        rows: "own": the knob describes the recipe's own rows, in whose place benchmarks are
            evaluated; "any": it also describes the rows of benchmarks.
        of_train: the knob describes dataset.train, and is dropped if another one is given.
        decides: what stored parts of a step depend on: "completions", "distribution" (they too, as
            tokens are no longer drawn from softmax(logits / temperature)), "rewards" or "updates".
        without_effect: neither a run's results nor an evaluation's depend on the knob, so that it
            may differ when a finished run is resumed.
        kept: a resumed run must have the knob's value of the checkpoint.
        of_start: the knob belongs to one start of a run, and is not stored.
        trusted: values that a recipe of another user may give, by the name of a rule in
            checkpoints/provenance.py. Without one, numbers, booleans and choices are trusted.
    """

    read_if: tuple[Any, ...] = ()
    episodes: bool = False
    training: bool = False
    evaluated_as: str = ""
    evaluated_if: tuple[str, str] | None = None
    rows: str = ""
    of_train: bool = False
    decides: str = ""
    without_effect: bool = False
    kept: bool = False
    of_start: bool = False
    trusted: str = ""


FLAGS = [f.name for f in dataclasses.fields(Flags)]


def knob(default: Any, doc: str, *, kind: type | None = None, **settings: Any) -> Any:
    """Returns a dataclass field with help sentence and range: >= ge, > gt, <= le, < lt, choices.

    Args:
        kind: the dataclass of a section that may be null.
        settings: as in `Arg` and in `Flags`.
    """
    flags = Flags(**{name: settings.pop(name) for name in FLAGS if name in settings})
    metadata = {**vars(Arg(doc, **settings)), "flags": flags, "kind": kind}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Knobs with the most common ranges.
at_least_0 = partial(knob, ge=0)
at_least_1 = partial(knob, ge=1)
above_0 = partial(knob, gt=0)
# `text` is for strings that name no file, code or address, `plain` for words and numbers.
text = partial(knob, trusted="anything")
plain = partial(knob, trusted="plain")


def read_if(*condition: Any) -> Callable[[type[T]], type[T]]:
    """Sets `read_if` on a dataclass's own knobs that have none.

    The knob named in the condition is skipped.
    """

    def apply(kind: type[T]) -> type[T]:
        for f in dataclasses.fields(kind):  # type: ignore[arg-type]
            is_condition = f.name == condition[0].rpartition(".")[2]
            if not (flags_of(f).read_if or is_condition):
                flags = dataclasses.replace(flags_of(f), read_if=condition)
                f.metadata = MappingProxyType({**f.metadata, "flags": flags})
        return kind

    return apply


def section(kind: type, **flags: Any) -> Any:
    """Returns a dataclass field that holds a group of knobs, described by the class's docstring."""
    metadata = {"doc": kind.__doc__, "flags": Flags(**flags), "kind": kind}
    return field(default_factory=kind, metadata=metadata)


def flags_of(f: dataclasses.Field[Any]) -> Flags:
    """Returns the flags of a knob's field."""
    flags: Flags = f.metadata["flags"]
    return flags


def knobs_of(kind: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yields (full key, field) of every knob of a dataclass, sections before their knobs."""
    for f in dataclasses.fields(kind):
        yield prefix + f.name, f
        if f.metadata["kind"]:
            yield from knobs_of(f.metadata["kind"], f"{prefix}{f.name}.")


def flagged(kind: type, name: str, *values: Any) -> list[str]:
    """Returns the keys of a dataclass whose flag has one of the values, or is set."""
    of = {key: getattr(flags_of(f), name) for key, f in knobs_of(kind)}
    return [key for key, flag in of.items() if (flag in values if values else flag)]


def value_at(node: Any, key: str) -> Any:
    """Returns the value of a full key."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


def allowed(meta: Mapping[str, Any]) -> str:
    """Describes the values that a knob's metadata allows; "" if its type suffices."""
    if meta.get("choices"):
        return "one of " + ", ".join(map(as_written, meta["choices"]))
    bounds = [f"{sign} {meta[key]:.12g}" for key, sign in BOUNDS if meta.get(key) is not None]
    return " and ".join(bounds)


def violation(key: str, value: Any, meta: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message if a value lies outside a knob's range or choices."""
    if meta.get("choices"):
        if value not in meta["choices"]:
            hint = nearest(str(value), map(as_written, meta["choices"]))
            yield f"{key} = {value!r}: must be {allowed(meta)}.{hint}"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        ge, gt, le, lt = (meta.get(bound) for bound, _ in BOUNDS)
        inside = (
            math.isfinite(value)
            and (ge is None or value >= ge)
            and (gt is None or value > gt)
            and (le is None or value <= le)
            and (lt is None or value < lt)
        )
        if not inside:
            more = f" {meta['hint']}" if meta.get("hint") else ""
            what = allowed(meta) if math.isfinite(value) else "a finite number"
            yield f"{key} = {value}: must be {what}.{more}"


def as_written(value: Any) -> str:
    """Formats a knob's value as in YAML and on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
