"""Containers and virtual machines as substrates: boxes of an image, by the tools that are there for it.

A container is started once and has commands carried out by `exec`. A machine runs an agent
on its serial line: one JSON object a line, {"argv", "env", "stdin"} in and {"exit",
"signal", "stdout", "stderr"} out, bytes in base64.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import select
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError, SandboxError
from rondel.core.sandbox_types import BoxFileError, CommandResult, Limits

HOME = "/box"


def container(
    limits: Limits, *, image: str = "python:3.11-slim", tool: str = "auto", folder: str | Path | None = None, **_: Any
) -> Container:
    tools = ("docker", "podman") if tool == "auto" else (tool,)
    found = next((path for name in tools if (path := shutil.which(name))), None)
    if found is None:
        raise SandboxError(
            f"substrate 'container' needs {' or '.join(tools)}, and none is on the PATH: install one, or use kind = "
            f"'process'"
        )
    return Container(found, limits, image, folder)


def container_command(tool: str, name: str, limits: Limits, image: str, folder: str | Path | None) -> list[str]:
    """The start: it sleeps, and commands are carried out in it."""
    home = (
        ["--volume", f"{Path(folder).resolve()}:{HOME}:rw"]
        if folder
        else ["--tmpfs", f"{HOME}:rw,nosuid,nodev,mode=1777,size={limits.disk}"]
    )
    return [
        tool,
        "run",
        "--detach",
        "--rm",
        "--init",
        "--name",
        name,
        "--network",
        "bridge" if limits.network else "none",
        "--read-only",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--user",
        "65534:65534",
        "--pids-limit",
        str(limits.processes + 2),
        "--memory",
        str(limits.memory),
        "--memory-swap",
        str(limits.memory),
        "--ulimit",
        f"fsize={limits.file}",
        "--ulimit",
        "core=0",
        "--ulimit",
        f"nofile={limits.open_files}",
        "--ulimit",
        f"cpu={int(limits.cpu + 1)}",
        *home,
        "--tmpfs",
        f"/tmp:rw,nosuid,nodev,mode=1777,size={limits.disk}",
        "--workdir",
        HOME,
        "--env",
        f"HOME={HOME}",
        image,
        "sleep",
        "infinity",
    ]


class ExternalSandbox:
    """What a box by another tool shares with one of ours: files through commands."""

    limits: Limits
    clean = False  # it is never used for somebody else

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult:
        raise NotImplementedError

    def call(self, code: str, *, stdin: bytes = b"", wall: float | None = None) -> CommandResult:
        return self.run(["python3", "-c", code], stdin=stdin, wall=wall)

    def begin(self, code: str, stdin: int, stdout: int, stderr: int, *, prelude: str = "") -> None:
        raise SandboxError(
            f"a box of kind {type(self).__name__.lower()} runs whole commands only; what is talked to needs a process "
            f"or a container"
        )

    def finish(self, wall: float) -> CommandResult:
        raise NotImplementedError

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        done = self.run(
            ["sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"', "write", path, f"{mode:o}"],
            stdin=data,
        )
        if not done.ok:
            raise BoxFileError(
                f"cannot write {path!r} in the box: {done.stderr.decode(errors='replace').strip() or done.ended}"
            )

    def read(self, path: str) -> bytes:
        done = self.run(["cat", "--", path])
        if not done.ok:
            raise BoxFileError(
                f"cannot read {path!r} in the box: {done.stderr.decode(errors='replace').strip() or done.ended}"
            )
        return done.stdout


class Container(ExternalSandbox):
    def __init__(self, tool: str, limits: Limits, image: str, folder: str | Path | None) -> None:
        self.tool, self.limits, self.name, self.alive = tool, limits, f"rondel-{uuid.uuid4().hex[:12]}", True
        try:
            started = subprocess.run(
                container_command(tool, self.name, limits, image, folder),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=300,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{tool} did not start a container of {image}: {error}") from error
        if started.returncode:
            said = started.stderr.decode(errors="replace").strip()[-300:]
            raise SandboxError(
                f"{tool} did not start a container of {image}: {said or f'exit code {started.returncode}'}; is its "
                f"engine running?"
            )

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult:
        variables = [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        began = time.monotonic()
        command = [self.tool, "exec", "--interactive", *variables, self.name, *argv]
        stdout, stderr, limit, code = communicate_bounded(
            command, stdin, began + (wall or self.limits.wall), self.limits.output
        )
        if limit:  # `exec` has no way to end what it began: the container goes, and with it all that runs
            self.kill()
        return CommandResult(
            code if 0 <= code < 128 else 0, max(0, code - 128, -code), stdout, stderr, limit, time.monotonic() - began
        )

    def begin(self, code: str, stdin: int, stdout: int, stderr: int, *, prelude: str = "") -> None:
        self._began = time.monotonic()
        try:
            self._open = subprocess.Popen(
                [self.tool, "exec", "--interactive", self.name, "python3", "-c", f"{prelude}\n{code}"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        except OSError as error:
            raise SandboxError(f"{self.tool} did not begin a command in {self.name}: {error}") from error

    def finish(self, wall: float) -> CommandResult:
        limit = ""
        try:
            code = self._open.wait(wall)
        except subprocess.TimeoutExpired:
            limit = "wall"
            self.kill()
            self._open.kill()
            code = self._open.wait()
        return CommandResult(
            code if 0 <= code < 128 else 0, max(0, code - 128, -code), b"", b"", limit, time.monotonic() - self._began
        )

    def interrupt(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [self.tool, "rm", "--force", self.name], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
                )


def communicate_bounded(command: list[str], stdin: bytes, deadline: float, most: int) -> tuple[bytes, bytes, str, int]:
    """-> (stdout, stderr, limit, exit code) of a program outside, ended at the deadline or when it says too much."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    said: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    limits: list[str] = []

    def feed_stdin() -> None:
        assert process.stdin
        with suppress(OSError), process.stdin:
            process.stdin.write(stdin)

    def read_stream(stream: Any) -> None:
        while piece := stream.read1(1 << 16):
            said[stream] += piece[: most - len(said[stream])]
            if len(said[stream]) >= most:
                limits.append("output")
                process.kill()

    threads = [
        threading.Thread(target=feed_stdin, daemon=True),
        *(threading.Thread(target=read_stream, args=(s,), daemon=True) for s in said),
    ]
    for thread in threads:
        thread.start()
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        limits.append("wall")
        process.kill()
        code = process.wait()
    for thread in threads[1:]:
        thread.join(1.0)
    return bytes(said[process.stdout]), bytes(said[process.stderr]), limits[0] if limits else "", code


