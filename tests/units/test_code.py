"""The code reward: what counts as solved, what cheats earn, and whose fault what is. And the
python tool of an episode.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.chat import Engine, chat, tokenizer
from kits.poisoned_answers import PROTOCOL
from kits.runs import tiny
from rondel.assemble import components as parts_module
from rondel.assemble.components import LENDS, env_of
from rondel.assemble.components import build as build_parts
from rondel.checks.recipe_check import _check_sandboxes as boxes_of
from rondel.checks.recipe_check import check
from rondel.core.errors import BoxError, ConfigError, DataError, EnvError, SandboxError
from rondel.core.sandbox_types import Limits
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.driver.controller import train
from rondel.generate.envs import python as tool
from rondel.generate.envs.sources import TaskSet
from rondel.generate.envs.tools import Tools
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.probe import find_isolation
from rondel.score import build_reward, examine_task
from rondel.score.boxed.compare import values_equal
from rondel.score.boxed.plain import pack, unpack
from rondel.score.code import BOXED, Code, same_text
from rondel.score.code_tests import extract_code, free_names, read_tests
from rondel.score.pool import RewardPool
from rondel.score.preflight import check_reward

pytestmark = pytest.mark.slow

try:
    find_isolation()
    MISSING = ""
except SandboxError as error:
    MISSING = str(error)
boxed = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def reward():
    made = Code(sandbox=Sandbox(), seconds=4.0)  # a machine with other work has stood still for two
    yield made
    for cell in made._cells.values():
        cell.kill()


def task(tests, **data) -> Task:
    return Task("t/1", "single_turn", {"prompt": "?", "tests": tests, **data})


def earned(reward, text: str, tests, **data) -> float:
    return reward(Trajectory(text=text), task(tests, **data)).value


SQUARE = "So:\n```python\ndef wrong(): pass\n```\nno, better:\n```python\ndef f(x):\n    return x * x\n```\nThat is it."
STACK = """
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
"""


@boxed
@pytest.mark.parametrize(
    ("text", "tests", "data", "value"),
    [
        (SQUARE, ["assert f(2) == 4", "assert f(-3) == 9"], {}, 1.0),
        (SQUARE, ["assert f(2) == 4", "assert f(3) == 10", "assert g(1) == 1", "assert f(0.5) == 0.25"], {}, 0.5),
        (SQUARE, "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9", {"entry_point": "f"}, 1.0),
        (SQUARE, "def check(candidate):\n    assert candidate(2) == 5", {"entry_point": "f"}, 0.0),
        (SQUARE, "from solution import f\ndef test_a():\n    assert f(2) == 4\ndef test_b():\n    assert f(3) == 9", {}, 1.0),
        (SQUARE, "import solution, math\ndef test_a():\n    assert math.isclose(solution.f(0.1), 0.01)", {}, 1.0),
        (SQUARE, "def test_a():\n    assert f(2) == 4\ndef test_b():\n    assert f(3) == 8", {}, 0.0),
        (SQUARE, [{"call": [2], "expected": 4}, {"call": [3], "expected": 8}], {"entry_point": "f"}, 0.5),
        ("def g(a, b): return (a, {b})", [{"call": [1, "x"], "expected": [1, {"x"}], "function": "g"}], {}, 1.0),
        ("n = int(input())\nprint(n * n)", [{"input": "3\n", "output": "9"}, {"input": "4", "output": "16  \n\n"}], {}, 1.0),
        ("if __name__ == '__main__':\n    print('a'); print('b')", [{"input": "", "output": "a\nb"}, {"input": "", "output": "a b"}], {}, 0.5),
        (STACK, ["s = Stack()\ns.push(1).push([2])\nassert len(s) == 2 and s.pop() == [2] and list(s) == [1]", "assert not Stack()"], {}, 1.0),
        ("def f(x): raise ValueError(x)", "try:\n    f(3)\nexcept ValueError as e:\n    assert str(e) == '3'\nelse:\n    assert False", {}, 1.0),
        ("def f(x): return {x: (x, [None, True, 2.5, 10**30, b'z', 1j])}", ["assert f('k') == {'k': ('k', [None, True, 2.5, 10**30, b'z', 1j])}"], {}, 1.0),
        ("def f(n): return n if n < 2 else f(n - 1) + f(n - 2)", ["assert [f(i) for i in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]"], {}, 1.0),
        ("no code at all", ["assert f(2) == 4"], {}, 0.0),
        ("", ["assert f(2) == 4"], {}, 0.0),
    ],
)  # fmt: skip
def test_what_counts_as_solved(reward, text, tests, data, value):
    assert earned(reward, text, tests, **data) == value


RIGHT = {
    "in place": ("def f(m):\n    m[:] = [list(r) for r in zip(*m[::-1])]", "m = [[1, 2], [3, 4]]\nrow = m[0]\nf(m)\nassert m == [[3, 1], [4, 2]] and row == [1, 2]"),
    "in place, further in": ("def f(m): m[0].append({'a': 3}); return m", "m = [[], set()]\nsame = f(m)\nassert m[0] == [{'a': 3}] and same is m and same[0] is m[0]"),
    "kept and changed later": ("class S:\n    def __init__(s, l): s.l = l\n    def put(s, x): s.l.append(x)", "l = [1]\ns = S(l)\ns.put(2)\nl.append(3)\nassert s.l == l == [1, 2, 3] and s.l is l"),
    "dicts, sets, deques": ("def f(d, s, q): d['k'] = 1; s.add(2); q.appendleft(3)", "from collections import deque\nd, s, q = {}, set(), deque(maxlen=2)\nf(d, s, q)\nassert (d, s, list(q)) == ({'k': 1}, {2}, [3])"),
    "a cycle": ("def f(l): l.append(l); return l", "l = []\nassert f(l) is l and l[0] is l"),
    "callables": ("def f(g, xs): return list(map(g, xs))", "assert f(lambda x: x + 1, [1]) == [2] and f(str, [1]) == ['1'] and f(len, ['ab']) == [2]"),
    "a callable that raises": ("def f(g):\n    try: g()\n    except ValueError as e: return e.args", "def g(): raise ValueError(3)\nassert f(g) == (3,)"),
    "a callback that is asked from within": ("def f(g, n): return n if n == 0 else 1 + g(f, n - 1)", "def g(f, n): return f(g, n) + 1\nassert f(g, 5) == 10"),
    "an iterator": ("def f(it): return next(it) + sum(it)", "assert f(iter([1, 2, 3])) == 6 and f(x for x in (1, 2)) == 3 and f(map(int, '12')) == 3"),
    "Fraction, Decimal, dates": ("from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\ndef f(): return Fraction(1, 2), Decimal('0.10'), datetime.date(2020, 1, 2), range(3)", "from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\nassert f() == (Fraction(1, 2), Decimal('0.1'), datetime.date(2020, 1, 2), range(3))"),
    "Counter, defaultdict": ("from collections import Counter, defaultdict\ndef f(s):\n    d = defaultdict(list)\n    d['a'].append(1)\n    return Counter(s), d", "from collections import Counter\nc, d = f('aab')\nassert c == Counter('aab') == {'a': 2, 'b': 1} and d == {'a': [1]} and d['z'] == []"),
    "generators": ("def f():\n    n = 0\n    while True:\n        yield n\n        n += 1", "import itertools\ng = f()\nassert next(g) == 0 and list(itertools.islice(g, 2)) == [1, 2] and next(g) == 3"),
    "equality": ("class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x\n    def __hash__(s): return hash(s.x)", "assert P(1) == P(1) and P(1) != P(2) and len({P(1), P(1)}) == 1 and [P(1)] == [P(1)]"),
    "operators": ("class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n    def __mul__(s, k): return V(s.x * k)\n    __rmul__ = __mul__\n    def __lt__(s, o): return s.x < o.x\n    def __abs__(s): return abs(s.x)\n    def __getitem__(s, i): return (s.x,)[i]", "assert (V(1) + V(2)).x == 3 and (2 * V(3)).x == (V(3) * 2)[0] == 6 and sorted([V(2), V(1)])[0].x == 1 and abs(V(-2)) == 2 and max(V(1), V(4)).x == 4"),
    "classes": ("class A:\n    n = 0\n    @property\n    def p(s): return 7\n    def __enter__(s): return s\n    def __exit__(s, *e): s.n = 9\nclass B(A): pass", "b = B()\nb.n = 5\nassert isinstance(b, A) and issubclass(B, A) and b.n == 5 and b.p == 7 and not isinstance(3, A)\nwith b as c: assert c is b\nassert b.n == 9 and B.__name__ == 'B' and not hasattr(b, 'q')"),
    "dataclasses": ("from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\n    y: 'int' = 2", "assert P(1) == P(1, 2) < P(2) and str(P(1)) == repr(P(1)) == 'P(x=1, y=2)'"),
    "enums and named tuples": ("from enum import Enum\nfrom collections import namedtuple\nclass C(Enum):\n    RED = 1\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert C.RED is C.RED and C.RED == C(1) and C.RED.value == 1 and f().y == 2 and f() == (1, 2) and isinstance(f(), tuple)"),
    "a list of its own": ("class S(list):\n    def push(s, x): s.append(x); return s\n    def peek(s): return s[-1]", "s = S()\nassert s.push(1).push(2).peek() == 2 and s == [1, 2] and len(s) == 2 and isinstance(s, list)"),
    "exceptions": ("import json\nclass TooLittle(ValueError):\n    def __init__(s, left): super().__init__('too little'); s.left = left\ndef f(x):\n    if x: raise TooLittle(x)\n    json.loads('{')", "import json\ntry: f(3)\nexcept TooLittle as e: assert e.left == 3 and str(e) == 'too little'\nelse: assert False\ntry: f(3)\nexcept ValueError: pass\ntry: f(0)\nexcept json.JSONDecodeError: pass"),
    "the test's own classes": ("def f(h):\n    last = None\n    while h:\n        h.next, last, h = last, h, h.next\n    return last", "class Node:\n    def __init__(s, v, n=None): s.v, s.next = v, n\na = Node(1, Node(2))\nb = f(a)\nassert b.v == 2 and b.next is a and a.next is None"),
    "numpy": ("import numpy as np\ndef f(x):\n    x *= 2\n    return x.sum(), x[0], np.eye(2)", "import numpy as np\na = np.arange(3)\ntotal, first, eye = f(a)\nassert total == 6 and first == 0 and np.allclose(eye, [[1, 0], [0, 1]]) and (a == [0, 2, 4]).all()"),
    "unittest": ("def f(x): return [x]", "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), [1]); self.assertRaises(TypeError, f)\ndef test_all():\n    r = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\n    assert r.testsRun == 1 and r.wasSuccessful()"),
}  # fmt: skip


@boxed
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(reward, name):
    code, test = RIGHT[name]
    assert earned(reward, code, [test]) == 1.0


EQUAL = """
class E:
    def __init__(s, k=None): s.k = k
    def __eq__(s, o): return True
    __lt__ = __le__ = __gt__ = __ge__ = lambda s, o: True
    __ne__ = lambda s, o: False
    __hash__ = lambda s: 4
    __sub__ = __rsub__ = __add__ = __mod__ = __xor__ = lambda s, o: %s
    __abs__ = __float__ = __neg__ = __round__ = __int__ = lambda s, *a: 0.0
    __bool__ = lambda s: False
    __len__ = lambda s: 0
