"""The other processes of an engine that holds its model in parts: started, joined, watched, ended.

    EngineRanks (in the process of the first rank)   spawns ──> FollowerHost, one a rank, which follows until it is closed
They are children of the first rank and end with it; if one of them ends or hangs, the engine is over and says which.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from rondel.core.protocols import Cluster, Transport
from rondel.core.types import Message
from rondel.generate.engine.builtin.follower import EngineFollower
from rondel.generate.engine.builtin.follower_update import FollowerUpdate
from rondel.generate.engine.builtin.lead_model import LeadModel
from rondel.generate.engine.builtin.lead_rank import LeadRank
from rondel.generate.engine.builtin.lead_receiver import LeadReceiver
from rondel.generate.engine.builtin.prefill_split import PrefillLead, SplitModel
from rondel.generate.engine.builtin.rank_channel import CommandChannel
from rondel.generate.engine.builtin.requests_apart import ApartLead, ApartModel
from rondel.models.collectives import RankGroup
from rondel.models.load import load_model, pick_dtype
from rondel.models.loaded_model import LoadedModel
from rondel.models.rendezvous import Rendezvous
from rondel.models.serving_part import ServingPart, check_part, cut_for_serving, probe_logprobs
from rondel.models.weight_formats import send_rollout_format
from rondel.runtime.devices import Device

HOST = "127.0.0.1"  # all ranks of an engine are on one machine
MOMENT = 2.0  # seconds between the end of a process and the time when its parent knows


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How the ranks of one engine are started.

    name      of the engine
    devices   one a rank; the first is the leader's
    cores     of each follower, on a CPU
    cluster   makes what starts the followers
    patience  seconds that one rank waits for another
    prefill   one half of the ranks computes prompts, the other answers, and the ranks of each half share every matrix;
              else all do
    experts_apart  but experts, each of which lies whole on one rank
    requests_apart  and everything else, which every rank has whole, for requests of its own
    """

    name: str
    devices: tuple[str, ...]
    cluster: Callable[[], Cluster]
    threads: int | None = None
    cores: tuple[tuple[int, ...], ...] = ()
    patience: float = 60.0
    prefill: bool = False
    experts_apart: bool = False
    requests_apart: bool = False

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def whole(self) -> bool:
        """Whether each rank computes with every matrix, so that there is nothing to compare with the whole model."""
        return self.prefill and self.size == 2

    @property
    def lead(self) -> tuple[type[LeadRank], Callable[..., LoadedModel]]:
        """The first rank, and its model."""
        if self.prefill:
            return PrefillLead, SplitModel
        return (ApartLead, ApartModel) if self.requests_apart else (LeadRank, LeadModel)


