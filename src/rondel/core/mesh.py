"""How the processes of a trainer are arranged.

    world = pp · replicas · shards · cp · tp, outermost to innermost: neighbours in rank speak most

    pp        stages of layers, one behind the other; each of several `chunks`, which take turns
    replicas  copies of all shards (HSDP): gradients are summed over them, weights are gathered within each
    shards    of parameters, gradients and moments (FSDP2)
    cp        parts of one packed row: contexts longer than a device holds (context parallel)
    tp        parts of every matrix (tensor parallel), and of the rows between them (sequence parallel)
    ep        experts lie apart over so many of the shards · cp · tp ranks of a replica (expert parallel)

Ranks that differ in `replicas` or `shards` take different samples; those that differ in pp, cp or tp compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

AXES = ("pp", "replicas", "shards", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """The size of every axis; 1 where there is none."""

    pp: int = 1
    replicas: int = 1
    shards: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    chunks: int = 1  # runs of layers of each stage of pp
    sp: bool = True  # rows between the parts of a layer lie apart over tp
    overlap: bool = False  # these rows travel while the products beside them compute
    cp_attention: str = "all_gather"  # how keys and values of shared tokens come to a rank of cp; or round a "ring"
    # when shards travel; none of these changes the gradient
    prefetch: int = 0  # layers that are gathered ahead of the one that computes
    reduce: str = "micro_batch"  # gradients are summed after each "micro_batch", or once an "update"
    reshard: str = "layer"  # gathered weights go after each "layer", or stay until the end of an "update"

    def __post_init__(self) -> None:
        if any(getattr(self, axis) < 1 for axis in (*AXES, "ep", "chunks")):
            raise ValueError(f"{self}: every axis is 1 or more")
        if self.chunks > 1 == self.pp:
            raise ValueError(
                f"chunks = {self.chunks} divides each stage of a pipeline, and pp = 1 is no pipeline: set pp to 2 or "
                "more, or leave chunks out"
            )
        if self.overlap and (self.tp == 1 or not self.sp):
            raise ValueError(
                f"overlap = true with tp = {self.tp} and sp = {str(self.sp).lower()}: it is for rows that lie apart "
                "over tp; set tp to 2 or more and sp = true, or leave overlap out"
            )
        if self.cp_attention == "ring" and self.cp == 1:
            raise ValueError(
                'cp_attention = "ring" with cp = 1: it says how ranks that share a row give each other keys and '
                "values; set cp to 2 or more, or leave cp_attention out"
            )
        if self.shards * self.cp * self.tp % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide the {self.shards * self.cp * self.tp} ranks of a replica "
                f"(shards · cp · tp = {self.shards} · {self.cp} · {self.tp})"
            )

    @property
    def world(self) -> int:
        """Processes."""
        return prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Ranks that take different samples."""
        return self.replicas * self.shards

    def coordinate(self, axis: str, rank: int) -> int:
        """Where a rank lies along an axis."""
        inner = prod(self.shape[AXES.index(axis) + 1 :])
        return rank // inner % getattr(self, axis)

    def data_index(self, rank: int) -> int:
        """Which of the `data` shares of the samples is this rank's."""
        return self.coordinate("replicas", rank) * self.shards + self.coordinate("shards", rank)

    def __str__(self) -> str:
        """As a recipe says it: "{ shards = 2, tp = 4 }"."""
        told = [f"{axis} = {n}" for axis in (*AXES, "ep", "chunks") if (n := getattr(self, axis)) > 1]
        told += [] if self.sp or self.tp == 1 else ["sp = false"]
        told += ["overlap = true"] if self.overlap else []
        told += ['cp_attention = "ring"'] if self.cp_attention == "ring" else []
        told += [f"prefetch = {self.prefetch}"] if self.prefetch else []
        told += [f'{key} = "update"' for key in ("reduce", "reshard") if getattr(self, key) == "update"]
        return f"{{ {', '.join(told)} }}" if told else "{}"