def f(*x): return E()
"""
FORGED = {
    "equal": (EQUAL % "E(o)", "assert f(2) == 4"),
    "equal the other way": (EQUAL % "E(o)", "assert 4 == f(2) and (4, 5) == (f(2), 5)"),
    "ordered": (EQUAL % "E(o)", "assert 3 < f(2) < 5"),
    "close": (EQUAL % "E(o)", "assert abs(f(2) - 4) < 1e-6"),
    "close, with a number at once": (EQUAL % "0", "assert abs(f(2) - 4) < 1e-6"),
    "close the other way": (EQUAL % "E(o)", "assert abs(4 - f(2)) <= 0.1"),
    "rounded": (EQUAL % "E(o)", "assert round(f(2) - 4, 7) == 0"),
    "no rest": (EQUAL % "E(o)", "assert not f(2) - 4"),
    "no difference": (EQUAL % "E(o)", "assert not f(2) ^ {4}"),
    "nothing left": (EQUAL % "E(o)", "assert len(f(2) - {4}) == 0"),
    "a list that is equal": ("class L(list):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\ndef f(x): return L()", "assert f(2) == [4]"),
    "leaves where all is caught": ("import os\ndef f(x): os._exit(0)", "try:\n    f(2)\n    assert False\nexcept BaseException:\n    pass"),
    "reads the test from a function": ("def f(g):\n    return g.__globals__['wanted']", "wanted = 4\nassert f(lambda: wanted and 0) == 4"),
    "reads the test from a method": ("def f(o):\n    return o.m.__func__.__globals__['wanted']", "wanted = 4\nclass O:\n    def m(s): return 0\nassert f(O()) == 4"),
    "reads the test from a generator": ("def f(g):\n    return g.gi_frame.f_globals['wanted']", "wanted = 4\nassert f(x for x in [1]) == 4"),
    "reads the test from a class": ("def f(o):\n    return o.__class__.__init__.__globals__['wanted']", "wanted = 4\nclass O:\n    def __init__(s): pass\nassert f(O()) == 4"),
    "looks among modules": ("import sys\ndef f(g):\n    return g.__self__.modules", "import sys\nassert f(sys.getrefcount) == 4"),
}  # fmt: skip


@boxed
@pytest.mark.parametrize("name", FORGED)
def test_a_candidates_object_decides_no_comparison_and_reads_no_test(reward, name):
    code, test = FORGED[name]
    assert earned(reward, code, [test]) == 0.0


RUN = {  # each form of test that is run: a right answer earns 1, a wrong and an empty one 0
    "a class of unittest": "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.want = 4\n    def test_a(self): self.assertEqual(f(2), self.want)",
    "a class of unittest, the second": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(0), 0)\n    def test_b(self):\n        with self.subTest(2): self.assertEqual(f(2), 4)",
    "set up as a class": "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.got = f(2)\n    def test_a(self): self.assertTrue(self.got == 4)\nif __name__ == '__main__':\n    unittest.main()",
    "its own runner, whose result nobody reads": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(0), 0)\n    def test_b(self): self.assertEqual(f(2), 4)\nunittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    "an asynchronous class": "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self): self.assertEqual(f(2), 4)",
    "a class of pytest": "class TestF:\n    def setup_method(self): self.want = 4\n    def test_a(self):\n        assert f(2) == self.want",
    "an asynchronous function": "async def test_a():\n    assert f(2) == 4",
    "a generator": "def test_a():\n    yield\n    assert f(2) == 4",
    "a main block": "def main():\n    assert f(2) == 4\nif __name__ == '__main__':\n    import sys\n    sys.exit(main())",
    "a check that the text calls": "def check(candidate):\n    assert candidate(2) == 4\ncheck(f)",
    "a helper": "def expect(x, y):\n    assert f(x) == y\ndef test_a():\n    expect(2, 4)",
    "an error that is raised": "if f(2) != 4:\n    raise ValueError('wrong')",
    "an error that is expected": "try:\n    f(None)\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError\nassert f(2) == 4",
    "an error that is expected of a method": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertRaises(TypeError, f, None)\n        with self.assertRaises(TypeError): f('x')\n        self.assertEqual(f(2), 4)",
    "a function of its own that raises": "def assert_raises(kind, g, *args):\n    try: g(*args)\n    except kind: return True\n    raise AssertionError\nassert_raises(TypeError, f, None)\ndef assert_equal(a, b):\n    if a != b: raise ValueError(a)\nassert_equal(f(2), 4)",
    "a method of its own": "import unittest\nclass T(unittest.TestCase):\n    def assertEqual(self, a, b): super().assertEqual(a, b)\n    def test_a(self): self.assertEqual(f(2), 4)",
    "numpy's": "from numpy.testing import assert_allclose\nassert_allclose([f(2)], [4.0])",
}  # fmt: skip


@boxed
@pytest.mark.parametrize("form", RUN)
def test_a_test_of_any_form_is_run(reward, form):
    assert earned(reward, "def f(x): return x * x", [RUN[form]]) == 1.0
    for wrong in ("def f(x): return x and x * x + 1", "def f(x): return 0", "", "x = 1", "def g(x): return x * x"):
        assert earned(reward, wrong, [RUN[form]]) == 0.0, wrong


COROUTINES = "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * x"


@boxed
def test_what_is_awaited(reward):
    for test in (
        "async def test_a():\n    assert await f(2) == 4",
        "import asyncio\nassert asyncio.run(f(2)) == 4",
        "import asyncio\nasync def test_a():\n    assert await asyncio.gather(f(1), f(2)) == [1, 4] and await "
        "asyncio.wait_for(f(3), 1) == 9",
        "import asyncio\nasync def test_a():\n    assert await asyncio.create_task(f(2)) == 4",
    ):
        assert earned(reward, COROUTINES, [test]) == 1.0, test
        assert earned(reward, COROUTINES.replace("x * x", "0"), [test]) == 0.0, test


NAMED = "def sum(a, b): return a + b"


@boxed
@pytest.mark.parametrize(
    ("answer", "test", "data", "value"),
    [
        (NAMED, "assert sum(10, 15) == 25", {}, 1.0),
        ("def sum(a, b): return a", "assert sum(10, 15) == 25", {}, 0.0),
        ("", "assert max([1, 5, 2]) == 5", {}, 0.0),
        ("x = 1", "assert max([1, 5, 2]) == 5", {}, 0.0),
        ("def max(x): return 5", "assert max([1, 5, 2]) == 5", {}, 1.0),
        (NAMED, "assert sum(1, 2) == 3 and isinstance(sum(1, 2), int)", {"entry_point": "sum"}, 1.0),
        (NAMED, "assert sum(1, 2) == abs(-3)", {"answer": NAMED}, 1.0),
        (NAMED + "\ndef abs(x): return x\ndef isinstance(*a): return True", "assert sum(1, 2) == abs(3) and isinstance(sum(1, 2), str)", {"entry_point": "sum"}, 0.0),
        ("def f(x): return 5\ndef max(*x): return 4\ndef sum(*x): return 4", "assert max(f(1), f(2)) == 4", {}, 0.0),
        ("def f(x): return 5\ndef max(*x): return 4", "assert max(f(1), f(2)) == 4", {"answer": "def f(x): return 4\ndef max(*x): return 4"}, 0.0),
        (NAMED, "def check(candidate):\n    assert candidate(1, 2) == 3", {"entry_point": "sum"}, 1.0),
        ("", "def check(candidate):\n    assert candidate([1, 2]) == 3", {"entry_point": "sum"}, 0.0),
        (NAMED, "from solution import sum\nassert sum(1, 2) == 3", {}, 1.0),
    ],
)  # fmt: skip
def test_a_function_that_is_called_like_a_built_in_one(reward, answer, test, data, value):
    data = {"tests": [test], **data}
    try:
        assert reward(Trajectory(text=answer), Task(str(data), "x", data)).value == value
    except DataError as error:  # that reference cannot pass, and the answer has not passed either
        assert value == 0.0 and "own answer" in str(error)


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("# nothing", "asserts nothing that is run"),
        ("f(2)", "asserts nothing that is run"),
        ("print(f(2) == 4)", "asserts nothing that is run"),
        ("def helper():\n    assert f(2) == 4", "asserts nothing that is run"),
        ("class Helper:\n    def run(self):\n        assert f(2) == 4", "asserts nothing that is run"),
        ("def test_a():\n    return f(2) == 4", "asserts nothing that is run"),
        ("assert False", "asserts nothing that is run"),
        ("f(2)\nassert True", "asserts nothing that is run"),
        ("f(2)\nassert 'done'", "asserts nothing that is run"),
        ("assert (f(x) == 4 for x in [2])", "asserts nothing that is run"),
        ("assert [f(2) == 4]", "asserts nothing that is run"),
        ("assert lambda: f(2) == 4", "asserts nothing that is run"),
        ("def assert_equal(a, b):\n    return a == b\nassert_equal(f(2), 4)", "asserts nothing that is run"),
        ("import unittest\nclass T(unittest.TestCase):\n    def assertSame(self, a, b): return a == b\n    def test_a(self): self.assertSame(f(2), 4)", "asserts nothing that is run"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue(4, f(2))", "asserts nothing that is run"),
        ("assert f(0) == 0\nassert (f(2) == 4, 'wrong')", "line 2 asserts a tuple, which always holds: write assert x, 'message' without parentheses"),
        ("def check(candidate):\n    assert candidate(2) == 4", r"nothing calls its check\(...\): set data\['entry_point'\]"),
        ("import pytest\n@pytest.mark.parametrize('x', [2])\ndef test_a(x):\n    assert f(x) == 4", "nothing gives test_a its arguments"),
        ("class TestF:\n    def test_a(self, x):\n        assert f(x) == 4", "nothing gives test_a its arguments"),
        ("assert 1 + 1 == 2", "tests nothing of an answer: it asks nothing"),
        ("assert max(1, 2) == abs(2)", r"calls nothing but built-in functions \(abs, max\): set data\['entry_point'\]"),
        ({"call": 2, "expected": 4, "function": "f"}, "a list of arguments is needed"),
        ({"call": [object()], "expected": 4, "function": "f"}, "no plain data"),
        ({"call": [2], "expected": 4}, "calls no named function"),
        ({"input": "1", "output": " \n"}, "a program that does nothing would pass"),
        ({"call": [2], "expected": None, "function": "f"}, "a function that does nothing would pass"),
    ],
)  # fmt: skip
def test_a_test_that_could_be_passed_for_nothing_is_a_fault_of_the_data(test, said):
    with pytest.raises(DataError, match=said):
        read_tests(task([test]))


@boxed
@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("def f(): return []", "for x in f():\n    assert x > 0"),
        ("def f(): return iter([])", "for got, want in zip(f(), [1, 4]):\n    assert got == want"),
        ("f = ()", "for x in f:\n    assert x > 0"),
        ("f = 3", "if f > 5:\n    assert f == 4"),
        ("def f(): raise ValueError", "try:\n    assert f() == 4\nexcept Exception:\n    pass"),
        ("def f(): return 0", "try:\n    assert f() == 4\nexcept AssertionError:\n    pass"),
        ("def f(): return 0", "try:\n    f()\n    assert False\nexcept Exception:\n    pass"),
        ("def f(g):\n    for _ in range(9): g(1)", "def g(x):\n    assert x\nf(g)"),
        ("def f(g): return list(g)", "def g():\n    yield 1\n    assert g\nf(g())"),
        ("def f(o):\n    o.ok(); o.ok()", "import unittest\nclass T(unittest.TestCase):\n    def ok(self): self.assertEqual(1, 1)\n    def test_a(self): f(self)"),
        ("def assert_equal(*a): pass\ndef f(x): return 0", "assert_equal(f(2), 4)"),
        ("def assert_equal(*a): pass\ndef f(x): return 0", "import solution\nsolution.assert_equal(f(2), 4)"),
        ("import unittest\ndef f(x): raise unittest.SkipTest('no')", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(0), 0)\n    def test_b(self): self.assertEqual(f(2), 4)"),
        ("def f(x): raise StopIteration", "for got, want in zip(map(f, [1, 2]), [1, 4]):\n    assert got == want\nassert True"),
        ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))"),
        ("class S(StopIteration): pass\ndef f(x): raise S", "assert list(map(f, [1, 2])) == []"),
        ("def f(): raise StopIteration", "assert list(iter(f, 0)) == []"),
        ("def f(x): raise StopAsyncIteration", "assert list(map(f, [1, 2])) == []"),
        ("async def f(): raise StopIteration", "import asyncio\nassert asyncio.run(f()) is None"),
    ],
)  # fmt: skip
def test_who_is_judged_raises_no_count_and_ends_no_loop(reward, text, test):
    """A 0, and no failure of the reward: what runs was up to the answer."""
    assert earned(reward, text, [test]) == 0.0


@boxed
def test_an_iterator_may_end(reward):
    code = (
        "def f():\n    got = yield 1\n    return got\nclass I:\n    def __next__(s): raise StopIteration(7)\n    def "
        "__iter__(s): return s"
    )
    for test in (
        "g = f()\nassert next(g) == 1\ntry:\n    g.send(5)\n    assert False\nexcept StopIteration as end:\n    assert "
        "end.value == 5",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(list(I()), [])\n "
        "       with self.assertRaises(StopIteration): next(I())",
    ):
        assert earned(reward, code, [test]) == 1.0, test


@boxed
@pytest.mark.parametrize("test", ["assert callable(f)", "assert f is not None", "assert all(f(x) == 4 for x in [])"])
def test_assertions_that_ask_the_candidate_nothing_are_a_fault_of_the_data(reward, test):
    with pytest.raises(DataError, match="is asked nothing, and whatever it answers, the test passes"):
        earned(reward, "def f(x): return 0", [test])


@boxed
def test_assertions_that_nothing_reaches_are_a_fault_of_the_data(reward):
    for test in ("def g():\n    assert f(2) == 4\nh = g", "if not callable(f):\n    assert f(2) == 4"):
        with pytest.raises(DataError, match="none of its assertions is carried out"):
            earned(reward, SQUARE, [test])
    with pytest.raises(DataError, match="does not pass with the task's own answer: no assertion is carried out"):
        data = {"tests": ["for x in f():\n    assert x > 0"], "answer": "def f(): return ()"}
        reward(Trajectory(text="def f(): return []"), Task("t/3", "x", data))


REACHED = {  # a candidate that speaks to the other box by itself -> what it does there
    "a fault of the test's": "line = ask('get', {'r': [0, '']}, '_far_end')\nask('set', line, 'fault', 'the data is wrong')",
    "its own rules": "line = ask('get', {'r': [0, '']}, '_far_end')\nask('set', line, 'allow', end.pack(lambda *a: None))\nask('get', ask('get', ask('get', line, 'ask'), '__func__'), '__globals__')",
    "a class that is equal to all": "kind = ask('call', {'n': ['builtins', 'type']}, 'X', {'t': []}, end.pack({'__eq__': lambda o: True}))\nanswer(ask('call', kind), lambda order: order['args'][1:] == [{'i': '0x2'}])",
    "a class of an instance": "kind = ask('call', {'n': ['builtins', 'type']}, {'r': [0, '']})\nask('get', ask('call', {'n': ['builtins', 'super']}, kind, {'r': [0, '']}), '_far_end')",
    "a loader of modules": "ask('get', ask('call', {'n': ['builtins', '__loader__']}), 'load_module')",
    "an exception that compares": "answer({'x': [9, 'm', 'X', [{'n': ['builtins', 'int']}]]})",
    "an exception of a class of its own": "answer({'x': [9, 'm', 'X', [{'r': [0, '']}]]})",
    "nothing is known of": "ask('call', {'y': 0}, 1)",
    "no arguments": "ask('call')",
    "a strange order": "end.send({'do': 'await', 'args': 3, 'kwargs': {}})",
    "no order": "end.send({'do': ['x'], 'args': [{'y': 0}], 'kwargs': {}})",
    "built-in functions": "ask('call', {'n': ['builtins', 'exec']}, 'import os; os._exit(40)')",
    "modules": "ask('call', {'n': ['os', '_exit']}, {'i': '0x28'})",
    "values that cost": "answer({'s': [{'i': hex(n * (2**61 - 1))} for n in range(40000)]})",
    "a value that is deep": "n = None\nfor _ in range(5000): n = {'l': [n]}\nend.writes.write(('{\"value\": ' + '{\"l\": [' * 5000 + ']}' * 5000 + '}\\n').encode())",
    "a fraction of nothing": "answer({'o': ['fractions', 'Fraction', [{'i': '0x1'}, {'i': '0x0'}]]})",
    "an array of everything": "answer({'m': 5})\nend.writes.write(b'{\"value\": null, \"dropped\": [], \"shared\": [[5, \"numpy\", \"ndarray\", {\"t\": [\"<f8\", {\"t\": [{\"i\": \"0xfffffffff\"}]}]}, []]]}\\n')",
    "a list that ends early": "class L(list):\n    def __len__(s): return 2\n    def __iter__(s): return iter(())\nsend = end.send\nend.send = lambda m: send(m if m.get('value') != {'i': '0x0'} else m | {'value': end.pack(L())})",
    "a number that is no text": "answer({'i': 4})",
    "a coroutine of nothing": "answer({'r': [0, 'await']})",
}  # fmt: skip


@boxed
@pytest.mark.parametrize("what", REACHED)
def test_a_candidate_that_speaks_for_itself_gets_nothing_of_the_tests(reward, what):
    """Neither a point nor a failure: of the other box it has what a test hands to it, and no more."""
    few = 1 if what == "values that cost" else 2  # each takes all the time that there is
    for test in (
        "assert f(2) == 4",
        "def g(x): return x\nclass O:\n    x = 3\nassert f(2) == 4 and f(g) == 5 and f(O()) == 5",
    )[:few]:
        assert earned(reward, PROTOCOL + REACHED[what], [test]) == 0.0
    for expected in (4, [1, 4])[:few]:
        assert earned(reward, PROTOCOL + REACHED[what], [{"call": [2], "expected": expected}], entry_point="f") == 0.0


@boxed
def test_a_module_that_a_test_forgot_to_import_is_not_the_candidates(reward):
    """As in tests whose prompt imports it: the candidate's own `math` would say that all is close."""
    forged = "class math:\n    def isclose(*a): return True\n    def add(*a): return 4\nnp = numpy = math\ndef f(x): return %s"
    for test in (
        "assert math.isclose(f(2), 4)",
        "def test_a():\n    assert numpy.isclose(f(2), 4)",
        "assert np.isclose(f(2), 4).all()",
    ):
        assert earned(reward, forged % 0, [test]) == 0.0 and earned(reward, forged % "x * x", [test]) == 1.0, test
    assert earned(reward, forged % 0, ["assert math.add(1, 3) == 4 and f(0) == 0"]) == 1.0, (
        "its own, where the module knows no such thing"
    )
    for code, test in (
        ("class queue:\n    size = 4", "assert queue.size == 4"),
        ("def bisect(x): return 4", "assert bisect(2) == 4"),
    ):
        assert earned(reward, code, [test]) == 1.0, test


