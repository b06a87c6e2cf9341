"""Law 11, failure is data: faults of rewards and environments are typed outcomes. They are never the number 0 and never
part of a baseline. Their rates have alarms.

How many faults end a run is in tests/units/test_failure_budget.py.
"""

import asyncio
import math

import pytest

from kits import runs
from kits.bandit import RIGHT, bandit
from rondel.core.events import Warned, subscribe
from rondel.core.types import Failed, Group, Score, Task, Trajectory
from rondel.score.pool import RewardPool

TASK = Task("t/1", "single_turn", {"prompt": "3+4=", "answer": "7"})


FAULTS = {
    "while True: pass": "timeout",
    "time.sleep(60)": "timeout",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)": "timeout",
    "raise ValueError('no answer')": "raised ValueError",
    "sys.exit(0)": "raised SystemExit",
    "raise KeyboardInterrupt": "raised KeyboardInterrupt",
    "def f(): f()\nf()": "raised RecursionError",
    "result = float('nan')": "returned nan",
    "result = float('-inf')": "returned -inf",
    "result = None": "returned None",
    "result = '1.0'": "returned str",
    "result = {'correct': float('nan')}": "returned nan",
    "os._exit(0)": "worker died",
    "ctypes.string_at(0)": "worker died",
    "os.kill(os.getpid(), 9)": "worker died",
}


@pytest.mark.slow
def test_no_fault_becomes_a_number_and_the_next_call_is_served(theirs):
    with RewardPool("theirs:reward", timeout=3.0) as pool:
        for code, reason in FAULTS.items():
            result = asyncio.run(pool.score(Trajectory(text=code), TASK))
            assert isinstance(result, Failed) and result.reason == reason, (code, result)
            assert asyncio.run(pool.score(Trajectory(text="result = 0.5"), TASK)) == Score(0.5), code
        assert sum(pool.failures.values()) == len(FAULTS) and pool.calls == 2 * len(FAULTS)


def test_a_failure_says_where_and_stays_out_of_the_baseline(theirs):
    with RewardPool("theirs:reward") as pool:
        failed = asyncio.run(pool.score(Trajectory(text="raise ValueError('no answer')"), TASK))
    assert failed.detail.endswith("ValueError: no answer")
    assert Group(0, TASK, [Trajectory(score=failed), Trajectory(score=Score(0.5))], born=0).rewards == [0.5]


@pytest.mark.slow
def test_a_hang_holds_only_its_own_worker(theirs):
    async def burst(pool):
        texts = ["while True: pass"] + ["result = 0.5"] * 20
        return await asyncio.gather(*(pool.score(Trajectory(text=t), TASK) for t in texts))

    with RewardPool("theirs:reward", workers=2, timeout=1.0) as pool:
        hung, *others = asyncio.run(burst(pool))
    assert hung.reason == "timeout" and others == [Score(0.5)] * 20


def test_the_alarm_rings_once_above_five_percent(theirs):
    heard = []
    stop = subscribe(lambda event: heard.append(event) if isinstance(event, Warned) else None)

    async def calls(pool, n, broken):
        for i in range(n):
            await pool.score(Trajectory(text="result = None" if i < broken else "result = 1.0"), TASK)

    with RewardPool("theirs:reward") as pool:
        asyncio.run(calls(pool, 40, 2))  # 5 %: not above
        assert heard == []
        asyncio.run(calls(pool, 40, 40))
    stop()
    assert len(heard) == 1 and "returned None" in heard[0].message


@pytest.mark.slow
def test_a_reward_that_stops_starting_is_a_failure(theirs):
    with RewardPool("theirs:reward") as pool:
        (theirs / "theirs.py").write_text("import nothing_like_it\n")
        assert asyncio.run(pool.score(Trajectory(text="os._exit(1)"), TASK)).reason == "worker died"
        failed = asyncio.run(pool.score(Trajectory(text="result = 1.0"), TASK))
    assert failed.reason == "worker did not start" and "nothing_like_it" in failed.detail


@pytest.mark.slow
def test_five_percent_faults_leave_the_training_reward_unbiased(tmp_path):
    (clean, book, _), (faulty, faulty_book, failures) = bandit(tmp_path, 0.0), bandit(tmp_path, 0.05)
    assert runs.balances(book) and runs.balances(faulty_book) and failures.why == ""
    same = {t.text: t.reward for group in clean for t in group.trajectories}
    scored = [t for group in faulty for t in group.trajectories if t.reward is not None]
    lost = [t for group in faulty for t in group.trajectories if t.reward is None]
    assert all(same.get(t.text, t.reward) == t.reward for t in scored) and sum(t.text in same for t in scored) > 3000
    assert all(isinstance(t.score, Failed) and t.score.reason == "environment fault" for t in lost)
    every = len(scored) + len(lost)
    assert abs(len(lost) / every - 0.05) < 3 * math.sqrt(0.05 * 0.95 / every)
    for groups in (clean, faulty):
        rewards = [r for group in groups for r in group.rewards]
        assert abs(sum(rewards) / len(rewards) - RIGHT) < 3 * math.sqrt(RIGHT * (1 - RIGHT) / len(rewards))
    # counted as zeros, they would be far off: this test would see it
    assert abs(sum(t.reward for t in scored) / every - sum(t.reward for t in scored) / len(scored)) > 0.01
