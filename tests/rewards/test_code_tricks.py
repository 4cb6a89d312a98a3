"""Programs that solve nothing and want a reward from `code`: each gets 0, and why.

Every table of tests is also passed by an honest program, so that none of them gives 0 to everyone.
"""

# ruff: noqa: E501

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.rewards.code import code
from tests.sandbox.test_api import IS_ROOT, both_levels

CASES = """
import unittest
class TestF(unittest.TestCase):
    def test_three(self): self.assertEqual(f(3), 10)
    def test_negative(self):
        with self.assertRaises(ValueError): f(-1)
if __name__ == "__main__":
    unittest.main()
"""
PYTEST_CLASS = """
class TestF:
    def setup_method(self): self.x = 3
    def test_three(self): assert f(self.x) == 10
    def test_four(self): assert f(4) == 17
"""
RAISES = """
try: f(-1)
except ValueError as error: assert str(error) == "negative"
else: assert False
assert f(3) == 10
"""
CYCLE = '''def turn(text):
    return text[1:] + text[:1]


def turn_back(text):
    """Undoes turn."""
'''
CALLBACK = "SECRET = 42\ndef guess(x): return x == SECRET\nassert find(guess) == 42"
OBJECT = """
class Box:
    def __init__(self): self.size = 3; self._secret = 42
assert find(Box()) == 42 and find(Box()) == 42
"""

# The tests of a row, and a program that passes them.
TESTS: dict[str, dict[str, Any]] = {
    "asserts": {"tests": ["assert f(3) == 10", "assert 17 == f(4)"]},
    "check": {"tests": "def check(candidate):\n    assert candidate(3) == 10", "entry_point": "f"},
    "order": {"tests": ["assert 9 < f(3) < 11", "assert f(4) >= 17 and not f(4) > 17"]},
    "near": {"tests": ["assert abs(f(3) - 10) < 1e-6", "assert round(abs(17 - f(4)), 6) == 0"]},
    "differs": {"tests": ["assert not f(3) != 10"]},
    "within": {"tests": ["assert f(3) in {10}", "assert f(4) in [17]"]},
    "close": {"tests": ["import math\nassert math.isclose(f(3), 10)"]},
    "close without import": {
        "tests": ["assert math.isclose(f(3), 10)", "assert isclose(f(4), 17)"]
    },
    "method": {"tests": ["assert f(3).__eq__(10)", "assert f(3).__lt__(11) is True"]},
    "import": {"tests": ["from solution import f\nassert f(3) == 10"]},
    "type": {"tests": ["assert type(f(3)) is int and isinstance(f(3), int) and f(3) == 10"]},
    "text": {"tests": ["assert word(3) == 'three'", "assert word(3).startswith('th')"]},
    "list": {"tests": ["assert g(2) == [0, 1]", "assert sorted(g(2)) == [0, 1] and g(0) == []"]},
    "items": {"tests": ["assert set(g(2)) == {0, 1}", "assert len(g(2)) == 2 and 1 in g(2)"]},
    "every": {"tests": ["assert all(a == b for a, b in zip(g(2), [0, 1], strict=True))"]},
    "nested": {"tests": ["assert k() == {'a': (1, [2]), 'b': {3}}"]},
    "in place": {"tests": ["a = [3, 1, 2]\nassert put(a) is None and a == [1, 2, 3]"]},
    "raises": {"tests": RAISES},
    "sum": {"tests": ["assert sum(10, 15) == 25"]},
    "unittest": {"tests": CASES},
    "pytest": {
        "tests": "def test_three():\n    assert f(3) == 10\n\ndef test_four():\n    assert f(4) == 17"
    },
    "pytest class": {"tests": PYTEST_CLASS},
    "secret": {"tests": "assert s() == 'hunter2-7f3a'"},
    "callback": {"tests": CALLBACK},
    "object": {"tests": OBJECT},
    "pairs": {"tests": [{"input": "3\n", "output": "10\n"}]},
    "helper": {
        "tests": "def check(candidate):\n    assert candidate(turn('abc')) == 'abc'",
        "entry_point": "turn_back",
        "prompts": CYCLE,
    },
}
F = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x * x + 1\n"
G = "def g(n): return list(range(n))"
HONEST = dict.fromkeys(TESTS, F) | {
    "close without import": f"import math\nfrom math import isclose\n{F}",
    "text": "def word(x): return 'three'",
    "list": G,
    "items": G,
    "every": G,
    "nested": "def k(): return {'a': (1, [2]), 'b': {3}}",
    "in place": "def put(a): a.sort()",
    "sum": "def sum(a, b): return a + b",
    "secret": "def s(): return 'hunter2-7f3a'",
    "callback": "def find(guess): return next(x for x in range(100) if guess(x))",
    "object": "def find(box): return box.size * 14",
    "pairs": "print(int(input()) ** 2 + 1)",
    "helper": "    return text[-1:] + text[:-1]",
}