def test_texts_that_run_together_share_no_name():
    seen: dict[str, str] = {}
    for part in ("plain", "compare", "far", "assertions", "suite", "harness"):
        tree = ast.parse((BOXED / f"{part}.py").read_text())
        here = {node.name for node in tree.body if hasattr(node, "name")}
        rest = [node for node in tree.body if not hasattr(node, "name")]
        here |= {
            n.id for node in rest for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        } - {
            "name",
            "_name",
        }
        assert not here & seen.keys(), (part, here & seen.keys())
        seen |= dict.fromkeys(here, part)


@boxed
def test_what_cannot_be_judged_is_a_failure_and_no_score(reward):
    for test, said in (
        ("import sys\nassert f(sys) == 1", "hands a module to the candidate"),
        ("import no_such_package\nassert f(1) == 1", "import 'no_such_package', which is not in their box"),
    ):
        with pytest.raises(DataError, match=said):
            earned(reward, SQUARE, [test])
    with pytest.raises(ConfigError, match="'no_such_package' is not installed here"):
        Code(sandbox=Sandbox(), packages=["no_such_package"])
    with pytest.raises(SandboxError, match="pydantic cannot be imported in the sandbox: ModuleNotFoundError"):
        Code(sandbox=Sandbox(), packages=["pydantic"])  # without what it needs


