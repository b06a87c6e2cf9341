"""Training runs and checkpoints of the service on disk.

    FOLDER/runs/RUN/facts.json                         who trains what
    FOLDER/runs/RUN/weights/NAME/                    with moments: training goes on from it
    FOLDER/runs/RUN/sampler_weights/NAME/            an adapter alone
    FOLDER/runs/RUN/external_weights/NAME/           the same, to be fetched file by file
    FOLDER/requests.jsonl, card.json                 what was asked, one line each, and the sum of it

A checkpoint is written beside its place, onto the disk, and renamed into it; one that it replaces waits under another
name until then. Its address is tinker://RUN/KIND/NAME.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from rondel.core.errors import CheckpointError, UserError, disk_refusal, error_boundary
from rondel.system.files import make_folder, replace_file, sync_folder, sync_tree

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,127}")
NOTE = "checkpoint.json"
REPLACED = ".old-"  # before the name of a checkpoint whose replacement is not there yet
UNNAMED = "unnamed"  # in a note: a snapshot that goes with its session
TTL = (3600, 10 * 366 * 86400)  # seconds that a checkpoint may be given


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with error_boundary(UserError, f"making the folder '{folder}' of the service"):
            (folder / "runs").mkdir(parents=True, exist_ok=True)
        for left in (folder / "runs").glob("*/*/.new-*"):  # of a server that was killed
            shutil.rmtree(left)
        for old in (folder / "runs").glob(f"*/*/{REPLACED}*"):
            if (place := old.with_name(old.name.removeprefix(REPLACED))).exists():
                shutil.rmtree(old)
            else:
                old.rename(place)
        for file in (folder / "runs").glob(f"*/sampler_weights/*/{NOTE}"):
            with suppress(CheckpointError):  # told to who asks for it
                if _read_object(file).get(UNNAMED):
                    shutil.rmtree(file.parent)

    # -- runs ------------------------------------------------------------------------------------

    def create_run(self, run: str, facts: dict[str, Any]) -> None:
        folder = make_folder(self._run_folder(run))
        replace_file(folder / "facts.json", json.dumps(facts | {"run": run, "born": time.time()}))

    def run(self, run: str) -> dict[str, Any]:
        """KeyError: there is none."""
        file = self._run_folder(run) / "facts.json"
        if not file.is_file():
            raise KeyError(f"no training run '{run}' here")
        return _read_object(file)

    def runs(self) -> list[dict[str, Any]]:
        """The newest first; without those whose file is damaged, which is told to who asks for them."""
        found = []
        for file in (self.folder / "runs").glob("*/facts.json"):
            with suppress(CheckpointError):
                found.append(_read_object(file))
        return sorted(found, key=lambda facts: -facts["born"])

    def _run_folder(self, run: str) -> Path:
        if not RUN.fullmatch(run):
            raise UserError(f"'{run[:200]}' is no name of a training run")
        return self.folder / "runs" / run.replace(":", "_")

    # -- checkpoints -----------------------------------------------------------------------------

    @contextmanager
    def new_checkpoint(
        self, run: str, kind: str, name: str, note: dict[str, Any], *, overwrite: bool
    ) -> Iterator[Path]:
        """A folder to write into, which becomes the checkpoint when the block ends well. UserError: there is one."""
        place = self._place(run, kind, name)
        if place.exists() and not overwrite:
            raise UserError(f"tinker://{run}/{kind}/{name} exists already: take another name, or overwrite=True")
        make_folder(place.parent)
        new = place.parent / f".new-{uuid4().hex}"
        try:
            new.mkdir()
            yield new
            size = sum(file.stat().st_size for file in new.iterdir())
            (new / NOTE).write_text(json.dumps({"born": time.time(), "bytes": size, "public": False} | note))
            if not note.get(UNNAMED):  # those go with this server, whatever ends it
                sync_tree(new)
            self._put(new, place)
        except Exception as error:
            if refusal := disk_refusal(error, f"writing {place}"):
                raise CheckpointError(refusal) from error
            raise
        finally:
            shutil.rmtree(new, ignore_errors=True)

    @staticmethod
    def _put(new: Path, place: Path) -> None:
        old = place.with_name(f"{REPLACED}{place.name}")
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(place, old)
        try:
            os.rename(new, place)
        except OSError:
            if old.exists():
                os.rename(old, place)
            raise
        sync_folder(place.parent)
        shutil.rmtree(old, ignore_errors=True)

    def find(self, address: str) -> tuple[str, str, str]:
        """tinker://RUN/KIND/NAME of a checkpoint that is there -> its parts. KeyError: it is not."""
        parts = address.removeprefix("tinker://").split("/")
        if not address.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise UserError(f"'{address[:200]}' is no address of a checkpoint: tinker://RUN/weights/NAME is")
        run, kind, name = parts
        self.note(run, kind, name)
        return run, kind, name

    def place(self, address: str) -> Path:
        return self._place(*self.find(address))

    def note(self, run: str, kind: str, name: str) -> dict[str, Any]:
        """KeyError: it is not there, or has expired (then it is removed)."""
        file = self._place(run, kind, name) / NOTE
        if not file.is_file():
            raise KeyError(f"there is no checkpoint tinker://{run}/{kind}/{name}")
        note = _read_object(file)
        if (note.get("expires") or float("inf")) < time.time():
            shutil.rmtree(file.parent)
            raise KeyError(f"tinker://{run}/{kind}/{name} has expired")
        return note

    def change_note(self, run: str, kind: str, name: str, **changes: Any) -> None:
        note = self.note(run, kind, name)
        replace_file(self._place(run, kind, name) / NOTE, json.dumps(note | changes))

    def delete(self, run: str, kind: str, name: str) -> None:
        self.note(run, kind, name)
        shutil.rmtree(self._place(run, kind, name))

    def copy(self, address: str, run: str, note: dict[str, Any]) -> str:
        """-> the address of the copy, in `run`"""
        _, kind, name = self.find(address)
        source = self.place(address)
        with self.new_checkpoint(run, kind, name, note, overwrite=False) as new:
            for file in source.iterdir():
                if file.name != NOTE:
                    shutil.copy2(file, new / file.name)
        return f"tinker://{run}/{kind}/{name}"

    def checkpoints(self, run: str | None = None) -> list[dict[str, Any]]:
        """As clients read them, the newest first."""
        runs = [self.run(run)["run"]] if run is not None else [facts["run"] for facts in self.runs()]
        found = []
        for one in runs:
            for kind in KINDS:
                for folder in (self._run_folder(one) / kind).glob("[!.]*"):
                    try:
                        note = self.note(one, kind, folder.name)
                    except (KeyError, CheckpointError):
                        continue
                    found.append((note["born"], self._card(one, kind, folder.name, note)))
        return [card for _, card in sorted(found, key=lambda row: -row[0])]

    def _card(self, run: str, kind: str, name: str, note: dict[str, Any]) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{kind}/{name}",
            "checkpoint_type": KINDS[kind],
            "time": to_time(note["born"]),
            "tinker_path": f"tinker://{run}/{kind}/{name}",
            "size_bytes": note["bytes"],
            "public": note["public"],
            "user_metadata": note.get("metadata"),
            "expires_at": to_time(note["expires"]) if note.get("expires") else None,
        }

    def _place(self, run: str, kind: str, name: str) -> Path:
        if kind not in KINDS or not NAME.fullmatch(name):
            raise UserError(
                f"'{name[:200]}' is no name of a checkpoint: letters, digits, '.', '_' and '-', at most 128 of them"
            )
        return self._run_folder(run) / kind / name


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "born" not in found:
        raise CheckpointError(f"'{file}' is damaged: put back a copy of it, or remove the folder '{file.parent}'")
    return found


def to_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def expiry(ttl: int | None) -> float | None:
    """When a checkpoint of `ttl` seconds expires."""
    if ttl is None:
        return None
    if not TTL[0] <= ttl <= TTL[1]:
        raise UserError(f"ttl_seconds = {ttl}; it is from 3600 (an hour) to ten years, or none")
    return time.time() + ttl
