"""Addresses that only this machine reaches, and sockets that listen there and nowhere else."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any


def is_loopback(host: str) -> bool:
    """Whether what listens there can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_listening_socket(host: str, port: int = 0) -> tuple[int, int]:
    """-> (file descriptor, port) of a socket that listens at this address only; the caller
    closes it. torch's own store takes all addresses.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    made = socket.create_server((host, port), family=family)
    port = made.getsockname()[1]
    return made.detach(), port


def loopback_interface() -> str:
    """Its name, as gloo and NCCL want it: lo, lo0."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def gloo_at(host: str, seconds: float) -> Any:
    """Options of a gloo group whose store is at `host`: where that is a loopback address,
    its members listen there and nowhere else.
    """
    from torch.distributed import ProcessGroupGloo as Gloo

    options = Gloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds)
    options._devices = [Gloo.create_device(hostname=host) if is_loopback(host) else Gloo.create_default_device()]
    return options