@boxed
def test_all_or_nothing():
    whole = Code(sandbox=Sandbox(), credit="all")
    assert earned(whole, SQUARE, ["assert f(2) == 4", "assert f(3) == 8"]) == 0.0
    assert earned(whole, SQUARE, ["assert f(2) == 4", "assert f(3) == 9"]) == 1.0


@boxed
def test_tests_that_the_tasks_own_answer_does_not_pass_are_no_zero(reward):
    assert earned(reward, "def f(x): return 1", ["assert f(2) == 4"], answer="def f(x): return x * x") == 0.0
    for broken in (["assert f(2) == 5"], ["assert helper(f)"], ["assert f(lambda: 1) == 4"]):
        with pytest.raises(DataError, match="does not pass with the task's own answer"):
            reward(
                Trajectory(text="def f(x): return 1"),
                Task("t/2", "x", {"tests": broken, "answer": "def f(x): return x * x"}),
            )


@boxed
def test_in_a_pool_hangs_are_the_policys_and_data_the_worlds():
    with RewardPool({"kind": "code", "seconds": 0.5}, timeout=5.0, lends=LENDS) as pool:

        def score(text, tests, **data):
            return asyncio.run(pool.score(Trajectory(text=text), task(tests, **data)))

        assert score(SQUARE, ["assert f(2) == 4"]) == Score(1.0, {"passed": 1.0})
        assert score("while True: pass", ["assert f(2) == 4"] * 60).value == 0.0, (
            "it ran out of the call's time, and that is no failure"
        )
        assert score(SQUARE, []).reason == "raised DataError"
        assert not [r for r in pool._recent if "timeout" in r]