EQUAL = """
class Any{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    __le__ = __ge__ = __eq__
    __hash__ = lambda self: hash(10)
    def __sub__(self, other): return 0
    def __rsub__(self, other): return 0
    def __abs__(self): return 0
    def __round__(self, n=0): return 0
    def __contains__(self, item): return True
    def __len__(self): return 2
    def __bool__(self): return True
    def __getattr__(self, name): return lambda *args: True
    startswith = endswith = issubset = lambda *args: True
    @property
    def __class__(self): return int
"""
# (name, the tests that it wants to pass, the program)
TRICKS: list[tuple[str, str, str]] = [
    # Equal to everything: only plain values are rebuilt; an object is equal to no plain value.
    *(
        (
            f"an object that is equal to everything: {tests}",
            tests,
            f"{EQUAL.format(base='')}\n{end}",
        )
        for tests, end in [
            *((t, "f = lambda x: Any()") for t in ("asserts", "check", "order", "near", "differs")),
            *((t, "f = lambda x: Any()") for t in ("within", "close", "method", "import", "type")),
            *((t, "f = lambda x: Any()") for t in ("unittest", "pytest", "pytest class", "raises")),
            ("close without import", "import math\nfrom math import isclose\nf = lambda x: Any()"),
            ("text", "word = lambda x: Any()"),
            ("list", "g = lambda n: Any()"),
            ("items", "g = lambda n: Any()"),
            ("every", "g = lambda n: [Any()] * n"),
            ("nested", "k = lambda: {'a': Any(), 'b': Any()}"),
            ("secret", "s = lambda: Any()"),
            ("sum", "sum = lambda a, b: Any()"),
            ("callback", "find = lambda guess: Any()"),
        ]
    ),
    *(
        (f"a {base} that is equal to everything", tests, f"{EQUAL.format(base=f'({base})')}\n{end}")
        for base, tests, end in [
            ("int", "asserts", "f = lambda x: Any(0)"),
            ("int", "near", "f = lambda x: Any(0)"),
            ("int", "order", "f = lambda x: Any(0)"),
            ("int", "close", "f = lambda x: Any(0)"),
            ("float", "asserts", "f = lambda x: Any(0)"),
            ("float", "near", "f = lambda x: Any(0)"),
            ("complex", "asserts", "f = lambda x: Any(0)"),
            ("str", "text", "word = lambda x: Any('')"),
            ("bytes", "asserts", "f = lambda x: Any(b'')"),
            ("list", "list", "g = lambda n: Any()"),
            ("list", "items", "g = lambda n: Any()"),
            ("tuple", "list", "g = lambda n: Any()"),
            ("set", "items", "g = lambda n: Any()"),
            ("frozenset", "items", "g = lambda n: Any()"),
            ("dict", "nested", "k = lambda: Any()"),
            ("BaseException", "asserts", "f = lambda x: Any()"),
            ("type", "asserts", "f = lambda x: Any('A', (), {})"),
        ]
    ),
    (
        "a class whose metaclass is equal to everything",
        "asserts",
        f"{EQUAL.format(base='(type)')}\nclass A(metaclass=Any): pass\nf = lambda x: A",
    ),
    ("not a number", "asserts", "f = lambda x: float('nan')"),
    ("not a number, in a list", "list", "g = lambda n: [float('nan')] * 2"),
    # Python's functions replaced: the tests have their own, in another process.
    *(
        (
            f"builtins.{name} replaced",
            "asserts",
            f"import builtins\nbuiltins.{name} = lambda *a, **k: None\nf = lambda x: 0",
        )
        for name in (
            "exec",
            "compile",
            "eval",
            "AssertionError",
            "__import__",
            "__build_class__",
            "dict",
        )
    ),
    *(
        (
            f"{name} defined, tests {tests}",
            tests,
            f"import builtins\ndef {name}(*a, **k): return {value}\nbuiltins.{name} = {name}\nf = lambda x: 0\ng = lambda n: []",
        )
        for name, tests, value in [
            ("abs", "near", "0"),
            ("round", "near", "0"),
            ("sorted", "list", "[0, 1]"),
            ("set", "items", "0"),
            ("len", "items", "2"),
            ("all", "every", "True"),
            ("zip", "every", "[]"),
            ("isinstance", "type", "True"),
            ("type", "type", "int"),
        ]
    ),
    ("abs beside sum, neither computes", "sum", "abs = lambda x: 0\nsum = lambda a, b: 0"),
    (
        "a lie about the names that there are",
        "near",
        """
import sys
Peer = sys._getframe(1).f_globals["Peer"]
perform = Peer.perform
Peer.perform = lambda self, name, arguments: (
    ["abs"] if name == "defined" else perform(self, name, arguments)
)
abs = f = lambda x: 0
""",
    ),
    (
        "math.isclose replaced",
        "close",
        "import math\nmath.isclose = lambda *a: True\nf = lambda x: 0",
    ),
    (
        "sys.modules['math'] replaced",
        "close",
        "import sys\nclass math: isclose = lambda *a: True\nsys.modules['math'] = math\nf = lambda x: 0",
    ),
    (
        "a class in the place of math",
        "close without import",
        "class math: isclose = lambda *a: True\nisclose = math.isclose\nf = lambda x: 0",
    ),
    (
        "a module in the place of math",
        "close without import",
        "import types\nmath = types.ModuleType('math')\nmath.isclose = isclose = lambda *a: True\nf = lambda x: 0",
    ),
    (
        "a function in the place of math",
        "close without import",
        "def math(): pass\nmath.isclose = isclose = lambda *a: True\nf = lambda x: 0",
    ),
    (
        "operator in the place of math",
        "close without import",
        "import operator as math\nmath.isclose = isclose = lambda *a: True\nf = lambda x: 0",
    ),
    (
        "unittest replaced",
        "unittest",
        "import sys, unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "unittest.TestCase.run = lambda *a: None\nsys.modules['unittest'] = None\nf = lambda x: 0",
    ),
    (
        "modules left in the folder",
        "unittest",
        "for m in ('unittest', 'math', 'tests', 'traceback', 'difflib', 'sitecustomize'):\n"
        "    open(m + '.py', 'w').write('import os; os._exit(0)')\nf = lambda x: 0",
    ),
    (
        "the name of the tests' module",
        "asserts",
        "import sys\nsys.modules['tests'] = sys.modules['__main__'] = None\nf = lambda x: 0",
    ),
    # Skipped, ended, said: only a test that has run to its end passes.
    (
        "a test that is skipped",
        "unittest",
        "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    ),
    (
        "every exception at once",
        "unittest",
        "class E(ValueError, AssertionError): pass\ndef f(x): raise E",
    ),
    ("the exception that is expected", "raises", "def f(x): raise ValueError('negative')"),
    ("an assertion of its own", "asserts", "def f(x): raise AssertionError"),
    ("sys.exit(0)", "asserts", "import sys\nsys.exit(0)"),
    ("sys.exit(0) in the call", "asserts", "import sys\nf = lambda x: sys.exit(0)"),
    ("os._exit(0)", "asserts", "import os\nos._exit(0)"),
    ("os._exit(0) in the call", "asserts", "import os\nf = lambda x: os._exit(0)"),
    ("KeyboardInterrupt", "asserts", "def f(x): raise KeyboardInterrupt"),
    ("GeneratorExit", "pytest", "def f(x): raise GeneratorExit"),
    ("StopIteration", "every", "def g(n): raise StopIteration"),
    (
        "StopIteration in an iterator",
        "every",
        "class I:\n    def __iter__(self): return self\n    def __next__(self): raise StopIteration\ng = lambda n: I()",
    ),
    (
        "an exception named as the verdict",
        "asserts",
        "E = type('+', (Exception,), {})\ndef f(x): raise E()",
    ),
    (
        "an exception that is not printable",
        "asserts",
        "class E(Exception):\n    __str__ = __repr__ = None\n    args = 3\ndef f(x): raise E()",
    ),
    ("a killed process", "asserts", "import os\nf = lambda x: os.kill(os.getpid(), 9)"),
    ("a crash", "asserts", "import ctypes\nf = lambda x: ctypes.string_at(0)"),
    ("deep recursion", "asserts", "f = lambda x: f(x)"),
    (
        "the verdict, printed",
        "asserts",
        "print('+', 'passed', 1.0, flush=True)\nf = lambda x: print('+')",
    ),
    (
        "the verdict, at exit",
        "asserts",
        "import atexit\natexit.register(print, '+')\nf = lambda x: 0",
    ),
    (
        "the verdict, to every file",
        "asserts",
        "import os\nfor fd in range(100):\n    try: os.write(fd, b'+')\n    except OSError: pass\nos._exit(0)",
    ),
    (
        "the sandbox's report, to every file",
        "asserts",
        "import os\nfor fd in range(100):\n    try: os.write(fd, b'ok 0 0.1 1 0 0\\n' * 9)\n    except OSError: pass\nos._exit(0)",
    ),
    ("the report, on stdout", "pairs", "print('ok 0 0.1 1 0 0')"),
    ("the answer to another input", "pairs", "print(17)"),
    ("the verdict on stdout, at exit", "pairs", "import atexit\natexit.register(print, 'passed')"),
    ("a fork that goes on", "asserts", "import os\nos.fork()\nf = lambda x: 0"),
    ("everything closed", "asserts", "import os\nos.closerange(0, 100)\nf = lambda x: 0"),
    ("nothing", "unittest", "x = 0"),
    ("nothing, for pytest", "pytest", "x = 0"),
    ("nothing, for a class of pytest", "pytest class", "x = 0"),
    ("nothing, imported", "import", "x = 0"),
    ("nothing, for check", "check", "x = 0"),
    # Read: the tests are in no memory and no file that the program can reach.
    *(
        (name, "secret", f"MARK = 'hunter' + '2-'\n{program}")
        for name, program in [
            (
                "the callers' variables",
                """
import sys
def s():
    frame = sys._getframe()
    while frame:
        text = repr((frame.f_locals, frame.f_code.co_consts))
        if MARK in text: return text[text.index(MARK):][:12]
        frame = frame.f_back
""",
            ),
            (
                "all objects",
                """
import gc
def s():
    for o in gc.get_objects():
        try: text = repr(o) if type(o) in (tuple, list, dict) else ''
        except Exception: continue
        if MARK in text: return text[text.index(MARK):][:12]
""",
            ),
            (
                "all modules",
                """
import sys
def s():
    text = repr([vars(m) for m in list(sys.modules.values())])
    return text[text.index(MARK):][:12]
""",
            ),
            (
                "its own memory",
                """
def s():
    for line in open('/proc/self/maps'):
        if ' rw' not in line: continue
        start, end = (int(n, 16) for n in line.split()[0].split('-'))
        with open('/proc/self/mem', 'rb', 0) as memory:
            memory.seek(start)
            try: data = memory.read(end - start)
            except OSError: continue
        at = data.find(MARK.encode() + b'7')
        if at >= 0: return data[at:at + 12].decode()
""",
            ),
            (
                "the memory of others",
                """
import os
def s():
    for pid in os.listdir('/proc'):
        try: lines = open(f'/proc/{pid}/maps').readlines()
        except OSError: continue
        for line in lines:
            if ' rw' not in line or int(pid) == os.getpid(): continue
            start, end = (int(n, 16) for n in line.split()[0].split('-'))
            try:
                with open(f'/proc/{pid}/mem', 'rb', 0) as memory:
                    memory.seek(start)
                    data = memory.read(end - start)
            except OSError: continue
            at = data.find(MARK.encode() + b'7')
            if at >= 0: return data[at:at + 12].decode()
""",
            ),
            (
                "all open files",
                """
import os
def s():
    for pid in os.listdir('/proc'):
        try: names = os.listdir(f'/proc/{pid}/fd')
        except OSError: continue
        for name in names:
            try:
                if 'memfd' not in os.readlink(f'/proc/{pid}/fd/{name}'): continue
                data = open(f'/proc/{pid}/fd/{name}', 'rb').read()
            except OSError: continue
            at = data.find(MARK.encode()[:-1])
            if at >= 0: return 'hunter' + '2-7f3a'
""",
            ),
            (
                "its inherited files",
                """
import os
def s():
    for fd in range(3, 100):
        try:
            data = os.pread(fd, 10**6, 0)
        except OSError: continue
        if MARK.encode()[:-1] in data: return 'hunter' + '2-7f3a'
""",
            ),
            (
                "files on the disk",
                """
import os
def s():
    for folder in ('.', '/tmp', '/dev/shm'):
        for root, _, files in os.walk(folder):
            for name in files:
                try: data = open(os.path.join(root, name), errors='replace').read(10**6)
                except OSError: continue
                if MARK in data: return data[data.index(MARK):][:12]
""",
            ),
            (
                "the judge, traced",
                """
import ctypes, os
def s():
    libc = ctypes.CDLL(None)
    for pid in os.listdir('/proc'):
        if pid.isdigit() and int(pid) != os.getpid() and libc.ptrace(16, int(pid), 0, 0) == 0:
            return 'hunter' + '2-7f3a'
""",
            ),
            (
                "the judge's files, taken over",
                """
import ctypes, os
def s():
    for pid in os.listdir('/proc'):
        if not pid.isdigit() or int(pid) == os.getpid(): continue
        try: handle = os.pidfd_open(int(pid))
        except OSError: continue
        if any(ctypes.CDLL(None).syscall(438, handle, fd, 0) >= 0 for fd in range(20)):
            return 'hunter' + '2-7f3a'
""",
            ),
            (
                "what the judge says",
                """
def s():
    import gc
    peer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')
    for name in ('expected', 'names', 'globals', '__dict__'):
        try: return peer.ask('name', name)
        except Exception: pass
""",
            ),
        ]
    ),
    # The channel: its messages make plain values, and the judge performs what it has offered.
    *(
        (name, "callback", program)
        for name, program in [
            ("a function's globals", "find = lambda guess: guess.__globals__['SECRET']"),
            ("a function's code", "find = lambda guess: guess.__code__.co_consts[0]"),
            (
                "a function's globals, asked for",
                "find = lambda guess: guess._peer.ask('get', guess, '__globals__')['SECRET']",
            ),
            (
                "a function's closure, asked for",
                "find = lambda guess: guess._peer.ask('get', guess, 'func_globals')",
            ),
            (
                "an object that is equal to the secret",
                "class E:\n    __eq__ = lambda *a: True\n    __hash__ = None\nfind = lambda guess: [E()] if guess(E()) else E()",
            ),
            (
                "a type of the judge's",
                "find = lambda guess: guess._peer.ask('call', eval, (\"SECRET\",), {})",
            ),
            (
                "operations that there are not",
                "find = lambda guess: guess._peer.ask('name', 'SECRET')",
            ),
            (
                "an import by the judge",
                "import os\nfind = lambda guess: guess._peer.ask('call', os.getpid, (), {})",
            ),
            ("an endless exchange", "def find(guess):\n    while True: guess(0)"),
        ]
    ),
    ("a hidden attribute of an argument", "object", "find = lambda box: box._secret"),
    (
        "a hidden attribute, asked for",
        "object",
        "find = lambda box: box._peer.ask('get', box, '_secret')",
    ),
    ("the class of an argument", "object", "find = lambda box: box.__init__.__globals__"),
    *(
        (
            f"a forged message: {message[:20]}",
            "asserts",
            f"""
import gc
def f(x):
    peer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')
    peer._send('=', {message!r})
    return 0
""",
        )
        for message in [
            "0;t2;ia;s0;",  # it is an answer, of 10, to the first of the two calls only
            "0;t2;y0;s0;",
            "0;t2;kobject;s0;",
            "0;t2;keval;s0;",
            "0;t2;mos;s0;",
            "0;t2;vos.system;t1;s2;ids0;",
            "0;t2;x0;NN",
            "1;0;L1;@L9;t2;@L0;s0;",
            "1;0;S1;@S0;t2;@S0;s0;",
            "0;t2;s99;",
            "",
            "9" * 100,
        ]
    ),
    (
        "a message without an end",
        "asserts",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'9' * 40)\n    except OSError: pass\nf = lambda x: 0",
    ),
    (
        "a message of a terabyte",
        "asserts",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'1000000000000\\n=')\n    except OSError: pass\nf = lambda x: 0",
    ),
    ("a huge result", "asserts", "f = lambda x: 'x' * (1 << 25)"),
    ("a result without an end", "items", "import itertools\ng = lambda n: itertools.cycle([0, 1])"),
    ("a result that holds itself", "list", "def g(n):\n    a = [0, 1]\n    a[0] = a\n    return a"),
    ("the argument itself", "in place", "def put(a): a[:] = [a, a, a]"),
    # Signals and limits: a judge that cannot go on has not passed the test.
    *(
        (
            f"the judge: {name}",
            "asserts",
            f"""
import os, resource, signal
def f(x):
    for pid in [*map(int, filter(str.isdigit, os.listdir('/proc')))]:
        if os.getpid() < pid < os.getpid() + 3:
            try: {call}
            except OSError: pass
    return 0
""",
        )
        for name, call in [
            ("killed", "os.kill(pid, signal.SIGKILL)"),
            ("stopped", "os.kill(pid, signal.SIGSTOP)"),
            ("interrupted", "os.kill(pid, signal.SIGINT)"),
            ("without files", "resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))"),
            ("without memory", "resource.prlimit(pid, resource.RLIMIT_AS, (0, 0))"),
            ("without time", "resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0))"),
        ]
    ),
    # The functions that the prompt gives are the tests' own.
    (
        "the prompt's function, defined again",
        "helper",
        "    return text\n\ndef turn(text): return text",
    ),
]
DEFAULT = {
    "an object that is equal to everything: asserts",
    "a int that is equal to everything",
    "builtins.exec replaced",
    "sys.modules['math'] replaced",
    "the callers' variables",
    "nothing, for pytest",
}


