"""Several answers of a million tokens at once: in no pass of the event loop is more done than one of them asks for.

What is counted is work by the pass in which it is done, never time.
"""

import asyncio
import json
import threading
from collections import Counter
from types import SimpleNamespace
from weakref import finalize

import pytest
import torch

from kits import forked
from kits.chat import tokenizer
from kits.fakes import CountingTrainer, Rollouts, endless, loop_kit
from rondel import loop
from rondel.assemble.remote_workers import RemoteTrainer
from rondel.buffer import Buffer
from rondel.core.types import Completion, Group, Sampling, Score, StepStats, Trajectory
from rondel.driver.rollouts import prepare
from rondel.generate.envs.chat import TokenChat
from rondel.system.loop_turns import drop_in_turns, take_loop_turn
from rondel.text.tokenization import beside_loop


class CountedLoop(asyncio.SelectorEventLoop):
    """One that knows how many passes it has made."""

    passes = 0

    def _run_once(self):
        self.passes += 1
        super()._run_once()


def run_counted(work):
    """-> (what it returned, its loop)."""
    with asyncio.Runner(loop_factory=CountedLoop) as runner:
        return runner.run(work()), runner.get_loop()


def in_pass() -> int:
    return asyncio.get_running_loop().passes


class RecordedPieces(Trajectory):
    """One that knows in which pass how much was appended to it."""

    def __init__(self, pieces):
        super().__init__()
        self.pieces = pieces

    def extend(self, tokens, **more):
        super().extend(tokens, **more)
        if more.get("logprobs") is not None:
            self.pieces.append((in_pass(), len(tokens)))


@pytest.mark.parametrize("answers", [1, 2, 7])
def test_answers_that_come_together_are_appended_one_piece_a_pass(monkeypatch, answers):
    """Whole, in order, and each as if it had come alone."""
    monkeypatch.setattr("rondel.generate.envs.chat.TURN_TOKENS", 10)
    monkeypatch.setattr("rondel.generate.envs.chat.LONG", 5)
    pieces, lengths = [], [25 + 7 * i for i in range(answers)]

    async def reply(n):
        async def generate(request):
            return Completion(range(n), [-1.0] * n, [2] * n, "length", text="long")

        chat = TokenChat(tokenizer(), generate, sampling=Sampling(max_tokens=n), key=lambda turn: 0, max_context=999)
        chat.trajectory = RecordedPieces(pieces)
        chat.give_tokens([7])
        await chat.reply()
        return chat.trajectory

    async def go():
        return await asyncio.gather(*map(reply, lengths))

    written, _ = run_counted(go)
    assert [t.tokens[1:] for t in written] == [list(range(n)) for n in lengths]
    assert max(size for _, size in pieces) <= 10 and sum(size for _, size in pieces) == sum(lengths)
    assert set(Counter(number for number, _ in pieces).values()) == {1}, "two pieces in one pass"


@pytest.mark.parametrize("cancelled, order", [(None, "aabcdabcdbcd"), (1, "acdacdacd")])
def test_a_turn_belongs_to_one_pass_and_who_asked_first_is_first(cancelled, order):
    """Also when one that waits is cancelled, whose place another one may take."""
    done = []

    async def work(name, pieces):
        for _ in range(pieces):
            await take_loop_turn()
            done.append((in_pass(), name))

    async def go():
        crew = [asyncio.create_task(work(name, 3)) for name in "abcd"]
        await asyncio.sleep(0)
        if cancelled is not None:
            crew[cancelled].cancel()
        await asyncio.wait(crew)

    run_counted(go)
    assert len({number for number, _ in done}) == len(done)
    told = "".join(name for _, name in done)
    assert told == order if cancelled is None else sorted(told) == sorted(order)


class Freed:
    """Something of so many tokens; when it dies the list hears where."""

    def __init__(self, tokens, heard):
        self.tokens, self.heard = tokens, heard

    def __del__(self):
        on_loop = threading.current_thread() is threading.main_thread()
        self.heard.append((in_pass() if on_loop else None, self.tokens))


