"""Rewards that see the whole group. A worker imports this module, and nothing heavy with it."""

from __future__ import annotations

import asyncio


def place(trajectories, task):
    """By the number each says; the text "7" says most."""
    order = sorted(t.text for t in trajectories)
    return [{"place": float(order.index(t.text)), "of": 0.0} for t in trajectories]


place.groupwise = True


class Together:
    """An async one that serves several groups at once."""

    groupwise, together = True, 4

    async def __call__(self, trajectories, task):
        await asyncio.sleep(0)
        if task.data.get("short"):
            return [1.0]
        return [len(trajectories)] * len(trajectories)


def broken(trajectories, task):
    if task.data.get("raise"):
        raise ValueError("no verdict")
    return [0.5, float("nan"), None][: len(trajectories)]


broken.groupwise = True
