"""`rondel serve MODEL --training`: one base, its device and its engine behind the training API, in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rondel.assemble.served_engine import ServerSettings, open_engine
from rondel.core.clocks import run_loop
from rondel.core.errors import UserError
from rondel.runtime.devices import prepare_process
from rondel.system.files import make_folder
from rondel.system.folder_lock import lock_folder
from rondel.system.http.server import bind_socket
from rondel.training_api.app import BODY, build_app
from rondel.training_api.process import serve_app
from rondel.training_api.service import AdapterService


def serve_training(
    model: str | dict[str, Any],
    settings: ServerSettings,
    *,
    folder: str | Path,
    key: str,
    ready: Callable[[str, int, str], None],
) -> None:
    """Returns when it is told to end. `ready(host, port, what)` is called when it listens."""
    usual = ServerSettings()
    for option, asked, default in (
        ("--max-queue", settings.limits.queue, usual.limits.queue),
        ("--deadline", settings.limits.deadline, usual.limits.deadline),
        ("--drain", settings.drain, usual.drain),
    ):
        if asked != default:
            raise UserError(
                f"{option} with --training has no effect: its clients come back for their results; leave it out"
            )
    where = make_folder(Path(folder), "--folder")
    taken = f"another server works in '{where}': end it, or give this one a --folder of its own"
    with ExitStack() as ends:
        ends.enter_context(lock_folder(where, taken))
        prepare_process()
        sock = bind_socket(settings.host, settings.port, api_key=key)
        ends.callback(sock.close)
        served = open_engine(model, replace(settings, adapters=settings.adapters or {}), ends)
        engine = served.engine
        host, port = sock.getsockname()[:2]

        async def main() -> None:
            name = settings.name or (model if isinstance(model, str) else served.name)
            room = min(engine.loaded.max_context, engine.pages.count)
            backend = AdapterService(engine.loaded, engine, run=served.device.run, name=name, cache_tokens=room)
            try:
                limits = settings.limits
                app = build_app(backend, where, key, body=limits.body or BODY, samples=limits.samples)
                await serve_app(app, sock, ready=lambda: ready(host, port, served.what), close=app.clients.close)
            finally:
                await engine.pause("abort")
                await backend.close()

        run_loop(main())
