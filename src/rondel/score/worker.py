"""The process in which a reward runs: reads jobs, writes one JSON line for each. Started by pool.py, without torch.

stdin   pickle  (reward spec, parent's process id, timeout, folder, what it may lend, whether it begins asleep, objects
        that the recipe was given), then (trajectory, task) for ever; its end is the end of the process
stdout  JSON    {"together": 1, "naps": false, "groupwise": false, "maximum": null, "separators": []} | {"error": ...}, then
        {"value": ..., "parts": ..., "steps": ...} | {"reason": ..., "detail": ...}

A groupwise reward is given a list of trajectories, and replies {"group": [one such object each]}.

A reward with `together` > 1 is asked so many times at once: jobs are then those of score/jobs.py,
a reply names its number, what the reward counts goes along, and an empty reply every second
says that the event loop runs. Orders go to one that naps (score/offload.py), early jobs to one
that values steps while an answer is written (score/process.py).
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rondel.core.given_objects import unpack_given
from rondel.core.registry import import_attribute
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score import Lent, build_reward
from rondel.score.clock import CLOCK, CLOCKS, EPISODE, CallClocks, call_with_clock
from rondel.score.jobs import EarlyJob, OrderJob, ScoreJob
from rondel.score.result import check_group, check_score, read_score
from rondel.system.signals import leave_to_controller


def main() -> None:
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what a reward reads and prints is not the protocol
    os.dup2(2, 1)
    spec, parent, timeout, folder, lends, asleep, given = pickle.load(jobs)
    die_with(parent)
    leave_to_controller()

    def send_reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    lent: Lent = {name: functools.partial(make_lent, path) for name, path in lends.items()}
    try:
        unpack_given(given)
        reward: Any = build_reward(spec, {**lent, "deadline": lambda: timeout})
        if hasattr(reward, "open"):
            reward.open(folder)
        together, naps = int(getattr(reward, "together", 1)), bool(getattr(reward, "naps", False))
        if naps and not asleep:
            reward.load_to_device()
    except BaseException as error:
        send_reply({"error": str(error) if isinstance(error, ValueError) else last_line(error)})
        return
    groupwise = bool(getattr(reward, "groupwise", False))
    separators = sorted(getattr(reward, "separators", ()))
    send_reply(
        {
            "together": together,
            "naps": naps,
            "groupwise": groupwise,
            "maximum": maximum if isinstance(maximum := getattr(reward, "maximum", None), int | float) else None,
            "memory": reward.memory if naps else 0,
            "separators": separators,
        }
    )
    with asyncio.Runner() as runner:  # one loop for the life of the worker: an async reward may keep its connections
        if together > 1:
            return runner.run(serve_calls(reward, jobs, send_reply, timeout))
        while True:
            try:
                trajectory, task = pickle.load(jobs)
            except EOFError:
                return
            send_reply(result_message(call_reward(reward, trajectory, task, runner)))


def result_message(result: Score | Failed | list[Score | Failed]) -> dict[str, Any]:
    if isinstance(result, list):
        return {"group": [result_message(one) for one in result]}
    if isinstance(result, Score):
        return {"value": result.value, "parts": result.parts, "steps": result.steps}
    return {"reason": result.reason, "detail": result.detail}


async def serve_calls(reward: Any, jobs: Any, answer: Callable[[dict[str, Any]], None], timeout: float) -> None:
    """Many calls at once, each with its own clock; what it waits for a turn is not on it."""
    counts = getattr(reward, "counts", {})
    open_calls: set[asyncio.Task] = set()
    CLOCKS.set(clocks := CallClocks(lambda: answer({})))

    async def run_timed(call: Callable[[], Awaitable[Any]]) -> Any:
        """What it returns; a `Failed` for whatever it raises and for being late."""
        try:
            async with asyncio.timeout(timeout) as clock:
                CLOCK.set(clock)
                clocks.open.add(clock)
                try:
                    return await call()
                finally:
                    clocks.open.discard(clock)
        except TimeoutError:
            return Failed("timeout", f"no answer within {timeout:g} s")
        except BaseException as error:
            return Failed(f"raised {type(error).__name__}", last_line(error))

    async def score_one(job: ScoreJob) -> None:
        EPISODE.set(job.episode)

        async def call() -> Any:
            returned = call_with_clock(reward, job.asked, job.task)
            return check_result(await returned if inspect.isawaitable(returned) else returned, job.asked)

        result = await run_timed(call)
        if job.episode is not None:
            await reward.forget(job.episode)
        warned = reward.take_warning() if hasattr(reward, "take_warning") else ""
        answer({"number": job.number, "counts": dict(counts), "warned": warned, **result_message(result)})

    async def score_early(job: EarlyJob) -> None:
        failed = await run_timed(lambda: reward.precompute(job.episode, job.trajectory, job.task, job.unfinished))
        answer({"number": job.number, **(result_message(failed) if isinstance(failed, Failed) else {"value": 0.0})})

    async def send_heartbeats() -> None:
        while True:
            answer({})
            await asyncio.sleep(1)

    async def follow_order(job: OrderJob) -> None:
        """What it then has on the device."""
        try:
            await getattr(reward, job.verb)(*job.given)
        except BaseException as error:
            answer({"number": job.number, "reason": f"does not {job.verb}", "detail": last_line(error)})
        else:
            answer({"number": job.number, "value": 0.0, "memory": getattr(reward, "memory", 0)})

    serve: dict[type, Callable[[Any], Coroutine[Any, Any, None]]] = {
        ScoreJob: score_one,
        EarlyJob: score_early,
        OrderJob: follow_order,
    }
    beat = asyncio.ensure_future(send_heartbeats())
    while True:
        try:
            job = await asyncio.to_thread(pickle.load, jobs)
        except EOFError:
            beat.cancel()
            return
        task = asyncio.ensure_future(serve[type(job)](job))
        open_calls.add(task)
        task.add_done_callback(open_calls.discard)


def make_lent(path: str, *setting: Any) -> Any:
    return import_attribute("what is lent to rewards", path)(*setting)


def call_reward(
    reward: Callable[..., Any], trajectory: Trajectory | list[Trajectory], task: Task, runner: asyncio.Runner
) -> Score | Failed | list[Score | Failed]:
    """One call; whatever is raised, SystemExit and a library's BaseException too, is a failure and not a number."""
    try:
        returned = reward(trajectory, task)
        if inspect.isawaitable(returned):
            returned = runner.run(_await_value(returned))
        return check_result(returned, trajectory)
    except BaseException as error:
        return Failed(f"raised {type(error).__name__}", last_line(error))


def check_result(returned: Any, asked: Trajectory | list[Trajectory]) -> Score | Failed | list[Score | Failed]:
    return check_group(returned, asked) if isinstance(asked, list) else check_score(read_score(returned), asked)


async def _await_value(awaitable: Any) -> Any:
    return await awaitable


def last_line(error: BaseException) -> str:
    """Where and what: "my_reward.py:12 in grade: ValueError: no answer"."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""
    return (where + "".join(traceback.format_exception_only(error)).strip())[:500]


def die_with(parent: int) -> None:
    """Law 14: the kernel ends this process when its parent ends, even while a reward hangs.
    Elsewhere than on Linux, stdin's end does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
