"""Containers of an engine as substrate: docker or podman, with an image of theirs or a folder of ours."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rondel.core.errors import SandboxError
from rondel.core.sandbox_types import BoxUsage, Limits
from rondel.runtime.sandbox.external import ENV, FIRST, GO_BYTES, HOME, ContainerSandbox, KeptProcess
from rondel.runtime.sandbox.image_store import is_layout, manifest_of
from rondel.runtime.sandbox.oci_seccomp import seccomp_file
from rondel.runtime.sandbox.usage import is_hybrid
from rondel.runtime.sandbox.users import NOBODY, is_real_root, random_user_id

SHARED = 4096  # processes of all boxes of one user together, where they have no users of their own
ENGINES, RUNTIMES = ("docker", "podman"), ("crun", "runc")


def make_engine_container(
    tool: str, limits: Limits, *, image: str, folder: str | Path | None = None, **_: Any
) -> Container:
    return Container(tool, limits, local_image(tool, image), folder)


def find_container_tool(image: str, tool: str = "auto") -> str:
    """The program that makes boxes of this image; SandboxError with the remedy where it is not installed."""
    is_folder = Path(image).is_dir()
    names: tuple[str, ...] = (tool,) if tool != "auto" else (*RUNTIMES, *ENGINES) if is_folder else ENGINES
    if is_hybrid() and not is_real_root():
        names = tuple(name for name in names if name != "crun")
        if not names:
            raise SandboxError(
                "crun refuses a machine with controllers in both versions of control groups, and only a root can hide "
                "one of them from it: use tool = 'runc' (apt install runc), or kind = 'process'"
            )
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        listed, small = " or ".join(names), names[0] if is_folder or tool != "auto" else "podman"
        raise SandboxError(
            f"substrate 'container' needs {listed}, and none is on the PATH: apt install {small}, or use kind = "
            "'process'"
        )
    return found


@cache
def local_image(tool: str, image: str) -> str:
    """The name by which the engine knows an image: a folder is read into its store once."""
    if not is_layout(image):
        return image
    name = f"localhost/rondel-image:{manifest_of(Path(image))[0].partition(':')[2][:32]}"
    if not subprocess.run([tool, "image", "inspect", name], capture_output=True).returncode:
        return name
    if Path(tool).name == "docker":
        raise SandboxError(
            f"docker reads no image folder: use tool = 'crun' or 'podman', or docker load an archive of {image}"
        )
    pulled = subprocess.run(
        [tool, "pull", "--quiet", f"oci:{Path(image).resolve()}:latest"], capture_output=True, text=True
    )
    done = pulled
    if not pulled.returncode:
        done = subprocess.run(
            [tool, "tag", pulled.stdout.strip().splitlines()[-1], name], capture_output=True, text=True
        )
    if done.returncode:
        raise SandboxError(f"{tool} cannot read the image of {image}: {done.stderr.strip()[-300:]}")
    return name


def container_command(tool: str, name: str, limits: Limits, image: str, folder: str | Path | None) -> list[str]:
    """The start: its first process waits for the end of its stdin, and commands are carried out beside it."""
    home = (
        ["--volume", f"{Path(folder).resolve()}:{HOME}:rw"]
        if folder
        else ["--tmpfs", f"{HOME}:rw,nosuid,nodev,mode=1777,size={limits.disk}"]
    )
    variables = [word for key, value in ENV.items() for word in ("--env", f"{key}={value}")]
    own = is_real_root()  # then each box has a user of its own, whose processes the kernel counts
    user, most = (random_user_id(), limits.processes + 2) if own else (NOBODY, SHARED)
    return [
        *client(tool), "run", "--interactive", "--rm", "--name", name, "--network", "bridge" if limits.network else "none", "--read-only",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--security-opt", f"seccomp={seccomp_file()}", "--user", f"{user}:{user}", "--pids-limit", str(limits.processes + 2),
        "--memory", str(limits.memory), "--memory-swap", str(limits.memory), "--ulimit", f"fsize={limits.file}", "--ulimit", "core=0",
        "--ulimit", f"nofile={limits.open_files}", "--ulimit", f"nproc={most}", "--ulimit", f"cpu={int(limits.cpu + 1)}",
        "--ulimit", f"data={limits.memory + GO_BYTES}", *home,  # of each process: a plain user's engine may have no control groups
        "--tmpfs", f"/tmp:rw,nosuid,nodev,mode=1777,size={limits.disk}", "--shm-size", f"{limits.disk}b",
        "--tmpfs", "/sys/fs/cgroup:ro,nosuid,nodev,noexec,size=4k", "--workdir", HOME, *variables, image, *FIRST,
    ]  # fmt: skip


def client(tool: str) -> list[str]:
    """The engine as it is called here: its crun refuses a machine with controllers in both versions
    of control groups."""
    if Path(tool).name == "podman" and is_hybrid() and shutil.which("runc"):
        return [tool, "--runtime", "runc"]
    return [tool]


class Container(ContainerSandbox):
    def __init__(self, tool: str, limits: Limits, image: str, folder: str | Path | None) -> None:
        self.tool, self.limits, self.name = tool, limits, f"rondel-{uuid.uuid4().hex[:12]}"
        try:
            self._kept = KeptProcess(
                container_command(tool, self.name, limits, image, folder), f"a container of {image} by {tool}", 300.0
            )
        except SandboxError as error:
            raise SandboxError(f"{error}; is its engine running?") from error
        self._lock = threading.Lock()

    def exec_command(self, argv: list[str], env: dict[str, str]) -> list[str]:
        variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        return [*client(self.tool), "exec", "--interactive", *variables, self.name, *argv]

    def usage(self) -> BoxUsage:
        """By the engine's own count, if it has one."""
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError, subprocess.TimeoutExpired):
            command = [self.tool, "stats", "--no-stream", "--format", "json", self.name]
            told = json.loads(subprocess.run(command, capture_output=True, timeout=10).stdout)[0]
            return BoxUsage(cpu=_seconds(told["cpu_time"]))
        return BoxUsage()

    def kill(self) -> None:
        with self._lock:
            if not self.alive:
                return
            self.alive = False
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [self.tool, "rm", "--force", "--time", "0", self.name]
                if Path(self.tool).name == "podman"
                else [self.tool, "rm", "--force", self.name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=60,
            )
        self._kept.end()


def _seconds(text: str) -> float:
    """podman's "1m2.5s", "31.2ms" in seconds."""
    total, number = 0.0, ""
    for part in text.replace("ms", "k").replace("us", "u").replace("µs", "u"):
        if part in "hmsku":
            total += float(number) * {"h": 3600.0, "m": 60.0, "s": 1.0, "k": 1e-3, "u": 1e-6}[part]
            number = ""
        else:
            number += part
    return total
