"""What an engine with an encoder process asks of it beside pictures: it has no cache, and its weights come from here.
Of an engine whose model other processes compute, too, all else is asked of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rondel.generate.engine.builtin.encoder_client import EncoderClient
from rondel.generate.engine.builtin.memory_release import MemoryRelease
from rondel.generate.engine.builtin.runner import ModelRunner
from rondel.generate.engine.builtin.tower_receiver import TowerReceiver
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.generate.engine.builtin.lead_rank import LeadRank
    from rondel.generate.engine.builtin.pages import EngineCaches


class EncoderLead(EncoderClient):
    """The same verbs as `LeadRank` has for an engine."""

    caches = 1

    def attach(self, caches: EngineCaches) -> None:
        """The encoder has no cache."""

    def runner(self, *given: Any, **more: Any) -> ModelRunner:
        return self._look_elsewhere(ModelRunner(*given, **more))

    def _look_elsewhere(self, runner: ModelRunner) -> ModelRunner:
        runner.eyes.encoder, self.known = self, runner.eyes.known
        return runner

    def weight_receiver(self, transports: Mapping[str, Transport]) -> TowerReceiver:
        return TowerReceiver(self, WeightReceiver(self.loaded, transports))

    def memory_release(self, owns: bool) -> MemoryRelease:
        """Of this process: the tower of the other one stays where it is."""
        return MemoryRelease(self.loaded, None, owns=owns)


class RankedEncoderLead(EncoderLead):
    """Beside the other ranks of an engine: features go to them from here, with the passes that read them."""

    def __init__(self, ranks: LeadRank, *given: Any) -> None:
        super().__init__(*given)
        self.ranks, self.caches = ranks, ranks.caches

    def attach(self, caches: EngineCaches) -> None:
        self.ranks.attach(caches)

    def runner(self, *given: Any, **more: Any) -> ModelRunner:
        return self._look_elsewhere((self.ranks.runner or ModelRunner)(*given, **more))

    def weight_receiver(self, transports: Mapping[str, Transport]) -> TowerReceiver:
        return TowerReceiver(self, self.ranks.weight_receiver(transports))

    def memory_release(self, owns: bool) -> MemoryRelease:
        """Of this process and the other ranks."""
        return self.ranks.memory_release(owns)
