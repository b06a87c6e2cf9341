"""Who needs how much memory, when.  N numbers, bytes for each of them:

                  compute  master  gradient  moments
    mixed            2        4        2        8      = 16   the usual account (arXiv:1910.02054)
    fsdp2            -        4        4        8      = 16   and a transient shard of 2
    rondel           2        4        4        8      = 18   train/optim.py, fsdp.py: the compute
                     copy stays, the engine reads it
    rondel, fp32     4        -        4        8      = 16   master and compute copy are one tensor

    moments of adamw 8, adamw_8bit 2.03, muon 4 in matrices of the layers (train/optimizers.py)

phases   generate · logprob (proximal, reference, teacher: forward only) · train · sync · wake (the cache comes back)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rondel.planner.activations import activation_bytes, halves_bytes, kept_bytes, written_out_bytes
from rondel.planner.hardware import GB, Hardware
from rondel.planner.resolve import (
    BUCKET,
    LOGITS,
    PROGRAMS,
    SPARE,
    engine_reserve,
    kv_pages,
    logits_bytes,
    prefill_bytes,
    state_slots,
)
from rondel.planner.shapes import route_bytes
from rondel.planner.stored_bytes import nf4_bytes
from rondel.planner.workload import OtherPolicy, Workload

PHASES = ("generate", "logprob", "train", "sync", "wake")
LIBRARIES = 0.6 * GB  # resident of a process with torch and transformers before it has a model
# of a CPU's largest phase: gradients of activations in a backward pass, and freed memory
# that the allocator keeps (runtime/devices.py)
KEPT = 0.10
PROGRAM = 0.62e6  # bytes that oneDNN keeps of a product of one shape, whatever its size
LEAST_MAPPED = 64 << 20  # bytes of a frozen model that a CPU maps from a file (train/offload.py)
WHOLE_MASTERS = 1 << 22  # at the same time, in a step that joins them: PART of train/optim.py
DENSE = 1 << 24  # scores of one call that are written out on a CPU (models/dense_attention.py)
SHORT = 256  # tokens of a segment whose scores are not, since a kernel is as fast


class BytesPerNumber(NamedTuple):
    """For each trained number."""

    compute: int
    master: int
    gradient: int
    moments: float
    transient: int = 0

    @property
    def persistent_bytes(self) -> float:
        """What stays; the transient shard does not."""
        return self.compute + self.master + self.gradient + self.moments


MIXED, FSDP2, RONDEL, RONDEL32 = (
    BytesPerNumber(2, 4, 2, 8),
    BytesPerNumber(0, 4, 4, 8, 2),
    BytesPerNumber(2, 4, 4, 8),
    BytesPerNumber(4, 0, 4, 8),
)


def job_memory_bytes(parameters: float, state: BytesPerNumber = MIXED, *, critic: bool = False) -> dict[str, float]:
    """The usual account of a whole job, in bytes, without KV: training state, reference,
    reward model, the actor's copy.  70e9 -> 1540 GB.
    """
    told = {
        "train": state.persistent_bytes * parameters,
        "reference": 2 * parameters,
        "reward model": 2 * parameters,
        "actor copy": 2 * parameters,
    }
    return {**told, "critic": state.persistent_bytes * parameters} if critic else told


def kv_room(pre: float, post: float, share: float) -> float:
    """memory_for_kv = post - pre·(1 - y): what `mem_fraction_static` y leaves for the cache,
    with `pre` free before and `post` after loading.
    """
    return post - pre * (1 - share)


def kv_advice(pre: float, post: float, share: float) -> str:
    """What to do with y. 0 or less fails at start; a cache that takes all that is left fails later, in a pass."""
    room = kv_room(pre, post, share)
    least = 1 - post / pre
    if room <= 0:
        return (
            f"no room for a cache ({room / GB:+.1f} GB): raise mem_fraction_static above {least:.2f}, "
            "or use a smaller model"
        )
    return (
        f"{room / GB:+.1f} GB for the cache; if passes run out of memory, lower mem_fraction_static (above {least:.2f})"
    )


# -- the bill of a setting -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryBill:
    """Bytes on one device of a pool: `rows[tenant][phase]`; 0 where the tenant is elsewhere in that
    phase. `loading`: at most before the first of them.
    """

    pool: str
    memory: float
    rows: dict[str, dict[str, float]]
    loading: float = 0.0

    def phase_bytes(self, phase: str) -> float:
        return sum(row[phase] for row in self.rows.values())

    @property
    def peak_phase(self) -> tuple[str, float]:
        phase = max(PHASES, key=self.phase_bytes)
        return ("load", self.loading) if self.loading > self.phase_bytes(phase) else (phase, self.phase_bytes(phase))

    @property
    def free_bytes(self) -> float:
        """What is free at the peak; less than 0: it does not fit."""
        return self.memory * (1 - SPARE) - self.peak_phase[1]

    @property
    def largest_tenant(self) -> str:
        phase, _ = self.peak_phase
        return "the whole model" if phase == "load" else max(self.rows, key=lambda tenant: self.rows[tenant][phase])

    @property
    def largest_share(self) -> float:
        """Of the largest tenant at the peak."""
        phase, peak = self.peak_phase
        return 1.0 if phase == "load" else self.rows[self.largest_tenant][phase] / peak


def bill_tables(bills: list[MemoryBill]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [
        {
            "pool": bill.pool,
            "of": bill.memory,
            "rows": bill.rows,
            "total": {phase: bill.phase_bytes(phase) for phase in PHASES},
            "peak": bill.peak_phase[1],
            "peak_phase": bill.peak_phase[0],
            "room": bill.free_bytes,
            "largest": bill.largest_tenant,
            "loading": bill.loading,
        }
        for bill in bills
    ]


def memory_bills(setting: Workload) -> list[MemoryBill]:
    """One for shared devices, two where trainer and engines have their own."""
    memory = setting.hardware.memory
    if not setting.split:
        others = [(other, _policy_rows(setting, other)) for other in setting.policies]
        beside = {f"{other.name}: {tenant}": row for other, rows in others for tenant, row in rows.items()}
        return [
            MemoryBill(
                "shared",
                memory,
                nonempty_rows(setting.hardware, trainer_memory(setting) | engine_memory(setting) | beside),
                loading_bytes(setting),
            )
        ]
    found = [
        MemoryBill("trainer", memory, nonempty_rows(setting.hardware, trainer_memory(setting)), loading_bytes(setting)),
        MemoryBill("engine", memory, nonempty_rows(setting.hardware, engine_memory(setting))),
    ]
    if setting.encoders:
        found.insert(1, MemoryBill("encoder", memory, nonempty_rows(setting.hardware, encoder_memory(setting))))
    if setting.prefills:  # the cache is the engine's, which it maps
        rows = {name: row for name, row in engine_memory(setting).items() if name != "KV cache"}
        found.insert(1, MemoryBill("prefill", memory, nonempty_rows(setting.hardware, rows)))
    for other in setting.policies:  # on devices of their own
        own = replace(setting, shape=other.shape, policies=())
        if not other.frozen:
            found.append(
                MemoryBill(
                    f"trainer of {other.name}",
                    memory,
                    nonempty_rows(own.hardware, trainer_memory(own)),
                    loading_bytes(own),
                )
            )
        found.append(MemoryBill(f"engine of {other.name}", memory, nonempty_rows(own.hardware, engine_memory(own))))
    return found


def encoder_memory(setting: Workload) -> dict[str, dict[str, float]]:
    """What a process that encodes an engine's pictures has: the tower, and what one picture needs in it."""
    tower = setting.shape.tower
    assert tower is not None, "refused before"
    weights = tower.parameter_count * setting.width
    return {
        "tower weights": dict.fromkeys(PHASES, float(weights)),
        "staged weights": {"sync": float(weights * setting.tower)},
        "picture": {"generate": tower.activation_bytes(setting.image, setting.width, trained=False)},
    }


