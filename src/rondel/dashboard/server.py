"""Where the page is served: one thread reads the runs, one event loop answers, until a signal ends both."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rondel.dashboard.pages import DashboardPages, build_app
from rondel.dashboard.plan_api import Plan
from rondel.dashboard.run import DashboardRun
from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import Story
from rondel.runtime.termination import GracefulStop
from rondel.system.http.server import HttpServer, bind_socket

# seconds between two looks at files that stand still; and for which the reading thread may keep the interpreter
REST, TURN = 0.2, 0.0005
LATELY = 1.0  # seconds after a page was opened in which it has the processor: what is shown by a sample can wait
LAST = 3  # seconds for answers to leave


def serve_dashboard(
    folders: list[Path],
    *,
    rules: Callable[[Story], list[Finding]],
    plan: Plan,
    host: str,
    port: int,
    key: str,
    ready: Callable[[str, int], None],
) -> None:
    """Until SIGTERM or Ctrl-C."""
    runs = [DashboardRun(folder, rules) for folder in folders]
    with bind_socket(host, port, api_key=key) as sock, GracefulStop() as ending:
        pages, closing = DashboardPages(runs, plan, key), threading.Event()
        reader = threading.Thread(target=read_on, args=(pages, closing), name="reader", daemon=True)
        server = HttpServer(build_app(pages), sock, drain=LAST, ready=lambda: ready(*sock.getsockname()[:2]))

        async def run_server() -> None:
            work, asked = asyncio.create_task(server.serve()), asyncio.create_task(ending.wait())
            await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            pages.closing = True
            server.stop()
            await work

        before = sys.getswitchinterval()
        sys.setswitchinterval(TURN)
        reader.start()
        try:
            asyncio.run(run_server())
        finally:
            closing.set()
            reader.join()
            sys.setswitchinterval(before)


def read_on(pages: DashboardPages, closing: threading.Event) -> None:
    """Every run a stretch in turn, as long as any of them has more."""
    while not closing.is_set():
        drawing = time.monotonic() - pages.opened < LATELY
        news = any([run.poll_journal() for run in pages.runs if not (drawing and run.sampled is not None)])
        closing.wait(TURN if news else REST)
