"""What a test can do with a program that is in another process, and which tests are refused."""

# ruff: noqa: E501

from typing import Any

import pytest

from grpo_cli.sandbox import Limits, grade

STACK = """
class Empty(Exception):
    def __init__(self, size):
        super().__init__(f"no {size}")
        self.size = size
class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, n): return self.items[n]
    def __setitem__(self, n, item): self.items[n] = item
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __lt__(self, other): return self.items < other.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __repr__(self): return f"Stack({self.items})"
    def __call__(self, x): return x * 2
    @classmethod
    def of(cls, *items): return cls(items)
    @property
    def top(self): return self.items[-1]
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items: raise Empty(1)
        return self.items.pop()
def empty(stack): return not stack.items
"""


@pytest.mark.programs
@pytest.mark.parametrize(
    ("program", "test"),
    [
        # plain values, there and back
        *(
            ("def f(x): return x", f"{start}x = {value}\nassert f(x) == x and type(f(x)) is type(x)")
            for start, value in [
                ("", "[None, True, 1, -(9 ** 5000), 1.5, -0.0, float('inf'), 2j, 'é\\ud800;', b'\\0;']"),
                ("", "{'a': [1, (2, {3}), frozenset({4})], (5, 6): bytearray(b'7'), None: {}}"),
                ("", "((), [], {}, set(), '', b'', ..., range(1, 9, 2))"),
                ("", "[int, str, ValueError, object]"),
                ("import collections as c\n", "[c.deque([1]), c.Counter('aab'), c.OrderedDict(a=1)]"),
                ("import decimal as d, fractions as q\n", "[d.Decimal('1.10'), q.Fraction(1, 3)]"),
                ("import datetime as d\n", "[d.date(2020, 1, 2), d.datetime(2020, 1, 2, 3), d.timedelta(4)]"),
            ]
        ),
        ("def f(): return float('nan')", "import math; assert math.isnan(f())"),
        ("def f():\n    a = [1]; a.append(a); return a", "a = f(); assert a[0] == 1 and a[1] is a"),
        ("def f():\n    a = [1]; return [a, a]", "a = f(); assert a[0] is a[1]"),
        ("def f(n):\n    for _ in range(n): x = [x] if _ else []\n    return x", "assert f(5000)"),
        ("from collections import defaultdict\ndef f():\n    d = defaultdict(int); d[1] += 1; return d", "assert f() == {1: 1}"),
        ("import enum\nclass C(enum.IntEnum): A = 1\ndef f(): return C.A", "assert f() == 1 and f().name == 'A'"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2) and f().x == 1 and P(3, 4).y == 4"),
        ("class L(list): pass\ndef f(): return L([1])", "assert f() == [1]"),
        # arguments that change
        ("def f(a): a.sort()", "a = [2, 1]; assert f(a) is None and a == [1, 2]"),
        ("def f(m):\n    for row in m: row.reverse()\n    m.append([])", "m = [[1, 2], [3]]; r = m[0]; f(m); assert m == [[2, 1], [3], []] and m[0] is r"),
        ("def f(d, s, b):\n    d['a'] = d.pop('b'); s.add(2); b.append(3)", "d, s, b = {'b': 1}, {1}, bytearray(); f(d, s, b); assert (d, s, b) == ({'a': 1}, {1, 2}, b'\\x03')"),
        ("def f(a): return a", "a = [1]; assert f(a) is a"),
        ("def f(a):\n    a.clear(); raise KeyError(1)", "a = [1]\ntry: f(a)\nexcept KeyError as e: assert e.args == (1,) and a == []\nelse: assert 0"),
        ("def f(*a, k=1, **m): return a, k, m", "assert f(1, *[2], k=3, z=4) == ((1, 2), 3, {'z': 4})"),
        # functions and iterators, in both directions
        ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, (n for n in [1, 2])) == [2, 3]"),
        ("def f(g): return g([1])", "def g(a):\n    a.append(2)\n    return a\nassert f(g) == [1, 2]"),
        ("def f(g):\n    try: g()\n    except ValueError as e: return e.args", "def g(): raise ValueError(3)\nassert f(g) == (3,)"),
        ("def f(n): return lambda x: x + n", "assert f(1)(2) == 3 and list(map(f(1), [1])) == [2]"),
        ("def f():\n    n = 0\n    while True:\n        yield n\n        n += 1", "g = f(); assert next(g) == 0 and next(g) == 1\nimport itertools; assert list(itertools.islice(f(), 3)) == [0, 1, 2]"),
        ("def f(d): return d.keys(), map(str, [1]), zip([1], [2])", "k, m, z = f({'a': 1}); assert list(k) == ['a'] and list(m) == ['1'] and dict(z) == {1: 2}"),
        ("def f(x): return x(3)", "assert f(float) == 3.0 and f(str) == '3'"),
        ("async def f(x): return x + 1", "import asyncio; assert asyncio.run(f(1)) == 2"),
        # exceptions
        ("def f(): raise IndexError('no')", "try: f()\nexcept LookupError as e: assert str(e) == 'no'\nelse: assert 0"),
        ("import json\ndef f(): json.loads('{')", "import json\ntry: f()\nexcept json.JSONDecodeError: pass\nelse: assert 0"),
        (STACK, "try: Stack().pop()\nexcept Empty as e: assert e.size == 1 and str(e) == 'no 1'\nelse: assert 0"),
        (STACK, "import unittest\nclass TestStack(unittest.TestCase):\n    def test_it(self):\n        with self.assertRaises(Empty): Stack().pop()\n        self.assertEqual(len(Stack([1])), 1)"),
        # objects of the program
        (STACK, "s = Stack([1]); assert s.push(2) is s and len(s) == 2 and s.pop() == 2 and s.top == 1"),
        (STACK, "s = Stack([1, 2]); s[0] = 5; s.limit = 9; assert s[0] == 5 and list(s) == [5, 2] and s.limit == 9"),
        (STACK, "assert Stack([1]) == Stack([1]) != Stack([2]) and Stack([1]) < Stack([2]) and 1 in Stack([1])"),
        (STACK, "assert (Stack([1]) + Stack([2])).items == [1, 2] and str(Stack.of(3)) == 'Stack([3])' and Stack()(4) == 8"),
        (STACK, "assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and empty(Stack()) and Stack.limit == 3"),
        (STACK, "assert not Stack() and Stack([1]) and sorted([Stack([2]), Stack([1])])[0].top == 1"),
        ("N = 3\ndef f(): return N", "assert N == 3 and f() == N"),
        # objects of the test
        ("def f(node):\n    node.value += 1; return node.next.double()", "class Node:\n    value = 1\n    def double(self): return self.value * 2\na = Node(); a.next = Node()\nassert f(a) == 2 and a.value == 2"),
        ("def f(file): return file.read()", "import io; assert f(io.StringIO('abc')) == 'abc'"),
        # what is printed, names, modules
        ("def f(): print('hi')", "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out: f()\nassert out.getvalue() == 'hi\\n'"),
        ("import sys, collections as c\ndef f(): return 1", "assert sys.getsizeof(3) and c.Counter('a') and f() == 1"),
        ("def f(x): return 2 * x\ndef helper(): pass", "from solution import *\nassert f(2) == 4"),
        ("def f(x): return x", "import solution\nassert solution.f(2) == 2\nassert not hasattr(solution, 'g')"),
        ("def gcd(a, b): return a if not b else gcd(b, a % b)", "assert gcd(12, 18) == 6"),
        ("def sum(a, b): return a + b", "assert abs(sum(1, 2) - 3) < 1e-9"),
        ("def f(x): return x + 1", "assert [f(x) for x in range(2)] == [1, 2]"),
        ("def f(x): return x + 1", "class Config:\n    y = f(1)\n    def g(self): return f(self.y)\nassert Config().g() == 3"),
        ("def f(): return open('made').read()", "with open('made', 'w') as file: file.write('abc')\nassert f() == 'abc'"),
        ("def f():\n    with open('made', 'w') as file: file.write('abc')", "f(); assert open('made').read() == 'abc'"),
        ("def f(x): return x", "def test_a(): assert f(1) == 1\ndef test_b(y=2): assert f(y) == 2"),
    ],
)  # fmt: skip
def test_a_test_passes(program: str, test: str) -> None:
    result = grade(program, test, limits=Limits(seconds=30))
    assert result.reason == "passed"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("program", "test", "reason"),
    [
        ("def f(): return object()", "assert f() - 3 < 1", "TypeError: unsupported operand type(s) for -: 'object' and 'int'"),
        ("def f(x): return x", "class A: __slots__ = ()\nimport socket\nf(socket.socket())", "TypeError: an object of the type socket cannot be passed to a program"),
        ("def f(x): return x.y", "class A: pass\nf(A())", "AttributeError: 'A' object has no attribute 'y'"),
        ("def f(): return 1", "assert g() == 1", "NameError: name 'g' is not defined"),
        ("def f(): return 1", "if f is None: f()", "the test asked the program for nothing"),
        ("def f(): return 1", "x = max(1, 2)", "NameError: name 'max' is not defined"),
        ("def f(): return 'x' * (17 << 20)", "f()", "the program's answer has over 16 MiB"),
        ("import os\ndef f(): os._exit(3)", "try: f()\nexcept: pass", "ended with exit code 3"),
        ("import os\ndef f(): os._exit(0)", "try: f()\nexcept: pass", "the program ended before its test did"),
        ("import os\ndef f(): os.kill(os.getpid(), 9)", "f()", "ended by SIGKILL"),
        ("def f(): return 1", "def test_a(): assert f() == 2", "AssertionError"),
        ("def f(): return 1", "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(), 2)", "AssertionError: 1 != 2"),
        ("def f(): return 1", "import unittest\nclass A(unittest.TestCase):\n    @unittest.skip('')\n    def test_a(self): f()", "A has no test that passed"),
    ],
)  # fmt: skip
def test_a_test_fails(program: str, test: str, reason: str) -> None:
    result = grade(program, test, limits=Limits(seconds=30))
    assert (result.passed, result.reason) == (0, f"test 1 of 1: {reason}")


