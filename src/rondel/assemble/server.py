"""`rondel serve`: a model, its device and its engine behind HTTP, in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rondel.assemble.served_engine import ServedEngine, ServerSettings, open_engine
from rondel.core.clocks import run_loop
from rondel.core.events import Event, Warned, drop_on_failure, subscribe
from rondel.generate.engine.server.app import ServerAuth, build_app
from rondel.generate.engine.server.engine_service import EngineService
from rondel.generate.engine.server.process import run
from rondel.generate.engine.server.service import GenerationService
from rondel.generate.engine.server.step_app import build_step_app
from rondel.generate.engine.server.step_service import StepService
from rondel.generate.engine.stepwise.continuous_engine import ContinuousEngine
from rondel.runtime.devices import prepare_process
from rondel.sync.from_ipc import FromIpc
from rondel.system.http.server import bind_socket
from rondel.text.unicode import visible_text


def serve_model(
    model: str | dict[str, Any], settings: ServerSettings, *, ready: Callable[[str, int, str], None]
) -> None:
    """Returns after a drain. `ready(host, port, what)` is called when it listens."""
    prepare_process()
    sock = bind_socket(settings.host, settings.port, api_key=settings.api_key)
    with ExitStack() as ends:
        ends.callback(sock.close)
        served = open_engine(model, settings, ends)
        host, port = sock.getsockname()[:2]

        async def main() -> None:
            service, app = service_of(served, settings)
            await run(service, app, sock, drain=settings.drain, ready=lambda: ready(host, port, served.what))

        ends.callback(subscribe(drop_on_failure("the log of warnings", _print_warning)))
        run_loop(main())


def service_of(served: ServedEngine, settings: ServerSettings) -> tuple[EngineService, ServerAuth]:
    """What answers over HTTP: with text, or with points or actions."""
    how: dict[str, Any] = {
        "run": served.device.run,
        "name": served.name,
        "limits": settings.limits,
        "api_key": settings.api_key,
    }
    if isinstance(served.engine, ContinuousEngine):
        steps = StepService(served.engine, **how)
        return steps, build_step_app(steps)
    service = GenerationService(served.engine, **how, segment=FromIpc.segment_address, experts=served.experts)
    return service, build_app(service)


def _print_warning(event: Event) -> None:
    if isinstance(event, Warned):
        print(visible_text(f"warning: {event.message}"), file=sys.stderr, flush=True)
