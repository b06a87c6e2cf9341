"""The routes: the page and its files, what it asks for as JSON, and word of whatever is new as server-sent events.

Nothing here changes anything.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rondel.core.errors import RondelError, UserError
from rondel.dashboard import frames, plan_api, rollouts, views
from rondel.dashboard.auth import DashboardAuth
from rondel.dashboard.columns import StepGrid

if TYPE_CHECKING:
    from rondel.dashboard.run import DashboardRun

HERE = Path(__file__).parent
TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".html": "text/html",
}
MOST = 1 << 40  # of any number that is asked for
POLL, BEAT = 0.25, 10.0  # seconds between two looks for news, and between two signs of life


class DashboardPages:
    """What the routes share: the runs, and whether the server is about to end."""

    def __init__(self, runs: list[DashboardRun], plan: plan_api.Plan, key: str = "") -> None:
        self.runs, self.planned, self.key, self.closing = runs, plan, key, False
        self.opened = 0.0  # when somebody last did, by time.monotonic

    def record_visit(self) -> None:
        self.opened = time.monotonic()

    def run(self, request: Request) -> DashboardRun:
        number = _int_param(request, "run", 0)
        if not 0 <= number < len(self.runs):
            raise UserError(f"run {number}: {len(self.runs)} runs are open")
        return self.runs[number]

    def step_range(self, request: Request) -> tuple[int, int]:
        last = max((run.step for run in self.runs), default=1)
        return _int_param(request, "first", 1), _int_param(request, "last", last)

    # -- what is asked for -----------------------------------------------------------------------

    def state(self, request: Request) -> Any:
        return {"runs": views.run_states(self.runs), "metrics": views.metric_names(self.runs)}

    def series(self, request: Request) -> Any:
        """Curves of all runs on one grid; the evaluations with their intervals."""
        first, last = self.step_range(request)
        grid = StepGrid(first, last, min(2000, _int_param(request, "points", 400)))
        names = request.query_params.getlist("name")[:200]
        told = []
        for run in self.runs:
            with run.lock:
                curves = {
                    name: curve
                    for name in names
                    if (curve := run.visible_columns.curve_on_grid(name, grid)) is not None
                }
                curves |= (
                    {"eval/score": _evaluation_series(run, grid)} if "eval/score" in names and run.story.evals else {}
                )
            told.append(curves)
        return {"x": grid.cell_centers(), "width": grid.width, "first": first, "last": last, "runs": told}

    def books(self, request: Request) -> Any:
        return views.ledger_view(self.run(request), *self.step_range(request))

    def time(self, request: Request) -> Any:
        return views.time_breakdown(
            self.run(request), *self.step_range(request), min(60, max(1, _int_param(request, "steps", 4)))
        )

    def findings(self, request: Request) -> Any:
        return views.findings_view(self.run(request))

    def card(self, request: Request) -> Any:
        return views.card_view(self.run(request)) | {
            "differs": views.recipe_differences(self.runs),
            "names": [run.folder.name for run in self.runs],
        }

    def rollouts(self, request: Request) -> Any:
        return rollouts.rollout_table(self.run(request).folder, _int_param(request, "step", None))

    def answer(self, request: Request) -> Any:
        asked = (_int_param(request, name, 0) for name in ("step", "at", "first"))
        return rollouts.read_answer(self.run(request).folder, *asked)

    def images(self, request: Request) -> Any:
        return rollouts.run_images(self.run(request).folder)

    def frames(self, request: Request) -> Any:
        folder, step = self.run(request).folder, _int_param(request, "step", 0)
        written = rollouts.rollouts_written(folder, step)
        return frames.episode_frames(folder, step, _int_param(request, "at", 0), written)

    def steps_of(self, request: Request) -> Any:
        return rollouts.steps_of(
            self.run(request).folder, request.query_params.get("task", ""), _int_param(request, "step", 0)
        )

    def beside(self, request: Request) -> Any:
        a, b, i, k = (_int_param(request, name, 0) for name in ("a", "b", "pick_a", "pick_b"))
        return rollouts.compare_groups(self.run(request).folder, request.query_params.get("task", ""), a, b, (i, k))

    def plan(self, request: Request) -> Any:
        words = dict(request.query_params)
        folder = self.run(request).folder if words.get("run", "") != "" else None
        return plan_api.answer_plan_query(words, self.planned, folder) | {"choices": plan_api.list_choices()}

    # -- what is new -----------------------------------------------------------------------------

    async def stream_changes(self, request: Request) -> Response:
        return StreamingResponse(
            self._change_events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _change_events(self) -> AsyncIterator[str]:
        seen: Any = None
        waited = 0.0
        while not self.closing:
            now = [(run.changes, run.state) for run in self.runs]
            if now != seen:
                seen, waited = now, 0.0
                yield f"data: {_dump_json(await run_in_threadpool(views.run_states, self.runs))}\n\n"
            elif waited >= BEAT:
                waited = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(POLL)
            waited += POLL


def build_app(pages: DashboardPages) -> Any:
    """The ASGI application."""

    def make_endpoint(handler: Callable[[Request], Any]) -> Any:
        return partial(_run_handler, handler)

    asked = (
        *("state", "series", "books", "time", "findings", "card", "plan"),
        *("rollouts", "answer", "frames", "images", "steps_of", "beside"),
    )
    routes = [
        Route("/", partial(_file_response, HERE / "page" / "index.html")),
        *(
            Route(f"/{path.parent.name}/{path.name}", partial(_file_response, path))
            for path in HERE.glob("[pv]*/*")
            if path.suffix in TYPES
        ),
        Route("/api/news", pages.stream_changes),
        *(Route(f"/api/{name}", make_endpoint(getattr(pages, name))) for name in asked),
    ]
    return DashboardAuth(Starlette(routes=routes), pages.key, pages.record_visit)


async def _file_response(path: Path, request: Request) -> Response:
    """150 kB in all: no thread for what is in the system's memory."""
    return Response(path.read_bytes(), headers={"cache-control": "no-cache"}, media_type=TYPES[path.suffix])


