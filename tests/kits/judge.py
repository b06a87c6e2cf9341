"""A server of ten lines on loopback, whose every answer a test decides."""

import asyncio
import json
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class Fake:
    """`with Fake(answer) as fake`: `answer(number, body)` is text, a dict, or (status, text,
    headers); a float is a wait before nothing. The first `held` requests wait a second, in which others come.
    """

    def __init__(self, answer, held=0):
        self.held = held
        self.answer, self.seen, self.times, self.open, self.most, self.keys = answer, [], [], 0, 0, []
        app = Starlette(routes=[Route("/{path:path}", self._serve, methods=["POST"])])
        self.server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    async def _serve(self, request):
        body = json.loads(await request.body())
        number = len(self.seen)
        self.seen.append(body)
        self.times.append(time.monotonic())
        self.keys.append(request.headers.get("authorization", ""))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(1.0 if number < self.held else 0.01)
            said = self.answer(number, body)
            if isinstance(said, float):
                await asyncio.sleep(said)
                return Response("too late")
            if isinstance(said, tuple):
                status, text, headers = said
                return Response(text, status, headers=headers)
            return (
                JSONResponse(said) if isinstance(said, dict | list) else Response(said, media_type="application/json")
            )
        finally:
            self.open -= 1

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(10)


def chat(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
