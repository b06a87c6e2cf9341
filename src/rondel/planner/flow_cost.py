"""What a flow's training costs on a mesh: bytes of a rank by phase, bytes that it receives, seconds. No torch.

n ranks of shards · cp · M denoising steps of a pass · m passes of an update · P tokens of a sample, W width, L layers

state        16·N / n                            weights, gradients and two moments in float32, N numbers that a rank of tp has
activations  M·P / cp times what a layer keeps of a token (flow_shape.py)
cp           3·m·M·L·(cp - 1) / cp · 2·P·W·4     keys and values: gathered in the forward and in the backward pass, their
             gradient scattered; 4 in the place of 3 where layers are computed again; / tp
tp           4·m·M·L·2·(tp - 1) / tp · P / cp·W·4   two sums of whole rows a layer, forward and backward; 6 in the place of
             4 where layers are computed again. With sp (rows between the parts lie apart) a gather and a scattered sum
             in the place of each sum, which are as many bytes; 2·m·M·(tp - 1) / tp · (P / cp + 1)·W·4 more at the ends of
             the layers; and once an update the sum of 6·W² + 6·W numbers of each layer's modulation
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rondel.core.mesh import Mesh
from rondel.planner.flow_shape import WIDTH
from rondel.planner.flow_workload import FlowWorkload
from rondel.planner.memory import PHASES, MemoryBill, nonempty_rows
from rondel.planner.resolve import BUCKET, COMMIT, SPARE
from rondel.planner.traffic import context_traffic, pipeline_bubble, powers_of_two, sharded_traffic, tensor_traffic

# -- memory ------------------------------------------------------------------------------------------


def flow_memory_bills(setting: FlowWorkload) -> list[MemoryBill]:
    """One for shared devices, two where trainer and engines have their own."""
    trainer, engine = trainer_rows(setting), engine_rows(setting)
    pools = {"trainer": trainer, "engine": engine} if setting.split else {"shared": trainer | engine}
    memory = setting.hardware.memory
    return [MemoryBill(pool, memory, nonempty_rows(setting.hardware, rows)) for pool, rows in pools.items()]


def trainer_rows(setting: FlowWorkload) -> dict[str, dict[str, float]]:
    """Bytes of one device that trains, {tenant: {phase: bytes}}."""
    s, mesh, steps = setting.shape, setting.mesh, setting.pass_steps
    held, tokens = WIDTH * held_numbers(setting, mesh), s.tokens / mesh.cp
    again, shared = setting.recompute == "layers", mesh.cp > 1
    kept = s.activation_bytes(recompute=again, shared=shared, tp=mesh.tp, sp=mesh.sp)
    rows = {
        "policy weights": dict.fromkeys(PHASES, held),
        "gradients": dict.fromkeys(PHASES, held),
        "moments": dict.fromkeys(PHASES, 2 * held),
        "starting weights": dict.fromkeys(PHASES, held),
        "activations": {
            "train": kept * tokens * steps / mesh.pp,
            "logprob": WIDTH * s.kept_numbers(shared=shared, tp=mesh.tp, sp=mesh.sp) * tokens * steps / mesh.pp,
        },
        # whole on every rank; where tokens are shared, the own ones of both points once more
        "points": dict.fromkeys(("train", "logprob"), WIDTH * steps * (2 * s.dim + 4 + shared * 2 * s.dim / mesh.cp)),
    }
    if mesh.world > mesh.replicas:
        whole = WIDTH * (s.root_parameters / mesh.pp + 2 * _layer_numbers(setting, mesh))
        rows["gathered layers"] = dict.fromkeys(("train", "logprob"), whole)
    if shared:
        rows["gathered keys"] = {
            phase: times * s.gathered_bytes * steps / mesh.tp for phase, times in (("logprob", 1), ("train", 2))
        }
    return rows


def held_numbers(setting: FlowWorkload, mesh: Mesh) -> float:
    """Weights of one rank: its shard of what is whole on the ranks of tp, and of its part of what they divide."""
    s = setting.shape
    return (s.layers * _layer_numbers(setting, mesh) + s.root_parameters) / (mesh.pp * mesh.shards * mesh.cp)


def _layer_numbers(setting: FlowWorkload, mesh: Mesh) -> float:
    """Weights of one layer, without shards."""
    s = setting.shape
    return s.layer_parameters - s.cut_parameters * (1 - 1 / mesh.tp)


def engine_rows(setting: FlowWorkload) -> dict[str, dict[str, float]]:
    """Bytes of one device that draws: the whole model, and a layer of all samples that are denoised together."""
    s, together = setting.shape, setting.drawn_together
    rows: dict[str, dict[str, float]] = {}
    each = WIDTH * s.tokens * s.kept_numbers(shared=False)
    rows["denoising"] = {"generate": float(together * (each + WIDTH * (4 * s.dim + 4)))}
    if setting.split or setting.gpus > 1:
        weights = s.parameter_count * WIDTH
        rows["engine weights"] = dict.fromkeys(PHASES, float(weights))
        rows["new weights"] = {"sync": float(weights)}  # beside those that serve
        rows["sync buckets"] = {"sync": 2.0 * BUCKET}
    return rows


# -- time --------------------------------------------------------------------------------------------


def flops_a_second(setting: FlowWorkload) -> float:
    """Of one device in float32."""
    return setting.hardware.flops * setting.hardware.efficiency * 2 / WIDTH


def draw_seconds(setting: FlowWorkload) -> float:
    """One denoising step of one sample on one engine: arithmetic alone, for every pass has P tokens."""
    return setting.shape.forward_flops / flops_a_second(setting)


def pass_seconds(setting: FlowWorkload, mesh: Mesh) -> float:
    """Forward and backward of one pass of one rank; entry, exit and modulations as if tp and pp divided them, too."""
    again, shared = setting.recompute == "layers", mesh.cp > 1
    flops = setting.pass_steps * setting.shape.train_flops(recompute=again, shared=shared)
    return flops / (mesh.cp * mesh.tp * mesh.pp) / flops_a_second(setting)


def forward_only_seconds(setting: FlowWorkload, mesh: Mesh) -> float:
    """Of a step's passes that only look, on one rank: before the updates, and of the starting weights."""
    looks = setting.proximal + setting.reference
    flops = looks * setting.updates * setting.passes * setting.pass_steps * setting.shape.forward_flops
    return flops / (mesh.cp * mesh.tp * mesh.pp) / flops_a_second(setting)


