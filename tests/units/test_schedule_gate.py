"""core/schedule_gate.py: the open gate changes nothing; what one gate wrote down, another one lets pass in that order."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from rondel.buffer import Buffer
from rondel.core.schedule_gate import ScheduleGate
from rondel.core.types import Completion, Group, Request, Task
from rondel.runtime.journal.schedule import OrderRecorder, OrderReplayer


def test_the_open_gate_leaves_the_engine_as_it_is():
    """Whoever asks for the class of an unrecorded run's engine finds it: a router takes back a replica that it lost."""
    engine = object()
    assert ScheduleGate().wrap_engine(engine) is engine
    assert ScheduleGate().version_spans(Request([1])) is None and ScheduleGate().in_time(0) is None


class Engine:
    """Answers at version 3; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        return Completion([7], [-1.0], [3], "stop", prompt_tokens=1, stints=[(3, 1, 1)])


def test_requests_follow_their_record_and_those_of_an_evaluation_pass(tmp_path):
    recorder, engine = OrderRecorder(tmp_path), Engine()
    asyncio.run(recorder.wrap_engine(engine).generate(Request([1], key=5)))
    asyncio.run(recorder.wrap_engine(engine).generate(Request([1], key=6, namespace="eval")))
    recorder.close()
    assert [request.lines for request in engine.asked] == [None, None]
    replayer, other = OrderReplayer(tmp_path), Engine()
    asyncio.run(replayer.wrap_engine(other).generate(Request([1], key=5)))
    asyncio.run(replayer.wrap_engine(other).generate(Request([1], key=6, namespace="eval")))
    assert [request.lines for request in other.asked] == [((3, 1, 1),), None]
    assert replayer.version_spans(Request([1], key=8)) == (), "one that never ended stands still from its beginning"


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_buffer_is_used_in_the_order_of_its_record(tmp_path, order):
    """Groups are given back in the recorded order, in whatever order they are ready."""

    async def use(gate: ScheduleGate, ready: tuple[int, ...]) -> list[int]:
        buffer, done = Buffer(groups_per_step=3, gate=gate, patience=5), []
        gate.begin_phase()
        for n in range(3):
            await buffer.admit(Task(f"t{n}", "fake", {}))
        slots = [await buffer.claim() for _ in range(3)]

        async def put(n: int) -> None:
            await buffer.put(slots[n], Group(n, slots[n].task, [], 0))
            done.append(n)

        lanes = []
        for n in ready:
            lanes.append(asyncio.create_task(put(n)))
            await asyncio.sleep(0)
        await asyncio.gather(*lanes)
        assert [group.id for group in await buffer.take()] == [0, 1, 2]
        return done

    recorder = OrderRecorder(tmp_path)
    assert asyncio.run(use(recorder, order)) == list(order)
    recorder.close()
    assert asyncio.run(use(OrderReplayer(tmp_path), (2, 0, 1))) == list(order)
    assert asyncio.run(use(ScheduleGate(), (2, 0, 1))) == [2, 0, 1]
