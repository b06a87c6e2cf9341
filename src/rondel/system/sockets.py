"""Addresses that only this machine reaches, and sockets that listen there and nowhere else."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

SIOCGIFADDR = 0x8915  # Linux: the address of an interface
LOST = (  # what gloo, NCCL and torch's store say of it
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "no route to host",
    "remote process exited",
    "connectfullmesh failed",
)


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


def own_address(towards: str) -> str:
    """The address of this machine that a connection to this one would come from; nothing is sent.

    A machine's host name may lead to another one, on Debian to 127.0.1.1, which no other machine reaches.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address; None where the system does not tell."""
    if is_loopback(address):
        return loopback_interface()
    try:
        import fcntl

        wanted = socket.inet_aton(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # an interface without an address
                    if fcntl.ioctl(probe, SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))[20:24] == wanted:
                        return name
    except (ImportError, OSError):
        pass
    return None


def set_interface(towards: str) -> None:
    """torch's own groups listen at the address by which this machine reaches `towards`, unless the user has named an
    interface. NCCL finds its way between machines itself; on one machine it stays there.
    """
    try:
        address = own_address(towards)
    except OSError:  # the group will say that it cannot be reached
        return
    if name := interface_of(address):
        for library in ("GLOO", "NCCL") if is_loopback(address) else ("GLOO",):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)


def gloo_at(host: str, seconds: float) -> Any:
    """Options of a gloo group whose store is at `host`: its members listen at the address by which they reach it, and
    nowhere else; GLOO_SOCKET_IFNAME names another interface.
    """
    from torch.distributed import ProcessGroupGloo as Gloo

    options = Gloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds)
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named and not is_loopback(host):
        device = Gloo.create_device(interface=named.partition(",")[0])
    else:
        device = Gloo.create_device(hostname=host if is_loopback(host) else own_address(host))
    options._devices = [device]
    return options


def is_lost_peer(error: BaseException) -> bool:
    """Whether a process ended, or its machine, while others waited for it in a collective."""
    return any(words in str(error).lower() for words in LOST)
