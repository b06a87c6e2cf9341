"""What one node of a cluster sees of itself and of the others. Standard library alone:
it must start where little is installed.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import socket
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("rondel", "torch", "transformers", "ray", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
PINGS, BLOCK, WAIT = 20, 32 << 20, 5.0  # round trips, bytes one way, seconds for a connection


class ClusterProbe:
    """An object for a worker on every node."""

    def __init__(self) -> None:
        self._servers: list[socket.socket] = []

    def facts(self) -> dict[str, Any]:
        name = socket.gethostname()
        try:
            resolved = socket.gethostbyname(name)
        except OSError as error:
            resolved = f"nothing ({error})"
        found: dict[str, str] = {}
        for package in PACKAGES:
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(package)
        gpus = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
        return {
            "host": name,
            "resolves_to": resolved,
            "versions": {"python": platform.python_version(), **found},
            "gpus": gpus,
        }

    def clock(self) -> float:
        return time.time()

    def leave(self, folder: str) -> str:
        """A file that nobody else could have written. -> its name"""
        path = Path(folder) / f".rondel-{secrets.token_hex(8)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
        return str(path)

    def sees(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            return Path(path).read_text() == Path(path).name
        return False

    def clear(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    # -- links -----------------------------------------------------------------------------------

    def listen(self, address: str) -> int:
        """Answers at this address of its own until `stop`. -> the port"""
        server = socket.create_server((address, 0))
        self._servers.append(server)
        threading.Thread(target=_accept_links, args=(server,), daemon=True).start()
        return int(server.getsockname()[1])

    def reach(self, address: str, port: int) -> dict[str, Any]:
        """{"latency": seconds of a round trip, "bandwidth": bytes a second}, or {"error": why not}."""
        try:
            with socket.create_connection((address, port), timeout=WAIT) as link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                trips = []
                for _ in range(PINGS):
                    began = time.perf_counter()
                    link.sendall(b"p")
                    _receive_exactly(link, 1)
                    trips.append(time.perf_counter() - began)
                began = time.perf_counter()
                link.sendall(b"b")
                block = memoryview(bytes(1 << 20))
                for _ in range(BLOCK // len(block)):
                    link.sendall(block)
                _receive_exactly(link, 1)
                return {"latency": min(trips), "bandwidth": BLOCK / (time.perf_counter() - began)}
        except OSError as error:
            return {"error": str(error) or type(error).__name__}

    def stop(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()


def _accept_links(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            link, _ = server.accept()
            threading.Thread(target=_echo_probe, args=(link,), daemon=True).start()


def _echo_probe(link: socket.socket) -> None:
    """p: a byte back.  b: a byte back for a block."""
    with link, contextlib.suppress(OSError):
        link.settimeout(60)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while word := link.recv(1):
            if word == b"b":
                _receive_exactly(link, BLOCK)
            link.sendall(b"k")


def _receive_exactly(link: socket.socket, count: int) -> None:
    while count:
        got = len(link.recv(min(count, 1 << 20)))
        if not got:
            raise ConnectionError("the other side closed")
        count -= got
