"""Encodes the values that the two sides exchange as messages, and decodes them.

A value whose type is on the closed list is sent as a copy, which the receiver rebuilds from JSON
with the list's own classes. Any other object is sent as a number, and arrives as a proxy.

    ([3, 1, 2], {})  is sent as  [[[0, 0, 3, 1, 2], [1, 1]], ["t", ["@", 0, 0], ["@", 1, 1]]]
"""

from __future__ import annotations

import _json
import builtins

from grpo_cli.sandbox.proxies import GENERATOR, Extended, Held, Opaque, Stream, opaque_of, result_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from grpo_cli.sandbox.peer import Peer

LARGE = 1 << 62  # larger integers are sent in base 16

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


class Codec:
    """Encodes and decodes the messages of one side, and numbers the objects that are not copied."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.exported: list[Any] = []
        self.numbers: dict[int, int] = {}  # id of an exported object -> its index in the list
        self.received: dict[tuple[str, int], Any] = {}  # by kind and the other side's number
        self.passed: list[int] = []  # the other side's own objects in the present message

    def export(self, value: Any) -> int:
        """Returns the number by which the other side can refer to an object."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.exported)
            self.exported.append(value)
        return self.numbers[id(value)]

    def exception_tree(self, kind: type[BaseException]) -> list[Any]:
        if issubclass(kind, Extended):  # belongs to the other side
            return ["y", vars(kind)["number"]]
        base = next(base for base in kind.__bases__ if issubclass(base, BaseException))
        is_own = vars(builtins).get(base.__name__) is base
        of = base.__name__ if is_own else self.exception_tree(base)
        return ["e", self.export(kind), kind.__name__, kind.__module__, of]

    def exception(self, number: int, name: str, module: str, base: Any) -> Any:
        """Creates the class to raise instead of an exception class of the other side."""
        base = vars(builtins)[base] if isinstance(base, str) else base
        if not issubclass(base, BaseException):
            raise ValueError
        base = Exception if base is BaseException else base  # asyncio drops a CancelledError
        bases = (base,) if issubclass(base, Extended) else (Extended, base)
        members = {"number": number, "opaque": Opaque(self.peer, number)}
        keep = lambda error, *_, **named: error.__dict__.update(named=named)  # noqa: E731
        return type(name, bases, {**members, "__init__": keep})

    def error_parts(self, error: BaseException | None) -> Any:
        """Returns the arguments with which the other side calls `error_of`."""
        if error is None:
            return None
        itself = None if self.peer.is_strict else error
        kind = type(error)
        own = vars(builtins).get(kind.__name__) is kind
        return kind.__name__ if own else kind, error.args, itself, self.error_parts(error.__cause__)

    def error_of(self, kind: Any, args: Any, opaque: Any, cause: Any) -> BaseException:
        """Rebuilds an error of the other side."""
        kind = vars(builtins).get(kind) if isinstance(kind, str) else kind
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise self.peer.fail("the program sent something that is not an exception")
        try:
            error = kind(*args)
        except Exception:
            error = kind.__new__(kind)
            error.args = args
        if isinstance(error, Extended):
            vars(error)["opaque"] = opaque
        error.__cause__ = None if cause is None else self.error_of(*cause)
        return error

    def array(self, value: Any) -> Any:
        return value  # the judge's guards it

    def message(self, root: Any, heap: list[Any], known: dict[int, str]) -> str:
        """Encodes a value, and those of its containers that differ from `known`."""
        numbers = {id(value): number for number, value in enumerate(heap)}
        tree = self._tree(root, numbers, heap)
        entries = []
        for number, value in enumerate(heap):  # grows during the loop
            items = [self._tree(item, numbers, heap) for item in _contents(value)]
            entry = [number, MUTABLE.index(_listed(type(value))), *items]
            if number not in known or known[number] != as_json(entry):
                entries.append(entry)
        return as_json([entries, tree])

    def _tree(self, value: Any, numbers: dict[int, int], heap: list[Any]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and -LARGE < value < LARGE):
            return value
        if kind is tuple:
            return ["t", *(self._tree(item, numbers, heap) for item in value)]
        if kind is int or value is ...:
            return ["i", f"{value:x}"] if kind is int else ["E"]
        value = opaque_of(value)
        if issubclass(type(value), Opaque):
            self.passed.append(value._number_)
            return ["y", value._number_]
        name = _listed(kind)
        is_exact = name == f"{kind.__module__}.{kind.__qualname__}"
        if is_exact and name in MUTABLE:
            if id(value) not in numbers:
                numbers[id(value)] = len(heap)
                heap.append(value)
            return ["@", MUTABLE.index(name), numbers[id(value)]]
        if is_exact:
            return ["v", name, *(self._tree(part, numbers, heap) for part in FIXED[name][0](value))]
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            letter, size = value.dtype.kind, value.dtype.itemsize
            dtype = f"{letter}{size // 4 if letter == 'U' else size}"
            if _is_dtype(dtype):
                value = value.astype(value.dtype.newbyteorder("="))
                return ["a", value.tobytes().hex(), dtype, *value.shape]
        if isinstance(value, (type, type(len))):
            own = vars(builtins).get(value.__name__) is value
            if own and (self.peer.is_strict or _is_plain_class(value)):
                return ["k", value.__name__]
            if isinstance(value, type) and issubclass(value, BaseException):
                return self.exception_tree(value)
        number = self.export(value)
        if name in MUTABLE:
            return ["h", number, MUTABLE.index(name)]
        if name:
            return ["x", number, self._tree(plain_value(value), numbers, heap)]
        if hasattr(kind, "__next__") and type(kind.__next__) is not type(_listed):
            return ["g", number, kind is GENERATOR]
        return ["w" if kind.__name__ == "coroutine" else "o", number]

    def read(self, tree: Any, heap: list[Any]) -> tuple[Any, dict[int, str]]:
        """Decodes a message; returns its value and the text of its containers, and fills `heap`."""
        try:
            entries, root = tree
            boxes = dict(enumerate(heap))
            filled = [
                (self._box(boxes, tag, number), [self._value(item, boxes) for item in items])
                for number, tag, *items in entries
            ]
            value = self._value(root, boxes)
            for box, items in filled:
                _fill(box, items)
            heap[:] = (boxes[number] for number in range(len(boxes)))
        except Exception as error:
            why = f"the program sent something that is not a message ({type(error).__name__})"
            raise self.peer.fail(why) from None
        return value, {entry[0]: as_json(entry) for entry in entries}

    def _box(self, boxes: dict[int, Any], tag: int, number: int) -> Any:
        if number not in boxes:
            boxes[number] = _class_of(MUTABLE[tag])()
        return boxes[number]

    def _value(self, tree: Any, boxes: dict[int, Any]) -> Any:
        match tree:
            case None | bool() | int() | float() | str():
                return tree
            case ["@", tag, number]:
                return self._box(boxes, tag, number)
            case ["t", *parts]:
                return tuple([self._value(part, boxes) for part in parts])
            case ["v", name, *parts] if name in FIXED and name not in PLAIN:
                return _make(name, _class_of(name), *(self._value(part, boxes) for part in parts))
            case ["i", digits]:
                return int(digits, 16)
            case ["E"]:
                return ...
            case ["a", data, dtype, *shape] if _is_dtype(dtype):
                numpy = __import__("numpy")
                array = numpy.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()
                return self.array(array) if shape else array[()]
            case ["k", name] if not self.peer.is_strict or _is_plain_class(vars(builtins)[name]):
                return vars(builtins)[name]
            case ["y", number]:
                return self.exported[number]
            case ["e", number, name, module, base]:
                base = self._value(base, boxes)
                create = lambda _, *known: self.exception(*known)  # noqa: E731
                return self._foreign("e", number, create, name, module, base)
            case ["x", number, plain]:
                return self._foreign("x", number, _extended, self._value(plain, boxes))
            case ["g", number, is_generator]:
                return self._foreign("o", number, Stream, GENERATOR if is_generator else Stream)
            case ["h", number, tag]:
                return self._foreign("o", number, Held, _class_of(MUTABLE[tag]))
            case ["o" | "w" as tag, number]:
                opaque = self._foreign("o", number, Opaque)
                return result_of("run", opaque) if tag == "w" else opaque
        raise ValueError

    def _foreign(self, tag: str, number: int, make: Callable[..., Any], *parts: Any) -> Any:
        """Returns the proxy of an object of the other side, always the same one."""
        if (tag, number) not in self.received:
            self.received[tag, number] = make(self.peer, number, *parts)
        return self.received[tag, number]


