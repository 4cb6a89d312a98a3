"""The judge's process of a test: runs the tests, which come from the data set, on the program.

It holds the tests and the channel of the verdict. The program is in another process, see
messages.py. Which names of a test are looked up there is decided by api.py, from the row alone.
"""

from __future__ import annotations

import builtins
import sys

from grpo_cli.sandbox.messages import Extended, Opaque, Peer, opaque_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MODULE = "tests"
TYPE_OF = "type of"  # what a test's type(x) and x.__class__ call
MODULES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}
PASSED = "+"
FAILED = "-"
OWN = (MODULE, "_io")  # objects of these modules' classes have attributes that a program may use
USABLE = ("str", "repr", "bool", "len", "iter", "next", "hash", "eq", "ne", "lt", "le", "gt", "ge")
USABLE += ("add", "sub", "mul", "truediv", "getitem", "setitem", "delitem", "contains", "plain")
NAMES = ("__name__", "__qualname__", "__doc__", "__module__")  # of functions, for functools.wraps
# Of the standard library, exceptions that arrive as what they are if the judge has their module.
EXCEPTIONS = {
    *("json.decoder.JSONDecodeError", "decimal.InvalidOperation", "decimal.DivisionByZero"),
    *("dataclasses.FrozenInstanceError", "queue.Empty", "_queue.Empty", "queue.Full", "re.error"),
    *("struct.error", "zlib.error", "binascii.Error", "subprocess.CalledProcessError"),
    *("statistics.StatisticsError", "graphlib.CycleError", "sqlite3.Error", "csv.Error"),
    *("sqlite3.IntegrityError", "sqlite3.OperationalError", "asyncio.exceptions.QueueEmpty"),
    *("asyncio.exceptions.QueueFull", "asyncio.exceptions.InvalidStateError", "_csv.Error"),
    *("asyncio.exceptions.CancelledError", "xml.etree.ElementTree.ParseError"),
    *("configparser.NoSectionError", "configparser.NoOptionError", "uuid.SafeUUID"),
}


class NotPassedError(Exception):
    """A unittest class has not passed; says why."""


def judge(source: int, sink: int, test: tuple[Any, ...]) -> str:
    """Runs one test; returns PASSED, or FAILED with the reason, empty if the program is gone."""
    codes, entry_point, collected, names, packages = test
    program = Program(source, sink, names)
    try:
        program.outcome([])  # of the program itself, as it is imported
        _run(program, codes, entry_point, collected, packages)
        for number in [*program.seen]:
            program.forget(number)
    except BaseException as error:
        reason = program.broken if program.broken is not None else _last_line(error)
        return FAILED + (reason or "failed" * (program.broken is None))
    if program.broken is not None:  # and the test has caught it
        return FAILED + program.broken
    return PASSED if program.was_asked else f"{FAILED}the test asked the program for nothing"


