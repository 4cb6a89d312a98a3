"""Defines proxies of the other side's objects; each operation on one is sent to that side."""

from __future__ import annotations

import _operator
import builtins
import itertools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    from grpo_cli.sandbox.peer import Peer

MAX_COMPARED = 10_000  # items of an iteration that are checked against the object's other answers

COMPARE, COMPUTE, UNARY, BUILTIN, READABLE = map(
    str.split,
    (
        "eq ne lt le gt ge",
        "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor",
        "neg pos invert",
        "str repr bool hash format dir next setattr delattr aiter",
        # Dunder names. Libraries look up other ones and trust the results.
        "name qualname module doc dict bases mro wrapped cause context notes members",
    ),
)
IN_PLACE = [f"i{name}" for name in COMPUTE]
SEEN = ("len", "iter", "getitem", "contains")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{n: getattr(_operator, n + "_" * (n in ("and", "or"))) for n in (*COMPARE, *COMPUTE, *UNARY)},
    **{n: getattr(_operator, n) for n in (*IN_PLACE, *SEEN[2:], "setitem", "delitem")},
    **{n: getattr(builtins, n) for n in (*BUILTIN, *SEEN[:2], "isinstance", "issubclass")},
    "type": type,
    "advance": next,
    "send": lambda generator, value: generator.send(value),
    "get": getattr,
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, kind: type(value).__exit__(value, kind, None, None),
    "aenter": lambda value: type(value).__aenter__(value),
    "aexit": lambda value, kind: type(value).__aexit__(value, kind, None, None),
    "copy": lambda value: __import__("copy").copy(value),
    "deepcopy": lambda value: __import__("copy").deepcopy(value),
    "run": lambda awaitable: _run(awaitable),
    "anext": lambda iterator: _run(anext(iterator)),
}


def _run(awaitable: Any, loops: list[Any] = []) -> Any:  # noqa: B006 - one loop for all
    if not loops:
        loops.append(__import__("asyncio").new_event_loop())
    return loops[0].run_until_complete(awaitable)


