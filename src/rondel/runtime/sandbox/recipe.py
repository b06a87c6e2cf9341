"""The sandbox that a recipe names: `sandbox = "bubblewrap"`, or `{ kind = "container", image = "images/python" }`.

`sandbox_of(value)` -> its factory; `describe(sandbox)` -> one line of what it is here, from a box that was started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rondel.core.config.sandbox import read_sandbox
from rondel.core.config.section import SettingsFault
from rondel.core.config.validation_messages import explain_settings
from rondel.core.errors import ConfigError, SandboxError
from rondel.core.registry import locate_path
from rondel.core.sandbox_types import Limits
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.container import ENGINES, find_container_tool, local_image
from rondel.runtime.sandbox.image_store import root_of
from rondel.runtime.sandbox.oci_runtime import find_runsc
from rondel.runtime.sandbox.probe import find_isolation

Spec = str | dict[str, Any]
PATHS = ("image", "kernel", "root")  # settings that may name something beside the recipe
TRIAL = "print(6 * 7)"
# bytes in several processes at once, each of which touches its own: how many of them were allowed to
HOLDING = """
import os, time
def hold():
    try: x = bytearray({bytes})
    except MemoryError: os._exit(1)
    for i in range(0, len(x), 4096): x[i] = 1
    time.sleep(0.5); os._exit(0)
children = [os.fork() or hold() for _ in range({processes})]
print(sum(os.waitpid(one, 0)[1] == 0 for one in children))
"""
TRIED = 96 << 20  # bytes that the box of a trial may have


def sandbox_of(value: Spec = "process", where: str = "sandbox") -> Sandbox:
    """What makes the boxes; ConfigError for a kind or a setting that there is not. Nothing is started."""
    if not isinstance(value, str | dict):
        raise ConfigError(f'{where} = {value!r}; it is a kind, or {{ kind = "container", ... }}')
    try:
        kind, settings, limits, warm = read_sandbox(where, value)
    except SettingsFault as fault:
        raise ConfigError(explain_settings(fault)) from fault
    for name in PATHS:
        if settings.get(name) and os.path.exists(found := locate_path(settings[name])):
            settings[name] = str(found)
    return Sandbox(kind, limits=limits if value != kind else {}, warm=warm, **settings)


def prepare(sandbox: Sandbox, say: Callable[[str], None] = lambda text: None) -> None:
    """What the first box would wait for: the image is fetched or unpacked, and that is said."""
    image = sandbox.settings.get("image", "")
    if sandbox.kind == "gvisor":
        find_runsc()
        root_of(image, say)
    if sandbox.kind != "container":
        return
    tool = find_container_tool(image, sandbox.settings.get("tool", "auto"))
    if Path(tool).name not in ENGINES:
        root_of(image, say)
    else:
        say(f"image {image} for {Path(tool).name}")
        local_image(tool, image)


def describe(sandbox: Sandbox) -> str:
    """ "bubblewrap: files, network, ...", or for other kinds what a first box said and how long it took; SandboxError
    where there is none.
    """
    if sandbox.shows_host:
        walls = {"process": "auto", "namespaces": "native", "bubblewrap": "bubblewrap"}
        return find_isolation(walls[sandbox.kind]).summary_line()
    prepare(sandbox)
    began = time.perf_counter()
    limits = Limits(wall=60) if sandbox.is_machine else Limits(wall=60, memory=TRIED)
    cell = Sandbox(sandbox.kind, **sandbox.settings).cell(limits)  # the trial has limits of its own
    try:
        started = time.perf_counter()
        ran = cell.call(TRIAL, wall=30)
        ended = time.perf_counter()
        held = "" if sandbox.is_machine else _describe_memory(cell)
    finally:
        cell.kill()
    if ran.stdout != b"42\n":
        said = ran.stderr.decode(errors="replace").strip()[-200:] or ran.ended
        raise SandboxError(f"a box of kind '{sandbox.kind}' does not answer {TRIAL}: {said}; its image needs python3")
    own = Path(getattr(cell, "tool", sandbox.settings.get("provider", sandbox.kind))).name
    milliseconds = (1e3 * (started - began), 1e3 * (ended - started))
    return f"{sandbox.kind} by {own}: a box in %.0f ms, its first answer in %.0f ms{held}" % milliseconds


def _describe_memory(cell: Any) -> str:
    """What the limit of memory, tried, does not hold here; an engine of a plain user may have no control groups."""
    together = cell.call(HOLDING.format(bytes=TRIED // 2, processes=3), wall=30)
    if together.stdout != b"3\n":
        return ""
    alone = cell.call(HOLDING.format(bytes=4 * TRIED, processes=1), wall=30)
    return "; memory is not held" if alone.stdout == b"1\n" else "; memory is held for each process only"