def _run(
    program: Program, codes: Any, entry_point: str | None, collected: list[str], packages: list[str]
) -> None:
    module = type(sys)(MODULE)
    sys.modules[MODULE] = module
    sys.modules["solution"] = _Solution("solution", program)
    for package in packages:
        __import__(package)
    program.empty = _guard_comparisons()
    if unittest := sys.modules.get("unittest"):  # its tests are run below
        unittest.main = lambda *_, **__: None
    names = module.__dict__
    names["__builtins__"] = _Builtins(program)
    for code in codes:
        exec(code, names)
    if entry_point is not None and "check" in names:
        names["check"](eval(entry_point, names))
    for name in collected:
        _run_collected(names[name])


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

    is_strict = True

    def __init__(self, source: int, sink: int, names: list[str]) -> None:
        super().__init__(source, sink, {})
        self.names = frozenset(names)  # that are the program's
        self.was_asked = False
        self.empty: Any = None  # the class of empty arrays

    def ask(self, name: str, *arguments: Any) -> Any:
        self.was_asked = self.was_asked or name != "name"
        return super().ask(name, *arguments)

    def value(self, name: str) -> Any:
        """Returns what the program has under a name."""
        value = self.ask("name", name)
        self.was_asked = self.was_asked or not isinstance(value, Opaque)
        return value

    def perform(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Does what the program asks for to an object of the test that it was given."""
        target = arguments[0]
        kind = type(target)
        if id(target) in self.numbers:
            is_own = kind.__module__ in OWN
            field = arguments[1] if name in ("get", "setattr", "delattr") else ""
            if name == "call" or (name in ("iter", "next") and hasattr(kind, "__next__")):
                return super().perform(name, arguments)
            if name == "get" and field in NAMES and callable(target):
                return getattr(target, field)
            if is_own and name in USABLE:
                return super().perform(name, arguments)
            is_open = type(field) is str and field and not field.startswith("_")
            # A method of its class is the test's own.
            if is_own and is_open and (name == "get" or not callable(getattr(kind, field, None))):
                return super().perform(name, arguments)
        if name == "get":
            raise AttributeError(f"an object of the test has no {arguments[1]} for a program")
        raise TypeError(f"a program may not do this to an object of a test: {name}")

    def export(self, value: Any) -> int:
        kind = type(value)
        if callable(value) or hasattr(kind, "__next__") or kind.__module__ in OWN:
            return super().export(value)
        raise TypeError(f"an object of the type {kind.__name__} cannot be passed to a program")

    def exception(self, number: int, name: str, module: str, base: str) -> Any:
        """Returns the class to raise in place of an exception class of the program."""
        if f"{module}.{name}" in EXCEPTIONS and module in sys.modules:
            return getattr(sys.modules[module], name)
        parent = vars(builtins)[base]
        if not issubclass(parent, BaseException):
            raise ValueError
        return type(name, (Extended, parent), {"number": number})

    def exception_tree(self, kind: type[BaseException], own: type) -> list[Any]:
        number = vars(kind).get("number")  # of a class of the program
        return ["k", own.__name__] if number is None else ["y", number]

    def array(self, value: Any) -> Any:
        return value if value.size or self.empty is None else value.view(self.empty)


class _Solution(type(sys)):  # type: ignore[misc]
    """The program as a module, for tests that import from `solution`."""

    def __init__(self, name: str, program: Program) -> None:
        super().__init__(name)
        self.__dict__["__all__"] = []  # the names that a test uses are looked up as others are
        self.__dict__["__getattr__"] = lambda name: _attribute(program, name)


def _attribute(program: Program, name: str) -> Any:
    try:
        if name.startswith("__"):
            raise AttributeError(name)
        return program.value(name)
    except NameError as error:
        raise AttributeError(name) from error


class _Builtins(dict):  # type: ignore[type-arg]
    """Python's functions but for those that are the program's, and behind them the program."""

    def __init__(self, program: Program) -> None:
        own = {name: value for name, value in vars(builtins).items() if name not in program.names}
        super().__init__(own)
        self[TYPE_OF] = lambda value: _type_of(program, value)
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
        return type(value)
    kind = program.ask("type", value)
    is_exception = isinstance(kind, type) and issubclass(kind, BaseException)
    return kind if is_exception else program.checked(kind, Opaque)


def _guard_comparisons() -> type | None:
    """Makes comparisons of numpy and pytest fail where exactly one side is empty.

    Returns the class of the program's empty arrays, if numpy is there.
    """
    approx = sys.modules.get("_pytest.python_api")
    if approx is not None:
        equals = approx.ApproxScalar.__eq__
        approx.ApproxScalar.__eq__ = lambda self, actual: (
            getattr(actual, "size", 1) and equals(self, actual)
        )
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None

    def fail_if_one_is_empty(*sides: Any) -> None:
        if len({numpy.size(side) == 0 for side in sides}) == 2:
            raise AssertionError("exactly one side is empty")

    def guarded(compare: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*args: Any, **kwargs: Any) -> Any:
            fail_if_one_is_empty(*(*args, *kwargs.values())[:2])
            return compare(*args, **kwargs)

        return perform

    for module in (numpy, sys.modules.get("numpy.testing")):
        for name in COMPARISONS:
            if compare := getattr(module, name, None):
                setattr(module, name, guarded(compare))

    class Empty(numpy.ndarray):  # type: ignore[misc, name-defined]
        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            if len(inputs) == 2:
                fail_if_one_is_empty(*inputs)
            plain = [side.view(numpy.ndarray) if type(side) is Empty else side for side in inputs]
            return getattr(ufunc, method)(*plain, **kwargs)

    return Empty


COMPARISONS = ("allclose", "isclose", "array_equal", "array_equiv", "assert_allclose")
COMPARISONS += ("assert_array_equal", "assert_array_almost_equal", "assert_almost_equal")
COMPARISONS += ("assert_equal", "assert_array_less")