CHECK = "def check(candidate):\n    assert candidate(1) == 2"


@pytest.mark.parametrize(
    ("test", "options", "message"),
    [
        ("pass", {}, "the test 'pass' tests nothing."),
        ("", {}, "tests nothing"),
        ("import math\nX = {'a': 1}\ndef helper(): pass\n'text'", {}, "tests nothing"),
        (CHECK, {}, "defines `check`, which nothing calls: the column entry_point"),
        ("import unittest\nclass T(unittest.TestCase):\n    async def test_a(self): f(1)", {}, "the test T is async"),
        ("if __name__ == '__main__': f(1)", {}, "tests nothing"),
        ("def test_a(capsys): f(1)", {}, "the test test_a takes capsys, which nothing passes"),
        ("assert f(1) ==", {}, "is no Python: invalid syntax"),
        ("return f(1)", {}, "is no Python: 'return' outside function"),
        ("import pytest\nassert f(1) == 2", {}, "import pytest, which needs site_packages: true."),
        ("import no_such_thing\nf(1)", {"site_packages": True}, "import no_such_thing, which is not"),
        ("f(1)", {"setup": "import numpy"}, "import numpy, which needs site_packages: true."),
    ],
)  # fmt: skip
def test_a_row_that_tests_nothing_is_refused(
    test: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        grade("def f(x): return x + 1", test, **options)


@pytest.mark.programs
def test_numpy() -> None:
    program = "import numpy as np\ndef f(x): return x * 2\ndef g(): return np.float64(1.5)"
    test = (
        "import numpy as np\nassert np.array_equal(f(np.array([[1, 2]])), [[2, 4]])\n"
        "assert g() == 1.5 and f(np.array([0.5])).dtype == float"
    )
    result = grade(program, test, limits=Limits(seconds=60), site_packages=True)
    assert result.reason == "passed"
