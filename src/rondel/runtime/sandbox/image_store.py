"""Image folders as root file systems: a layout is unpacked once, by its digest, and shared read-only by all boxes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from rondel.core.errors import SandboxError

Say = Callable[[str], None]


def is_layout(image: str) -> bool:
    return os.path.isfile(os.path.join(image, "oci-layout"))


def manifest_of(layout: Path) -> tuple[str, dict[str, object]]:
    """(digest, manifest) of the only image of a layout."""
    try:
        (named,) = json.loads((layout / "index.json").read_text())["manifests"]
        digest = named["digest"]
        return digest, json.loads(blob_path(layout, digest).read_text())
    except (OSError, ValueError, KeyError) as error:
        raise SandboxError(f"{layout} is no OCI image layout with one image: {error}") from error


def blob_path(layout: Path, digest: str) -> Path:
    kind, _, value = digest.partition(":")
    return layout / "blobs" / kind / value


def root_of(image: str, say: Say = lambda text: None) -> Path:
    """The root file system of an image folder; a folder without a layout is one already."""
    folder = Path(image)
    if not folder.is_dir():
        raise SandboxError(
            f"image = {image!r} is no folder, and without docker or podman nothing fetches one: make it with `rondel "
            f"sandbox image --out {image}`"
        )
    if not is_layout(image):
        return folder.resolve()
    digest, manifest = manifest_of(folder)
    store = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rondel" / "images"
    store.mkdir(parents=True, exist_ok=True)
    target = store / digest.partition(":")[2]
    with open(store / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            say(f"unpacking image {digest[:19]} once")
            half = Path(f"{target}.half")
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir()
            for layer in manifest["layers"]:  # type: ignore[attr-defined]
                unpack_layer(blob_path(folder, layer["digest"]), half)
            half.rename(target)
    return target


def unpack_layer(layer: Path, root: Path) -> None:
    """Entries below the root alone (tarfile's filter), without owners; a whiteout removes what it names."""
    with tarfile.open(layer) as archive:
        for entry in archive:
            place, name = os.path.split(entry.name)
            if name.startswith(".wh."):
                victim = root / place / name[4:]
                if victim.is_dir() and not victim.is_symlink():
                    shutil.rmtree(victim)
                else:
                    victim.unlink(missing_ok=True)
                continue
            if entry.issym() and entry.linkname.startswith("/"):  # which the filter refuses: inside it is the root's
                entry.linkname = os.path.relpath(entry.linkname, f"/{place}")
            if entry.isdev() or entry.isfifo():
                continue
            archive.extract(entry, root, filter="tar" if entry.isdir() else "data")
