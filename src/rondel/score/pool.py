"""Rewards run in processes that can be killed: a hang, a crash or a NaN is a `Failed`, never the number 0 (law 11).

score ──> thread 1 ──stdin/stdout──> worker 1     a thread owns one call at a time and arms a timer for it:
      ──> thread 2 ──stdin/stdout──> worker 2     too late ──> the worker's process group is killed, the next call hires anew
"""

from __future__ import annotations

import asyncio
import pickle
import weakref
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rondel.score import Spec
from rondel.score.killable import Worker
from rondel.words.errors import ConfigError, UserError
from rondel.words.events import Warned, emit
from rondel.words.types import Failed, Score, Task, Trajectory


class RewardPool:
    """`await RewardPool("my_reward:grade", workers=2).score(trajectory, task)` -> Score(1.0) or Failed("timeout", ...).

    reward    a spec: "number", "module:name" or {kind = ..., settings}; built once in each worker, and at once in the first: what
              cannot be built is a ConfigError here
    timeout   seconds of wall clock for one call, from its start in a worker
    alarm     the share of failures among the last 200 calls (at least 40) above which a warning is emitted, once
    """

    def __init__(self, reward: Spec, *, workers: int = 1, timeout: float = 10.0, alarm: float = 0.05) -> None:
        if workers < 1 or not timeout > 0:
            raise UserError(f"reward workers = {workers}, timeout = {timeout}; at least one worker and a positive timeout are needed")
        self.reward, self.timeout, self.alarm = reward, timeout, alarm
        self.failures: Counter[str] = Counter()
        self.calls = 0
        self._recent: deque[str] = deque(maxlen=200)  # "" or the reason of the failure
        self._warned = False
        self._hired: set[Worker] = set()
        self._idle: list[Worker] = []
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._end = weakref.finalize(self, _end, self._threads, self._hired)
        try:
            self._idle.append(self._threads.submit(self._hire).result())  # a thread that outlives the worker, see die_with
        except BaseException:
            self._end()
            raise

    async def score(self, trajectory: Trajectory, task: Task) -> Score | Failed:
        """The reward of one trajectory. Never raises for what the reward does."""
        try:
            job = pickle.dumps((replace(trajectory, experts=None), task))  # routes are large, and no reward reads them
        except Exception as error:  # pickle raises what the object's own code raises
            result: Score | Failed = Failed("task cannot be sent", f"task {task.id}: {type(error).__name__}: {error}")
        else:
            result = await asyncio.wrap_future(self._threads.submit(self._call, job))
        self._count(result.reason if isinstance(result, Failed) else "")
        return result

    def close(self) -> None:
        """Ends every worker, busy or not."""
        self._end()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in a thread of the pool -----------------------------------------------------------------

    def _call(self, job: bytes) -> Score | Failed:
        try:
            worker = self._idle.pop() if self._idle else self._hire()
            if worker.process.poll() is not None:  # it ended between two calls: no reward's fault
                self._dismiss(worker)
                worker = self._hire()
        except (ConfigError, OSError) as error:  # it started once, and no longer does
            return Failed("worker did not start", str(error))
        reply, late = worker.ask(job, self.timeout)
        if late:
            self._dismiss(worker)
            return Failed("timeout", f"no answer within {self.timeout:g} s; the worker was killed")
        if reply is None:
            words = worker.last_words()
            self._dismiss(worker)
            return Failed("worker died", words)
        self._idle.append(worker)
        return Score(**reply) if "value" in reply else Failed(**reply)

    def _hire(self) -> Worker:
        worker = Worker(self.reward)
        self._hired.add(worker)
        if not self._end.alive:  # closed meanwhile
            worker.kill()
        return worker

    def _dismiss(self, worker: Worker) -> None:
        worker.kill()
        self._hired.discard(worker)

    def _count(self, reason: str) -> None:
        self.calls += 1
        self._recent.append(reason)
        failed = [r for r in self._recent if r]
        if reason:
            self.failures[reason] += 1
        if not self._warned and len(self._recent) >= 40 and len(failed) > self.alarm * len(self._recent):
            self._warned = True
            (most, times), *_ = Counter(failed).most_common(1)
            emit(
                Warned(
                    f"the reward failed in {len(failed)} of the last {len(self._recent)} calls, {times} times with '{most}'; these "
                    "trajectories are not trained on. `rondel check` calls the reward on gold and wrong answers"
                )
            )


def _end(threads: ThreadPoolExecutor, hired: set[Worker]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in tuple(hired):
        worker.kill()