SLOW = "import time\ndef f(x):\n    time.sleep(0.5)\n    return x * x"
COLLIDES = PROTOCOL + "answer({'%s': [%s for n in range(33000)]})"


@boxed
@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        ("def f(x):\n    while True: pass", [f"assert f({n}) == {n * n}" for n in range(6)]),
        ("while True: pass", [{"input": "", "output": "1"}] * 6),
        (COLLIDES % ("s", "{'i': hex(n * (2**61 - 1))}"), [{"call": [2], "expected": 4}] * 6),
        pytest.param(
            COLLIDES % ("z", "{'i': hex(n * (2**61 - 1))}"), ["assert f(2) == 4"] * 6, marks=pytest.mark.sweep
        ),  # as the one before
    ],
)
def test_time_that_an_answer_takes_is_its_own(answer, tests):
    """The reference, which is slow itself, is not tried in what is left of it, nor does
    what an answer says cost time elsewhere.
    """
    with RewardPool({"kind": "code", "seconds": 0.8, "packages": []}, timeout=4.0, lends=LENDS) as pool:

        def score(text, tests, reference):
            return asyncio.run(pool.score(Trajectory(text=text), task(tests, answer=reference, entry_point="f")))

        (worker,) = pool._hired
        reference = SLOW if "input" not in tests[0] else "print(1)"
        assert score(answer, tests, reference) == Score(0.0, {"passed": 0.0})
        assert score("def f(x): return x * x", ["assert f(2) == 4"], SLOW).value == 1.0
        assert pool._hired == {worker} and worker.process.poll() is None


