"""Worlds in other processes: the same episodes as here, faults of a world, a process that dies, and its end."""

import asyncio
import os
import signal

import numpy as np
import pytest

from rondel.core.errors import ConfigError, EnvError
from rondel.generate.envs.hosted_world import HostedWorld, open_hosted
from rondel.generate.envs.world_processes import ASKED, WorldProcesses
from rondel.generate.envs.worlds import WorldSource

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")

AIM = WorldSource("kits.gym_worlds:Aim", {"last": 5})


@pytest.fixture
def processes():
    found = WorldProcesses(2)
    yield found
    found.close()


async def episode(world, seed):
    """Chunks of two random actions until the world ends, or seven are used up."""
    noise, left, spaces = np.random.default_rng(seed), 7, world.spaces

    async def ask(found):
        return found if isinstance(world, HostedWorld) else await found

    told = [(await ask(world.reset(seed)), [], "")]
    while not told[-1][2]:
        drawn = (
            noise.integers(spaces.actions, size=(2, 1)) if spaces.discrete else noise.normal(size=(2, spaces.actions))
        )
        told.append(await ask(world.take(drawn.astype(np.float32), left)))
        left -= len(told[-1][1])
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name, args", [("kits.gym_worlds:Aim", {"last": 5}), ("CartPole-v1", {})])
def test_episodes_in_two_processes_have_the_bits_of_those_here(processes, name, args):
    """More of them than are asked for at once."""
    source = WorldSource(name, args)

    async def play(number):
        world = await processes.open(source)
        return [await episode(world, seed) for seed in (number, number + 100)]  # a world is used again

    async def play_all():
        return await asyncio.gather(*(play(i) for i in range(2 * ASKED + 3)))

    found = asyncio.run(play_all())
    assert len(processes.processes) == 2 and {p.worlds for p in processes.processes} == {ASKED + 1, ASKED + 2}
    for number, own in enumerate(found):
        for seed, told in zip((number, number + 100), own, strict=True):
            wanted = asyncio.run(episode(open_hosted(source), seed))
            assert [t[1:] for t in told] == [t[1:] for t in wanted]
            assert all(
                np.array_equal(a[0], b[0]) and a[0].dtype == b[0].dtype for a, b in zip(told, wanted, strict=True)
            )


def test_pictures_come_through(processes):
    source = WorldSource("kits.gym_worlds:Column", {}, 24)

    async def look():
        return await (await processes.open(source)).reset(3)

    assert (
        np.array_equal(asyncio.run(look()), open_hosted(source).reset(3))
        and open_hosted(source).spaces.observed == 20 * 24 * 3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, error, why",
    [
        ("kits.gym_worlds:Broken", EnvError, "step of the world 'kits.gym_worlds:Broken' raised RuntimeError: a wheel came off"),
        ("kits.gym_worlds:Nowhere", ConfigError, "Nowhere"),
        ("kits.gym_worlds:Words", ConfigError, "reads a space"),
    ],
)  # fmt: skip
def test_what_a_world_raises_is_raised_here_and_ends_no_other(processes, name, error, why):
    async def play():
        other = await processes.open(AIM)
        await other.reset(0)
        with pytest.raises(error, match=why):
            world = await processes.open(WorldSource(name, {}))
            await world.reset(0)
            await world.take(np.zeros((1, 2), np.float32), 1)
        return await other.take(np.zeros((1, 2), np.float32), 1)

    assert len(asyncio.run(play())[1]) == 1


@pytest.mark.slow
def test_episodes_of_a_process_that_was_killed_are_told_and_later_ones_get_another(processes):
    async def play():
        lost, kept = await processes.open(AIM), await processes.open(AIM)
        gone = lost.process.process.pid
        await asyncio.gather(lost.reset(0), kept.reset(0))
        os.kill(gone, signal.SIGSTOP)  # it is asked, and dies before it answers
        waiting = asyncio.ensure_future(lost.take(np.zeros((1, 2), np.float32), 3))
        await asyncio.sleep(0.01)
        os.kill(gone, signal.SIGKILL)
        for asked in (waiting, lost.reset(1)):
            with pytest.raises(EnvError, match=rf"process {gone} .* by SIGKILL.*task.env.processes lower"):
                await asked
        assert lost.is_lost and not kept.is_lost
        anew = await processes.open(AIM)
        await anew.reset(0)
        return await asyncio.gather(*(w.take(np.zeros((1, 2), np.float32), 3) for w in (kept, anew)))

    one, two = asyncio.run(play())
    assert np.array_equal(one[0], two[0]) and one[1:] == two[1:]


@pytest.mark.slow
def test_they_end_with_close(processes):
    async def play():
        await asyncio.gather(processes.open(AIM), processes.open(AIM))
        return [process.process for process in processes.processes]

    found = asyncio.run(play())
    assert len(found) == 2 and all(process.poll() is None for process in found)
    processes.close()
    assert all(process.poll() is not None for process in found) and not processes.processes  # a late one is killed