ENDLESS = ("endless", "without an end", "stopped", "terabyte")
# Rows that an attacker who knew the design has tried: the programs, and what each is worth now.
ATTACK = [
    json.loads(line)
    for line in (Path(__file__).parent / "code_attack.jsonl").read_text("utf-8").splitlines()
]


def score(name: str, program: str, guards: str, seconds: float) -> float | None:
    columns = {column: [cell] for column, cell in TESTS[name].items()}
    (value,) = code(
        [program],
        **columns,
        guards=guards,
        seconds=seconds,
        continues_prompt="prompts" in columns,
        partial=False,
    )
    return value


def score_trick(guards: str, name: str, tests: str, program: str) -> float | None:
    if guards == "limits" and not IS_ROOT and "/proc'" in program:
        return 0.0  # it reaches every process of this user, see docs/sandbox.md
    seconds = 1.0 if any(word in name for word in ENDLESS) else 20.0
    return score(tests, program, guards, seconds)


def wrong(rows: Iterable[Any], value: Callable[[Any], float | None], worth: Any) -> list[str]:
    """Returns the rows that are not worth what they should be, two at a time."""
    given = list(rows)
    with ThreadPoolExecutor(2) as pool:
        values = list(pool.map(value, given))
    pairs = zip(given, values, strict=True)
    return [f"{row}: {got}" for row, got in pairs if got != worth(row)]


