"""The part of a tool call inside the sandbox: runs a solution's blocks, prints the last output.

`program_calls.py` makes the sandbox run this file's source as a program. It reads from stdin, as
JSON, a token and the blocks, and runs them in order in one namespace. The output of all blocks
except the last is discarded. Stdout gets the last block's output and then, between two tokens, its
status: "ok", "error" or "memory", the latter two with the last line of a traceback.

Blocks are untrusted and share this interpreter, so names that are used after a block are bound
before it. The file imports little, since each call waits for it, and nothing of the project.
"""

# ruff: noqa: SIM105 - contextlib would have to be imported

from __future__ import annotations

import _ast
import fcntl
import json
import os
import random
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

SEED = 0  # the same in each call, so that repeated blocks draw the same numbers
PRIVATE_FD = 40  # lowest file descriptor of the saved stdout, away from the blocks' own
MOST_CHARACTERS = 10_000  # maximum length of an exception's message
SPARE_BYTES = 1 << 20


def main() -> NoReturn:
    given = json.loads(sys.stdin.buffer.read())
    token, blocks = given["token"].encode(), given["blocks"]
    nowhere = os.open(os.devnull, os.O_RDWR)
    shown = fcntl.fcntl(1, fcntl.F_DUPFD, PRIVATE_FD)
    os.dup2(nowhere, 0)  # blocks must not read this stdin: they find end of file
    os.dup2(nowhere, 2)
    # Makes SEED the default seed wherever a program would use a random one.
    random.Random.__init__.__defaults__ = (SEED,)  # type: ignore[attr-defined]
    random.Random.seed.__defaults__ = (SEED, 2)
    random.seed(SEED)
    sys.meta_path.insert(0, _NumpySeeding())  # type: ignore[arg-type]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module  # dataclasses and pickle look names up in it
    open_, dup2, write, getpid, leave, said_of = open, os.dup2, os.write, os.getpid, os._exit, said
    spare = bytearray(SPARE_BYTES)  # freed when memory is short
    pid, status, text = getpid(), "ok", ""
    for number, source in enumerate(blocks, start=1):
        dup2(shown if number == len(blocks) else nowhere, 1)
        stdout = open_(1, "w", 1, "utf-8", "backslashreplace", closefd=False)
        sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]
        status, text = "ok", ""
        try:
            run_block(source, number, module.__dict__)
        except BaseException as error:  # also SystemExit and the block's own exceptions
            del spare[:]
            status, text = said_of(error)
        try:
            stdout.flush()
        except (OSError, ValueError):  # it was closed
            pass
        if getpid() != pid:  # a child process that the block has forked
            leave(0)
    rest = memoryview(token + f"{status}\n{text}".encode(errors="backslashreplace") + token)
    while rest:
        rest = rest[write(shown, rest) :]
    leave(0)  # without waiting for the blocks' threads and exit functions


def run_block(source: str, number: int, names: dict[str, Any]) -> None:
    """Runs a block; if it ends with an expression, prints its value unless that is None."""
    file = f"<block {number}>"
    tree = compile(source, file, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, _ast.Module)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, _ast.Expr):
        tree.body.pop()
    exec(compile(tree, file, "exec", dont_inherit=True), names)
    if isinstance(last, _ast.Expr):
        value = eval(compile(_ast.Expression(last.value), file, "eval"), names)
        if value is not None:
            print(repr(value))


def said(error: BaseException) -> tuple[str, str]:
    """Returns (status, last line of a traceback) for an exception of a block."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        if isinstance(error, SystemExit) and (error.code is None or error.code == 0):
            return "ok", ""
        text = str(error)
        if isinstance(error, SyntaxError) and error.lineno is not None:
            text = f"{error.msg} (line {error.lineno})"
    except BaseException:  # raised by the error's own methods
        text = "<its text cannot be shown>"
    status = "memory" if isinstance(error, MemoryError) else "error"
    return status, f"{name}: {text}"[:MOST_CHARACTERS] if text else name


class _NumpySeeding:
    """An import hook that seeds numpy.random once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "numpy.random":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec: Any = next((spec for spec in found if spec is not None), None)
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_seed(module: Any) -> None:
                load(module)
                module.seed(SEED)
                default_rng = module.default_rng
                module.default_rng = lambda seed=None: default_rng(SEED if seed is None else seed)

            spec.loader.exec_module = load_and_seed
        return spec


if __name__ == "__main__":
    main()
