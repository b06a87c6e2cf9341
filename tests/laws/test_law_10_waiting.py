"""Law 10, waiting: no wait is without a deadline, an owner and a name. The error says who waits for what, and since
when.

The stacks of all processes are then on disk.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import rondel
from kits.engine import ask, engine, idle, prompt, tiny
from kits.remote import Trainer, made
from kits.runs import context
from kits.workers import NeverRead, Part, SlowPart, alive, time_waster
from rondel.assemble.remote_workers import RemoteTrainer
from rondel.buffer import Buffer
from rondel.core import clocks
from rondel.core.clocks import RunningClock
from rondel.core.errors import SilentError, StalledError, WorkerError
from rondel.core.events import subscribe
from rondel.core.mesh import Mesh
from rondel.core.types import Task
from rondel.models.rendezvous import Rendezvous
from rondel.runtime.cluster import process
from rondel.runtime.cluster.forkserver import NEVER_BORN, ForkedProcess
from rondel.runtime.cluster.process import ProcessCluster, ProcessWorker
from rondel.runtime.cluster.process_activity import ProcessActivity
from rondel.runtime.cluster.progress import WorkerProgress
from rondel.runtime.stacks import SIGNAL, StackDumper, format_thread_stacks
from rondel.system.threads import current_frames
from rondel.train.fsdp import FsdpRank

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's view of a process is read from /proc")


class Rank:
    """One of two that sum a number; the second one may have something else to do."""

    def meet(self) -> tuple[str, int]:
        self.meeting = Rendezvous("127.0.0.1")
        return self.meeting.address

    def join(self, rank: int, address: tuple[str, int], patience: float, mesh: Mesh) -> None:
        meeting = self.meeting if rank == 0 else Rendezvous.connect_to(address)
        self.ranks = FsdpRank(rank, mesh, meeting, patience=patience)

    async def total(self, absent: int | None = None) -> float:
        with self.ranks.collective_section("total"):
            return await asyncio.to_thread(self.daydream if self.ranks.rank == absent else self.summed)

    def summed(self) -> float:
        value = torch.ones(1)
        if (link := self.ranks.groups.link) is None:
            dist.all_reduce(value)
        elif link.is_last:
            link.send(value, 0, link.back)
        else:
            value += link.receive((1,), value.dtype, 1, link.back)
        return float(value)

    def daydream(self) -> None:
        threading.Event().wait(60)


@pytest.fixture
def dumping_cluster(tmp_path):
    made = ProcessCluster(tmp_path / "logs", patience=30.0)
    stacks = StackDumper(tmp_path, made.dump)
    stop = subscribe(stacks.on_event)
    yield made, stacks
    stop()
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "where"),
    [
        (Mesh(shards=2), r"in all_reduce \(test_law_10_waiting.py:\d+, summed\)"),
        (Mesh(pp=2), r"in recv \(stage_link.py:\d+, receive\)"),
    ],
    ids=str,
)
def test_a_rank_that_does_not_come_is_named_with_the_operation(dumping_cluster, tmp_path, mesh, where):
    made, _ = dumping_cluster
    ranks = [made.spawn(f"trainer-{i}", Rank) for i in range(2)]
    address = ranks[0].now("meet")
    for joined in [rank.ask("join", i, address, 2.0, mesh) for i, rank in enumerate(ranks)]:
        joined.result()
    trainer = RemoteTrainer(ranks)
    assert asyncio.run(trainer.total()) == 2.0
    began = time.monotonic()
    with pytest.raises(
        StalledError,
        match=rf"rank 0 of 2 waits for another one since 2 s, {where}, asked for: total",
    ) as told:
        asyncio.run(trainer.total(1))
    assert time.monotonic() - began < 30
    assert "trainer-1 has not come" in str(told.value) and f"are in {tmp_path / 'logs'}" in str(told.value)
    assert isinstance(told.value, WorkerError), "the run goes on from its last checkpoint"
    assert "in daydream" in said(tmp_path / "logs" / "trainer-1.log", "daydream")
    assert "in summed" in (tmp_path / "logs" / "trainer-0.log").read_text()


@pytest.mark.slow
def test_a_buffer_in_which_nothing_moves_says_where_the_stacks_are(dumping_cluster, tmp_path):
    made, _ = dumping_cluster
    made.spawn("engine-0", Rank).now()

    async def work():
        lane = asyncio.create_task(a_lane_that_never_ends())
        with pytest.raises(StalledError, match=r"learner waits for finished groups .* are in .*logs"):
            await Buffer(groups_per_step=1, patience=0.05).take()
        lane.cancel()

    asyncio.run(work())
    text = (tmp_path / "logs" / "controller.log").read_text()
    assert (
        "learner waits for finished groups" in text
        and "in a_lane_that_never_ends" in text
        and "thread MainThread" in text
    )
    assert "most recent call first" in said(tmp_path / "logs" / "engine-0.log", "call first")


async def a_lane_that_never_ends() -> None:
    await asyncio.sleep(60)


@pytest.mark.slow
def test_a_signal_writes_them_on_demand(dumping_cluster, tmp_path):
    made, stacks = dumping_cluster
    made.spawn("engine-0", Rank).now()
    with stacks.on_demand():
        os.kill(os.getpid(), SIGNAL)
    assert "test_a_signal_writes_them_on_demand" in said(tmp_path / "logs" / "controller.log", "on_demand")
    assert "in _send_pulses" in said(tmp_path / "logs" / "engine-0.log", "_send_pulses")


def test_the_main_thread_is_told_first_however_many_there_are():
    """Python's own dump ends after 100 threads, and the main one is its last."""
    enough = threading.Event()
    threads = [threading.Thread(target=enough.wait, name=f"lane-{i}") for i in range(101)]
    for thread in threads:
        thread.start()
    text = format_thread_stacks()
    enough.set()
    for thread in threads:
        thread.join()
    assert text.startswith("thread MainThread\n")
    assert text.index("test_the_main_thread_is_told_first") < text.index("thread lane-") and "thread lane-100\n" in text