async def _run_handler(handler: Callable[[Request], Any], request: Request) -> Response:
    """In a thread; what a person can mend is a sentence, and so is what we did wrong."""
    try:
        body, status = await run_in_threadpool(lambda: _dump_json(handler(request))), 200
    except RondelError as error:
        body, status = _dump_json({"error": " ".join(str(error).split())}), 400
    except (OverflowError, ValueError):
        body = _dump_json(
            {"error": "a number that was asked with, or that the run holds, is too large to compute with, or is none"}
        )
        status = 400
    except Exception as error:
        body, status = _dump_json({"error": f"{type(error).__name__}: {error}; this is a bug of ours"}), 500
    return Response(body, status, headers={"cache-control": "no-store"}, media_type="application/json")


def _evaluation_series(run: DashboardRun, grid: StepGrid) -> dict[str, list[float | None]]:
    """A point each, before the first step too."""
    out: dict[str, list[float | None]] = {what: [None] * grid.cells for what in ("mean", "low", "high")}
    profile = run.story.evals[0]["profile"]
    for told in run.story.evals:
        if told["profile"] == profile and (told["step"] <= grid.last):
            cell = max(0, told["step"] - grid.first) // grid.width
            for what, name in (("mean", "score"), ("low", "low"), ("high", "high")):
                out[what][cell] = told[name]
    return out


def _int_param(request: Request, name: str, default: Any) -> Any:
    text = request.query_params.get(name, "")
    if text == "":
        return default
    try:
        number = int(text)
    except ValueError:
        raise UserError(f"{name} = {text[:80]!r}: it is a whole number") from None
    if abs(number) > MOST:
        raise UserError(f"{name} = {text[:80]!r}: it is at most {MOST}")
    return number


def _dump_json(value: Any) -> str:
    """What a browser can read: a number that is none is null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_replace_nonfinite(value), allow_nan=False, separators=(",", ":"), default=str)


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _replace_nonfinite(v) for k, v in value.items()}
    return [_replace_nonfinite(v) for v in value] if isinstance(value, list | tuple) else value
