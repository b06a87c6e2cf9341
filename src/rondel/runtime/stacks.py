"""Every Python stack of a run and the memory of its processes, in its logs: written when a wait
passes its deadline, where memory ran out, on demand.

    kill -USR1 CONTROLLER

What hangs cannot be called, so each process writes its own stacks when it gets the
signal: from C, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from rondel.core.events import Event, Stalled
from rondel.runtime.memory import format_memory_report, write_device_snapshot
from rondel.system.threads import current_frames

SIGNAL = signal.SIGUSR1


def register_stack_dump(file: IO[str]) -> None:
    """From now on the signal makes this process write the stacks of all its threads there."""
    faulthandler.register(SIGNAL, file=file, all_threads=True)


class StackDumper:
    """Of a controller and its workers, into `logs` of the run folder. Reads events:
    `Stalled` is answered with where they are.

    others  makes the workers write theirs, as they are now
    pids    of the workers of this machine, by name
    held    bytes of tenants by worker, as it last told
    """

    def __init__(
        self,
        folder: Path,
        others: Callable[[], None] = lambda: None,
        pids: Callable[[], dict[str, int]] = dict,
        held: Mapping[str, dict[str, int]] | None = None,
    ) -> None:
        self.logs, self.others, self.pids = folder / "logs", others, pids
        self.held = {} if held is None else held

    def on_event(self, event: Event) -> None:
        if isinstance(event, Stalled):
            self.dump(event.message)
            event.stacks = str(self.logs)

    def dump(self, why: str = "asked for by a signal") -> None:
        self.others()
        with contextlib.suppress(OSError):  # the disk may be why: what waits is told all the same
            self.logs.mkdir(parents=True, exist_ok=True)
            with (self.logs / "controller.log").open("a") as file:
                file.write(
                    f"\n{time.strftime('%Y-%m-%d %H:%M:%S')}  stacks: "
                    f"{why}\n{format_task_stacks()}\n\n{self.memory_report()}\n"
                )
                file.write(format_thread_stacks())

    def memory_report(self) -> str:
        """Workers without a process of their own are in the controller's."""
        pids = self.pids()
        own: dict[str, int] = {}
        for worker, held in self.held.items():
            own |= {} if worker in pids else held
        return format_memory_report({"controller": os.getpid(), **pids}, {**self.held, "controller": own})

    def ran_out(self) -> None:
        """Of memory: who had it, and every block of a GPU's, for its viewer."""
        self.dump("out of memory")
        write_device_snapshot(self.logs / "cuda-memory.pickle")

    @contextlib.contextmanager
    def on_demand(self) -> Iterator[None]:
        """The signal makes this process write them, where Python lets it hear signals: on the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(SIGNAL, lambda *_: self.dump())
        try:
            yield
        finally:
            signal.signal(SIGNAL, before)


def format_thread_stacks() -> str:
    """Every thread by name, the main one first: `faulthandler` tells of 100, and of the main one last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    each = sorted(current_frames().items(), key=lambda item: item[0] != main)
    return "".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}\n" for ident, frame in each
    )


def format_task_stacks() -> str:
    """Where the tasks of the running event loop wait, those that wait at the same place as one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return "no event loop runs"
    places: Counter[str] = Counter()
    for task in asyncio.all_tasks(loop):
        text = io.StringIO()
        task.print_stack(file=text)
        places["".join(text.getvalue().splitlines(keepends=True)[1:])] += 1  # the first line has the task's name
    return "\n".join(f"{n} task{'s' * (n > 1)} at\n{place}" for place, n in places.most_common())
