"""/v1/messages (Anthropic) and /v1/responses (OpenAI) of a server: the shapes of generate/chat_apis over its own way
of answering.

An answer is whole before it is sent; a stream tells it in the events that clients expect.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rondel.core.types import Sampling
from rondel.generate.chat_apis import anthropic, responses
from rondel.generate.chat_apis.chat_request import ChatReply, ChatRequest
from rondel.generate.chat_apis.fields import ChatFields, parse_body
from rondel.generate.chat_apis.messages import canonical_messages
from rondel.generate.engine.server.chat_fields import OfferedTools
from rondel.generate.engine.server.fields import BODY_REMEDY
from rondel.generate.engine.server.sampling_fields import COLDEST
from rondel.generate.engine.server.service import GenerationRequest, GenerationService
from rondel.generate.engine.server.tool_calls import CallReader, call_grammar
from rondel.system.http.request import finish_or_cancel, read_body
from rondel.system.http.response import GONE, RequestRefusal

CONVERSATIONS = 256  # that /v1/responses may go on from; the oldest are forgotten

Answer = Callable[["ServedSession", ChatFields], Awaitable[dict[str, Any]]]
Chunks = Callable[[dict[str, Any], dict[str, Any]], Iterator[bytes]]
ENDPOINTS: dict[str, tuple[Answer, Chunks]] = {
    "/v1/messages": (anthropic.create_message, anthropic.stream_chunks),
    "/v1/messages/count_tokens": (anthropic.count_tokens, anthropic.stream_chunks),
    "/v1/responses": (responses.build_response, responses.stream_chunks),
}


class StoredConversations(dict[str, list[dict[str, Any]]]):
    """The latest of them."""

    def __setitem__(self, name: str, said: list[dict[str, Any]]) -> None:
        super().__setitem__(name, said)
        while len(self) > CONVERSATIONS:
            del self[next(iter(self))]


class ServedFields(ChatFields):
    """A client decides how its answer is drawn; a field that would have no effect is refused."""

    adapter = ""

    def read_chat_request(
        self, said: Any, tools: list[dict[str, Any]] | None = None, *, limit: tuple[str, ...], stop: str = "stop"
    ) -> ChatRequest:
        draw: dict[str, Any] = {}
        for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 1e-9, 1.0)):
            if (value := self.read_field(name, (int, float))) is not None:
                if (
                    isinstance(value, bool)
                    or not low <= value <= high
                    or (name == "temperature" and 0 < value < COLDEST)
                ):
                    raise RequestRefusal(400, f"{name} = {value}; it must be from {low:g} to {high:g}", param=name)
                draw[name] = float(value)
        if (top_k := self.read_count("top_k")) is not None:
            draw["top_k"] = top_k
        self.names = [tool["function"]["name"] for tool in tools or []]
        asked = super().read_chat_request(said, tools, limit=limit, stop=stop)
        asked.draw, asked.seed, asked.adapter = draw, secrets.randbits(63), self.adapter
        asked.required = self.required
        return asked

    def read_tool_choice(self) -> bool:
        """Also which functions one must be called of, and whether several may be."""
        choice = self.read_field("tool_choice", (str, dict), "auto")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        self.parallel = self.read_parallel(choice)
        self.required: list[str] = []
        match kind:
            case "any" | "required" if self.names:
                self.required = self.names
            case "tool" | "function" if isinstance(choice, dict) and choice.get("name") in self.names:
                self.required, self.parallel = [choice["name"]], False
            case None | "auto" | "none":
                pass
            case _:
                names = ", ".join(self.names) or "none"
                raise RequestRefusal(
                    400,
                    f"tool_choice = {choice!r:.80}; it is auto, none, any of the tools, or one of {names}",
                    param="tool_choice",
                )
        return kind != "none"


class ServedSession:
    """Whoever asks the server by these APIs."""

    def __init__(self, service: GenerationService) -> None:
        self.service = service
        self.stored: dict[str, list[dict[str, Any]]] = StoredConversations()

    async def generate_replies(self, asked: ChatRequest) -> list[ChatReply]:
        service = self.service
        tools = OfferedTools(asked.tools, asked.required, asked.parallel) if asked.calls and asked.tools else None
        draw: dict[str, Any] = {"stop": asked.stop, **asked.draw}
        if tools and tools.required:
            draw["grammar"] = call_grammar(tools, service.call_format, service.tokenizer)
        assert isinstance(asked.said, list)
        request = GenerationRequest(
            messages=canonical_messages(asked.said),  # type: ignore[arg-type]  # these APIs have messages
            tools=tools,
            draw=draw,
            max_tokens=asked.max_tokens,
            n=asked.n,
            seed=asked.seed,
            id=f"msg-{uuid4().hex}",
            adapter=asked.adapter,
        )
        with service.reserve_queue_slots(asked.n):
            async with asyncio.timeout(service.limits.deadline):
                answers = await (await service.prepare_samples(request)).gather_answers()
        service.metrics.count_answers(answers)
        reader = CallReader(service.call_format, service.tokenizer, tools) if tools else None
        replies = []
        for a in answers:
            assert a.completion is not None
            text, calls = reader.split(a) if reader else (a.text, [])
            whole = service.tokenizer.decode(a.tokens, skip_special_tokens=True)
            stopped = next((s for s in asked.stop if whole.startswith(s, len(a.text))), "")
            named = [
                (f"call_{request.id[-16:]}_{a.index}_{i}", call.name, call.arguments) for i, call in enumerate(calls)
            ]
            replies.append(ChatReply(text, named, a.completion, len(a.prompt), stopped if not calls else ""))
        return replies

    async def count_tokens(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        request = GenerationRequest(messages=canonical_messages(messages), tools=OfferedTools(tools) if tools else None)
        return len((await self.service.prepare_samples(request)).answers[0].prompt)


def bind_session(service: GenerationService) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """A handler for each endpoint."""
    session = ServedSession(service)
    return {path: _handler(session, *how) for path, how in ENDPOINTS.items()}


def _handler(session: ServedSession, answer: Answer, chunks: Chunks) -> Callable[[Request], Awaitable[Response]]:
    service = session.service

    async def handle_request(request: Request) -> Response:
        body = parse_body(await read_body(request, service.limits.body, remedy=BODY_REMEDY))
        adapter = service.adapter_called(str(body.get("model", service.name)))
        f = ServedFields(body, Sampling(), _refuse_field)
        f.adapter = adapter
        options = f.read_field("stream_options", dict, {})
        work: asyncio.Task[dict[str, Any]] = asyncio.create_task(answer(session, f))  # type: ignore[arg-type]  # a coroutine
        await finish_or_cancel(work, request.receive)
        if work.cancelled():
            raise RequestRefusal(GONE, "the client left")
        whole = work.result()
        if not body.get("stream"):
            return JSONResponse(whole)
        stream = b"".join(chunks(whole, options))
        return Response(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    return handle_request


def _refuse_field(name: str, rule: str) -> None:
    raise RequestRefusal(400, f"this server does not offer {name}; leave it out", param=name, code="unknown_field")