def loading_bytes(setting: Workload) -> float:
    """Bytes at most on one of several ranks while it loads: its shards in fp32, those of frozen models, and the largest
    block, as it is read and in fp32 (models/deferred_weights.py). A base under an adapter stays in its dtype; one in 4
    bits is loaded whole.
    """
    s, ranks = setting.shape, setting.train_devices
    if ranks == 1:
        return 0.0
    if setting.four_bits:
        return setting.weight_bytes
    held = setting.width if setting.rank else 4
    start = None if setting.rank else s  # the base is the start of an adapter
    frozen = [_weight_bytes(setting.reference or start, setting)]
    frozen += [_weight_bytes(setting.teacher, setting) * setting.teachers] if setting.teacher is not None else []
    critic: float = 0
    if setting.critic is not None:  # the policy's base, too, unless it is a model of its own
        critic = (held if setting.critic == s else 4) * setting.critic.parameter_count
    block = max(s.embedding_parameters * (1 if s.tied else 2), s.body_parameters / s.layers)
    whole = 4 * setting.trained_parameters if setting.rank else 0
    spread = 0 if setting.rank else 4 * block
    return (held * s.parameter_count + critic + sum(frozen)) / ranks + whole + spread + setting.width * block


def nonempty_rows(hardware: Hardware, rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The rows that have anything, and on a CPU what a process has beside its tensors."""
    rows = _drop_empty_rows(rows)
    if hardware.on_gpu:
        return rows
    most = max(sum(row[phase] for row in rows.values()) for phase in PHASES)
    rows["Python and libraries"] = dict.fromkeys(PHASES, LIBRARIES)
    rows["freed and kept"] = {phase: KEPT * most for phase in PHASES}
    return rows


def _policy_rows(setting: Workload, other: OtherPolicy) -> dict[str, dict[str, float]]:
    """What another policy keeps on the same device. Passes take turns, so what one needs
    while it runs is there for one of them. On one base there are the base and the engine of the main policy alone.
    """
    own = replace(setting, shape=other.shape, policies=())
    kept = (
        ("policy weights",)
        if other.frozen
        else ("policy weights", "masters", "gradients", "moments", "reference", "starting weights", "packed weights")
    )
    if other.on_base:
        rows = {name: row for name, row in trainer_memory(own).items() if name in ("gradients", "moments")}
        adapter = dict.fromkeys(PHASES, 4.0 * own.trained_parameters)
        return {} if other.frozen else {"policy weights": adapter} | rows
    return {name: row for name, row in trainer_memory(own).items() if name in kept} | {
        "KV cache": engine_memory(own)["KV cache"]
    }


def bytes_per_number(setting: Workload) -> BytesPerNumber:
    state = RONDEL if setting.width == 2 else RONDEL32
    if setting.optimizer == "adamw_8bit":
        return state._replace(moments=2 + 2 * 4 / 256)
    if setting.optimizer == "muon":
        s = setting.shape
        ends = 0 if setting.rank else s.embedding_parameters * (1 if s.tied else 2)
        return state._replace(moments=4 + 4 * ends / max(1, s.body_parameters + ends))
    return state


def trainer_memory(setting: Workload) -> dict[str, dict[str, float]]:
    """What the trainer has on one of its devices. Offloaded state is here in `train` only,
    frozen models then for their own pass.
    """
    s, ranks = setting.shape, setting.train_devices
    state, trained = bytes_per_number(setting), setting.trained_parameters
    always = dict.fromkeys(PHASES, 1.0)
    training = {**dict.fromkeys(PHASES, 0.0), "train": 1.0, "logprob": 1.0} if setting.offload else always
    passing = {**dict.fromkeys(PHASES, 0.0), "logprob": 1.0}
    frozen = passing if setting.offload else always
    learning = {"train": 1.0}  # gradients are let go when a step ends
    stored = setting.weight_bytes if s.bits == 16 or setting.four_bits else s.parameter_count * s.bits / 8
    weights = (stored + (trained * 4 if setting.rank else 0)) / ranks
    if setting.four_bits and ranks > 1:  # what is packed lies whole on every rank, like the adapter
        weights = nf4_bytes(s, 0) + (stored - nf4_bytes(s, 0)) / ranks + trained * 4
    here = 0 if setting.host_optimizer else 1  # of the optimizer; what is on the host: planner/host_memory.py
    rows = {
        "policy weights": _scale_phases(always, weights),
        "masters": _scale_phases(training, here * trained * (0 if setting.rank else state.master) / ranks),
        "gradients": _scale_phases(learning, here * trained * state.gradient / ranks),
        "moments": _scale_phases(training, here * trained * state.moments / ranks),
        "reference": reference_bytes(setting, frozen, _weight_bytes(setting.reference, setting)),
        "starting weights": reference_bytes(
            setting, frozen, 0 if setting.rank or setting.reference == s else setting.weight_bytes
        ),
        "packed weights": {phase: packed_bytes(setting, training=phase == "train") for phase in PHASES},
        "teacher": _scale_phases(frozen, _weight_bytes(setting.teacher, setting) * setting.teachers / ranks),
        "critic": _scale_phases(
            training,
            (setting.critic.body_parameters + setting.critic.embedding_parameters)
            * (state.persistent_bytes if here else state.compute)
            / ranks
            if setting.critic
            else 0,
        ),
    }
    if setting.rank:  # a base under an adapter has neither master nor gradient; the adapter lies whole on every rank
        rows["gradients"] = _scale_phases(learning, here * trained * state.gradient)
        rows["moments"] = _scale_phases(training, here * trained * state.moments)
    whole = summed = 0.0
    if ranks > 1:  # embedding and head stay gathered through a pass, a layer and the next one come and go
        largest: float = 0 if setting.four_bits else max(1, s.body_parameters / s.layers)
        root = s.embedding_parameters * (1 if s.tied else 2)
        whole = setting.width * (root + 2 * largest)
        summed = 0 if setting.rank else (setting.width + 4) * max(largest, root)  # over the ranks, in fp32
    tokens = micro_batch_tokens(setting)
    kept = kept_bytes(
        s,
        setting.width,
        layer_bytes(setting, tokens),
        setting.recompute,
        setting.activations,
        in_halves=setting.in_halves,
    )
    arrays = (
        2 if setting.tiles else 3
    )  # with its gradient in its place (models/cpu_kernels.py), and what packs the head
    chunk = arrays * 4 * min(tokens * s.vocab, LOGITS)
    rows["gathered layers"] = {phase: whole if phase in ("logprob", "train") else 0.0 for phase in PHASES}
    rows["gradient of a layer"] = {"train": summed}
    if setting.four_bits:
        rows["decoded layer"] = dict.fromkeys(("generate", "logprob", "train"), decoded_layer_bytes(setting))
    rows["activations"] = {"train": kept * tokens, "logprob": activation_bytes(s, setting.width) / s.layers * tokens}
    if s.tower is not None and setting.image:  # a pass has each group's image once, and the tower sees them together
        images = max(1.0, tokens / (setting.prompt + setting.group * setting.mean))
        own = [
            s.tower.activation_bytes(setting.image, setting.width, trained=learns) * images
            for learns in (setting.tower, False)
        ]
        rows["images"] = {"train": own[0], "logprob": own[1]}
    rows["logits chunk"] = {"train": chunk, "logprob": chunk}
    if setting.splits_masters and ranks == 1 and not (setting.rank or setting.offload or setting.host_optimizer):
        rows["masters"] = dict.fromkeys(PHASES, trained * state.master / 2)
        # a few are whole in a step, when a pass has left its room
        room = state.master * min(trained, max(WHOLE_MASTERS, s.embedding_parameters))
        rows["masters"]["train"] += max(
            0.0, room - sum(rows[name]["train"] for name in ("activations", "logits chunk"))
        )
    if not setting.hardware.on_gpu:
        rows["compiled products"] = dict.fromkeys(PHASES, compiled_bytes(setting))
    if each := _route_bytes(setting):
        rows["replayed routes"] = dict.fromkeys(("train", "logprob"), 4.0 * each * tokens)  # int64 of a micro-batch
        if not setting.hardware.on_gpu:
            rows["routes of a step"] = dict.fromkeys(PHASES, setting.samples * (setting.prompt + setting.mean) * each)
    return rows


def reference_bytes(setting: Workload, frozen: dict[str, float], weights: float) -> dict[str, float]:
    """A frozen copy of the policy. A CPU maps a large one from a file: a pass has its embedding and a layer at a time
    (models/mapped_weights.py).
    """
    s, ranks = setting.shape, setting.train_devices
    if setting.hardware.on_gpu or ranks > 1 or setting.offload or weights < LEAST_MAPPED:
        return _scale_phases(frozen, weights / ranks)
    ends = s.embedding_parameters * (1 if s.tied else 2)
    return {"logprob": (ends + s.body_parameters / s.layers) * setting.width}


def compiled_bytes(setting: Workload) -> float:
    """Products of oneDNN, each compiled for one number of rows: those of the numbers of requests that steps of an
    engine have, two in the time of a token, and of a forward and a backward pass for each micro-batch.
    """
    passes = setting.packed_tokens / micro_batch_tokens(setting)
    if setting.in_halves and setting.attends_in_tree:  # the head's gradients alone
        return PROGRAM * min(PROGRAMS, 4 * passes)
    return PROGRAM * min(PROGRAMS, 5 * min(setting.running, setting.samples, 2 * setting.output) + 15 * passes)


def micro_batch_tokens(setting: Workload) -> float:
    """Of the largest micro-batch of a step whose answers all reach their limit; one sample is never divided."""
    longest = setting.samples * setting.output + setting.prompts * setting.prompt
    return max(min(setting.micro, longest / setting.train_devices), setting.prompt + setting.output)


def layer_bytes(setting: Workload, tokens: float) -> float:
    """Activations of a token that a backward pass needs, in bytes."""
    s, long = setting.shape, setting.prompt + setting.mean
    if setting.attends_in_tree:  # as they lie, and one number in the place of a head's scores
        if setting.in_halves:
            return halves_bytes(s, setting.width, 1.0, 1.0)
        return written_out_bytes(s, setting.width, 1.0, 1.0, widened=setting.widened, megatron=setting.megatron)
    written = [setting.new_tokens * long * (setting.mean < SHORT)]
    written.append(setting.prompts * setting.prompt**2 * (setting.prompt < SHORT))
    keys = sum(written) / setting.packed_tokens  # whose scores a token keeps
    if setting.hardware.on_gpu or tokens * s.heads * keys > DENSE * max(1.0, tokens / long):
        return activation_bytes(s, setting.width, megatron=setting.megatron)
    spread = (setting.samples * long + setting.prompts * setting.prompt) / setting.packed_tokens
    if setting.in_halves:
        return halves_bytes(s, setting.width, keys, spread)
    return written_out_bytes(s, setting.width, keys, spread, widened=setting.widened, megatron=setting.megatron)


def packed_bytes(setting: Workload, *, training: bool) -> float:
    """Copies of linear layers and head as oneDNN reads them (models/linear.py), of the policy
    and of a teacher. On a CPU, with one rank.

    While gradients are held there is none of weights that are trained; starting weights and reference have none at all.
    """
    if setting.hardware.on_gpu or setting.train_devices > 1 or setting.four_bits:
        return 0.0
    read = [setting.shape] * (setting.rank > 0 or not training) + [setting.teacher] * setting.teachers
    read += [setting.shape] * (setting.engine_rounds and not setting.split)  # the engine's own
    held = setting.shape.matrix_parameters - setting.shape.expert_parameters
    codes = held if setting.engine_rounds and setting.engine_holds_codes and not setting.split else 0  # are not packed
    return setting.packed_width * (
        sum(
            shape.body_parameters + shape.embedding_parameters - shape.expert_parameters
            for shape in read
            if shape is not None
        )
        - codes
    )


def engine_memory(setting: Workload) -> dict[str, dict[str, float]]:
    """What an engine has on one of its devices. On shared devices of one rank it reads the
    trainer's weights, so they are counted there.
    """
    held = kv_tokens(setting) * setting.shape.kv_bytes(setting.width, tensor=setting.tensor)
    asleep = _cache_rests(setting)
    routes = 0.0 if setting.hardware.on_gpu else route_record_bytes(setting)["routes of cached tokens"]
    return _engine_without_cache(setting) | {
        "KV cache": {phase: 0.0 if phase in asleep else held for phase in PHASES},
        "routes of cached tokens": dict.fromkeys(PHASES, routes),
    }


def route_record_bytes(setting: Workload) -> dict[str, float]:
    """In host memory, of one engine and of the samples of a step: experts and chosen keys, to be replayed."""
    each, tokens = _route_bytes(setting), setting.samples * (setting.prompt + setting.mean)
    return {
        "routes of cached tokens": float(kv_tokens(setting) * setting.data * each),
        "routes of a step": tokens * each,
    }


def _cache_rests(setting: Workload) -> tuple[str, ...]:
    """The phases without the engine's cache: under `offload`, and on a CPU wherever no request is parked then
    (runtime/devices.py).
    """
    idle = not (setting.hardware.on_gpu or setting.staleness or setting.oversamples)
    return ("train", "logprob", "sync") if not setting.split and (setting.offload or idle) else ()


def _route_bytes(setting: Workload) -> int:
    """A token's record, in an engine that has pages for what it runs at its longest."""
    pages = setting.pages or setting.running * (setting.prompt + setting.output)
    return route_bytes(setting.shape, pages) if setting.replays else 0


def _engine_without_cache(setting: Workload) -> dict[str, dict[str, float]]:
    """The same without the cache."""
    s = setting.shape
    own = not setting.has_one_module
    weights = setting.engine_weight_bytes * setting.engine_share
    asleep = _cache_rests(setting)
    rows: dict[str, dict[str, float]] = {}
    if own:
        away = (
            ("train", "logprob") if asleep and setting.offload else ()
        )  # a copy of its own can be let go while others train
        rows["engine weights"] = {phase: 0.0 if phase in away else weights for phase in PHASES}
        rows["sync buckets"] = {"sync": 0.0 if staged_bytes(setting) else 2.0 * BUCKET}
        rows["staged weights"] = {"sync": staged_bytes(setting)}
        if not setting.split and setting.gpus == 1:  # handed over in one process, as they travel
            rows["sync buckets"] = {"sync": setting.sync_bytes}
        if setting.four_bits or setting.engine_holds_codes:
            rows["decoded layer"] = {"generate": decoded_layer_bytes(setting)}
    if setting.reward is not None:
        rows["reward model"] = dict.fromkeys(PHASES, _weight_bytes(setting.reward, setting) / setting.tensor)
    if s.recurrent.layers:
        held = state_slots(setting.running) * s.state_bytes(setting.width) / setting.tensor
        rows["recurrent states"] = {phase: 0.0 if phase in asleep else held for phase in PHASES}
    rows["sampling"] = {"generate": logits_bytes(s.vocab, setting.running) / setting.tensor}
    rows["prefill"] = {"generate": prefill_bytes(s.hidden, setting.prefill, setting.width)}
    return rows


def staged_bytes(setting: Workload) -> float:
    """Bytes of a second version of the weights on an engine's device: sync.kind = "ipc", which
    "auto" is where one node holds all devices.
    """
    beside = setting.split and (
        setting.sync == "ipc" or (setting.sync == "auto" and setting.gpus <= setting.hardware.in_node)
    )
    return setting.sync_bytes * setting.engine_share if beside and setting.hardware.on_gpu else 0.0


def kv_tokens(setting: Workload) -> int:
    """Pages of one engine, by the rule that a run has (planner/resolve.py): every running
    request at its longest, as far as memory goes; of one of its devices, where these have caches of their own.
    """
    s, on = setting.shape, setting.hardware
    left, reserve = on.memory - setting.engine_weight_bytes * setting.engine_share, None
    if on.on_gpu and (setting.split or (setting.offload and not setting.policies)):
        reserve = engine_reserve(
            memory=on.memory,
            hidden=s.hidden,
            vocab=s.vocab,
            width=setting.width,
            prefill=setting.prefill,
            max_running=setting.running,
            staged=staged_bytes(setting),
        )
        left -= sum(
            row.get("generate", 0.0)
            for tenant, row in _engine_without_cache(setting).items()
            if tenant in ("decoded layer", "reward model", "recurrent states")
        )
        if not setting.split:
            stays = sum(row.get("generate", 0.0) for row in trainer_memory(setting).values())
            # on one device the engine reads the trainer's
            left -= stays - setting.weight_bytes if setting.has_one_module else stays
    else:
        left -= SPARE * on.memory + state_slots(setting.running) * s.state_bytes(setting.width)
    return kv_pages(
        setting.pages or "auto",
        max_running=-(-setting.running // setting.data),
        longest=setting.prompt + setting.output,
        page_bytes=max(1, s.kv_bytes(setting.width, tensor=setting.tensor)),
        free_bytes=max(0, int(left)),
        reserve_bytes=reserve,
    ).value


def decoded_layer_bytes(setting: Workload) -> float:
    """The largest layer of a base in 4 bits, while a product reads it."""
    return max(i * o for (i, o), _ in setting.shape.linear_shapes.values()) * setting.width


def _weight_bytes(model: object, setting: Workload) -> float:
    return model.parameter_count * setting.width if model is not None else 0  # type: ignore[attr-defined]


def _scale_phases(when: dict[str, float], bytes_: float) -> dict[str, float]:
    return {phase: here * bytes_ for phase, here in when.items()}


def _drop_empty_rows(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Tenants that have anything, in every phase."""
    return {
        tenant: {phase: row.get(phase, 0.0) for phase in PHASES} for tenant, row in rows.items() if any(row.values())
    }


def pool_sentence(bill: MemoryBill) -> str:
    """Its fullest phase, what is free then, and who has most of it."""
    phase, peak = bill.peak_phase
    free = bill.free_bytes
    fits = f"{free / GB:.1f} GB free" if free >= 0 else f"{-free / GB:.1f} GB too much"
    return (
        f"{bill.pool}: most in {phase}, {peak / GB:.2f} of {bill.memory / GB:.0f} GB, {fits}; "
        f"{bill.largest_tenant} is {bill.largest_share:.0%} of it"
    )
