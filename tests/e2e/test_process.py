"""Workers as processes: calls, errors, events and cancellation as in process; a dead one is named; the nursery."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kits.workers import Part, Unreadable, alive
from rondel.core.clocks import TimeAccount  # of ours, so made in the nursery
from rondel.core.errors import CheckpointError, ConfigError, WorkerError
from rondel.core.events import Warned, emit, subscribe
from rondel.runtime.cluster import forkserver


def broken() -> Part:
    raise ConfigError("no such engine")


@pytest.mark.slow
def test_calls_are_the_same_and_run_side_by_side(cluster):
    worker = cluster.spawn("part", Part, 5)
    worker.now()

    async def work():
        naps = [worker.nap(0.3) for _ in range(50)]
        began = time.perf_counter()
        slept = await asyncio.gather(*naps)
        assert time.perf_counter() - began < 5 and slept == ["slept"] * 50
        return [await worker.add(1), await worker.add(n=2)]

    assert asyncio.run(work()) == [6, 8]
    big = np.random.default_rng(0).random(1 << 20)
    answer = worker.now("doubled", big)
    np.testing.assert_array_equal(answer, big * 2)
    kept = weakref.ref(answer)
    del answer
    for _ in range(50):  # the thread that read it is about to wait for the next message, and keeps nothing of this one
        if kept() is not None:
            time.sleep(0.01)
    assert kept() is None


@pytest.mark.slow
def test_errors_cross_with_their_type_and_text(cluster):
    worker = cluster.spawn("part", Part, 0)
    with pytest.raises(ConfigError, match=r"lr = -1: it must be positive"):
        worker.now("wrong")
    with pytest.raises(WorkerError, match=r"part, odd: Local: nobody can unpickle me"):
        worker.now("odd")
    with pytest.raises(WorkerError, match="cannot be sent"):
        worker.now("unsendable")
    assert worker.now("add", 1) == 1  # and it goes on
    with pytest.raises(ConfigError, match="no such engine"):
        cluster.spawn("broken", broken).now()


def test_events_are_told_in_the_controller(cluster):
    worker, heard = cluster.spawn("part", Part, 0), []
    stop = subscribe(heard.append)
    try:
        worker.now("says", "hot")
    finally:
        stop()
    assert [event.message for event in heard] == ["hot"]


@pytest.mark.slow
def test_a_caller_that_goes_away_takes_its_call_with_it(cluster):
    worker = cluster.spawn("part", Part, 0)
    worker.now()  # one that has not begun would be gone without a trace

    async def work():
        call = asyncio.create_task(worker.nap(60))
        await asyncio.sleep(0.3)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while not await worker.how_many_cancelled():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), 20))


def test_a_dead_worker_is_named_with_its_last_words(cluster):
    worker = cluster.spawn("engine-0", Part, 0)

    async def work():
        waits = asyncio.create_task(worker.nap(60))
        await asyncio.sleep(0)
        with pytest.raises(
            WorkerError, match=r"worker engine-0 \(process \d+\) was ended by SIGKILL(?s:.*)these are my last words"
        ):
            await worker.dies()
        with pytest.raises(WorkerError, match="SIGKILL"):
            await waits
        with pytest.raises(WorkerError, match="SIGKILL"):
            await worker.add(1)

    asyncio.run(work())
    assert not worker.alive


@pytest.mark.slow
def test_what_a_worker_cannot_read_is_said(cluster):
    worker = cluster.spawn("part", Part, 0)
    with pytest.raises(WorkerError, match=r"part cannot read what it was asked: ValueError"):
        worker.now("add", Unreadable())
    with pytest.raises(WorkerError, match="cannot read"):
        worker.now("add", 1)


def talkative() -> Part:
    emit(Warned("it is built"))
    return Part(0)


@pytest.mark.slow
def test_a_journal_that_cannot_be_written_while_workers_are_built_is_the_error(cluster):
    """It ended the thread that hears the worker, which was then ended as silent after minutes."""

    def full(event):
        raise CheckpointError("no space left for the journal")

    stop = subscribe(full, Warned)
    try:
        with pytest.raises(CheckpointError, match="no space left for the journal"):
            cluster.spawn("part", talkative).ask("add", 1).result(20)
    finally:
        stop()


@pytest.mark.slow
def test_an_answer_that_cannot_be_read_is_said_at_once(cluster):
    """Nobody heard the worker any more, and it was ended as silent."""
    worker = cluster.spawn("part", Part, 0)
    worker.now()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"part \(process \d+\) answered what cannot be read here: ValueError"):
        worker.now("unreadable")
    assert time.monotonic() - began < 5 and not worker.alive


def test_a_worker_stays_on_its_cores(cluster):
    one = min(os.sched_getaffinity(0))
    assert cluster.spawn("pinned", Part, 0, cores=[one]).now("cores") == {one}


@pytest.mark.skipif(
    sys.platform != "linux" or any(map(os.path.exists, forkserver.ACCELERATORS)),
    reason="workers are forked on Linux's CPUs",
)
class TestNursery:
    @pytest.mark.slow
    def test_workers_are_forked_where_the_imports_are(self, cluster, tmp_path, monkeypatch):
        """Processes of their own, with the controller's folder and path of that moment."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path / "mine")
        workers = [cluster.spawn(f"part-{i}", TimeAccount, "x") for i in range(2)]
        for worker in workers:
            worker.now()
        assert len({worker.pid for worker in workers} | {os.getpid()}) == 3
        for worker in workers:
            with open(f"/proc/{worker.pid}/stat") as file:
                assert int(file.read().rpartition(")")[2].split()[1]) == forkserver.forkserver_pid()
            assert os.readlink(f"/proc/{worker.pid}/cwd") == str(tmp_path)
        assert cluster.spawn("path", forkserver._import_path).now("copy")[0] == str(tmp_path / "mine")

    def test_how_it_ended_is_told(self, cluster):
        worker = cluster.spawn("part", TimeAccount, "x")
        worker.now()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"worker part \(process {worker.pid}\) was ended by SIGKILL"):
            worker.now("switch_to", "idle")

    @pytest.mark.slow
    def test_a_dead_nursery_takes_its_workers_along_and_the_next_has_another(self, cluster, monkeypatch):
        monkeypatch.setattr(forkserver, "start_server", inspect.unwrap(forkserver.start_server))
        worker = cluster.spawn("part", TimeAccount, "x")
        worker.now()
        before = forkserver.forkserver_pid()
        os.kill(before, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"worker part .* was ended by SIGKILL"):
            for _ in range(100):
                worker.now("switch_to", "idle")
                time.sleep(0.05)
        for _ in range(100):
            if not alive(worker.pid):
                break
            time.sleep(0.05)
        assert not alive(worker.pid)
        with ThreadPoolExecutor(1) as pool:  # a thread that ends: the nursery lives with the process
            after = pool.submit(cluster.spawn, "next", TimeAccount, "x").result()
        after.now()
        after.now("switch_to", "idle")
        assert forkserver.forkserver_pid() not in (None, before)
        forkserver._nursery.close()  # later tests have one of kits.nursery again

    @pytest.mark.slow
    def test_without_one_a_worker_starts_in_the_ordinary_way(self, cluster, monkeypatch):
        monkeypatch.setattr(forkserver, "ACCELERATORS", ("/",))
        worker = cluster.spawn("part", TimeAccount, "x")
        worker.now()
        with open(f"/proc/{worker.pid}/cmdline", "rb") as file:
            assert b"rondel.runtime.cluster.worker_main" in file.read()

    @pytest.mark.slow
    def test_it_ends_with_a_killed_controller(self, tmp_path):
        """Law 14: nursery and workers."""

        code = (
            "import time; from rondel.core.clocks import TimeAccount; from rondel.runtime.cluster import forkserver, "
            "process\n"
            "w = process.ProcessCluster().spawn('part', TimeAccount, 'x'); w.now(); print(w.pid, forkserver.forkserver_pid(), "
            "flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as controller:
            pids = [int(word) for word in controller.stdout.readline().split()]
            assert all(map(alive, pids))
            controller.kill()
            controller.wait()
        deadline = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, pids))

    @pytest.mark.slow
    def test_it_ends_with_a_killed_controller_in_the_midst_of_its_imports(self, tmp_path):
        """They take seconds, in which an engine of several processes may be killed."""
        begun = tmp_path / "begun"
        (tmp_path / "endless.py").write_text(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(60)")
        code = (
            "import os, socket, time; from rondel.runtime.cluster import forkserver\n"
            "server, ends = forkserver.ForkServer(), socket.socketpair()\n"
            "server.fork_worker('endless', ends[1].fileno(), 1, dict(os.environ))\n"
            "print(server.process.pid, flush=True); time.sleep(60)"
        )
        where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=where) as controller:
            pid = int(controller.stdout.readline())
            while not begun.exists():
                time.sleep(0.01)
            controller.kill()
        deadline = time.monotonic() + 10
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(pid)