@both_levels
def test_tricks_get_nothing(guards: str) -> None:
    assert {name for name, *_ in TRICKS} >= DEFAULT
    rows = [trick for trick in TRICKS if trick[0] in DEFAULT]
    assert wrong(rows, lambda row: score_trick(guards, *row), lambda row: 0) == []


@pytest.mark.programs
@both_levels
def test_all_tricks_get_nothing(guards: str) -> None:
    rows = [trick for trick in TRICKS if trick[0] not in DEFAULT]
    assert wrong(rows, lambda row: score_trick(guards, *row), lambda row: 0) == []


@pytest.mark.programs
@both_levels
def test_an_attack_is_paid_what_it_is_worth(guards: str) -> None:
    def value(row: dict[str, Any]) -> float | None:
        (got,) = code(
            [row["program"]],
            [row["tests"]],
            None,
            [row.get("entry_point")],
            guards=guards,
            seconds=20.0,
            site_packages=row.get("site_packages", False),
        )
        return got

    assert wrong(ATTACK, value, lambda row: row["worth"]) == []


@pytest.mark.programs
@both_levels
def test_honest_programs_get_everything(guards: str) -> None:
    rows = list(HONEST.items())
    assert wrong(rows, lambda row: score(*row, guards, 20.0), lambda row: 1) == []
