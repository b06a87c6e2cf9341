"""An update of the weights of a server, in a folder or by broadcast, between its begin and its commit."""

from __future__ import annotations

import json
from pathlib import Path

from rondel.core.errors import SyncError, error_boundary
from rondel.core.types import Begin, Commit, Manifest, Route


class FolderUpdate:
    """One at a time; `server` is its name, for errors. `committed`: the one that began last."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.committed = False
        self._begun: Begin | None = None
        self._route: Route | None = None

    def begin(self, begin: Begin, *, broadcast: bool) -> None:
        """`broadcast`: whether the server takes one; then it stands still from here on."""
        if not begin.beside and not broadcast:
            raise SyncError(f'{self.server} takes weights from a folder: sync.kind = "disk"')
        self._begun, self._route, self.committed = begin, None, False

    def check_folder(self, route: Route) -> None:
        """The folder must hold what was begun. It is read by a process that may have another working folder."""
        if self._begun is None or route.kind != "disk":
            raise SyncError(
                f"a route of kind '{route.kind}' {'before its begin' if self._begun is None else ''}: {self.server} "
                "reads disk"
            )
        with error_boundary(SyncError, f"reading {route.data}/manifest.json"):
            found = json.loads((Path(route.data) / "manifest.json").read_text())["root"]
        if found != self._begun.manifest.root:
            raise SyncError(
                f"{route.data} holds weights with root {found[:8]}, and {self._begun.manifest.root[:8]} was announced"
            )
        self._route = route

    def announced(self, route: Route) -> Manifest:
        """What a broadcast brings."""
        if self._begun is None or self._begun.beside:
            raise SyncError(f"a broadcast to {self.server} that was not begun")
        return self._begun.manifest

    def arrived(self, route: Route) -> None:
        self._route = route

    def take_route(self, commit: Commit) -> Route:
        """What arrived, if it is what is committed; then it is nobody's any more."""
        begun, route = self._begun, self._route
        self.forget()
        if (
            begun is None
            or route is None
            or (commit.version, commit.root) != (begun.manifest.version, begun.manifest.root)
        ):
            raise SyncError(f"commit of version {commit.version}, which has not arrived whole")
        return route

    def forget(self) -> None:
        self._begun = self._route = None
