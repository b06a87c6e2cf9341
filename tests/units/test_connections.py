"""Clients that send half of a request: what a server of ours waits for, and for how long."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from rondel.system.http import PatientConnection, QuietServer, bind_socket

WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def app(scope, receive, send):
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving():
    with bind_socket("127.0.0.1", 0, api_key="") as sock:
        config = uvicorn.Config(
            app, http=PatientConnection, ws="none", lifespan="off", log_level="critical", timeout_graceful_shutdown=60
        )
        ready = asyncio.Event()
        server = QuietServer(config, ready.set)
        work = asyncio.create_task(server.serve([sock]))
        await ready.wait()
        try:
            yield server, work, sock.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(work, 20)


async def closed(reader) -> bytes:
    """What came until the server closed."""
    return await asyncio.wait_for(reader.read(), 20)


@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: "])
def test_headers_that_do_not_come_are_not_waited_for(monkeypatch, sent):
    monkeypatch.setattr(PatientConnection, "HEADERS", 0.3)

    async def work():
        async with serving() as (_, _, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await closed(reader) == b""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)  # nor those of a later request
            writer.write(WHOLE)
            assert await reader.readuntil(b"ok")
            writer.write(sent or b"G")
            assert await closed(reader) == b""

    asyncio.run(work())


def test_a_body_has_its_own_time(monkeypatch):
    monkeypatch.setattr(PatientConnection, "HEADERS", 0.3)

    async def work():
        async with serving() as (_, _, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na")
            with suppress(TimeoutError):
                raise AssertionError(await asyncio.wait_for(reader.read(1), 1.0))
            writer.write(b"b")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    asyncio.run(work())


def test_the_end_waits_for_no_half_of_a_request():
    async def work():
        async with serving() as (server, work, port):
            halves = [WHOLE[:9], WHOLE[:-2], b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"]
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in halves]
            for (_, writer), half in zip(opened, halves):
                writer.write(half)
            await asyncio.sleep(0.3)
            server.should_exit = True
            await asyncio.wait_for(work, 20)  # of the 60 that are for answers
            assert [await closed(reader) for reader, _ in opened] == [b""] * 3

    asyncio.run(work())
