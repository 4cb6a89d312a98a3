"""Messages between the process of a test and the process of the program under test.

    judge    ask("call", sort, ([3, 1, 2],), {})
    program  sort([3, 1, 2]), then: the result is None, the first list is now [1, 2, 3]

A value of a closed set of types arrives as a copy that the receiver rebuilds from text, so the
judge never runs a method of a class that the program has defined. Every other object stays where
it is and arrives as a `Handle`: to read its attributes, to call it or to iterate over it is a
message to the process that has it. A handle is equal to no plain value, and no operator passes a
plain operand on: the program is never told what a result is compared with.

runner.py and judge.py use this module inside the sandbox, where their code is run in one namespace.
"""

from __future__ import annotations

import _operator
import _thread
import builtins
import io
import sys
from os import read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_MESSAGE = 16 << 20  # bytes
MAX_PRINTED = 1 << 16  # characters that a call prints
READABLE = ("__name__", "__dict__", "__annotations__")  # with two underscores, through a handle
COMPARING = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint")  # methods

# The closed set. Values that cannot change are written in place, in these forms:
SIMPLE: dict[type, Callable[[Any], str]] = {
    type(None): lambda _: "N",
    type(...): lambda _: "E",
    bool: lambda value: "T" if value else "F",
    int: lambda value: f"i{value:x};",  # in decimal, it could have too many digits
    float: lambda value: f"f{value.hex()};",
    complex: lambda value: f"c{value.real.hex()},{value.imag.hex()};",
    str: lambda value: f"s{len(value)};{value}",
    bytes: lambda value: f"b{value.hex()};",
}
SEQUENCES = {"t": tuple, "z": frozenset}
RANGES = {"r": range, "l": slice}
# the type, and the arguments that make an equal one
NAMED: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.datetime": lambda value: (
        *(value.year, value.month, value.day, value.hour, value.minute, value.second),
        value.microsecond,
    ),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
}
# Values that can change are numbered: a list that is there twice stays one list, what a call does
# to its arguments is sent back, and a list may hold itself.
MUTABLE = {"L": list, "D": dict, "S": set, "B": bytearray}
MUTABLE_NAMED = {
    "Q": "collections.deque",
    "C": "collections.Counter",
    "O": "collections.OrderedDict",
    "U": "collections.defaultdict",
}

UNARY: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "repr": repr,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": _operator.index,
    "len": len,
    "iter": iter,
    "next": next,
    "abs": abs,
    "neg": _operator.neg,
}
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPUTE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")
BINARY = (*_COMPARE, *_COMPUTE)
OPERATIONS: dict[str, Callable[..., Any]] = {
    **UNARY,
    **{name: getattr(_operator, name) for name in BINARY},
    "get": getattr,
    "set": setattr,
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "getitem": _operator.getitem,
    "setitem": _operator.setitem,
    "delitem": _operator.delitem,
    "isinstance": isinstance,
}


class BrokenError(BaseException):
    """The other side is gone, or sent what is no message.

    No Exception: a test that expects one must not take this for it.
    """


class Handle:
    """An object of the other side."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        # Libraries look for names such as __array_interface__, and trust what they find.
        if name.startswith("__") and name.endswith("__") and name not in READABLE:
            raise AttributeError(name)
        if name in COMPARING:  # as the operators
            raise TypeError(f"an object of the program has no {name} with a plain value")
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._peer.ask("delitem", self, key)

    def __instancecheck__(self, other: Any) -> bool:
        other = getattr(type(other), "handle_of", lambda it: it)(other)
        return isinstance(other, Handle) and self._peer.ask("isinstance", other, self) is True

    __hash__ = object.__hash__

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("an object of the program cannot be copied or pickled")


def _unary(name: str) -> Callable[[Handle], Any]:
    return lambda self: self._peer.ask(name, self)


def _binary(name: str) -> Callable[[Handle, Any], Any]:
    def perform(self: Handle, other: Any) -> Any:
        if isinstance(other, Handle):
            return self._peer.ask(name, self, other)
        if name in ("eq", "ne"):
            return name == "ne"
        raise TypeError(f"an object of the program has no {name} with a plain value")

    return perform


for _name in UNARY:
    setattr(Handle, f"__{_name}__", _unary(_name))
for _name in BINARY:
    setattr(Handle, f"__{_name.strip('_')}__", _binary(_name))


def _extended(base: type) -> type:
    """Makes a class of plain values whose attributes are on the other side, as a namedtuple's."""
    members = {
        "handle_of": lambda self: self.__dict__["handle"],
        "__getattr__": lambda self, name: getattr(self.__dict__["handle"], name),
    }
    return type(f"program_{base.__name__}", (base,), members)


