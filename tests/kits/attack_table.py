"""Attempts to get out of a box, on every substrate that works here, as a table: which were held, and which were not.

    PYTHONPATH=tests python tests/kits/attack_table.py [--image FOLDER] [--attempts 120] [KIND ...]
An attempt has escaped if it says so, shows the host's secret, reached a socket of the host, ended its process, changed
its files, or left a process. What else it may answer differs between walls; tests/e2e/test_sandbox.py checks that.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kits.root_folder import make_root
from kits.sandbox_attacks import ATTACKS, PRELUDE, Attack
from rondel.core.errors import BoxError, SandboxError
from rondel.core.sandbox_types import Limits
from rondel.runtime.sandbox.recipe import describe, sandbox_of

SECRET = "the-secret-of-the-host"
# what is the box's own in a container, and hidden by our walls alone: its first process, empty folders of its image
INSIDE = {
    "the first process", "/sys", "signals", "what a machine keeps", "maps of the first process", "namespaces of the first process",
}  # fmt: skip
SMALL = {
    "wall": 4.0,
    "cpu": 4.0,
    "memory": 128 << 20,
    "processes": 24,
    "disk": 16 << 20,
    "file": 8 << 20,
    "output": 20_000,
}


class AttackedHost:
    """What an attempt would like to reach, and whether one did."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.victim = subprocess.Popen(["sleep", "600"])
        self.listening = [
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
            socket.create_server(("127.0.0.1", 0)),
        ]
        self.listening[0].bind(str(folder / "socket"))
        self.listening[1].bind(f"\0rondel-{os.getpid()}")
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        for one in self.listening:
            one.listen()
        for one in (*self.listening, self.udp):
            one.setblocking(False)
        self.told = {
            "secret": str(self.secret), "home": str(Path.home()), "checkout": str(Path(__file__).parents[2]), "venv": sys.prefix,
            "victim": self.victim.pid, "pytest": os.getpid(), "unix": str(folder / "socket"), "abstract": f"rondel-{os.getpid()}",
            "tcp": self.listening[2].getsockname()[1], "udp": self.udp.getsockname()[1],
        }  # fmt: skip

    def reached(self) -> str:
        """What of it an attempt got at, or nothing."""
        if self.victim.poll() is not None:
            return "a process of the host was ended"
        if self.secret.read_text() != SECRET:
            return "a file of the host was changed"
        for one in self.listening:
            with suppress(BlockingIOError):
                one.accept()
                return "a socket of the host was reached"
        with suppress(BlockingIOError):
            self.udp.recv(1)
            return "a port of the host was reached"
        if Path("/dev/shm/rondel-left").exists() or Path("/box").exists():
            return "a file is left on the host"
        return ""

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for one in (*self.listening, self.udp):
            one.close()


@contextmanager
def attacked_host() -> Iterator[AttackedHost]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        host = AttackedHost(Path(folder))
        try:
            yield host
        finally:
            host.close()


def attempt(sandbox: Any, attack: Attack, host: AttackedHost) -> str:
    """Nothing where it was held, else what it got."""
    cell = sandbox.cell(Limits(**{**SMALL, **attack.limits}))
    try:
        stdin = json.dumps(host.told).encode() + b"\n" + (b"x" * (1 << 20) if "stdin" in attack.name else b"")
        ran = cell.run(["python3", "-I", "-c", PRELUDE + attack.code], stdin=stdin, wall=attack.wall)
        said = (ran.stdout + ran.stderr).decode(errors="replace")
    except BoxError:  # it broke its own box
        said = ""
    finally:
        cell.kill()
    if "ESCAPED" in said:
        return next(line for line in said.splitlines() if "ESCAPED" in line)[:120]
    return "the secret was shown" if SECRET in said else host.reached()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help="for containers; else a folder of this machine's own python3")
    parser.add_argument("--attempts", type=int, default=len(ATTACKS))
    parser.add_argument("kinds", nargs="*", default=["namespaces", "bubblewrap", "crun", "runc", "podman"])
    given = parser.parse_args()
    every = [attack for attack in ATTACKS if not attack.only][: given.attempts]
    failed = 0
    with tempfile.TemporaryDirectory() as work, attacked_host() as host:
        os.chmod(work, 0o755)
        image = given.image or str(make_root(Path(work, "root")))
        for kind in given.kinds:
            tool = kind in ("crun", "runc", "podman", "docker")
            sandbox = sandbox_of({"kind": "container", "image": image, "tool": kind} if tool else kind)
            try:
                describe(sandbox)
            except SandboxError as error:
                print(f"{kind:12} not here: {error}")
                continue
            attacks = [attack for attack in every if not tool or attack.name not in INSIDE]
            got = {attack.name: found for attack in attacks if (found := attempt(sandbox, attack, host))}
            failed += len(got)
            print(f"{kind:12} {len(attacks) - len(got)} of {len(attacks)} attempts held", flush=True)
            for name, found in got.items():
                print(f"{'':12} NOT HELD {name}: {found}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
