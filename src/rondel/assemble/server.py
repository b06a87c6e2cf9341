"""`rondel serve`: a model, its device and its engine behind HTTP, in one process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rondel.assemble.engine_ranks import EngineRanks, RankSettings, end_process
from rondel.assemble.worker_devices import usable_cores
from rondel.assemble.workers import pages_of
from rondel.core.errors import UserError
from rondel.core.events import Event, Warned, drop_on_failure, subscribe
from rondel.core.protocols import Transport
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.notebook import speculation_of
from rondel.generate.engine.server.process import run
from rondel.generate.engine.server.service import GenerationService, RequestLimits
from rondel.models.cuda_graphs import serving_pass
from rondel.models.load import load_model
from rondel.runtime.cluster.process import ProcessCluster
from rondel.runtime.devices import Device, pick_device, prepare_process
from rondel.sync.from_ipc import FromIpc
from rondel.system.http.server import bind_socket
from rondel.text.unicode import visible_text

PATIENCE = 60.0  # seconds that one process of an engine waits for another


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `rondel serve` was asked."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    name: str = ""
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    kv_pages: int | str = "auto"
    max_running: int = 64
    prefill_tokens: int = 2048
    speculative: str = "off"
    tp: int = 1
    compile: bool = False
    drain: float = 30.0
    limits: RequestLimits = field(default_factory=RequestLimits)


def serve_model(
    model: str | dict[str, Any], settings: ServerSettings, *, ready: Callable[[str, int, str], None]
) -> None:
    """Returns after a drain. `ready(host, port, what)` is called when it listens."""
    prepare_process()
    device_name = pick_device(settings.device)
    sock = bind_socket(settings.host, settings.port, api_key=settings.api_key)
    own, threads = _rank_devices(device_name, settings), settings.threads
    if settings.tp > 1 and threads is None:
        threads = max(1, len(usable_cores()) // settings.tp)
    device, ranks = Device(own[0], threads), None
    transports: dict[str, Transport] = {"ipc": FromIpc()}
    try:
        if settings.tp == 1:
            loaded = device.call(lambda: load_model(model, dtype=settings.dtype, device=device_name))
        else:
            cluster = partial(ProcessCluster, patience=PATIENCE)
            ranks = EngineRanks(RankSettings("engine", own, cluster, threads), end_process, transports)
            loaded = ranks.load(model, settings.dtype, device)
        speculation = device.call(
            lambda: speculation_of(settings.speculative, dtype=settings.dtype, device=device_name)
        )
        draft = speculation.draft if speculation else None
        pages = pages_of(
            [loaded, draft.loaded] if draft else [loaded],
            wanted=settings.kv_pages,
            max_running=settings.max_running,
            longest=loaded.max_context,
            prefill=settings.prefill_tokens,
            own=device_name.startswith("cuda"),
            staged=True,
        )
        engine = BuiltinEngine(
            loaded,
            run=device.run,
            kv_pages=pages.value,
            max_running=settings.max_running,
            prefill_tokens=settings.prefill_tokens,
            speculation=speculation,
            compiled=device.call(serving_pass, loaded, settings.max_running) if settings.compile else None,
            transports=transports,
            ranks=None if ranks is None else ranks.lead,
        )
        name = settings.name or (Path(model).name if isinstance(model, str) and Path(model).is_dir() else loaded.name)
        what = f"{name}, {str(loaded.dtype).removeprefix('torch.')} on {device_name}, {pages.value} cache pages"
        host, port = sock.getsockname()[:2]

        async def main() -> None:
            service = GenerationService(
                engine,
                run=device.run,
                name=name,
                limits=settings.limits,
                api_key=settings.api_key,
                segment=FromIpc.segment_address,
            )
            await run(service, sock, drain=settings.drain, ready=lambda: ready(host, port, what))

        stop = subscribe(drop_on_failure("the log of warnings", _print_warning))
        try:
            asyncio.run(main())
        finally:
            stop()
    finally:
        sock.close()
        if ranks is not None:
            ranks.close(device)
        device.close()


def _rank_devices(device: str, settings: ServerSettings) -> tuple[str, ...]:
    """Of each process of the engine."""
    if settings.tp == 1:
        return (device,)
    if settings.compile:
        raise UserError(
            f"--compile with --tp {settings.tp}: an engine of several processes runs its passes operation by operation; leave it out"
        )
    if device == "cpu":
        return (device,) * settings.tp
    first, there = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if first + settings.tp > there:
        raise UserError(
            f"--tp {settings.tp} asks for that many GPUs from number {first} on, and this machine has {there}: use fewer"
        )
    return tuple(f"cuda:{first + i}" for i in range(settings.tp))


def _print_warning(event: Event) -> None:
    if isinstance(event, Warned):
        print(visible_text(f"warning: {event.message}"), file=sys.stderr, flush=True)
