"""Declares a knob with its default, help sentence and range, and checks values against these."""

from __future__ import annotations

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


def knob(
    default: Any,
    doc: str,
    *,
    read_if: tuple[Any, ...] = (),
    schedulable: bool = False,
    training: bool = False,
    kind: type | None = None,
    **limits: Any,
) -> Any:
    """Returns a dataclass field with help sentence and range: >= ge, > gt, <= le, < lt, choices.

    Args:
        read_if: (key, value, ...): the knob is read only if the knob `key` has one of the values (a
            list must contain one) or, without values, if it is set. Setting an unread knob is an
            error.
        schedulable: the knob may be scheduled, since nothing is built from its first value.
        training: only training reads the knob; an evaluation refuses it.
        kind: the dataclass of a section that may be null.
        limits: as in `Arg`.
    """
    flags = {"read_if": read_if, "schedulable": schedulable, "training": training, "kind": kind}
    metadata = {**vars(Arg(doc, **limits)), **flags}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Knobs with the most common ranges.
at_least_0 = partial(knob, ge=0)
at_least_1 = partial(knob, ge=1)
above_0 = partial(knob, gt=0)


def read_if(*condition: Any) -> Callable[[type[T]], type[T]]:
    """Sets `read_if` on a dataclass's own knobs that have none.

    The knob named in the condition is skipped.
    """

    def apply(kind: type[T]) -> type[T]:
        for f in dataclasses.fields(kind):  # type: ignore[arg-type]
            is_condition = f.name == condition[0].rpartition(".")[2]
            if not (f.metadata["read_if"] or is_condition):
                f.metadata = MappingProxyType({**f.metadata, "read_if": condition})
        return kind

    return apply


def section(kind: type, *, training: bool = False) -> Any:
    """Returns a dataclass field that holds a group of knobs, described by the class's docstring."""
    metadata = {"doc": kind.__doc__, "training": training, "kind": kind}
    return field(default_factory=kind, metadata=metadata)


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


def scheduled_violation(key: str, to: float, meta: Mapping[str, Any], kind: Any) -> Iterator[str]:
    """Yields messages about the final value `to` of a knob's schedule."""
    yield from violation(f"schedules.{key}.to", to, meta)
    if kind in ("int", int) and math.isfinite(to) and to % 1:
        yield f"schedules.{key}.to = {to}: must be a whole number."


def as_written(value: Any) -> str:
    """Formats a knob's value as in YAML and on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
