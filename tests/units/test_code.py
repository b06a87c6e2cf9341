"""The code reward: what counts as solved, what cheats earn, and whose fault what is. And the python tool of an episode."""

from __future__ import annotations

import asyncio
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_kit import tiny
from units.chat_kit import Engine, chat, tokenizer

from rondel.assemble.parts import LENDS, env_of
from rondel.assemble.parts import build as build_parts
from rondel.generate.envs import python as tool
from rondel.generate.envs.sources import TaskSet
from rondel.generate.envs.tools import Tools
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.probe import isolation
from rondel.score import build
from rondel.score.boxed.plain import pack, unpack
from rondel.score.code import Code, checked, extracted, free_names, same, same_text
from rondel.score.pool import RewardPool
from rondel.score.preflight import check_reward
from rondel.words.errors import ConfigError, DataError, EnvError, SandboxError
from rondel.words.types import Failed, Score, Task, Trajectory

pytestmark = pytest.mark.slow

try:
    isolation()
    MISSING = ""
except SandboxError as error:
    MISSING = str(error)
boxed = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def reward():
    made = Code(sandbox=Sandbox(), seconds=0.7)
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


CHEATS = {
    "leaves well": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "leaves with the verdict": "import os; os._exit(40)",
    "leaves later": "def f(x):\n    import os; os._exit(40)",
    "raises nothing bad": "def f(x): raise SystemExit(0)",
    "is equal to all": "class E:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = None\ndef f(x): return E()",
    "an int that is equal to all": "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(x): return E(7)",
    "a string that is equal": "class E(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef f(x): return E('x')",
    "other built-ins": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\nbuiltins.all = builtins.any = lambda *a: True\ndef f(x): return 0",
    "names of the test": "def assertEqual(*a): return True\ndef isinstance(*a): return True\ndef abs(x): return 4\nf = lambda x: 5",
    "prints the marker": "print('40'); print('{\"value\": {\"i\": \"0x4\"}}')\ndef f(x):\n    print('passed', flush=True)\n    return 0",
    "asserts off": "import sys\nsys.flags = None\n__debug__x = False\ndef f(x): return 0",
    "looks for the tests": "import gc, re\ndef f(x):\n    for o in gc.get_objects():\n        found = re.search(r'(f|candidate)\\(2\\) == (\\d)|expected\\W+(\\d)', repr(o)[:99999])\n        if found: return int(found[2] or found[3])\n    return -1",
    "replaces the harness": "import sys\nfor name, m in list(sys.modules.items()):\n    for k in ('judge', 'pack', 'ask'):\n        if hasattr(m, k): setattr(m, k, lambda *a, **b: 4)\ndef f(x): return 3",
    "patches the frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_globals['pack'] = lambda *a: {'i': '0x5'}\n    frame = frame.f_back\ndef f(x): return 0",
    "hangs": "while True: pass",
    "hangs when called": "def f(x):\n    while True: pass",
    "floods": "def f(x):\n    while True: print('x' * 10000)",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "kills": "import os\nos.kill(-1, 9)",
    "eats": "def f(x): return [bytearray(1 << 24) for _ in range(999)]",
    "nests": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "answers before it is asked": "import os, json\nfor fd in range(3, 30):\n    try: os.write(fd, b'{\"value\": null}\\n{\"value\": {\"i\": \"0x5\"}}\\n' * 9)\n    except OSError: pass\ndef f(x): return 0",
    "no python": "def f(x: return",
}  # fmt: skip


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
    "leaves where all is caught": ("import os\ndef f(x): os._exit(0)", "try:\n    f(2)\nexcept BaseException:\n    pass"),
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


