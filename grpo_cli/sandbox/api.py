"""Runs untrusted Python programs, and grades them with tests.

    finished = run("print(input()[::-1])", stdin="abc")
    result = grade("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4"])

docs/sandbox.md lists what each level of guards prevents.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import math
import symtable
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.sandbox.isolation import find_level
from grpo_cli.sandbox.judge import MODULES, TYPE_OF
from grpo_cli.sandbox.process import Limits, ProgramResult, Sandbox, Test

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Tests = str | Sequence[str | Mapping[str, str]]
EVALUATING = {"eval", "exec", "compile", "__import__"}
EVALUATING_MODULES = {"pickle", "marshal", "shelve", "runpy", "code", "timeit", "subprocess"}
EVALUATING_MODULES |= {"importlib", "dill", "joblib", "cloudpickle", "doctest", "builtins", "sympy"}
EVALUATING_WORDS = {"read_pickle", "allow_pickle", "get_type_hints", "UnsafeLoader", "unsafe_load"}
NUMBERS = {"isclose", "pi", "e", "inf", "nan", "tau"}  # of math; always the tests' own


@dataclass(frozen=True)
class SandboxResult:
    """The outcome of a program's tests."""

    share: float  # passed / total
    passed: int
    total: int
    reason: str  # the first failure, in one line


def run(
    source: str,
    stdin: str = "",
    *,
    limits: Limits | None = None,
    guards: str = "auto",
    site_packages: bool = False,
) -> ProgramResult:
    """Runs a program as a script.

    Args:
        source: Python source.
        stdin: the program's standard input.
        limits: see `Limits`.
        guards: "auto" or "namespaces" for the level "namespaces"; "limits" for fewer guards.
        site_packages: whether the program may import this interpreter's packages.

    Raises:
        SandboxError: fewer guards work here than `guards` requests, or the sandbox failed.
    """
    level = find_level(guards, site_packages)
    with Sandbox(level, limits or Limits(), source, [stdin]) as sandbox:
        return sandbox.next_result()


def grade(
    code: str,
    tests: Tests,
    *,
    setup: str = "",
    entry_point: str | None = None,
    limits: Limits | None = None,
    guards: str = "auto",
    site_packages: bool = False,
    total_seconds: float | None = None,
    stop_at_failure: bool = False,
) -> SandboxResult:
    """Grades a program on tests, each in a new process that runs the program first.

    Args:
        code: Python source.
        tests: a snippet or a list of snippets, or a list of {"input": ..., "output": ...}. A
            snippet passes if it runs to its end, with the test functions and classes that it
            defines. An input passes if the program, run as a script, exits with 0 and prints the
            output. Trailing spaces and empty lines are ignored.
        setup: code that runs before each snippet, in the test's process.
        entry_point: a snippet's `check` is called with the program's object of this name.
        limits: limits of each test, see `Limits`.
        guards, site_packages: as for `run`.
        total_seconds: wall time of all tests; tests that have not begun by then count as failed.
        stop_at_failure: skip the tests after the first failed one, and count them as failed.

    Raises:
        SandboxError: fewer guards work here than `guards` requests, or the sandbox failed.
        ValueError: see `prepare`.
    """
    prepared = prepare(tests, setup, entry_point, site_packages)
    runs = [
        test["input"] if isinstance(test, Mapping) else ([*map(_code, test[0])], *test[1:])
        for test in prepared
    ]
    passed, reason = 0, ""
    level = find_level(guards, site_packages)
    with Sandbox(level, limits or Limits(), code, runs, total_seconds) as sandbox:
        for number, test in enumerate(prepared, start=1):
            finished = sandbox.next_result()
            failure = _failure(test, finished)
            if failure is None:
                passed += 1
                continue
            reason = reason or f"test {number} of {len(prepared)}: {failure}"
            if stop_at_failure or finished.status in ("skipped", "lost"):
                break
    return SandboxResult(passed / len(prepared), passed, len(prepared), reason or "passed")


def _failure(test: Test | Mapping[str, str], finished: ProgramResult) -> str | None:
    if finished.status != "ok":
        return finished.reason
    if not isinstance(test, Mapping):
        return None if finished.test_passed else "the program ended before its test did"
    if _lines(finished.stdout) == _lines(test["output"]):
        return None
    return f"printed {_short(finished.stdout)}, not {_short(test['output'])}"


