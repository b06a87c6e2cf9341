"""Loops in C++ (`SOURCES`), compiled for this processor at first use and kept: takes 13 to 30 seconds of a core once a machine.

    $RONDEL_CACHE/kernels/<digest>.so     of the source, the compiler, its options and what the processor can

It knows nothing of torch or Python, so one file is for every version of both; it shares the thread pool that torch
brings. Without a compiler everything is computed by torch's own operations: slower, with other last bits. A run that
began with one of the two must go on with it, so its journal says which.

    RONDEL_CPU_KERNELS   "0": torch's operations; "1": the loops, on any processor; not set: the loops on x86 with AVX2
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from rondel.core.errors import UserError
from rondel.core.events import Warned, emit

SWITCH = "RONDEL_CPU_KERNELS"
SOURCES = [
    Path(__file__).with_name(f"cpu_{name}.cpp")
    for name in ("kernels", "product", "pairs", "layers", "halves", "tree", "digest", "draw", "hop")
]
HEADERS = [Path(__file__).with_name(name) for name in ("cpu_rows.h", "cpu_tiles.h", "cpu_panels.h")]
OPTIONS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
WORKERS = 4  # compilers at once, of some 0.4 GB each
LONGEST = 300.0  # seconds that a compiler may take, and the one who waits for it

WHOLE, REAL, PLACE = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
CODE, THREADS = ctypes.c_int, ctypes.c_int
SIGNATURES: dict[str, list[Any]] = {
    "rondel_norm_forward": [PLACE, CODE, PLACE, CODE, PLACE, WHOLE, WHOLE, REAL, THREADS],
    "rondel_norm_backward": [PLACE, CODE, PLACE, CODE, *[PLACE] * 3, WHOLE, WHOLE, REAL, WHOLE, THREADS],
    "rondel_gate_forward": [CODE, PLACE, PLACE, PLACE, *[WHOLE] * 4, THREADS],
    "rondel_gate_backward": [CODE, *[PLACE] * 5, WHOLE, THREADS],
    "rondel_rotate": [PLACE, CODE, PLACE, PLACE, CODE, PLACE, *[WHOLE] * 5, CODE, THREADS],
    "rondel_softmax": [CODE, PLACE, PLACE, REAL, *[WHOLE] * 4, THREADS],
    "rondel_softmax_backward": [CODE, PLACE, PLACE, REAL, WHOLE, WHOLE, THREADS],
    "rondel_logprob_forward": [*[PLACE] * 6, WHOLE, WHOLE, REAL, THREADS],
    "rondel_logprob_backward": [CODE, *[PLACE] * 8, WHOLE, WHOLE, REAL, REAL, THREADS],
    "rondel_add": [PLACE, PLACE, WHOLE, THREADS],
    "rondel_round": [PLACE, PLACE, WHOLE, THREADS],
    "rondel_split": [*[PLACE] * 5, WHOLE, WHOLE, THREADS],
    "rondel_unsplit": [PLACE, PLACE, PLACE, WHOLE, THREADS],
    "rondel_join": [PLACE, PLACE, PLACE, WHOLE, THREADS],
    "rondel_pack": [CODE, PLACE, PLACE, WHOLE, WHOLE, THREADS],
    "rondel_product": [CODE, PLACE, WHOLE, *[PLACE] * 3, *[WHOLE] * 3, THREADS],
    "rondel_decode": [CODE, *[PLACE] * 9, *[WHOLE] * 10, REAL, THREADS],
    "rondel_pack_words": [PLACE, PLACE, *[WHOLE] * 4, THREADS],
    "rondel_draw": [*[PLACE] * 4, WHOLE, WHOLE, THREADS],
    "rondel_hop": [CODE],
    "rondel_has_amx": [],
    "rondel_digest": [PLACE, WHOLE, PLACE, PLACE, WHOLE, PLACE, THREADS],
    "rondel_pair_product": [PLACE, WHOLE, *[PLACE] * 3, *[WHOLE] * 3, THREADS],
    "rondel_tile_room": [CODE, WHOLE, WHOLE],
    "rondel_layer_half": [CODE, CODE, PLACE, PLACE, REAL, THREADS],
    "rondel_add_weight_gradient": [CODE, PLACE, WHOLE, PLACE, *[WHOLE] * 3, PLACE, CODE, PLACE, THREADS],
    "rondel_tree": [CODE, CODE, PLACE, REAL, THREADS],
    "rondel_layers": [CODE, PLACE, WHOLE, CODE, PLACE, REAL, REAL, THREADS],
}
# what returns anything
COUNTS = {"rondel_round": WHOLE, "rondel_tile_room": WHOLE, "rondel_has_amx": CODE, "rondel_hop": ctypes.c_double}


def chosen_library() -> ctypes.CDLL | None:
    """The library that models on a CPU compute with, by the environment and the processor."""
    chosen = os.environ.get(SWITCH, "")
    if chosen not in ("", "0", "1"):
        raise UserError(
            f'{SWITCH} = "{chosen}" in the environment; write 0 for torch\'s operations, or 1 for the loops'
        )
    return native_library() if chosen == "1" or (not chosen and {"avx2", "fma"} <= _abilities()) else None


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The functions of `SOURCES`; None, and a warning, where there is no compiler, or it fails."""
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None:
        emit(
            Warned(
                f"no C++ compiler is here (apt install g++): torch's operations compute in the place of the faster "
                f"loops for this CPU. {SWITCH}=0 says that it is meant"
            )
        )
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, COUNTS.get(name)
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        reason = next((line for line in told.splitlines() if "error" in line.lower()), told or type(error).__name__)
        emit(
            Warned(
                f"loops for this CPU cannot be compiled by {compiler} ({reason}): torch's operations compute instead, "
                f"slower. {SWITCH}=0 says that it is meant"
            )
        )
        return None
    return library


