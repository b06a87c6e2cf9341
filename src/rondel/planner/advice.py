"""What would help most, tried: each change is planned, and told with what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rondel.planner.hardware import GB
from rondel.planner.memory import bills, staged
from rondel.planner.setting import Setting


def changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """What a user could write instead, least intrusive first."""
    on_gpu = setting.hardware.on_gpu
    if setting.micro > 4096:
        yield "trainer.micro_tokens = 4096: fewer tokens a pass, the same result", replace(setting, micro=4096)
    if not setting.split and not setting.offload and on_gpu:
        yield "trainer.offload = true: optimizer, reference and cache take turns on the device", replace(setting, offload=True)
    if staged(setting):
        yield 'sync.kind = "distributed": no second version of the weights on the engine', replace(setting, sync="distributed")
    if setting.running > 32:
        fewer = setting.running // 2
        yield f"engine.max_running = {fewer}: half the cache, fewer tokens a second", replace(setting, running=fewer)
    if not setting.checkpointing:
        yield (
            "recomputing activations in the backward pass (a third more arithmetic; not in Rondel's own trainer)",
            replace(setting, checkpointing=True),
        )
    if setting.reference is not None:
        yield "algo.kl = {}: no reference model", replace(setting, reference=None)
    if setting.critic is not None:
        yield "a row without a critic, such as algo.kind = 'grpo'", replace(setting, critic=None)
    if not setting.rank:
        yield 'model.adapter = { kind = "lora", rank = 16 }: trains few numbers', replace(setting, rank=16, reference=None)
    elif not setting.four_bits and not setting.shape.experts:
        yield 'model.adapter.kind = "qlora": the base in 4 bits, slower to generate with', replace(setting, four_bits=True)
    if on_gpu:
        more = replace(setting, gpus=2 * setting.gpus, trainers=2 * setting.trainers, tensor=setting.tensor)
        yield f"{more.gpus} devices instead of {setting.gpus}", more
        if setting.split and setting.tensor * 2 <= setting.engine_devices:
            yield f"engines of {2 * setting.tensor} devices", replace(setting, tensor=2 * setting.tensor)


def worst(setting: Setting) -> float:
    return min(bill.room for bill in bills(setting))


def helps(setting: Setting) -> list[tuple[str, float, bool]]:
    """(change, bytes more room at the tightest place, whether all fits then), the most useful first."""
    now = worst(setting)
    found = [(words, worst(other) - now, worst(other) >= 0) for words, other in changes(setting)]
    return sorted((row for row in found if row[1] > 0), key=lambda row: (-row[2], -row[1]))


def words(setting: Setting) -> list[str]:
    """The bill in sentences: what dominates, whether it fits, what to change first."""
    told = []
    for bill in bills(setting):
        phase, peak = bill.peak
        share = bill.rows[bill.largest][phase] / peak
        fits = f"{bill.room / GB:.1f} GB free" if bill.room >= 0 else f"{-bill.room / GB:.1f} GB too much"
        told.append(
            f"{bill.pool}: most in {phase}, {peak / GB:.2f} of {bill.memory / GB:.0f} GB, {fits}; {bill.largest} is {share:.0%} of it"
        )
    if worst(setting) < 0:
        for change, saved, enough in helps(setting)[:3]:
            told.append(f"change: {change} ({saved / GB:.1f} GB more room, {'then it fits' if enough else 'not enough alone'})")
        if not any(enough for _, _, enough in helps(setting)):
            told.append(together(setting))
    return told


def together(setting: Setting) -> str:
    """Several changes, each time the one that helps most, until it fits."""
    steps: list[str] = []
    while worst(setting) < 0:
        best = max(changes(setting), key=lambda change: worst(change[1]), default=None)
        if best is None or worst(best[1]) <= worst(setting) or len(steps) == 8:
            return f"no change that is known here makes it fit: {-worst(setting) / GB:.1f} GB too much remain; take a smaller model or larger devices"
        steps.append(best[0].partition(":")[0].partition(" (")[0])
        setting = best[1]
    return f"together they fit: {'; '.join(steps)}"
