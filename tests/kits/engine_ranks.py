"""An engine over several processes: this one leads, and the others follow with whatever model is next."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kits.engine import SIZE, engine, tiny
from kits.families import model as family
from kits.vision import model as vision_model
from rondel.assemble.engine_encoder import EngineEncoder
from rondel.assemble.engine_ranks import EngineRanks, RankSettings
from rondel.core.types import Completion
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.runtime.cluster.process import ProcessCluster
from rondel.runtime.devices import Device
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_ipc import FromIpc

CLOSE = 1e-5
KINDS = {  # beside the families of kits.families
    "one_key": SIZE | {"num_key_value_heads": 1},
    "untied": SIZE | {"tie_word_embeddings": False, "vocab_size": 53},  # which two ranks cannot share evenly
    "three_heads": SIZE | {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
}


def source_of(kind: str) -> str | dict[str, Any]:
    """ "from FOLDER", or "from { random = ... }"."""
    text = kind.removeprefix("from ")
    return tomllib.loads(f"model = {text}")["model"] if text.startswith("{") else text


def whole(kind: str, *, deferred: bool = False) -> LoadedModel:
    """Every process makes the same one; `deferred` changes nothing for random weights."""
    if kind.startswith("from "):
        return load_model(source_of(kind), dtype="float32", deferred=deferred)
    return tiny("llama", **KINDS[kind]) if kind in KINDS else copy.deepcopy(family(kind))


def same_answers(ours: list[Completion], theirs: list[Completion], *, cached: bool = True) -> list[Completion]:
    """Of an engine of several processes and of one: equal, logprobs to 1e-5. `cached`: as much was found in the cache."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert (a.tokens, a.finish_reason, a.versions) == (b.tokens, b.finish_reason, b.versions)
        assert not cached or a.cached_tokens == b.cached_tokens
        assert a.logprobs == pytest.approx(b.logprobs, abs=CLOSE)
        assert (a.experts is None) == (b.experts is None) and (a.experts is None or (a.experts == b.experts).all())
        assert a.support == b.support
        for streams in ("raw_logprobs", "prompt_logprobs"):
            assert (getattr(a, streams) or []) == pytest.approx(getattr(b, streams) or [], abs=CLOSE)
    return ours


def end_ranks(ranks: EngineRanks, device: Device) -> None:
    """The engine that they follow is over; they are there for the next one."""
    if ranks.lead is not None:
        lead, ranks.lead = ranks.lead, None
        device.call(lead.close)


class RankedEngines:
    """`engines.of("llama", kv_pages=64)`: an engine of `tp` processes; the one before it is over."""

    def __init__(self, logs: Path, patience: float = 20.0, tp: int = 2, **apart: bool) -> None:
        """`apart`: what of `RankSettings` they do not share."""
        self.ended: list[str] = []
        self.device = Device("cpu", 1)
        cluster = partial(ProcessCluster, logs, patience=patience)
        settings = RankSettings("engine", ("cpu",) * tp, cluster, threads=1, patience=patience, **apart)
        self.ranks = EngineRanks(settings, self.ended.append, {"ipc": FromIpc(), "disk": FromDisk(logs)})

    def of(self, kind: str | Callable[..., LoadedModel], **settings) -> BuiltinEngine:
        """`kind`: of `whole`, or what loads the model in every process."""
        end_ranks(self.ranks, self.device)
        lead = self.ranks.join(partial(whole, kind) if isinstance(kind, str) else kind, self.device)
        return self.device.call(lambda: engine(lead.model, ranks=lead, **{"run": self.device.run, **settings}))

    def close(self) -> None:
        self.ranks.close(self.device)
        self.device.close()


class EncodedEngines:
    """`engines.of("qwen3_vl")`: an engine of `ranks` processes with an encoder process; the one before it is over.

    held   while it is a list, pictures that are asked for wait in it until `let_go`
    asked  verbs that the encoder was told
    """

    def __init__(self, logs: Path, patience: float = 20.0, ranks: int = 1, **apart: bool) -> None:
        """`apart`: what of `RankSettings` the ranks do not share."""
        self.ended: list[str] = []
        self.asked: list[str] = []
        self.held: list[tuple[Future[Any], tuple[Any, ...]]] | None = None
        self.device = Device("cpu", 1)
        cluster = partial(ProcessCluster, logs, patience=patience)
        devices = ("cpu",) * (ranks + 1)
        settings = RankSettings("engine", devices, cluster, threads=1, patience=patience, **apart)
        self.encoder = EngineEncoder(settings, self.ended.append, {"ipc": FromIpc()}, ranks=EngineRanks)

    def of(self, kind: str | Callable[..., LoadedModel], **settings) -> BuiltinEngine:
        """`kind`: of `kits.vision`, or what loads the model in both processes."""
        if self.encoder.ranks is not None:
            end_ranks(self.encoder.ranks, self.device)
        lead = self.encoder.join(partial(vision_model, kind) if isinstance(kind, str) else kind, self.device)
        lead.ask, self.send = self._ask, lead.ask
        return self.device.call(lambda: engine(lead.loaded, **{"run": self.device.run, "ranks": lead, **settings}))

    def _ask(self, verb: str, *args: Any) -> Future[Any]:
        self.asked.append(verb)
        if verb != "encode" or self.held is None:
            return self.send(verb, *args)
        self.held.append((Future(), args))
        return self.held[-1][0]

    def let_go(self) -> None:
        held, self.held = self.held, None
        for later, args in held or ():
            self.send("encode", *args).add_done_callback(lambda now, later=later: later.set_result(now.result()))

    def close(self) -> None:
        self.encoder.close(self.device)
        self.device.close()
