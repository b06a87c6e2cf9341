"""The memory of a process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def resident_memory(pid: int | None = None) -> dict[str, int]:
    """{"rss": bytes, "peak": bytes} of a process by the kernel's count; nothing where it
    has ended, or the kernel does not say.
    """
    try:
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines())
        return {"rss": int(rows["VmRSS"].split()[0]) * 1024, "peak": int(rows["VmHWM"].split()[0]) * 1024}
    except (OSError, KeyError, ValueError):
        return {}
