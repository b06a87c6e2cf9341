"""What a box sees: a root of its own in memory, the system's programs read-only, one place to write with a size.

/                read-only tmpfs         /usr /bin /lib ...   the host's, read-only, as are
                 the folders of the interpreter
/proc            of the box's processes  /dev                 null zero full random urandom
/box /tmp /dev/shm                       one tmpfs of `disk` bytes and `files` files; or /box is a folder of the host
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rondel.runtime.sandbox.inside import kernel as k

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/ssl/certs",
)
DEVICES = ("null", "zero", "full", "random", "urandom")


def build_view(spec: dict[str, Any]) -> None:
    """In new namespaces, as their root. Afterwards nothing else of the host can be named."""
    k.mount("none", "/", flags=k.REC | k.PRIVATE)
    k.mount("box", "/tmp", "tmpfs", k.NOSUID | k.NODEV, "size=4m,mode=755")
    os.chdir("/tmp")
    os.mkdir("old")
    k.syscall(k.PIVOT_ROOT, b".", b"old")
    os.chdir("/")
    for path in SYSTEM:
        if os.path.islink("/old" + path):
            os.symlink(os.readlink("/old" + path), path)
        elif os.path.isdir("/old" + path):
            mount_host_path(path)
    for path in (*ETC, *spec["shown"]):
        if os.path.exists("/old" + path):
            mount_host_path(path)
    write_file(
        "/etc/passwd", f"root:x:0:0::/nowhere:/bin/false\nbox:x:{spec['uid']}:{spec['uid']}::{spec['home']}:/bin/sh\n"
    )
    write_file("/etc/group", f"root:x:0:\nbox:x:{spec['uid']}:\n")
    write_file("/etc/hosts", "127.0.0.1 localhost\n")
    if spec["network"]:
        write_file("/etc/resolv.conf", read_text("/old/etc/resolv.conf"))
    mount_devices()
    mount_writable(spec)
    os.mkdir("/proc", 0o555)
    with suppress(OSError):  # where the host's own is covered in part, there is none
        k.mount("proc", "/proc", "proc", k.NOSUID | k.NODEV | k.NOEXEC, "subset=pid,hidepid=2")
    k.unmount("/old")
    os.rmdir("/old")
    k.read_only("/", below=False)
    os.chdir(spec["home"])


def mount_host_path(path: str) -> None:
    """The host's, read-only, with what is mounted below it; no set-user-id bit and no device counts there."""
    if os.path.isdir("/old" + path):
        os.makedirs(path, exist_ok=True)
    else:
        write_file(path, "")
    k.mount("/old" + path, path, flags=k.BIND | k.REC)
    k.read_only(path)


def mount_devices() -> None:
    os.makedirs("/dev/shm")
    for name in DEVICES:
        write_file(f"/dev/{name}", "")
        k.mount(f"/old/dev/{name}", f"/dev/{name}", flags=k.BIND)
    shut_devices()
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")


def shut_devices() -> None:
    """Their times are the host's, and stay as they are; what is written to a device goes through all the same."""
    for name in DEVICES:
        k.read_only(f"/dev/{name}", k.RDONLY | k.NOSUID | k.NOEXEC)


def mount_writable(spec: dict[str, Any]) -> None:
    os.mkdir("/rw")
    flags = k.NOSUID | k.NODEV
    k.mount("rw", "/rw", "tmpfs", flags, f"size={spec['disk']},nr_inodes={spec['files']},mode=755")
    places = [(f"place-{n}", path) for n, path in enumerate(spec["places"])]
    for part, path in (("home", spec["home"]), ("tmp", "/tmp"), ("shm", "/dev/shm"), *places):
        os.makedirs(path, exist_ok=True)
        if part == "home" and spec["folder"]:
            k.mount("/old" + spec["folder"], path, flags=k.BIND)
            k.read_only(path, flags)
            continue
        os.mkdir(f"/rw/{part}", 0o700)
        if os.geteuid() == 0:
            os.chown(f"/rw/{part}", spec["uid"], spec["uid"])
        k.mount(f"/rw/{part}", path, flags=k.BIND)
        k.read_only(path, flags)
    k.unmount("/rw")
    os.rmdir("/rw")


def write_file(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def read_text(path: str) -> str:
    with suppress(OSError), open(path) as file:
        return file.read()
    return ""
