"""The closed list of types whose values are sent as copies, and how such values are rebuilt."""

from __future__ import annotations


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SIMPLE: tuple[Any, ...] = (int, float, str, tuple)
PLAIN = {f"builtins.{kind.__name__}" for kind in _SIMPLE}  # only subclasses of these are rebuilt
_TIMES = ("date", "time", "datetime")
_TEXTS = ["decimal.Decimal", "uuid.UUID"]
_TEXTS += [f"pathlib.{n}" for n in ("PosixPath", "PurePosixPath", "PureWindowsPath")]
_TEXTS += [f"ipaddress.IPv{n}{k}" for n in "46" for k in ("Address", "Network", "Interface")]
# The closed list. None, bool, int, float and str are JSON's own; a tuple is sent as its items.
# Other immutable values have the arguments that rebuild them, and the method's name.
_as_text, _as_span = (lambda v: (str(v),)), (lambda v: (v.start, v.stop, v.step))
FIXED: dict[str, tuple[Callable[[Any], tuple[Any, ...]], str]] = {
    **{f"builtins.{kind.__name__}": (kind.__getnewargs__, "") for kind in (*_SIMPLE, complex)},
    "builtins.bytes": (lambda v: (bytes.hex(v),), "fromhex"),
    "builtins.range": (_as_span, ""),
    "builtins.slice": (_as_span, ""),
    "builtins.frozenset": (lambda v: (tuple(v),), ""),
    "fractions.Fraction": (lambda v: (v.numerator, v.denominator), ""),
    "datetime.timedelta": (lambda v: (v.days, v.seconds, v.microseconds), ""),
    "datetime.timezone": (lambda v: (v.utcoffset(None), v.tzname(None)), ""),
    **{f"datetime.{n}": (lambda v: (v.isoformat(),), "fromisoformat") for n in _TIMES},
    **dict.fromkeys(_TEXTS, (_as_text, "")),
}
# Mutable values are numbered. A list that occurs twice stays one list, changes by a call to its
# arguments are sent back, and a list may contain itself.
MUTABLE = [f"builtins.{n}" for n in ("list", "dict", "set", "bytearray")]
MUTABLE += [f"collections.{n}" for n in ("deque", "Counter", "OrderedDict", "defaultdict")]
DTYPES = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
DTYPES |= {"b1", "f2", "f4", "f8", "c8", "c16"}  # and strings


def listed(kind: type) -> str:
    """Returns the first class on the closed list among a class and its bases, or ""."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((name for name in names if name in FIXED or name in MUTABLE), "")


def class_of(name: str) -> Any:
    module, _, kind = name.partition(".")
    return getattr(__import__(module), kind)


def is_plain_class(value: Any) -> bool:
    if not isinstance(value, type) or issubclass(AssertionError, value):
        return value is object  # a test that expects one of the others would accept all
    names = {*FIXED, *MUTABLE, "builtins.bool"}
    return f"builtins.{value.__name__}" in names or issubclass(value, BaseException)


def is_dtype(dtype: str) -> bool:
    return dtype in DTYPES or (dtype[0] in "US" and dtype[1:].isdecimal())


def make(name: str, kind: Any, *parts: Any) -> Any:
    return getattr(kind, FIXED[name][1])(*parts) if FIXED[name][1] else kind(*parts)


def plain_value(value: Any, name: str) -> Any:
    """Converts an object to a value of its base class `name`."""
    if name in MUTABLE:
        return fill(class_of(name)(), items_of(value))
    return make(name, class_of(name), *FIXED[name][0](value))


def items_of(value: Any) -> list[Any]:
    """Returns the items of a container, read by its base's methods."""
    kind = class_of(listed(type(value)))
    if not issubclass(kind, dict):
        return [*kind.__iter__(value)]
    parts = [part for pair in kind.items(value) for part in pair]
    return [value.default_factory, *parts] if hasattr(value, "default_factory") else parts


def fill(container: Any, items: list[Any]) -> Any:
    container.clear()
    if hasattr(container, "default_factory"):
        container.default_factory, *items = items
    if isinstance(container, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(items)
    return container
