"""An engine in a process of its own, spoken to over a pipe: what a cluster does, in thirty lines."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from pathlib import Path

import torch

from kits.runs import context
from rondel.core.errors import SyncError
from rondel.models import names
from rondel.sync.from_ipc import SHARED, FromIpc


def serve(pipe, make, kind, transport) -> None:
    from kits.engine import engine

    e = engine(make(), transports={kind: transport})

    async def main():
        while (call := await asyncio.to_thread(pipe.recv)) is not None:
            verb, args = call
            try:
                if verb == "bits":
                    pipe.send((True, {n: t.clone() for n, t in names.named_weights(e.loaded.model)}))
                else:
                    pipe.send((True, await getattr(e, verb)(*args)))
            except Exception as error:
                pipe.send((False, type(error)(str(error))))

    asyncio.run(main())
    transport.close()


class Remote:
    def __init__(self, pipe) -> None:
        self.pipe, self.one = pipe, asyncio.Lock()

    def __getattr__(self, verb):
        async def call(*args):
            async with self.one:
                self.pipe.send((verb, args))
                good, value = await asyncio.to_thread(self.pipe.recv)
            if not good:
                raise value
            return value

        return call


@contextmanager
def remote(make, kind, transport):
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, make, kind, transport), daemon=True)
    child.start()
    theirs.close()
    try:
        yield Remote(ours), child
    finally:
        if child.is_alive():
            ours.send(None)
        child.join(20)
        if child.exitcode is None:
            child.kill()
            child.join()
    assert child.exitcode is not None


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(names.tensor_digest(a[n]) == names.tensor_digest(b[n]) for n in a)


def bits(loaded) -> dict[str, torch.Tensor]:
    return dict(names.named_weights(loaded.model))


def left_behind() -> set[str]:
    """Named segments and listening ports of this process."""
    mine = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    }
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    ports = {row[1].rsplit(":", 1)[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}
    return ports | {path.name for path in SHARED.glob(f"rondel-{os.getpid()}-*")}


class Broken(FromIpc):
    """Shared memory that works for so many updates, at one of its ends."""

    def __init__(self, *, publishes: int = 99, receives: int = 99) -> None:
        super().__init__()
        self.left = {"publish": publishes, "receive": receives}

    def _use(self, what: str) -> None:
        self.left[what] -= 1
        if self.left[what] < 0:
            raise SyncError(f"shared memory is gone: {what}")

    def publish(self, route, version, weights):
        self._use("publish")
        return super().publish(route, version, weights)

    def receive(self, route, manifest, mine):
        self._use("receive")
        yield from super().receive(route, manifest, mine)
