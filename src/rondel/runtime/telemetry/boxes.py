"""What the episodes of a run used of sandboxes, summed over its groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def add_boxes(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """[{"episodes": 8, "seconds": 41.2, "cpu": 3.1, "peak": 3e7}, {}] -> their sums, and the largest peak."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = max(total.get(name, 0.0), value) if name == "peak" else total.get(name, 0.0) + value
    return total


def box_rows(boxes: Mapping[str, float]) -> list[tuple[str, str]]:
    """(what, in all and for each episode), as a card shows it; what nobody counted is said to be so."""
    n = boxes["episodes"]

    def spent(name: str) -> str:
        return f"{boxes[name]:.1f} s, {boxes[name] / n:.2f} s an episode" if name in boxes else "not counted here"

    peak = f"{boxes['peak'] / 1e6:.1f} MB in one episode, at most" if "peak" in boxes else "not counted here"
    return [
        ("episodes with a box", f"{n:.0f}"),
        ("boxes open", spent("seconds")),
        ("computing in boxes", spent("cpu")),
        ("memory of a box", peak),
    ]
