"""The whole answer to one setting, as plain data: memory, times, split, sync, layouts, and the same in words."""

from __future__ import annotations

from typing import Any

from rondel.planner import advice, cost, split
from rondel.planner.flow_plan import make_flow_plan
from rondel.planner.flow_workload import FlowWorkload
from rondel.planner.hardware import GB
from rondel.planner.host_memory import bytes_beside
from rondel.planner.layout import ParallelLayout, parallel_layouts
from rondel.planner.memory import bill_tables, kv_tokens, memory_bills
from rondel.planner.overlap import StepTimes, longest_answer_bound, stages_overlap
from rondel.planner.traffic import describe_layout
from rondel.planner.workload import Workload


def make_plan(setting: Workload | FlowWorkload) -> dict[str, Any]:
    """JSON through and through; what a table shows is in here."""
    if isinstance(setting, FlowWorkload):
        return make_flow_plan(setting)
    generated, trained = cost.generation_time(setting), cost.train_seconds(setting)
    ways = cost.sync_options(setting)
    r = setting.samples / generated.work / setting.engine_devices
    t = setting.samples / trained / setting.train_devices
    most, most_overlapped = (
        setting.samples / longest_answer_bound(generated.longest, stale)
        for stale in (setting.staleness, max(1, setting.staleness))
    )
    overlap = stages_overlap(setting.split, setting.staleness)
    divided = split.advise_split(
        setting.gpus,
        r,
        t,
        trainers=setting.trainers if setting.split else 0,
        unit=setting.engine_unit,
        most=most,
        most_overlapped=most_overlapped,
        overlap=overlap,
    )
    step = StepTimes.with_update(
        generated.seconds, trained, update=ways[0].seconds, pause=ways[0].pause, overlap=overlap
    )
    return {
        "model": {
            "name": setting.shape.name,
            "parameters": setting.shape.parameter_count,
            "active": setting.shape.active_parameters,
            "trained": setting.trained_parameters,
            "four_bits": setting.four_bits,
            "adapter": setting.rank > 0,
            "tower": setting.shape.tower.parameter_count if setting.shape.tower else 0,
            "image": setting.image,
            "kv_bytes_a_token": setting.shape.kv_bytes(setting.width),
            "source": setting.shape.source,
        },
        "policies": [
            {
                "name": other.name,
                "model": other.shape.name,
                "parameters": other.shape.parameter_count,
                "frozen": other.frozen,
            }
            for other in setting.policies
        ],
        "devices": {
            "hardware": setting.hardware.name,
            "count": setting.gpus,
            "place": setting.place,
            "train": setting.train_devices,
            "generate": setting.engine_devices,
            "devices_an_engine": setting.engine_unit,
            "engine": _engine_layout(setting),
            "source": setting.hardware.source,
        },
        "work": {
            "prompts": setting.prompts,
            "group": setting.group,
            "samples": setting.samples,
            "prompt_tokens": setting.prompt,
            "output_tokens": setting.output,
            "mean_tokens": setting.mean,
            "packed_tokens": setting.packed_tokens,
            "text": f"{setting.prompts} prompts of {setting.prompt} tokens x {setting.group} answers of "
            f"{setting.mean:.4g} (at most {setting.output}): {setting.packed_tokens:.4g} tokens to train on",
        },
        "memory": bill_tables(memory_bills(setting)),
        "beside": bytes_beside(setting),
        "fits": advice.least_room(setting) >= 0,
        "generate": {
            "seconds": generated.seconds,
            "tokens_per_second": generated.rate,
            "requests_an_engine": generated.requests,
            "longest_answer_seconds": generated.longest,
            "text": f"{generated.rate:.4g} tokens/s, {generated.requests} requests an engine",
        },
        "train": {
            "seconds": trained,
            "tokens_per_second": setting.packed_tokens / trained,
            "text": f"{setting.packed_tokens / trained:.4g} tokens/s",
        },
        "sync": [way._asdict() for way in ways],
        "interrupt": cost.interrupt_seconds(setting),
        "step_seconds": step.seconds,
        "split": divided._asdict(),
        "placement": split.recommend_placement(setting.gpus),
        "layouts": [describe_layout(row) for row in _listed_layouts(setting)],
        "advice": advice.bill_sentences(setting),
        "assumed": [*setting.assumed, *list_assumptions(setting)],
    }


def _engine_layout(setting: Workload) -> str:
    """How an engine of several devices lies over them, and what its own way costs."""
    beside = ["prefill = true"] * (setting.prefills > 0) + [f"encoders = {setting.encoders}"] * (setting.encoders > 0)
    if setting.data == 1:
        return ", ".join([f"tp = {setting.tensor}"] * (setting.tensor > 1) + beside)
    s, requests = setting.shape, cost.decode_concurrency(setting)
    cache = kv_tokens(setting) * s.kv_bytes(setting.width)
    sent = cost.exchange_bytes(s, requests, setting.data, setting.width)
    sizes = ", ".join([f"dp = {setting.data}, ep = {setting.data}", *beside])
    return (
        f"{sizes}: {s.experts // setting.data} of {s.experts} experts and a cache of "
        f"{cache / GB:.3g} GB on each device, which sends {sent / 1e6:.3g} MB in a decode step of {requests} requests"
    )


def _listed_layouts(setting: Workload) -> list[ParallelLayout]:
    """The three best."""
    return parallel_layouts(setting)[:3]


def list_assumptions(setting: Workload) -> list[str]:
    on = setting.hardware
    host = [
        f"host memory at {cost.HOST_STREAM / 1e9:.0f} GB/s, {cost.HOST_LINK / 1e9:.0f} GB/s between it and a device"
    ]
    return [
        f"{on.name}: {on.flops / 1e12:.3g} TFLOP/s, of which training reaches {on.efficiency:.0%} and decoding "
        f"{on.decode_efficiency:.0%}; memory at {on.bandwidth / 1e9:.0f} GB/s, of which decoding reaches "
        f"{on.stream:.0%} ({on.source})",
        f"a step takes at least its longest answer{f' / {setting.staleness + 1}' if setting.staleness else ''}; what "
        "other unequal answers cost is for `rondel simulate`",
        "prompts are computed once for their group, in the engine and in training",
        *(host if setting.host_optimizer else []),
    ]
