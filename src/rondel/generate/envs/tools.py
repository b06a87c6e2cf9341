"""Turns with tools: the policy writes, calls what it was offered, reads what came back, and writes again.

    give(task, tools) -> reply ──no call──> done
                           │ calls, carried out side by side └<── give(results) ──'      at most `turns` replies; a
                           call in the last one is not carried out

What the policy gets wrong (a call that cannot be read, an unknown tool, arguments that do
not fit, a tool that raises, a file that is not there) comes back to it as an error to read. What
the world gets wrong (a tool that hangs or loses its connection) is a fault of the environment:
the episode is tried again and never scored.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from rondel.core.clocks import now
from rondel.core.errors import BoxError, ConfigError, EnvError, SandboxError, error_text
from rondel.core.media import message_text
from rondel.core.protocols import AskedCall, Chat
from rondel.core.sandbox_types import BoxFileError
from rondel.core.types import Completion, Task, Trajectory
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.pictures import tool_image_parts
from rondel.generate.template import Messages, Schemas
from rondel.text.error_lines import visible_error

# what the system says of a path that a policy chose
OF_ARGUMENTS = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL,
    errno.EACCES, errno.EPERM, errno.ENXIO,
}  # fmt: skip


OURS = ("close", "folder_digest", "box_usage", "interrupt")  # methods of an episode's object that are no tools
LATE = "the time of the episode is over"


class Tool:
    """A function that the policy may call: its signature is the schema, its docstring the description.

    async def search(query: str, k: int = 3) -> str:
        "The k paragraphs that match best."

    foreign   whether it is a server's, who knows nothing of the policy
    """

    foreign = False

    @property
    def is_busy(self) -> bool:
        """Whether what takes long in it is what the policy had it run, or waits for that."""
        return bool(getattr(getattr(self.function, "__self__", None), "is_busy", False))

    @property
    def workspace(self) -> Any:
        """What it is a method of, where that has a working folder: `folder_digest()`."""
        owner = getattr(self.function, "__self__", None)
        return owner if hasattr(owner, "folder_digest") else None

    def interrupt(self) -> None:
        """What it is a method of ends what it does, where it can."""
        owner: Any = getattr(self.function, "__self__", None)
        if hasattr(owner, "interrupt"):
            owner.interrupt()

    @property
    def box_owner(self) -> Any:
        """What it is a method of, where that has boxes: `box_usage()` -> {"box_seconds", "box_cpu", "box_peak"}."""
        owner = getattr(self.function, "__self__", None)
        return owner if hasattr(owner, "box_usage") else None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, function.__name__
        hints = get_type_hints(function)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(
                    f"tool {self.name}: the policy calls by name, and '{parameter}' has none; give every argument a "
                    f"name"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, str), default)
        self._arguments = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's `tools` wants it."""
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        parameters.pop("additionalProperties", None)
        for one in parameters.get("properties", {}).values():
            one.pop("title", None)
        parameters.setdefault("properties", {})
        about = inspect.getdoc(self.function) or self.name
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def validate_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments in the types of the signature; pydantic's ValidationError where they do not fit."""
        read = self._arguments(**arguments)
        return {name: getattr(read, name) for name in type(read).model_fields}


def resolve_tools(found: Any) -> list[Tool]:
    """The tools behind one entry of task.env.tools: the function itself, the `tools` or the public
    methods of an object made for this episode.
    """
    if isinstance(tools := getattr(found, "tools", None), list):
        return tools
    if inspect.isfunction(found) or inspect.iscoroutinefunction(found):
        return [Tool(found)]
    methods = [m for name, m in inspect.getmembers(found, callable) if not name.startswith("_") and name not in OURS]
    if not methods:
        raise ConfigError(f"task.env.tools: {found!r} is neither a function nor an object with public methods")
    return [Tool(method) for method in methods]


