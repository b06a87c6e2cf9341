"""The files of a repository in memory, by their paths: read from a folder or a tar file, written to a folder."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path, PurePosixPath

from rondel.core.errors import DataError
from rondel.core.repository_files import RepositoryFile, Tree, is_inside

LARGEST = 256 << 20  # bytes of one task
# what a tool or an interpreter leaves beside the files: no part of a repository, and no part of its digest
LEFTOVER_FOLDERS = ("__pycache__", ".git", ".hg", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


def is_tar(path: Path) -> bool:
    return path.name.endswith(TARS)


def is_leftover(path: str) -> bool:
    return path.endswith(".pyc") or any(part in LEFTOVER_FOLDERS for part in PurePosixPath(path).parts)


def read_tree(path: Path) -> Tree:
    """All files of a folder, or of a tar file (whose one top folder is left out). DataError where it is too large, or
    a link of it leads out.
    """
    tree = _read_tar(path) if is_tar(path) else _read_folder(path)
    for name, file in tree.items():
        if file.link and not is_inside(os.path.join(os.path.dirname(name), file.link)):
            raise DataError(f"{path}: the link {name} leads to {file.link}, out of the folder: leave it out")
    return tree


def _read_folder(path: Path) -> Tree:
    tree, size = Tree(), 0
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in LEFTOVER_FOLDERS)
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*names, *linked]):
            file = Path(folder) / name
            key = file.relative_to(path).as_posix()
            if file.is_symlink():
                tree[key] = RepositoryFile(link=os.readlink(file))
            elif file.is_file() and not is_leftover(key):
                size = _checked_size(path, size + file.stat().st_size)
                tree[key] = RepositoryFile(file.read_bytes(), os.access(file, os.X_OK))
    return dict(sorted(tree.items()))


def _read_tar(path: Path) -> Tree:
    tree, size = Tree(), 0
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                name = str(PurePosixPath(member.name))
                if not is_inside(name):
                    raise DataError(f"{path}: '{name}' leads out of the archive")
                if member.issym():
                    tree[name] = RepositoryFile(link=member.linkname)
                elif member.isfile() and not is_leftover(name) and (held := tar.extractfile(member)) is not None:
                    size = _checked_size(path, size + member.size)
                    tree[name] = RepositoryFile(held.read(), bool(member.mode & 0o100))
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as a tar file: {error}") from error
    tops = {name.partition("/")[0] for name in tree}
    if len(tops) == 1 and all("/" in name for name in tree):
        tree = {name.partition("/")[2]: file for name, file in tree.items()}
    return dict(sorted(tree.items()))


def _checked_size(path: Path, size: int) -> int:
    if size > LARGEST:
        raise DataError(f"{path}: more than {LARGEST >> 20} MiB of files; a task is a small repository: leave data out")
    return size


def subtree(tree: Mapping[str, RepositoryFile], folder: str) -> Tree:
    """The files below a folder, by their paths from there."""
    return {name[len(folder) + 1 :]: file for name, file in tree.items() if name.startswith(f"{folder}/")}


def write_tree(tree: Mapping[str, RepositoryFile], folder: Path) -> None:
    for name, file in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.link:
            path.symlink_to(file.link)
        else:
            path.write_bytes(file.data)
            path.chmod(0o755 if file.executable else 0o644)


def tree_digest(tree: Mapping[str, RepositoryFile]) -> str:
    """Equal for equal files, whatever their times and owners."""
    whole = blake2b(digest_size=16)
    for name, file in sorted(tree.items()):
        what = f"{name}\0{file.link}\0{int(file.executable)}\0{len(file.data)}\0"
        whole.update(what.encode(errors="surrogateescape") + file.data)
    return whole.hexdigest()