def _listed(kind: type) -> str:
    """Returns the first class on the closed list among a class and its bases, or ""."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((name for name in names if name in FIXED or name in MUTABLE), "")


def _class_of(name: str) -> Any:
    module, _, kind = name.partition(".")
    return getattr(__import__(module), kind)


def _is_plain_class(value: Any) -> bool:
    if not isinstance(value, type) or issubclass(AssertionError, value):
        return value is object  # a test that expects one of the others would accept all
    names = {*FIXED, *MUTABLE, "builtins.bool"}
    return f"builtins.{value.__name__}" in names or issubclass(value, BaseException)


def _is_dtype(dtype: str) -> bool:
    return dtype in DTYPES or (dtype[0] in "US" and dtype[1:].isdecimal())


def _make(name: str, kind: Any, *parts: Any) -> Any:
    return getattr(kind, FIXED[name][1])(*parts) if FIXED[name][1] else kind(*parts)


def plain_value(value: Any) -> Any:
    """Converts an object to a value of its base class on the closed list."""
    name = _listed(type(value))
    if name in MUTABLE:
        return _fill(_class_of(name)(), _contents(value))
    return _make(name, _class_of(name), *FIXED[name][0](value))


def _contents(value: Any) -> list[Any]:
    """Returns the items of a container, read by its base's methods."""
    kind = _class_of(_listed(type(value)))
    if not issubclass(kind, dict):
        return [*kind.__iter__(value)]
    parts = [part for pair in kind.items(value) for part in pair]
    return [value.default_factory, *parts] if hasattr(value, "default_factory") else parts


def _fill(container: Any, items: list[Any]) -> Any:
    container.clear()
    if hasattr(container, "default_factory"):
        container.default_factory, *items = items
    if isinstance(container, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(items)
    return container


def _extended(peer: Peer, number: int, plain: Any) -> Any:
    name = _listed(type(plain))
    kind: Any = type(f"program_{type(plain).__name__}", (Extended, type(plain)), {})
    value = _make(name, kind, *FIXED[name][0](plain))
    value.__dict__["opaque"] = Opaque(peer, number)
    return value


class _Settings:
    strict, object_hook, object_pairs_hook, memo = True, None, None, dict[str, str]()
    parse_float, parse_int, parse_constant = float, int, float


scan: Any = _json.make_scanner(_Settings)  # type: ignore[arg-type]
_parts = (None, None, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
_encode: Any = _json.make_encoder(*_parts)  # type: ignore[arg-type]


def as_json(tree: Any) -> str:
    return "".join(_encode(tree, 0))