@boxed
def test_a_reference_that_is_late_once_may_be_this_machines_fault():
    made = Code(sandbox=Sandbox(), seconds=0.3, deadline=3.0)
    late = Task("t/4", "x", {"tests": ["assert f(2) == 4"], "answer": "import time\ndef f(x): time.sleep(9)"})
    wrong = Trajectory(text="def f(x): return 0")
    assert made(wrong, late).value == 0.0
    with pytest.raises(DataError, match="test 0 of t/4 does not pass with the task's own answer: it takes too long"):
        made(wrong, late)


class Fragile:
    """Boxes of which those in `breaks` break down when a command of theirs is waited for."""

    def __init__(self, breaks: set[int]) -> None:
        self.breaks, self.made, self.inner = breaks, 0, Sandbox()

    def cell(self, limits, **settings):
        made = self.inner.cell(limits, **settings)
        if self.made in self.breaks:
            finish = made.finish

            def breaks(wall):
                made.kill()
                finish(wall)
                raise BoxError("the box broke down")

            made.finish = breaks
        self.made += 1
        return made


@boxed
def test_a_box_that_breaks_down_is_replaced_once_and_then_it_is_who_ran_in_it():
    """The first box is the candidate's, the second that of the tests."""
    right = Trajectory(text="def f(x): return x * x")
    once, theirs, ours = (Code(sandbox=Fragile(breaks), packages=[]) for breaks in ({0, 1}, {0, 2, 3}, {1, 2, 3}))
    assert once(right, task(["assert f(2) == 4"])).value == 1.0
    assert theirs(right, task(["assert f(2) == 4"])).value == 0.0
    with pytest.raises(SandboxError, match="broke down"):
        ours(right, task(["assert f(2) == 4"]))


class Broken:
    def __init__(self, good: int) -> None:
        self.good, self.inner = good, Sandbox()

    def cell(self, limits, **settings):
        if not self.good:
            raise SandboxError("no more boxes")
        self.good -= 1
        return self.inner.cell(limits, **settings)


@boxed
def test_a_box_that_cannot_be_made_is_a_failure_and_no_score():
    with pytest.raises(SandboxError):
        Code(sandbox=Broken(0))
    made = Code(sandbox=Broken(2))
    for cell in made._cells.values():
        cell.kill()
    with pytest.raises(SandboxError, match="no more boxes"):
        earned(made, SQUARE, ["assert f(2) == 4"])
    from rondel.score.worker import call_reward

    with asyncio.Runner() as runner:
        failed = call_reward(made, Trajectory(text=SQUARE), task(["assert f(2) == 4"]), runner)
    assert isinstance(failed, Failed) and failed.reason == "raised SandboxError"


@boxed
def test_it_is_a_part_like_others():
    parts = {"solved": {"kind": "code", "weight": 2.0}, "form": {"kind": "format", "pattern": "```", "weight": 0.5}}
    made = build_reward({"kind": "combine", "parts": parts}, {"sandbox": Sandbox, "deadline": lambda: 10.0})
    score = asyncio.run(made(Trajectory(text=SQUARE), task(["assert f(2) == 4"])))
    assert score == Score(2.5, {"solved": 2.0, "form": 0.5})
    with pytest.raises(ConfigError, match="sandbox"):
        build_reward("code")
    with pytest.raises(ConfigError, match=r"raise task\.reward\.timeout"):
        Code(sandbox=Sandbox(), seconds=5.0, deadline=5.0)
    with pytest.raises(ConfigError, match="Did you mean 'fraction'"):
        Code(sandbox=Sandbox(), credit="fractions")


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "has no tests"),
        ([], "has no tests"),
        (["assert ("], "test 0 of t/1 is no Python"),
        ([{"input": "x"}], "a test is Python text"),
        ([3], "a test is Python text"),
        ([{"call": [1], "expected": 2}], "calls no named function"),
    ],
)
def test_tests_that_cannot_be_read_are_named(tests, said):
    with pytest.raises(DataError, match=said):
        read_tests(task(tests))


