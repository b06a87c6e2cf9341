"""[place]: devices and processes."""

from __future__ import annotations

import re
from math import gcd
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rondel.core.config.section import LONGEST, ConfigSection, Count, SettingsTable
from rondel.core.mesh import Mesh

CLUSTERS = ("auto", "local", "process", "torchrun", "ray")


class MeshConfig(SettingsTable):
    pp: Count = Field(1, description="stages of layers, one behind the other (pipeline parallel)")
    chunks: Count = Field(
        1,
        description="runs of layers of each stage, which take turns (interleaved pipeline): stages wait less, and "
        "hidden states travel as many times; with pp",
    )
    replicas: Count = Field(
        1, description="copies of all shards: weights are gathered within one, gradients summed over all"
    )
    shards: Count | Literal["auto"] = Field(
        "auto",
        description="parts of weights, gradients and moments (FSDP2); auto: what the other axes leave of place.ranks",
    )
    cp: Count = Field(1, description="ranks that share each packed row, for long contexts (context parallel)")
    tp: Count = Field(1, description="ranks that share each matrix (tensor parallel)")
    ep: Count = Field(
        1,
        description="ranks, of the shards · cp · tp of a replica, over which the experts of a mixture lie apart "
        "(expert parallel)",
    )
    sp: bool | Literal["auto"] = Field(
        "auto",
        description="with tp, rows between the parts of a layer lie apart, too (sequence parallel); auto: yes",
    )
    overlap: bool = Field(
        False,
        description="with tp and sp, these rows travel round a ring while the products beside them compute (async TP); "
        "not yet run on GPUs",
    )

    cp_attention: Literal["all_gather", "ring"] = Field(
        "all_gather",
        description="with cp, keys and values of shared tokens are gathered in each layer, or go round a ring of the "
        "ranks, each of which holds two blocks of them at a time (ring attention); not yet run on GPUs",
    )
    layers: Literal["transformers", "megatron"] = Field(
        "transformers",
        description="whose code computes the trainer's layers: that of transformers, as in the engine, or "
        "Megatron-Core's, with joined products and its own tensor parallel; parameters, "
        "gradient and checkpoints stay what they are",
    )
    prefetch: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="layers whose weights are gathered while the ones before them compute"
    )
    reduce: Literal["micro_batch", "update"] = Field(
        "micro_batch",
        description="gradients are summed over the ranks after each micro-batch, or once an update: less traffic, and "
        "4 bytes of each weight on every rank",
    )
    reshard: Literal["layer", "update"] = Field(
        "layer",
        description="gathered weights are let go after each layer, or kept until the end of an update: less traffic, "
        "and the whole model on every rank",
    )

    def to_mesh(self, ranks: int) -> Mesh:
        """Over so many processes; 1 stands for as many as the axes need."""
        mine = self.__dict__
        rest = mine["pp"] * mine["replicas"] * mine["cp"] * mine["tp"]
        least = mine["ep"] // gcd(mine["ep"], mine["cp"] * mine["tp"])  # shards that ep needs
        shards = max(least, ranks // rest) if mine["shards"] == "auto" else mine["shards"]
        mesh = Mesh(
            pp=self.pp,
            replicas=self.replicas,
            shards=shards,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            chunks=self.chunks,
            sp=self.sp is not False,
            overlap=self.overlap,
            cp_attention=self.cp_attention,
            prefetch=self.prefetch,
            reduce=self.reduce,
            reshard=self.reshard,
        )
        _ = self.shards  # read
        if ranks not in (1, mesh.world):
            raise ValueError(
                f"mesh = {mesh} has {mesh.world} ranks, and ranks = {ranks}: leave one of them out, or let them agree"
            )
        return mesh


class EnginesConfig(SettingsTable):
    count: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="how many")
    tp: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="processes of each, which share every matrix (tensor parallel): for models that one device does "
        "not hold, or not fast enough; the built-in engine's, on one machine",
    )
    ep: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="as many as tp, or as dp: experts of a mixture are not cut, each lies whole on one of these "
        "processes (expert parallel)",
    )
    dp: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="processes of each that have requests and a cache of their own and share nothing but the experts "
        "of a mixture (data parallel attention); ep as many, not with tp",
    )
    prefill: bool = Field(
        False,
        description="each has as many processes again, which compute prompts while the others decode; on a CPU",
    )
    encoders: Annotated[int, Field(ge=0, le=1)] = Field(
        0,
        description="1: each has one more process with the vision tower alone, which encodes pictures while the others "
        "decode; of a vision-language model, not with prefill",
    )


