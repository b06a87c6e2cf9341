"""New weights of several adapters on one base: one update, in which each takes its part."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rondel.core.errors import SyncError
from rondel.core.types import Begin, Commit, Route
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver

if TYPE_CHECKING:
    from rondel.models.adapter_rows import ServedAdapters
    from rondel.models.loaded_model import LoadedModel


class AdapterReceiver:
    """`AdapterReceiver(bank, {"policy": loaded, "critic": loaded})`: the engine's side of an update whose manifest and
    route are those of several policies (Manifest.join_policies). Anything that fails in one fails for all.
    """

    def __init__(self, bank: ServedAdapters, policies: Mapping[str, LoadedModel]) -> None:
        self._bank = bank
        self._each = {name: WeightReceiver(loaded, {}) for name, loaded in policies.items()}
        self._begun: Begin | None = None
        self.root = ""  # of the last commit

    @property
    def route_kinds(self) -> set[str]:
        return {"tensor"}

    @property
    def bytes_copied(self) -> int:
        return sum(one.bytes_copied for one in self._each.values())

    @property
    def is_overwriting(self) -> bool:
        return any(one.is_overwriting for one in self._each.values())

    def begin_update(self, begin: Begin, version: int) -> None:
        self._begun = begin
        for name, one in self._each.items():
            one.begin_update(replace(begin, manifest=begin.manifest.policy_part(name)), version)

    async def receive_data(self, route: Route, run: Callable[..., Awaitable[Any]]) -> None:
        if missing := sorted(self._each.keys() - route.data.keys()):
            raise SyncError(f"the update has no data of the policy '{missing[0]}'")
        for name, one in self._each.items():
            await one.receive_data(route.data[name], run)

    def commit_update(self, commit: Commit) -> None:
        """On the device's thread, between two steps."""
        begun, self._begun = self._begun, None
        if begun is None:
            raise SyncError("commit without begin")
        if (commit.version, commit.root) != (begun.manifest.version, begun.manifest.root):
            raise SyncError(
                f"version {commit.version} is committed, but {begun.manifest.version} was begun, or with another root"
            )
        for name, one in self._each.items():
            one.commit_update(Commit(commit.version, begun.manifest.policy_part(name).root))
        self._bank.forget_joined()
        self.root = commit.root

    def drop_update(self) -> bool:
        """Forget the update under way. -> is the old version whole?"""
        self._begun = None
        return all([one.drop_update() for one in self._each.values()])
