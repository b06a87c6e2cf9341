"""How long things take, from rooflines: a pass takes the longer of its arithmetic and its reading.  No torch.

decode step of b requests   overhead·L + max(weights / bandwidth, 2·N·b / flops) + b·context·kv / bandwidth
training                    (6 or, recomputed, 8)·N a token + attention;  forward passes beside it 2·N
sync                        bytes of the weights / bandwidth of the way
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from rondel.planner.activations import gated_size
from rondel.planner.hardware import GB, Hardware
from rondel.planner.memory import bytes_per_number, memory_bills
from rondel.planner.overlap import longest_answer_bound
from rondel.planner.resolve import COMMIT, SPARE
from rondel.planner.shapes import ModelShape
from rondel.planner.stored_bytes import nf4_bytes
from rondel.planner.traffic import expert_traffic
from rondel.planner.workload import Workload

if TYPE_CHECKING:
    from rondel.planner.flow_workload import FlowWorkload

DISK = 2 * GB  # bytes a second of a shared file system, a write and a read
CHANGED = 0.03  # share of weights whose bits a step changes, as verl measured 1-3 %; each is sent with its place
DELTA = CHANGED * (2 + 4) / 2


# -- generation --------------------------------------------------------------------------------------


def batch_tokens(prompts: int, group: int, length: float) -> float:
    return prompts * group * length


def rollout_seconds(new_tokens: float, rate: float, devices: int = 1) -> float:
    """8·64·32768 tokens at 1200 tok/s -> 3.88 h; on 8 devices 29.1 min."""
    return new_tokens / (rate * devices)


def decode_parameters(shape: ModelShape, requests: float) -> float:
    """Numbers that a decode step of so many requests reads: of E experts those that any of them is sent to."""
    if not shape.experts:
        return shape.active_parameters
    away = (1 - shape.per_token / shape.experts) ** requests
    return (
        shape.active_parameters
        - shape.expert_parameters * shape.per_token / shape.experts
        + shape.expert_parameters * (1 - away)
    )


def decode_seconds(
    shape: ModelShape,
    on: Hardware,
    requests: float,
    context: float,
    *,
    tensor: int = 1,
    data: int = 1,
    width: float = 2,
    four_bits: bool = False,
) -> float:
    """One step of one engine of `tensor` devices: a token for each of `requests`, which have
    `context` tokens behind them on average.

    A base in 4 bits is read, written whole, and read again. `data` devices read everything but experts each, for their
    own requests, and exchange tokens in each layer with experts.
    """
    bandwidth, flops = on.bandwidth * on.stream * tensor, on.flops * on.decode_efficiency * tensor * 2 / width
    read, requests = decode_parameters(shape, requests), requests / data
    if data > 1:
        own = shape.active_parameters - shape.expert_parameters * shape.per_token / shape.experts
        read = own + (read - own) / data
    weights = max(read * width / bandwidth, 2 * shape.active_parameters * requests / flops)
    weights += exchange_bytes(shape, requests * data, data, width) / on.link
    if four_bits:
        weights += decode_pass_bytes(shape, width) / bandwidth
    cache = requests * context * tensor * shape.kv_bytes(width, tensor=tensor)
    return on.overhead * shape.layers + weights + cache / bandwidth


def exchange_bytes(shape: ModelShape, tokens: float, data: int, width: float) -> float:
    """What one of `data` devices sends in a pass of so many tokens in all, to the experts of others and back, where
    routes are even: (L - dense)·2(n-1)/n·k·T·D·width/n.
    """
    mixtures = shape.layers - shape.dense_layers
    return mixtures * expert_traffic(data, tokens * shape.hidden * width, shape.per_token)


def held_codes_seconds(setting: Workload) -> float:
    """Of a decode step, to read codes and write what they decode to, where an engine keeps its layers so."""
    if not setting.engine_holds_codes:
        return 0.0
    held = setting.shape.matrix_parameters - setting.shape.expert_parameters
    return held * (setting.sent_bits / 8 + setting.width) / (setting.hardware.bandwidth * setting.hardware.stream)


def decode_pass_bytes(shape: ModelShape, width: float) -> float:
    """Bytes that decoding all layers in 4 bits reads and writes."""
    return nf4_bytes(shape, 0) + width * sum(i * o * count for (i, o), count in shape.linear_shapes.values())


def prefill_seconds(
    shape: ModelShape, on: Hardware, prompt_tokens: float, *, tensor: int = 1, width: float = 2
) -> float:
    return 2 * shape.active_parameters * prompt_tokens / (on.flops * on.efficiency * tensor * 2 / width)


def decode_concurrency(setting: Workload) -> int:
    """Requests that one engine decodes at once: what it may, what its memory holds, what there is."""
    return _most_requests(setting, -(-(setting.staleness + 1) * setting.samples // setting.engine_count))


def group_concurrency(setting: Workload) -> int:
    """The same of an engine that has whole groups, of which one engine may have one more than another."""
    return _most_requests(
        setting, -(-(setting.staleness + 1) * setting.prompts // setting.engine_count) * setting.group
    )


def _most_requests(setting: Workload, waiting: int) -> int:
    return max(1, min(setting.running, waiting, int(_cache_tokens(setting) // (setting.prompt + setting.mean))))


def _cache_tokens(setting: Workload) -> float:
    """Tokens that fit beside everything else of an engine while it generates."""
    bill = next(bill for bill in memory_bills(setting) if bill.pool in ("engine", "shared"))  # of the main policy
    cache = bill.rows.get("KV cache", {}).get("generate", 0.0)
    free = bill.memory * (1 - SPARE) - bill.phase_bytes("generate") + cache
    each = setting.shape.kv_bytes(setting.width, tensor=setting.tensor)
    return setting.data * max(setting.prompt + setting.mean, min(free, cache) / each)


class GenerationTime(NamedTuple):
    """`seconds` of a step's answers and their `rate` in tokens a second; `longest`:
    seconds of the longest answer alone.

    work      seconds that the engines need with full batches
    seconds   max(work, longest / (S + 1)): an answer is admitted at most S versions before it is
              trained, and is written one token after the other
    """

    rate: float
    seconds: float
    longest: float
    requests: int
    work: float


def generation_time(setting: Workload) -> GenerationTime:
    requests = decode_concurrency(setting)
    middle = setting.prompt + setting.mean / 2
    arguments = decode_arguments(setting)
    step = decode_seconds(setting.shape, setting.hardware, requests, middle, **arguments)
    step += held_codes_seconds(setting)
    scale = measured_decode_scale(setting)
    step *= scale
    prefill = prefill_seconds(
        setting.shape,
        setting.hardware,
        setting.prompts * setting.prompt / setting.engine_count,
        tensor=setting.prefills or setting.engine_size,
        width=setting.width,
    )
    decoding = setting.new_tokens / (setting.engine_count * requests / step)
    looped = setting.samples * setting.hardware.answer / setting.engine_count
    pictures = setting.prompts / setting.engine_count  # one device of an engine has the tower at work
    looking = look_seconds(setting, pictures, 1, setting.hardware.efficiency)
    late = setting.prompt + setting.output / 2
    alone = decode_seconds(setting.shape, setting.hardware, 1, late, **arguments) * setting.output * scale
    prompts = prefill + (0.0 if setting.encoders else looking)
    work = looped + (max(decoding, prompts) if setting.prefills else decoding + prompts)
    work = max(work, looking) if setting.encoders else work
    seconds = max(work, longest_answer_bound(alone, setting.staleness))
    return GenerationTime(setting.new_tokens / seconds, seconds, alone, requests, work)


def decode_arguments(setting: Workload) -> dict[str, Any]:
    """Of `decode_seconds`."""
    return {
        "tensor": setting.tensor,
        "data": setting.data,
        "width": setting.width,
        "four_bits": setting.four_bits,
    }


def measured_decode_scale(setting: Workload) -> float:
    """By how much decode steps are longer than estimated where a device's rate was measured: tokens a second of one
    device with as many requests as an engine decodes at once.
    """
    if not setting.generate_rate:
        return 1.0
    requests, middle = decode_concurrency(setting), setting.prompt + setting.mean / 2
    estimated = decode_seconds(
        setting.shape,
        setting.hardware,
        requests,
        middle,
        **decode_arguments(setting),
    )
    return requests / (setting.generate_rate * setting.engine_size) / estimated


HOST_LINK = 25e9  # bytes a second between a GPU and its host: what PCIe 4.0 x16 reaches, an assumption
HOST_STREAM = 100e9  # of the host's memory, an assumption


# -- training ----------------------------------------------------------------------------------------


def forward_flops(shape: ModelShape, context: float) -> float:
    """A token's: 2·N, and causal attention over half the context, 2·2·H·d·c/2 a layer."""
    return 2 * shape.active_parameters + 2 * shape.layers * shape.heads * shape.head * context


