"""OCI images without a hub: Debian packages and wheels unpacked into one layer, with equal bits for equal inputs.

    apt resolves names -> .deb files (checked against the archive's digests) -> members, sorted, without times -> layer
    pip resolves names -> wheels ----------------------------------------------^
No package's scripts are run and nothing needs to be root. The folder is an OCI image layout
(https://github.com/opencontainers/image-spec/blob/main/image-layout.md) that podman, crun and runc run; `packages.json`
in it lists every file that went in with its digest, and as `lock` makes the same image again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rondel.core.errors import SandboxError, UserError

BASE = ("base-files", "dash", "coreutils", "python3")  # a shell, cat, and the interpreter that boxes are asked for
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "bin/sh": "dash"}
SKIPPED = ("usr/share/doc/", "usr/share/man/", "usr/share/locale/", "usr/share/info/", "var/", "usr/share/lintian/")
FOLDERS = ("box", "dev", "proc", "sys", "tmp", "run", "etc", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64")
FILES = {
    "etc/passwd": "root:x:0:0::/nowhere:/bin/sh\nbox:x:65534:65534::/box:/bin/sh\n",
    "etc/group": "root:x:0:\nbox:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}
BATCH = 12  # packages of one call of apt: a line of progress for each
WHEELS = "usr/lib/python3/dist-packages"
LOCK = "packages.json"
LAYER, CONFIG, MANIFEST = (
    f"application/vnd.oci.image.{name}" for name in ("layer.v1.tar", "config.v1+json", "manifest.v1+json")
)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
Say = Callable[[str], None]
Members = dict[str, tuple[tarfile.TarInfo, bytes]]


def build_image(
    out: Path, *, debian: Iterable[str] = (), pypi: Iterable[str] = (), lock: Path | None = None, say: Say = print
) -> str:
    """Writes the layout into `out`, which must not exist; -> the digest of its manifest. `lock`: a `packages.json`,
    whose files and no others are taken.
    """
    if out.exists():
        raise UserError(f"{out} exists already: name a folder that does not, or remove it")
    wanted = json.loads(lock.read_text()) if lock else None
    with tempfile.TemporaryDirectory() as work:
        debs = resolve_debian([*BASE, *debian], Path(work)) if wanted is None else wanted["debian"]
        files = fetch_debs(debs, cache_folder(), say)
        members: Members = {}
        for file in sorted(files, key=lambda path: path.name):
            members.update(deb_members(file))
        wheels = fetch_wheels(list(pypi), members, Path(work), wanted and wanted["pypi"], say)
        for wheel in wheels:
            members.update(wheel_members(wheel))
        used = {
            "debian": [{"name": file.name, "sha256": file_digest(file)} for file in files],
            "pypi": [{"name": wheel.name, "sha256": file_digest(wheel)} for wheel in wheels],
        }
        say(f"layer: {len(members)} files")
        return write_layout(out, members, used)


# -- packages ----------------------------------------------------------------------------------------


def resolve_debian(names: list[str], work: Path) -> list[dict[str, str]]:
    """The packages and all that they depend on, as for an empty machine: [{"name": file}]."""
    (work / "status").touch()
    command = [
        "apt-get", "install", "--print-uris", "--yes", "--no-install-recommends", "-o", f"Dir::State::status={work}/status",
        "-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::archives={work}", *names,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        raise SandboxError("apt-get is not here: build the image on Debian or Ubuntu, and copy its folder") from None
    if done.returncode:
        raise UserError(f"apt cannot resolve {' '.join(names)}: {done.stderr.strip()[-300:]}; try apt-get update")
    return [{"name": line.split()[1]} for line in sorted(done.stdout.splitlines()) if line.startswith("'")]


def cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rondel" / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch_debs(debs: list[dict[str, str]], cache: Path, say: Say) -> list[Path]:
    """By apt, which checks the archive's signature; kept under their names, which have their versions."""
    missing = [deb["name"] for deb in debs if not (cache / deb["name"]).exists()]
    for begin in range(0, len(missing), BATCH):
        batch = missing[begin : begin + BATCH]
        say(f"packages {begin + len(batch)} of {len(missing)}: {', '.join(name.split('_')[0] for name in batch)}")
        wanted = ["=".join(urllib.parse.unquote(name).split("_")[:2]) for name in batch]
        with tempfile.TemporaryDirectory(dir=cache) as work:
            command = ["apt-get", "download", "-o", "APT::Sandbox::User=root", *wanted]
            done = subprocess.run(command, cwd=work, capture_output=True, text=True)
            for found in Path(work).glob("*.deb"):
                found.rename(cache / found.name)
        if absent := [name for name in batch if not (cache / name).exists()]:
            raise SandboxError(f"{', '.join(absent)} cannot be fetched: {done.stderr.strip()[-300:]}")
    for deb in debs:
        if "sha256" in deb and file_digest(cache / deb["name"]) != deb["sha256"]:
            raise SandboxError(f"{cache / deb['name']} has another digest than the lock file says: remove it")
    return [cache / deb["name"] for deb in debs]


