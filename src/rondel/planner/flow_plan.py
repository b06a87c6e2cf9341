"""The whole answer to one setting of a flow, as plain data under the names that `make_plan` has,
and the same in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from rondel.planner import cost, flow_cost, split
from rondel.planner.flow_workload import PROMPT, FlowWorkload
from rondel.planner.hardware import GB
from rondel.planner.memory import bill_tables, pool_sentence
from rondel.planner.overlap import StepTimes, longest_answer_bound, stages_overlap
from rondel.planner.traffic import describe_layout


def make_flow_plan(setting: FlowWorkload) -> dict[str, Any]:
    """JSON through and through; what a table shows is in here."""
    s, samples = setting.shape, setting.samples
    trained, each = flow_cost.train_seconds(setting), setting.output * flow_cost.draw_seconds(setting)
    work = samples * each / setting.engine_count
    longest = setting.drawn_together * each
    drawn = max(work, longest_answer_bound(longest, setting.staleness))
    ways = cost.sync_options(setting)
    r, t = samples / work / setting.engine_count, samples / trained / setting.train_devices
    trainers = setting.trainers if setting.split else 0
    overlap = stages_overlap(setting.split, setting.staleness)
    divided = split.advise_split(setting.gpus, r, t, trainers=trainers, most=inf, overlap=overlap)
    step = StepTimes.with_update(drawn, trained, update=ways[0].seconds, pause=ways[0].pause, overlap=overlap)
    bills = flow_cost.flow_memory_bills(setting)
    attention = s.attention_flops / s.forward_flops
    return {
        "model": {
            "name": s.name,
            "parameters": s.parameter_count,
            "active": s.parameter_count,
            "trained": s.parameter_count,
            "four_bits": False,
            "adapter": False,
            "tower": 0,
            "tokens": s.tokens,
            "dim": s.dim,
        },
        "policies": [],
        "devices": {
            "hardware": setting.hardware.name,
            "count": setting.gpus,
            "place": setting.place,
            "train": setting.train_devices,
            "generate": setting.engine_count,
            "devices_an_engine": 1,
            "mesh": str(setting.mesh),
            "source": setting.hardware.source,
        },
        "work": {
            "prompts": setting.prompts,
            "group": setting.group,
            "samples": samples,
            "steps": setting.output,
            "trained_steps": setting.trained_steps,
            "forward_flops": s.forward_flops,
            "attention_flops": s.attention_flops,
            "train_flops": s.train_flops(recompute=setting.recompute == "layers", shared=setting.mesh.cp > 1),
            "pass_steps": setting.pass_steps,
            "passes": setting.passes,
            "context_bytes": flow_cost.context_bytes(setting, setting.mesh),
            "shard_bytes": flow_cost.shard_bytes(setting, setting.mesh),
            "text": f"{setting.prompts} prompts x {setting.group} samples of {s.tokens:,} tokens ({s.dim:,} numbers) "
            f"in {setting.output} denoising steps, {setting.trained_steps} of them trained; a step of one is "
            f"{s.forward_flops / 1e12:.4g} TFLOP forward, {attention:.0%} of it attention",
        },
        "memory": bill_tables(bills),
        "beside": {},
        "fits": least_room(setting) >= 0,
        "generate": {
            "seconds": drawn,
            "samples_per_second": samples / drawn,
            "samples_an_engine": setting.drawn_together,
            "longest_answer_seconds": longest,
            "text": f"{samples / drawn:.4g} samples/s, {setting.drawn_together} an engine together",
        },
        "train": {
            "seconds": trained,
            "samples_per_second": samples / trained,
            "text": f"{samples / trained:.4g} samples/s in {setting.passes} passes of {setting.pass_steps} steps a "
            f"rank; in one pass a rank receives {flow_cost.context_bytes(setting, setting.mesh) / GB:.4g} GB of keys, "
            f"values and their gradients, in an update {flow_cost.shard_bytes(setting, setting.mesh) / GB:.4g} GB of "
            "weights and gradients",
        },
        "sync": [way._asdict() for way in ways],
        "interrupt": flow_cost.interrupt_seconds(setting),
        "step_seconds": step.seconds,
        "split": divided._asdict(),
        "placement": split.recommend_placement(setting.gpus),
        "layouts": [describe_layout(row) for row in _listed_layouts(setting)],
        "advice": advice_sentences(setting),
        "assumed": [*setting.assumed, *_assumptions(setting)],
    }


def _listed_layouts(setting: FlowWorkload) -> list[flow_cost.FlowLayout]:
    """The recipe's own, the three best others that Rondel runs, and the two best that it does not."""
    found = [row for row in flow_cost.flow_layouts(setting) if row.mesh.shape != setting.mesh.shape]
    ours = [row for row in found if row.is_supported][:3]
    return [
        flow_cost.make_layout(setting, setting.mesh),
        *ours,
        *[row for row in found if not row.is_supported][:2],
    ]