def recomputed_flops(shape: ModelShape, context: float, recompute: str) -> float:
    """Of a token, a second time in the backward pass: its forward pass, or three products of the feed-forward parts."""
    parts = {"none": 0.0, "mlp": 2 * 3 * shape.hidden * 3 * gated_size(shape) / 4}
    return parts[recompute] if recompute in parts else forward_flops(shape, context)


def train_seconds(setting: Workload) -> float:
    return tokens_seconds(setting) + setting.epochs * (
        calls_seconds(setting) + setting.updates * update_seconds(setting) + host_traffic_seconds(setting)
    )


def tokens_seconds(setting: Workload) -> float:
    """Forward and backward of every packed token, and the passes of those who only look:
    proximal, reference, teacher, critic.
    """
    if setting.train_rate:
        return setting.packed_tokens / (setting.train_rate * setting.train_devices)
    context = setting.prompt + setting.mean
    own, passes = forward_flops(setting.shape, context), setting.epochs
    each = own * ((3 - (1 if setting.rank else 0)) * passes + (1 if setting.proximal else 0))
    each += passes * recomputed_flops(setting.shape, context, setting.recompute)
    reference = setting.shape if setting.base_reference else setting.reference
    for other, times in ((reference, 1), (setting.teacher, 1), (setting.critic, 1 + 3 * passes)):
        each += times * forward_flops(other, context) if other is not None else 0
    reward = forward_flops(setting.reward, context) * setting.new_tokens if setting.reward is not None else 0
    flops = setting.train_devices * setting.hardware.flops * setting.hardware.efficiency * 2 / setting.width
    looks = setting.prompts * (
        (3 if setting.tower else 1) * passes + (1 if setting.proximal else 0) + (1 if reference else 0)
    )
    looking = look_seconds(setting, looks, setting.train_devices, setting.hardware.efficiency)
    return (each * setting.packed_tokens + reward) / flops + looking