def prepare(
    tests: Tests, setup: str = "", entry_point: str | None = None, site_packages: bool = False
) -> list[Test | Mapping[str, str]]:
    """Returns a row's tests; snippets become the judge's `Test`. See `grade`.

    Raises:
        ValueError: `tests` is empty or malformed, or a snippet would test nothing or could execute
            the program's return values.
    """
    given = [tests] if isinstance(tests, str) else list(tests)
    if not given:
        raise ValueError("tests is empty; there must be at least one.")
    for test in given:
        texts = [test.get(k) for k in ("input", "output")] if isinstance(test, Mapping) else [test]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"a test is {_short(test)}; it must be a string, or a mapping whose input and "
                "output are strings."
            )
    snippets = tuple(test for test in given if isinstance(test, str))
    judged = iter(_judged(snippets, setup, entry_point, site_packages) if snippets else ())
    return [next(judged) if isinstance(test, str) else test for test in given]


@functools.lru_cache(maxsize=1000)
def _judged(
    snippets: tuple[str, ...], setup: str, entry_point: str | None, site_packages: bool
) -> list[Test]:
    """Prepares a row's snippets for the judge, as sources that `grade` compiles."""
    nodes = [*ast.walk(_parse(setup, snippets[0]))]
    (used, defined), undefined, collected = _used_and_defined(setup), set(), []
    for snippet in snippets:
        tree = _parse(snippet, snippet)
        collected.append(_collect(snippet, tree, entry_point is not None))
        more_used, more_defined = _used_and_defined(snippet)
        undefined |= (used | more_used) - defined - more_defined
        nodes += ast.walk(tree)
    source = "\n".join((setup, *snippets))
    packages = sorted(_packages(source, nodes, undefined, site_packages))
    names = sorted(_names_of_the_program(source, nodes, undefined, entry_point))
    return [
        ([setup, snippet], entry_point, tests, names, packages)
        for snippet, tests in zip(snippets, collected, strict=True)
    ]


def _parse(source: str, snippet: str) -> ast.Module:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the test {_short(snippet)} is not Python: {error}.") from None


class _Types(ast.NodeTransformer):
    """Makes a test ask the program for the types of the program's objects."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id != "type" or len(node.args) != 1:
            return node
        return ast.Call(ast.Name(TYPE_OF, ast.Load()), [*node.args, node.func], node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "__class__" or not isinstance(node.ctx, ast.Load):
            return node
        return ast.Call(ast.Name(TYPE_OF, ast.Load()), [node.value], [])


@functools.lru_cache(maxsize=1000)
def _code(source: str) -> Any:
    tree = ast.fix_missing_locations(_Types().visit(_parse(source, source)))
    try:
        with warnings.catch_warnings(action="ignore"):
            return compile(tree, "<test>", "exec", dont_inherit=True)
    except (SyntaxError, RecursionError) as error:  # such as a `return` outside a function
        raise ValueError(f"the test {_short(source)} is not Python: {error}.") from None


def _names_of_the_program(
    source: str, nodes: list[ast.AST], undefined: set[str], entry_point: str | None
) -> set[str]:
    """Returns the names that the tests of a row look up in the program.

    They depend only on the row: names imported from `solution`, the entry point, and undefined
    names that are not Python's own. Without any of these, one of Python's names is the program's:
    `gcd`, or in `abs(sum(1, 2) - 3) < 1e-9` the innermost called one, `sum`.

    Raises:
        ValueError: there is no such name, or the tests could execute the program's return values.
    """
    imports = _imports(nodes)
    # Of attributes, keywords and imports; an attribute `compile` or `eval` is not a builtin.
    words = {getattr(n, key, "") for n in nodes for key in ("attr", "arg", "name")}
    used_words = EVALUATING_WORDS & words
    if evaluating := EVALUATING & undefined | EVALUATING_MODULES & imports | used_words:
        raise ValueError(
            f"the tests use {', '.join(sorted(evaluating))}, which can run what a program returns."
        )
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    called = {id(call.func) for call in calls}
    used = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called}
    known = vars(builtins).keys() | vars(math).keys() | MODULES.keys()
    names = undefined - known - (sys.stdlib_module_names & used) - {"__file__"}
    from_it = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "solution"]
    names |= {alias.name for node in from_it for alias in node.names} - {"*"}
    wanted, _ = _used_and_defined(entry_point or "")
    has_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes)
    names |= wanted - known if has_check else wanted  # in `check` itself, `abs` is Python's
    if names or wanted or "solution" in imports:
        return names
    inner = {
        call.func.id  # type: ignore[attr-defined]
        for call in calls
        if not any(id(node) in called for node in ast.walk(call) if node is not call.func)
    } & undefined
    names = (inner & vars(math).keys()) - NUMBERS or (inner if len(inner) == 1 else set())
    if names:
        return names
    raise ValueError(
        f"the tests {_short(source.strip())} have no name that must be the program's; add "
        "`from solution import NAME`."
    )


def _used_and_defined(source: str) -> tuple[set[str], set[str]]:
    """Returns the names that a module's code uses, and the names that it defines."""
    top = symtable.symtable(source, "<test>", "exec")
    tables, used, defined = [top], set(), set()
    for table in tables:  # grows during the loop
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_bound = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                used.add(symbol.get_name())
            if is_bound and (table is top or symbol.is_declared_global()):
                defined.add(symbol.get_name())
    return used, defined