def update_seconds(setting: FlowWorkload, mesh: Mesh) -> float:
    """AdamW is bound by memory: all of a rank's state, in and out."""
    return 2 * 4 * WIDTH * held_numbers(setting, mesh) / setting.hardware.bandwidth


def train_seconds(setting: FlowWorkload) -> float:
    """A step's training without traffic."""
    return forward_only_seconds(setting, setting.mesh) + setting.epochs * setting.updates * (
        setting.passes * pass_seconds(setting, setting.mesh) + update_seconds(setting, setting.mesh)
    )


# -- traffic and layouts -------------------------------------------------------------------------------


def context_bytes(setting: FlowWorkload, mesh: Mesh) -> float:
    """Keys and values that a rank receives in one pass with a gradient, and the scattered gradient of its own."""
    times = 3 + (setting.recompute == "layers")
    s = setting.shape
    return times * s.layers / mesh.pp * context_traffic(mesh.cp, setting.pass_steps * s.gathered_bytes / mesh.tp)


def tensor_bytes(setting: FlowWorkload, mesh: Mesh) -> float:
    """What a rank receives in one pass with a gradient for the sums of tp: of whole rows behind attention and MLP, and
    of their gradients before both; with sp as much, and rows of all tokens behind the last layer, their gradients before
    the first, and those of what steers them. Left out: two biases a layer, once an update.
    """
    s, times = setting.shape, 4 + 2 * (setting.recompute == "layers")
    row = setting.pass_steps * s.hidden * WIDTH
    rows = row * s.tokens / mesh.cp
    inside = times * s.layers / mesh.pp * tensor_traffic(mesh.tp, rows)
    return inside + (tensor_traffic(mesh.tp, rows + row) if mesh.sp else 0)