def look_seconds(setting: Workload, images: float, devices: float, efficiency: float) -> float:
    """The tower over so many images."""
    if setting.shape.tower is None or not setting.image:
        return 0.0
    return (
        setting.shape.tower.forward_flops(setting.image)
        * images
        / (devices * setting.hardware.flops * efficiency * 2 / setting.width)
    )


def calls_seconds(setting: Workload) -> float:
    """What passes cost by being passes, and answers by being answers."""
    passes = ceil(setting.packed_tokens / setting.train_devices / setting.micro)
    decoding = (
        2 * passes * decode_pass_bytes(setting.shape, setting.width) / setting.hardware.bandwidth
        if setting.four_bits
        else 0.0
    )
    return (
        decoding
        + passes * setting.shape.layers * setting.hardware.calls
        + setting.samples / setting.train_devices * setting.hardware.row
    )


def update_seconds(setting: Workload) -> float:
    """AdamW is bound by memory: masters, gradients, moments and the compute copy, in and out.

    On the host by its own; what travels: `host_traffic_seconds`.
    """
    state, on_host = bytes_per_number(setting), setting.host_optimizer
    each = 4 + state.gradient + state.moments if on_host else state.persistent_bytes
    bandwidth = HOST_STREAM if on_host else setting.hardware.bandwidth
    return 2 * each * setting.trained_parameters / setting.train_devices / bandwidth


