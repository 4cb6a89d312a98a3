"""The judge's process of a test: runs the tests, which come from the data set, on the program.

It holds the tests and the channel of the verdict. The program is in another process, see
messages.py: the names that a test does not define are looked up there, and stand for handles.
"""

from __future__ import annotations

import builtins
import sys

from grpo_cli.sandbox.messages import BINARY, OPERATIONS, UNARY, BrokenError, Handle, Peer, builtin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType
    from typing import Any

MODULE = "tests"
PASSED = "+"
FAILED = "-"


class NotPassedError(Exception):
    """A unittest class has not passed; says why."""


def judge(
    source: int, sink: int, parts: tuple[str, str], entry_point: str | None, collected: list[str]
) -> str:
    """Runs one test; returns PASSED, or FAILED with the reason, empty if the program is gone."""
    program = Program(source, sink)
    try:
        program.outcome([])  # of the program itself, as it is imported
        _run(program, parts, entry_point, collected)
    except BaseException as error:
        reason = "" if isinstance(error, BrokenError) else _last_line(error)
        return FAILED + (str(error) if program.is_broken else reason or "failed")
    if program.is_broken:  # and the test has caught it
        return FAILED
    return PASSED if program.was_asked else f"{FAILED}the test asked the program for nothing"


def _run(
    program: Program, parts: tuple[str, str], entry_point: str | None, collected: list[str]
) -> None:
    module = type(sys)(MODULE)
    sys.modules[MODULE] = module
    sys.modules["solution"] = _Solution("solution", program)
    names = module.__dict__
    names["__builtins__"] = _Builtins(program)
    codes = [compile(part, "<test>", "exec", dont_inherit=True) for part in parts]
    used = {name for code in codes for name in _names(code)}
    names.update(program.shadows(used, entry_point))
    if "unittest" in used:  # its tests are run below
        _module("unittest").main = lambda *_, **__: None
    for code in codes:
        exec(code, names)
    if entry_point is not None and "check" in names:
        names["check"](eval(entry_point, names))
    for name in collected:
        _run_collected(names[name])


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            yield from _names(constant)


def _run_collected(test: Any) -> None:
    """Runs a test function, a unittest class, or a pytest class."""
    if not isinstance(test, type):
        test()
        return
    unittest = sys.modules.get("unittest")
    if unittest is not None and issubclass(test, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
        for _, trace in (*result.errors, *result.failures):
            raise NotPassedError(trace.strip().rpartition("\n")[2])
        if not result.wasSuccessful() or result.testsRun == len(result.skipped):
            raise NotPassedError(f"{test.__name__} has no test that passed")
        return
    for name in dir(test):
        if name.startswith("test"):
            instance = test()
            getattr(instance, "setup_method", lambda: None)()
            getattr(instance, name)()


def _last_line(error: BaseException) -> str:
    """Returns the last line of a traceback."""
    if isinstance(error, NotPassedError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    name = type(error).__name__
    return f"{name}: {text}" if text else name


class Program(Peer):
    """The program under test, as the judge reaches it."""

    def __init__(self, source: int, sink: int) -> None:
        super().__init__(source, sink, {**OPERATIONS, "module": _module})
        self.was_asked = False
        self.missing: set[str] = set()

    def ask(self, name: str, *arguments: Any) -> Any:
        self.was_asked = self.was_asked or name not in ("name", "defined")
        return super().ask(name, *arguments)

    def name(self, name: str) -> Any:
        """Returns what the program has under a name, for a test that does not define it.

        A module is this process's own, and so is what `math` has, whatever the program made of it.
        """
        if name in self.missing:  # it has said so, see `shadows`
            raise NameError(f"name {name!r} is not defined")
        value = self.ask("name", name)
        if name in sys.stdlib_module_names:
            return _only_called(value) if isinstance(value, Handle) else _module(name)
        if name in vars(_module("math")):
            return vars(_module("math"))[name]
        self.was_asked = self.was_asked or not isinstance(value, (Handle, type(sys)))
        return value

    def shadows(self, used: set[str], entry_point: str | None) -> dict[str, Any]:
        """Returns the function under test, if it has the name of one of Python's functions.

        In `assert sum(1, 2) == 3` the program's `sum` is meant, in `assert sum(f(3)) == 6` it is
        not: a test that uses another name of the program's, or several of Python's that the
        program has replaced, uses Python's.
        """
        known = vars(builtins).keys() | vars(_module("math")).keys()
        names = {entry_point} if entry_point else used & {*self.ask("defined", tuple(used))}
        self.missing = set() if entry_point else used - names
        ordinary = names - known - sys.stdlib_module_names
        shadows = names & known
        return {} if ordinary or len(shadows) != 1 else {n: self.ask("name", n) for n in shadows}

    def perform(self, name: str, arguments: tuple[Any, ...]) -> Any:
        target = arguments[0]
        is_iterated = name in ("iter", "next") and hasattr(type(target), "__next__")
        is_own = type(target).__module__ in OWN and name in (*UNARY, *BINARY, *ATTRIBUTES, *ITEMS)
        is_open = name not in ATTRIBUTES or not str.startswith(arguments[1], "_")
        is_known = id(target) in self.numbers
        if is_known and (name == "call" or is_iterated or (is_own and is_open)):
            return super().perform(name, arguments)
        raise TypeError(f"a program may not do this to an object of a test: {name}")

    def may_export(self, value: Any) -> bool:
        return callable(value) or hasattr(type(value), "__next__") or type(value).__module__ in OWN

    def exception_token(self, kind: type[BaseException]) -> str:
        return f"k{builtin(kind).__name__};"

    def exception(self, number: int, name: str, module: str, base: str) -> Any:
        """Returns the class to raise in place of an exception class of the program."""
        root = module.partition(".")[0]
        # unittest's own would skip a test.
        if root in sys.stdlib_module_names and root != "unittest":
            kind = vars(sys.modules.get(module, builtins)).get(name)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return kind
        parent = vars(builtins)[base]
        if not issubclass(parent, BaseException):
            raise ValueError
        members = {
            "handle_of": lambda self: self.__dict__["handle"],
            "__getattr__": lambda self, name: getattr(self.__dict__["handle"], name),
        }
        return type(name, (parent,), members)


OWN = (MODULE, "_io")  # objects of these modules' classes have attributes that a program may use
ATTRIBUTES = ("get", "set")
ITEMS = ("getitem", "setitem", "delitem")


def _only_called(function: Handle) -> Callable[..., Any]:
    """Hides the attributes of a function that has a module's name."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _module(name: str) -> Any:
    """Returns this process's own module of that name."""
    if name in (MODULE, "solution"):
        raise ImportError(name)
    __import__(name)
    return sys.modules[name]


class _Solution(type(sys)):  # type: ignore[misc]
    """The program as a module, for tests that import from `solution`."""

    def __init__(self, name: str, program: Program) -> None:
        super().__init__(name)
        self.__dict__["__getattr__"] = lambda name: _attribute(program, name)


def _attribute(program: Program, name: str) -> Any:
    try:
        if name == "__all__":
            return [n for n in program.ask("defined", None) if not n.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(name)
        return program.ask("name", name)
    except NameError as error:
        raise AttributeError(name) from error


class _Builtins(dict):  # type: ignore[type-arg]
    """Python's functions, and behind them the names of the program."""

    def __init__(self, program: Program) -> None:
        super().__init__(vars(builtins))
        self.program = program

    def __missing__(self, name: str) -> Any:
        return self.program.name(name)
