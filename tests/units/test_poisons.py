"""Whatever an answer does, it is worth 0, and the next one is judged as ever, by the same worker."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from kits.poisoned_answers import POISONS, SLOW
from kits.sweeps import covering
from rondel.assemble.components import LENDS
from rondel.core.errors import SandboxError
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.runtime.sandbox.probe import find_isolation
from rondel.score.pool import RewardPool

pytestmark = pytest.mark.slow

try:
    find_isolation()
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

FORMS = {
    "assert": {"tests": ["assert f(2) == 4 and abs(f(3) - 9) < 1e-6"]},
    "case": {"tests": [{"call": [2], "expected": 4}], "entry_point": "f"},
    "program": {"tests": [{"input": "2", "output": "the-output"}]},
    "check": {
        "tests": "def check(candidate):\n    assert isinstance(candidate(2), int)\n    assert candidate(2) == 4",
        "entry_point": "f",
    },
}


@pytest.fixture(scope="module")
def pool():
    with RewardPool({"kind": "code", "seconds": 0.7, "packages": []}, timeout=20.0, lends=LENDS) as made:
        yield made
        assert scored(made, "def f(x): return x + x + 1", FORMS["assert"]).value == 0.0, "a wrong one after the last"


def scored(pool: RewardPool, text: str, data: dict) -> Score | Failed:
    return asyncio.run(pool.score(Trajectory(text=text), Task("t/1", "single_turn", {"prompt": "?", **data})))


# as asserts and, by turns, in one other form; in the other two as well
@pytest.mark.parametrize(
    ("name", "rest"), covering(product(POISONS, [False, True]), [(name, False) for name in POISONS])
)
def test_a_poisoned_answer_earns_nothing_and_changes_nothing(pool, name, rest):
    before, (first, *others) = set(pool._hired), FORMS
    turn = list(POISONS).index(name) % len(others)
    some, left = [first, others.pop(turn)], others[: 0 if name in SLOW else None]
    # after the poison before: a worker that it had won over would now pay
    for form in left if rest else some:
        assert scored(pool, POISONS[name], FORMS[form]) == Score(0.0, {"passed": 0.0}), form
    right = "def f(x): return x * x"  # whose seconds a busy machine may take: once in three it has them
    assert any(scored(pool, right, FORMS["assert"]).value == 1.0 for _ in range(3)), "a right one after them"
    assert pool._hired == before and all(worker.process.poll() is None for worker in before)


def test_there_are_enough_poisons():
    assert len(POISONS) >= 60