class Opaque:
    # A proxy of an object on the other side, as is its __doc__. It equals no value and no number.
    __slots__ = ("__weakref__", "_kind_", "_number_", "_peer_")
    __array_ufunc__ = None  # makes numpy leave operators to this class
    __doc__ = property(lambda self: self.__getattr__("__doc__"))  # type: ignore[assignment]
    __module__ = property(lambda self: self.__getattr__("__module__"))  # type: ignore[assignment]
    __class__ = property(lambda self: self._kind_)  # type: ignore[assignment]

    def __init__(self, peer: Peer, number: int, kind: type | None = None) -> None:
        object.__setattr__(self, "_peer_", peer)
        object.__setattr__(self, "_number_", number)
        object.__setattr__(self, "_kind_", kind or type(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name[2:-2] not in READABLE:
            raise AttributeError(name)
        return self._peer_.ask("get", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer_.ask("call", self, args, kwargs)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an object of the program is not an array")

    def __reversed__(self) -> Any:
        return reversed([*self])

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self._peer_.swallowed(self._peer_.ask("exit", self, kind), error)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._peer_.ask("deepcopy", self)

    def __await__(self) -> Any:
        return result_of("run", self).__await__()

    def __anext__(self) -> Any:
        return result_of("anext", self)

    async def __aenter__(self) -> Any:
        return await self._peer_.ask("aenter", self)

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self._peer_.swallowed(await self._peer_.ask("aexit", self, kind), error)

    def __instancecheck__(self, other: Any) -> bool:
        other = opaque_of(other)
        return isinstance(other, Opaque) and self._peer_.ask("isinstance", other, self) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return isinstance(other, Opaque) and self._peer_.ask("issubclass", other, self) is True


class Stream(Opaque):
    # One of Python's own iterators: consumed item by item, and exhausted for good.
    __slots__ = ("_items_",)
    __iter__ = lambda self: self  # noqa: E731
    __len__ = __getitem__ = None  # type: ignore[assignment]

    def __init__(self, peer: Peer, number: int, kind: type | None = None) -> None:
        super().__init__(peer, number, kind)
        object.__setattr__(self, "_items_", _items_of(peer.ask, "next", self))

    def __next__(self) -> Any:
        return next(self._items_)

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)  # type: ignore[attr-defined]


GENERATOR = type(_ for _ in ())


class Held(Opaque):
    # An object of a subclass of list, dict and so on: the base's contents are a value.
    __slots__ = ()
    PURE = ("count", "index", "keys", "values", "items", "issubset", "issuperset", "isdisjoint")

    def __getattr__(self, name: str) -> Any:
        return getattr(_plain(self), name) if name in Held.PURE else Opaque.__getattr__(self, name)

    def __getitem__(self, key: Any) -> Any:
        try:
            return _plain(self)[key]
        except (KeyError, TypeError):  # its own __missing__ or __getitem__ may handle the key
            return self._peer_.ask("getitem", self, key)


class Extended:
    """A value of a subclass of str, tuple and so on, or an exception; the rest stays remote."""

    def __getattr__(self, name: str) -> Any:
        return getattr(opaque_of(self), name)

    def __repr__(self) -> str:
        return repr(opaque_of(self))

    def __str__(self) -> str:
        plain: Any = next((k for k in (int, float, complex, str) if isinstance(self, k)), None)
        return str(plain(*plain.__getnewargs__(self)) if plain else opaque_of(self))


def opaque_of(value: Any) -> Any:
    if not issubclass(type(value), Extended):
        return value
    if "opaque" not in vars(value):  # an exception raised by the test itself
        vars(value)["opaque"] = type(value).opaque(*value.args, **vars(value)["named"])
    return vars(value)["opaque"]


def _plain(value: Any) -> Any:
    """Returns the value held by an object of a subclass; returns others unchanged."""
    if not isinstance(value, Held):
        return value
    peer, number = value._peer_, value._number_
    if number not in peer.seen:
        plain = peer.ask("plain", value)
        if type(plain) is not value._kind_:
            raise peer.fail("the program sent something that is not a message")
        peer.seen[number] = plain
    return peer.seen[number]


def _items_of(ask: Callable[..., Any], name: str, source: Any) -> Generator[Any, None, Any]:
    try:
        while True:
            yield ask(name, source)
    except StopIteration as error:  # ends here, even if the object has more
        return error.value


async def result_of(name: str, target: Opaque) -> Any:
    return target._peer_.ask(name, target)


def _method(name: str, on_plain: bool = False, is_reflected: bool = False) -> Callable[..., Any]:
    """Creates the method of an operator; for `Held` it uses the plain value."""

    def perform(self: Any, *others: Any) -> Any:
        operands = (*others, self) if is_reflected else (self, *others)
        if on_plain:
            return OPERATIONS[name](*map(_plain, operands))
        if name not in COMPARE:
            return self._peer_.computed(name, operands)
        if isinstance(others[0], Held) or not isinstance(others[0], Opaque):
            return NotImplemented  # the program must not learn the expected value
        return self._peer_.checked(self._peer_.ask(name, *operands), bool, Opaque)

    return perform


def _pass_on(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._peer_.ask(name, self, *arguments)


def _see(name: str) -> Callable[..., Any]:
    def answer(self: Any, *key: Any) -> Any:
        seen = self._peer_.seen.setdefault(self._number_, CachedAnswers(self))
        return seen.answer(name, *key)

    return answer


Stream.send = _pass_on("send")  # type: ignore[attr-defined]
for _name in SEEN:
    setattr(Opaque, f"__{_name}__", _see(_name))
for _name in (*BUILTIN, "setitem", "delitem", "copy", "enter"):
    setattr(Opaque, f"__{_name}__", _pass_on(_name))
for _name in (*UNARY, *IN_PLACE, *COMPARE, *COMPUTE):
    setattr(Opaque, f"__{_name}__", _method(_name))
for _name in (*COMPARE, *COMPUTE, "isub", "iand", "ixor", "len", "iter", "bool", "contains"):
    setattr(Held, f"__{_name}__", _method(_name, on_plain=True))
for _name in COMPUTE:
    setattr(Opaque, f"__r{_name}__", _method(_name, is_reflected=True))
    setattr(Held, f"__r{_name}__", _method(_name, on_plain=True, is_reflected=True))


class CachedAnswers:
    """Caches an object's answers to len, [], in and iteration, until the test changes an object.

    All answers belong to one state of the object, so they are repeated. A test fails if an object
    contradicts itself.
    """

    def __init__(self, target: Opaque) -> None:
        self.target, self.ask = target, target._peer_.ask
        self.answers: dict[str, tuple[Any, ...]] = {}  # (question, answer, key) by question, key

    def answer(self, name: str, *key: Any) -> Any:
        if name == "getitem" and type(key[0]) is int and key[0] < 0 and "len" in self.answers:
            key = (key[0] + self.answers["len"][1],)
        text = name + "".join(map(self.text, key))
        if text not in self.answers:
            answer = self.ask(name, self.target, *key)
            if name == "iter":  # stored with its items; each iteration is a copy
                (answer,) = itertools.tee(_items_of(self.ask, "advance", answer), 1)
            self.answers[text] = name, answer, *key
        answer = self.answers[text][1]
        return answer.__copy__() if name == "iter" else answer

    def contradicts(self) -> bool:
        """Returns whether the iterated items contradict another answer."""
        if "iter" not in self.answers or len(self.answers) == 1:
            return False
        size = self.answers["len"][1] if "len" in self.answers else MAX_COMPARED
        items = [*itertools.islice(self.answer("iter"), min(size + 1, MAX_COMPARED))]
        is_mapping = hasattr(self.target, "keys")
        return any(self._is_denied(items, is_mapping, *one) for one in self.answers.values())

    def _is_denied(
        self, items: list[Any], is_mapping: bool, name: str, answer: Any, key: Any = None
    ) -> bool:
        has_more = len(items) == MAX_COMPARED
        if name in ("iter", "len"):
            return name == "len" and len(items) != min(answer, MAX_COMPARED)
        if name == "contains":
            return (key in items) is not answer and not (answer and has_more)
        if is_mapping:
            return key not in items and not has_more
        try:
            item = items[key]
        except TypeError:  # not a position
            return False
        except IndexError:
            return not has_more
        answer = [*answer] if type(key) is slice else answer
        return self.text(item) != self.text(answer) and not (item is answer or item == answer)

    def text(self, value: Any) -> str:
        return str(self.target._peer_.codec.message(value, [], {}))
