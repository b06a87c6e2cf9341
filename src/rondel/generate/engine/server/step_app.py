"""The routes of a server of points or actions."""

from __future__ import annotations

import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rondel.generate.engine.server import control, openai, text_endpoints, weights
from rondel.generate.engine.server.app import ServerAuth, catch_errors, health, route_refusals
from rondel.generate.engine.server.step_service import DRAWS, StepService
from rondel.system.http.response import RequestRefusal

CONTROL = {
    "/pause_generation": control.pause_generation,
    "/continue_generation": control.continue_generation,
    "/abort_request": control.abort_request,
    "/update_weights_from_disk": weights.update_weights_from_disk,
}


def build_step_app(service: StepService) -> ServerAuth:
    """The ASGI application."""
    born, (path, draw) = int(time.time()), DRAWS[service.kind]

    async def list_models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [openai.card_of(service.name, born)]}

    async def show_metrics(request: Request) -> Response:
        return Response(service.metrics.render_metrics(), media_type="text/plain; version=0.0.4")

    async def get_model_info(request: Request) -> dict[str, Any]:
        loaded = service.engine.loaded
        return {
            "model_path": loaded.name,
            "model_type": loaded.model.config.model_type,
            "draws": service.engine.head.describe(1, 0.0),
            "weight_version": str(service.engine.version),
        }

    async def write_no_text(request: Request) -> Any:
        raise RequestRefusal(
            404, f"'{service.name}' writes no text: POST {path} is how it is asked (docs/runs.md)", code="not_found"
        )

    def bind(handler: Any) -> Any:
        return lambda request: handler(service, request)

    get: dict[str, Any] = {
        "/v1/models": list_models,
        "/health": bind(health),
        "/metrics": show_metrics,
        "/get_model_info": get_model_info,
        "/get_weight_version": bind(control.get_weight_version),
        "/version": bind(text_endpoints.get_version),
    }
    text = ("/v1/completions", "/v1/chat/completions", "/generate")
    routes = [
        *(Route(at, catch_errors(service, handler), methods=["GET"]) for at, handler in get.items()),
        Route(path, catch_errors(service, bind(draw)), methods=["POST"]),
        *(
            Route(at, catch_errors(service, bind(handler), control=True), methods=["POST"])
            for at, handler in CONTROL.items()
        ),
    ]
    hidden = [Route(at, catch_errors(service, write_no_text), methods=["POST"]) for at in text]
    refusals = route_refusals([route.path for route in routes])
    return ServerAuth(
        service, Starlette(routes=[*routes, *hidden], exception_handlers=refusals), {r.path for r in routes}
    )
