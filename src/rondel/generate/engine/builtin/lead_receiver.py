"""New weights at the first rank of an engine of several processes: all take the same tensors in the same order."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.types import Commit, Manifest, Route
from rondel.generate.engine.builtin.part_receiver import PASSED_ON, READ_BY_ALL, PartReceiver, wrong_tensors
from rondel.generate.engine.builtin.rank_channel import raw_bytes

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.generate.engine.builtin.lock_step import LockStep
    from rondel.models.serving_part import ServingPart


class LeadReceiver(PartReceiver):
    """The first rank's side: the others take the same tensors in the same order, and tell what failed."""

    def __init__(self, lead: LockStep, part: ServingPart, transports: Mapping[str, Transport]) -> None:
        super().__init__(part, transports)
        self.lead = lead

    def _open_stream(
        self, route: Route, manifest: Manifest, mine: dict[str, Tensor]
    ) -> Generator[tuple[str, Tensor], None, None]:
        if route.kind not in (*READ_BY_ALL, *PASSED_ON):
            raise SyncError(
                f"weights come by '{route.kind}', which an engine of {self.lead.size} processes does not take: use "
                f"{', '.join((*READ_BY_ALL, *PASSED_ON))}"
            )
        lead, passed, whole = self.lead, route.kind in PASSED_ON or isinstance(route.data, dict), False
        assert self._begun is not None
        with lead.together():
            lead.tell(self._begun)
            lead.tell(Route("passed on") if passed else route)
            lead.send("open")
        try:
            for name, tensor in super()._open_stream(route, manifest, mine):
                with lead.together():
                    lead.send("take", name=name, passed=[*_kind_of(tensor)] if passed else [])
                    if passed:
                        lead.compute.broadcast(raw_bytes(tensor.to(lead.part.loaded.device)))
                yield name, tensor
            whole = True
            self._raise_faults("read", proof=0 if self.proof is None else len(self.proof.values))
        finally:
            if not whole and not lead.lost:
                lead.send_later("drop")

    def _raise_faults(self, do: str, **facts: object) -> None:
        with self.lead.together():
            if do:
                self.lead.send(do, **facts)
            wrong = self.proof.find_wrong(self.part.cuts.ranks) if do == "read" and self.proof is not None else []
            faults = self.lead.channel.report("")
        if wrong and not any(faults):
            raise SyncError(wrong_tensors(wrong))
        if told := [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]:
            raise SyncError("; ".join(told))

    def commit_update(self, commit: Commit) -> None:
        self._check_commit(commit)
        self._untouched = False  # from here on one rank may have what another has not
        with self.lead.together():
            self.lead.send("commit", version=commit.version, root=commit.root)
        try:
            super().commit_update(commit)
        finally:
            self._raise_faults("")

    def drop_update(self) -> bool:
        if self._begun is not None:
            self.lead.send_later("drop")
        return super().drop_update()


def _kind_of(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
