"""Containers without an engine: an OCI runtime (crun, runc, gVisor's runsc) on a bundle that is written for each box.

The bundle's root is the unpacked image, read-only and shared; /box, /tmp and /dev/shm are in memory. A shell waits
beside the container, also when its controller was killed: the runtime removes its state, and the shell the control
groups. They are ours, since crun makes none on a machine with both versions of them.
https://github.com/opencontainers/runtime-spec/blob/main/config.md
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from rondel.core.errors import BoxError, SandboxError
from rondel.core.sandbox_types import BoxUsage, Limits
from rondel.runtime.sandbox.external import ENV, FIRST, GO_BYTES, HOME, ContainerSandbox, KeptProcess
from rondel.runtime.sandbox.image_store import root_of
from rondel.runtime.sandbox.inside.groups import ROOT, make_group, remove_groups
from rondel.runtime.sandbox.leftovers import paths_of_ended
from rondel.runtime.sandbox.oci_seccomp import seccomp
from rondel.runtime.sandbox.usage import count_kills, group_usage, is_hybrid, own_folders
from rondel.runtime.sandbox.users import is_real_root, owner_of, random_user_id

SECONDS_OF_BUNDLE = 60  # that the shell of a controller that was killed has to remove it
BUNDLES = "rondel-bundle-"
# $1 (of the keeper, behind its bundle: $2) groups follow it, then a command, which is carried out in them
JOIN = 'n=$1; shift; while [ $n -gt 0 ]; do echo 0 > "$1/cgroup.procs"; shift; n=$((n-1)); done; exec "$@"'
KEEPER = """
bundle=$1; n=$2; shift 2; groups=
while [ $n -gt 0 ]; do groups="$groups $1"; shift; n=$((n-1)); done
exec 3<&0  # a shell without a terminal gives what runs beside it no stdin
(for g in $groups; do echo 0 > "$g/cgroup.procs"; done; exec "$@") <&3 3<&- &
exec 3<&-
wait $!; code=$?
for g in $groups; do n=50; while [ $n -gt 0 ] && ! rmdir "$g" 2>/dev/null; do sleep 0.02; n=$((n-1)); done; done
rm -rf "$bundle"
exit $code
"""


def make_oci_container(
    tool: str, limits: Limits, *, image: str, folder: str | Path | None = None, **_: Any
) -> OciContainer:
    return OciContainer(tool, limits, root_of(image), folder)


def find_runsc() -> str:
    found = shutil.which("runsc")
    if found is None:
        raise SandboxError(
            "substrate 'gvisor' needs runsc, which is not on the PATH: install it from https://gvisor.dev/docs, or use "
            "kind = 'container'"
        )
    return found


def make_gvisor(limits: Limits, *, image: str = "", folder: str | Path | None = None, **_: Any) -> OciContainer:
    return OciContainer(find_runsc(), limits, root_of(image), folder)


class OciContainer(ContainerSandbox):
    """One container of a root file system."""

    def __init__(self, tool: str, limits: Limits, root: Path, folder: str | Path | None = None) -> None:
        self.tool, self.limits, self.name = tool, limits, f"rondel-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        uid = owner_of(Path(folder)) if folder else random_user_id()
        self._kills = 0
        own = Path(tool).name
        clients = 6 if own == "crun" else 64  # beside the box's own, which its user's number counts too: threads of Go
        made, _ = make_group(self.name, {"memory": limits.memory, "pids": limits.processes + clients})
        self.grouped, self._groups = "memory" in made, list(dict.fromkeys(made.values()))
        remove_old_bundles()
        self._bundle, self._count = tempfile.mkdtemp(prefix=f"{BUNDLES}{os.getpid()}-"), itertools.count()
        try:
            go = 0 if own == "crun" else GO_BYTES
            spec = bundle_config(limits, root, folder, uid=uid, gvisor=own == "runsc", own_bytes=go)
            self._process = spec["process"]
            Path(self._bundle, "config.json").write_text(json.dumps(spec))
            keeper = ["sh", "-c", KEEPER, "keeper", self._bundle, str(len(self._groups)), *self._groups]
            self._client = runtime_command(tool, self._bundle)
            command = [*self._client, "run", "--bundle", self._bundle, self.name]
            self._kept = KeptProcess([*keeper, *command], f"a container by {own}")
        except BaseException:
            remove_groups(self._groups)
            shutil.rmtree(self._bundle, ignore_errors=True)
            raise
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end_container, self._kept, self._client, self.name)

    def exec_command(self, argv: list[str], env: dict[str, str]) -> list[str]:
        """With the whole of the first process's setting: a command by words alone would run as the root's."""
        variables = [f"{key}={value}" for key, value in (ENV | env).items()]
        file = Path(self._bundle, f"process-{next(self._count) % 16}.json")
        try:
            file.write_text(json.dumps(self._process | {"args": argv, "env": variables}))
        except OSError as error:
            raise BoxError(f"the box has ended: {error}") from error
        command = [*self._client, "exec", "--process", str(file), self.name]
        return ["sh", "-c", JOIN, "join", str(len(self._groups)), *self._groups, *command]

    def over_memory(self) -> bool:
        names = (self.name, f"{self.name}/{self.name}")  # runc makes one of its own below
        before, self._kills = self._kills, sum(count_kills(name, own_folders()) for name in names)
        return self._kills > before

    def usage(self) -> BoxUsage:
        return group_usage(self.name, own_folders()) if self.alive else BoxUsage()

    def kill(self) -> None:
        self.alive = False
        with self._lock:
            self._end()


def runtime_command(tool: str, bundle: str) -> list[str]:
    """The runtime as it is called here. crun refuses a machine with controllers in both versions of control groups,
    even where it is to make none: it is shown the first version alone. A plain user has no /run of its own: what the
    runtime knows of a container lies in its bundle.
    """
    own = Path(tool).name
    command = [tool, "--cgroup-manager=disabled"] if own == "crun" else [tool]
    if not is_real_root():
        return [*command, "--root", os.path.join(bundle, "state")]
    if own != "crun" or not is_hybrid():
        return command
    return ["unshare", "--mount", "sh", "-c", f'umount {ROOT}/unified && exec "$@"', "crun", *command]


def _end_container(kept: KeptProcess, client: list[str], name: str) -> None:
    kept.end()
    if kept.process.returncode < 0:  # it was killed, and could not clean up
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([*client, "delete", "--force", name], capture_output=True, timeout=30)


def remove_old_bundles() -> list[Path]:
    """Of controllers that were killed together with the shell beside their container. -> those that are gone now."""
    removed = []
    for one in paths_of_ended(Path(tempfile.gettempdir()), BUNDLES):
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > SECONDS_OF_BUNDLE:
                shutil.rmtree(one)
                removed.append(one)
    return removed


def bundle_config(
    limits: Limits, root: Path, folder: str | Path | None, *, uid: int, gvisor: bool = False, own_bytes: int = 0
) -> dict[str, Any]:
    """config.json. For a root the box's user is a number that nobody has; else a user namespace of one number.
    `own_bytes`: what a process is of the runtime's before it is the box's.
    """
    real = is_real_root()
    user = {"uid": uid, "gid": uid} if real else {"uid": 0, "gid": 0}
    # owned by the box's user: runc gives the place the mode of the image's folder, whatever is asked for
    tmpfs = ["nosuid", "nodev", "mode=1777", f"uid={user['uid']}", f"gid={user['gid']}", f"size={limits.disk}"]
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "nodev", "noexec"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "noexec", "mode=755", "size=64k"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*tmpfs, "noexec"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmp", "options": tmpfs},
        {"destination": HOME, "type": "bind", "source": str(Path(folder).resolve()), "options": ["bind", "rw", "nosuid", "nodev"]}
        if folder
        else {"destination": HOME, "type": "tmpfs", "source": "box", "options": tmpfs},
    ]  # fmt: skip
    namespaces = [
        "pid",
        "mount",
        "ipc",
        "uts",
        "cgroup",
        *([] if limits.network else ["network"]),
        *([] if real else ["user"]),
    ]
    ids = {} if real else {
        "uidMappings": [{"containerID": 0, "hostID": os.geteuid(), "size": 1}],
        "gidMappings": [{"containerID": 0, "hostID": os.getegid(), "size": 1}],
    }  # fmt: skip
    return {
        "ociVersion": "1.0.2",
        "hostname": "box",
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "process": {
            "terminal": False,
            "user": user,
            "args": FIRST,
            "env": [f"{key}={value}" for key, value in ENV.items()],
            "cwd": HOME,
            "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")},
            "noNewPrivileges": True,
            "oomScoreAdj": 1000,
            "rlimits": [
                {"type": f"RLIMIT_{kind}", "soft": value, "hard": value}
                for kind, value in (
                    ("CORE", 0), ("FSIZE", limits.file), ("NOFILE", limits.open_files), ("CPU", int(limits.cpu + 1)),
                    ("NPROC", limits.processes + 2), ("MSGQUEUE", 0), ("MEMLOCK", 1 << 16), ("RTPRIO", 0),
                    ("DATA", limits.memory + own_bytes),  # of each process: a plain user has no control groups
                )
            ],
        },
        "linux": {
            "namespaces": [{"type": kind} for kind in namespaces],
            **ids,
                        "resources": {
                "devices": [{"allow": False, "access": "rwm"}],
            },
            "maskedPaths": [
                "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
                "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/proc/kallsyms", "/proc/kmsg", "/proc/sysrq-trigger",
            ],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/interrupts"],
            **({} if gvisor else {"seccomp": seccomp()}),
        },
    }  # fmt: skip
