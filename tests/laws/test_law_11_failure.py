"""Law 11: what a reward does wrong is a `Failed` with its reason, never a number. Law 14: its processes end with us."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rondel.core.events import Warned, subscribe
from rondel.core.types import Failed, Group, Score, Task, Trajectory
from rondel.score.pool import RewardPool

TASK = Task("t/1", "single_turn", {"prompt": "3+4=", "answer": "7"})

THEIRS = """
import ctypes, os, sys, time
def reward(trajectory, task):
    exec(trajectory.text, globals())
    return globals().pop("result", 1.0)
"""

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


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_no_fault_becomes_a_number_and_the_next_call_is_served(theirs):
    with RewardPool("theirs:reward", timeout=0.6) as pool:
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


def test_a_reward_that_stops_starting_is_a_failure(theirs):
    with RewardPool("theirs:reward") as pool:
        (theirs / "theirs.py").write_text("import nothing_like_it\n")
        assert asyncio.run(pool.score(Trajectory(text="os._exit(1)"), TASK)).reason == "worker died"
        failed = asyncio.run(pool.score(Trajectory(text="result = 1.0"), TASK))
    assert failed.reason == "worker did not start" and "nothing_like_it" in failed.detail


def test_close_ends_busy_workers_and_what_they_started(theirs):
    async def hang(pool):
        call = asyncio.ensure_future(pool.score(Trajectory(text=CHILD.format(theirs)), TASK))
        await asyncio.to_thread(wait_for, lambda: (theirs / "pids").exists())
        pool.close()
        assert isinstance(await call, Failed)

    asyncio.run(hang(RewardPool("theirs:reward", timeout=60)))
    wait_for(lambda: not any(map(alive, pids(theirs))))


def test_workers_end_with_a_parent_that_is_killed(theirs):
    parent = theirs / "parent.py"
    parent.write_text(
        "import asyncio\nfrom rondel.score.pool import RewardPool\nfrom rondel.core.types import Task, Trajectory\n"
        f"asyncio.run(RewardPool('theirs:reward', timeout=60).score(Trajectory(text={HANG.format(theirs)!r}), Task('t', "
        f"'x', {{}})))\n"
    )
    process = subprocess.Popen([sys.executable, str(parent)], env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    wait_for(lambda: (theirs / "pids").exists())
    (worker,) = pids(theirs)
    assert alive(worker)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: not alive(worker))


HANG = "open('{0}/new', 'w').write(str(os.getpid())); os.rename('{0}/new', '{0}/pids')\nwhile True: pass"
CHILD = (
    "import subprocess; child = subprocess.Popen(['sleep', '60'])\n"
    "open('{0}/new', 'w').write(f'{{os.getpid()}} {{child.pid}}'); os.rename('{0}/new', '{0}/pids')\nwhile True: pass"
)


def pids(folder):
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def alive(pid):
    """Running; a zombie that its new parent has not collected yet counts as ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
