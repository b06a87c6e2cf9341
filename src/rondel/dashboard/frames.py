"""Frames of an episode for the page, drawn by a process of its own: a graphics library that breaks breaks that alone.

dashboard ── pipe, nothing is ever written ──> frame_process.py: the end of the pipe is the end of the dashboard
          <────────── one line of JSON ──────
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from rondel.core.errors import UserError

SECONDS = 60.0  # for one episode; a world that takes longer is not shown
_one_at_a_time = threading.Lock()


def episode_frames(folder: Path, step: int, at: int, written: float) -> dict[str, str]:
    """{"png": data URI}: the frames of episode `at` of a step, beside each other. Drawn once for a file that was
    `written` then. UserError where it cannot be drawn.
    """
    with _one_at_a_time:
        return _draw(folder, step, at, written)


@lru_cache(maxsize=16)
def _draw(folder: Path, step: int, at: int, written: float) -> dict[str, str]:
    theirs, alive = os.pipe()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "rondel.dashboard.frame_process", str(folder), str(step), str(at)],
            stdin=theirs,
            capture_output=True,
            timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"no frames: the world did not draw them within {SECONDS:g} s") from None
    finally:
        os.close(theirs)
        os.close(alive)
    if ended.returncode or not ended.stdout:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"no frames: the process that drew them ended with code {ended.returncode}: {last[:200]}")
    told: dict[str, str] = json.loads(ended.stdout)
    if "error" in told:
        raise UserError(told["error"])
    return told