# -- machines ----------------------------------------------------------------------------------------


def make_microvm(limits: Limits, *, kernel: str = "", root: str = "", **_: Any) -> Machine:
    tool = find_tool("microvm", "firecracker", kernel, root)
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        raise SandboxError(
            "substrate 'microvm' needs /dev/kvm, which is not there or may not be opened: use kind = 'vm' or 'process'"
        )
    config = tempfile.NamedTemporaryFile("w", suffix=".json", delete=False)  # noqa: SIM115
    with config:
        json.dump(micro_config(limits, kernel, root), config)
    return Machine([tool, "--no-api", "--config-file", config.name], limits, leaves=Path(config.name))


def micro_config(limits: Limits, kernel: str, root: str) -> dict[str, Any]:
    """As Firecracker reads it; no network device is among it."""
    return {
        "boot-source": {"kernel_image_path": kernel, "boot_args": "console=ttyS0 quiet reboot=k panic=1 pci=off"},
        "drives": [{"drive_id": "root", "path_on_host": root, "is_root_device": True, "is_read_only": True}],
        "machine-config": {"vcpu_count": 1, "mem_size_mib": limits.memory >> 20},
    }


def make_machine(limits: Limits, *, kernel: str = "", root: str = "", **_: Any) -> Machine:
    tool = find_tool("vm", f"qemu-system-{platform.machine()}", kernel, root)
    return Machine(machine_command(tool, limits, kernel, root), limits)


def machine_command(tool: str, limits: Limits, kernel: str, root: str) -> list[str]:
    fast = ["-enable-kvm", "-cpu", "host"] if os.access("/dev/kvm", os.R_OK | os.W_OK) else []
    return [
        tool,
        *fast,
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
        "-nic",
        "none",
        "-smp",
        "1",
        "-m",
        f"{limits.memory >> 20}M",
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-kernel",
        kernel,
        "-append",
        "console=ttyS0 quiet panic=-1 root=/dev/vda ro",
        "-drive",
        f"file={root},if=virtio,format=raw,snapshot=on",
        "-serial",
        "stdio",
    ]


def find_tool(kind: str, tool: str, kernel: str, root: str) -> str:
    path = shutil.which(tool)
    if path is None:
        raise SandboxError(
            f"substrate '{kind}' needs {tool}, which is not on the PATH: install it, or use kind = 'process'"
        )
    for name, value in (("kernel", kernel), ("root", root)):
        if not value or not os.path.isfile(value):
            raise ConfigError(
                f"substrate '{kind}': {name} = {value!r} is no file; it needs a kernel and a root image whose init is "
                f"the agent"
            )
    return path


class Machine(ExternalSandbox):
    """A virtual machine, one command after the other on its serial line."""

    def __init__(
        self, command: list[str], limits: Limits, *, leaves: Path | None = None, patience: float = 60.0
    ) -> None:
        self.limits, self.leaves, self.patience = limits, leaves, patience
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        self.rest = b""
        if self._read_message(time.monotonic() + patience) is None:  # {"ready": true}
            self.kill()
            raise SandboxError(f"{command[0]}: no agent of the machine answered within {patience:g} s")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult:
        assert self.process.stdin
        began = time.monotonic()
        order = {"argv": argv, "env": env or {}, "stdin": base64.b64encode(stdin).decode()}
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise SandboxError(f"the machine has ended: {error}") from error
        told = self._read_message(began + (wall or self.limits.wall))
        if told is None:
            ended = not self.alive
            self.kill()
            if ended:
                raise SandboxError("the machine has ended")
            return CommandResult(0, 9, b"", b"", "wall", time.monotonic() - began)
        stdout, stderr = (base64.b64decode(told[name]) for name in ("stdout", "stderr"))
        most = self.limits.output
        limit = "output" if max(len(stdout), len(stderr)) > most else ""
        return CommandResult(
            told["exit"], told["signal"], stdout[:most], stderr[:most], limit, time.monotonic() - began
        )

    def _read_message(self, deadline: float) -> dict[str, Any] | None:
        """The next JSON object; what a booting kernel says is no JSON. None: too late, or the machine has ended."""
        assert self.process.stdout
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        while True:
            line, newline, rest = self.rest.partition(b"\n")
            if newline:
                self.rest = rest
                with suppress(ValueError):
                    if isinstance(value := json.loads(line), dict):
                        return value
                continue
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000) or not (
                piece := os.read(self.process.stdout.fileno(), 1 << 16)
            ):
                return None
            self.rest += piece
            if len(self.rest) > 4 * self.limits.output + (1 << 20):
                return None

    def interrupt(self) -> None:
        self.process.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
        if self.leaves:
            self.leaves.unlink(missing_ok=True)
