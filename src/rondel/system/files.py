"""The files of a run: each whole or not at all, on the disk before what it replaces goes,
and a refusal of the disk with its remedy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rondel.core.errors import CheckpointError, RondelError, UserError, disk_refusal, root_cause

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"  # of a checkpoint, as Hugging Face stores it


@contextmanager
def guard_write(
    path: Path | str, wanted: int = 0, error: type[RondelError] = CheckpointError, doing: str = "writing"
) -> Iterator[None]:
    """Anything raised inside becomes `error` that names the path, the bytes where they are
    known, and the remedy. Our own errors pass.
    """
    what = f"{doing} {path}"
    try:
        yield
    except RondelError:
        raise
    except (Exception, BaseExceptionGroup) as raised:
        if isinstance(cause := root_cause(raised), RondelError) or not isinstance(cause, Exception):
            raise cause from raised
        raise error(disk_refusal(cause, what, wanted) or f"{what}: {type(cause).__name__}: {cause}") from cause


def replace_file(path: Path, data: str | bytes, *, mode: int | None = None) -> None:
    """`path` holds `data` when this returns, on the disk and not in the system's
    memory alone; until then it is as it was.
    """
    data = data.encode() if isinstance(data, str) else data
    with open_replacement(path, len(data), mode=mode) as file:
        file.write(data)


@contextmanager
def open_replacement(path: Path, wanted: int = 0, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file to write into, which is `path` once the block ends without an error."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            wanted = max(wanted, file.tell())
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            draft.chmod(mode)
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        with guard_write(path, wanted):
            raise error
    with guard_write(path):
        sync_folder(path.parent)


@contextmanager
def drop_on_error(draft: Path) -> Iterator[None]:
    """A file or folder that is begun inside is gone if the block ends with an error: on a full disk it is in the way."""
    try:
        yield
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """What a command was asked to write, wherever that is: a pipe or a terminal, too."""
    with guard_write(path, len(text), UserError):
        Path(path).write_text(text, encoding="utf-8", errors="replace")


def sync_folder(folder: Path) -> None:
    """The names in a folder onto the disk: without it a file that is there may be nowhere after a power cut."""
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Every file below a folder, and the names of all of them, onto the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(path)


def make_folder(folder: Path, what: str = "") -> Path:
    """The folder, made with its parents where it is missing; its name is on the disk. `what`: the key that names it."""
    fresh = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]
    with guard_write(folder, doing=f"{what} = '{folder}': making" if what else "making"):
        folder.mkdir(parents=True, exist_ok=True)
        for part in fresh:
            sync_folder(part.parent)
    return folder


def numbered_paths(folder: Path, prefix: str, suffix: str = "", *, digits: int = 6) -> dict[int, Path]:
    """{5: folder/step-000005}, in the order of the numbers: what a run named so, and nothing that merely begins so."""
    found = {}
    for path in folder.glob(f"{prefix}*{suffix}"):
        number = path.name.removeprefix(prefix).removesuffix(suffix)
        if number.isascii() and number.isdigit() and path.name == f"{prefix}{int(number):0{digits}d}{suffix}":
            found[int(number)] = path
    return dict(sorted(found.items()))


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """{5: folder/step-000005}, oldest first: what a run wrote there, whole or not, and
    no copy of it under another number.
    """
    return {
        n: path for n, path in numbered_paths(folder, "step-").items() if path.is_dir() and step_of(path) in (None, n)
    }


def step_of(checkpoint: Path) -> int | None:
    """The step that a checkpoint says it is of; None where it cannot say."""
    try:
        return int(json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