def _packages(
    source: str, nodes: list[ast.AST], undefined: set[str], site_packages: bool
) -> set[str]:
    """Returns the packages that the judge imports before a test.

    Raises:
        ValueError: a package is missing.
    """
    imports = _imports(nodes)
    found = {MODULES[name] for name in undefined & MODULES.keys()}
    found |= imports - sys.stdlib_module_names - {"solution"}
    for name in sorted({name.partition(".")[0] for name in found}):
        if not site_packages or importlib.util.find_spec(name) is None:
            advice = "is not installed" if site_packages else "needs site_packages: true"
            raise ValueError(f"the tests {_short(source.strip())} import {name}, which {advice}.")
    found |= {"numpy.testing"} if "numpy" in found and "testing" in source else set()
    return found | ({"unittest"} & imports)


def _imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the top-level modules that the code imports."""
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += [n.module or "." for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def _collect(snippet: str, tree: ast.Module, has_entry_point: bool) -> list[str]:
    """Returns the names of the tests that a snippet defines but does not call.

    Raises:
        ValueError: the snippet would test nothing.
    """
    # Code under `if __name__ == "__main__"` is for scripts.
    scripts = [n for n in tree.body if isinstance(n, ast.If) and _uses(n.test, "__name__")]
    body = [node for node in tree.body if node not in scripts]
    defined = {node.name: node for node in body if isinstance(node, _DEFINITIONS)}
    tests = {
        name: problem
        for name, node in defined.items()
        if (problem := _problem(node)) is not None
        and not any(_uses(other, name) for other in body if other is not node)
    }
    for name in filter(tests.get, tests):
        raise ValueError(f"the test {name} {tests[name]}.")
    if tests or any(_does_something(node) for node in body):
        return [*tests]
    if "check" not in defined:
        raise ValueError(f"the test {_short(snippet)} tests nothing.")
    if not has_entry_point:
        raise ValueError(
            f"the test {_short(snippet)} defines `check`, which nothing calls: the column "
            "entry_point, the name of the function to check, is missing or empty."
        )
    return []


def _problem(node: ast.stmt) -> str | None:
    """Returns the reason why a test cannot be run, "" if it can; None if it is not a test."""
    if isinstance(node, ast.ClassDef):
        bases = ast.unparse(node.bases)  # type: ignore[arg-type]
        is_async = any(isinstance(method, ast.AsyncFunctionDef) for method in node.body)
        if is_async and "TestCase" in bases and "Async" not in bases:
            return "is async; derive its class from unittest.IsolatedAsyncioTestCase"
        return "" if "TestCase" in bases or node.name.startswith("Test") else None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if not node.name.startswith("test"):
        return None
    positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    needed = ", ".join(positional[: len(positional) - len(node.args.defaults)])
    unknown = "which nothing passes: fixtures and parameters of pytest are not known here"
    return f"takes {needed}, {unknown}" if needed else ""


def _uses(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _does_something(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return any(isinstance(part, ast.Call) for part in ast.walk(node.value))
    return not isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom, ast.Pass))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
