"""What a process has resident, by phase of a run: a thread asks the kernel and the heap, and reads what the device's
thread computes off its stack. Nothing of the run is changed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rondel.system.process_memory import heap_bytes

# (file, function) on the stack of a device's thread -> phase; the innermost that is found
PHASES = {
    ("load", "load_model"): "load",
    ("step", "__init__"): "load",
    ("runner", "step"): "generate",
    ("annotate", "annotate_logprobs"): "annotate",
    ("step", "begin_gradients"): "begin",
    ("step", "forward"): "forward",
    ("optim", "backward"): "backward",
    ("optim", "step"): "optimizer",
    ("optim", "_changed_share"): "round weights",
    ("step", "_measure_kl_to_start"): "start probe",
    ("parallel", "publish"): "publish",
    ("weight_publisher", "publish"): "publish",
    ("checkpoint", "save_trainer"): "checkpoint",
}
EACH = 0.02  # seconds between two samples


class MemoryTimeline:
    """with MemoryTimeline(lambda: held) as timeline: ...; timeline.rows()

    held     bytes by what holds them, asked where a phase has a new peak
    before   resident bytes before it began
    """

    def __init__(self, held: Callable[[], dict[str, int]]) -> None:
        self.held, self.before, self.peaks = held, _resident()["resident"], {}
        self.line: list[tuple[float, str, int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-timeline", daemon=True)

    def __enter__(self) -> MemoryTimeline:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EACH):
            self._sample()

    def _sample(self) -> None:
        phase, found = _phase(), _resident()
        heap = heap_bytes()
        self.line.append((time.perf_counter(), phase, found["resident"], heap.get("used", 0)))
        row = self.peaks.setdefault(phase, {"samples": 0, "resident": 0, "live": 0})
        row["samples"] += 1
        row["live"] = max(row["live"], heap.get("used", 0))
        if found["resident"] > row["resident"]:
            try:
                held = self.held()
            except (RuntimeError, AttributeError, IndexError):  # it changes while it is read
                held = {}
            row |= found | heap | {"held": held or row.get("held", {})}

    def rows(self) -> dict[str, dict[str, Any]]:
        """{phase: {"seconds", "resident", "mapped", "used", "free", "held"}} in bytes at the phase's own peak."""
        return {
            phase: {"seconds": round(row["samples"] * EACH, 2)} | {k: v for k, v in row.items() if k != "samples"}
            for phase, row in self.peaks.items()
        }


def held_bytes(parts: Any) -> dict[str, int]:
    """Of a run in one process: bytes of the tensors that stay, by what they are."""
    from rondel.models import linear

    packed = sum(stack.packed_bytes for stack in linear.packed_linears(parts.trainer.loaded.model))
    cache = getattr(getattr(parts.engine, "runner", None), "cache_bytes", 0)
    return {"packed weights": packed, "KV cache": cache} | parts.trainer.offload.memory()


def _phase() -> str:
    names = {t.ident: t.name for t in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if not names.get(ident, "").startswith("rondel-"):
            continue
        here: Any = frame
        while here is not None:
            code = here.f_code
            if (phase := PHASES.get((Path(code.co_filename).stem, code.co_name))) is not None:
                return phase
            here = here.f_back
    return "other"


def _resident() -> dict[str, int]:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kb = {name: int(rows[name].split()[0]) * 1024 for name in ("VmRSS", "RssFile", "RssShmem")}
    return {"resident": kb["VmRSS"], "mapped": kb["RssFile"] + kb["RssShmem"]}
