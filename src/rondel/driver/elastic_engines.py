"""Engines that come and go while a run goes on.

of others   rondel serve MODEL --join RUN  ──writes──> RUN/engines/127.0.0.1-8001 ──read every few seconds──> admitted
            and addresses of the recipe that were lost and are back
our own     rondel engines RUN 3           ──writes──> RUN/engines/count ──> one more is started, or the last one leaves

A newcomer takes the version that serves before its first request (`WeightUpdate.catch_up`);
one that ends is left behind by the router, one that leaves ends what it has begun, and the rest goes to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rondel.core.config.job import Job
from rondel.core.errors import RondelError, UserError
from rondel.core.events import Warned, emit
from rondel.core.protocols import RolloutEngine
from rondel.generate.engine.foreign import ForeignEngine
from rondel.generate.engine.router import EngineRouter
from rondel.system.files import make_folder, replace_file

if TYPE_CHECKING:
    from rondel.assemble.placement import Deployment
    from rondel.sync.update import WeightUpdate

FOLDER, COUNT, EVERY = "engines", "count", 2.0  # inside the run folder; seconds
MOST = 4096  # engines of a run
LEAVING = 30.0  # seconds in which one that leaves may end what it has begun


async def scale_engines(placed: Deployment, folder: Path, update: WeightUpdate) -> None:
    """For ever: as many engines of our own as `rondel engines` asked for. What cannot be done is named once."""
    router, told = placed.engine, ""
    assert isinstance(router, EngineRouter) and placed.new_engine is not None
    while True:
        await asyncio.sleep(EVERY)
        try:
            wanted = wanted_engines(folder)
            while wanted is not None and len(placed.remotes) < wanted:
                await _add_engine(placed, router, update.catch_up)
            while wanted is not None and len(placed.remotes) > wanted:
                await _remove_engine(placed, router, update)
            told = ""
        except Exception as error:  # of one that joins or leaves: the run goes on without it
            said = str(error) if isinstance(error, RondelError) else f"{type(error).__name__}: {error}"
            if said != told:
                emit(Warned(f"the run has {len(placed.remotes)} engines, and could not change that: {said}"))
            told = said


async def _add_engine(
    placed: Deployment, router: EngineRouter, catch_up: Callable[[RolloutEngine], Awaitable[int]]
) -> None:
    assert placed.new_engine is not None
    number = len(placed.remotes)
    name = f"engine-{number}"
    emit(Warned(f"{name} is being started; it joins when it has loaded the model"))
    engine = await asyncio.to_thread(placed.new_engine, number)
    try:
        await engine.join()
        engine.catch_up = catch_up
        await router.add_engine(name, engine, engine.caught_up)
    except BaseException:
        engine.dismiss()
        raise
    placed.remotes[name] = engine
    emit(Warned(f"{name} has joined at version {router.version}; {len(placed.remotes)} serve now"))


async def _remove_engine(placed: Deployment, router: EngineRouter, update: WeightUpdate) -> None:
    """The one that came last, between two updates: a broadcast that waits for it would end the run."""
    name, engine = placed.remotes.popitem()
    await router.fleet.cancel_return(name)
    if name in router.replicas:
        await router.remove_engine(name, LEAVING, update.between_updates())
    engine.dismiss()
    emit(Warned(f"{name} has left at version {router.version}; {len(placed.remotes)} serve now"))


def wanted_engines(folder: Path) -> int | None:
    """What `rondel engines` asked for last; None before it did."""
    try:
        count = int((folder / FOLDER / COUNT).read_text())
        if not 1 <= count <= MOST:
            raise ValueError(f"{count} is not from 1 to {MOST}")
        return count
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / FOLDER / COUNT} holds no number ({error}): write one with `rondel engines`"
        ) from error


def ask_for_engines(folder: Path, count: int) -> None:
    """Leave word for the run in this folder, which reads it every few seconds."""
    if not (folder / "job.toml").is_file():
        raise UserError(f"no run has begun in {folder} (it has no job.toml): name the folder of a run")
    job = Job.read(folder / "job.toml")
    for holds, rule in (
        (
            job.engine.kind == "builtin",
            f'has engine.kind = "{job.engine.kind}": its servers join with `rondel serve MODEL --join {folder}`',
        ),
        (job.place.kind == "split", 'shares its devices with its trainer: begin it with place.kind = "split"'),
        (job.place.cluster != "local", 'has its engine in its own process: begin it with place.cluster = "process"'),
        (not job.policies, "has several policies, each with one engine"),
        (not job.run.record, "is recorded (run.record), and a replay would not know of them"),
    ):
        if not holds:
            raise UserError(f"{folder} {rule}")
    if not 1 <= count <= MOST:
        raise UserError(f"{count} engines: it is a number from 1 to {MOST}")
    replace_file(make_folder(folder / FOLDER) / COUNT, f"{count}\n")


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
    for path in sorted(path for path in (folder / FOLDER).glob("[!.]*") if path.name != COUNT):
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