@boxed
def test_what_cannot_be_judged_is_a_failure_and_no_score(reward, tmp_path, monkeypatch):
    for test, said in (
        ("import sys\nassert f(sys) == 1", "hands a module to the candidate"),
        ("import no_such_package\nassert f(1) == 1", "import 'no_such_package', which is not in their box"),
    ):
        with pytest.raises(DataError, match=said):
            earned(reward, SQUARE, [test])
    with pytest.raises(ConfigError, match="'no_such_package' is not installed here"):
        Code(sandbox=Sandbox(), packages=["no_such_package"])
    (tmp_path / "needs_more.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SandboxError, match="needs_more cannot be imported in the sandbox: ModuleNotFoundError"):
        Code(sandbox=Sandbox(), packages=["needs_more"])


@boxed
@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("form", ["assert", "check", "case", "program"])
def test_a_cheat_earns_nothing(reward, cheat, form):
    tests, data = {
        "assert": (["assert f(2) == 4 and abs(f(3) - 9) < 1e-6"], {}),
        "check": ("def check(candidate):\n    assert isinstance(candidate(2), int)\n    assert candidate(2) == 4", {"entry_point": "f"}),
        "case": ([{"call": [2], "expected": 4}], {"entry_point": "f"}),
        "program": ([{"input": "2", "output": "the-output"}], {}),
    }[form]
    if form == "check" and any(word in cheat for word in ("hangs", "floods", "bomb", "eats")):
        pytest.skip("as with one assert, and it takes its time")
    assert earned(reward, CHEATS[cheat], tests, **data) == 0.0
    assert earned(reward, "def f(x): return x * x", ["assert f(2) == 4"]) == 1.0, "and the next one is judged as ever"


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
            reward(Trajectory(text="def f(x): return 1"), Task("t/2", "x", {"tests": broken, "answer": "def f(x): return x * x"}))


@boxed
def test_in_a_pool_hangs_are_the_policys_and_data_the_worlds():
    with RewardPool({"kind": "code", "seconds": 0.5}, timeout=3.0, lends=LENDS) as pool:

        def score(text, tests, **data):
            return asyncio.run(pool.score(Trajectory(text=text), task(tests, **data)))

        assert score(SQUARE, ["assert f(2) == 4"]) == Score(1.0, {"passed": 1.0})
        assert score("while True: pass", ["assert f(2) == 4"] * 60).value == 0.0, "it ran out of the call's time, and that is no failure"
        assert score(SQUARE, []).reason == "raised DataError"
        assert not [r for r in pool._recent.outcomes if "timeout" in r]


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
    from rondel.score.worker import call

    with asyncio.Runner() as runner:
        failed = call(made, Trajectory(text=SQUARE), task(["assert f(2) == 4"]), runner)
    assert isinstance(failed, Failed) and failed.reason == "raised SandboxError"


@boxed
def test_it_is_a_part_like_others():
    parts = {"solved": {"kind": "code", "weight": 2.0}, "form": {"kind": "format", "pattern": "```", "weight": 0.5}}
    made = build({"kind": "combine", "parts": parts}, {"sandbox": Sandbox, "deadline": lambda: 10.0})
    score = asyncio.run(made(Trajectory(text=SQUARE), task(["assert f(2) == 4"])))
    assert score == Score(2.5, {"solved": 2.0, "form": 0.5})
    with pytest.raises(ConfigError, match="sandbox"):
        build("code")
    with pytest.raises(ConfigError, match=r"raise task\.reward_timeout"):
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
        checked(task(tests))


def test_the_last_block_is_the_answer():
    assert extracted("a ```x``` b") == "a ```x``` b"
    assert extracted("```\n1\n```\n```py\n2\n```") == "2\n"
    assert extracted("```python\nunfinished") == "```python\nunfinished"
    assert extracted('```python\ns = "```"\n```') == 's = "```"\n'


def test_the_names_that_a_test_asks_the_candidate_for():
    assert free_names("import math\nx = f(1)\nassert all(g(y) == math.pi for y in x) and solution.h(3)") == ["f", "g", "h", "solution"]
    assert free_names("def g(f): return f(1)\nassert g(f) and [h for h in k]") == ["f", "k"], (
        "an argument of the same name hides nothing outside"
    )
    assert free_names("from solution import f\ndef test(): assert f(1)") == ["f"]
    assert free_names("def check(candidate):\n    assert candidate(len([1])) == 1") == []


def test_equal_as_json_can_say_it():
    assert same(Fraction(1, 2), 0.5) and same(Decimal(3), 3) and not same(Fraction(1, 3), 0.5) and same(math.inf, math.inf)
    assert same((1, [2.0]), [1, [2]]) and same({"a": (1,)}, {"a": [1]}) and same(0.1 + 0.2, 0.3)
    assert not same(True, 1) and not same(1, True) and not same([1], [1, 2]) and not same("1", 1) and not same(float("nan"), 1.0)
    assert same_text("a \nb\n\n", "a\nb") and not same_text("a\n\nb", "a\nb")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner) | st.frozensets(st.integers())
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
    assert len(flood) < tool.MOST + 300 and flood.startswith("aaa") and flood.endswith("z\n") and "bytes left out" in flood
    assert "TimeoutError" in run("while True: pass") and run("x") == "3\n", "stopped, and its variables are kept"
    assert "network" not in run("import socket; socket.create_connection(('127.0.0.1', 80))") and "exit code 3" in run(
        "import os; os._exit(3)"
    )
    assert "NameError" in run("x")
    deaf = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
    assert "it took too long" in run(deaf) and run("1 + 1") == "2\n"
    assert "interpreter ended" in run("import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{nonsense\\n')\n    except OSError: pass")
    assert run("input()").endswith("EOFError: EOF when reading a line\n")


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
        await asyncio.gather(episode("import time; time.sleep(2)", "slow"), *(episode("1", f"quick {n}") for n in range(3)))

    asyncio.run(main())
    assert ended[-1] == "slow"


# -- in a run ----------------------------------------------------------------------------------------


@boxed
def test_a_recipe_lends_its_rewards_boxes_and_the_check_asks_them(tmp_path):
    parts = build_parts(tiny(tmp_path, task__reward={"kind": "code", "seconds": 1.0}))
    try:
        tasks = [
            Task(f"t/{n}", "x", {"prompt": "?", "answer": f"def f(x): return x + {n}", "tests": [f"assert f(1) == {n + 1}"]})
            for n in range(3)
        ]
        findings = asyncio.run(check_reward(parts.pool, tasks))
        assert [finding.ok for finding in findings if finding.what != "time"] == [True] * 4, findings
    finally:
        parts.close()


def test_a_python_tool_without_time_for_its_own_limit_is_refused(tmp_path):
    job = tiny(tmp_path, task__env="tools", task__tools=["python"], task__tool_timeout=11.0)
    with pytest.raises(ConfigError, match=r"task\.tool_timeout = 11: the python tool ends its own calls after 12 s"):
        env_of(job, TaskSet([], []))
    assert [
        one.__name__ for one in env_of(tiny(tmp_path, task__env="tools", task__tools=["calculator", "python"]), TaskSet([], [])).classes
    ] == ["Python"]
