"""Tools of a Model Context Protocol server: listed once when the run begins, called in a session of the episode.

    "mcp:python -m my_server"           a process of its own for each episode that calls
    one of its tools, begun at the first call "mcp:http://127.0.0.1:8000/mcp"     a session
    of its own with a server that is there
    "mcp+shared:..."                    one process or session for all episodes of the
    run, for servers that keep no state

What a tool refuses is the policy's to read. A server that cannot be reached, or that leaves
in the middle, is a fault of the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import threading
from contextlib import AsyncExitStack
from typing import Any

from rondel.core.errors import ConfigError, DataError, EnvError, root_cause
from rondel.core.types import Task
from rondel.generate.envs.gateway.agent import DIES_WITH_US
from rondel.generate.envs.tools import Tool
from rondel.generate.pictures import open_image, run_on_image_thread
from rondel.text.error_lines import visible_error

BEGINS = 30.0  # seconds until a server must have introduced itself
ASKED_WRONGLY = (-32601, -32602)  # JSON-RPC: no such method, invalid parameters


class McpSession:
    """One connection, in a task of its own: what it is made of wants to be ended by whoever began it."""

    def __init__(self, where: str) -> None:
        self.where, self.loop = where, asyncio.get_running_loop()
        self._over, self._open = asyncio.Event(), self.loop.create_future()
        self._owner = self.loop.create_task(self._run_session())

    @property
    def alive(self) -> bool:
        return not self._owner.done() and self.loop is asyncio.get_running_loop()

    async def call_method(self, verb: str, *given: Any, **named: Any) -> dict[str, Any]:
        """What the server answers, as the protocol writes it."""
        try:
            async with asyncio.timeout(BEGINS) as limit:
                session = await asyncio.shield(self._open)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EnvError(f"the MCP server '{self.where}' did not introduce itself within {BEGINS:g} s") from error
        work = asyncio.ensure_future(getattr(session, verb)(*given, **named))
        try:
            await asyncio.wait([work, self._owner], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EnvError(f"the MCP server '{self.where}' left in the middle of a call")
            answer: dict[str, Any] = work.result().model_dump(mode="json", by_alias=True)
            return answer
        finally:
            work.cancel()

    def close(self) -> None:
        self._over.set()

    async def _run_session(self) -> None:
        try:
            async with AsyncExitStack() as ends:
                session = await _connect_session(self.where, ends)
                if not self._open.done():
                    self._open.set_result(session)
                await self._over.wait()
        except BaseException as error:
            said = EnvError(f"the MCP server '{self.where}' cannot be reached: {_error_text(root_cause(error))}")
            if not self._open.done():
                self._open.set_exception(said)
                self._open.exception()  # perhaps nobody asks
            if not isinstance(error, Exception):
                raise


class Mcp:
    """One entry of task.env.tools: a class of tools for `Tools`, whose schemas are the server's own."""

    def __init__(self, entry: str) -> None:
        kind, _, self.where = entry.partition(":")
        self.shared: McpSession | None = None
        self.is_shared = kind == "mcp+shared"
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"task.env.tools: '{entry}' needs a package: pip install 'rondel[agents]'") from error
        if not _is_url(self.where):
            words = shlex.split(self.where)
            if not words or shutil.which(words[0]) is None:
                raise ConfigError(f"task.env.tools: '{entry}': there is no command '{words[0] if words else ''}' here")
        self.listed = _list_tools(self.where)

    def __call__(self, task: Task) -> McpEpisode:
        return McpEpisode(self)


