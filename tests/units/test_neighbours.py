"""How threads wait follows what other programs do on the same processors; no bit follows it."""

import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rondel.runtime import neighbours
from rondel.runtime.devices import Device
from rondel.runtime.neighbours import (
    QUIET,
    SETTINGS,
    IdleThreads,
    NeighbourWatch,
    seconds_of_others,
    watch_neighbours,
    watch_quota,
)
from rondel.system.cpu_quota import CpuQuota

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/stat")


def tasks():
    return set(os.listdir("/proc/self/task"))


def until(asked):
    end = time.monotonic() + 30
    while not asked():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_idle_threads_are_there_until_they_are_closed_and_change_no_bit():
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    before, alone = tasks(), x @ x
    idle = IdleThreads(3)
    begun = tasks() - before
    assert len(begun) == 3, "one that holds the pool, and two in it"
    assert torch.equal(x @ x, alone)
    idle.close()
    until(lambda: not tasks() & begun)


def test_a_neighbour_is_noticed_at_once_and_forgotten_when_it_has_been_quiet_for_a_while():
    used = iter([0.0, 0.1, 1.0, 1.9, 2.0, 3.0, *[3.0 + 0.05 * i for i in range(1, QUIET + 1)]])
    watch = NeighbourWatch(2, cores=2, others=lambda: next(used))
    begun, found = watch._seen[0], []
    for second in range(1, 6 + QUIET):
        watch.look(begun + second)
        found.append(watch.has_neighbours)
    assert found == [False, *[True] * (4 + QUIET - 1), False], "one quiet look is not enough"
    watch.close()


def test_who_leaves_processors_free_has_no_neighbours():
    """One of four threads is enough room for one busy program, and not for two."""
    for busy, noticed in ((1.0, False), (2.0, True)):
        used = iter([0.0, busy])
        watch = NeighbourWatch(3, cores=4, others=lambda used=used: next(used))
        watch.look(watch._seen[0] + 1.0)
        assert watch.has_neighbours == noticed
        watch.close()
        assert not watch.has_neighbours


@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_under_a_quota_neighbours_are_who_shares_it(tmp_path, shared, monkeypatch):
    """A quota of two: two threads that were throttled half of the time have no neighbours, whatever the host does; one
    more process of the group is one."""
    monkeypatch.setattr(neighbours, "time", SimpleNamespace(process_time=lambda: mine[0], monotonic=time.monotonic))
    mine, stat = [5.0], tmp_path / "cpu.stat"

    def go_on(own: float, others: float) -> None:
        mine[0] += own
        used = 1_000_000 * (mine[0] + others)
        stat.write_text(f"usage_usec {used:.0f}\nnr_throttled 900\nthrottled_usec 99000000\n")

    go_on(0.0, 7.0)
    watch = watch_quota(2, CpuQuota(2.0, tmp_path))
    for second in range(1, 4):
        go_on(1.0, 7.0 + shared * second)
        watch.look(watch._seen[0] + 1.0)
        assert watch.has_neighbours == (shared > 0)
    watch.close()


@pytest.mark.slow
def test_what_this_process_computes_is_not_of_others():
    mine, others, total = time.process_time(), seconds_of_others(), time.monotonic()
    while time.process_time() < mine + 0.3:
        sum(range(1000))
    most = (time.monotonic() - total) * len(os.sched_getaffinity(0))
    assert seconds_of_others() - others <= most - 0.3 + 0.1, "jiffies of 10 ms"


def test_a_device_looks_while_it_has_threads_that_wait_for_each_other(monkeypatch):
    assert watch_neighbours(2) is None, "the tests have said how threads wait"
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as other:
        other.setattr(neighbours, "seconds_of_others", lambda: int("cpu"))
        assert watch_neighbours(2) is None, "a system that tells it in another way"
    before = {t.name for t in threading.enumerate()}
    single, several = Device(threads=1), Device(threads=2)
    assert single._watch is None and several._watch is not None
    assert several.call(torch.get_num_threads) == 2
    for device in (single, several):
        device.close()
    assert "neighbours" not in {t.name for t in threading.enumerate()} - before
