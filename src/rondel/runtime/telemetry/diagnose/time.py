"""Where the time goes: who waits, and what a step spends beside learning."""

from __future__ import annotations

from collections.abc import Iterator

from rondel.runtime.telemetry.accounts import CONTROLLER, seconds_to_shares
from rondel.runtime.telemetry.advice import PlacementFacts, advise_runtime, engine_idle_share
from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import LEAST, Story

SLOW_SYNC, SLOW_MILESTONE = 0.25, 0.4  # of the learner's time
EMPTY = 0.2  # of the room in an engine's batch
WAITS = 0.5
AGAIN = 0.05  # retractions of the requests that ran


def find_starvation(story: Story) -> Iterator[Finding]:
    engines: dict[str, float] = {}
    for worker, account in story.accounts.items():
        for kind, seconds in account.items() if worker.startswith("engine") else ():
            engines[kind] = engines.get(kind, 0.0) + seconds
    phases = {name: s for name, s in story.accounts.get(CONTROLLER, {}).items() if name != "milestone"}
    if len(story.steps) < LEAST or not (
        told := advise_runtime(phases, engine_idle_share(engines), PlacementFacts.from_job(story.job))
    ):
        return
    wait = seconds_to_shares(phases).get("wait", 0.0)
    yield Finding(
        f"starved_{told.waiting}",
        "note" if told.gain < 1.25 else "warning",
        f"the learner waits {wait:.0%} of its time, the engines have nothing to do {engine_idle_share(engines):.0%} of "
        f"theirs ({story.recent_span})",
        "One side sets the pace and the other stands still.",
        told.message,
        weight=told.gain / 4,
    )


def slow_engine(story: Story) -> Iterator[Finding]:
    room, ran = story.counts.get("room", 0), story.counts.get("requests", 0)
    wait = seconds_to_shares(story.accounts.get(CONTROLLER, {})).get("wait", 0.0)
    if room and ran < EMPTY * room and wait > WAITS and story.counts.get("steps", 0) > LEAST:
        yield Finding(
            "underfilled_engine",
            "note",
            f"{ran / story.counts['steps']:.1f} requests are decoded together where {room / story.counts['steps']:.0f} "
            f"may be, and the learner waits "
            f"{wait:.0%} of its time ({story.recent_span})",
            "A step of decoding costs nearly the same for few requests as for many.",
            "more loop.groups_per_step or algo.group_size, fewer place.engines, loop.max_staleness >= 1 so that the "
            "tail of a step is not alone",
            weight=0.5,
        )
    if ran and story.counts.get("retracted", 0) > AGAIN * ran / max(1, story.recent_mean("generate/length_mean") or 1):
        yield Finding(
            "short_of_pages",
            "warning",
            f"{story.counts['retracted']:.0f} requests lost their keys and values to others and computed them again "
            f"({story.recent_span})",
            "The cache is too small for what is decoded together.",
            "a larger engine.kv_pages, or a smaller engine.max_running",
        )


def slow_sync(story: Story) -> Iterator[Finding]:
    account = seconds_to_shares(story.accounts.get(CONTROLLER, {}))
    if len(story.steps) >= LEAST and account.get("sync", 0.0) > SLOW_SYNC:
        yield Finding(
            "slow_sync",
            "warning",
            f"sync takes {account['sync']:.0%} of the step, {story.recent_mean('sync/seconds') or 0:.2g} s for "
            f"{(story.recent_mean('sync/bytes_copied') or 0) / 1e6:.3g} MB ({story.recent_span})",
            "The weights' way to the engines is a large part of the loop.",
            "sync.kind (docs/sync.md: ipc on one machine, distributed between machines, delta where few weights "
            "change), larger steps",
        )
    if len(story.steps) >= 2 * LEAST and account.get("milestone", 0.0) > SLOW_MILESTONE:
        yield Finding(
            "slow_milestones",
            "note",
            f"evaluations and checkpoints take {account['milestone']:.0%} of the learner's time ({story.recent_span})",
            "The learner stands still for them.",
            "a larger task.eval.every and run.checkpoint.every",
            weight=0.5,
        )


RULES = (find_starvation, slow_engine, slow_sync)
