"""What this machine can do, measured for the planner: a matrix product, a copy, a
few decode steps, a few training steps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from rondel.assemble import train
from rondel.core.config.job import Job
from rondel.core.events import StepDone, subscribe
from rondel.models.load import pick_dtype
from rondel.planner import cost
from rondel.planner.hardware import DEVICES, GB, TERA, Hardware, save_calibration
from rondel.planner.workload import Workload, of_job

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


class PaceMedians(NamedTuple):
    """Medians over the counted steps of a run."""

    generate: float
    train: float
    new: float
    packed: float


def calibrate() -> str:
    """Measure, remember, and say where."""
    width = 2 if pick_dtype("auto", "cpu") == torch.bfloat16 else 4
    on = replace(
        DEVICES["cpu"],
        flops=measure_gemm(width) * width / 2,
        bandwidth=measure_copy(),
        efficiency=1.0,
        stream=1.0,
        decode_efficiency=1.0,
        overhead=0.0,
        calls=0.0,
        answer=0.0,
        row=0.0,
    )
    long, many = (
        measure_run(job_of(SMALL, width, groups=8, new=48)),
        measure_run(job_of(SMALL, width, groups=32, new=8)),
    )
    found = fit_hardware(on, long, many, measure_run(job_of(LARGE, width, groups=8, new=32)))
    found = replace(found, source=f"measured on this machine, {time.strftime('%Y-%m-%d')}")
    file = save_calibration(found)
    return (
        f"{found.flops / TERA:.3g} TFLOP/s in bf16 terms, memory {found.bandwidth / GB:.1f} GB/s; training reaches "
        f"{found.efficiency:.0%}, decoding "
        f"{found.decode_efficiency:.0%}; a layer of a decode step {found.overhead * 1e6:.0f} us, of a training pass "
        f"{found.calls * 1e6:.0f} us; an answer "
        f"{found.answer * 1e6:.0f} us in the loop and {found.row * 1e6:.0f} us in training; kept in {file}"
    )


Run = tuple[Workload, PaceMedians]


def fit_hardware(on: Hardware, long: Run, many: Run, large: Run) -> Hardware:
    """Costs that no size explains, and shares of the peak, by turns: each is what the
    other leaves of the measured times.
    """
    for _ in range(12):
        on = measure_shares(fit_call_costs(on, long, many), large)
    return on


def fit_call_costs(on: Hardware, long: Run, many: Run) -> Hardware:
    """Two runs of a small model, few long answers and many short ones, without its arithmetic:
    what a layer costs and what an answer, twice.
    """
    bare = replace(on, overhead=0.0, calls=0.0, answer=0.0, row=0.0)
    written, trained = [], []
    for setting, paced in (long, many):
        plain = replace(setting, hardware=bare)
        layers, samples = setting.shape.layers, setting.samples
        written.append(
            (setting.output * layers, samples, max(0.0, paced.generate - cost.generation_time(plain).seconds))
        )
        trained.append((layers, samples, max(0.0, paced.train - cost.train_seconds(plain))))
    overhead, answer = solve_pair(*written)
    passes, row = solve_pair(*trained)
    return replace(on, overhead=overhead, answer=answer, calls=passes, row=row)


def solve_pair(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float]:
    """x, y of a·x + b·y = c twice; neither is less than 0."""
    (a, b, c), (d, e, f) = first, second
    x, y = (c * e - b * f) / (a * e - b * d), (a * f - c * d) / (a * e - b * d)
    if x < 0:
        return 0.0, (c / b + f / e) / 2
    return (x, y) if y >= 0 else ((c / a + f / d) / 2, 0.0)


def measure_shares(on: Hardware, large: Run) -> Hardware:
    """What is left of a larger model's time, as shares of the peak."""
    setting, paced = large
    bare = replace(setting, hardware=on)
    flops = on.flops * 2 / setting.width
    left = paced.generate - setting.samples * on.answer - setting.output * on.overhead * setting.shape.layers
    decode = (
        2
        * setting.shape.active_parameters
        * (setting.new_tokens + setting.prompts * setting.prompt)
        / max(1e-3, left)
        / flops
    )
    left = paced.train - cost.calls_seconds(bare) - cost.update_seconds(bare)
    trained = (
        3 * cost.forward_flops(setting.shape, setting.prompt + setting.mean) * paced.packed / max(1e-3, left) / flops
    )
    return replace(on, decode_efficiency=min(1.0, decode), efficiency=min(1.0, trained))


def job_of(model: dict[str, Any], width: int, *, groups: int, new: int) -> Job:
    return Job.parse(
        {
            "model": {
                "path": {"random": "llama", "max_position_embeddings": 256, **model},
                "dtype": "bfloat16" if width == 2 else "float32",
            },
            "task": {"data": {"kind": "digits", "holdout": 0}, "reward": "number"},
            # every answer has an advantage, so every token is trained
            "algo": {"kind": "reinforce", "group_size": 8, "advantage": {"kind": "constant", "value": 1.0}},
            "loop": {"steps": 4, "groups_per_step": groups},
            "engine": {"max_running": 256, "sampling": {"max_tokens": new, "ignore_eos": True}},
            "run": {"folder": "calibration", "checkpoint": {"every": 0}, "sinks": []},
        },
        "calibration",
    )


def measure_run(job: Job, *, first: int = 1) -> tuple[Workload, PaceMedians]:
    """Run it in a folder of its own. -> its setting with the lengths that it had, and its pace
    after the first steps.
    """
    done: list[StepDone] = []

    def record_step(event: Any) -> None:
        if isinstance(event, StepDone):
            done.append(event)

    end = subscribe(record_step)
    try:
        with tempfile.TemporaryDirectory(prefix="paced-") as folder:
            train(job.model_copy(update={"run": job.run.model_copy(update={"folder": folder})}), quiet=True)
    finally:
        end()
    counted = done[first:]

    def median_of(of: Callable[[StepDone], float]) -> float:
        return float(median(of(event) for event in counted))

    new, packed = median_of(lambda e: e.metrics["train/tokens"]), median_of(lambda e: e.metrics["train/packed_tokens"])
    paced = PaceMedians(median_of(lambda e: e.seconds["wait"]), median_of(lambda e: e.seconds["train"]), new, packed)
    setting = of_job(job)
    prompt = max(1, round((packed - new) / setting.prompts))
    return replace(setting, prompt=prompt, mean=new / setting.samples, assumed=()), paced


def measure_gemm(width: int, size: int = 2048) -> float:
    """FLOP/s of one large product in the dtype that models compute in, the best of several."""
    dtype = torch.bfloat16 if width == 2 else torch.float32
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_seconds(lambda: torch.matmul(a, b))


def measure_copy(numbers: int = 1 << 26) -> float:
    """Bytes a second of a large copy, read and written."""
    a, b = torch.zeros(numbers), torch.ones(numbers)
    return 2 * 4 * numbers / _best_seconds(lambda: b.copy_(a))


def _best_seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(6):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