def test_the_last_block_is_the_answer():
    assert extract_code("a ```x``` b") == "a ```x``` b"
    assert extract_code("```\n1\n```\n```py\n2\n```") == "2\n"
    assert extract_code("```python\nunfinished") == "```python\nunfinished"
    assert extract_code('```python\ns = "```"\n```') == 's = "```"\n'


def test_the_names_that_a_test_asks_the_candidate_for():
    assert free_names("import math\nx = f(1)\nassert all(g(y) == math.pi for y in x) and solution.h(3)") == [
        "f",
        "g",
        "h",
        "solution",
    ]
    assert free_names("def g(f): return f(1)\nassert g(f) and [h for h in k]") == ["f", "k"], (
        "an argument of the same name hides nothing outside"
    )
    assert free_names("from solution import f\ndef test(): assert f(1)") == ["f"]
    assert free_names("def check(candidate):\n    assert candidate(len([1])) == 1") == []


def test_equal_as_json_can_say_it():
    assert (
        values_equal(Fraction(1, 2), 0.5)
        and values_equal(Decimal(3), 3)
        and not values_equal(Fraction(1, 3), 0.5)
        and values_equal(math.inf, math.inf)
    )
    assert values_equal((1, [2.0]), [1, [2]]) and values_equal({"a": (1,)}, {"a": [1]}) and values_equal(0.1 + 0.2, 0.3)
    assert (
        not values_equal(True, 1)
        and not values_equal(1, True)
        and not values_equal([1], [1, 2])
        and not values_equal("1", 1)
        and not values_equal(float("nan"), 1.0)
    )
    assert same_text("a \nb\n\n", "a\nb") and not same_text("a\n\nb", "a\nb")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.frozensets(st.integers())
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_cross_and_come_back(value):
    back = unpack(json.loads(json.dumps(pack(value))))
    assert back == value and type(back) is type(value)


# -- the python tool ---------------------------------------------------------------------------------


def python_call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


@boxed
def test_an_episode_with_an_interpreter():
    t = tokenizer.__wrapped__("chatml")
    says = [
        python_call("x = 6"),
        python_call("import os; open('f', 'w').write('y')\nx * 7"),
        python_call("1 / 0"),
        python_call("print(x)"),
        "42.",
    ]
    engine = Engine(*([*t.encode(s, add_special_tokens=False), t.eos_token_id] for s in says))
    env = Tools([tool.python_tool(Sandbox)])
    trajectory = asyncio.run(env.run(Task("t", "tools", {"prompt": "?"}), chat(t, engine, max_context=8192)))
    read = [t.decode(r.tokens) for r in engine.requests]
    assert "keeps" not in read[0] and "Run Python code" in read[0]
    assert "\n42\n" in read[2] and "ZeroDivisionError" in read[3] and "\n6\n" in read[4], "variables live between calls"
    assert trajectory.finish_reason == "stop" and trajectory.text.endswith("42.")


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setattr(tool, "SECONDS", 0.5)
    monkeypatch.setattr(tool, "GRACE", 1.0)
    made = tool.python_tool(Sandbox)(Task("t", "tools", {}))
    yield made
    made.close()


@boxed
def test_what_the_policy_reads_of_it(interpreter):
    run = interpreter.python
    assert run("x = 3") == "" and run("x + 1") == "4\n" and run("print('a'); 'b'") == "a\n'b'\n"
    assert "SyntaxError" in run("def f(:") and run("x") == "3\n"
    assert "sub\n" in run("import os; os.system('echo sub')"), "what it starts is heard too"
    flood = run("print('a' * 50000 + 'z')")
    assert (
        len(flood) < tool.MOST + 300 and flood.startswith("aaa") and flood.endswith("z\n") and "bytes left out" in flood
    )
    assert "TimeoutError" in run("while True: pass") and run("x") == "3\n", "stopped, and its variables are kept"
    how = "traceback.TracebackException.from_exception"
    slow = f"import traceback\nkept = {how}\ndef slow(*_):\n    while True: pass\n{how} = slow\n1 / 0"
    assert "TimeoutError: it took too long" in run(slow), "stopped while its error was written"
    assert run(f"{how} = kept") == ""
    assert "network" not in run("import socket; socket.create_connection(('127.0.0.1', 80))") and "exit code 3" in run(
        "import os; os._exit(3)"
    )
    assert "NameError" in run("x")
    deaf = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
    assert "it took too long" in run(deaf) and run("1 + 1") == "2\n"
    assert "interpreter ended" in run(
        "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{nonsense\\n')\n    except OSError: pass"
    )
    assert run("input()").endswith("EOFError: EOF when reading a line\n")


@boxed
def test_a_reply_of_many_endless_calls_is_no_fault_of_the_world(monkeypatch):
    """Each is within its limit; together they are longer than the environment waits."""
    monkeypatch.setattr(tool, "SECONDS", 0.4)
    monkeypatch.setattr(tool, "GRACE", 0.3)
    t = tokenizer.__wrapped__("chatml")
    says = ("\n".join([python_call("while True: pass")] * 12), "so.")
    engine = Engine(*([*t.encode(s, add_special_tokens=False), t.eos_token_id] for s in says))
    env = Tools([tool.python_tool(Sandbox)], timeout=3.0)
    asyncio.run(env.run(Task("t", "tools", {"prompt": "?"}), chat(t, engine, max_context=8192)))
    read = t.decode(engine.requests[1].tokens)
    assert "TimeoutError" in read and "did not answer within 3 s: it is busy with your other calls" in read


def test_a_box_is_busy_between_two_calls_of_the_policy_and_not_while_it_opens(monkeypatch):
    """Who waits for its turn then waits for the policy's other calls; a box that does not open is the world's fault."""
    asked = []

    class Interpreter:
        def __init__(self, _):
            asked.append(made.is_busy)

        def run_code(self, code):
            asked.append(made.is_busy)
            return code

    monkeypatch.setattr(tool, "SandboxInterpreter", Interpreter)
    monkeypatch.setattr(tool, "middle_out", lambda text: asked.append(made.is_busy) or text)
    made = tool.python_tool(Sandbox)(Task("t", "tools", {}))
    assert made.python("1") == "1" and asked == [False, True, True]


