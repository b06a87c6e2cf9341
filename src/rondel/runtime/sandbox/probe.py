"""Which wall stands on this machine, and what it holds: tried once, from inside a box, not read off a version."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass

from rondel.core.errors import SandboxError
from rondel.core.sandbox_types import Limits
from rondel.runtime.sandbox.cell import NamespaceCell

# in this order: ours also holds the number of files and hides the kernel's pages of /proc
WALLS = ("native", "bubblewrap")
REQUIRED = ("files", "network", "processes")
REMEDY = (
    "Install bubblewrap (apt install bubblewrap), or let this user make namespaces: sysctl "
    "kernel.unprivileged_userns_clone=1; "
    "in Docker --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
)
TRY = """
import json, os, socket
told = json.loads(input())
status = dict(line.split(":", 1) for line in open("/proc/self/status")) if os.path.exists("/proc/self/status") else {}
def denied(act):
    try:
        act()
    except OSError:
        return True
    return False
print(json.dumps({
    "files": denied(lambda: open(told["file"])) and denied(lambda: open("/written", "w")) and not os.path.exists("/home"),
    "network": denied(lambda: socket.create_connection(("127.0.0.1", told["port"]), 2)),
    "processes": denied(lambda: os.kill(told["pid"], 0)),
    "user": os.getuid() != 0 and not int(status.get("CapEff", "0"), 16),
    "calls": "2" in status.get("Seccomp", ""),
}))
"""


@dataclass(frozen=True, slots=True)
class Isolation:
    """`Isolation("native", ("files", "network", "processes", "user", "calls",
    "memory", "count"))`: what was seen to hold.

    files network processes   nothing of the host's can be read or written, reached, or signalled; all
                              three, or there is no sandbox
    user       neither root nor any capability          calls   a seccomp filter
    memory     of the whole box, by a control group     count   processes, by number of the user or a control group
    """

    wall: str
    holds: tuple[str, ...]

    def summary_line(self) -> str:
        missing = [name for name in ("user", "calls", "memory", "count") if name not in self.holds]
        weaker = {
            "memory": "memory is held for each process only",
            "calls": "no filter of system calls",
            "count": "processes are not counted",
        }
        return f"{self.wall}: {', '.join(self.holds)}" + "".join(
            f"; {weaker.get(name, 'no ' + name)}" for name in missing
        )


@functools.cache
def find_isolation(wall: str = "auto") -> Isolation:
    """The first wall that holds what is required, or a SandboxError that says what each lacks."""
    faults = []
    for name in WALLS if wall == "auto" else (wall,):
        try:
            found = probe_isolation(name)
        except SandboxError as error:
            faults.append(f"{name}: {error}")
            continue
        lacks = [one for one in REQUIRED if one not in found.holds]
        if not lacks:
            return found
        faults.append(f"{name}: does not hold {', '.join(lacks)}")
    raise SandboxError(
        f"code of the policy cannot be run here, for nothing would contain it ({'; '.join(faults)}). {REMEDY}"
    )


def probe_isolation(wall: str) -> Isolation:
    if sys.platform != "linux":
        raise SandboxError(f"{sys.platform} has no namespaces; use Linux, or a container as the substrate")
    if wall == "bubblewrap" and shutil.which("bwrap") is None:
        raise SandboxError("bwrap is not installed")
    cell = NamespaceCell(Limits(wall=10), wall)
    try:
        with tempfile.NamedTemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as server:
            os.chmod(file.name, 0o644)
            told = {"file": file.name, "port": server.getsockname()[1], "pid": cell.process.pid}
            seen = cell.call(TRY, stdin=json.dumps(told).encode())
        if not seen.ok:
            raise SandboxError(f"the trial failed: {seen.ended}: {seen.stderr.decode(errors='replace')[-300:]}")
        holds = [name for name, held in json.loads(seen.stdout).items() if held]
        holds += ["memory"] if cell.grouped else []
        forks = cell.call(
            f"import os, time\nfor _ in range({cell.limits.processes + 8}):\n    os.fork() or time.sleep(9)\n"
        )
        return Isolation(wall, (*holds, *(["count"] if b"BlockingIOError" in forks.stderr else [])))
    finally:
        cell.kill()
