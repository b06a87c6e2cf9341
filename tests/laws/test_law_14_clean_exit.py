"""Law 14, clean exit: no child process, and so no port, and no shared-memory segment is left after any exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kits.nursery import parent_of
from kits.runs import check, events, run, run_and_die
from kits.workers import alive
from rondel.core.types import Failed, Task, Trajectory
from rondel.runtime.cluster import forkserver
from rondel.score.pool import RewardPool
from rondel.sync import from_ipc


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_workers_end_with_a_killed_controller(tmp_path):
    code = (
        "import time; from kits.workers import Part; from rondel.runtime.cluster.process import "
        "ProcessCluster\n"
        "w = ProcessCluster().spawn('part', Part, 0); w.now(); print(w.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    ) as controller:
        child = int(controller.stdout.readline())
        assert alive(child)
        controller.kill()
        controller.wait()
    for _ in range(100):
        if not alive(child):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {child} outlived its controller")


@pytest.mark.slow
def test_no_process_and_no_segment_is_left(tmp_path):

    def mine() -> set[int]:
        found = set()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    parent = parent_of(int(pid))
                    worker = b"rondel.runtime.cluster." in file.read() and int(pid) != forkserver.forkserver_pid()
                    if worker and parent in (1, os.getpid(), forkserver.forkserver_pid()):  # 1: it was left
                        found.add(int(pid))
            except OSError:
                continue
        return found

    before, shared = mine(), set(os.listdir("/dev/shm"))
    run(tmp_path, place__kind="split", loop__steps=2)
    deadline = time.monotonic() + 10
    while mine() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not mine() - before
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("rondel")}


SPLIT = {"place__kind": "split", "place__patience": 6.0, "loop__warmup__steps": 0, "loop__steps": 8}


@pytest.mark.slow
def test_nothing_outlives_a_killed_controller_and_the_run_goes_on(tmp_path):
    assert run_and_die(tmp_path, ("GroupsTaken", 5), **SPLIT) == -9
    deadline = time.monotonic() + 5
    while (left := writers(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    run(tmp_path, **SPLIT)
    check(tmp_path, staleness=0, total=8)
    numbers = [n for e in events(tmp_path, "GroupsTaken") for n in e["numbers"]]
    assert len(numbers) == len(set(numbers)) == 8 * 4


def writers(folder: Path) -> list[str]:
    """Living processes that print into a log of this run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if str(folder) in os.readlink(f"/proc/{pid}/fd/1"):
                found.append(pid)
    return found


# -- workers of a reward ---------------------------------------------------------------------------


TASK = Task("t/1", "single_turn", {"prompt": "3+4=", "answer": "7"})


@pytest.mark.slow
def test_close_ends_busy_workers_and_what_they_started(theirs):
    async def hang(pool):
        call = asyncio.ensure_future(pool.score(Trajectory(text=CHILD.format(theirs)), TASK))
        await asyncio.to_thread(wait_for, lambda: (theirs / "pids").exists())
        pool.close()
        assert isinstance(await call, Failed)

    asyncio.run(hang(RewardPool("theirs:reward", timeout=60)))
    wait_for(lambda: not any(map(alive, pids(theirs))))


@pytest.mark.slow
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


def wait_for(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_a_segment_whose_writer_died_is_reaped():
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = from_ipc.SHARED / f"rondel-{child.stdout.strip()}-abc"
    mine = from_ipc.SHARED / f"rondel-{os.getpid()}-abc"
    left.write_bytes(b"x"), mine.write_bytes(b"x")
    try:
        assert left.name in from_ipc.reap_segments() and not left.exists() and mine.exists()
    finally:
        mine.unlink()
