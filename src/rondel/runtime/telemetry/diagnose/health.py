"""Is the run alive, did it end as it should, and would it survive the next fault."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import Story

MEMORY = re.compile(r"out of memory|OutOfMemory|cannot allocate memory|MemoryError|oom[- ]kill", re.IGNORECASE)
NEAR_FULL = 0.95
UNSAVED = 20  # steps
OFTEN = 3  # restarts


def find_run_end(story: Story) -> Iterator[Finding]:
    """Memory first: it explains the rest."""
    logs = (
        {name: "\n".join(lines) for name, lines in story.worker_logs().items()}
        if not story.alive and not story.ended
        else {}
    )
    texts = {"the run": story.broke, **{f"step {step}": text for step, text in story.said}, **logs}
    full = next(
        ((where, line) for where, text in texts.items() for line in text.splitlines() if MEMORY.search(line)), None
    )
    if full:
        yield Finding(
            "out_of_memory",
            "error",
            f"{full[0]}: {full[1].strip()[:300]}",
            "A device or the machine had no memory left.",
            "a lower trainer.micro_tokens or engine.kv_pages, trainer.memory.offload = true on a shared device, "
            "model.adapter.kind = 'lora'",
            weight=5,
        )
    if story.alive or story.ended:
        return
    if story.broke.startswith("Stopped"):
        yield Finding(
            "stopped",
            "note",
            f"after step {story.step}: {story.broke[:300]}",
            "Somebody or a scheduler asked the run to end, and it did.",
            "the same command goes on",
        )
    elif story.broke and not full:
        yield Finding(
            "broke",
            "error",
            f"after step {story.step}: {story.broke[:500]}",
            "The run ended by an error.",
            "as the error says",
            weight=4,
        )
    elif not story.broke:
        last = next(
            (f"; {name} ends with: {lines[-1][:200]}" for name, lines in story.worker_logs().items() if lines), ""
        )
        yield Finding(
            "died",
            "error",
            f"the journal stops after step {story.step} without a word, and no process trains here{last}",
            "The process was killed from outside: most often by the kernel for memory, by a scheduler, or with the "
            "machine.",
            "`dmesg | grep -i kill`; the same command goes on from the last checkpoint",
            weight=4,
        )


def find_stalls(story: Story) -> Iterator[Finding]:
    if story.stalls:
        step, event = story.stalls[-1]
        yield Finding(
            "stalled",
            "error",
            f"{len(story.stalls)} waits passed their deadline, the last one after step {step}: "
            f"{event['message'][:300]}",
            "Somebody waited for somebody who did not come.",
            f"the stacks of all processes are in {event.get('stacks') or story.folder / 'logs'}; place.patience if it "
            f"is only slow",
            weight=3,
        )


def find_restarts(story: Story) -> Iterator[Finding]:
    again = [
        (step, text)
        for step, text in story.said
        if "It is started again" in text or "The run goes on from" in text or "is lost:" in text
    ]
    if again:
        step, text = again[-1]
        yield Finding(
            "restarts",
            "error" if len(again) >= OFTEN else "warning",
            f"{len(again)} times a worker ended, the last time after step {step}: {' '.join(text.split())[:300]}",
            "The run mends itself, but only a few times, and each time some work is done twice.",
            f"the last words in {story.folder / 'logs'}; memory first",
            weight=2,
        )


def find_unsaved_run(story: Story) -> Iterator[Finding]:
    done, every = story.step, story.recipe_value("run.checkpoint.every", 10)
    since = done - (story.saved[-1] if story.saved else 0)
    if since >= max(UNSAVED, 3 * every) and not story.ended:
        yield Finding(
            "no_checkpoint",
            "warning",
            f"{since} steps since {'the last checkpoint' if story.saved else 'the start and no checkpoint'}; "
            f"run.checkpoint.every = {every}",
            "A crash would cost all of them.",
            "run.checkpoint.every = 10; a SIGTERM makes a running one write one and end",
        )


def find_memory_near_limit(story: Story) -> Iterator[Finding]:
    room = story.facts.get("device_bytes")
    peaks = {
        name: value
        for s in story.steps[-8:]
        for name, value in s.row.items()
        if name in ("mem/generate", "mem/train", "mem/sync")
    }
    if room and peaks and max(peaks.values()) > NEAR_FULL * room:
        name = max(peaks, key=peaks.__getitem__)
        yield Finding(
            "memory_near_limit",
            "warning",
            f"{peaks[name] / 2**30:.1f} of {room / 2**30:.1f} GiB in the phase {name[4:]} ({story.recent_span})",
            "The next longer answer may be the one that does not fit.",
            "a lower trainer.micro_tokens or engine.kv_pages, trainer.memory.offload = true",
        )


RULES = (find_run_end, find_stalls, find_restarts, find_unsaved_run, find_memory_near_limit)
