"""Machines made of this one: each has its own network, host name, processes and shared memory; the disk is common.

    a = Node("node-a", "10.77.0.1")        b = Node("node-b", "10.77.0.2")        join(a, b)
    a.start("torchrun", ...)               a command inside
    a.end()                                as if its plug were pulled: all its processes are gone

Needs root, unshare, setpriv, nsenter and ip (util-linux, iproute2), and a kernel that lets one make namespaces.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

BEGIN = """
hostname "$0"
mount --bind "$1" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/ray # where Ray keeps the sockets and logs of a machine
mount -t tmpfs tmpfs /tmp/ray
echo nameserver 127.0.0.1 > /dev/shm/resolv.conf # answers at once that there is none
mount --bind /dev/shm/resolv.conf /etc/resolv.conf
ip link set lo up
exec sleep 1000000
"""
_links = itertools.count()


class Node:
    """One of them; `hosts`: a file like /etc/hosts with the names of all."""

    def __init__(self, name: str, address: str, hosts: Path) -> None:
        self.name, self.address = name, address
        apart = ("--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
        with_the_test = ("setpriv", "--pdeathsig", "KILL")  # killed or not
        self._holder = subprocess.Popen([*with_the_test, "unshare", *apart, "bash", "-euc", BEGIN, name, str(hosts)])
        self.init = 0
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        for _ in range(100):
            if self._holder.poll() is not None:
                raise OSError(f"no namespaces: unshare ended with {self._holder.returncode}")
            found = children.read_text().split()
            if found and Path(f"/proc/{found[0]}/comm").read_text() == "sleep\n":
                self.init = int(found[0])
                return
            time.sleep(0.05)
        self.end()
        raise OSError("a node did not come up within 5 s")

    def command(self, *words: str | Path) -> list[str]:
        """What starts these words inside."""
        return [
            "nsenter",
            f"--target={self.init}",
            "--net",
            "--uts",
            "--ipc",
            "--pid",
            "--mount",
            "--",
            *map(str, words),
        ]

    def start(self, *words: str | Path, **how: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.command(*words), **how)

    def run(self, *words: str | Path) -> str:
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True, timeout=60).stdout

    def listening(self) -> set[str]:
        """Addresses at which its TCP sockets listen."""
        rows = [
            line.split() for line in self.run("ss", "--listening", "--tcp", "--numeric", "--no-header").splitlines()
        ]
        return {row[3].rpartition(":")[0] for row in rows}

    def end(self) -> None:
        self._holder.kill()  # and the first process of the node, and so all of them
        self._holder.wait()


def join(a: Node, b: Node) -> None:
    """A cable between them. Their addresses are on bridges: one whose other end is gone is gone, the machine is not."""
    n = next(_links)
    names = [f"rl{a.init % 100000}x{n}", f"rl{b.init % 100000}y{n}"]
    _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
    for node, name in zip((a, b), names):
        _ip("link", "set", name, "netns", str(node.init))
        node.run("ip", "link", "add", "rondel0", "type", "bridge")
        node.run("ip", "link", "set", name, "master", "rondel0", "up")
        node.run("ip", "address", "add", f"{node.address}/24", "dev", "rondel0")
        node.run("ip", "link", "set", "rondel0", "up")


@cache
def missing() -> str:
    """Why there can be none here; empty where there can."""
    if absent := [tool for tool in ("unshare", "setpriv", "nsenter", "ip", "ss", "mount") if not shutil.which(tool)]:
        return f"{', '.join(absent)} is missing"
    nodes: list[Node] = []
    try:
        with contextlib.ExitStack() as ends:
            for i in (1, 2):
                nodes.append(Node(f"try-{i}", f"10.76.0.{i}", Path("/etc/hosts")))
                ends.callback(nodes[-1].end)
            join(*nodes)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no namespaces here: {error}"
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def hosts_file(path: Path, nodes: Sequence[tuple[str, str]], debian: str = "") -> Path:
    """/etc/hosts with the names of all; on the node `debian` its own leads to 127.0.1.1, as Debian has it."""
    rows = [f"{'127.0.1.1' if name == debian else address} {name}\n" for name, address in nodes]
    path.write_text("127.0.0.1 localhost\n" + "".join(rows))
    return path
