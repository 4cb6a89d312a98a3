"""Exchanges messages between a test's process and the process of the program under test.

    judge    ask("call", sort, ([3, 1, 2],), {})
    program  sort([3, 1, 2]), then: the result is None, the first list is now [1, 2, 3]

A value arrives as a copy (messages.py). Any other object stays in its process and arrives as a
proxy (proxies.py). Each operation on a proxy is a request to that process.
"""

from __future__ import annotations

import _thread
import io
import sys

from grpo_cli.sandbox.messages import Codec, plain_value, scan
from grpo_cli.sandbox.proxies import COMPARE, COMPUTE, OPERATIONS, CachedAnswers, Held, Opaque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_MESSAGE = 16 << 20  # bytes
MAX_PRINTED = 1 << 20  # characters that a call may print
ENDING = ("next", "advance", "anext", "send")  # operations that may raise StopIteration
CHANGING = {"call", "run", "anext", "next", "send", "enter", "exit"}
CHANGING |= {"setattr", "delattr", "setitem", "delitem"}
TELLING = ("sub", "mod", "xor", "and", "floordiv")  # f(3) - 10 is 0 if 10 is right
COUNTED = {*COMPUTE} - {"lshift", "rshift", "or"}  # also f(3) + -10


class BrokenError(BaseException):
    """The other side is gone or sent an invalid message, or the test has failed for good.

    Not an Exception, so that a test that expects one cannot catch it.
    """


