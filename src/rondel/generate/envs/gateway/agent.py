"""Starting the user's agent: a function of this process, or a command of the shell.
Neither imports anything of this house.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from numbers import Real
from typing import Any

from rondel.core.errors import ConfigError, EnvError
from rondel.core.registry import import_attribute
from rondel.core.types import Score, Task
from rondel.generate.envs.tools import on_a_thread
from rondel.text.unicode import read_json, valid_unicode

Agent = Callable[[Task, str, str], Awaitable[Any]]  # task, address, key -> what it says the episode was worth
KEPT = 1 << 16  # bytes of what a command prints
LAST = 2.0  # seconds for its last words: a child of it that has left the group may hold the pipe
DIES_WITH_US = (  # the agent's process, when this one is killed
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def agent_of(given: str | list[str]) -> Agent:
    """ "module:name" is a function; everything else is a command."""
    if isinstance(given, str) and re.fullmatch(r"[\w.]+:\w+", given):
        found = import_attribute("agent", given)
        if not callable(found):
            raise ConfigError(
                f"task.env.agent = '{given}' is {found!r}; it must be a function agent(task, base_url, api_key)"
            )
        return function_agent(found)
    words = shlex.split(given) if isinstance(given, str) else given
    if not words:
        raise ConfigError("task.env.agent is empty; name a function as 'module:name', or a command")
    return command_agent(words)


def function_agent(function: Callable[..., Any]) -> Agent:
    """A coroutine runs in the loop, anything else on a thread of its own."""

    async def run_function(task: Task, url: str, key: str) -> Any:
        given = {"task": task, "base_url": f"{url}/v1", "api_key": key}
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(**given)
        return await on_a_thread(_catch_exit(function), given)

    return run_function


def _catch_exit(function: Callable[..., Any]) -> Callable[..., Any]:
    """sys.exit() of an agent ends the agent."""

    def agent(**given: Any) -> Any:
        try:
            return function(**given)
        except SystemExit as error:
            if error.code:
                raise EnvError(f"the agent left with sys.exit({error.code!r})") from error
            return None

    return agent


def command_agent(words: list[str]) -> Agent:
    """In a process group of its own, which ends with the episode. If the last line it
    prints is a JSON score, it is the score.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"task.env.agent: there is no command '{words[0]}' here; a function of yours is written 'module:name'"
        )

    async def run_command(task: Task, url: str, key: str) -> Any:
        told = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
        }
        told |= {name: ",".join(filter(None, [os.environ.get(name), "127.0.0.1"])) for name in ("NO_PROXY", "no_proxy")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", DIES_WITH_US, str(os.getpid()), *words,
            env={**os.environ, **told, "RONDEL_TASK": json.dumps(asdict(task))},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        heard = [asyncio.create_task(_end_of(stream)) for stream in (process.stdout, process.stderr)]
        try:
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait([*heard, reaped := asyncio.create_task(process.wait())], timeout=LAST)
            reaped.cancel()
            for ear in heard:
                ear.cancel()
        out, err = (ear.result() if ear.done() and not ear.cancelled() else "" for ear in heard)
        if code:
            raise EnvError(
                f"the agent's command '{shlex.join(words)}' ended with {code}: "
                f"{err.strip()[-1000:] or 'it said nothing'}"
            )
        return _score_in(out.strip().rpartition("\n")[2])

    return run_command


async def _end_of(stream: asyncio.StreamReader | None) -> str:
    kept = b""
    while stream is not None and (piece := await stream.read(KEPT)):
        kept = (kept + piece)[-KEPT:]
    return kept.decode(errors="replace")


def _score_in(line: str) -> Any:
    try:
        value = read_json(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, int | float | dict) else None


def score_of(returned: Any) -> Score | None:
    """None leaves it to the run's reward. Named parts are added up, or have a "total", as those of a reward."""
    if returned is None or isinstance(returned, Score):
        return returned
    parts = valid_unicode(returned) if isinstance(returned, dict) else {"total": returned}
    wrong = next(
        (v for v in parts.values() if not isinstance(v, Real) or not math.isfinite(v)), None if parts else returned
    )
    if wrong is not None:
        raise EnvError(
            f"the agent returned {returned!r:.200}; it may return nothing, a finite number, or a dict of such"
        )
    named = {str(name): float(v) for name, v in parts.items() if name != "total"}
    return Score(float(parts.get("total", math.fsum(named.values()))), named)
