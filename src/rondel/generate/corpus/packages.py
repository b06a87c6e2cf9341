"""Documents that packages ship: Debian's documentation packages, the Python library, and its tables.

debian   apt-get download (nothing is installed, no root is needed) -> dpkg-deb -x -> HTML and manual pages
python   docstrings and signatures of the standard library and of installed packages, read from their source
tables   short facts from modules of the standard library: HTML entities, errno, signals, HTTP, file types
"""

from __future__ import annotations

import errno
import gzip
import html.entities
import http
import importlib.metadata
import mimetypes
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from rondel.core.errors import DataError
from rondel.generate.corpus.passages import Passage, cut_passages, read_docstrings, read_html, read_roff

DEBIAN = (
    "bash-doc", "cmake-doc", "debian-policy", "debian-reference-en", "git-man", "manpages", "manpages-dev", "perl-doc",
    "postgresql-doc-15", "python-django-doc", "python3.11-doc", "sqlite3-doc",
)  # fmt: skip
LARGEST = 4 << 20  # bytes of a document that is still read
INDEXES = ("genindex", "search.html", "modindex", "_modules", "keyword_index", "doc_keyword", "py-modindex")
Say = Callable[[str], None]


def has_apt() -> bool:
    """Whether this machine fetches and unpacks Debian's packages."""
    return all(shutil.which(tool) for tool in ("apt-get", "dpkg-deb"))


# -- Debian ----------------------------------------------------------------------------------------


def debian_passages(folder: Path, sources: list[dict[str, Any]], say: Say) -> Iterator[Passage]:
    """Passages of the packages in DEBIAN; `folder` keeps what was downloaded, and is looked at first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DEBIAN:
        package = next(iter(sorted(folder.glob(f"{name}_*.deb"))), None)
        if package is None:
            say(f"fetching {name}")
            _run_tool(["apt-get", "download", name], folder)
            package = next(iter(sorted(folder.glob(f"{name}_*.deb"))), None)
        if package is None:
            raise DataError(f"apt-get did not bring the package {name}: run `apt-get update`, or use --source python")
        version = package.name.split("_")[1].replace("%3a", ":")
        about: dict[str, Any] = {
            "name": name,
            "version": version,
            "sha256": sha256(package.read_bytes()).hexdigest(),
            "passages": 0,
        }
        sources.append(about)
        with tempfile.TemporaryDirectory() as unpacked:
            _run_tool(["dpkg-deb", "-x", str(package), unpacked], folder)
            for blocks in _document_blocks(Path(unpacked)):
                for passage in cut_passages(blocks):
                    about["passages"] += 1
                    yield passage
        say(f"{name} {version}: {about['passages']} passages")


def _run_tool(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise DataError(f"`{' '.join(command[:3])}` failed: {told}. Run `apt-get update`, or use --source python")


def _document_blocks(folder: Path) -> Iterator[list[Any]]:
    """Blocks of every HTML and manual page below a folder, in the order of their paths."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
            continue
        if name.endswith(".html") and not any(index in name for index in INDEXES):
            yield read_html(path.read_text(encoding="utf-8", errors="replace"))
        elif "/man/man" in name and name.endswith(".gz"):
            yield read_roff(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))


# -- Python ----------------------------------------------------------------------------------------


def python_passages(sources: list[dict[str, Any]], say: Say) -> Iterator[Passage]:
    """Passages of the standard library's docstrings, then of the installed packages' ones."""
    library = Path(sysconfig.get_path("stdlib"))
    roots = [("python", sys.version.split()[0], library, [p for p in sorted(library.rglob("*.py"))])]
    for package in sorted(importlib.metadata.distributions(), key=lambda d: d.metadata["Name"] or ""):
        files = [Path(str(package.locate_file(f))) for f in package.files or () if f.suffix == ".py"]
        roots.append((package.metadata["Name"] or "?", package.version, Path(str(package.locate_file(""))), files))
    for name, version, root, files in roots:
        about: dict[str, Any] = {"name": name, "version": version, "passages": 0}
        sources.append(about)
        for path in files:
            parts = path.relative_to(root).with_suffix("").parts if path.is_relative_to(root) else ()
            if not parts or {"test", "tests", "site-packages", "idlelib", "lib2to3"} & {*parts} or not path.is_file():
                continue
            module = ".".join(parts).removesuffix(".__init__")
            for passage in cut_passages(read_docstrings(module, path.read_text(encoding="utf-8", errors="replace"))):
                about["passages"] += 1
                yield passage
        if about["passages"]:
            say(f"{name} {version}: {about['passages']} passages")
        else:
            sources.pop()


def table_passages(sources: list[dict[str, Any]], say: Say) -> Iterator[Passage]:
    """Short facts, one a passage: "entity alpha 03B1", "extension json application/json"."""
    names: dict[str, str] = {}
    for name, character in html.entities.html5.items():
        if name.endswith(";") and len(character) == 1:
            names.setdefault(name[:-1].lower(), f"{ord(character):04X}")
    types = mimetypes.MimeTypes(filenames=()).types_map[1]
    tables = {
        "entity": names,
        "extension": {extension[1:]: kind for extension, kind in types.items()},
        "errno": {name: f"{number} {os.strerror(number)}" for number, name in errno.errorcode.items()},
        "signal": {one.name: str(int(one)) for one in signal.Signals},
        "status": {one.phrase: str(one.value) for one in http.HTTPStatus},
    }
    count = sum(map(len, tables.values()))
    sources.append({"name": "python tables", "version": sys.version.split()[0], "passages": count})
    for title, facts in tables.items():
        for name, value in sorted(facts.items()):
            yield Passage(title, title, f"{name} {value}")
        say(f"{title}: {len(facts)} passages")