def shard_bytes(setting: FlowWorkload, mesh: Mesh) -> float:
    """Weights and gradients that a rank receives in an update, with those of its copies on other replicas."""
    s = setting.shape
    layers, root = s.layers * _layer_numbers(setting, mesh) / mesh.pp, s.root_parameters / mesh.pp
    ranks = mesh.shards * mesh.cp
    over = sharded_traffic(layers, root, ranks=ranks, micro_batches=setting.passes, width=WIDTH)
    return over + setting.passes * tensor_traffic(mesh.replicas, WIDTH * (layers + root) / ranks)


def modulation_bytes(setting: FlowWorkload, mesh: Mesh) -> float:
    """With sp a rank of tp has its own tokens' part of the gradients of modulations, which are summed once an update."""
    s = setting.shape
    parts = s.layers * s.modulation_parameters / mesh.pp / (mesh.shards * mesh.cp)
    return tensor_traffic(mesh.tp, WIDTH * parts) if mesh.sp else 0.0


@dataclass(frozen=True, slots=True)
class FlowLayout:
    """One mesh of the devices that train: bytes of a device, bytes that it receives and seconds of a step."""

    mesh: Mesh
    memory: float
    fits: bool
    bubble: float
    traffic: float
    seconds: float

    @property
    def is_supported(self) -> bool:
        """Whether Rondel trains a flow in it."""
        return self.mesh.pp == self.mesh.ep == 1

    @property
    def name(self) -> str:
        axes = ("pp", "replicas", "shards", "cp", "tp")
        return " ".join(f"{axis}{n}" for axis in axes if (n := getattr(self.mesh, axis)) > 1) or "one device"


def flow_layouts(setting: FlowWorkload) -> list[FlowLayout]:
    """All meshes that the shape allows on the devices that train: those that fit first, by estimated time."""
    found = [make_layout(setting, mesh) for mesh in _meshes(setting)]
    return sorted(found, key=lambda row: (not row.fits, row.seconds))


def _meshes(setting: FlowWorkload) -> Iterator[Mesh]:
    s, devices = setting.shape, setting.train_devices
    for tp in powers_of_two(min(devices, setting.hardware.in_node, s.heads)):
        for pp in powers_of_two(min(devices // tp, s.layers)):
            for cp in powers_of_two(min(devices // (tp * pp), s.tokens)):
                data = devices // (tp * pp * cp)
                if data * tp * pp * cp != devices or s.heads % tp or s.inner % tp:
                    continue
                for replicas in powers_of_two(data):
                    if data % replicas == 0:
                        yield Mesh(pp=pp, replicas=replicas, shards=data // replicas, cp=cp, tp=tp)


def make_layout(setting: FlowWorkload, mesh: Mesh) -> FlowLayout:
    """The same step on this mesh."""
    setting = replace(setting, mesh=mesh)
    s, on, pp = setting.shape, setting.hardware, mesh.pp
    rows = trainer_rows(setting)
    memory = max(sum(row.get(phase, 0.0) for row in rows.values()) for phase in PHASES)
    own_tokens = setting.pass_steps * s.tokens / mesh.cp
    inside = setting.passes * (context_bytes(setting, mesh) + tensor_bytes(setting, mesh))
    inside += modulation_bytes(setting, mesh)
    over = shard_bytes(setting, mesh)
    over += setting.passes * 2 * own_tokens * s.hidden * WIDTH if pp > 1 else 0.0
    bubble = pipeline_bubble(pp, setting.passes)
    work = setting.passes * pass_seconds(setting, mesh) / (1 - bubble)
    slow = on.link if mesh.world <= on.in_node else on.network
    nested = on.link if mesh.tp * mesh.cp <= on.in_node else on.network
    hidden = min(over / slow, 0.8 * work)  # sharding's traffic runs beside the arithmetic
    update = work + inside / nested + over / slow - hidden + update_seconds(setting, mesh)
    times = setting.epochs * setting.updates
    seconds = times * update + forward_only_seconds(setting, mesh)
    fits = memory <= on.memory * (1 - SPARE)
    return FlowLayout(mesh, memory, fits, bubble, times * (inside + over), seconds)


def interrupt_seconds(setting: FlowWorkload) -> dict[str, float]:
    """What an update costs the engines beside the transfer: a chain goes on where it stood, whatever happens to it."""
    longest = setting.output * setting.drawn_together * draw_seconds(setting)
    return {"hold": COMMIT, "drain": longest, "abort": COMMIT}
