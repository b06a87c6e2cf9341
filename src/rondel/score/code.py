"""Does the code that the policy wrote do what its tests ask? Code and tests each run in a box
of their own; results are compared outside both.

"assert f(2) == 4"                        Python text: asserts, functions test_..., or a check(candidate) with
                                          data["entry_point"]
{"input": "2\\n", "output": "4\\n"}        a program: what it prints for what it reads
{"call": [2], "expected": 4}              a function: data["entry_point"], or "function" in the case
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondel.core.clocks import running_time
from rondel.core.errors import BoxError, ConfigError, DataError, SandboxError
from rondel.core.protocols import SandboxCell, SandboxFactory
from rondel.core.registry import one_of
from rondel.core.sandbox_types import CommandResult, Limits
from rondel.core.types import Score, Task, Trajectory
from rondel.score.boxed.harness import BROKEN, EMPTY, FAULT, GONE, PASSED, WRONG
from rondel.score.code_tests import extract_code, harness_call, read_tests, reference_of

BOXED = Path(__file__).parent / "boxed"
MODULES = ("ast", "copy", "io", "numbers")  # that the text of a box imports
SHARE = 0.8  # of the reward's deadline: what is not tested by then has not passed, and is no failure of the reward
LATE = 46  # a verdict that no harness says
ALL = 0.95  # of it, by when the reference has been tried as far as there was time
ENDED = {
    PASSED: "", WRONG: "an assertion does not hold", BROKEN: "an error is raised", EMPTY: "no assertion is carried out",
    GONE: "its process ends before it answers", LATE: "it takes too long",
}  # fmt: skip


def boxed_source(*names: str) -> str:
    """The text of modules that run in a box together."""
    texts = [(BOXED / f"{name}.py").read_text(encoding="utf-8") for name in names]
    return "from __future__ import annotations\n" + "\n".join(
        line for text in texts for line in text.splitlines() if not line.startswith(("from rondel.", "from __future__"))
    )


CANDIDATE = boxed_source("plain", "containers", "remote_exceptions", "proxy", "far", "candidate")
HARNESS = boxed_source(
    "plain", "compare", "containers", "remote_exceptions", "proxy", "far", "assertions", "suite", "harness"
)


class Code:
    """The share of `task.data["tests"]` that pass, or with credit = "all" 1.0 only for all of them.

    sandbox   makes the boxes: lent by who builds the reward, of the kind that the recipe names
    deadline  seconds for one call of the reward; the tests share 0.8 of them
    seconds   wall clock of one test; `memory` bytes of its box
    packages  what the code and its tests may import beside the standard library; it must be installed here,
              or in the image of the sandbox
    What the code does is its own affair: one that hangs, is killed or floods has not passed the
    test. A box that cannot be made, a test that cannot be judged here, or tests that the
    reference (`task.data["answer"]`, if there is one)
    does not pass, are a failure of the reward and no score.
    """

    maximum = 1.0

    def __init__(
        self,
        *,
        sandbox: SandboxFactory,
        deadline: float = 10.0,
        seconds: float = 2.0,
        memory: int = 256 << 20,
        credit: str = "fraction",
        packages: Sequence[str] = ("numpy",),
    ) -> None:
        one_of("reward 'code': credit", credit, ("fraction", "all"))
        if not 0 < seconds <= SHARE * deadline:
            raise ConfigError(
                f"reward 'code': seconds = {seconds}; one test may take up to {SHARE:g} of task.reward.timeout = "
                f"{deadline:g}, that is "
                f"{SHARE * deadline:g}: lower seconds, or raise task.reward.timeout"
            )
        self.sandbox, self.deadline, self.seconds, self.credit = sandbox, deadline, seconds, credit
        self.limits = Limits(wall=seconds, cpu=seconds + 1, memory=memory, output=1 << 20)
        shown = import_settings(packages) if getattr(sandbox, "shows_host", True) else {}  # else an image has them
        self.settings = shown | {"modules": MODULES}
        self._cells: dict[str, SandboxCell] = {}
        self._good: dict[str, int] = {}  # task -> how many of its tests its reference is known to pass
        self._late: set[str] = set()  # tasks whose reference has run out of time once
        for name in ("candidate", "harness"):
            self._open_cell(name)
        for package in packages:
            ran = self._drop_dirty_cell("candidate", self._open_cell("candidate").call(f"import {package}", wall=60.0))
            if not ran.ok:
                said = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2] or ran.ended
                raise SandboxError(
                    f"reward 'code': {package} cannot be imported in the sandbox: {said}. Raise memory = {memory}, or "
                    f"leave it out of packages = {list(packages)}"
                )

    def __call__(self, trajectory: Trajectory, task: Task) -> Score:
        tests = read_tests(task)
        began = running_time()
        code = extract_code(trajectory.text)
        passed = self._count_passed(code, tests, task, began + SHARE * self.deadline)
        if passed < len(tests):
            self._try_reference(tests, task, began + ALL * self.deadline)
        share = passed / len(tests)
        return Score(share if self.credit == "fraction" else float(share == 1.0), {"passed": share})

    def _count_passed(self, code: str, tests: list[Any], task: Task, until: float) -> int:
        passed = 0
        for test in tests if code.strip() else ():  # an empty answer solves nothing, whatever is asked of it
            if (left := until - running_time()) <= 0:
                break
            good = self._run_test(code, test, task, min(left, self.seconds)) == PASSED
            passed += good
            if not good and self.credit == "all":
                break
        return passed

    def _try_reference(self, tests: list[Any], task: Task, until: float) -> None:
        """Once for each task: are these tests that can be passed? Each has its whole time: what
        an answer used up is no fault of theirs.
        """
        reference = reference_of(task)
        for number in range(self._good.get(task.id, 0), len(tests) if reference else 0):
            if running_time() + self.seconds > until:
                return  # another answer to this task goes on from here
            verdict = self._run_test(reference, tests[number], task, self.seconds)
            if verdict == LATE and task.id not in self._late:
                self._late.add(task.id)
                return  # this machine may have been busy, once
            if verdict != PASSED:
                raise DataError(
                    f"test {number} of {task.id} does not pass with the task's own answer: {ENDED[verdict]}; the test: "
                    f"{str(tests[number])[:200]!r}"
                )
            self._good[task.id] = number + 1

    def _run_test(self, code: str, test: Any, task: Task, seconds: float) -> int:
        """Of one test. A box that breaks down while the candidate runs in it may be nobody's fault once."""
        for again in (True, False):
            try:
                return (
                    self._run_program(code, test, seconds)
                    if "input" in test
                    else self._run_judged_test(code, harness_call(code, test, task), test, task, seconds)
                )
            except BoxError:
                if not again and not self._cells["harness"].alive:
                    raise
        return GONE

    def _run_program(self, code: str, test: dict[str, Any], seconds: float) -> int:
        ran = self._drop_dirty_cell(
            "candidate",
            self._open_cell("candidate").call(code, stdin=str(test["input"]).encode(errors="replace"), wall=seconds),
        )
        if not ran.ok:
            return LATE if ran.limit == "wall" else BROKEN
        return PASSED if same_text(ran.stdout.decode(errors="replace"), str(test["output"])) else WRONG

    def _run_judged_test(self, code: str, judgement: str, test: Any, task: Task, seconds: float) -> int:
        """Tests and candidate at once, each in its box, two pipes between them. A test
        that cannot be judged is a DataError.
        """
        candidate, harness = self._open_cell("candidate"), self._open_cell("harness")
        asks, answers, none, tells = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDWR), os.memfd_create("tells")
        try:
            try:
                candidate.begin("serve()", asks[0], answers[1], none, prelude=CANDIDATE)
                try:
                    harness.begin(judgement, answers[0], asks[1], tells, prelude=HARNESS)
                except SandboxError:
                    candidate.finish(0)
                    raise
            finally:
                for fd in (*asks, *answers, none):
                    os.close(fd)
            try:
                ran = self._drop_dirty_cell("harness", harness.finish(seconds))
            finally:
                self._drop_dirty_cell("candidate", candidate.finish(0))
            if ran.exit == FAULT and not ran.limit:
                raise DataError(
                    f"a test of {task.id} cannot be judged: {os.pread(tells, 2000, 0).decode(errors='replace')}; the "
                    f"test: {str(test)[:200]!r}"
                )
        finally:
            os.close(tells)
        if ran.limit == "wall":
            return LATE
        return ran.exit if not ran.limit and ran.exit in ENDED else BROKEN

    def _open_cell(self, name: str) -> SandboxCell:
        """The box of that name, which is used again as long as it is as it was."""
        cell = self._cells.get(name)
        if cell is None or not cell.alive:
            cell = self._cells[name] = self.sandbox.cell(self.limits, **self.settings)
        return cell

    def _drop_dirty_cell(self, name: str, ran: CommandResult) -> CommandResult:
        if not self._cells[name].clean:
            self._cells.pop(name).kill()
        return ran


def import_settings(packages: Sequence[str]) -> dict[str, Any]:
    """Settings of a box whose Python can import these: their own folders are shown to it, and no others beside them."""
    shown, imports = [], []
    for package in packages:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"reward 'code': packages = {list(packages)}: '{package}' is not installed here: pip install it, or "
                f"leave it out"
            )
        inside = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        shown += [str(path) for path in (inside, inside.with_name(f"{package}.libs")) if path.exists()]
        imports.append(str(inside.parent))
    return {"shown": tuple(shown), "imports": tuple(dict.fromkeys(imports))} if packages else {}


def same_text(said: str, wanted: str) -> bool:
    """Line by line, without the space at ends of lines and at the end."""
    return [line.rstrip() for line in said.rstrip().splitlines()] == [
        line.rstrip() for line in wanted.rstrip().splitlines()
    ]
