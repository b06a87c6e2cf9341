"""What an engine with an encoder process asks of it beside pictures: it has no cache, and its weights come from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rondel.generate.engine.builtin.encoder_client import EncoderClient
from rondel.generate.engine.builtin.memory_release import MemoryRelease
from rondel.generate.engine.builtin.runner import ModelRunner
from rondel.generate.engine.builtin.tower_receiver import TowerReceiver

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.generate.engine.builtin.pages import EngineCaches
    from rondel.generate.engine.builtin.weight_receiver import WeightReceiver


class EncoderLead(EncoderClient):
    """The same verbs as `LeadRank` has for an engine."""

    caches = 1

    def attach(self, caches: EngineCaches) -> None:
        """The encoder has no cache."""

    def runner(self, *given: Any, **more: Any) -> ModelRunner:
        made = ModelRunner(*given, **more)
        made.eyes.encoder = self
        self.known = made.eyes.known
        return made

    def weight_receiver(self, transports: Mapping[str, Transport]) -> WeightReceiver:
        return TowerReceiver(self, transports)

    def memory_release(self, owns: bool) -> MemoryRelease:
        """Of this process: the tower of the other one stays where it is."""
        return MemoryRelease(self.loaded, None, owns=owns)