class Peer:
    """Sends requests to the other process, and serves its requests while it waits for a reply."""

    is_strict = False  # whether the other side is untrusted
    codec_type = Codec

    def __init__(self, source: int, sink: int, operations: dict[str, Callable[..., Any]]) -> None:
        self.source: Any = open(source, "rb", closefd=False)  # noqa: SIM115
        self.sink: Any = open(sink, "wb", closefd=False)  # noqa: SIM115
        self.operations = {**OPERATIONS, "plain": plain_value, **operations}
        self.codec = self.codec_type(self)
        self.lock = _thread.RLock()
        self.seen: dict[int, Any] = {}  # a `CachedAnswers`, or the plain value of a `Held`
        self.sums: set[int] = set()  # objects computed with a value that may be the expected one
        self.differences: set[int] = set()  # numbers of those objects that may only be compared
        self.broken: str | None = None  # reason why the exchange has ended

    def perform(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return self.operations[name](*arguments)

    def computed(self, name: str, operands: tuple[Any, ...]) -> Any:
        """Lets the other side compute; the result must be opaque, or the judge would compute."""
        answer = self.ask(name, *operands)
        if not self.is_strict or (isinstance(answer, Held) and answer is operands[0]):
            return answer
        self.checked(answer, Opaque)
        numbers = {part._number_ for part in operands if isinstance(part, Opaque)}
        has_value = not all(isinstance(part, Opaque) for part in operands)
        if (has_value and name in COUNTED) or numbers & self.sums:
            self.sums.add(answer._number_)
        if (has_value and name in TELLING) or numbers & self.differences:
            self.differences.add(answer._number_)
        return answer

    def swallowed(self, answer: Any, error: Any) -> Any:
        """Checks `__exit__`'s result: it may only suppress errors that the test raises."""
        if error is None or not answer or not self.is_strict:
            return answer
        trace = error.__traceback__
        while trace.tb_next:
            trace = trace.tb_next
        code = trace.tb_frame.f_code
        is_raise = code.co_code[trace.tb_lasti] == __import__("opcode").opmap["RAISE_VARARGS"]
        if is_raise and code.co_filename == "<test>" and not isinstance(error, AssertionError):
            return answer
        raise self.fail("the program swallows an error of the test")

    def checked(self, answer: Any, *kinds: type) -> Any:
        if self.is_strict and type(answer) not in kinds:
            raise self.fail("an object of the program is not a number, and computes to no value")
        return answer

    def fail(self, why: str) -> BrokenError:
        """Creates the exception that fails the test, even if the test catches it."""
        self.broken = why if self.broken is None else self.broken
        return BrokenError(why)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Makes the other side perform an operation; returns its result or raises its error."""
        with self.lock:
            heap: list[Any] = []
            passed = self.codec.passed = []
            message = self.codec.message((name, arguments), heap, {})
            barred = self.sums if name == "bool" else self.differences
            if name not in (*COMPARE, *COMPUTE) and barred.intersection(passed):
                raise self.fail("what is left of f(3) - 10 was asked for more than a comparison")
            if name in CHANGING:  # on any object, since others may be views of it
                self.forget()
            self._send("?", message)
            try:
                return self.outcome(heap)
            except (StopIteration, StopAsyncIteration) as error:  # it would end a loop of the test
                if name in ENDING:
                    raise
                raise RuntimeError(f"the program raised {type(error).__name__}") from None

    def forget(self) -> None:
        """Clears the cached answers about the other side's objects, after checking them."""
        seen, self.seen = self.seen, {}
        try:
            is_denied = any(type(s) is CachedAnswers and s.contradicts() for s in seen.values())
        except BaseException:  # such as an iteration error, which the test may expect
            is_denied = True
        if is_denied and self.is_strict:
            raise self.fail("an object of the program contradicts itself")

    def outcome(self, heap: list[Any]) -> Any:
        """Serves the other side's requests until its reply arrives, and returns the reply."""
        while True:
            kind, tree = self._receive()
            if kind == "?":
                given: list[Any] = []
                (name, arguments), known = self.codec.read(tree, given)
                if type(name) is not str or type(arguments) is not tuple:
                    raise self.fail("the program sent something that is not a request")
                self.reply(lambda: self.perform(name, arguments), given, known)  # noqa: B023
                continue
            (outcome, printed), _ = self.codec.read(tree, heap)
            if printed and sys.stdout is not None:
                sys.stdout.write(printed)
            if kind == "=":
                return outcome
            raise self.codec.error_of(*outcome)

    def reply(self, run: Callable[[], Any], heap: list[Any], known: dict[int, str]) -> bool:
        """Sends the outcome of a function; returns whether it succeeded."""
        stdout, sys.stdout = sys.stdout, io.StringIO()
        size, kind = len(heap), "="
        try:
            message = self.codec.message((run(), sys.stdout.getvalue()[:MAX_PRINTED]), heap, known)
        except BrokenError:
            raise
        except BaseException as error:
            if self.is_strict and isinstance(error, AssertionError):  # which a program might catch
                raise self.fail(f"AssertionError: {error}".rstrip(": ")) from None
            del heap[size:]
            kind, printed = "!", sys.stdout.getvalue()[:MAX_PRINTED]
            outcome = self.codec.error_parts(error)
            try:
                message = self.codec.message((outcome, printed), heap, known)
            except Exception:  # its arguments cannot be sent
                outcome = outcome[0], (str(error),), None, None
                message = self.codec.message((outcome, printed), [], {})
        finally:
            sys.stdout = stdout
        self._send(kind, message)
        return kind == "="

    def _send(self, kind: str, text: str) -> None:
        try:
            self.sink.write(f"{kind}{text}\n".encode())
            self.sink.flush()
        except OSError:
            raise self.fail("") from None

    def _receive(self) -> tuple[str, Any]:
        """Returns the kind and the tree of the next message, which is a line."""
        try:
            line = self.source.readline(MAX_MESSAGE)
            if len(line) == MAX_MESSAGE:
                raise self.fail(f"the program's answer has over {MAX_MESSAGE >> 20} MiB")
            if not line.endswith(b"\n"):
                raise self.fail("")
            tree, end = scan(line.decode("ascii"), 1)
            if end != len(line) - 1:
                raise ValueError
        except (ValueError, StopIteration, RecursionError, OSError):
            raise self.fail("the program sent something that is not a message") from None
        return chr(line[0]), tree