def host_traffic_seconds(setting: Workload) -> float:
    """Of an epoch with the optimizer on the host: from each micro-batch a gradient of each number, which is added
    there, and from each update a weight back. Inputs of layers travel beside the arithmetic and are not counted.
    """
    if not setting.host_optimizer:
        return 0.0
    passes, numbers = ceil(setting.packed_tokens / setting.micro), setting.trained_parameters
    width = 4 if setting.rank else setting.width
    return numbers * (width * (passes + setting.updates) / HOST_LINK + 2 * 4 * passes / HOST_STREAM)


# -- sync --------------------------------------------------------------------------------------------


def transfer_seconds(bytes_: float, bandwidth: float) -> float:
    """2N/BW: 140 GB take 0.156 s at 900 GB/s and 2.8 s at 50."""
    return bytes_ / bandwidth


class SyncTime(NamedTuple):
    """`seconds` on the trainer's critical path; `pause`: what the engines stand still of it."""

    kind: str
    seconds: float
    pause: float
    why: str


def sync_options(setting: Workload | FlowWorkload) -> list[SyncTime]:
    """How new weights can travel in this setting: the recipe's sync.kind first, then the quickest."""
    on = setting.hardware
    full = setting.sync_bytes
    if not setting.split and setting.gpus == 1:
        if setting.has_one_module:
            return [SyncTime("tensor", 0.0, 0.0, "one module for both sides: 0 bytes move")]
        seconds = transfer_seconds(2 * (full + setting.weight_bytes), on.bandwidth)
        why = f"{full / GB:.2f} GB encoded and decoded in one process, at {on.bandwidth / GB:.0f} GB/s of memory"
        return [SyncTime("tensor", seconds, seconds, why)]
    inside = setting.gpus <= on.in_node
    road, name = (on.link, "the node's links") if inside else (on.network, "the network")
    what = f"{full / GB:.2f} GB{' (the adapter alone)' if setting.rank else ''}"
    found = [
        SyncTime(
            "distributed",
            t := transfer_seconds(full, road),
            t,
            f"{what} over {name} at {road / GB:.0f} GB/s, to all engines at once",
        ),
        SyncTime(
            "disk",
            t := 2 * transfer_seconds(full, DISK),
            COMMIT,
            f"{what} written and read at {DISK / GB:.0f} GB/s; staged beside the old",
        ),
        SyncTime(
            "delta",
            t := 2 * transfer_seconds(full * DELTA, DISK),
            COMMIT,
            f"{CHANGED:.0%} of {what} and their places, through files",
        ),
    ]
    if setting.sync == "tcp":  # no choice of "auto"
        each = full * setting.engine_count / setting.train_devices
        found.append(
            SyncTime(
                "tcp",
                t := transfer_seconds(max(each, full), road),
                COMMIT,
                f"{what} for each engine, from all {setting.train_devices} ranks at once, over {name} at "
                f"{road / GB:.0f} GB/s; staged beside the old",
            )
        )
    if inside:
        found.append(
            SyncTime(
                "ipc",
                t := transfer_seconds(full, on.link),
                COMMIT,
                f"{what} read from the trainer's memory; staged beside the old",
            )
        )
    return sorted(found, key=lambda way: (way.kind != setting.sync, way.seconds))


def interrupt_seconds(setting: Workload) -> dict[str, float]:
    """What an update costs the engines by what happens to requests in flight, beside the transfer.

    hold: nothing but the swap.  drain: until the longest has ended.  abort: what was read
    and written of all that run, read once more.
    """
    found = generation_time(setting)
    again = found.requests * (setting.prompt + setting.mean / 2)
    return {
        "hold": COMMIT,
        "drain": found.longest,
        "abort": prefill_seconds(
            setting.shape, setting.hardware, again, tensor=setting.engine_size, width=setting.width
        ),
    }
