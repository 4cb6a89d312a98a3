"""Reward: the program in the completion passes its tests, in a sandbox."""

import ast
import contextlib
import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_cli import sandbox
from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import one_of
from grpo_cli.rewards._text import Completions, completion_texts

Test = str | Mapping[str, str]

PYTHON = ("python", "py", "python3")
_FENCE = re.compile(r"([ \t]*+)(`{3,}+)[ \t]*+([^`\s]*+)[^`]*+")  # possessive: in linear time


def _describe(*, guards: str = "auto", site_packages: bool = False, **_: Any) -> str:
    return sandbox.describe(guards, site_packages)


def _refuse(
    tests: Any = None,
    test_setup_code: str | None = None,
    entry_point: str | None = None,
    prompts: Any = None,
    *,
    continues_prompt: bool = False,
    site_packages: bool = False,
    **_: Any,
) -> str:
    helpers = _helpers(prompts) if continues_prompt and isinstance(prompts, str) else ""
    try:
        if row_tests := _tests(tests):
            setup = f"{helpers}\n{test_setup_code or ''}"
            sandbox.prepare(row_tests, setup, entry_point or None, site_packages)
    except ValueError as error:
        return str(error)
    return ""


@reward(timeout=30, preload=("grpo_cli.sandbox",), describe=_describe, refuse=_refuse)
def code(
    completions: Completions,
    tests: list[Any],
    test_setup_code: list[str | None] | None = None,
    entry_point: list[str | None] | None = None,
    prompts: list[Any] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    *,
    seconds: float = 6.0,
    total_seconds: float = 20.0,
    memory_mb: int = 1024,
    guards: str = "auto",
    partial: bool = True,
    continues_prompt: bool = False,
    site_packages: bool = False,
    **_: Any,
) -> list[float | None]:
    """Returns the share of tests that the completion's program passes, from 0.0 to 1.0.

    The program is the last fenced block marked as Python; without one the last fenced block without
    a mark; without one the whole text. A block that is never closed ends with the text.

    The column `tests` holds, for each row, one of these or the JSON text of one:
      - a list of snippets, each passed when it runs to its end (MBPP's asserts), with the pytest
        functions and the unittest classes that it defines;
      - one snippet, as a string (HumanEval's `check` function);
      - a list of {"input": ..., "output": ...}, each passed when the program, run as a script with
        that text on stdin, exits with 0 and prints that text; spaces at the ends of lines and empty
        lines at the end do not count.
    Each test is tried by itself. A snippet runs in a process of its own beside the program's, calls
    the program's functions by messages and compares plain values, so the program sees neither the
    test nor the value that is expected; see docs/sandbox.md. The column `test_setup_code` is run
    before a snippet, in the same process. With the column `entry_point`, the function of that name
    is passed to the `check` that a snippet defines. A row whose snippets test nothing, or could run
    what the program returns (`eval`, `pickle`), is refused before a run starts; here it gives None.

    Recipe args:
        seconds: wall time of the program with one test.
        total_seconds: wall time of all tests of a completion; those not begun by then count as
            failed. Keep it a few seconds below the reward's `timeout`: a completion that reaches
            that loses its worker process, and has an error instead of a score.
        memory_mb: memory of the program, in MiB.
        guards: "auto" and "namespaces" run programs without network and without your files, which
            needs bubblewrap; "limits" runs them without these guards. See docs/sandbox.md.
        partial: false gives 1.0 where all tests pass, else 0.0, and stops at the first that fails.
        continues_prompt: true puts the prompt's text before the program, as HumanEval wants it;
            tests call the prompt's own helper functions, not the completion's versions of them.
        site_packages: whether the program may import what is installed beside grpo, such as numpy.

    The result of the tests is recorded as `code_reason`: "passed", or the first failure in a line.
    A row without tests gives None. A sandbox that fails by itself raises.
    """
    try:
        limits = sandbox.Limits(seconds=seconds, memory_mb=memory_mb)
    except ValueError as error:
        raise ValueError(f"code: {error}") from None
    if not isinstance(total_seconds, (int, float)) or not total_seconds > 0:
        raise ValueError(f"code: total_seconds is {total_seconds!r}; it must be above 0.")
    one_of("code: guards", guards, sandbox.GUARDS)
    values: list[float | None] = []
    reasons: list[str | None] = []
    for row, text in enumerate(completion_texts(completions)):
        row_tests = _tests(tests[row])
        if not row_tests:
            values.append(None)
            reasons.append(None)
            continue
        prompt = _prompt_text(prompts, row) if continues_prompt else ""
        setup = f"{_helpers(prompt)}\n{(test_setup_code and test_setup_code[row]) or ''}"
        entry = (entry_point and entry_point[row]) or None
        try:
            verdict = sandbox.grade(
                prompt + program(text),
                row_tests,
                setup=setup,
                entry_point=entry,
                limits=limits,
                guards=guards,
                site_packages=site_packages,
                total_seconds=total_seconds,
                stop_at_failure=not partial,
            )
        except ValueError as error:  # a run refuses such a row before it starts
            values.append(None)
            reasons.append(str(error))
            continue
        values.append(verdict.share if partial else float(verdict.passed == verdict.total))
        reasons.append(verdict.reason)
    if log_extra is not None:
        log_extra("code_reason", reasons)
    return values


