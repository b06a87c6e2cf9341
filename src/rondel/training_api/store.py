"""Training runs and checkpoints of the service on disk.

    FOLDER/runs/RUN/facts.json                         who trains what
    FOLDER/runs/RUN/weights/NAME/                    with moments: training goes on from it
    FOLDER/runs/RUN/sampler_weights/NAME/            an adapter alone
    FOLDER/runs/RUN/external_weights/NAME/           the same, to be fetched file by file
    FOLDER/requests.jsonl, card.json                 what was asked, one line each, and the sum of it

A checkpoint is written beside its place and renamed into it. Its address is tinker://RUN/KIND/NAME.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from rondel.core.errors import UserError, error_boundary
from rondel.system.files import replace_file

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,127}")
NOTE = "checkpoint.json"
UNNAMED = "unnamed"  # in a note: a snapshot that goes with its session
TTL = (3600, 10 * 366 * 86400)  # seconds that a checkpoint may be given


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with error_boundary(UserError, f"making the folder '{folder}' of the service"):
            (folder / "runs").mkdir(parents=True, exist_ok=True)
        for left in (folder / "runs").glob("*/*/.new-*"):  # of a server that was killed
            shutil.rmtree(left)
        for file in (folder / "runs").glob(f"*/sampler_weights/*/{NOTE}"):
            if json.loads(file.read_text()).get(UNNAMED):
                shutil.rmtree(file.parent)

    # -- runs ------------------------------------------------------------------------------------

    def create_run(self, run: str, facts: dict[str, Any]) -> None:
        folder = self._run_folder(run)
        folder.mkdir(exist_ok=True)
        replace_file(folder / "facts.json", json.dumps(facts | {"run": run, "born": time.time()}))

    def run(self, run: str) -> dict[str, Any]:
        """KeyError: there is none."""
        file = self._run_folder(run) / "facts.json"
        if not file.is_file():
            raise KeyError(f"no training run '{run}' here")
        facts: dict[str, Any] = json.loads(file.read_text())
        return facts

    def runs(self) -> list[dict[str, Any]]:
        """The newest first."""
        found = [json.loads(file.read_text()) for file in (self.folder / "runs").glob("*/facts.json")]
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
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.parent / f".new-{uuid4().hex}"
        new.mkdir()
        try:
            yield new
            size = sum(file.stat().st_size for file in new.iterdir())
            (new / NOTE).write_text(json.dumps({"born": time.time(), "bytes": size, "public": False} | note))
            if place.exists():
                os.rename(place, old := place.parent / f".new-{uuid4().hex}")
                os.rename(new, place)
                shutil.rmtree(old)
            else:
                os.rename(new, place)
        finally:
            shutil.rmtree(new, ignore_errors=True)

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
        note: dict[str, Any] = json.loads(file.read_text())
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
                    except KeyError:
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


def to_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def expiry(ttl: int | None) -> float | None:
    """When a checkpoint of `ttl` seconds expires."""
    if ttl is None:
        return None
    if not TTL[0] <= ttl <= TTL[1]:
        raise UserError(f"ttl_seconds = {ttl}; it is from 3600 (an hour) to ten years, or none")
    return time.time() + ttl
