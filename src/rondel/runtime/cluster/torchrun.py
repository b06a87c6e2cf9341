"""The ranks that `torchrun` started: the first one runs the loop and calls, the others follow.

    torchrun --nproc-per-node 2 --no-python rondel train RUN.toml --place.kind=split --place.cluster=torchrun

    rank 0   Leader.verb(...)  ── broadcast (verb, arguments) ──>  rank 1, 2, ...   follow(object)
             object.verb(...)                                      object.verb(...)
             the same call at the same time

torchrun owns the processes: it ends all of them when one ends.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from rondel.core.clocks import RunningTimeLoop
from rondel.core.errors import ConfigError, TrainError
from rondel.system import sockets
from rondel.system.signals import leave_to_controller

PATIENCE = datetime.timedelta(days=30)  # a follower waits for the next call for as long as the leader's loop takes


def rank_and_size() -> tuple[int, int]:
    """Of this process, as torchrun told it."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as error:
        raise ConfigError(
            'place.cluster = "torchrun": this process was not started by torchrun. Start it so: '
            "torchrun --nproc-per-node 2 --no-python rondel train RUN.toml"
        ) from error


def own_device(device: str) -> str:
    """ "cuda" is one GPU for each rank of a machine, in the order of their numbers."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device


def ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def init_process_groups(device: str, patience: float) -> Any:
    """The group of all ranks, which is then torch's default, and one beside it for calls."""
    if not dist.is_initialized():
        sockets.set_interface(_other_machine(patience))
        dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=datetime.timedelta(seconds=patience))
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def _other_machine(patience: float) -> str:
    """An address of a machine that ranks of this one must reach; this one's own if torchrun started no others.

    The first machine's name may lead to a loopback address there (Debian's 127.0.1.1), so there the last rank's is
    asked for, in the store that torchrun keeps.
    """
    rank, size = rank_and_size()
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if ranks_here() == size or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return first
    wait = datetime.timedelta(seconds=patience)
    store = dist.TCPStore(first, int(os.environ["MASTER_PORT"]), is_master=False, timeout=wait)
    if rank == size - 1:
        store.set("rondel/last_rank", sockets.own_address(first))
    return store.get("rondel/last_rank").decode()


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """A rank that ended, or whose machine did, is an error with a remedy: torchrun cannot bring it back."""
    try:
        yield
    except RuntimeError as error:
        if not sockets.is_lost_peer(error):
            raise
        told = re.search(r"(?:peer|error) \[(.+?)\]", str(error))
        whom = f"the rank at {told[1].rpartition(':')[0]}" if told else "another rank"
        raise TrainError(
            f"{whom} ended, or its machine did, or it cannot be reached: its own log says why. torchrun ends all ranks "
            f"with it; the same command continues from the last checkpoint ({' '.join(str(error).split())[:200]})"
        ) from error


class LeaderWorker:
    """Rank 0's object, as `process.Worker` is one elsewhere: every verb is called on all ranks,
    the answer is its own.
    """

    alive, fate = True, ""  # torchrun ends all of them when one ends

    def __init__(self, made: Any, calls: Any) -> None:
        self._object, self._calls = made, calls
        self._thread = ThreadPoolExecutor(1, "torchrun")  # calls leave in the order in which they were made

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        if verb.startswith("_"):
            raise AttributeError(verb)

        async def call(*args: Any) -> Any:
            with lost_ranks_named():
                await asyncio.wrap_future(self._thread.submit(self._broadcast_call, verb, args))
                value = getattr(self._object, verb)(*args)
                return await value if asyncio.iscoroutine(value) else value

        return call

    def close(self) -> None:
        with suppress(TrainError), lost_ranks_named():  # who is lost has been named
            self._thread.submit(self._broadcast_call, "close", ()).result()
        self._thread.shutdown()
        self._object.close()

    def _broadcast_call(self, verb: str, args: tuple[Any, ...]) -> None:
        dist.broadcast_object_list([verb, args], src=0, group=self._calls)


def follow_leader(made: Any, calls: Any) -> None:
    """Do what rank 0 calls, until it closes. torchrun sends its signals to all ranks, and
    the first one decides what they mean.
    """
    leave_to_controller()
    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner, lost_ranks_named():
        while True:
            heard: list[Any] = [None, None]
            dist.broadcast_object_list(heard, src=0, group=calls)
            verb, args = heard
            value = getattr(made, verb)(*args)
            if asyncio.iscoroutine(value):
                runner.run(_await_value(value))
            if verb == "close":
                return


async def _await_value(value: Any) -> Any:
    return await value
