"""Ways to lay a model over devices: data, tensor, pipeline, context and expert parallel;
memory, bubble, traffic, time of each.

world = dp·tp·pp·cp, experts over ep of the dp·cp·tp.  Traffic order, the heaviest innermost: tp - cp - ep - dp - pp
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from rondel.core.mesh import Mesh
from rondel.core.ring_blocks import ring_tokens
from rondel.core.row_split import PRODUCTS, deal_row
from rondel.planner.activations import activation_bytes, kept_bytes
from rondel.planner.cost import forward_flops, recomputed_flops
from rondel.planner.memory import bytes_per_number
from rondel.planner.resolve import SPARE
from rondel.planner.traffic import (
    context_traffic,
    expert_traffic,
    pipeline_bubble,
    powers_of_two,
    sharded_traffic,
    tensor_traffic,
)
from rondel.planner.workload import Workload

CHUNKS = (1, 2, 4)  # of a stage, that are tried


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    memory: float  # bytes of one device while it trains
    fits: bool
    bubble: float
    traffic: float  # bytes of one device in a step, over the node's links and the network
    seconds: float  # of a step: arithmetic, bubble, traffic that is not hidden
    chunks: int = 1  # of each stage of pp
    overlap: bool = False  # rows of tp travel beside products
    ring: bool = False  # keys and values of cp go round a ring
    is_supported: bool = True  # Rondel trains this model in it

    @property
    def mesh(self) -> Mesh:
        """The same for `place.mesh`."""
        return Mesh(
            pp=self.pp,
            shards=self.dp,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            chunks=self.chunks,
            overlap=self.overlap,
            cp_attention="ring" if self.ring else "all_gather",
        )

    @property
    def name(self) -> str:
        return (
            " ".join(f"{key}{n}" for key in ("dp", "tp", "pp", "chunks", "cp", "ep") if (n := getattr(self, key)) > 1)
            or "one device"
        )


def parallel_layouts(setting: Workload) -> list[ParallelLayout]:
    """All that the shape allows on the devices that train: those that Rondel trains in first, of them those that fit, by
    estimated time.
    """
    s, devices = setting.shape, setting.train_devices
    found = []
    for tp in powers_of_two(min(devices, setting.hardware.in_node, s.heads)):
        for pp in powers_of_two(devices // tp):
            for cp in powers_of_two(devices // tp // pp):
                dp = devices // (tp * pp * cp)
                if (
                    dp * tp * pp * cp != devices
                    or s.heads % tp
                    or pp > s.layers
                    or (cp > 1 and setting.output + setting.prompt < 8192)
                ):
                    continue
                experts = [n for n in powers_of_two(dp * cp * tp) if s.experts % n == 0] if s.experts else [1]
                chunks = [v for v in CHUNKS if pp * v <= s.layers] if pp > 1 else [1]
                found += [_make_layout(setting, dp, tp, pp, cp, ep, v) for ep in experts for v in chunks]
    return sorted(found, key=lambda row: (not row.is_supported, not row.fits, row.seconds))


def _is_supported(setting: Workload, tp: int, pp: int, ep: int) -> bool:
    """Whether the trainer takes it, as train/mesh_checks.py and models/megatron/layers.py know once a model is loaded."""
    s = setting.shape
    uncut = (s.indexer.layers > 0 and tp * pp > 1) or (setting.four_bits and tp > 1)
    return not (uncut or (setting.megatron and (ep > 1 or (s.experts > 0 and tp > 1))))


def _make_layout(setting: Workload, dp: int, tp: int, pp: int, cp: int, ep: int, chunks: int) -> ParallelLayout:
    s, on, state, width = setting.shape, setting.hardware, bytes_per_number(setting), setting.width
    devices = dp * tp * pp * cp
    mine = setting.packed_tokens / dp  # tokens of one replica in an epoch, cut over cp
    update = mine / setting.updates
    micro = max(1, min(setting.micro * cp, update))
    m = ceil(update / micro)  # micro-batches of an update
    each = kept_bytes(
        s, width, activation_bytes(s, width, megatron=setting.megatron), setting.recompute, setting.activations
    )
    # micro-batches whose activations the first stage keeps, those of a chunk as a part of one
    alive = min(pp if chunks == 1 else (2 * (pp - 1) + (chunks - 1) * pp + 1) / chunks, m)
    # of a stage, what a rank gathers: matrices are cut by tp, experts lie apart or are cut, too
    layers = ((s.body_parameters - s.expert_parameters) / tp + s.expert_parameters / (ep if ep > 1 else tp)) / pp
    largest, ends = layers * pp / s.layers, s.embedding_parameters * (1 if s.tied or pp > 1 else 2) / tp
    # two layers and what lies at the ends are whole, and the largest of them has a gradient, which is summed in fp32
    gathered = width * (2 * largest + ends) + (width + 4) * max(largest, ends) if devices > 1 else 0
    memory = state.persistent_bytes * s.parameter_count / devices + gathered + each * micro * alive / (tp * pp * cp)

    ring = setting.ring and cp > 1 and s.latent is None
    inside = ringed = 0.0
    if tp > 1:
        inside += 4 * s.layers / pp * tensor_traffic(tp, mine / cp * s.hidden * width)
        # of a layer's four, those of its experts are no products in a ring
        ringed = inside * (1 - (s.layers - s.dense_layers) / (2 * s.layers) if s.experts else 1) * setting.overlap
    if ep > 1:
        inside += (
            3
            * (s.layers - s.dense_layers)
            / pp
            * expert_traffic(ep, mine / cp / tp * ep * s.hidden * width, s.per_token)
        )
    if cp > 1:
        held, moved = context_shares(setting, cp, micro, ring=ring)
        inside += mine * moved * s.trained_kv_bytes() / 2 / (tp * pp)
        memory += micro * held * s.trained_kv_bytes() / 2 / max(1, s.attention_layers) / tp
    root = s.embedding_parameters * (1 if s.tied else 2) / (tp * pp)
    over = sharded_traffic(layers, root, ranks=dp * cp, micro_batches=m * setting.updates, width=width)
    if pp > 1:
        over += 2 * (pp * chunks - 1) / pp * mine / cp * s.hidden * width  # each border once in either direction

    slow = on.link if devices <= on.in_node else on.network
    nested = on.link if tp * cp * ep <= on.in_node else on.network
    context = setting.prompt + setting.mean
    flops = 3 * forward_flops(s, context) + recomputed_flops(s, context, setting.recompute)
    work = flops * setting.packed_tokens / (devices * on.flops * on.efficiency * 2 / width)
    idle = pipeline_bubble(pp, m, chunks)
    # what runs beside the arithmetic, as far as there is any: of a ring all but the first round, and sharding's traffic
    in_rings = min(ringed / nested, 0.8 * work * (tp - 1) / tp)
    hidden = in_rings + min(over / slow, 0.8 * work - in_rings)
    seconds = work / (1 - idle) + inside / nested + over / slow - hidden
    epochs = setting.epochs
    return ParallelLayout(
        dp,
        tp,
        pp,
        cp,
        ep,
        memory,
        memory <= on.memory * (1 - SPARE),
        idle,
        epochs * (inside + over),
        epochs * seconds,
        chunks,
        setting.overlap and tp > 1,
        ring,
        _is_supported(setting, tp, pp, ep),
    )


@dataclass(frozen=True, slots=True)
class MeanSegment:
    """A prompt, or an answer of the mean length to it."""

    start: int
    length: int
    parent: int | None = None


def context_shares(setting: Workload, cp: int, tokens: float, *, ring: bool) -> tuple[float, float]:
    """Of a row of so many tokens over cp ranks whose answers have the mean length (core/row_split.py), for each token
    the bytes that a rank holds of others' keys, values and their gradients, and those that come to it, by each number
    of a key or value.

    Gathered, S shared tokens lie whole on each rank, and come twice, and their gradients once. In a ring a rank has two
    blocks of S / cp, with gradients in fp32, and they travel as far as they are seen (core/ring_blocks.py).
    """
    row: list[MeanSegment] = []
    at, prompt, answer = 0, max(1, setting.prompt), max(1, round(setting.mean))
    while at < tokens:
        row.append(MeanSegment(at, prompt))
        above, at = len(row) - 1, at + prompt
        for _ in range(setting.group):
            if at >= tokens and len(row) > 1:
                break
            row.append(MeanSegment(at, answer, above))
            at += answer
    dealing, width = deal_row(row, cp, PRODUCTS * setting.shape.hidden), setting.width
    shared = dealing.shared_tokens / at
    if ring:
        return 2 * shared / cp * (width + 4), ring_tokens(row, dealing) / at / cp * (2 * width + 4)
    return 2 * shared * width, 3 * context_traffic(cp, shared * width)
