"""What would help most, tried: each change is planned, and told with what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rondel.planner.hardware import GB
from rondel.planner.host_memory import sentences_beside
from rondel.planner.memory import memory_bills, pool_sentence, staged_bytes
from rondel.planner.workload import Workload


def suggest_changes(setting: Workload) -> Iterator[tuple[str, Workload]]:
    """What a user could write instead, least intrusive first: keys that exist, with the setting they lead to."""
    on_gpu, longest = setting.hardware.on_gpu, setting.prompt + setting.output
    if setting.micro > 512 and setting.micro > longest:
        fewer = max(512, setting.micro // 4)
        yield f"trainer.micro_tokens = {fewer}: fewer tokens a pass, the same result", replace(setting, micro=fewer)
    if setting.recompute == "none":
        yield (
            'trainer.memory.recompute = "layers": a third more arithmetic in training, the same result',
            replace(setting, recompute="layers"),
        )
    elif setting.recompute == "layers" and setting.activations == "device":
        where = "host" if on_gpu else "disk"
        yield (
            f'trainer.memory.activations = "{where}": inputs of layers wait there for the backward pass, '
            "the same result",
            replace(setting, activations=where),
        )
    if on_gpu and not setting.host_optimizer and not setting.rank and setting.train_devices == 1:
        yield (
            'trainer.memory.optimizer = "host": masters, gradients and moments in host memory, '
            "the same step by the CPU",
            replace(setting, host_optimizer=True),
        )
    if not setting.split and not setting.offload and on_gpu:
        yield (
            "trainer.memory.offload = true: optimizer, reference and cache take turns on the device",
            replace(setting, offload=True),
        )
    if staged_bytes(setting):
        yield (
            'sync.kind = "distributed": no second version of the weights on the engine',
            replace(setting, sync="distributed"),
        )
    if setting.running > 32:
        running = setting.running // 2
        yield (
            f"engine.max_running = {running}: half the cache, fewer tokens a second",
            replace(setting, running=running),
        )
    if setting.reference is not None:
        yield "algo.kl = {}: no reference model", replace(setting, reference=None)
    if setting.critic is not None:
        yield 'algo.kind = "grpo": a row without a critic', replace(setting, critic=None)
    if setting.optimizer == "adamw" and not setting.rank and setting.train_devices == 1:
        yield (
            'trainer.optimizer = { kind = "adamw_8bit" }: moments in 8 bits, 2 bytes of a number in place of 8',
            replace(setting, optimizer="adamw_8bit"),
        )
    if not setting.rank:
        yield (
            'model.adapter = { kind = "lora", rank = 16 }: trains few numbers',
            replace(setting, rank=16, reference=None, base_reference=setting.reference is not None),
        )
    elif not setting.four_bits and not setting.shape.experts:
        yield (
            'model.adapter.kind = "qlora": the base in 4 bits, slower to generate with',
            replace(setting, four_bits=True),
        )
    if (
        on_gpu
        and setting.split
        and setting.data == 1
        and setting.tensor * 2 <= setting.engine_devices
        and not setting.rank
    ):
        tp = 2 * setting.tensor
        yield (
            f"place.engines = {{ count = {setting.engine_devices // tp}, tp = {tp} }}: engines whose devices share "
            "the weights",
            replace(setting, tensor=tp),
        )
    if on_gpu and setting.split:
        ranks = 2 * setting.trainers
        yield (
            f"place.ranks = {ranks}: twice the devices that train",
            replace(setting, gpus=setting.gpus + setting.trainers, trainers=ranks),
        )
    elif on_gpu:
        ranks, apart = setting.gpus, 'place.kind = "split"'
        words = f"{apart}, place.ranks = {ranks}: engines on {ranks} more devices"
        yield words, replace(setting, place="split", gpus=2 * ranks, trainers=ranks, offload=False)


def least_room(setting: Workload) -> float:
    return min(bill.free_bytes for bill in memory_bills(setting))


def rank_changes(setting: Workload) -> list[tuple[str, float, bool]]:
    """(change, bytes more room at the tightest place, whether all fits then), the most useful first."""
    now = least_room(setting)
    found = [(words, least_room(other) - now, least_room(other) >= 0) for words, other in suggest_changes(setting)]
    return sorted((row for row in found if row[1] > 0), key=lambda row: (-row[2], -row[1]))


def bill_sentences(setting: Workload) -> list[str]:
    """The bill in sentences: what dominates, whether it fits, what to change first."""
    told = [pool_sentence(bill) for bill in memory_bills(setting)]
    told += sentences_beside(setting)
    if least_room(setting) < 0:
        for change, saved, enough in rank_changes(setting)[:3]:
            told.append(
                f"change: {change} ({saved / GB:.1f} GB more room, {'then it fits' if enough else 'not enough alone'})"
            )
        if not any(enough for _, _, enough in rank_changes(setting)):
            told.append(combined_advice(setting))
    return told


def combined_advice(setting: Workload) -> str:
    """Several changes, each time the one that helps most, until it fits."""
    steps: list[str] = []
    while least_room(setting) < 0:
        best = max(suggest_changes(setting), key=lambda change: least_room(change[1]), default=None)
        if best is None or least_room(best[1]) <= least_room(setting) or len(steps) == 12:
            return (
                f"no change that exists makes it fit: {-least_room(setting) / GB:.1f} GB too much remain; take a "
                f"smaller model or larger devices"
            )
        step = best[0].partition(":")[0]
        steps = [*(known for known in steps if known.partition(" = ")[0] != step.partition(" = ")[0]), step]
        setting = best[1]
    return f"together they fit: {'; '.join(steps)}"
