"""The encoder process of an engine whose model looks at pictures: started, watched, ended.

    EngineEncoder (in the process of the engine)   spawns ──> EncoderHost, which has the vision tower and nothing else
         │
         └─ EngineRanks, where several share the model   ──> the other ranks, which are told features with each pass
It is a child of the engine and ends with it; if it ends or hangs, the engine is over and says so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rondel.core.errors import ConfigError, ModelError
from rondel.generate.engine.builtin.encoder_lead import EncoderLead, RankedEncoderLead
from rondel.generate.engine.builtin.tower_encoder import TowerEncoder
from rondel.models import names, vision
from rondel.models.load import load_model, pick_dtype, tokenizer_of
from rondel.runtime.devices import Device

if TYPE_CHECKING:
    from rondel.assemble.engine_ranks import EngineRanks, RankSettings
    from rondel.core.media import Image, ImageProcessorConfig
    from rondel.core.protocols import Transport
    from rondel.models.image_features import FeatureWidths
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.names import TensorShape

PAGE = "docs/place.md#engines-of-several-processes"


class EncoderHost:
    """The tower, on a device of its own."""

    def __init__(self, device: str, threads: int | None) -> None:
        self.device = Device(device, threads)
        self.tower: TowerEncoder

    async def load(self, load: Callable[[], LoadedModel]) -> tuple[FeatureWidths, dict[str, str]]:
        """-> widths of features, and digests of the tower's tensors."""
        self.tower = await self.device.run(lambda: TowerEncoder(load(), self.device.name))
        return self.tower.widths, self.tower.digests

    async def encode(self, image: Image, path: str, updates: int) -> bool:
        done: bool = await self.device.run(self.tower.encode, image, path, updates)
        return done

    async def stage(self, shapes: dict[str, TensorShape], digests: dict[str, str], path: str) -> None:
        await self.device.run(self.tower.stage, shapes, digests, path)

    async def commit(self, digests: dict[str, str]) -> int:
        """Pictures that wait for the device are not encoded any more: who asked for them wants those of new weights."""
        self.tower.check_staged(digests)
        self.tower.updates += 1
        await self.device.run(self.tower.commit, digests)
        return self.tower.updates

    async def live(self) -> None:
        """Never answers: its caller learns when this process ends."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """The process ends."""


class EngineEncoder:
    """The same verbs as `EngineRanks`. `ended(why)` is called once if the engine cannot go on.

    ranks  of the model, where they are more than this process
    """

    def __init__(
        self,
        settings: RankSettings,
        ended: Callable[[str], None],
        transports: Mapping[str, Transport],
        *,
        ranks: Callable[..., EngineRanks],
    ) -> None:
        """The last device of the settings is the encoder's; `ranks` starts those of the others. `transports` are the
        engine's alone: weights come from it.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "an encoder process: this system has no memory without a name (memfd). Leave out encoders", page=PAGE
            )
        self.settings, self._ended = settings, ended
        self.cluster = settings.cluster()
        s, cores = settings, settings.cores[-1] if settings.cores else ()
        self.worker = self.cluster.spawn(
            f"{s.name}-encoder", EncoderHost, s.devices[-1], s.threads, cores=cores, tells=False
        )
        language = replace(s, devices=s.devices[:-1], cores=s.cores[:-1])
        self.ranks = ranks(language, ended, transports) if language.size > 1 else None
        self.lead: EncoderLead | None = None

    def load(self, path: str | dict[str, Any], dtype: str, device: Device, form: str = "none") -> LoadedModel:
        """The model of a recipe in this process, its tower in the other one, too. Weights travel as they are."""
        assert form == "none", "a recipe with a number format is refused before (assemble/format_refusals.py)"
        try:
            refuse_text_model(path, tokenizer_of(path)[2])
            named = str(pick_dtype(dtype, device.name)).removeprefix("torch.")
            return self.join(partial(load_model, path, dtype=named), device).loaded
        except BaseException:
            self.close(device)
            raise

    def join(self, load: Callable[..., LoadedModel], device: Device) -> EncoderLead:
        """Load the model here and there; both must have the same tower."""
        answer: Future[Any] = self.worker.ask("load", load)
        ranks = None if self.ranks is None else self.ranks.join(load, device)
        alone = partial(load, device=device.name) if device.name != "cpu" else load
        loaded: LoadedModel = device.call(alone) if ranks is None else ranks.model
        widths, digests = answer.result()
        own = device.call(lambda: {n: names.tensor_digest(t) for n, t in vision.tower_tensors(loaded.model).items()})
        if digests != own:
            raise ModelError(
                f"the encoder process of '{loaded.name}' has loaded other weights: does its folder change?"
            )
        given = (loaded, self.worker.ask, widths, digests)
        self.lead = EncoderLead(*given) if ranks is None else RankedEncoderLead(ranks, *given)
        self.worker.ask("live").add_done_callback(self._on_end)
        return self.lead

    def _on_end(self, answer: Future[Any]) -> None:
        if (lead := self.lead) is None or lead.lost or (error := answer.exception()) is None:
            return  # it was told to stop
        lead.lost = str(error)
        self._ended(f"engine {self.settings.name} cannot go on: {error}")

    def close(self, device: Device) -> None:
        self.lead = None
        if self.ranks is not None:
            self.ranks.close(device)
        self.cluster.close()


def refuse_text_model(name: str | dict[str, Any], sight: ImageProcessorConfig | None) -> None:
    """ConfigError for an encoder of a model that looks at nothing."""
    if sight is None:
        raise ConfigError(
            f"an encoder process for '{name}': the model reads text alone. Leave out encoders, or take a "
            "vision-language model",
            page=PAGE,
        )
