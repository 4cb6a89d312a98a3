"""Runs a data set's tests on the program, in the judge's process.

This process holds the tests and the channel of the verdict. The program runs in another process,
see peer.py. From the row alone, api.py decides which names a test looks up there.
"""

from __future__ import annotations

import builtins
import os
import sys

from grpo_cli.sandbox.messages import Codec
from grpo_cli.sandbox.peer import Peer
from grpo_cli.sandbox.proxies import Opaque, opaque_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MODULE = "tests"
TYPE_OF = "type of"  # name of the function that a test's type(x) and x.__class__ call
MODULES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}
PASSED = "+"
FAILED = "-"
OWN = (MODULE, "_io")  # modules whose objects have attributes that a program may use
ITERATING = ("iter", "next", "advance")
USABLE = {"str", "repr", "len", "getitem", "setitem", "delitem", "contains"}
USABLE |= {"plain", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", *ITERATING}
ANY = ("bool", "hash", "eq", "ne", "isinstance", "issubclass")
NAMES = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")  # of functions
# Standard-library exceptions that keep their class if the judge has imported their module.
EXCEPTIONS = {"json.decoder.JSONDecodeError", "decimal.InvalidOperation", "decimal.DivisionByZero"}
EXCEPTIONS |= {"dataclasses.FrozenInstanceError", "subprocess.CalledProcessError", "re.error"}
EXCEPTIONS |= {"queue.Full", "queue.Empty", "_queue.Empty", "statistics.StatisticsError"}
EXCEPTIONS |= {"struct.error", "zlib.error", "binascii.Error", "_csv.Error", "graphlib.CycleError"}
EXCEPTIONS |= {"sqlite3.IntegrityError", "sqlite3.OperationalError"}


def judge(source: int, sink: int, test: tuple[Any, ...]) -> str:
    """Runs one test; returns PASSED, or FAILED and the reason ("" if the program is gone)."""
    *rest, names, packages = test
    program = Program(source, sink, names)
    try:
        for package in packages:  # before the program can write a file that an import reads
            __import__(package)
        os.write(sink, b"\n")
        program.outcome([])  # the outcome of importing the program
        _run(program, *rest)
        program.forget()
        reason = None if program.was_asked else "the test asked the program for nothing"
    except BaseException as error:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        reason = f"{type(error).__name__}: {text}".removesuffix(": ")
    if program.broken is not None:  # regardless of what the test caught
        reason = program.broken
    return PASSED if reason is None else FAILED + reason


def _run(program: Program, codes: Any, entry_point: str | None, collected: list[str]) -> None:
    module = sys.modules[MODULE] = type(sys)(MODULE)
    solution = sys.modules["solution"] = type(sys)("solution")
    # Empty, so that a test's names are looked up one by one.
    solution.__dict__.update(__all__=[], __getattr__=program.attribute)
    for runner in {"unittest", "pytest"} & sys.modules.keys():  # the collected tests are run below
        sys.modules[runner].main = lambda *_, **__: None  # type: ignore[attr-defined]
    _guard_comparisons()
    _keep_path()
    names = module.__dict__
    names["__builtins__"] = _Builtins(program)
    for code in codes:
        exec(code, names)
    if entry_point is not None and "check" in names:
        is_name = entry_point.isidentifier()
        names["check"](program.value(entry_point) if is_name else eval(entry_point, names))
    cases = [name for name, value in names.items() if _is_case(value)]
    for name in dict.fromkeys([*collected, *cases]):
        _run_collected(names[name], program)


def _keep_path() -> None:
    """Restricts imports to the present folders, since a test may add its own."""
    known = tuple(os.path.realpath(folder) for folder in sys.path if folder)
    find_in = sys.path_hooks[-1]

    def find(folder: str) -> Any:
        if os.path.realpath(folder).startswith(known):
            return find_in(folder)
        raise ImportError(folder)

    sys.path_hooks[:] = [find]


def _is_case(value: Any) -> bool:
    """Returns whether a value is a unittest class with tests; its runner may hide failures."""
    unittest: Any = sys.modules.get("unittest")
    if not unittest or not isinstance(value, type) or not issubclass(value, unittest.TestCase):
        return False
    names = unittest.defaultTestLoader.getTestCaseNames(value)
    return value.__module__ == MODULE and bool(names)


def _run_collected(test: Any, program: Program) -> None:
    """Runs a test function, a unittest class, or a pytest class."""
    unittest = sys.modules.get("unittest")
    if unittest and isinstance(test, type) and issubclass(test, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
        for _, trace in (*result.errors, *result.failures):
            raise program.fail(trace.strip().rpartition("\n")[2])
        if not result.wasSuccessful() or result.testsRun == len(result.skipped):
            raise program.fail(f"{test.__name__} has no test that passed")
        return
    for function in _methods(test) if isinstance(test, type) else [test]:
        outcome = function()
        if hasattr(outcome, "cr_await"):  # the coroutine of an async test
            __import__("asyncio").run(outcome)


def _methods(test: type) -> Iterator[Any]:
    """Yields the tests of a pytest class, each bound to a new object after setup."""
    getattr(test, "setup_class", lambda: None)()
    for name in dir(test):
        if name.startswith("test"):
            instance = test()
            if setup := getattr(instance, "setup_method", None):
                setup(*[None] * (setup.__code__.co_argcount - 1))
            yield getattr(instance, name)


class JudgeCodec(Codec):
    """Sends no object of a test that a program must not use, and guards arrays that arrive."""

    def export(self, value: Any) -> int:
        kind = type(value)
        is_case = any(base.__module__ == "unittest.case" for base in kind.__mro__)
        is_open = callable(value) or hasattr(kind, "__next__") or kind.__module__ in OWN
        if is_open and not is_case:
            return super().export(value)
        raise TypeError(f"an object of the type {kind.__name__} cannot be passed to a program")

    def exception(self, number: int, name: str, module: str, base: Any) -> Any:
        if f"{module}.{name}" in EXCEPTIONS and module in sys.modules:
            return getattr(sys.modules[module], name)
        return super().exception(number, name, module, base)

    def array(self, value: Any) -> Any:
        return value.view(_guard_comparisons())


class Program(Peer):
    """The judge's connection to the program under test."""

    is_strict = True
    codec_type = JudgeCodec

    def __init__(self, source: int, sink: int, names: list[str]) -> None:
        super().__init__(source, sink, {})
        self.names = frozenset(names)  # names that belong to the program
        self.was_asked = False

    def ask(self, name: str, *arguments: Any) -> Any:
        self.was_asked = self.was_asked or name != "name"
        return super().ask(name, *arguments)

    def value(self, name: str) -> Any:
        """Looks up a name in the program."""
        value = self.ask("name", name)
        self.was_asked = self.was_asked or not isinstance(value, Opaque)
        return value

    def attribute(self, name: str) -> Any:
        """Looks up a name in the program, for tests that import from `solution`."""
        try:
            if not name.startswith("__"):
                return self.value(name)
        except NameError:
            pass
        raise AttributeError(name)

    def perform(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Performs the program's request on an object of the test that it was given."""
        target = arguments[0]
        kind = type(target)
        is_own = kind.__module__ in OWN
        is_open = name == "call" or name in ANY or (is_own and name in USABLE)
        is_open = is_open or (name in ITERATING and hasattr(kind, "__next__"))
        if name in ("get", "setattr", "delattr") and type(arguments[1]) is str:
            field = arguments[1]
            # Methods of its class belong to the test.
            is_open = name == "get" or not callable(getattr(kind, field, None))
            is_open = is_open and is_own and not field.startswith("_")
            is_open = is_open or (name == "get" and field in NAMES and callable(target))
        if is_open and id(target) in self.codec.numbers:
            return super().perform(name, arguments)
        if name == "get":
            raise AttributeError(f"an object of the test has no {arguments[1]} for a program")
        raise TypeError(f"a program may not do this to an object of a test: {name}")


class _Builtins(dict):  # type: ignore[type-arg]
    """Looks up names that a test does not define: Python's builtins, and the program's names."""

    def __init__(self, program: Program) -> None:
        own = {name: value for name, value in vars(builtins).items() if name not in program.names}
        super().__init__(own)
        self[TYPE_OF] = lambda x, own=type: _type_of(program, x) if own is type else own(x)
        self.program = program

    def __missing__(self, name: str) -> Any:
        if name in self.program.names:
            return self.program.value(name)
        if name in MODULES:
            return sys.modules[MODULES[name]]
        if name in sys.stdlib_module_names:
            return __import__(name)
        if hasattr(__import__("math"), name):
            return getattr(__import__("math"), name)
        raise NameError(f"name {name!r} is not defined")


def _type_of(program: Program, value: Any) -> Any:
    value = value if isinstance(value, BaseException) else opaque_of(value)
    if not issubclass(type(value), Opaque):
        return type(value).__base__ if hasattr(type(value), "is_guarded") else type(value)
    kind = program.ask("type", value)
    is_exception = isinstance(kind, type) and issubclass(kind, BaseException)
    return kind if is_exception else program.checked(kind, Opaque)


def _guard_comparisons(made: list[Any] = []) -> Any:  # noqa: B006 - done once
    """Makes comparisons of numpy and pytest fail if exactly one side is empty.

    Returns the class of all arrays, if numpy is imported.
    """
    numpy: Any = sys.modules.get("numpy")
    if made or numpy is None:
        return made and made[0]
    asarray = numpy.asarray

    def fail_if_one_is_empty(*sides: Any) -> None:
        if len({asarray(side).size == 0 for side in sides[:2]}) == 2:
            raise AssertionError("exactly one side is empty")

    class Array(numpy.ndarray):  # type: ignore[misc]
        is_guarded = True
        __array_priority__ = 1e6  # numpy calls this `__array_wrap__`, not that of a matrix operand

        def __array_wrap__(self, array: Any, context: Any = None, is_scalar: bool = False) -> Any:
            if context and context[0].__name__ in COMPARISONS:
                fail_if_one_is_empty(*context[1])
            return array.view(Array) if array.ndim else array[()]

    Array.__name__, Array.__module__ = "array", "numpy"  # for `repr`

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*args: Any, **kwargs: Any) -> Any:
            if function.__name__ in COMPARISONS:
                fail_if_one_is_empty(*args, *kwargs.values())
            result = function(*args, **kwargs)
            return result.view(Array) if type(result) is numpy.ndarray else result

        return perform

    made.append(Array)
    for module in filter(None, (numpy, sys.modules.get("numpy.testing"))):
        for name in (COMPARISONS | MAKERS) & vars(module).keys():
            setattr(module, name, guarded(getattr(module, name)))
    if approx := sys.modules.get("_pytest.python_api"):
        scalar: Any = approx.ApproxScalar
        equals = scalar.__eq__
        scalar.__eq__ = lambda self, other: getattr(other, "size", 1) and equals(self, other)
    return Array


COMPARISONS = {"allclose", "isclose", "array_equal", "array_equiv", "subtract", "equal", "less"}
COMPARISONS |= {"not_equal", "less_equal", "greater", "greater_equal", "assert_allclose"}
COMPARISONS |= {"assert_array_equal", "assert_array_almost_equal", "assert_almost_equal"}
COMPARISONS |= {"assert_equal", "assert_array_less"}
MAKERS = {"array", "asarray", "arange", "linspace", "ones", "zeros", "full", "eye"}
