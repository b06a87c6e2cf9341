"""Does the code that the policy wrote do what its tests ask? Code and tests each run in a box of their own; results are compared outside both.

"assert f(2) == 4"                        Python text: asserts, functions test_..., or a check(candidate) with data["entry_point"]
{"input": "2\\n", "output": "4\\n"}        a program: what it prints for what it reads
{"call": [2], "expected": 4}              a function: data["entry_point"], or "function" in the case
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import math
import os
import re
import symtable
import time
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from rondel.score.boxed.harness import BROKEN, FAULT, PASSED
from rondel.score.boxed.plain import pack, unpack
from rondel.words.boxes import Limits, Ran
from rondel.words.errors import ConfigError, DataError, SandboxError
from rondel.words.protocols import Boxes, Cell
from rondel.words.registry import one_of
from rondel.words.types import Score, Task, Trajectory

BOXED = Path(__file__).parent / "boxed"
FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = (int, float, Fraction, Decimal)
SHARE = 0.8  # of the reward's deadline: what is not tested by then has not passed, and is no failure of the reward


def boxed(name: str) -> str:
    """The text of a module that runs in a box, with what it imports from here."""
    texts = [(BOXED / f"{part}.py").read_text(encoding="utf-8") for part in ("plain", "far", name)]
    return "from __future__ import annotations\n" + "\n".join(
        line for text in texts for line in text.splitlines() if not line.startswith(("from rondel.", "from __future__"))
    )


CANDIDATE, HARNESS = boxed("candidate") + "\nserve()\n", boxed("harness")


def extracted(text: str) -> str:
    """The last fenced block, or the whole text where there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


class Code:
    """The share of `task.data["tests"]` that pass, or with credit = "all" 1.0 only for all of them.

    sandbox   makes the boxes: lent by who builds the reward
    deadline  seconds for one call of the reward; the tests share 0.8 of them
    seconds   wall clock of one test; `memory` bytes of its box
    packages  what the code and its tests may import beside the standard library; it must be installed here
    What the code does is its own affair: one that hangs, is killed or floods has not passed the test. A box that cannot be made, a test that
    cannot be judged here, or tests that the reference (`task.data["answer"]`, if there is one) does not pass, are a failure of the reward
    and no score.
    """

    def __init__(
        self,
        *,
        sandbox: Boxes,
        deadline: float = 10.0,
        seconds: float = 2.0,
        memory: int = 256 << 20,
        credit: str = "fraction",
        packages: Sequence[str] = ("numpy",),
    ) -> None:
        one_of("reward 'code': credit", credit, ("fraction", "all"))
        if not 0 < seconds <= SHARE * deadline:
            raise ConfigError(
                f"reward 'code': seconds = {seconds}; one test may take up to {SHARE:g} of task.reward_timeout = {deadline:g}, that is "
                f"{SHARE * deadline:g}: lower seconds, or raise task.reward_timeout"
            )
        self.sandbox, self.deadline, self.seconds, self.credit = sandbox, deadline, seconds, credit
        self.limits = Limits(wall=seconds, cpu=seconds + 1, memory=memory, output=1 << 20)
        self.imports = importable(packages)
        self._cells: dict[str, Cell] = {}
        self._good: set[str] = set()  # tasks whose reference passes
        for name in ("candidate", "harness"):
            self._cell(name)
        for package in packages:
            ran = self._kept("candidate", self._cell("candidate").call(f"import {package}", wall=60.0))
            if not ran.ok:
                said = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2] or ran.ended
                raise SandboxError(
                    f"reward 'code': {package} cannot be imported in the sandbox: {said}. Raise memory = {memory}, or leave it out of packages = {list(packages)}"
                )

    def __call__(self, trajectory: Trajectory, task: Task) -> Score:
        tests = checked(task)
        until = time.monotonic() + SHARE * self.deadline
        code = extracted(trajectory.text)
        passed = self._passed(code, tests, task, until)
        if passed < len(tests):
            self._try_reference(code, tests, task, until)
        share = passed / len(tests)
        return Score(share if self.credit == "fraction" else float(share == 1.0), {"passed": share})

    def _passed(self, code: str, tests: list[Any], task: Task, until: float) -> int:
        passed = 0
        for test in tests:
            if (left := until - time.monotonic()) <= 0:
                break
            good = self._passes(code, test, task, min(left, self.seconds))
            passed += good
            if not good and self.credit == "all":
                break
        return passed

    def _try_reference(self, code: str, tests: list[Any], task: Task, until: float) -> None:
        """Once for each task: are these tests that can be passed?"""
        reference = task.data.get("answer")
        if not isinstance(reference, str) or task.id in self._good:
            return
        until = max(until, time.monotonic() + 0.5 * (1 - SHARE) * self.deadline)
        reference = extracted(reference)
        for number, test in enumerate(tests):
            left = until - time.monotonic()
            if left <= 0:
                return  # not known; another answer to this task asks again
            if reference == code or not self._passes(reference, test, task, min(left, self.seconds)):
                raise DataError(f"test {number} of {task.id} does not pass with the task's own answer: {str(test)[:200]!r}")
        self._good.add(task.id)

    def _passes(self, code: str, test: Any, task: Task, seconds: float) -> bool:
        if isinstance(test, str):
            return self._verdict(code, test, task, seconds) == PASSED
        cell = self._cell("candidate")
        if "input" in test:
            ran = self._kept("candidate", cell.call(code, stdin=str(test["input"]).encode(), wall=seconds))
            return ran.ok and same_text(ran.stdout.decode(errors="replace"), str(test["output"]))
        name = test.get("function", task.data.get("entry_point"))
        orders = [{"code": code}, {"plain": name, "args": [pack(one) for one in test["call"]]}]
        orders = [order | {"shared": [], "dropped": []} for order in orders]
        ran = self._kept("candidate", cell.call(CANDIDATE, stdin="".join(json.dumps(o) + "\n" for o in orders).encode(), wall=seconds))
        with suppress(Exception):  # whatever stands there was written by the candidate
            *_, last = ran.stdout.splitlines()
            return ran.ok and len(ran.stdout.splitlines()) == len(orders) and same(unpack(json.loads(last)["value"]), test["expected"])
        return False

    def _verdict(self, code: str, test: str, task: Task, seconds: float) -> int:
        """Tests and candidate at once, each in its box, two pipes between them. A test that cannot be judged is a DataError."""
        entry = str(task.data.get("entry_point", ""))
        judge = f"{HARNESS}\njudge({code!r}, {test!r}, {free_names(test)!r}, {entry!r})\n"
        candidate, harness = self._cell("candidate"), self._cell("harness")
        asks, answers, none, tells = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDWR), os.memfd_create("tells")
        try:
            candidate.begin(CANDIDATE, asks[0], answers[1], none)
            try:
                harness.begin(judge, answers[0], asks[1], tells)
            except SandboxError:
                candidate.finish(0)
                raise
            finally:
                for fd in (*asks, *answers, none):
                    os.close(fd)
            try:
                ran = self._kept("harness", harness.finish(seconds))
            finally:
                self._kept("candidate", candidate.finish(0))
            if ran.exit == FAULT and not ran.limit:
                raise DataError(
                    f"a test of {task.id} cannot be judged: {os.pread(tells, 2000, 0).decode(errors='replace')}; the test: {test[:200]!r}"
                )
        finally:
            os.close(tells)
        return ran.exit if not ran.limit else BROKEN

    def _cell(self, name: str) -> Cell:
        """The box of that name, which is used again as long as it is as it was."""
        cell = self._cells.get(name)
        if cell is None or not cell.alive:
            cell = self._cells[name] = self.sandbox.cell(self.limits, **self.imports)
        return cell

    def _kept(self, name: str, ran: Ran) -> Ran:
        if not self._cells[name].clean:
            self._cells.pop(name).kill()
        return ran


