"""Folders that boxes begin from: a prepared one is copied for each box, without its bytes where the file system can.

    snapshot(folder, "prepared")                        # what a box left in its folder, kept
    sandbox.cell(limits, base="prepared")               # a box whose home begins as that folder
A file system with shared extents (btrfs, xfs) copies 1 GB in a moment; others copy it. The copies of a process that was
killed are removed by the next that makes one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from rondel.core.errors import SandboxError, UserError
from rondel.runtime.sandbox.leftovers import paths_of_ended
from rondel.runtime.sandbox.users import is_real_root, random_user_id

COPIES = "rondel-copies"


def snapshot(folder: str | Path, target: str | Path) -> Path:
    """A copy of the folder with modes, times and links; `target` must not exist."""
    source, target = Path(folder), Path(target)
    if not source.is_dir():
        raise UserError(f"{source} is no folder, and no box can begin from it")
    if target.exists():
        raise UserError(f"{target} exists already: name a folder that does not")
    done = subprocess.run(
        ["cp", "--archive", "--reflink=auto", "--no-target-directory", "--", str(source), str(target)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        raise SandboxError(f"{source} cannot be copied to {target}: {done.stderr.strip()[-300:]}")
    return target


def box_copy(base: str | Path) -> Path:
    """A copy for one box, which it may write to: for a root everything in it belongs to a user that nobody is."""
    place = Path(tempfile.gettempdir(), COPIES)
    place.mkdir(mode=0o711, exist_ok=True)
    remove_dead_copies()
    made = snapshot(base, place / f"{os.getpid()}-{uuid.uuid4().hex[:12]}")
    if is_real_root():
        uid = random_user_id()
        for at, folders, files in os.walk(made):
            for name in (*folders, *files):
                os.lchown(os.path.join(at, name), uid, uid)
        os.chown(made, uid, uid)
    return made


def remove_dead_copies() -> list[Path]:
    """Copies of boxes whose controller was killed. -> those that are gone now."""
    removed = []
    for one in paths_of_ended(Path(tempfile.gettempdir(), COPIES)):
        with suppress(OSError):
            shutil.rmtree(one)
            removed.append(one)
    return removed