def least_room(setting: FlowWorkload) -> float:
    """Bytes free at the fullest place; below 0 it does not fit."""
    return min(bill.free_bytes for bill in flow_cost.flow_memory_bills(setting))


def suggest_changes(setting: FlowWorkload) -> Iterator[tuple[str, FlowWorkload]]:
    """What a user could write instead, with the setting that it leads to."""
    if setting.recompute == "none":
        yield (
            'trainer.memory.recompute = "layers": a third more arithmetic in training, the same result',
            replace(setting, recompute="layers"),
        )
    if setting.pass_samples > 1:
        fewer = setting.shape.tokens
        yield f"trainer.micro_tokens = {fewer}: one sample a pass, the same result", replace(setting, micro=fewer)
    if setting.drawn_together > 1:
        yield "engine.max_running = 1: one sample a pass of an engine, the same result", replace(setting, running=1)
    if setting.trained_steps > 1:
        every = setting.every * 2
        yield f"task.env.every = {every}: half as many steps are trained", replace(setting, every=every)
    s, now = setting.shape, setting.mesh
    for possible, mesh, what in (
        (2 * now.cp <= s.tokens, replace(now, cp=2 * now.cp), "half of a sample's tokens"),
        (
            (s.heads % (2 * now.tp), s.inner % (2 * now.tp)) == (0, 0),
            replace(now, tp=2 * now.tp),
            "half of the heads it had",
        ),
    ):
        more = mesh.world - now.world
        trainers = setting.trainers + more if setting.split else 0
        if possible:
            wider = replace(setting, mesh=mesh, gpus=setting.gpus + more, trainers=trainers)
            yield f"place.mesh = {mesh}: twice the devices that train, each with {what}", wider


def advice_sentences(setting: FlowWorkload) -> list[str]:
    """What dominates, whether it fits, what to change first; several changes together where none is enough alone."""
    told = [pool_sentence(bill) for bill in flow_cost.flow_memory_bills(setting)]
    now = least_room(setting)
    if now >= 0:
        return told
    rows = sorted(
        ((words, least_room(other) - now) for words, other in suggest_changes(setting)), key=lambda row: -row[1]
    )
    for words, saved in [row for row in rows if row[1] > 0][:3]:
        told.append(f"change: {words} ({saved / GB:.1f} GB more room{', then it fits' * (saved + now >= 0)})")
    taken: list[str] = []
    while least_room(setting) < 0 and len(taken) < 12:
        words, best = max(suggest_changes(setting), key=lambda change: least_room(change[1]), default=("", setting))
        if least_room(best) <= least_room(setting):
            break
        key = words.partition(":")[0]
        taken = [*(known for known in taken if known.partition(" = ")[0] != key.partition(" = ")[0]), key]
        setting = best
    if least_room(setting) < 0:
        told.append(
            f"no change that exists makes it fit: {-least_room(setting) / GB:.1f} GB too much remain; take a smaller "
            "model or larger devices (an engine is one device, and has the whole model)"
        )
    elif len(taken) > 1:
        told.append(f"together they fit: {'; '.join(taken)}")
    return told


def _assumptions(setting: FlowWorkload) -> list[str]:
    on = setting.hardware
    return [
        f"{on.name}: {on.flops / 1e12:.3g} TFLOP/s in 16 bits and half of that in float32, of which "
        f"{on.efficiency:.0%} are reached ({on.source})",
        f"prompts of {PROMPT} tokens, whose work is not counted; attention never writes its scores out",
        "points lie whole on every rank, activations and keys in parts; no figure was compared with a GPU",
    ]
