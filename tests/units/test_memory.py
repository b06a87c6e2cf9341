"""Where memory is: by the kernel and by the tenants' own count; on demand, and where it ran out."""

from __future__ import annotations

import json
import mmap
import os
import tracemalloc

import pytest

from kits.runs import events, run
from rondel.core.errors import WorkerError
from rondel.core.events import WorkerTime
from rondel.runtime.memory import format_memory_report, ran_out
from rondel.runtime.stacks import StackDumper
from rondel.runtime.telemetry.metrics import StepMetrics
from rondel.system.process_memory import resident_memory


def test_the_kernel_counts_what_is_touched():
    before = resident_memory()
    with mmap.mmap(-1, 64 << 20) as block:  # of the kernel itself: a heap may hold as much already
        block[::4096] = b"x" * (len(block) // 4096)
        after = resident_memory(os.getpid())
    assert 48 << 20 <= after["rss"] - before["rss"] <= 96 << 20 and after["peak"] >= after["rss"]
    assert resident_memory(2**22 + 1) == {}, "nobody has this number"


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                "1 bytes"
            ),
            True,
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (ExceptionGroup("two", [ValueError("x"), WorkerError("trainer-0, step: MemoryError: ")]), True),
        (ValueError("out of range"), False),
    ],
)
def test_what_counts_as_having_run_out(error, is_it):
    assert ran_out(error) is is_it


def test_a_report_has_a_line_a_process_and_its_tenants():
    lines = format_memory_report(
        {"engine-0": os.getpid(), "trainer-0": 2**22 + 1}, {"engine-0": {"rss": 5, "kv_cache": 96_000_000, "draft": 0}}
    ).splitlines()
    assert (
        lines[0] == "memory"
        and "resident" in lines[1]
        and lines[1].endswith("kv_cache 96 MB")
        and lines[2].endswith("gone")
    )


def test_python_s_own_where_it_is_traced():
    tracemalloc.start()
    try:
        kept = [bytes(1000) for _ in range(2000)]
        assert "Python's own, by line" in format_memory_report({}, {}) and kept
    finally:
        tracemalloc.stop()


def test_the_tenants_of_workers_without_a_process_are_the_controller_s(tmp_path):
    metrics = StepMetrics()
    metrics.on_event(WorkerTime("trainer", {}, memory={"rss": 1, "moments": 7_000_000}))
    metrics.on_event(WorkerTime("engine-0", {}, memory={"rss": 1, "kv_cache": 3_000_000}))
    stacks = StackDumper(tmp_path, pids=lambda: {"engine-0": os.getpid()}, held=metrics.held)
    _, controller, engine = stacks.memory_report().splitlines()
    assert (
        controller.endswith("moments 7.00 MB") and "kv_cache" not in controller and engine.endswith("kv_cache 3.00 MB")
    )
    stacks.dump()
    assert "moments 7.00 MB" in (tmp_path / "logs" / "controller.log").read_text()


@pytest.mark.slow
def test_a_run_counts_what_the_planner_bills_and_says_where_it_ran_out(tmp_path):
    """Weights, gradients and moments within a tenth of the bill; a reward that has no
    memory left leaves the report behind.
    """
    run(tmp_path, loop__steps=2)
    told = [e["memory"] for e in events(tmp_path, "WorkerTime") if e["worker"] == "trainer" and e["memory"]]
    card = json.loads((tmp_path / "card.json").read_text())["memory"]["trainer"]
    assert {"rss", "peak", "weights", "gradients", "moments"} <= told[-1].keys()
    for what in ("weights", "gradients", "moments"):
        assert card[what]["counted"] == pytest.approx(card[what]["planned"], rel=0.1), what
    assert "| trainer | moments |" in (tmp_path / "card.md").read_text()

    def break_it(parts):
        async def step(*_):
            raise MemoryError

        parts.trainer.step = step

    from kits.runs import tiny
    from rondel.assemble import train

    with pytest.raises(BaseException) as error:
        train(tiny(tmp_path, loop__steps=4), quiet=True, built=break_it)
    assert ran_out(error.value)
    text = (tmp_path / "logs" / "controller.log").read_text()
    assert "stacks: out of memory" in text and "resident" in text