def _compiled(compiler: str) -> Path:
    """The library's file, made where it is missing; whoever comes meanwhile waits."""
    command = [compiler, *OPTIONS, *_options()]
    program = Path(compiler).resolve()
    found = program.stat()  # asking it for its version takes a process each time
    made_of = "\n".join(
        [
            *(file.read_text() for file in [*HEADERS, *SOURCES]),
            *command,
            f"{program} {found.st_size} {found.st_mtime_ns}",
            _processor(),
        ]
    )
    folder = Path(os.environ.get("RONDEL_CACHE", Path.home() / ".cache" / "rondel")) / "kernels"
    file = folder / f"{hashlib.blake2b(made_of.encode(), digest_size=12).hexdigest()}.so"
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock"), timeout=LONGEST):
        if not file.is_file():
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                made = Path(draft) / file.name
                parts = {source: Path(draft) / f"{source.stem}.o" for source in SOURCES}
                with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
                    own = [[*command, "-fPIC", "-c", str(source), "-o", str(part)] for source, part in parts.items()]
                    list(pool.map(_run, own))
                _run([*command, "-shared", *map(str, parts.values()), "-o", str(made), *_thread_pool()])
                made.replace(file)
    return file


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=True)


def _options() -> list[str]:
    wide = ["-mprefer-vector-width=512"] if platform.machine().lower() in ("x86_64", "amd64") else []
    # a process asks the kernel for AMX's registers, and may not get them
    if "amx_tile" in _abilities() and not torch.cpu._init_amx():
        wide.append("-mno-amx-bf16")
    return [*wide, "-fopenmp"] if _thread_pool() else [*wide, "-fopenmp-simd"]


def _thread_pool() -> list[str]:
    """torch's own libgomp: another one would have threads of its own. Without it a kernel runs on one thread."""
    return [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]]


@functools.cache
def _processor() -> str:
    """What it can: a library for another one of the same home folder may hold instructions that this one lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _abilities() -> set[str]:
    """{"avx2", "fma", ...} of an x86 processor under Linux; empty for others."""
    lines = _processor().splitlines()
    return {word for line in lines if line.startswith("flags") for word in line.partition(":")[2].split()}