def test_what_is_given_up_dies_in_turns_and_what_is_long_beside_the_loop(monkeypatch):
    monkeypatch.setattr("rondel.system.loop_turns.TURN_TOKENS", 100)
    heard, sizes = [], [30, 101, 40, 100, 5000, 60, 1, 99, 70] * 3

    async def go():
        held = [Freed(n, heard) for n in sizes]
        await drop_in_turns(held, lambda one: one.tokens)
        return held

    left, _ = run_counted(go)
    assert left == [] and sorted(n for _, n in heard) == sorted(sizes)
    assert all((number is None) == (n > 100) for number, n in heard)
    by_pass = Counter()
    for number, n in heard:
        by_pass[number] += n if number is not None else 0
    assert max(by_pass.values()) <= 200, "a turn is over when more than 100 tokens were given up"


class LongRollouts(Rollouts):
    """Groups of four answers of 200 tokens, of which somebody hears when they die."""

    def __init__(self, dead):
        super().__init__(0)
        self.dead = dead

    async def generate_group(self, slot):
        return Group(slot.number, slot.task, [self.answer() for _ in range(4)], slot.born)

    def answer(self):
        t = Mortal(score=Score(1.0))
        t.extend([1])
        t.extend(range(200), logprobs=[-1.0] * 200, versions=[0] * 200)
        t.__dict__["dead"] = self.dead
        return t


class Mortal(Trajectory):
    def __del__(self):
        if "dead" in self.__dict__:
            self.dead.append(threading.current_thread())


class EchoTrainer(CountingTrainer):
    """A trainer of two ranks elsewhere, of which the first says what it learned."""

    def __init__(self, dead):
        super().__init__()
        self.dead, self.remote = (
            dead,
            RemoteTrainer([SimpleNamespace(step=self._echo), SimpleNamespace(step=self._echo)]),
        )

    async def _echo(self, batch, algo):
        told = []
        for sample in batch.samples:
            told.append(sample.known.with_fields(trained=sample.known.behavior.clone(), behavior=torch.zeros(200)))
        return StepStats(True, {}), True, told

    async def step(self, batch, algo):
        for sample in batch.samples:
            self._watch(sample.known.behavior)
            self._watch(sample.trainable)
        stats = await self.remote.step(batch, algo)
        for sample in batch.samples:
            self._watch(sample.known.trained)
        return stats

    def _watch(self, array):
        finalize(array, lambda: self.dead.append(threading.current_thread()))


def test_a_step_of_long_answers_dies_beside_the_event_loop(monkeypatch):
    """Trajectories, samples, and what was known of these before the ranks said more."""
    for module in ("rondel.loop", "rondel.system.loop_turns", "rondel.driver.rollouts"):
        monkeypatch.setattr(f"{module}.TURN_TOKENS", 150)
    dead = []
    trainer, rollouts = EchoTrainer(dead), LongRollouts(dead)
    buffer = Buffer(groups_per_step=2)
    asyncio.run(loop.run(endless(), buffer, **loop_kit(trainer, rollouts, 3) | {"prepare": prepare}))
    assert len(dead) == 3 * 2 * 4 * (1 + 3)
    assert threading.main_thread() not in dead


def test_readers_of_long_answers_share_one_thread():
    async def go():
        return await asyncio.gather(*(beside_loop(threading.get_ident) for _ in range(20)))

    threads = set(asyncio.run(go()))
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.slow
def test_a_million_tokens_pass_the_controller_in_half_as_much_memory_again_and_no_long_turn():
    """Four answers, drawn and trained by processes that only say so: bytes at most above those before the first, and what
    the loop's thread computed in one pass (5 ms; 60 where the router hashed an answer number by number).
    """
    done = forked.run(["bench", "long_answers", "--samples", "4", "--steps", "2", "--json"])
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["trained"] == 2 and told["columns_mb"] > 64
    assert told["peak_to_arrays"] <= 1.5 and told["longest_work_ms"] <= 50
