"""Virtual machines as substrates: boxes of a kernel and a root disk, by Firecracker or QEMU.

A machine runs an agent on its serial line: one JSON object a line, {"argv", "env", "stdin"} in and {"exit",
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError, SandboxError
from rondel.core.sandbox_types import CommandResult, Limits
from rondel.runtime.sandbox.external import ExternalSandbox
from rondel.runtime.sandbox.leftovers import paths_of_ended

CONFIGS = "rondel-machine-"  # of Firecracker, and the number of its controller


def make_microvm(limits: Limits, *, kernel: str = "", root: str = "", **_: Any) -> Machine:
    tool = find_tool("microvm", "firecracker", kernel, root)
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        raise SandboxError(
            "substrate 'microvm' needs /dev/kvm, which is not there or may not be opened: use kind = 'vm' or 'process'"
        )
    config = tempfile.NamedTemporaryFile("w", prefix=f"{CONFIGS}{os.getpid()}-", suffix=".json", delete=False)  # noqa: SIM115
    with config:
        json.dump(micro_config(limits, kernel, root), config)
    return Machine([tool, "--no-api", "--config-file", config.name], limits, leaves=Path(config.name))


def remove_dead_configs() -> list[Path]:
    """Of machines whose controller was killed. -> those that are gone now."""
    removed = paths_of_ended(Path(tempfile.gettempdir()), CONFIGS)
    for one in removed:
        one.unlink(missing_ok=True)
    return removed


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
        self.limits, self.leaves, self.patience, self._turn = limits, leaves, patience, threading.Lock()
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
    def alive(self) -> bool:  # type: ignore[override]
        return self.process.poll() is None

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult:
        with self._turn:
            return self._carry_out(argv, stdin, env, wall)

    def _carry_out(
        self, argv: list[str], stdin: bytes, env: dict[str, str] | None, wall: float | None
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
