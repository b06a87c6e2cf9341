"""An engine over two processes: this one leads, and one process follows whatever model is next."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kits.engine import engine, tiny
from kits.families import FAMILIES
from kits.families import model as family
from rondel.assemble.engine_ranks import EngineRanks, RankSettings
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.models.loaded_model import LoadedModel
from rondel.runtime.devices import Device


def whole(kind: str, *, deferred: bool = False) -> LoadedModel:
    """A family of kits.families, or a tiny llama; every process makes the same one."""
    return copy.deepcopy(family(kind)) if kind in FAMILIES else tiny(kind)


class _Load:
    """What both ranks load."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, *, deferred: bool = False) -> LoadedModel:
        return whole(self.kind)


class RankedEngines:
    """`engines.of("llama", kv_pages=64)`: an engine of two processes; the one before it is over."""

    def __init__(self, logs: Path, patience: float = 20.0) -> None:
        self.ended: list[str] = []
        self.device = Device("cpu", 1)
        self.ranks = EngineRanks(
            RankSettings("engine", ("cpu", "cpu"), threads=1, patience=patience, logs=logs), {}, self.ended.append
        )

    def of(self, kind: str, **settings) -> BuiltinEngine:
        if self.ranks.lead is not None:
            lead, self.ranks.lead = self.ranks.lead, None
            self.device.call(lead.close)
        lead = self.ranks.join(_Load(kind), self.device)
        return self.device.call(
            lambda: engine(lead.model, ranks=lead, **{"run": self.device.run, **settings})
        )


@contextmanager
def ranked_engines(logs: Path) -> Iterator[RankedEngines]:
    made = RankedEngines(logs)
    yield made
    made.ranks.close(made.device)
    made.device.close()
