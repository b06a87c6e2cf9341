"""Rewards that an untrained model earns now and then, one for every turn, and an environment that has turns."""

import asyncio
import os


def parity(trajectory, task) -> float:
    """1 for an odd number of characters: about half of all answers."""
    return float(len(trajectory.text) % 2)


def thirds(trajectory, task) -> float:
    """The share of tokens that three divides: hardly two answers have the same."""
    return sum(token % 3 == 0 for token in trajectory.tokens) / max(1, len(trajectory.tokens))


def parity_or_failure(trajectory, task) -> float:
    """As `parity`; one answer of five cannot be scored."""
    if sum(trajectory.tokens) % 5 == 0:
        raise ValueError("no score")
    return parity(trajectory, task)


def plus_or_minus(trajectory, task) -> float:
    """2 or -1."""
    return 2.0 if len(trajectory.text) % 2 else -1.0


def turns(trajectory, task) -> list[tuple[int, float]]:
    """1 for the last token of every turn."""
    mask = [*trajectory.mask, False]
    return [(at, 1.0) for at in range(len(mask) - 1) if mask[at] and not mask[at + 1]]


class Twice:
    """An episode of two turns, with a word of the environment in between."""

    async def run(self, task, chat):
        chat.give([{"role": "user", "content": task.data["prompt"]}])
        await chat.reply()
        chat.give([{"role": "user", "content": "again"}])
        await chat.reply()
        return chat.trajectory


def world(trajectory, task) -> float:
    """What no recipe determines decides whether a group agrees."""
    return float(len(trajectory.text) % int(os.environ["RONDEL_TEST_WORLD"]))


def short(trajectory, task) -> float:
    """1 for an answer that ended by itself soon."""
    return float(trajectory.written < 10)


def constant(trajectory, task) -> float:
    """Nobody learns from this."""
    return 0.5


def broken(trajectory, task) -> float:
    """Judges half of the answers and breaks on the others."""
    if len(trajectory.text) % 2:
        raise ValueError("an odd answer")
    return float(len(trajectory.text) % 4 == 0)


def long(trajectory, task) -> float:
    """Pays length and nothing else."""
    return trajectory.written / 4 + 0.01 * (len(trajectory.text) % 2)


def blocking(trajectory, task) -> float:
    """Synchronous, as a reward is that waits for its sandbox: the loop stands still for 0.06 s of a VirtualClockLoop."""
    asyncio.get_running_loop().now += 0.06
    return 1.0


class Waiting:
    """Asynchronous, as a judge is."""

    together = 8

    async def __call__(self, trajectory, task):
        await asyncio.sleep(0.02 * float(trajectory.text))
        return 1.0


class Late(Waiting):
    async def __call__(self, trajectory, task):
        await asyncio.sleep(60 if trajectory.text == "late" else 0.03)
        return 1.0


THEIRS = """
import ctypes, os, sys, time
def reward(trajectory, task):
    exec(trajectory.text, globals())
    return globals().pop("result", 1.0)
"""