def test_no_collection_runs_while_threads_are_looked_at(monkeypatch):
    """In Python 3.11 one whose finaliser gave up the GIL there stopped the whole process (gh-106883)."""
    enough = threading.Event()
    threads = [threading.Thread(target=enough.wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    asked_while_collecting: list[bool] = []
    ask = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (asked_while_collecting.append(gc.isenabled()), ask())[1])
    found = current_frames()
    assert gc.isenabled()
    gc.disable()
    try:
        current_frames()
        assert not gc.isenabled(), "as it was before"
    finally:
        gc.enable()
        enough.set()
    assert asked_while_collecting == [False, False]
    assert {thread.ident for thread in threads} <= set(found)


def test_a_worker_that_was_never_born_is_no_process_to_signal(monkeypatch):
    """Its number is -1, which to the kernel means every process there is."""
    signalled = []
    monkeypatch.setattr(os, "kill", lambda *call: signalled.append(call))
    process = ForkedProcess()
    process.born.set_result(NEVER_BORN)
    process.kill()
    assert not signalled


def said(log, word: str) -> str:
    """A log, once it has the word: a child writes when the system lets it."""
    deadline = time.monotonic() + 20
    while word not in (text := log.read_text() if log.is_file() else "") and time.monotonic() < deadline:
        time.sleep(0.02)
    return text


# -- the buffer, an update, a request --------------------------------------------------------------


def test_a_wait_names_who_waits_for_what():
    with pytest.raises(StalledError, match="learner waits for finished groups"):
        asyncio.run(Buffer(groups_per_step=1, patience=0.05).take())


@pytest.mark.slow
def test_any_change_is_a_sign_of_life_for_all_who_wait():
    async def scenario():
        buffer = Buffer(groups_per_step=8, patience=0.3)
        waits = asyncio.create_task(buffer.take())
        for n in range(5):
            await asyncio.sleep(0.15)
            await buffer.admit(Task(f"t{n}", "fake", {}))
        assert not waits.done()
        with pytest.raises(StalledError, match="5 tasks unclaimed"):
            await waits

    asyncio.run(scenario())


@pytest.mark.parametrize("who", ["publish", "score", "status"])
def test_nothing_in_an_update_waits_for_ever(who):
    """An answer that does not come, from one who lives: named, within the deadline (law 10)."""
    engine, update, _ = made("")
    trainer, update.messages.deadline = Trainer(), 0.2

    async def silent(*_):
        await asyncio.sleep(60)

    setattr(trainer if who == "publish" else engine._worker, who, silent)
    with pytest.raises(StalledError, match=r"(the trainer|the engine|engine 0): no answer to .* for 0.2 s"):
        asyncio.run(asyncio.wait_for(update(trainer, engine), 5))


def test_a_deadline_says_who_waits_for_whom():
    async def main():
        e = engine(tiny())
        request = ask(prompt(1, 10))
        request.deadline = 0.05
        await e.pause("hold")
        with pytest.raises(
            StalledError, match=r"waits for the engine since 0.05 s; it had written 0 tokens, engine held"
        ):
            await e.generate(request)
        await e.resume()
        idle(e)
        assert len((await e.generate(ask(prompt(1, 10)))).tokens) == 16

    asyncio.run(main())


# -- worker processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_worker_is_named_within_its_deadline(cluster):
    worker = cluster.spawn("trainer-1", Part, 0)
    worker.now()
    os.kill(worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(
        StalledError, match=r"worker trainer-1 .* no sign of life .* asked for: add(?s:.*)most recent call first"
    ) as told:
        worker.now("add", 1)
    assert time.monotonic() - began < 10
    assert isinstance(told.value, WorkerError), "and is given up like one that ended"
    assert "in _send_pulses" in str(told.value), "its stacks, though it was stopped"
    cluster.close()
    assert not alive(worker.pid)


@pytest.mark.parametrize(("busy", "pause"), [(False, 0.15), (True, 0.5)], ids=["idle", "waits for a processor"])
def test_stacks_that_are_written_slowly_are_read_whole(cluster, monkeypatch, busy, pause):
    """They are many writes, and a machine with other work may stand still between two of them."""
    worker = cluster.spawn("trainer-1", time_waster)
    worker.now()
    process_worker = cluster.workers[0]
    burnt = worker.ask("burn", 2.5) if busy else None

    def write_slowly():
        with process_worker._log.open("a") as log:
            for n in range(4):
                print(f"line {n} of the stacks", file=log, flush=True)
                time.sleep(pause)

    monkeypatch.setattr(process_worker, "_all_dump", lambda: threading.Thread(target=write_slowly).start())
    assert "line 3 of the stacks" in process_worker._dump_stacks()
    assert not busy or burnt.result(10) == "done"


@pytest.mark.slow
def test_a_deadlock_is_no_life_and_long_work_is(tmp_path):
    """Its pulse goes on, and tells of no progress."""
    cluster = ProcessCluster(tmp_path, patience=1.2)
    names = {"hangs": (), "hangs_beside": (), "computes": (3,), "runs": (3,), "nap": (3,)}
    workers = {name: cluster.spawn(name, Part, 0) for name in names}
    for worker in workers.values():
        worker.now()

    async def all_of_them():
        return await asyncio.gather(
            *(getattr(workers[name], name)(*args) for name, args in names.items()), return_exceptions=True
        )

    *stuck, computed, ran, slept = asyncio.run(all_of_them())
    assert (computed, ran, slept) == ("computed", "ran", "slept")
    reader = cluster.spawn("reader", Part, 0)
    reader.now()
    with pytest.raises(SilentError, match=r"no sign of life .* asked for: add"):  # its event loop turns meanwhile
        reader.ask("add", NeverRead()).result(60)
    for name, error in zip(names, stuck):
        assert isinstance(error, SilentError) and f"asked for: {name}" in str(error) and not workers[name].alive
    cluster.close()


@pytest.mark.slow
def test_a_busy_worker_is_not_a_stopped_one(cluster):
    """Arithmetic that holds the event loop is work, not silence."""
    worker = cluster.spawn("part", time_waster)
    assert worker.now("burn", 3.0) == "done"


# -- a process that is stopped itself ---------------------------------------------------------------


def test_a_clock_leaves_out_what_its_process_was_stopped():
    now = [50.0]
    clock = RunningClock(lambda: now[0])
    seen = []
    for passed, beats in (
        (0.4, True),
        (0.5, True),
        (0.3, False),
        (0.3, True),
        (3600.0, False),
        (0.1, True),
        (0.5, True),
    ):
        now[0] += passed
        seen.append(clock.time())
        if beats:
            clock.beat()
    assert seen == pytest.approx([0.4, 0.9, 1.2, 1.5, 2.5, 2.5, 3.0]), (
        "the hour is at most a second, and time never goes back"
    )


def test_a_controller_that_was_stopped_itself_takes_nobody_for_silent(monkeypatch):
    """Ctrl-Z and fg: what the workers said meanwhile lies in their pipes, and is read a moment later."""
    now, stands, silent = [100.0], [100.0, 0.0, 0.0, 3.0], []
    clock, worker = RunningClock(lambda: now[0]), object.__new__(ProcessWorker)

    def sleep(seconds):
        for passed in (stands.pop(0), seconds):
            now[0] += passed
            clock.beat()
        worker._over = "the end" * (not stands)

    monkeypatch.setattr(process, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(process, "running_time", clock.time)
    monkeypatch.setattr(ProcessWorker, "_find_silence", lambda self: silent.append(clock.time() - self._heard))
    worker._over, worker._patience, worker._heard = "", 2.0, clock.time()
    worker._watch()
    assert silent == [1.5, 2.0, 2.5, 4.0], "a stop counts as a second"


def test_a_reply_that_was_frozen_with_who_waits_for_it_is_not_late(monkeypatch):
    """A container that is paused: the kernel's wait is over, the answer has not been written yet."""
    now, asked = [0.0], []
    monkeypatch.setattr(clocks, "running_time", lambda: now[0])

    def polled(milliseconds):
        asked.append(milliseconds)
        now[0] += 0.5
        return replies.pop(0)

    for replies, found, waits in (
        ([[], [(7, 1)]], {7: 1}, [2000.0, 1500.0]),
        ([[], [], [], []], {}, [2000.0, 1500.0, 1000.0, 500.0]),
    ):
        now[0] = 0.0
        asked.clear()
        assert clocks.poll_until(SimpleNamespace(poll=polled), 2.0) == found and asked == waits and not replies


STOPPED = """
import asyncio, sys
from rondel.buffer.flow_control import TurnWaiters
from rondel.core import clocks

clocks.BEAT, clocks.GAP = 0.05, 0.2

async def main():
    waiters, ready = TurnWaiters(1.0, lambda: "nothing is done"), []
    def hear():
        ready.append(sys.stdin.readline())
        waiters.wake_all("roll")
    asyncio.get_running_loop().add_reader(sys.stdin, hear)
    asyncio.get_running_loop().call_later(0.1, lambda: print("waits", flush=True))
    await waiters.wait_until(lambda: ready, who="roll", waits_for="a task")
    await waiters.wait_until(lambda: len(ready) > 1, who="roll", waits_for="a second task")

clocks.run_loop(main())
"""


@LINUX
def test_no_wait_of_a_process_that_was_stopped_is_over_for_that():
    """A wait of a second, stopped for longer; the second one shows that the deadline is still there."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.3)
        child.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        child.stdin.write("a task\n")
        child.stdin.flush()
        error = child.stderr.read()
    assert "roll waits for a second task since 1 s without any change; nothing is done" in error, error


def test_every_loop_of_a_run_is_one_whose_time_leaves_out_stops():
    source = Path(rondel.__file__).parent
    files = [path for part in ("driver", "runtime/cluster") for path in sorted((source / part).rglob("*.py"))]
    assert len(files) > 20
    plain = re.compile(r"asyncio\.run\b|Runner\(\)|new_event_loop")
    assert not [str(path) for path in files if plain.search(path.read_text(encoding="utf-8"))], "use run_loop"


# -- while they are built --------------------------------------------------------------------------


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("has_spoken", [False, True], ids=["before its first pulse", "after it"])
def test_a_worker_that_is_stopped_while_it_is_built_is_named_soon(cluster, has_spoken):
    """The limit of a worker that is built is made for slow disks, and this one does not even try to read."""
    worker = cluster.spawn("engine-0", SlowPart, "sleep", 60.0)
    while not (worker._speaks if has_spoken else alive(worker.pid)):
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(
        SilentError, match=r"worker engine-0 \(process \d+\) is stopped by a signal .* asked for: add, build"
    ):
        worker.ask("add", 1).result(20)
    assert time.monotonic() - began < 15
    with pytest.raises(SilentError, match="asked for: add, build"):
        worker.now()
    cluster.close()
    assert not alive(worker.pid)


@LINUX
@pytest.mark.slow
def test_a_build_that_hangs_with_the_interpreter_is_named_and_slow_ones_go_on(cluster, monkeypatch):
    """No pulse and nothing done: named. A pulse, or work that the kernel sees: the long limit of builds."""
    monkeypatch.setattr(process, "STILL", 2.0)
    ways = {"hold": 60.0, "sleep": 4.0, "compute": 4.0}
    workers = {way: cluster.spawn(way, SlowPart, way, seconds) for way, seconds in ways.items()}
    with pytest.raises(SilentError, match=r"worker hold .* neither answers nor computes .* asked for: build"):
        workers["hold"]._made.result(20)
    for way in ("sleep", "compute"):
        assert workers[way].now("add", 1) == 1, way


class LateRank:
    """Imports and loads when it joins, not when it is built."""

    def join(self, seconds: float) -> str:
        time.sleep(seconds)
        return "has come"

    def step(self, seconds: float) -> str:
        return self.join(seconds)


@pytest.mark.slow
def test_a_rank_that_loads_while_it_joins_has_the_time_of_one_that_is_built(cluster):
    """On a busy machine it is silent for longer than a step may be, and so is the one that waits for it."""
    first, second = (cluster.spawn(f"trainer-{i}", LateRank) for i in range(2))
    joins = [rank.ask("join", 4.0) for rank in (first, second)]
    assert [join.result(30) for join in joins] == ["has come"] * 2
    with pytest.raises(SilentError, match=r"no sign of life .* asked for: step"):
        first.ask("step", 60.0).result(30)


def _end_by_idle_sign() -> None:
    async def look() -> bool:
        return WorkerProgress()._waits_for_others()

    os._exit(asyncio.run(look()))


@pytest.mark.slow
def test_who_started_a_worker_is_nobody_it_waits_for():
    """Beneath the event loop of this one are functions of multiprocessing, which would excuse it for ever."""
    child = context.Process(target=_end_by_idle_sign)
    child.start()
    child.join(60)
    assert child.exitcode == 0


@LINUX
@pytest.mark.slow
def test_an_actor_of_this_machine_that_is_stopped_while_it_is_built_is_named_soon():
    """One that is built answers nothing, and only the kernel tells it from one that is stopped."""
    ray = pytest.importorskip("ray")
    from rondel.runtime.cluster.ray import RayCluster

    cluster = RayCluster(["engine-0", "engine-1"], patience=2.0)
    try:
        stopped, slow = (cluster.spawn(f"engine-{i}", SlowPart, "sleep", seconds) for i, seconds in enumerate((90, 8)))
        _, pid = ray.get(stopped._process, timeout=300)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SilentError, match=r"worker engine-0 is stopped by a signal .* asked for: build"):
            stopped._made.result(60)
        assert slow.now("add", 1) == 1
    finally:
        cluster.close()
    assert not alive(pid)


@LINUX
@pytest.mark.slow
def test_the_kernel_knows_who_sleeps_who_computes_and_who_is_stopped():
    codes = {"sleeps": "import time; time.sleep(60)", "computes": "while True: pass"}
    seen = {}
    for name, code in codes.items():
        with subprocess.Popen([sys.executable, "-S", "-c", code]) as child:
            seen[name] = ProcessActivity(child.pid)
            time.sleep(0.3)
            for _ in range(5):
                time.sleep(0.1)
                seen[name].look()
            assert not seen[name].is_stopped
            child.send_signal(signal.SIGSTOP)
            stopped = ProcessActivity(child.pid)
            for _ in range(5):
                time.sleep(0.1)
                stopped.look()
            assert stopped.is_stopped and stopped.idle_seconds > 0.2
            child.kill()
    stopped.look()
    assert stopped.idle_seconds == 0.0 and not stopped.is_stopped, "it has ended, and nothing is known of it"
    assert seen["sleeps"].idle_seconds > 0.2 and seen["computes"].idle_seconds < 0.2