def fetch_wheels(names: list[str], members: Members, work: Path, locked: Any, say: Say) -> list[Path]:
    """For the interpreter of the image, whatever runs this."""
    if not names and not locked:
        return []
    version = next(path[14:] for path in sorted(members) if path.startswith("usr/bin/python3.") and path[15:].isalnum())
    folder = work / "wheels"
    say(f"wheels: {' '.join(names or [one['name'] for one in locked])}")
    wanted = names or ["==".join(one["name"].split("-")[:2]) for one in locked]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version", version, "--dest", str(folder),
        *(["--no-deps"] if locked else []), *wanted,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"pip cannot fetch wheels of {' '.join(wanted)}: {done.stderr.strip()[-300:]}")
    found = sorted(folder.glob("*.whl"))
    for one in locked or ():
        if (folder / one["name"]) not in found or file_digest(folder / one["name"]) != one["sha256"]:
            raise SandboxError(f"{one['name']} is not what the lock file says: its registry has another file")
    return found


def deb_members(file: Path) -> Members:
    """Path -> (entry, contents). /bin, /sbin and /lib are links into /usr, as on every Debian."""
    unpack = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(file)], capture_output=True)
    if unpack.returncode:
        raise SandboxError(f"{file} is no Debian package: {unpack.stderr.decode(errors='replace').strip()[-300:]}")
    with tarfile.open(fileobj=io.BytesIO(unpack.stdout)) as archive:
        return dict(_clean_members(archive))


def _clean_members(archive: tarfile.TarFile) -> Iterator[tuple[str, tuple[tarfile.TarInfo, bytes]]]:
    for entry in archive:
        path = merged_path(entry.name)
        if not path or path in LINKS or path.startswith(SKIPPED):
            continue
        if entry.isdir():
            yield path, (plain_entry(path, tarfile.DIRTYPE, 0o755), b"")
        elif entry.issym():
            yield path, (plain_entry(path, tarfile.SYMTYPE, 0o777, link=entry.linkname), b"")
        elif entry.islnk() or entry.isreg():
            reader = archive.extractfile(entry)
            data = reader.read() if reader else b""
            yield (
                path,
                (plain_entry(path, tarfile.REGTYPE, 0o755 if entry.mode & 0o100 else 0o644, size=len(data)), data),
            )


def wheel_members(wheel: Path) -> Members:
    found: Members = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inner = name
            if ".data/" in name:
                _, _, rest = name.partition(".data/")
                kind, _, inner = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            if name.endswith("/") or ".." in inner.split("/") or inner.startswith("/"):
                continue
            data = archive.read(name)
            path = f"{WHEELS}/{inner}"
            found[path] = (plain_entry(path, tarfile.REGTYPE, 0o644, size=len(data)), data)
    return found


def merged_path(name: str) -> str:
    path = os.path.normpath(name.lstrip("./")) if name.strip("./") else ""
    top, slash, rest = path.partition("/")
    return f"usr/{top}/{rest}" if slash and top in ("bin", "sbin", "lib", "lib64") else path


def plain_entry(path: str, kind: bytes, mode: int, *, size: int = 0, link: str = "") -> tarfile.TarInfo:
    """Of root, of no time: nothing of who built it."""
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, size, link
    return entry


# -- the layout --------------------------------------------------------------------------------------


def write_layout(out: Path, members: Members, used: dict[str, Any]) -> str:
    blobs = out / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layer, size = write_layer(blobs, members)
    machine = ARCHITECTURES.get(os.uname().machine, os.uname().machine)
    config = {
        "architecture": machine,
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "WorkingDir": "/box"},
        "rootfs": {"type": "layers", "diff_ids": [layer]},
        "history": [],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": write_blob(blobs, config, CONFIG),
        "layers": [{"mediaType": LAYER, "digest": layer, "size": size}],
    }
    told = write_blob(blobs, manifest, MANIFEST)
    named = {**told, "annotations": {"org.opencontainers.image.ref.name": "latest"}}
    (out / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}, sort_keys=True))
    (out / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (out / LOCK).write_text(json.dumps(used, indent=1, sort_keys=True))
    return str(told["digest"])


def write_blob(blobs: Path, value: dict[str, Any], media: str) -> dict[str, Any]:
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}


def write_layer(blobs: Path, members: Members) -> tuple[str, int]:
    """-> (its digest, its bytes). Uncompressed: a compressor's version would be in the digest."""
    whole = dict(members)
    for folder in FOLDERS:
        mode = 0o1777 if folder in ("box", "tmp") else 0o755  # engines give it to what they mount there
        whole[folder] = (plain_entry(folder, tarfile.DIRTYPE, mode), b"")
    for path, text in FILES.items():
        whole[path] = (plain_entry(path, tarfile.REGTYPE, 0o644, size=len(text)), text.encode())
    for path, target in LINKS.items():
        path = merged_path(path)
        whole.setdefault(path, (plain_entry(path, tarfile.SYMTYPE, 0o777, link=target), b""))
    for path in list(whole):  # folders that a wheel does not list
        for parent in list(Path(path).parents)[:-1]:
            whole.setdefault(str(parent), (plain_entry(str(parent), tarfile.DIRTYPE, 0o755), b""))
    half = blobs / "layer"
    with open(half, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(whole):
            entry, data = whole[path]
            archive.addfile(entry, io.BytesIO(data))
    digest, size = file_digest(half), half.stat().st_size
    half.rename(blobs / digest)
    return f"sha256:{digest}", size


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
