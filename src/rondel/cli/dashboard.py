"""rondel dashboard: runs and plans as a local web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondel.core.errors import UserError


def run(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Run folders; several are drawn over each other, none opens the planner alone.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; anything but loopback needs a key.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one; the line that is printed names it.")
    ] = 8800,
    api_key: Annotated[
        str, typer.Option(envvar="RONDEL_API_KEY", help="Whoever looks brings it: the address that is printed has it.")
    ] = "",
) -> None:
    """Show runs as a web page.

    Live and offline: rewards, time, lag, answers, findings, the ledger, the card, and the
    planner with sliders. Ctrl-C ends it.
    """
    try:
        from rondel.dashboard.server import serve_dashboard
        from rondel.planner.plan import make_plan
        from rondel.runtime.telemetry.diagnose import findings
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"the dashboard needs the package {error.name}: pip install 'rondel[serve]'") from error

    def print_address(host: str, port: int) -> None:
        key = f"/?key={api_key}" if api_key else ""
        print(f"dashboard http://{f'[{host}]' if ':' in host else host}:{port}{key} (Ctrl-C ends it)", flush=True)

    serve_dashboard(
        [Path(folder) for folder in folders or []],
        rules=findings,
        plan=make_plan,
        host=host,
        port=port,
        key=api_key,
        ready=print_address,
    )
