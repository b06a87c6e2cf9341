"""Several hundred graded answers: what is right is 1, what is wrong is 0, and what cannot be
computed is never right.
"""

import asyncio
import math
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.graded_answers import HOSTILE, KNOWN, MATH, NUMBER, REFUSED
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score import build_reward
from rondel.score.answer_text import extract_answer, is_too_expensive, plain_number
from rondel.score.answer_time import AnswerTooSlow, limit_answer_time
from rondel.score.pool import RewardPool
from rondel.score.result import read_score


def task(gold):
    return Task("t/1", "single_turn", {"answer": gold})


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """`graded(rows)`, by the same worker for all tables; it stands in `graded.folder`, where an injected command would
    leave its file.
    """

    async def ask(pool, rows):
        return await asyncio.gather(*(pool.score(Trajectory(text=text), task(gold)) for gold, text, _ in rows))

    def grade(rows):
        return list(zip(rows, asyncio.run(ask(pool, rows))))

    grade.folder = tmp_path_factory.mktemp("graded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(grade.folder)
        with RewardPool("math", workers=1, timeout=5.0) as pool:
            yield grade


def is_right(result):
    return isinstance(result, Score) and result.value == 1.0


@pytest.mark.slow
def test_the_table_of_math(graded):
    assert len(MATH) + len(NUMBER) >= 290
    results = graded(MATH)
    assert [row for row, result in results if row[2] is not REFUSED and result != Score(float(row[2]))] == []
    assert [row for row, result in results if row[2] is REFUSED and is_right(result)] == []
    # most that cannot be computed is wrong before it is tried
    assert sum(isinstance(result, Failed) for _, result in results) <= 1
    assert list(graded.folder.iterdir()) == []


@pytest.mark.slow
def test_an_answer_that_nobody_can_compute_is_wrong_and_no_failure():
    """By the same worker as a right one after it."""
    with RewardPool("math", timeout=2.0) as pool:
        (worker,) = pool._hired
        for gold, text in (
            ("7", r"\boxed{\int e^{x^2}\sin(x^3) dx}"),
            ("x+1", r"\boxed{(a+b+c+d)^{60}}"),
            (r"\{1,2\}", r"\boxed{\sum_{n=1}^{\infty}\frac{\sin n}{n^2}}"),
            (r"\{1,2\}", r"\boxed{1,000\infty}"),  # math-verify raises
        ):
            assert asyncio.run(pool.score(Trajectory(text=text), task(gold))) == Score(0.0), text
            assert asyncio.run(pool.score(Trajectory(text=rf"\boxed{{{gold}}}"), task(gold))) == Score(1.0), gold
            assert pool._hired == {worker}


@pytest.mark.slow
def test_an_answer_at_which_a_scorer_raises_or_hangs_is_worth_nothing():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    reward = build_reward("reasoning_gym", {"deadline": lambda: 0.4})
    for name, text in {
        "prime_factorization": "no idea", "game_of_life": "{}", "coin_flip": "1e999", "boxnet": "7", "countdown": "9**9**9", "puzzle24": "9**9**9",
    }.items():  # fmt: skip
        given = Task("t/1", "x", {"entry": reasoning_gym.create_dataset(name, size=1, seed=1)[0]})
        assert reward(Trajectory(text=text), given) == 0.0, name
    given.data["entry"]["metadata"] = {"source_dataset": "prime_factorization"}
    with pytest.raises((KeyError, ValueError, TypeError)):  # that is no fault of an answer
        reward(Trajectory(text="2"), given)


@pytest.mark.slow
def test_what_is_graded_wrongly_is_known(graded):
    """If one of these is right one day, move it to the table and out of docs/score.md."""
    assert [row for row, result in graded(KNOWN) if is_right(result) == row[2]] == []


def test_the_table_of_numbers():
    reward = build_reward("number")
    assert [(g, t[:20], r) for g, t, r in NUMBER if reward(Trajectory(text=t), task(g)) != float(r)] == []


@settings(max_examples=40, deadline=None)
@given(st.fractions(max_denominator=10**6).filter(lambda f: abs(f) < 10**12))
def test_a_plain_number_is_read_exactly(value):
    assert plain_number(f"{value}") == value and plain_number(extract_answer(rf"so \boxed{{{value}}}.")) == value


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from(["\\boxed{", "}", "7", "<answer>", "</answer>", "not ", " but ", "$"])).map("".join)
)
def test_any_text_says_something(text):
    assert isinstance(extract_answer(text), str) and is_too_expensive(extract_answer(text)) in (True, False)


def test_texts_that_would_hang_are_known_as_such():
    assert not any(is_too_expensive(extract_answer(text)) for _, text, right in MATH if right)
    assert sum(is_too_expensive(extract_answer(text)) for _, text, right in HOSTILE if right is REFUSED) >= 12
    assert (
        extract_answer("\\boxed{" * 10**5) and extract_answer("<answer>" * 10**5) and extract_answer("not " * 10**5)
    )  # and soon


class Number:
    """Not one of Python's own."""

    def __float__(self):
        return 1.0


@pytest.mark.parametrize(
    "returned",
    [None, "1.0", "", b"1", 1j, math.nan, math.inf, -math.inf, Number(), object(), {}, [], (), {1.0}, [1.0], {"a": "1"}, {"a": math.nan},
     {"a": 1.0, "total": None}, 10**400, -(10**400), {"a": 10**400}, lambda: 1.0, Ellipsis, NotImplemented, ValueError("1.0"), float],
)  # fmt: skip
def test_what_is_no_number_never_becomes_one(returned):
    assert isinstance(read_score(returned), Failed)


def test_a_sum_beyond_all_numbers_is_a_failure():
    assert isinstance(read_score({"a": 1.5e308, "b": 1.5e308}), Failed)
    assert isinstance(read_score([(0, 1.5e308), (1, 1.5e308)]), Failed)


def test_an_alarm_that_rings_while_it_is_put_off_is_not_left_running(monkeypatch):
    """Else it would ring in the next answer, or in the reward's process itself."""
    before, late, plain = signal.getsignal(signal.SIGALRM), [True], signal.setitimer

    def ring_once(which, seconds, interval=0.0):
        if not seconds and late:
            late.clear()
            raise AnswerTooSlow
        return plain(which, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", ring_once)
    with limit_answer_time(60.0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) == before