class Tools:
    """`Tools([add, Search])`: functions are shared, a class is made anew for every episode
    as `Search(task)` and closed at its end. One with a `folder_digest()` has a working folder: its calls are logged,
    and compared where the episode is played again after a crash.

    turns    most replies of the policy
    timeout  seconds for one call
    """

    def __init__(
        self,
        tools: Iterable[Any],
        *,
        turns: int = 8,
        timeout: float = 30.0,
        suffix: str = "",
        system: str | None = None,
    ) -> None:
        self.turns, self.timeout, self.suffix, self.system = turns, timeout, suffix, system
        tools = list(tools)
        made = [isinstance(one, type) or hasattr(one, "listed") for one in tools]  # for each episode
        self.classes = [one for one, anew in zip(tools, made) if anew]
        self.shared = _tools_by_name(tool for one, anew in zip(tools, made) if not anew for tool in resolve_tools(one))

    def prompt(self, task: Task, tools: dict[str, Tool] | None = None) -> tuple[Messages, Schemas]:
        """What the policy reads first, and the tools it is offered."""
        with ExitStack() as ends:
            tools = self._open_tools(task, ends) if tools is None else tools
            return opening_messages(task, suffix=self.suffix, system=self.system), [
                tool.schema for tool in tools.values()
            ]

    async def run(self, task: Task, chat: Chat) -> Trajectory:
        with ExitStack() as ends:
            tools = self._open_tools(task, ends)
            chat.give(*self.prompt(task, tools))
            for left in reversed(range(self.turns)):
                done = await chat.reply()
                calls = await self._read_calls(done, chat) if done.finish_reason == "stop" else []
                if not calls:
                    break
                if not left:
                    chat.trajectory.finish_reason = "length"
                    break
                began = time.perf_counter()
                results = await self._carry_out_all(calls, tools, chat)
                timings = chat.trajectory.timings
                timings["tools"] = timings.get("tools", 0.0) + time.perf_counter() - began
                read = [self._visible_result(call, result, tools, chat) for call, result in zip(calls, results)]
                chat.give(
                    [{"role": "tool", "name": call.name, "content": content} for call, content in zip(calls, read)]
                )
            await self._add_box_usage(tools, chat.trajectory)
        return chat.trajectory

    async def _read_calls(self, done: Completion, chat: Chat) -> Sequence[AskedCall]:
        """The calls of one reply, as the template writes them."""
        return await chat.calls(done)

    async def _add_box_usage(self, tools: dict[str, Tool], of: Trajectory) -> None:
        """What the boxes of the episode used: seconds and bytes in its timings, for the card of the run."""
        owners = {id(owner): owner for tool in tools.values() if (owner := tool.box_owner) is not None}
        for owner in owners.values():
            for name, value in (await asyncio.to_thread(owner.box_usage)).items():
                before = of.timings.get(name, 0.0)
                of.timings[name] = max(before, value) if name == "box_peak" else before + value

    async def _carry_out_all(self, calls: Sequence[AskedCall], tools: dict[str, Tool], chat: Chat) -> list[Any]:
        """The calls of one reply side by side; those of one working folder one after the other, and each is logged
        before anyone reads what came of it."""
        lanes: dict[int, list[int]] = {}
        told: Any = chat
        logs = getattr(getattr(chat, "episode", None), "commands", None) is not None
        log = told.log_command if logs else None
        for place, call in enumerate(calls):
            home = tools[call.name].workspace if call.name in tools and log is not None else None
            lanes.setdefault(-1 - place if home is None else id(home), []).append(place)
        results: list[Any] = [None] * len(calls)

        async def carry_out_lane(lane: int, places: list[int]) -> None:
            for place in places:
                call = calls[place]
                results[place] = await self._call_timed(call, tools, chat)
                if lane >= 0 and log is not None:
                    folder = await asyncio.to_thread(tools[call.name].workspace.folder_digest)
                    wrong = isinstance(results[place], str) and results[place].startswith("error:")
                    log([call.name, call.arguments], exit=int(wrong), folder=folder)

        await asyncio.gather(*(carry_out_lane(*lane) for lane in lanes.items()))
        return results

    def _open_tools(self, task: Task, ends: ExitStack) -> dict[str, Tool]:
        if not self.classes:
            return self.shared
        made = []
        for one in self.classes:
            made.append(one(task))
            if hasattr(made[-1], "close"):
                ends.callback(made[-1].close)
        return _tools_by_name([*self.shared.values(), *(tool for one in made for tool in resolve_tools(one))])

    def _visible_result(self, call: AskedCall, result: Any, tools: dict[str, Tool], chat: Chat) -> Any:
        """A server's images are told by name to a policy that reads text alone: nobody could have left them out."""
        blind = getattr(chat, "sight", None) is None
        return message_text(result) if blind and call.name in tools and tools[call.name].foreign else result

    async def _call_timed(self, call: AskedCall, tools: dict[str, Tool], chat: Chat) -> str | list[dict[str, Any]]:
        began, budget = now(), getattr(getattr(chat, "episode", None), "budget", None)
        result = await self.carry_out(call, tools, None if budget is None else budget.seconds_left())
        chat.trajectory.laps.append((call.name or "?", began, now() - began, 0, 0))
        return result

    async def carry_out(
        self, call: AskedCall, tools: dict[str, Tool] | None = None, left: float | None = None
    ) -> str | list[dict[str, Any]]:
        """-> what the policy reads: a text, or parts with images where it returned a PIL image,
        an array of pixels, or a list with one. `left`: seconds of the episode, after which the call is ended.
        """
        if call.fault:
            return f"error: {call.fault}"
        tools = self.shared if tools is None else tools
        if (tool := tools.get(call.name)) is None:
            return f"error: there is no tool '{call.name}'; there are: {', '.join(tools)}"
        try:
            arguments = tool.validate_arguments(call.arguments)
        except ValidationError as error:
            first = error.errors()[0]
            return f"error: {call.name}: {'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}"
        if left is not None and left <= 0:
            return f"error: {call.name}: {LATE}"
        try:
            async with asyncio.timeout(self.timeout if left is None else min(left, self.timeout)):
                result = await self._call_function(tool.function, arguments)
            if (parts := tool_image_parts(result)) is not None:
                return parts
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except TimeoutError as error:
            if left is not None and left <= self.timeout:
                tool.interrupt()
                return f"error: {call.name}: {LATE}"
            late = f"tool {call.name} did not answer within {self.timeout:g} s"
            if tool.is_busy:
                return f"error: {late}: it is busy with your other calls"
            raise EnvError(f"{late} (task.env.timeout)") from error
        except BoxFileError as error:  # the box is the policy's own
            return f"error: {visible_error(str(error), arguments)}"
        except (OSError, EnvError, SandboxError) as error:
            if isinstance(error, BoxError) or getattr(error, "errno", 0) in OF_ARGUMENTS:
                return f"error: {visible_error(error_text(error), arguments)}"
            raise EnvError(f"tool {call.name}: {error_text(error)}") from error
        except (Exception, SystemExit) as error:  # what the policy asked for cannot be done
            return f"error: {visible_error(error_text(error), arguments)}"

    def _call_function(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Awaitable[Any]:
        return function(**arguments) if inspect.iscoroutinefunction(function) else on_a_thread(function, arguments)


def _tools_by_name(found: Iterable[Tool]) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for tool in found:
        if tool.name in tools:
            raise ConfigError(
                f"task.env.tools: two tools are called '{tool.name}', and the policy could not say which it means"
            )
        tools[tool.name] = tool
    return tools


async def on_a_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Of its own, that ends with the process: one that hangs must not keep a run from its end."""
    answer: Future[Any] = Future()

    def call() -> None:
        try:
            answer.set_result((function(**arguments), None))
        except Exception as error:  # as a result: nobody may be left to hear of it
            answer.set_result((None, error))
        except BaseException as error:  # that of a thread is nobody's wish to end the run
            answer.set_result((None, RuntimeError(error_text(error))))

    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    result, error = await asyncio.shield(asyncio.wrap_future(answer))
    if error is not None:
        raise error
    return result