def importable(packages: Sequence[str]) -> dict[str, Any]:
    """Settings of a box whose Python can import these: their own folders are shown to it, and no others beside them."""
    shown, imports = [], []
    for package in packages:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"reward 'code': packages = {list(packages)}: '{package}' is not installed here: pip install it, or leave it out"
            )
        inside = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        shown += [str(path) for path in (inside, inside.with_name(f"{package}.libs")) if path.exists()]
        imports.append(str(inside.parent))
    return {"shown": tuple(shown), "imports": tuple(dict.fromkeys(imports))} if packages else {}


def checked(task: Task) -> list[Any]:
    """The tests of a task, or what is wrong with them."""
    tests = task.data.get("tests")
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list | tuple) or not tests:
        raise DataError(f"task {task.id} has no tests: data['tests'] is a list of asserts, of {{input, output}} or of {{call, expected}}")
    for number, test in enumerate(tests):
        if isinstance(test, str):
            try:
                ast.parse(test)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise DataError(f"test {number} of {task.id} is no Python: {error}") from error
        elif not isinstance(test, dict) or not ({"input", "output"} <= test.keys() or {"call", "expected"} <= test.keys()):
            raise DataError(
                f"test {number} of {task.id} is {str(test)[:80]!r}; a test is Python text, {{input, output}} or {{call, expected}}"
            )
        elif "call" in test and not isinstance(test.get("function", task.data.get("entry_point")), str):
            raise DataError(f"test {number} of {task.id} calls no named function: set data['entry_point'], or 'function' in the case")
    return list(tests)


def free_names(test: str) -> list[str]:
    """Names that a test reads and neither makes nor finds among the built-in ones: the candidate's. It can replace no other."""
    top = symtable.symtable(test, "<test>", "exec")
    made = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    tables, read = [top], set()
    for table in tables:
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
        made |= {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            read |= {alias.name for alias in node.names}
            made -= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "solution":
            read.add(node.attr)
    return sorted(name for name in read - made if not hasattr(builtins, name))


def same_text(said: str, wanted: str) -> bool:
    """Line by line, without the space at ends of lines and at the end."""
    return [line.rstrip() for line in said.rstrip().splitlines()] == [line.rstrip() for line in wanted.rstrip().splitlines()]


def same(said: Any, wanted: Any) -> bool:
    """Equal, True not being 1; floats to 1e-9 of their size. A list stands for a tuple too: JSON knows no other."""
    if isinstance(wanted, list | tuple):
        return isinstance(said, list | tuple) and len(said) == len(wanted) and all(map(same, said, wanted))
    if isinstance(wanted, dict):
        return isinstance(said, dict) and said.keys() == wanted.keys() and all(same(said[key], wanted[key]) for key in wanted)
    if isinstance(wanted, bool) or isinstance(said, bool):
        return said is wanted
    if isinstance(wanted, float) or isinstance(said, float):
        return isinstance(said, NUMBER) and isinstance(wanted, NUMBER) and math.isclose(said, wanted, rel_tol=1e-9, abs_tol=1e-9)
    return bool(said == wanted)