class PlaceConfig(ConfigSection):
    kind: Literal["shared", "split"] = Field(
        "shared",
        description="engine and trainer take turns on one device, or on as many as there are ranks; "
        "or devices of their own",
    )
    cluster: str = Field(
        "auto",
        description='where they run: "local" in this process, "process" in processes of their own, "torchrun" in the '
        'ranks that it started, "ray" as actors of a Ray that the run starts, '
        '"ray:ADDRESS" of one that runs ("ray:auto", "ray:host:6379", "ray://host:10001"); "auto": '
        "local if shared, process if split",
    )
    engines: Annotated[Annotated[int, Field(ge=1, le=4096)], Tag("int")] | Annotated[EnginesConfig, Tag("[table]")] = (
        Field(
            1,
            discriminator=Discriminator(lambda given: "[table]" if isinstance(given, (dict, EnginesConfig)) else "int"),
            description="engines of a split run: how many, or `{ count = 2, "
            "tp = 2 }` for engines of several processes each",
        )
    )
    ranks: int = Field(
        1, ge=1, le=4096, description="processes among which the trainer's weights lie in shards (FSDP2)"
    )
    mesh: MeshConfig = Field(
        MeshConfig(), description="how the ranks are arranged: `{ tp = 2, cp = 2 }`; the others are shards"
    )
    patience: float = Field(
        60.0,
        gt=0,
        le=LONGEST,
        description="seconds without progress in what it was asked for after which a process counts as stuck",
    )
    device: str = Field("auto", description='"cpu", "cuda", "cuda:1", "mps"; "auto" takes a CUDA GPU if there is one')
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description='CPU threads; "auto" is OMP_NUM_THREADS, or else all that this process may use'
    )

    @field_validator("cluster")
    @classmethod
    def _check_cluster(cls, given: str) -> str:
        kind, _, address = given.partition(":")
        if (kind not in CLUSTERS) or (address and kind != "ray"):
            raise ValueError(f'"{given}" is none of {", ".join(CLUSTERS)}, ray:ADDRESS')
        if ":" in given and not re.fullmatch(r"auto|local|(//)?(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", address):
            raise ValueError(f'"{given}" names no Ray: it is "ray:auto", "ray:host:6379" or "ray://host:10001"')
        return given

    @property
    def engine_count(self) -> int:
        """Engines of a split run."""
        return self.engines if isinstance(self.engines, int) else self.engines.count

    @property
    def engine_tp(self) -> int:
        """Processes of each that share every matrix."""
        return 1 if isinstance(self.engines, int) else self.engines.tp

    @property
    def engine_dp(self) -> int:
        """Processes of each that have requests of their own."""
        return 1 if isinstance(self.engines, int) else self.engines.dp

    @property
    def engine_experts_apart(self) -> bool:
        """Whether experts lie whole on one process of each."""
        return not isinstance(self.engines, int) and self.engines.ep > 1

    @property
    def engine_prefill(self) -> bool:
        """Whether each has a process for prompts."""
        return not isinstance(self.engines, int) and self.engines.prefill

    @property
    def engine_encoders(self) -> int:
        """Processes of each that encode pictures."""
        return 0 if isinstance(self.engines, int) else self.engines.encoders

    @property
    def engine_processes(self) -> int:
        """Of each engine."""
        return self.engine_tp * self.engine_dp * (1 + self.engine_prefill) + self.engine_encoders

    @property
    def engine_sizes(self) -> str:
        """What makes an engine several processes, as a recipe says it; "" of one."""
        return ", ".join(_sizes(self.engine_tp, self.engine_dp, self.engine_prefill, self.engine_encoders))

    @property
    def on_ray(self) -> bool:
        """Whether its workers are Ray actors."""
        return self.cluster.partition(":")[0] == "ray"

    @property
    def ray_address(self) -> str | None:
        """Of a Ray that runs already, as `ray.init` takes it; None: the run starts one."""
        address = self.cluster.partition(":")[2]
        return f"ray:{address}" if address.startswith("//") else address or None

    @model_validator(mode="after")
    def _check_together(self) -> PlaceConfig:
        mine = self.__dict__
        object.__setattr__(self, "ranks", mine["mesh"].to_mesh(mine["ranks"]).world)
        shared, alone = mine["kind"] == "shared", mine["ranks"] == 1
        if mine["cluster"] == "auto":
            object.__setattr__(self, "cluster", "local" if shared and alone else "process")
        if shared and mine["cluster"] != ("local" if alone else "process"):
            instead = "a shared device is in one process" if alone else "shared devices are on this machine"
            raise ValueError(f'cluster = "{mine["cluster"]}" needs kind = "split": {instead}')
        engines = mine["engines"]
        each = {} if isinstance(engines, int) else engines.__dict__
        several = engines if isinstance(engines, int) else each["count"]
        if shared and several > 1:
            raise ValueError(
                f'engines = {several} with kind = "shared": there is one engine a rank; leave it out, '
                'or use kind = "split"'
            )
        sizes = _sizes(
            *(each.get(key, none) for key, none in (("tp", 1), ("dp", 1), ("prefill", False), ("encoders", 0)))
        )
        beside = "tp" if each.get("prefill") else "encoders"  # processes for prompts may be beside tp, for pictures
        apart = [size for size in sizes if not size.startswith(beside)]  # beside tp or dp
        if len(apart) > 1:
            raise ValueError(f"engines: {' with '.join(apart)} is not supported; leave one of them out")
        if (dp := each.get("dp", 1)) > 1 and each["ep"] != dp:
            raise ValueError(
                f"engines: dp = {dp} with ep = {each['ep']}: processes with requests of their own share the experts of "
                f"a mixture; set ep = {dp}, or use engines = {{ count = {dp} }} for engines that share nothing"
            )
        if dp == 1 and each.get("ep", 1) not in (1, each.get("tp", 1)):
            raise ValueError(
                f"engines: ep = {each['ep']} with tp = {each['tp']}: experts lie apart over all processes of an "
                "engine; let them agree, or leave ep out"
            )
        if mine["cluster"] == "local" and (several, mine["ranks"]) != (1, 1):
            raise ValueError('more than one engine or rank needs kind = "split" and cluster = "process"')
        return self

    @property
    def one_module(self) -> bool:
        """Whether trainer and engine compute with the same module."""
        return self.kind == "shared" and self.ranks == 1


def _sizes(tp: int, dp: int, prefill: bool, encoders: int) -> list[str]:
    """What makes an engine several processes, each as a recipe says it."""
    found = [f"{key} = {n}" for key, n in (("tp", tp), ("dp", dp)) if n > 1]
    return found + ["prefill = true"] * prefill + [f"encoders = {encoders}"] * (encoders > 0)
