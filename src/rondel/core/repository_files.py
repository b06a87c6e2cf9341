"""Files of a repository as they travel: in memory, by their paths."""

from __future__ import annotations

import os
from typing import NamedTuple


class RepositoryFile(NamedTuple):
    """One file: `RepositoryFile(b"print(1)\\n", executable=True)`, or a symbolic link with its target."""

    data: bytes = b""
    executable: bool = False
    link: str = ""


Tree = dict[str, RepositoryFile]


def is_inside(path: str) -> bool:
    """Whether a relative path stays in its folder."""
    whole = os.path.normpath(path)
    return not os.path.isabs(whole) and whole.split("/")[0] != ".."