EXTENDED = {base: _extended(base) for base in (int, float, complex, str, bytes, tuple, frozenset)}
PLAIN_OF: dict[type, Callable[[Any], Any]] = {  # not by a method of the subclass
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex.__add__(value, 0),
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    frozenset: frozenset,
}


class Peer:
    """One side of the exchange: sends requests, and serves those of the other side meanwhile."""

    def __init__(self, source: int, sink: int, operations: dict[str, Callable[..., Any]]) -> None:
        self.source = source
        self.sink = sink
        self.operations = operations
        self.lock = _thread.RLock()
        self.exported: list[Any] = []
        self.numbers: dict[int, int] = {}  # id of an exported object: its place in the list
        self.received: dict[int, Any] = {}  # by the other side's number
        self.is_broken = False

    # What a side does with the other's objects; judge.py is stricter.

    def perform(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return self.operations[name](*arguments)

    def may_export(self, value: Any) -> bool:
        return True

    def exception_token(self, kind: type[BaseException]) -> str:
        names = kind.__name__, kind.__module__, builtin(kind).__name__
        return f"e{self._export(kind)};{self._token(names, {}, [])}"

    def exception(self, number: int, name: str, module: str, base: str) -> Any:
        """Returns the class to raise in place of an exception class of the other side."""
        return vars(builtins)[base]

    # Requests and replies

    def ask(self, name: str, *arguments: Any) -> Any:
        """Has the other side perform an operation; returns its result, or raises what it raised."""
        with self.lock:
            heap: list[Any] = []
            message = self._message((name, arguments), heap, {})
            self._send("?", message)
            return self.outcome(heap)

    def outcome(self, heap: list[Any]) -> Any:
        """Waits for a reply, and serves the other side's requests until it comes."""
        while True:
            kind, text = self._receive()
            if kind == "?":
                self._serve(text)
                continue
            outcome, printed = self._read(text, heap)[0]
            if printed and sys.stdout is not None:
                sys.stdout.write(printed)
            if kind == "=":
                return outcome
            raise self._raised(*outcome)

    def serve(self) -> None:
        """Serves requests until the other side is gone."""
        while True:
            kind, text = self._receive()
            if kind == "?":
                self._serve(text)

    def reply(self, run: Callable[[], Any]) -> bool:
        """Sends the outcome of a function; returns whether it raised nothing."""
        return self._reply(run, [], {})

    def _serve(self, text: str) -> None:
        heap: list[Any] = []
        (name, arguments), entries = self._read(text, heap)
        self._reply(lambda: self.perform(name, arguments), heap, entries)

    def _reply(self, run: Callable[[], Any], heap: list[Any], entries: dict[int, str]) -> bool:
        stdout, sys.stdout = sys.stdout, io.StringIO()
        known = len(heap)
        try:
            message = self._message((run(), sys.stdout.getvalue()[:MAX_PRINTED]), heap, entries)
            kind = "="
        except BrokenError:
            raise
        except BaseException as error:
            del heap[known:]
            kind = "!"
            printed = sys.stdout.getvalue()[:MAX_PRINTED]
            try:
                handle = error if self.may_export(error) else None
                outcome: Any = type(error), error.args, handle
                message = self._message((outcome, printed), heap, entries)
            except Exception:  # its arguments cannot be sent
                outcome = type(error), (str(error),), None
                message = self._message((outcome, printed), [], {})
        finally:
            sys.stdout = stdout
        self._send(kind, message)
        return kind == "="

    def _raised(self, kind: Any, args: tuple[Any, ...], handle: Any) -> BaseException:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise self.broken("the program sent something that is no exception")
        try:
            error = kind(*args)
        except Exception:
            error = kind.__new__(kind)
            error.args = args
        if "handle_of" in vars(kind):
            error.__dict__["handle"] = handle
        return error

    def broken(self, why: str) -> BrokenError:
        self.is_broken = True
        return BrokenError(why)

    # The pipes

    def _send(self, kind: str, text: str) -> None:
        data = (kind + text).encode("utf-8", "surrogatepass")
        message = memoryview(b"%d\n" % len(data) + data)
        try:
            while message:
                message = message[write(self.sink, message) :]
        except OSError:
            raise self.broken("") from None

    def _receive(self) -> tuple[str, str]:
        head = b""
        while not head.endswith(b"\n"):
            head += self._bytes(1)
            if len(head) > 12:
                raise self.broken("the program sent something that is no message")
        try:
            length = int(head)
            if not 0 < length <= MAX_MESSAGE:
                raise self.broken(f"the program's answer has over {MAX_MESSAGE >> 20} MiB")
            data = bytearray()
            while len(data) < length:
                data += self._bytes(length - len(data))
            text = data.decode("utf-8", "surrogatepass")
        except ValueError:
            raise self.broken("the program sent something that is no message") from None
        return text[0], text[1:]

    def _bytes(self, count: int) -> bytes:
        data = read(self.source, min(count, 1 << 16))
        if not data:
            raise self.broken("")
        return data

    # Values as text: "2;" "0;L3;i3;i1;i2;" "1;D0;" "t2;@L0;@D1;" is ([3, 1, 2], {})

    def _message(self, root: Any, heap: list[Any], entries: dict[int, str]) -> str:
        """Returns the text of a value and of the containers in it that are not as in `entries`."""
        numbers = {id(value): number for number, value in enumerate(heap)}
        token = self._token(root, numbers, heap)
        parts = []
        number = 0
        while number < len(heap):  # which grows
            entry = self._entry(heap[number], numbers, heap)
            if entries.get(number) != entry:
                parts.append(f"{number};{entry}")
            number += 1
        return f"{len(parts)};{''.join(parts)}{token}"

    def _entry(self, value: Any, numbers: dict[int, int], heap: list[Any]) -> str:
        items: Any = value
        if isinstance(value, dict):
            items = [part for pair in value.items() for part in pair]
        tokens = [self._token(item, numbers, heap) for item in items]
        return f"{_tag(value)}{len(tokens)};{''.join(tokens)}"

    def _token(self, value: Any, numbers: dict[int, int], heap: list[Any]) -> str:
        kind = type(value)
        if kind in SIMPLE:
            return SIMPLE[kind](value)
        if id(value) in numbers:
            return f"@{_tag(value)}{numbers[id(value)]};"
        if kind is Handle and value._peer is self:
            return f"y{value._number};"
        for tag, sequence in SEQUENCES.items():
            if kind is sequence:
                tokens = [self._token(item, numbers, heap) for item in value]
                return f"{tag}{len(tokens)};{''.join(tokens)}"
        for tag, span in RANGES.items():
            if kind is span:
                parts = value.start, value.stop, value.step
                return tag + self._token(parts, numbers, heap)
        if id(value) not in self.numbers and _tag(value):
            numbers[id(value)] = len(heap)
            heap.append(value)
            return f"@{_tag(value)}{numbers[id(value)]};"
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in NAMED and getattr(value, "tzinfo", None) is None:
            return f"v{name};{self._token(NAMED[name](value), numbers, heap)}"
        if kind.__module__ == "numpy":
            if kind.__name__ == "ndarray" and value.dtype.kind in "biufcUS":
                parts = tuple(value.ravel().tolist()), value.shape, value.dtype.str
                return f"a{self._token(parts, numbers, heap)}"
            if hasattr(value, "item") and kind.__name__ != "ndarray":
                return self._token(value.item(), numbers, heap)
        if isinstance(value, type) and builtin(value) is value:
            return f"k{value.__name__};"
        if isinstance(value, type) and issubclass(value, BaseException):
            return self.exception_token(value)
        if kind is type(sys):
            return f"m{value.__name__};"
        if not self.may_export(value):
            raise TypeError(f"an object of the type {kind.__name__} cannot be passed to a program")
        for base, plain in PLAIN_OF.items():
            if isinstance(value, base):
                return f"x{self._export(value)};{self._token(plain(value), numbers, heap)}"
        return f"{'w' if kind.__name__ == 'coroutine' else 'o'}{self._export(value)};"

    def _export(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.exported)
            self.exported.append(value)
        return self.numbers[id(value)]

    def _read(self, text: str, heap: list[Any]) -> tuple[Any, dict[int, str]]:
        """Returns the value of a message, and the text of its containers; fills `heap`."""
        try:
            return _Reader(self, text, heap).message()
        except BrokenError:
            raise
        except Exception as error:
            raise self.broken(
                f"the program sent something that is no message ({type(error).__name__})"
            ) from None

    def foreign(self, number: int, make: Callable[[], Any]) -> Any:
        """Returns what stands for an object of the other side: the same each time."""
        if number not in self.received:
            self.received[number] = make()
        return self.received[number]


def builtin(kind: type) -> type:
    """Returns the first of a class and its bases that is one of Python's own."""
    own = vars(builtins)
    return next((base for base in kind.__mro__ if own.get(base.__name__) is base), object)


def _tag(value: Any) -> str:
    """Returns the letter of a container that can change, or ""."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for tag, other in MUTABLE_NAMED.items():
        if name == other:
            return tag
    return next((tag for tag, base in MUTABLE.items() if isinstance(value, base)), "")


class _Reader:
    """Rebuilds the value of a message."""

    def __init__(self, peer: Peer, text: str, heap: list[Any]) -> None:
        self.peer = peer
        self.text = text
        self.position = 0
        self.heap = dict(enumerate(heap))
        self.objects = heap

    def message(self) -> tuple[Any, dict[int, str]]:
        entries, contents = {}, {}
        for _ in range(self.number()):
            number = self.number()
            start = self.position
            tag = self.letter()
            items = [self.value() for _ in range(self.number())]
            entries[number] = self.text[start : self.position]
            contents[number] = tag, items
        root = self.value()
        if self.position != len(self.text):
            raise ValueError
        for number, (tag, items) in contents.items():
            self.fill(self.container(tag, number), items)
        self.objects[:] = (self.heap[number] for number in range(len(self.heap)))
        return root, entries

    def fill(self, container: Any, items: list[Any]) -> None:
        container.clear()
        if isinstance(container, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                container[key] = value
        elif isinstance(container, set):
            container.update(items)
        else:
            container.extend(items)

    def container(self, tag: str, number: int) -> Any:
        if number not in self.heap:
            if tag in MUTABLE:
                self.heap[number] = MUTABLE[tag]()
            else:
                module, _, name = MUTABLE_NAMED[tag].partition(".")
                self.heap[number] = getattr(__import__(module), name)()
        return self.heap[number]

    def letter(self) -> str:
        self.position += 1
        return self.text[self.position - 1]

    def word(self) -> str:
        start, self.position = self.position, self.text.index(";", self.position) + 1
        return self.text[start : self.position - 1]

    def number(self) -> int:
        return int(self.word())

    def value(self) -> Any:
        tag = self.letter()
        if tag == "i":
            return int(self.word(), 16)
        if tag == "s":
            length = self.number()
            start, self.position = self.position, self.position + length
            if length < 0 or self.position > len(self.text):
                raise ValueError
            return self.text[start : self.position]
        if tag == "f":
            return float.fromhex(self.word())
        if tag in CONSTANTS:
            return CONSTANTS[tag]
        if tag == "@":
            return self.container(self.letter(), self.number())
        if tag in SEQUENCES:
            return SEQUENCES[tag]([self.value() for _ in range(self.number())])
        return getattr(self, f"value_{tag}")()

    def value_c(self) -> complex:
        real, imag = map(float.fromhex, self.word().split(","))
        return complex(real, imag)

    def value_b(self) -> bytes:
        return bytes.fromhex(self.word())

    def value_r(self) -> range:
        return range(*self.value())

    def value_l(self) -> slice:
        return slice(*self.value())

    def value_v(self) -> Any:
        name = self.word()
        if name not in NAMED:
            raise ValueError
        module, _, kind = name.partition(".")
        return getattr(__import__(module), kind)(*self.value())

    def value_a(self) -> Any:
        items, shape, dtype = self.value()
        if dtype[1] not in "biufcUS" or len(dtype) > 6:
            raise ValueError
        return __import__("numpy").array(items, dtype).reshape(shape)

    def value_k(self) -> type:
        kind = vars(builtins)[self.word()]
        if not isinstance(kind, type):
            raise ValueError
        return kind

    def value_m(self) -> Any:
        return self.peer.operations["module"](self.word())

    def value_e(self) -> Any:
        number, names = self.number(), self.value()
        return self.peer.foreign(number, lambda: self.peer.exception(number, *names))

    def value_y(self) -> Any:
        return self.peer.exported[self.number()]

    def value_o(self) -> Any:
        number = self.number()
        return self.peer.foreign(number, lambda: Handle(self.peer, number))

    def value_w(self) -> Any:
        return _result_of(self.value_o())

    def value_x(self) -> Any:
        handle, plain = self.value_o(), self.value()
        value = EXTENDED[type(plain)](plain)
        value.__dict__["handle"] = handle
        return value


CONSTANTS = {"N": None, "E": ..., "T": True, "F": False}


async def _result_of(handle: Handle) -> Any:
    return handle._peer.ask("run", handle)
