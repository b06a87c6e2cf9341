"""What a command may leave in a box, and what the next one would see of it. Standard library and the sandbox alone: it
is run by a plain user, too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from rondel.core.sandbox_types import Limits
from rondel.runtime.sandbox.cell import NamespaceCell

LEFT = {  # what a command leaves -> code that leaves it
    "a file": "open('left', 'w')",
    "a file of no name": "import tempfile; tempfile.TemporaryFile()",
    "a file in /tmp": "open('/tmp/left', 'w')",
    "a folder": "os.mkdir('/dev/shm/left')",
    "a link": "os.symlink('/', 'left')",
    "a pipe": "os.mkfifo('left')",
    "a socket": "import socket; socket.socket(socket.AF_UNIX).bind('left')",
    "a closed home": "os.chmod('/box', 0)",
    "a home open to all": "os.chmod('/box', 0o7777)",
    "a closed /tmp": "os.chmod('/tmp', 0)",
    "the time of a change": "os.utime('/box', ns=(1, 1))",
    "the time of now": "os.utime('/tmp')",
    "the time of a mode": "os.chmod('/tmp', os.stat('/tmp').st_mode)",
    "an attribute": "os.setxattr('/box', 'user.left', b'1')",
    "an attribute of shm": "os.setxattr('/dev/shm', 'user.left', b'1')",
    "an access list": "os.setxattr('/box', 'system.posix_acl_default', bytes.fromhex('02000000 01000700ffffffff 04000700ffffffff 20000700ffffffff'))",
    "a flag": "import fcntl, struct; fcntl.ioctl(os.open('/box', 0), 0x40086602, struct.pack('l', 0x40))",
    "a process": "os.fork() or __import__('time').sleep(600)",
    "a daemon": "os.fork() or os.setsid() or os.fork() or __import__('time').sleep(600)",
    "numbers of processes": "for _ in range(5): os.fork() or os._exit(0)",
    "a thread": "import threading; threading.Thread(target=print, daemon=True).start()",
    "the priority of the first process": "os.setpriority(os.PRIO_PROCESS, 1, 10)",
    "its limits": "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (50, 50))",
    "its cores": "os.sched_setaffinity(1, {min(os.sched_getaffinity(0))})",
    "its schedule": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "its priority at the disk": "import ctypes; ctypes.CDLL(None).syscall(251, 1, 1, 3 << 13)",
    "memory of System V": "import ctypes; ctypes.CDLL(None).shmget(7, 4096, 0o1666)",
    "a semaphore of System V": "import ctypes; ctypes.CDLL(None).semget(7, 1, 0o1666)",
    "a semaphore": "import _multiprocessing as m; m.SemLock(1, 1, 1, '/left', False)",
    "settings of the kernel": "for name in ('kernel/pid_max', 'kernel/shmmax', 'fs/mqueue/msg_max'):\n    try: os.write(os.open('/proc/sys/' + name, os.O_WRONLY), b'400')\n    except OSError: pass",
    "slack of its timers": "os.write(os.open('/proc/1/timerslack_ns', os.O_WRONLY), b'900000000')",
    "the name of the box": "import socket; socket.sethostname('left')",
    "a lock": "import fcntl; fcntl.flock(os.open('/box', 0), fcntl.LOCK_EX)",
    "a name without a file": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0left'); s.listen()",
    "signals": "for n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass",
    "the time of the null device": "os.utime('/dev/null', ns=(1, 1))",
}
# one of each kind
FEW = (
    "a file", "a folder", "a closed home", "the time of a change", "an attribute", "a daemon", "its limits", "its cores",
    "memory of System V", "settings of the kernel", "the name of the box", "a lock",
)  # fmt: skip
SEES = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
for path in ('/box', '/tmp', '/dev/shm'):
    s = os.stat(path)
    print(os.listdir(path), oct(s.st_mode), s.st_nlink, s.st_mtime_ns == s.st_atime_ns - 61 * 10**9, os.listxattr(path), os.statvfs(path)[3:8])
print(sum(name.isdigit() for name in os.listdir('/proc')) if os.path.exists('/proc') else '')
print(os.getpriority(0, 0), os.sched_getaffinity(0), os.sched_getscheduler(0), libc.syscall(252, 1, 0), os.umask(0), sorted(os.environ))
print([(what, resource.getrlimit(getattr(resource, what))) for what in dir(resource) if what.startswith('RLIMIT')])
print(os.uname().nodename, [open(f).read() for f in ('/proc/sys/kernel/pid_max', '/proc/sys/kernel/shmmax', '/proc/sys/fs/mqueue/msg_max') if os.path.exists(f)])
print(libc.shmget(7, 4096, 0), libc.semget(7, 1, 0), os.stat('/dev/null').st_mtime_ns == 1)
"""


def leave_and_look(wall: str, names: Collection[str] = tuple(LEFT)) -> tuple[set[str], set[bytes]]:
    """-> (what did not cost a box, all that the next commands saw). A box is used again if it says that it is as new."""
    limits = Limits(wall=5, processes=12, memory=128 << 20, disk=4 << 20)
    cell, kept, seen = NamespaceCell(limits, wall), set(), set()
    try:
        for name in names:
            cell.call(f"import os\n{LEFT[name]}")
            if cell.clean:
                kept.add(name)
            else:
                cell.kill()
                cell = NamespaceCell(limits, wall)
            again = cell.call(SEES)
            assert again.ok and cell.clean, (name, again)
            seen.add(again.stdout)
    finally:
        cell.kill()
    return kept, seen


if __name__ == "__main__":
    _, found = leave_and_look(sys.argv[1], FEW if sys.argv[2:] == ["few"] else tuple(LEFT))
    print("all saw the same" if len(found) == 1 else b"\n---\n".join(found).decode())
