"""Law 10: who notices that nothing moves names who waits for what, and the stacks of
all processes are on disk.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from rondel.assemble.remote_workers import RemoteTrainer
from rondel.buffer import Buffer
from rondel.core.errors import StalledError, WorkerError
from rondel.core.events import subscribe
from rondel.runtime.cluster.process import ProcessCluster
from rondel.runtime.stacks import SIGNAL, StackDumper
from rondel.runtime.termination import ONE
from rondel.train.fsdp import FsdpRank, Rendezvous


class Rank:
    """One of two that sum a number; the second one may have something else to do."""

    def meet(self) -> tuple[str, int]:
        self.meeting = Rendezvous("127.0.0.1")
        return self.meeting.address

    def join(self, rank: int, address: tuple[str, int], patience: float) -> None:
        self.ranks = FsdpRank(rank, 2, self.meeting if rank == 0 else Rendezvous.connect_to(address), patience=patience)

    async def total(self, absent: int | None = None) -> float:
        with self.ranks.collective_section("total"):
            return await asyncio.to_thread(self.daydream if self.ranks.rank == absent else self.summed)

    def summed(self) -> float:
        value = torch.ones(1)
        dist.all_reduce(value)
        return float(value)

    def daydream(self) -> None:
        threading.Event().wait(60)


@pytest.fixture
def cluster(tmp_path):
    made = ProcessCluster(tmp_path / "logs", patience=30.0)
    stacks = StackDumper(tmp_path, made.dump)
    stop = subscribe(stacks.on_event)
    yield made, stacks
    stop()
    made.close()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_with_the_operation(cluster, tmp_path):
    made, _ = cluster
    ranks = [made.spawn(f"trainer-{i}", Rank) for i in range(2)]
    address = ranks[0].now("meet")
    for joined in [rank.ask("join", i, address, 3.0) for i, rank in enumerate(ranks)]:
        joined.result()
    trainer = RemoteTrainer(ranks)
    assert asyncio.run(trainer.total()) == 2.0
    began = time.monotonic()
    with pytest.raises(
        StalledError,
        match=r"rank 0 of 2 waits for another one since 3 s, in all_reduce \(test_law_10_waiting.py:\d+, summed\), asked for: total",
    ) as told:
        asyncio.run(trainer.total(1))
    assert time.monotonic() - began < 30
    assert "trainer-1 has not come" in str(told.value) and f"are in {tmp_path / 'logs'}" in str(told.value)
    assert isinstance(told.value, WorkerError), "the run goes on from its last checkpoint"
    assert "in daydream" in said(tmp_path / "logs" / "trainer-1.log", "daydream")
    assert "in summed" in (tmp_path / "logs" / "trainer-0.log").read_text()


@pytest.mark.slow
def test_a_buffer_in_which_nothing_moves_says_where_the_stacks_are(cluster, tmp_path):
    made, _ = cluster
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
        and "most recent call first" in text
    )
    assert "most recent call first" in said(tmp_path / "logs" / "engine-0.log", "call first")


async def a_lane_that_never_ends() -> None:
    await asyncio.sleep(60)


@pytest.mark.slow
def test_a_signal_writes_them_on_demand(cluster, tmp_path):
    made, stacks = cluster
    made.spawn("engine-0", Rank).now()
    with stacks.on_demand():
        os.kill(os.getpid(), SIGNAL)
    assert "test_a_signal_writes_them_on_demand" in said(tmp_path / "logs" / "controller.log", "on_demand")
    assert "in _send_pulses" in said(tmp_path / "logs" / "engine-0.log", "_send_pulses")


def said(log, word: str) -> str:
    """A log, once it has the word: a child writes when the system lets it."""
    deadline = time.monotonic() + 20
    while word not in (text := log.read_text() if log.is_file() else "") and time.monotonic() < deadline:
        time.sleep(0.02)
    return text


ASKED = """
import asyncio, sys
from rondel.runtime.termination import GracefulStop

async def work(ending):
    asyncio.get_running_loop().call_soon(lambda: print("works", flush=True))  # once it waits
    await ending.wait()
    print("asked", flush=True)
    await asyncio.sleep(60)

with GracefulStop() as ending:
    if sys.argv[1] == "starting":
        print("works", flush=True)
        try:
            __import__("time").sleep(60)
        except Exception as error:
            sys.exit(str(error))
    asyncio.run(work(ending))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number):
    with subprocess.Popen([sys.executable, "-c", ASKED, "running"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "works\n"
        process.send_signal(number)
        process.send_signal(number)  # forwarded by a launcher
        assert process.stdout.readline() == "asked\n"
        time.sleep(ONE + 0.1)  # what comes later was meant
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(10) == 128 + number


def test_before_there_is_anything_to_keep_one_signal_is_enough():
    with subprocess.Popen(
        [sys.executable, "-c", ASKED, "starting"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "works\n"
        process.terminate()
        assert (
            "stopped by SIGTERM while it was starting; continue with the same command"
            in process.communicate(timeout=10)[1]
        )
