"""Rewards run in processes that can be killed: a hang, a crash or a NaN is a `Failed`, never the number 0 (law 11).

score ──> queue ──> lane 1 ──stdin/stdout──> worker 1     a lane is a thread that arms a timer for the call its worker is at:
                ──> lane 2 ──stdin/stdout──> worker 2     too late ──> the worker's process group is killed, the next call hires anew

While calls are fast and many wait, a lane sends several in one message. Each still has
its own clock; whoever was behind a late one is asked again.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
import weakref
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rondel.core.errors import ConfigError, RewardError, UserError
from rondel.core.events import RewardCounts, Warned, emit
from rondel.core.failure_rate import RecentOutcomes
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score.concurrent_worker import GRACE, ConcurrentWorker
from rondel.score.killable_process import Asked, Result, RewardProcess, read_reply, without_arrays

if TYPE_CHECKING:
    from rondel.score import Spec

MESSAGE_SECONDS = 0.02  # of work that one message holds at most: what is slow goes one by one, to whoever is idle
MESSAGE_CALLS = 128


class RewardCall(NamedTuple):
    asked: Asked
    task: Task
    answer: asyncio.Future[Result]

    def pickle_call(self) -> bytes:
        return pickle.dumps((without_arrays(self.asked), self.task))


class RewardPool:
    """`await RewardPool("my_reward:grade", workers=2).score(trajectory, task)` -> Score(1.0) or Failed("timeout", ...).

    reward    a spec: "number", "module:name" or {kind = ..., settings}; built once in each
              worker, and at once in the first: what cannot be built is a ConfigError here
    timeout   seconds of wall clock for one call, from its start in a worker
    folder    of the run, where a reward may keep what it paid for
    lends     parameter -> "module:name" of what a worker makes for a reward that has it:
              {"sandbox": ...}; `deadline` is the timeout
    alarm     the share of failures among the last 200 calls (at least 40) above which a warning is emitted, once
    """

    def __init__(
        self,
        reward: Spec,
        *,
        workers: int = 1,
        timeout: float = 10.0,
        alarm: float = 0.05,
        folder: Path | None = None,
        lends: dict[str, str] | None = None,
    ) -> None:
        if workers < 1 or not timeout > 0:
            raise UserError(
                f"reward workers = {workers}, timeout = {timeout}; at least one worker and a positive timeout are "
                f"needed"
            )
        self.reward, self.timeout, self.alarm, self.folder, self.lends = reward, timeout, alarm, folder, lends
        self.failures: Counter[str] = Counter()
        self.calls = 0
        self._recent = RecentOutcomes()
        self._warned = False
        self._told: dict[str, float] = {}
        self._told_at = 0.0
        self._hired: set[RewardProcess] = set()
        self._idle: list[RewardProcess] = []
        self._queue: deque[RewardCall] = deque()
        self._lanes, self._workers, self._lock = 0, workers, threading.Lock()
        self._seconds = MESSAGE_SECONDS  # of a call, a moving mean
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self.shared: ConcurrentWorker | None = None
        self.naps = False  # whether its model leaves the device while somebody else has it
        self.groupwise = False  # whether it grades the answers to a task together
        self.maximum: float | None = None  # the most that it gives an answer, where it says so
        self.separators: tuple[str, ...] = ()  # behind which a step of an unfinished answer can be valued already
        self._end = weakref.finalize(self, _end_workers, self._threads, self._hired)
        try:
            worker = self._threads.submit(
                self._start_process
            ).result()  # a thread that outlives the worker, see die_with
        except BaseException:
            self._end()
            raise
        self.groupwise, self.maximum, self.separators = worker.groupwise, worker.maximum, worker.separators
        if self.groupwise and self.separators:
            self._end()
            raise ConfigError(
                "reward 'process': pipelined = true has no effect beside a groupwise part, which is asked when the "
                "last answer of a group is written; leave it out"
            )
        if worker.together > 1 and workers > 1:
            self._end()
            raise ConfigError(
                f"task.reward.workers = {workers} has no effect: this reward serves {worker.together} calls at once in "
                f"one process; leave it at 1"
            )
        if worker.together > 1:
            self.shared = ConcurrentWorker(
                worker,
                self._start_process,
                self._dismiss_worker,
                worker.together,
                timeout + GRACE,
                memory=worker.memory,
            )
            self.naps = worker.naps
        else:
            self._idle.append(worker)

    async def score(self, trajectory: Trajectory, task: Task, episode: int | None = None) -> Score | Failed:
        """The reward of one trajectory. Never raises for what the reward does. `episode`: what it was called when its
        steps were `precompute`d.
        """
        if self.groupwise:
            return (await self.score_group([trajectory], task))[0]
        result = await self._ask_worker(trajectory, task, episode)
        assert not isinstance(result, list)
        self._count_result(result)
        return result

    async def score_group(self, trajectories: list[Trajectory], task: Task) -> list[Score | Failed]:
        """The rewards of answers to one task, by one call of a groupwise reward that sees them all, else one by one."""
        if not self.groupwise:
            return list(await asyncio.gather(*(self.score(trajectory, task) for trajectory in trajectories)))
        if not trajectories:
            return []
        result = await self._ask_worker(trajectories, task)
        results = result if isinstance(result, list) else [result] * len(trajectories)
        for one in results:
            self._count_result(one)
        return results

    async def precompute(self, episode: int, trajectory: Trajectory, task: Task, unfinished: bool) -> bool:
        """Value the steps that an answer has so far; where its last turn is `unfinished`, those behind which a
        separator stands. -> whether it worked: a failure counts when the answer is scored, and not here.
        """
        assert self.shared
        return await self.shared.precompute(episode, trajectory, task, unfinished, self._threads)

    def forget(self, episode: int) -> None:
        """What was precomputed for an answer that nobody will score."""
        assert self.shared
        self.shared.forget(episode, self._threads)

    async def _ask_worker(self, asked: Asked, task: Task, episode: int | None = None) -> Result:
        if self.shared:
            result = await self.shared.request_score(asked, task, self._threads, episode)
            self._tell_counts()
            return result
        call = RewardCall(asked, task, asyncio.get_running_loop().create_future())
        with self._lock:
            self._queue.append(call)
            if wanted := self._lanes < self._workers:
                self._lanes += 1
        if wanted:
            self._threads.submit(self._serve_queue)
        return await call.answer

    async def sleep(self) -> None:
        """Its model leaves the device; what is scored meanwhile waits, off its clock,
        and is never scored there (law 8).
        """
        await self._send_order("sleep")

    async def wake(self) -> None:
        await self._send_order("wake")

    @property
    def memory(self) -> int:
        """Bytes of a model that naps, on the device now."""
        return self.shared.memory if self.shared else 0

    async def _send_order(self, verb: str) -> None:
        assert self.shared and self.naps
        if isinstance(done := await self.shared.send_order(verb, self._threads), Failed):
            raise RewardError(f"the reward's model does not {verb}: {done.reason} {done.detail}".strip())

    def close(self) -> None:
        """Ends every worker, busy or not."""
        self._end()
        if self.shared:
            self.shared.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in a thread of the pool -----------------------------------------------------------------

    def _serve_queue(self) -> None:
        """Serves the queue until it is empty."""
        while calls := self._next_calls():
            try:
                results: list[Result] = self._score_calls(calls) if self._end.alive else []
            except BaseException as error:  # ours: nobody may wait for ever
                results = [Failed("pool broke", f"{type(error).__name__}: {error}")] * len(calls)
            if not self._end.alive:
                results += [Failed("pool closed")] * (len(calls) - len(results))
            with self._lock:
                self._queue.extendleft(reversed(calls[len(results) :]))
            for loop in {call.answer.get_loop() for call in calls}:
                with suppress(RuntimeError):  # that loop has ended, and nobody waits in it
                    loop.call_soon_threadsafe(
                        _deliver_results, [(c, r) for c, r in zip(calls, results) if c.answer.get_loop() is loop]
                    )

    def _next_calls(self) -> list[RewardCall]:
        """The next calls for one worker: the others get their share of what waits. None, and this lane has ended."""
        with self._lock:
            share = -(-len(self._queue) // self._workers)
            count = max(1, min(share, MESSAGE_CALLS, int(MESSAGE_SECONDS / self._seconds)))
            calls: list[RewardCall] = []
            while self._queue and len(calls) < count:
                call = self._queue.popleft()
                if not call.answer.cancelled():
                    calls.append(call)
            if not calls:
                self._lanes -= 1
            return calls

    def _score_calls(self, calls: list[RewardCall]) -> list[Result]:
        """What became of the first of them, at least of one; those behind a late or deadly call
        are still to be asked.
        """
        try:
            worker = self._idle.pop() if self._idle else self._start_process()
            if worker.process.poll() is not None:  # it ended between two calls: no reward's fault
                self._dismiss_worker(worker)
                worker = self._start_process()
        except (ConfigError, OSError) as error:  # it started once, and no longer does
            return [Failed("worker did not start", str(error))]
        jobs: list[bytes] = []
        unsent: list[Result] = []
        for call in calls:
            try:
                jobs.append(call.pickle_call())
            except Exception as error:  # pickle raises what the object's own code raises
                unsent = [Failed("task cannot be sent", f"task {call.task.id}: {type(error).__name__}: {error}")]
                break
        began = time.monotonic()
        replies, late = worker.run_jobs(jobs, self.timeout) if jobs else ([], False)
        self._seconds = 0.8 * self._seconds + 0.2 * max(1e-6, (time.monotonic() - began) / max(1, len(replies)))
        results = [read_reply(reply) for reply in replies]
        if len(results) == len(jobs):
            self._idle.append(worker)
            results += unsent
        elif late:
            results.append(Failed("timeout", f"no answer within {self.timeout:g} s; the worker was killed"))
            self._dismiss_worker(worker)
        else:
            results.append(Failed("worker died", worker.last_words()))
            self._dismiss_worker(worker)
        return results

    def _start_process(self) -> RewardProcess:
        folder = None if self.folder is None else str(self.folder)
        asleep = bool(self.shared and self.shared.asleep)
        worker = RewardProcess(self.reward, timeout=self.timeout, folder=folder, lends=self.lends, asleep=asleep)
        self._hired.add(worker)
        if not self._end.alive:  # closed meanwhile
            worker.kill()
        return worker

    def _dismiss_worker(self, worker: RewardProcess) -> None:
        worker.kill()
        self._hired.discard(worker)

    def _tell_counts(self) -> None:
        """What a reward counts of itself, at most once a second, and when nobody waits."""
        assert self.shared
        while self.shared.warnings:
            emit(Warned(self.shared.warnings.pop(0)))
        if self.shared.counts != self._told and (not self.shared.pending or time.monotonic() > self._told_at + 1):
            emit(RewardCounts({name: value - self._told.get(name, 0) for name, value in self.shared.counts.items()}))
            self._told, self._told_at = dict(self.shared.counts), time.monotonic()

    def _count_result(self, result: Score | Failed) -> None:
        reason = result.reason if isinstance(result, Failed) else ""
        self.calls += 1
        self._recent.append(reason)
        if not reason:
            return
        self.failures[reason] += 1
        if not self._warned and (share := self._recent.failures_above(self.alarm)):
            self._warned = True
            emit(
                Warned(
                    f"the reward failed in {share.failed} of the last {share.of} calls, {share.times} times with "
                    f"'{share.most}'; these "
                    "trajectories are not trained on. `rondel check` calls the reward on gold and wrong answers"
                )
            )


def _deliver_results(told: list[tuple[RewardCall, Result]]) -> None:
    for call, result in told:
        if not call.answer.done():
            call.answer.set_result(result)


def _end_workers(threads: ThreadPoolExecutor, hired: set[RewardProcess]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in tuple(hired):
        worker.kill()
