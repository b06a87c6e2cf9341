"""Engines of others that come late or come back while a run goes on: addresses of the
recipe that were lost, and servers that said so.

    rondel serve MODEL --join RUN  ──writes──> RUN/engines/127.0.0.1-8001 ──read every few seconds──> weights that serve ──> admitted

A newcomer takes the version that serves before its first request (`WeightUpdate.catch_up`);
one that ends is left behind by the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from rondel.core.config.job import Job
from rondel.core.errors import RondelError, UserError
from rondel.core.events import Warned, emit
from rondel.core.protocols import RolloutEngine
from rondel.generate.engine.foreign import ForeignEngine
from rondel.generate.engine.router import EngineRouter
from rondel.system.files import make_folder, replace_file

FOLDER, EVERY = "engines", 2.0  # inside the run folder; seconds


async def admit_engines(
    router: EngineRouter,
    folder: Path,
    urls: list[str],
    reach: Callable[[str], ForeignEngine],
    bring: Callable[[RolloutEngine], Awaitable[int]],
) -> None:
    """For ever. `reach` asks a server whether it can carry this run; one that cannot be reached
    is asked again, one that cannot is named once.
    """
    told: set[tuple[str, str]] = set()
    while True:
        for url in dict.fromkeys([*urls, *registered_urls(folder)]):
            if url in router.replicas:
                continue
            try:
                engine = await asyncio.to_thread(reach, url)
                await router.add_engine(url, engine, bring)
                emit(Warned(f"engine {url} has joined at version {router.version}; {len(router.replicas)} serve now"))
            except Exception as error:  # of a newcomer: the run goes on without it
                said = str(error) if isinstance(error, RondelError) else f"{type(error).__name__}: {error}"
                if (url, said) not in told:
                    told.add((url, said))
                    emit(Warned(f"engine {url} has not joined, and is asked again: {said}"))
        await asyncio.sleep(EVERY)


def registered_urls(folder: Path) -> list[str]:
    urls = []
    for path in sorted((folder / FOLDER).glob("[!.]*")):
        with suppress(OSError):  # it has just left
            urls.append(path.read_text(errors="replace").strip())
    return urls


def check_run(folder: Path, host: str) -> None:
    """Before a model is loaded: is there a run that takes engines of this kind, and can it find this one?"""
    if not (folder / "job.toml").is_file():
        raise UserError(
            f"--join {folder}: no run has begun there (it has no job.toml). Start the run first, or name its folder"
        )
    if (kind := Job.read(folder / "job.toml").engine.kind) != "sglang":
        raise UserError(
            f'--join {folder}: that run has engine.kind = "{kind}"; engines join one with engine.kind = "sglang"'
        )
    if host in ("0.0.0.0", "::", ""):
        raise UserError(f"--join with --host {host}: name the address under which the run reaches this machine")


def register_server(folder: Path, host: str, port: int) -> Path:
    """-> the file, to be removed when the server ends."""
    place = make_folder(folder / FOLDER) / f"{host.replace(':', '_')}-{port}"
    replace_file(place, f"http://{f'[{host}]' if ':' in host else host}:{port}\n")
    return place
