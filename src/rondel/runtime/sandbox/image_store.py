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
    """Entries below the root alone, without owners; a whiteout removes what it names.
    tarfile.TarError for any other."""
    with tarfile.open(layer) as archive:
        for entry in archive:
            place, name = os.path.split(entry.name)
            if name.startswith(".wh."):
                _refuse_outside(root, place, entry)
                if name[4:] in ("", ".", ".."):
                    raise tarfile.TarError(f"{entry.name!r} leads outside the image")
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
            if hasattr(tarfile, "data_filter"):
                archive.extract(entry, root, filter="tar" if entry.isdir() else "data")
            else:  # Python 3.11.0 to 3.11.3, among them Debian 12's
                archive.extract(_filtered(entry, root), root)


def _filtered(entry: tarfile.TarInfo, root: Path) -> tarfile.TarInfo:
    """What tarfile's filter refuses and takes away."""
    entry.name = entry.name.lstrip("/")
    _refuse_outside(root, entry.name, entry)
    if entry.issym() or entry.islnk():
        _refuse_outside(root, os.path.join(os.path.dirname(entry.name) if entry.issym() else "", entry.linkname), entry)
    entry.mode &= 0o755
    if entry.isreg():
        entry.mode |= 0o600
    entry.uid, entry.gid, entry.uname, entry.gname = os.getuid(), os.getgid(), "", ""
    return entry


def _refuse_outside(root: Path, path: str, entry: tarfile.TarInfo) -> None:
    top = os.path.realpath(root)
    if os.path.commonpath([top, os.path.realpath(os.path.join(top, path))]) != top:
        raise tarfile.TarError(f"{entry.name!r} leads outside the image")
