"""The engine of a server: a model, its adapters and its cache on a device of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rondel.assemble.engine_encoder import EngineEncoder
from rondel.assemble.engine_ranks import EngineRanks, RankSettings, end_process
from rondel.assemble.workers import STEP_ENGINES, pages_of
from rondel.core.errors import UserError
from rondel.core.protocols import Transport
from rondel.core.registry import find_registered
from rondel.generate.engine.blocks import BLOCK_ENGINE
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.notebook import speculation_of
from rondel.generate.engine.routed_experts import RoutedExperts
from rondel.generate.engine.server.engine_service import RequestLimits
from rondel.generate.engine.server.step_service import DRAWS
from rondel.models.adapter_bank import AdapterBank
from rondel.models.aligned_numerics import align_numerics
from rondel.models.cuda_graphs import serving_pass
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.step_head import KINDS, StepHead, refuse_step_head
from rondel.runtime.cluster.process import ProcessCluster
from rondel.runtime.devices import Device, pick_device
from rondel.sync.from_ipc import FromIpc
from rondel.system.cpu_quota import usable_processors

PATIENCE = 60.0  # seconds that one process of an engine waits for another


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `rondel serve` was asked."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    name: str = ""
    dtype: str = "auto"
    numerics: str = "fast"
    routed_experts: bool = False  # of a mixture: record them, for who asks
    device: str = "auto"
    threads: int | None = None
    kv_pages: int | str = "auto"
    max_running: int = 64
    prefill_tokens: int = 2048
    speculative: str = "off"
    tp: int = 1
    ep: int = 1
    dp: int = 1
    encoders: int = 0
    compile: bool = False
    drain: float = 30.0
    limits: RequestLimits = field(default_factory=RequestLimits)
    adapters: dict[str, str] | None = (
        None  # {name: folder} on the one base; None: none can be served, {}: some may come
    )

    @property
    def processes(self) -> int:
        """Of the engine."""
        return self.tp * self.dp + self.encoders


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """what: said of it when it listens;  experts: how it tells where tokens went"""

    engine: Any  # BuiltinEngine, or a StepwiseEngine
    device: Device
    name: str
    what: str
    experts: RoutedExperts | None = None


def open_engine(model: str | dict[str, Any], settings: ServerSettings, ends: ExitStack) -> ServedEngine:
    """A model in an engine on a device of its own, until `ends` closes."""
    _check_numerics(settings)
    _check_processes(settings)
    device_name = pick_device(settings.device)
    own, threads = _rank_devices(device_name, settings), settings.threads
    if settings.processes > 1 and threads is None:
        threads = max(1, usable_processors() // settings.processes)
    device = Device(own[0], threads)
    ranks: EngineRanks | EngineEncoder | None = None
    ends.callback(device.close)
    transports: dict[str, Transport] = {"ipc": FromIpc()}
    if settings.processes == 1:
        loaded = device.call(lambda: load_model(model, dtype=settings.dtype, device=device_name))
        if loaded.blocks is not None or isinstance(loaded.head, StepHead):
            return _open_stepwise(model, loaded, settings, device, transports)
    else:
        cluster = partial(ProcessCluster, patience=PATIENCE)
        ep, dp = settings.ep > 1, settings.dp > 1
        how = RankSettings("engine", own, cluster, threads, experts_apart=ep, requests_apart=dp)
        made = partial(EngineEncoder, ranks=EngineRanks) if settings.encoders else EngineRanks
        ranks = made(how, end_process, transports)
        ends.callback(ranks.close, device)
        loaded = ranks.load(model, settings.dtype, device)
    experts = RoutedExperts.of_model(loaded) if settings.routed_experts else None
    if settings.routed_experts and experts is None:
        why = "has routers that cannot be told layer by layer" if loaded.routers else "is dense: it has no routers"
        raise UserError(f"--enable-return-routed-experts: '{loaded.name}' {why}; leave it out")
    if settings.numerics == "aligned":
        device.call(align_numerics, loaded)
    if settings.numerics == "rounded":
        device.call(loaded.round_sums)
    _load_adapters(loaded, settings, device)
    speculation = device.call(lambda: speculation_of(settings.speculative, dtype=settings.dtype, device=device_name))
    draft = speculation.draft if speculation else None
    pages = pages_of(
        [loaded, draft.loaded] if draft else [loaded],
        wanted=settings.kv_pages,
        max_running=settings.max_running,
        longest=loaded.max_context,
        prefill=settings.prefill_tokens,
        caches=settings.dp,
        own=device_name.startswith("cuda"),
        staged=True,
    )
    engine = BuiltinEngine(
        loaded,
        run=device.run,
        kv_pages=pages.value,
        max_running=settings.max_running,
        prefill_tokens=settings.prefill_tokens,
        routes=experts is not None,
        speculation=speculation,
        compiled=device.call(serving_pass, loaded, settings.max_running) if settings.compile else None,
        transports=transports,
        ranks=None if ranks is None else ranks.lead,
    )
    name = _served_name(model, loaded, settings)
    what = f"{name}, {str(loaded.dtype).removeprefix('torch.')} on {device_name}, {pages.value} cache pages"
    adapters = "" if loaded.bank is None or not loaded.bank.served else f", adapters {', '.join(loaded.bank.served)}"
    return ServedEngine(engine, device, name, what + adapters, experts)


def _open_stepwise(
    model: str | dict[str, Any],
    loaded: LoadedModel,
    settings: ServerSettings,
    device: Device,
    transports: dict[str, Transport],
) -> ServedEngine:
    """Of a model that draws points, actions or blocks of masks. UserError for what only a cache of pages has."""
    plain = ServerSettings()
    own = (
        "speculative",
        "tp",
        "dp",
        "encoders",
        "compile",
        "adapters",
        "kv_pages",
        "routed_experts",
        *(() if loaded.blocks is not None else ("numerics",)),
    )
    if odd := next((name for name in own if getattr(settings, name) != getattr(plain, name)), None):
        flags = {"kv_pages": "kv-pages", "adapters": "adapter, --enable-adapters or --training"}
        flags |= {"routed_experts": "enable-return-routed-experts"}
        raise UserError(
            f"--{flags.get(odd, odd)} is of models that write token after token, and '{loaded.name}' does not: "
            "leave it out"
        )
    if isinstance(loaded.head, StepHead) and loaded.head.kind not in DRAWS:
        refuse_step_head(loaded.name, loaded.head)
    if settings.numerics == "aligned":
        device.call(align_numerics, loaded)
    if settings.numerics == "rounded":
        raise UserError("--numerics rounded is of models that write token after token: take fast or aligned")
    kind = BLOCK_ENGINE if loaded.blocks is not None else STEP_ENGINES[loaded.head.kind]
    found = find_registered("engine", kind, {})
    engine = found(loaded, run=device.run, max_running=settings.max_running, transports=transports)
    draws = "blocks" if loaded.blocks is not None else KINDS[loaded.head.kind][0]
    name = _served_name(model, loaded, settings)
    what = f"{name}, {str(loaded.dtype).removeprefix('torch.')} on {loaded.device}, draws {draws}"
    return ServedEngine(engine, device, name, what)


def _served_name(model: str | dict[str, Any], loaded: LoadedModel, settings: ServerSettings) -> str:
    return settings.name or (Path(model).name if isinstance(model, str) and Path(model).is_dir() else loaded.name)


def _check_processes(settings: ServerSettings) -> None:
    """Before anything is loaded."""
    if settings.tp > 1 and settings.dp > 1:
        raise UserError(f"--dp {settings.dp} with --tp {settings.tp} is not supported: leave one of them out")
    if settings.dp > 1 and settings.ep != settings.dp:
        raise UserError(
            f"--dp {settings.dp} with --ep {settings.ep}: its processes share the experts of a mixture; give both the "
            "same, or start a server for each"
        )
    if settings.ep not in (1, settings.tp * settings.dp):
        raise UserError(
            f"--ep {settings.ep} with --tp {settings.tp}: experts lie apart on the processes of --tp; "
            "give both the same"
        )
    if settings.dp > 1 and settings.speculative.startswith("draft"):
        raise UserError(f"--dp {settings.dp} has no cache for a draft model on each process: use --speculative ngram")


def _check_numerics(settings: ServerSettings) -> None:
    """Before anything is loaded."""
    if settings.numerics not in ("fast", "aligned", "rounded"):
        raise UserError(f"--numerics {settings.numerics}: it is fast, aligned or rounded")
    if settings.numerics != "fast" and (settings.processes > 1 or settings.compile):
        raise UserError(
            f"--numerics {settings.numerics} is proved for whole matrices, operation by operation: leave out --tp, "
            "--dp, --encoders and --compile"
        )


def _load_adapters(loaded: LoadedModel, settings: ServerSettings, device: Device) -> None:
    """Those that are asked for by name, or room for those to come."""
    if settings.adapters is None:
        return
    if settings.processes > 1 or settings.compile:
        raise UserError(
            "adapters of single requests are read by one process, operation by operation: leave out --tp, --dp, "
            "--encoders and --compile"
        )
    bank = device.call(AdapterBank, loaded)
    for name, folder in settings.adapters.items():
        device.call(bank.load, name, folder)


def _rank_devices(device: str, settings: ServerSettings) -> tuple[str, ...]:
    """Of each process of the engine."""
    n = settings.processes
    sizes = {"tp": settings.tp, "dp": settings.dp, "encoders": settings.encoders + 1}
    key = " ".join(f"--{flag} {getattr(settings, flag)}" for flag, size in sizes.items() if size > 1)
    if n == 1:
        return (device,)
    if settings.compile:
        raise UserError(
            f"--compile with {key}: an engine of several processes runs its passes operation by operation; leave it out"
        )
    if device == "cpu":
        return (device,) * n
    first, there = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if first + n > there:
        raise UserError(f"{key} asks for {n} GPUs from number {first} on, and this machine has {there}: use fewer")
    return tuple(f"cuda:{first + i}" for i in range(n))