class McpEpisode:
    """The tools of one episode; nothing is opened before the first call."""

    def __init__(self, server: Mcp) -> None:
        self.server, self._closed = server, False
        self._session: McpSession | None = None
        self.tools = [McpTool(self, one) for one in server.listed]

    def close(self) -> None:
        self._closed = True
        if self._session is not None and not self.server.is_shared:
            self._session.close()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str | list[Any]:
        """A text; or texts and opened images, where there is an image in the answer."""
        if self._closed:
            raise EnvError("the episode is over")
        try:
            answer = await self._open_session().call_method("call_tool", name, arguments)
        except (TimeoutError, EnvError):
            raise
        except Exception as raised:  # of the client's or the connection's
            error = root_cause(raised)
            said = getattr(error, "error", error)
            if getattr(said, "code", None) in ASKED_WRONGLY:
                return f"error: {name}: {visible_error(str(getattr(said, 'message', said)), arguments)}"
            raise EnvError(f"the MCP server '{self.server.where}': {_error_text(error)}") from error
        content = answer.get("content") or []
        if any(map(_image_url, content)):
            pieces = await self._read_content(content, begins=["error:"] * bool(answer.get("isError")))
            wrong = answer.get("isError")
            return [visible_error(one, arguments) if wrong and isinstance(one, str) else one for one in pieces]
        text = "\n".join(_part_text(part) for part in content)
        if not text and answer.get("structuredContent") is not None:
            shown: Any = answer["structuredContent"]
            text = json.dumps(_visible(shown, arguments) if answer.get("isError") else shown, ensure_ascii=False)
        return f"error: {visible_error(text, arguments)}" if answer.get("isError") else text

    async def _read_content(self, content: list[dict[str, Any]], begins: list[Any]) -> list[Any]:
        pieces = begins
        for part in content:
            try:
                piece = await run_on_image_thread(open_image, url) if (url := _image_url(part)) else _part_text(part)
            except DataError as error:
                raise EnvError(f"the MCP server '{self.server.where}' answered with {error}") from error
            if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
                pieces[-1] += f"\n{piece}"
            else:
                pieces.append(piece)
        return pieces

    def _open_session(self) -> McpSession:
        held = self.server.shared if self.server.is_shared else self._session
        if held is None or (self.server.is_shared and not held.alive):
            held = McpSession(self.server.where)
        if self.server.is_shared:
            self.server.shared = held
        self._session = held
        return held


class McpTool(Tool):
    """A tool as its server describes it. Arguments are checked there."""

    foreign = True

    def __init__(self, episode: McpEpisode, told: dict[str, Any]) -> None:
        self.name = told["name"]
        self._schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": told.get("description") or self.name,
                "parameters": told.get("inputSchema") or {"type": "object", "properties": {}},
            },
        }

        async def function(**arguments: Any) -> str | list[Any]:
            return await episode.call_tool(self.name, arguments)

        self.function = function

    @property
    def schema(self) -> dict[str, Any]:
        return self._schema

    def validate_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments


async def _connect_session(where: str, ends: AsyncExitStack) -> Any:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if _is_url(where):
        streams = await ends.enter_async_context(streamable_http_client(where))
    else:
        words = shlex.split(where)
        # else a server that does not hear the end of its input outlives a run that is killed
        if sys.platform == "linux":
            words = [sys.executable, "-I", "-S", "-c", DIES_WITH_US, str(os.getpid()), *words]
        parameters = StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ))
        streams = await ends.enter_async_context(stdio_client(parameters))
    session = await ends.enter_async_context(ClientSession(streams[0], streams[1]))
    await session.initialize()
    return session


def _list_tools(where: str) -> list[dict[str, Any]]:
    """What the server offers; asked in a loop beside, since a run begins outside of one."""
    found: list[Any] = []

    async def list_tools() -> list[dict[str, Any]]:
        from mcp.types import PaginatedRequestParams

        session, tools, cursor = McpSession(where), [], None
        try:
            async with asyncio.timeout(BEGINS):
                while True:
                    page = await session.call_method(
                        "list_tools", params=PaginatedRequestParams(cursor=cursor) if cursor else None
                    )
                    tools += page["tools"]
                    if not (cursor := page.get("nextCursor")):
                        return tools
        finally:
            session.close()
            await asyncio.wait([session._owner], timeout=BEGINS)

    def run_in_thread() -> None:
        try:
            found.append(asyncio.run(list_tools()))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run_in_thread, name=f"list the tools of {where}")
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, Exception):
        raise ConfigError(
            f"task.env.tools: the MCP server '{where}' did not list its tools: {result}; start it by hand to see why"
        ) from result
    if not result:
        raise ConfigError(f"task.env.tools: the MCP server '{where}' offers no tool")
    return list(result)


def _is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def _part_text(part: dict[str, Any]) -> str:
    if part.get("type") == "text":
        return str(part["text"])
    return str((part.get("resource") or {}).get("text") or f"[{part.get('type')}]")


def _image_url(part: dict[str, Any]) -> str:
    """As a data: URL, also where it is embedded as a resource; "" for what is none."""
    held = (part.get("resource") or {}) if part.get("type") == "resource" else part
    kind, data = str(held.get("mimeType") or ""), held.get("blob", held.get("data"))
    return f"data:{kind};base64,{data}" if kind.startswith("image/") and isinstance(data, str) else ""


def _visible(value: Any, said: Any) -> Any:
    """The texts in a JSON value as the policy may read them in an error; a line break is none there."""
    if isinstance(value, str):
        return visible_error(value, said)
    if isinstance(value, dict):
        return {name: _visible(one, said) for name, one in value.items()}
    return [_visible(one, said) for one in value] if isinstance(value, list) else value


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