class FollowerHost:
    """One rank but the first, with a device of its own."""

    def __init__(self, rank: int, size: int, device: str, threads: int | None, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self.device = Device(device, threads)
        self.loaded: LoadedModel | None = None  # until it is cut
        self.follower: EngineFollower | None = None

    async def load(self, load: Callable[[], LoadedModel]) -> None:
        self.loaded = await self.device.run(load)

    async def join(self, address: tuple[str, int], transports: Mapping[str, Transport], how: Mapping[str, Any]) -> None:
        """Returns when all ranks have joined and hold their parts."""

        def join_here() -> EngineFollower:
            loaded, self.loaded = self.loaded, None
            assert loaded is not None, "load() comes first"
            meeting = Rendezvous.connect_to(address)
            where = (self.rank, self.size, self.device.name, self.patience)
            joined = join_ranks(loaded, meeting, *where, **how)
            return EngineFollower(*joined, FollowerUpdate(*joined, transports))

        self.follower = await self.device.run(join_here)

    async def follow(self) -> None:
        assert self.follower is not None, "join() comes first"
        await self.device.run(self.follower.follow)
        self.follower = None

    def tell(self, message: Message) -> None:
        assert self.follower is not None, "join() comes first"
        self.follower.update.messages.put(message)

    def close(self) -> None:
        """The process ends, and with it whatever its device waits for."""


def load_encoded(path: str | dict[str, Any], form: str, **how: Any) -> LoadedModel:
    """A model whose new weights come in a number format, or as they are: "none"."""
    loaded = load_model(path, **how)
    if form != "none":
        send_rollout_format(loaded.model, form)
    return loaded


def join_ranks(
    loaded: LoadedModel,
    meeting: Rendezvous,
    rank: int,
    size: int,
    device: str,
    patience: float,
    expected: Tensor | None = None,
    *,
    prefill: bool = False,
    experts_apart: bool = False,
    requests_apart: bool = False,
) -> tuple[ServingPart, CommandChannel, RankGroup]:
    """Meet the other ranks and keep a part of the model. `expected`: what the whole one says of the probe."""
    control = meeting.make_group("control", rank, size, patience=patience)
    compute = control
    if device.startswith("cuda"):
        compute = meeting.make_group("compute", rank, size, device=device, patience=patience)
    ranks, whole = compute, requests_apart
    if prefill:  # each half shares its matrices
        each = size // 2
        half, whole = ("answers", "prompts")[rank // each], each == 1
        ranks = meeting.make_group(half, rank % each, each, device=device, patience=patience)
    part = cut_for_serving(loaded, ranks, device, whole=whole, experts_apart=experts_apart)
    if not whole or requests_apart:
        check_part(part, expected)
    return part, CommandChannel(control), compute


class EngineRanks:
    """Followers of this process. `ended(why)` is called once if the engine cannot go on."""

    def __init__(
        self, settings: RankSettings, ended: Callable[[str], None], transports: Mapping[str, Transport]
    ) -> None:
        self.settings, self.transports, self._ended = settings, dict(transports), ended
        self.cluster = settings.cluster()
        s = settings
        self.followers = [
            self.cluster.spawn(
                f"{s.name}-rank-{rank}",
                FollowerHost,
                rank,
                s.size,
                s.devices[rank],
                s.threads,
                s.patience,
                cores=s.cores[rank - 1] if s.cores else (),
                tells=False,
            )
            for rank in range(1, s.size)
        ]
        self.lead: LeadRank | None = None

    def load(self, path: str | dict[str, Any], dtype: str, device: Device, form: str = "none") -> LoadedModel:
        """The model of a recipe, as its first rank has it. It is loaded on the host: the parts alone go to devices.
        `form`: the number format in which new weights come, and as which they serve from the first update on.
        """
        named = str(pick_dtype(dtype, device.name)).removeprefix("torch.")
        try:
            return self.join(partial(load_encoded, path, form, dtype=named), device).model
        except BaseException:
            self.cluster.close()
            raise

    def join(self, load: Callable[..., LoadedModel], device: Device) -> LeadRank:
        """Load the model everywhere, and keep a part of it on every rank."""
        loads: list[Future[Any]] = [follower.ask("load", partial(load, deferred=True)) for follower in self.followers]
        loaded = device.call(load)
        expected = None if self.settings.whole else device.call(probe_logprobs, loaded)
        for answer in loads:
            answer.result()  # a follower that hangs fails its calls
        meeting, s = Rendezvous(HOST), self.settings
        how: dict[str, Any] = {name: getattr(s, name) for name in ("prefill", "experts_apart", "requests_apart")}
        joins: list[Future[Any]] = [
            follower.ask("join", meeting.address, self.transports, how) for follower in self.followers
        ]

        def join_here() -> LeadRank:
            joined = join_ranks(loaded, meeting, 0, s.size, device.name, s.patience, expected, **how)
            calls = {"tell": self._tell, "fate": self._wait_for_fate, "ended": self._ended}
            rank, model = s.lead
            return rank(*joined, model=model, receiver=LeadReceiver, **calls)

        self.lead = lead = device.call(join_here)
        for answer in joins:
            answer.result()
        for rank, follower in enumerate(self.followers, 1):
            follower.ask("follow").add_done_callback(partial(self._on_end, rank))
        return lead

    def _tell(self, message: Message) -> None:
        answers: list[Future[Any]] = [follower.ask("tell", message) for follower in self.followers]
        for answer in answers:
            answer.result(self.settings.patience)

    def _on_end(self, rank: int, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None or self.lead is None:
            return  # it was told to stop
        self.followers[rank - 1].dismiss()  # nobody must wait for it in a collective
        self.lead.end(f"engine {self.settings.name} of {self.settings.size} processes cannot go on: {error}")

    def _wait_for_fate(self) -> str:
        """Why a follower has ended, if one has."""
        until = time.monotonic() + MOMENT
        while time.monotonic() < until:
            if gone := [follower.fate for follower in self.followers if not follower.alive]:
                return gone[0]
            time.sleep(0.05)
        return ""

    def close(self, device: Device) -> None:
        if (lead := self.lead) is not None:
            self.lead = None
            device.call(lead.close)
        self.cluster.close()


def end_process(why: str) -> None:
    """An engine without one of its ranks is of no use: who started this process hears it end,
    and reads why in its log."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


def stay_alive(why: str) -> None:
    """An engine in a process that does other things, too: it refuses every request, and says why."""
