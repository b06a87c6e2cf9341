"""The process in which a reward runs: reads jobs, writes one JSON line for each. Started by pool.py, without torch.

stdin   pickle  (reward spec, parent's process id), then (trajectory, task) for ever; its end is the end of the process
stdout  JSON    {"ready": true} | {"error": ...}, then {"value": ..., "parts": ..., "steps": ...} | {"reason": ..., "detail": ...}
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from rondel.score import build
from rondel.score.result import placed, read
from rondel.words.types import Failed, Score, Task, Trajectory


def main() -> None:
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what a reward reads and prints is not the protocol
    os.dup2(2, 1)
    spec, parent = pickle.load(jobs)
    die_with(parent)
    for number in (signal.SIGTERM, signal.SIGINT):  # of the whole machine: the run decides when it ends
        signal.signal(number, lambda *_: None)

    def answer(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        reward = build(spec)
    except BaseException as error:
        answer({"error": str(error) if isinstance(error, ValueError) else last_line(error)})
        return
    answer({"ready": True})
    with asyncio.Runner() as runner:  # one loop for the life of the worker: an async reward may keep its connections
        while True:
            try:
                trajectory, task = pickle.load(jobs)
            except EOFError:
                return
            result = call(reward, trajectory, task, runner)
            if isinstance(result, Score):
                answer({"value": result.value, "parts": result.parts, "steps": result.steps})
            else:
                answer({"reason": result.reason, "detail": result.detail})


def call(reward: Callable[..., Any], trajectory: Trajectory, task: Task, runner: asyncio.Runner) -> Score | Failed:
    """One call; whatever is raised, SystemExit and a library's BaseException too, is a failure and not a number."""
    try:
        returned = reward(trajectory, task)
        if inspect.isawaitable(returned):
            returned = runner.run(_await(returned))
        return placed(read(returned), trajectory)
    except BaseException as error:
        return Failed(f"raised {type(error).__name__}", last_line(error))


async def _await(awaitable: Any) -> Any:
    return await awaitable


def last_line(error: BaseException) -> str:
    """Where and what: "my_reward.py:12 in grade: ValueError: no answer"."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""
    return (where + "".join(traceback.format_exception_only(error)).strip())[:500]


def die_with(parent: int) -> None:
    """Law 14: the kernel ends this process when its parent ends, even while a reward hangs. Elsewhere than on Linux, stdin's end does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
