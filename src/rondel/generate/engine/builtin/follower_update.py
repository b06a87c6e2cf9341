"""The weight updates of another rank of an engine: a fault is told when the leader asks for it, and breaks no lock-step."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.types import Begin, Commit, Message, Route
from rondel.generate.engine.builtin.part_receiver import PartReceiver, wrong_tensors
from rondel.generate.engine.builtin.rank_channel import receive_tensor
from rondel.models.main_grad import weights_changed

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.generate.engine.builtin.rank_channel import CommandChannel
    from rondel.models.collectives import RankGroup
    from rondel.models.serving_part import ServingPart

TOLD = 60.0  # seconds that a message of an update may be behind its command


class FollowerUpdate:
    """One update after the other, a verb for each command of the leader.

    messages  of the update under way, as the leader's pipe brought them
    """

    def __init__(
        self, part: ServingPart, channel: CommandChannel, compute: RankGroup, transports: Mapping[str, Transport]
    ) -> None:
        self.part, self.channel, self.compute, self.device = part, channel, compute, part.loaded.device
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.receiver = PartReceiver(part, transports)
        self._stream: Iterator[tuple[str, Tensor]] | None = None
        self._mine: dict[str, Tensor] = {}
        self._route = Route("")
        self._fault = ""  # the first of the update under way

    def open_route(self, facts: Mapping[str, Any], tensors: list[Tensor]) -> None:
        begin, route = (self.messages.get(timeout=TOLD) for _ in range(2))
        assert isinstance(begin, Begin) and isinstance(route, Route)
        self.drop(facts, tensors)
        self._fault, self._route = "", route
        try:
            self.receiver.begin_update(begin, begin.manifest.version)
            self._mine, self._stream = self.receiver.open_route(route)
        except SyncError as error:
            self._fault = str(error)

    def accept_tensor(self, facts: Mapping[str, Any], tensors: list[Tensor]) -> None:
        passed: Tensor | None = None
        if facts["passed"]:
            dtype, shape = facts["passed"]
            passed = receive_tensor(dtype, shape, self.compute.broadcast, self.device)
        if self._fault:
            return
        try:
            name, tensor = (facts["name"], passed) if passed is not None else self._next_tensor()
            if name != facts["name"]:
                raise SyncError(f"it reads {name} where the first rank reads {facts['name']}")
            self.receiver.accept_tensor(name, tensor, self._mine)
        except SyncError as error:
            self._fault = str(error)

    def _next_tensor(self) -> tuple[str, Tensor]:
        assert self._stream is not None
        if (found := next(self._stream, None)) is None:
            raise SyncError("it finds fewer tensors than the first rank")
        return found

    def report_data(self, facts: Mapping[str, Any], tensors: list[Tensor]) -> None:
        """All has been read, by the first rank's word. `proof`:
        so many sums of parts are added up for their digests."""
        self._stream = None
        if facts["proof"]:
            proof = self.receiver.proof
            ranks = self.part.cuts.ranks
            if proof is None:
                ranks.all_reduce(torch.zeros(facts["proof"], dtype=torch.int64, device=self.device))
            elif ranks.index:
                ranks.all_reduce(proof.values)
            elif wrong := proof.find_wrong(ranks):  # the first of those that compute prompts
                self._fault = self._fault or wrong_tensors(wrong)
        if not self._fault:
            try:
                self.receiver.finish_data(self._route)
            except SyncError as error:
                self._fault = str(error)
        self.channel.report(self._fault)

    def commit(self, facts: Mapping[str, Any], tensors: list[Tensor]) -> None:
        try:
            self.receiver.commit_update(Commit(facts["version"], facts["root"]))
            weights_changed()
        except SyncError as error:
            self._fault = str(error)
        self.channel.report(self._fault)

    def drop(self, facts: Mapping[str, Any], tensors: list[Tensor]) -> None:
        self._stream, self._mine = None, {}
        self.receiver.drop_update()
