"""An agent program that works in the box of an episode and asks the policy over HTTP: a command line as it is.

agent in the box ──127.0.0.1──> bridge ──pipes of the box──> gateway of the episode ──> policy
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from rondel.core.errors import EnvError, SandboxError
from rondel.core.sandbox_types import CommandResult
from rondel.generate.envs.repository.bridge_in_box import CLOSED, DATA, HEADER, OPENED, PIECE
from rondel.generate.envs.repository.workspace import OWN, Workspace
from rondel.generate.envs.tools import on_a_thread

SERVES = Path(__file__).with_name("bridge_in_box.py").read_text(encoding="utf-8")
CONNECTIONS = 64  # of one agent, at one time
SAID = 2000  # bytes of an agent's last words


async def run_agent(
    box: Workspace, argv: Sequence[str], env: Mapping[str, str], url: str, seconds: float
) -> CommandResult:
    """Until the agent ends, or its seconds do. `{port}` in its variables becomes the port that answers it.
    EnvError where the box cannot do that; stderr is the end of what the agent printed.
    """
    asks, answers = os.pipe(), os.pipe()
    said = os.memfd_create("said")
    port = urlsplit(url).port or 80
    whole = box.environment() | dict(env)
    code = f"{SERVES}\nserve({list(argv)!r}, {box.root!r}, {f'{OWN}/bin'!r}, {whole!r})\n"
    try:
        try:
            await asyncio.to_thread(box.cell.begin, code, asks[0], answers[1], said)
        except SandboxError as error:
            raise EnvError(f"the agent cannot work in this box: {error}") from error
        finally:
            os.close(asks[0])
            os.close(answers[1])
        async with bridge(answers[0], asks[1], port):
            ran = await on_a_thread(box.cell.finish, {"wall": seconds})  # the loop has few threads
        last = os.pread(said, SAID, max(0, os.fstat(said).st_size - SAID))
        return CommandResult(ran.exit, ran.signal, b"", last, ran.limit, ran.seconds)
    except SandboxError as error:
        raise EnvError(f"the box of the agent ended: {error}") from error
    finally:
        os.close(said)


@asynccontextmanager
async def bridge(reads: int, writes: int, port: int) -> AsyncIterator[None]:
    """Carries connections of a box to one port of this machine, and to no other, while the block runs."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=4 * PIECE)
    into, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reads, "rb", 0))
    out, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(writes, "wb", 0))
    writer = asyncio.StreamWriter(out, protocol, None, loop)
    work = asyncio.create_task(_carry(reader, writer, port))
    try:
        yield
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        into.close()
        out.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """The frames of the box, until it ends or says what is no frame."""
    connections: dict[int, asyncio.StreamWriter] = {}
    pumps: set[asyncio.Task[None]] = set()
    try:
        while True:
            number, kind, length = HEADER.unpack(await reader.readexactly(HEADER.size))
            if length > PIECE:
                return
            data = await reader.readexactly(length)
            if kind == OPENED and len(connections) < CONNECTIONS:
                theirs, connections[number] = await asyncio.open_connection("127.0.0.1", port)
                pump = asyncio.create_task(_pump(number, theirs, writer))
                pumps.add(pump)
                pump.add_done_callback(pumps.discard)
            elif kind == DATA and number in connections:
                connections[number].write(data)
                await connections[number].drain()
            elif kind == CLOSED and (ended := connections.pop(number, None)) is not None:
                ended.close()
    except (OSError, asyncio.IncompleteReadError):
        return
    finally:
        for pump in pumps:
            pump.cancel()
        for connection in connections.values():
            connection.close()


async def _pump(number: int, theirs: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await theirs.read(PIECE):
            writer.write(HEADER.pack(number, DATA, len(piece)) + piece)
            await writer.drain()
        writer.write(HEADER.pack(number, CLOSED, 0))
        await writer.drain()


def agent_variables(statement: str, name: str, root: str, key: str) -> dict[str, str]:
    """How an agent hears of its task and of who answers."""
    return {
        "OPENAI_BASE_URL": "http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:{port}",
        "ANTHROPIC_API_KEY": key,
        "RONDEL_TASK": json.dumps({"id": name, "prompt": statement, "workdir": root}),
    }
