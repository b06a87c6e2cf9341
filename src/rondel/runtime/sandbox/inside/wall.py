"""The keeper of one box: puts the walls up, starts the first process behind them, and
ends it all when its own starter is gone.

controller ──control──> keeper ──> first process of the box ──> its commands
The keeper stays outside and does nothing but wait: for the box's end, or for the end
of `control`, which the kernel closes when the controller dies, however it dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

from rondel.runtime.sandbox.inside import groups, kernel, view
from rondel.runtime.sandbox.inside.init import serve

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    spec = json.loads(sys.argv[1])
    control = socket.socket(fileno=spec["control"])
    name = f"rondel-{os.getpid()}"
    made, counter = (
        groups.make_group(name, {"memory": spec["memory"], "pids": spec["processes"] + 1})
        if spec["group"]
        else ({}, "")
    )
    spec["grouped"] = "memory" in made
    attached = [os.open(f"{folder}/cgroup.procs", os.O_WRONLY) for folder in dict.fromkeys(made.values())]
    counts = os.open(counter, os.O_RDONLY) if counter else -1
    try:
        first = BUILDERS[spec["wall"]](control, spec, attached, counts)
        watch_child(first, control, 3000 if spec["wall"] == "bubblewrap" else 0)
    except BaseException as error:
        with suppress(OSError):
            control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
    finally:
        groups.remove_groups(list(made.values()))


def enter_namespaces(control: socket.socket, spec: dict[str, Any], attached: list[int], counts: int) -> int:
    """Namespaces of our own. A root needs none of users, unless it is one of a container that
    may not do much: its box runs under a number that nobody else has."""
    wanted = kernel.NEWNS | kernel.NEWPID | kernel.NEWIPC | kernel.NEWUTS | (0 if spec["network"] else kernel.NEWNET)
    root = spec["root"]
    uid, gid = os.geteuid(), os.getegid()
    try:
        first = kernel.fork_into(wanted if root else wanted | kernel.NEWUSER)
    except PermissionError:
        if not root:
            raise
        root, first = False, kernel.fork_into(wanted | kernel.NEWUSER)
    if first:
        return first
    try:
        kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
        if not root:
            view.write_file("/proc/self/setgroups", "deny")
            view.write_file("/proc/self/uid_map", f"{spec['uid']} {uid} 1")
            view.write_file("/proc/self/gid_map", f"{spec['uid']} {gid} 1")
            view.write_file("/proc/self/projid_map", "0 0 1")  # it can be set once, by anybody: not by a command
        socket.sethostname("box")
        if not spec["network"]:
            bring_up_loopback()
        view.build_view(spec)
        serve(control, spec, attached, counts)
    except BaseException as error:
        with suppress(OSError):
            control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
    os._exit(0)


def bring_up_loopback() -> None:
    """127.0.0.1 of the box's own network, by which its processes reach each other and nobody else; bubblewrap does the
    same."""
    up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS


def bubblewrap(control: socket.socket, spec: dict[str, Any], attached: list[int], counts: int) -> int:
    """The same view by `bwrap`. As root it keeps its capabilities for the first process,
    which gives them up for every command.
    """
    root = spec["root"]
    spec = {**spec, "groups": attached, "counter": counts}
    inherited = [control.fileno(), *attached, *([counts] if counts >= 0 else [])]
    command = [
        "bwrap",
        "--die-with-parent",
        "--as-pid-1",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--hostname",
        "box",
    ]
    command += [] if spec["network"] else ["--unshare-net"]
    command += (
        ["--cap-add", "ALL"] if root else ["--unshare-user", "--uid", str(spec["uid"]), "--gid", str(spec["uid"])]
    )
    for path in dict.fromkeys(above for one in (*view.ETC, *spec["shown"]) for above in folders_above(one)):
        command += ["--dir", path] if path != "/" else []  # else bwrap makes them for itself alone
    for path in view.SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    for path in (*view.ETC, *spec["shown"]):
        command += ["--ro-bind-try", path, path]
    if spec["network"]:
        command += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
    command += ["--dev", "/dev", "--proc", "/proc", "--ro-bind", HERE, "/.box/rondel/runtime/sandbox/inside"]
    command += ["--dir", "/dev/shm", "--remount-ro", "/dev"]
    places = [(path, 4) for path in spec["places"]]
    for path, share in ((spec["home"], 2), ("/tmp", 4), ("/dev/shm", 4), *places):
        if path == spec["home"] and spec["folder"]:
            command += ["--bind", spec["folder"], path]
        else:
            command += ["--perms", "1777", "--size", str(spec["disk"] // share), "--tmpfs", path]
    command += [
        "--remount-ro",
        "/",
        "--chdir",
        "/",
        "--",
        spec["python"],
        "-I",
        "-S",
        "-c",
        IN_BUBBLEWRAP,
        json.dumps(spec),
    ]
    first = os.fork()
    if first == 0:
        for fd in inherited:
            os.set_inheritable(fd, True)
        try:
            os.execvpe(command[0], command, dict(os.environ))
        finally:
            os._exit(1)
    return first


def folders_above(path: str) -> list[str]:
    """ "/usr/lib/x" -> ["/", "/usr", "/usr/lib"]. Without pathlib, whose import would take a tenth of a box's start."""
    parts = path.split("/")
    return ["/".join(parts[:n]) or "/" for n in range(1, len(parts))]


BUILDERS = {"native": enter_namespaces, "bubblewrap": bubblewrap}
IN_BUBBLEWRAP = "import sys; sys.path.insert(0, '/.box'); from rondel.runtime.sandbox.inside.init import main; main()"


def watch_child(first: int, control: socket.socket, patience: int) -> None:
    """`patience`: milliseconds for `first` to end by itself when the control is gone, as the
    first process behind bubblewrap does; `bwrap` itself is not that process, and killing it would not wait for the box.
    Until the box ends; its first process takes
    all others with it. By the parent's number too: a fork of the controller holds `control`."""
    parent, ends, poll = os.getppid(), os.pidfd_open(first), select.poll()
    poll.register(ends, select.POLLIN)
    poll.register(control, 0)  # its hanging up is always told
    while True:
        ready = dict(poll.poll(1000))
        if ends in ready:
            break
        if control.fileno() in ready or os.getppid() != parent:
            poll.unregister(control)
            if not poll.poll(patience):
                with suppress(ProcessLookupError):
                    os.kill(first, signal.SIGKILL)
            break
    os.waitpid(first, 0)
