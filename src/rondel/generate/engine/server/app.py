"""The routes, the door before them, and how an answer travels: at once or as a
stream, and never for a client that has left.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rondel.core.errors import StalledError
from rondel.generate.chat_apis.anthropic import error_body
from rondel.generate.engine.server import (
    adapters,
    broadcast,
    chat_endpoints,
    control,
    native,
    openai,
    text_endpoints,
    weights,
)
from rondel.generate.engine.server.answers import RequestSamples
from rondel.generate.engine.server.engine_service import EngineService
from rondel.generate.engine.server.errors import refusal_response, to_refusal
from rondel.generate.engine.server.fields import read_fields
from rondel.generate.engine.server.service import GenerationRequest, GenerationService
from rondel.system.http.request import bearer_token, finish_or_cancel, from_a_web_page, keys_match
from rondel.system.http.response import GONE, RequestRefusal, sse_event

Handler = Callable[[GenerationService, Request], Awaitable[Any]]
GENERATING = {
    "/v1/completions": (openai.read_completion, openai.HARMLESS),
    "/v1/chat/completions": (openai.read_chat, openai.HARMLESS),
    "/generate": (native.read_generate, native.HARMLESS),
}
CONTROL: dict[str, Handler] = {
    "/pause_generation": control.pause_generation,
    "/continue_generation": control.continue_generation,
    "/abort_request": control.abort_request,
    "/flush_cache": control.flush_cache,
    "/release_memory_occupation": control.release_memory_occupation,
    "/resume_memory_occupation": control.resume_memory_occupation,
    "/update_weights_from_disk": weights.update_weights_from_disk,
    "/update_weights_from_tensor": weights.update_weights_from_tensor,
    "/update_weights_from_distributed": broadcast.update_weights_from_distributed,
    "/update_weights_from_ipc": weights.update_weights_from_ipc,
    "/init_weights_update_group": broadcast.init_weights_update_group,
    "/destroy_weights_update_group": broadcast.destroy_weights_update_group,
    "/load_lora_adapter": adapters.load_adapter,
    "/unload_lora_adapter": adapters.unload_adapter,
    "/v1/load_lora_adapter": adapters.load_adapter,
    "/v1/unload_lora_adapter": adapters.unload_adapter,
}
TEXT: dict[str, Handler] = {"/tokenize": text_endpoints.tokenize, "/detokenize": text_endpoints.detokenize}
FACTS: dict[str, Handler] = {
    "/version": text_endpoints.get_version,
    "/get_weight_version": control.get_weight_version,
    "/get_model_info": control.get_model_info,
    "/get_server_info": control.get_server_info,
}
OPEN = frozenset({"/health"})  # without a key: whoever watches the process has none
PROBE_SECONDS = 20.0


def build_app(service: GenerationService) -> ServerAuth:
    """The ASGI application."""
    born = int(time.time())

    async def list_models(request: Request) -> dict[str, Any]:
        return openai.model_list(service, born)

    async def one_model(request: Request) -> dict[str, Any]:
        name = request.path_params["name"]
        service.adapter_called(name)
        return openai.model_card(service, name, born)

    async def show_metrics(request: Request) -> Response:
        return Response(service.metrics.render_metrics(), media_type="text/plain; version=0.0.4")

    def in_anthropics_shape(
        handler: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                said = error_refusal(service, error)
                return JSONResponse(error_body(said), said.status, headers=said.headers)

        return endpoint

    def bind_handler(handler: Handler) -> Any:
        return lambda request: handler(service, request)

    routes = [
        Route("/v1/models", catch_errors(service, list_models), methods=["GET"]),
        Route("/v1/models/{name:path}", catch_errors(service, one_model), methods=["GET"]),
        Route("/health", catch_errors(service, bind_handler(health)), methods=["GET"]),
        Route("/health_generate", catch_errors(service, bind_handler(health_generate)), methods=["GET"]),
        Route("/metrics", catch_errors(service, show_metrics), methods=["GET"]),
        *(
            Route(path, catch_errors(service, bind_handler(_generation_handler(*how))), methods=["POST"])
            for path, how in GENERATING.items()
        ),
        *(
            Route(
                path,
                in_anthropics_shape(answer) if "messages" in path else catch_errors(service, answer),
                methods=["POST"],
            )
            for path, answer in chat_endpoints.bind_session(service).items()
        ),
        *(
            Route(path, catch_errors(service, bind_handler(handler)), methods=["POST"])
            for path, handler in TEXT.items()
        ),
        *(
            Route(path, catch_errors(service, bind_handler(handler)), methods=["GET"])
            for path, handler in FACTS.items()
        ),
        *(
            # trainers of the field flush with a GET
            Route(
                path,
                catch_errors(service, bind_handler(handler), control=True),
                methods=["GET", "POST"] if path == "/flush_cache" else ["POST"],
            )
            for path, handler in CONTROL.items()
        ),
    ]
    return ServerAuth(
        service,
        Starlette(routes=routes, exception_handlers=route_refusals([r.path for r in routes])),
        {r.path for r in routes},
    )


def route_refusals(paths: list[str]) -> dict[Any, Any]:
    """What is said where nothing is, and where another verb is meant."""
    there = ", ".join(path for path in paths if "{" not in path)

    async def not_found(request: Request, error: Exception) -> Response:
        return refusal_response(
            RequestRefusal(
                404, f"nothing is at {request.scope['path'][:200]}; this server has {there}", code="not_found"
            )
        )

    async def not_allowed(request: Request, error: Any) -> Response:
        return refusal_response(
            RequestRefusal(
                405,
                f"{request.method} is not for {request.scope['path']}",
                code="method_not_allowed",
                headers=error.headers,
            )
        )

    return {404: not_found, 405: not_allowed}


def catch_errors(
    service: EngineService, handler: Callable[[Request], Awaitable[Any]], *, control: bool = False
) -> Callable[[Request], Awaitable[Any]]:
    """Whatever a handler raises is an answer, too."""

    async def endpoint(request: Request) -> Any:
        try:
            result = await handler(request)
        except Exception as error:
            return refusal_response(error_refusal(service, error), control=control)
        return JSONResponse(result) if isinstance(result, dict | list) else result

    return endpoint


def error_refusal(service: EngineService, error: Exception) -> RequestRefusal:
    said = to_refusal(error, refusing=service.engine.state == "refusing")
    if said.status == 500:
        traceback.print_exception(error, file=sys.stderr)
    return said


# -- answers ---------------------------------------------------------------------------------------


def _generation_handler(read: Callable[..., Any], harmless: frozenset[str]) -> Handler:
    async def handle_request(service: GenerationService, request: Request) -> Any:
        f = await read_fields(request, service.limits.body, ignored=harmless)
        reply = read(f, service)
        return AnswerResponse(service, reply, reply.asked)

    return handle_request


class AnswerResponse:
    """An ASGI response that writes answers while it watches whether anybody is still there."""

    def __init__(self, service: GenerationService, reply: Any, asked: GenerationRequest) -> None:
        self.service, self.reply, self.asked = service, reply, asked

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        work = asyncio.create_task(self._send_answer(scope, receive, send))
        await finish_or_cancel(work, receive)
        if not work.cancelled():
            work.result()

    async def _send_answer(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False

        async def forward_message(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            with self.service.reserve_queue_slots(max(1, len(self.asked.prompts)) * self.asked.n):
                async with asyncio.timeout(self.service.limits.deadline):
                    samples = await self.service.prepare_samples(self.asked)
                    await (
                        self._send_stream(samples, forward_message)
                        if self.asked.stream
                        else self._send_whole(samples, scope, receive, forward_message)
                    )
                self.service.metrics.count_answers(samples.answers)
        except Exception as error:
            said = error_refusal(
                self.service,
                StalledError("the deadline of this server has passed") if isinstance(error, TimeoutError) else error,
            )
            if begun:
                await send({"type": "http.response.body", "body": sse_event(said.response_body), "more_body": False})
            else:
                await refusal_response(said)(scope, receive, send)

    async def _send_whole(self, samples: RequestSamples, scope: Any, receive: Any, send: Any) -> None:
        answers = await samples.gather_answers()
        await JSONResponse(self.reply.response_body(answers))(scope, receive, send)

    async def _send_stream(self, samples: RequestSamples, send: Any) -> None:
        """The status waits for the first token, so that a refusal has its own."""
        async with aclosing(samples.stream_deltas()) as pieces:
            first = await anext(pieces)
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for chunk in self.reply.begin_stream(samples.answers):
                await send({"type": "http.response.body", "body": sse_event(chunk), "more_body": True})
            await send(
                {"type": "http.response.body", "body": sse_event(self.reply.stream_chunk(first)), "more_body": True}
            )
            async for piece in pieces:
                await send(
                    {
                        "type": "http.response.body",
                        "body": sse_event(self.reply.stream_chunk(piece)),
                        "more_body": True,
                    }
                )
        for chunk in self.reply.end_stream(samples.answers):
            await send({"type": "http.response.body", "body": sse_event(chunk), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


# -- health ----------------------------------------------------------------------------------------


async def health(service: EngineService, request: Request) -> Any:
    """200 while it can serve or will again; 503 while it drains or refuses."""
    state = "draining" if service.draining else service.engine.state
    return JSONResponse({"status": state}, 503 if state in ("draining", "refusing") else 200)


async def health_generate(service: GenerationService, request: Request) -> Any:
    """One token, really drawn. A paused engine draws none."""
    if service.engine.state != "serving":
        raise RequestRefusal(503, f"the engine is {service.engine.state}", code="not_serving")
    asked = GenerationRequest(prompts=[[0]], max_tokens=1, draw={"temperature": 0.0}, id="health")
    with service.reserve_queue_slots(1):
        samples = await service.prepare_samples(asked)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                answers = await samples.gather_answers()
        except TimeoutError:
            raise RequestRefusal(503, f"no token within {PROBE_SECONDS:g} s", code="not_serving") from None
    return {"status": service.engine.state, "tokens": answers[0].tokens, "weight_version": str(service.engine.version)}


# -- the door --------------------------------------------------------------------------------------


class ServerAuth:
    """Who may come in; and every answer that goes out is counted."""

    def __init__(self, service: EngineService, app: Starlette, paths: set[str]) -> None:
        self.service, self.app, self.paths = service, app, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status = GONE

        async def send_counted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if (no := self._turned_away(Request(scope))) is not None:
                await refusal_response(no)(scope, receive, send_counted)
            else:
                await self.app(scope, receive, send_counted)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.service.metrics.requests.labels(path, str(status)).inc()

    def _turned_away(self, request: Request) -> RequestRefusal | None:
        if self.service.api_key:
            if request.scope["path"] in OPEN or any(
                keys_match(key, self.service.api_key)
                for key in (bearer_token(request), request.headers.get("x-api-key", ""))
            ):
                return None
            return RequestRefusal(
                401,
                "this server wants its key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if from_a_web_page(request):
            return RequestRefusal(
                403, "a web page asks, and this server has no key: start it with --api-key", code="browser"
            )
        return None
