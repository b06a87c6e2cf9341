"""From 8 devices to ten thousand: what breaks at each tier, what it costs with and
without the primitive that saves it.

Every figure is the planner's or the simulator's, of one work that grows with the devices (a 7B
model on H100s, 4 groups of 8 answers a device up to 2048 groups, at most 16k tokens);
what is assumed beside it stands in the row.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from rondel.planner import cost
from rondel.planner.hardware import GB
from rondel.planner.memory import memory_bills
from rondel.planner.overlap import StepTimes
from rondel.planner.workload import Workload, what_if
from rondel.simulate.run import simulate, world_of

TIERS = (8, 64, 256, 1024, 4096, 10240)
CONTROLLER = (
    # CPU seconds a sample of this house's loop with 16,000 rollouts under way (`rondel
    # bench controller`, benchmarks/README.md)
    541e-6
)
MTBF = 50_700 * 3600.0  # seconds of one device: 419 interruptions in 54 days on 16,384 H100s, arXiv:2407.21783
# seconds to notice a lost member, build a group of thousands again and come back to the step; an assumption
REBUILD = 600.0
PUBLISHED = {  # gain of asynchrony over a synchronous baseline, each by its authors, in their own set-up
    "verl fully async, 128 H20, smallest": 2.35,
    "verl fully async, 128 H20, largest": 2.67,
    "AReaL (arXiv:2505.24298)": 2.77,
}
SIGMAS = (0.0, 0.4, 0.8, 1.2, 1.6)


def chain_workload(devices: int, **more: Any) -> Workload:
    prompts = min(2048, 4 * devices)
    asked = {
        "model": "7b",
        "hardware": "h100",
        "gpus": devices,
        "prompts": prompts,
        "group": 8,
        "output": "16k",
        "mean": "4k",
        "recompute": "layers",
    }
    return what_if([f"{name}={value}" for name, value in {**asked, **more}.items()])


def build_chain(tiers: tuple[int, ...] = TIERS, *, steps: int = 4, gain_devices: int = 32) -> dict[str, Any]:
    makers = dict(zip(TIERS, (_memory_tier, _prefill_tier, _copies_row, _tail_tier, _controller_row, _collective_tier)))
    found = split_gains(gain_devices)
    return {
        "work": (
            "qwen2.5-7b on h100 where nothing else is said, 4 groups of 8 a device up to 2048 groups, "
            "at most 16k tokens, 4k on average"
        ),
        "tiers": [makers[devices](devices, steps) for devices in tiers],
        "gains": found,
        "published": {
            name: {"gain": PUBLISHED[name], "sigma": sigma} for name, sigma in matching_sigmas(found).items()
        },
    }


def format_chain(rows: dict[str, Any]) -> str:
    """The chain as text."""
    lines = [rows["work"], ""]
    for row in rows["tiers"]:
        lines += [
            f"{row['devices']} devices: {row['breaks']}  ({row['dominates']})",
            f"    without   {row['without']}",
            f"    with      {row['with']}: {row['helps']}",
        ]
    lines += [
        "",
        "asynchrony (split, S = 4, best of four splits) over all devices in turn (S = 0), 32 devices, by the sigma of "
        "log-normal lengths:",
    ]
    lines.append("    " + ", ".join(f"{row['sigma']:g}: {row['gain']:.2f}x" for row in rows["gains"]))
    for name, at in rows["published"].items():
        where = (
            f"sigma {at['sigma']:.2f}"
            if at["sigma"] is not None
            else "no sigma that was tried; its baseline must lose by more than the tail"
        )
        lines.append(f"    {at['gain']}x, {name}: {where}")
    return "\n".join(lines)


def _tier_row(
    devices: int, breaks: str, helps: str, without: str, with_: str, gain: float, dominates: str
) -> dict[str, Any]:
    return {
        "devices": devices,
        "breaks": breaks,
        "helps": helps,
        "without": without,
        "with": with_,
        "gain": gain,
        "dominates": dominates,
    }


def _dominant_cost(setting: Workload) -> str:
    share = _stage_seconds(setting).rollout_share
    return f"generation, {share:.0%} of a step" if share > 0.5 else f"training, {1 - share:.0%} of a step"


def _stage_seconds(setting: Workload) -> StepTimes:
    return StepTimes(cost.generation_time(setting).seconds, cost.train_seconds(setting), overlap=True)


def _memory_tier(devices: int, steps: int) -> dict[str, Any]:
    """14B, whose state fits 8 devices alone and not beside its engine."""
    both = chain_workload(devices, model="14b", reference="14b")
    without, with_ = (memory_bills(replace(both, offload=offload))[0].peak_phase[1] / GB for offload in (False, True))
    return _tier_row(
        devices,
        "memory: trainer's state and the engine's cache at once",
        "take turns: release and resume, offload (trainer.memory.offload)",
        f"{without:.0f} GB a device (14B and its reference)",
        f"{with_:.0f} GB",
        without / with_,
        _dominant_cost(chain_workload(devices)),
    )


def _prefill_tier(devices: int, steps: int) -> dict[str, Any]:
    long = chain_workload(devices, prompt="4k")
    arguments = {"tensor": long.tensor, "width": long.width}
    once = cost.prefill_seconds(long.shape, long.hardware, long.prompts * long.prompt / long.engine_count, **arguments)
    return _tier_row(
        devices,
        "the same prompt is read for every answer of its group",
        "a prefix tree: one prefill a group",
        f"{long.group * once:.1f} s of prefill a step (prompts of 4k)",
        f"{once:.1f} s",
        float(long.group),
        _dominant_cost(long),
    )


def _copies_row(devices: int, steps: int) -> dict[str, Any]:
    big = chain_workload(devices, model="70b")
    ways = {way.kind: way.seconds for way in cost.sync_options(big)}
    handed = cost.transfer_seconds(big.shape.parameter_count * big.width / big.tensor, big.hardware.link)
    return _tier_row(
        devices,
        "weights are gathered, copied and read again at every sync",
        "handles to memory that both sides map; each takes its part",
        f"{ways['disk']:.0f} s a sync through files, {ways['distributed']:.1f} s by broadcast (70B)",
        f"{handed:.2f} s inside a node",
        ways["distributed"] / handed,
        _dominant_cost(chain_workload(devices)),
    )


def _tail_tier(devices: int, steps: int) -> dict[str, Any]:
    apart = chain_workload(devices, place="split")
    wait, go_on = (simulate(world_of(replace(apart, staleness=s), sigma=1.2), steps=steps) for s in (0, 4))
    return _tier_row(
        devices,
        "the longest answer of a step: everybody waits",
        "partial rollout, S = 4, and importance weights for what is older",
        f"{wait['step_seconds']:.0f} s a step, {wait['places_idle']:.0%} of the places empty (sigma 1.2)",
        f"{go_on['step_seconds']:.0f} s, {go_on['places_idle']:.0%}",
        wait["step_seconds"] / go_on["step_seconds"],
        _dominant_cost(apart),
    )


def _controller_row(devices: int, steps: int) -> dict[str, Any]:
    """Short agentic turns bring it earlier: an answer here is one turn."""
    apart = replace(chain_workload(devices, place="split", prompts=8192, output=512, mean=256), staleness=2)
    rate = apart.samples * _stage_seconds(apart).rate
    busy = rate * CONTROLLER
    return _tier_row(
        devices,
        "one controller sees every answer",
        "several controllers, each with engines, tasks and a journal of its own",
        f"{busy:.0%} of one core at {rate:.0f} answers/s (256 tokens each)",
        f"{-(-busy // 0.5):.0f} controllers at half a core",
        busy / 0.5,
        _dominant_cost(apart),
    )


def _collective_tier(devices: int, steps: int) -> dict[str, Any]:
    """A collective has as many members as there are engines, and none may be missing."""
    setting = chain_workload(devices)
    every = MTBF / devices
    alone = 1 - REBUILD / (every + REBUILD)
    pulled = 1 - REBUILD / (MTBF / setting.trainers + REBUILD)
    return _tier_row(
        devices,
        "a collective over all engines: one that fails stops all",
        "one-sided reads (RDMA): who is there pulls, a group is never rebuilt",
        f"a failure every {every / 3600:.1f} h stops all for {REBUILD / 60:.0f} min: {1 - alone:.1%} of the time lost",
        f"{1 - pulled:.1%}: only the trainer's own failures",
        pulled / alone,
        _dominant_cost(setting),
    )


# -- published gains, and the lengths that they need ---------------------------------------------------


def split_gains(devices: int = 32, *, steps: int = 4) -> list[dict[str, float]]:
    """Samples a second of a split at S = 4 with the planner's division, over all devices in
    turn at S = 0 (offloaded, so that each side has the whole memory in its turn); by the sigma of the lengths. At most
    48 requests an engine on both sides: batches
    that a deeper queue fills are no matter of lengths."""
    together = chain_workload(devices, place="shared", prompts=4 * devices, running=48, offload="yes")
    found = []
    for sigma in SIGMAS:
        sync = simulate(world_of(together, sigma=sigma), steps=steps)["samples_per_second"]
        best = 0.0
        for trainers in (devices // 4, 3 * devices // 8, devices // 2, 5 * devices // 8):
            apart = replace(together, place="split", trainers=trainers, staleness=4, offload=False)
            best = max(best, simulate(world_of(apart, sigma=sigma), steps=steps)["samples_per_second"])
        found.append({"sigma": sigma, "gain": best / sync})
    return found


def matching_sigmas(found: list[dict[str, float]] | None = None) -> dict[str, float | None]:
    """For each published gain the sigma at which the simulator shows it too; None: at none of those tried."""
    return {
        name: _interpolate_sigma(gain, found if found is not None else split_gains())
        for name, gain in PUBLISHED.items()
    }


def _interpolate_sigma(gain: float, found: list[dict[str, float]]) -> float | None:
    for low, high in pairwise(found):
        if low["gain"] <= gain <= high["gain"]:
            return low["sigma"] + (gain - low["gain"]) / (high["gain"] - low["gain"]) * (high["sigma"] - low["sigma"])
    return None