def program(text: str) -> str:
    """Returns the Python source of a completion."""
    blocks = fenced(text)
    for marks in (PYTHON, ("",)):
        fitting = [source for mark, source, _ in blocks if mark.lower() in marks]
        if fitting:
            return fitting[-1]
    return text


def fenced(text: str) -> list[tuple[str, str, bool]]:
    """Returns the mark and the content of each fenced block, and whether it is closed."""
    blocks = []
    indent, fence, mark = "", "", ""
    inside: list[str] = []
    for line in text.splitlines(keepends=True):
        found = _FENCE.fullmatch(line.rstrip())
        if fence == "":
            if found:
                indent, fence, mark = found.groups()
                inside = []
        elif found and found[3] == "" and len(found[2]) >= len(fence):
            blocks.append((mark, "".join(inside), True))
            fence = ""
        else:
            inside.append(line.removeprefix(indent))
    return [*blocks, (mark, "".join(inside), False)] if fence else blocks


@functools.lru_cache(maxsize=10_000)
def _helpers(prompt: str) -> str:
    """Returns the functions before the one that the prompt begins, for the tests to use.

    A completion that defines them again changes the program's own, and not what the tests call.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    kinds = (ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Assign)
    return "\n".join(ast.unparse(node) for node in tree.body[:-1] if isinstance(node, kinds))


def _prompt_text(prompts: list[Any] | None, row: int) -> str:
    prompt = prompts[row] if prompts else None
    if not isinstance(prompt, str):
        raise ValueError(
            "code: continues_prompt is True; then each prompt must be a text that the completion "
            f"continues, not {'missing' if prompt is None else 'a list of messages'}."
        )
    return prompt


def _tests(cell: Any) -> list[Test]:
    """Returns the tests of a row, if there are any."""
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{", '"'):
        with contextlib.suppress(ValueError):  # a snippet that begins like JSON
            cell = json.loads(cell)
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return []
    tests = [cell] if isinstance(cell, str | Mapping) else cell
    if isinstance(tests, Sequence) and all(_is_test(test) for test in tests):
        return list(tests)
    raise ValueError(
        f"code: tests is {str(cell)[:80]!r}; it must be a snippet, a list of snippets, a list of "
        '{"input": ..., "output": ...}, or the JSON text of one of these.'
    )


def _is_test(test: Any) -> bool:
    if isinstance(test, Mapping):
        return all(isinstance(test.get(key), str) for key in ("input", "output"))
    return isinstance(test, str)
