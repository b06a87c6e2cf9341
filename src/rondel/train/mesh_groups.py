"""The process groups of a mesh, as one of its ranks sees them: who shares which axis with it."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rondel.core.mesh import Mesh
from rondel.models.collectives import RankGroup
from rondel.models.rendezvous import Rendezvous
from rondel.models.stage_link import StageLink
from rondel.system import sockets


class MeshGroups:
    """Groups of the axes that have more than one rank. Without a meeting, in the group that a launcher has made already.

    fsdp_mesh    replicas and shards, over which FSDP lays parameters; `shard_group`: the shards alone
    expert_mesh  the same of routed experts, where ep cuts them
    everyone     all ranks
    data_group   one of each data rank, and of each stage of it
    tensor, context, experts  the ranks of tp, cp and ep; None: that axis has one rank
    link         to the stages of a pipeline before and behind this one
    patience     seconds that one rank waits for another in a collective
    """

    expert_mesh: DeviceMesh

    def __init__(self, rank: int, mesh: Mesh, meeting: Rendezvous | None, *, device: str, patience: float) -> None:
        self.mesh, self.patience, self.kind = mesh, patience, device.partition(":")[0]
        both = ("replicas", "shards") if mesh.replicas > 1 else ("shards",)
        if meeting is not None:
            # all on this machine: nobody else may speak to a rank. NCCL's: not yet run on hardware
            sockets.set_interface(meeting.address[0])
            backend, wait = "gloo" if device == "cpu" else "nccl", datetime.timedelta(seconds=patience)
            dist.init_process_group(backend, store=meeting.store, rank=rank, world_size=mesh.world, timeout=wait)
        sharing = mesh.shards * mesh.cp  # who has different shards: of other samples, or of other parts of a row
        whole = self._arrange(both, pp=mesh.pp, replicas=mesh.replicas, shards=sharing, tp=mesh.tp)
        self.fsdp_mesh = whole[both]
        self.shard_group = whole["shards"].get_group()
        self.everyone: Any = dist.group.WORLD
        self.data_group: Any = self.everyone
        self.tensor = RankGroup.of(whole["tp"].get_group()) if mesh.tp > 1 else None
        self.context = self.experts = self.link = None
        if mesh.pp > 1:
            inner = mesh.world // mesh.pp  # ranks of a stage
            lines = [[stage * inner + i for stage in range(mesh.pp)] for i in range(inner)]
            back = dist.new_subgroups_by_enumeration(lines, timeout=datetime.timedelta(seconds=patience))[0]
            self.link = StageLink(
                RankGroup.of(whole["pp"].get_group()), RankGroup.of(back), torch.device(device), leads=rank % inner == 0
            )
        if mesh.tp * mesh.cp > 1:  # stages behind each other are told what the last one found out
            apart = self._arrange(("data",), data=mesh.pp * mesh.data, cp=mesh.cp, tp=mesh.tp)
            self.data_group = apart["data"].get_group()
            self.context = RankGroup.of(apart["cp"].get_group()) if mesh.cp > 1 else None
        if mesh.ep > 1:
            holders = sharing * mesh.tp // mesh.ep
            apart = self._arrange(both, pp=mesh.pp, replicas=mesh.replicas, shards=holders, ep=mesh.ep)
            # who holds the same experts: their gradients have the tokens of all others already
            self.expert_mesh = apart[both]
            self.experts = RankGroup.of(apart["ep"].get_group())

    def _arrange(self, always: tuple[str, ...], **sizes: int) -> DeviceMesh:
        """A mesh of the axes that have more than one rank, and of those that are `always` asked for: each is a group,
        which opens ports, and waits as long as all ranks do (torch gives new groups a time of its own, half an hour).
        """
        axes = {name: n for name, n in sizes.items() if n > 1 or name in always}
        backend = "gloo" if self.kind == "cpu" else "nccl"
        kinds: Any = dist
        options = kinds.ProcessGroupGloo._Options() if self.kind == "cpu" else kinds.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=self.patience)
        apart: dict[int | str, Any] = {name: (backend, options) for name, n in axes.items() if n < self.mesh.world}
        # one that has all ranks is their group
        return init_device_mesh(
            self.kind, tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=apart or None
        )

    def make_stage_group(self) -> Any:
        """The ranks that have the same layers; all of them ask."""
        if self.mesh.pp == 1:
            return self.everyone
        inner = self.mesh.world // self.mesh.pp
        return self._arrange(("stage",), pp=self.mesh.pp, stage=inner)["stage"].get_group()