@boxed
@pytest.mark.parametrize("grouped", [True, False])
def test_a_full_disk_is_told_to_the_policy_which_can_free_it(monkeypatch, grouped):
    """Without control groups what it prints lies on that disk, too: then it is told that this is lost."""
    monkeypatch.setattr(tool, "LIMITS", Limits(wall=600, disk=2 << 20, file=1 << 20))
    made = tool.python_tool(lambda: Sandbox(group=grouped))(Task("t", "tools", {}))
    try:
        full = made.python("import os\nfor n in range(9):\n    with open(f'f{n}', 'wb') as f: f.write(bytes(1 << 19))")
        assert "No space left on device" in full and (grouped or "what was printed is lost" in full)
        said = made.python("print('x' * 9)")
        assert said == "xxxxxxxxx\n" if made._open.cell.grouped else "remove files if the disk is full" in said
        assert made.python("for n in range(4): os.remove(f'f{n}')") == "" and made.python("print(7)") == "7\n"
    finally:
        made.close()


@boxed
def test_what_a_policy_writes_into_its_answers_is_no_fault_of_the_world(interpreter):
    forges = "import os\nfor fd in range(3, 9):\n    try: os.write(fd, {!r}); break\n    except OSError: pass"
    for forged in (b"[" * 20_000 + b"\n", b'{"text": [1]}\n', b'{"text": ' + b"9" * 5000 + b"}\n", b"3\n", b"\xff\n"):
        assert "the interpreter ended" in interpreter.python(forges.format(forged)), forged
        assert interpreter.python("6 * 7") == "42\n"


@boxed
def test_the_box_of_an_episode_ends_with_it(interpreter):
    interpreter.python("import subprocess; subprocess.Popen(['sleep', '600'])")
    process = interpreter._open.cell.process
    interpreter.close()
    process.wait(20)
    assert not Path(f"/proc/{process.pid}").exists()
    with pytest.raises(EnvError, match="the episode is over"):
        interpreter.python("1")


def test_no_box_is_a_fault_of_the_environment():
    made = tool.python_tool(lambda: Broken(0))(Task("t", "tools", {}))
    if MISSING:
        pytest.skip(MISSING)
    with pytest.raises(EnvError, match="no box for the code of t: no more boxes"):
        made.python("1")
    made.close()


@boxed
def test_slow_code_of_one_episode_delays_no_other(monkeypatch):
    t = tokenizer.__wrapped__("chatml")
    env, ended = Tools([tool.python_tool(Sandbox)]), []

    async def episode(code: str, name: str) -> None:
        engine = Engine(*([*t.encode(s, add_special_tokens=False), t.eos_token_id] for s in (python_call(code), "so.")))
        await env.run(Task("t", "tools", {"prompt": "?"}), chat(t, engine, max_context=8192))
        ended.append(name)

    async def main() -> None:
        await asyncio.gather(
            episode("import time; time.sleep(2)", "slow"), *(episode("1", f"quick {n}") for n in range(3))
        )

    asyncio.run(main())
    assert ended[-1] == "slow"


# -- in a run ----------------------------------------------------------------------------------------


@boxed
def test_a_recipe_lends_its_rewards_boxes_and_the_check_asks_them(tmp_path):
    rows = [
        {"prompt": f"? {n}", "answer": f"def f(x): return x + {n}", "tests": [f"assert f(1) == {n + 1}"]}
        for n in range(3)
    ]
    parts = build_parts(with_rows(tmp_path, rows))
    try:
        findings = asyncio.run(check_reward(parts.pool, parts.tasks.train))
        assert [finding.ok for finding in findings if finding.what != "time"] == [True] * 4, findings
    finally:
        parts.close()


def with_rows(tmp_path, rows, **more):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    return tiny(tmp_path, task__data=data, task__reward={"kind": "code", "seconds": 1.0}, **more)


@boxed
def test_tests_that_never_run_are_refused_before_the_first_step(tmp_path):
    rows = [
        {
            "prompt": f"? {n}",
            "answer": "def f(x): return x",
            "tests": ["assert f(1) == 1" if n else "def g(): assert f(1)"],
        }
        for n in range(3)
    ]
    job = with_rows(tmp_path, rows)
    for verb in (build_parts, train):
        with pytest.raises(
            DataError, match=r"test 0 of .* tests nothing: it asserts nothing that is run: write assert"
        ):
            verb(job)
    (found,) = check(job)
    assert not found.ok and "tests nothing" in found.message
    parts = {"a": "number", "b": {"kind": "by", "parts": {"sums": "number", "code": "code"}}}
    good, bad = (Task("t", "x", {"tests": ["f(1)"], "source": source}) for source in ("sums", "code"))
    examine_task({"kind": "combine", "parts": parts}, good)
    with pytest.raises(DataError, match="tests nothing"):
        examine_task({"kind": "combine", "parts": parts}, bad)


def test_a_python_tool_without_time_for_its_own_limit_is_refused(tmp_path):
    job = tiny(tmp_path, task__env={"kind": "tools", "tools": ["python"], "timeout": 11.0})
    with pytest.raises(ConfigError, match=r"task\.env\.timeout = 11: the python tool ends its own calls after 12 s"):
        env_of(job, TaskSet([], []))


def test_a_python_tool_without_a_box_is_refused_before_the_run(tmp_path, monkeypatch):
    def none():
        raise SandboxError("code of the policy cannot be run here. Install bubblewrap (apt install bubblewrap)")

    monkeypatch.setattr(parts_module, "find_isolation", none)
    job = tiny(tmp_path, task__env={"kind": "tools", "tools": ["calculator", "python"]})
    with pytest.raises(
        ConfigError, match=r'task\.env\.tools has "python": code of the policy cannot be run here\. Install bubblewrap'
    ):
        build_parts(job)
    (found,) = check(job)
    assert not found.ok and "Install bubblewrap" in found.message


@boxed
def test_the_check_calls_the_python_tool(tmp_path, monkeypatch):
    job = tiny(tmp_path, task__env={"kind": "tools", "tools": ["calculator", "python"]})
    assert [one.__name__ for one in env_of(job, TaskSet([], [])).classes] == ["Python"]
    sandbox, python = boxes_of(job)
    assert sandbox.what == "sandbox" and sandbox.ok and "files, network, processes" in sandbox.message
    assert python.what == "python tool" and python.ok and python.message.startswith("answers")
    monkeypatch.setitem(parts_module.TOOLS, "python", tool.python_tool(lambda: Broken(0)))
    _, python = boxes_of(job)
    assert not python.ok and "no more boxes" in python.message
    assert boxes_of(tiny(tmp_path)) == []
