"""What code tries that wants out of its box, or wants more than its share: each says what it must have seen instead.

`held(act)` prints "held: PermissionError 1" where the act failed, and "ESCAPED" where it did not; `host` names things of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PRELUDE = """
import ctypes, json, os, signal, socket, stat, sys, time
host = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
def held(act):
    try:
        got = act()
    except BaseException as error:
        print("held:", type(error).__name__, getattr(error, "errno", ""))
    else:
        print("ESCAPED", repr(got)[:200])
def call(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "done"
"""
NONE = r"held: (FileNotFoundError 2|PermissionError 13|NotADirectoryError 20)"
REFUSED = r"held: (PermissionError (1|13)|OSError 38)"


@dataclass(frozen=True)
class Attack:
    name: str
    code: str
    saw: str  # a pattern in "how it ended | stdout | stderr"
    limits: dict[str, Any] = field(default_factory=dict)
    wall: float = 8.0
    only: str = ""  # a wall that this is promised by


ATTACKS = [
    # -- more than its share
    Attack("fork bomb", "while True:\n    os.fork()", "BlockingIOError"),
    Attack("fork bomb of a shell", "os.execv('/bin/sh', ['sh', '-c', ':(){ :|:& };:; wait'])", r"fork|exit code|SIG|wall", wall=1.0),
    Attack("thread bomb", "import threading\nwhile True:\n    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "can't start new thread"),
    Attack("memory", "x = [bytearray(1 << 24) for _ in range(1000)]", "MemoryError|memory limit"),
    Attack("shared memory", "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(30)]\nfor m in x:\n    for i in range(0, 1 << 26, 4096): m[i] = 1", "memory limit|MemoryError|Cannot allocate"),
    Attack("memory of many", "for i in range(20):\n    if os.fork() == 0:\n        x = b'x' * (60 << 20); time.sleep(1); os._exit(0)\n    time.sleep(.01)\ntry:\n    while True: os.wait()\nexcept ChildProcessError: print('ended')", "ended|memory limit", limits={"memory": 100 << 20}),
    Attack("disk", "n = 0\nwhile True:\n    with open(f'f{n}', 'wb') as f: f.write(bytes(1 << 22))\n    n += 1", "Errno 28"),
    Attack("disk by /tmp and shm", "for place in ('/tmp', '/dev/shm'):\n    try:\n        for n in range(64):\n            with open(f'{place}/f{n}', 'wb') as f: f.write(bytes(1 << 20))\n    except OSError as e: print('full', e.errno)", "full 28"),
    Attack("one large file", "with open('f', 'wb') as f:\n    while True: f.write(bytes(1 << 20))", r"Errno 27|Errno 28|SIGXFSZ"),
    Attack("sparse file", "held(lambda: os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 10**13)); open('f', 'wb').truncate(10**12)", r"held: OSError 27|SIGXFSZ"),
    Attack("millions of files", "for n in range(10**7):\n    open(f'f{n}', 'w').close()", r"Errno 28", only="native"),
    Attack("deep tree", "while True:\n    os.mkdir('d'); os.chdir('d')", r"Errno (28|36|12|2)|wall limit|cpu limit|memory limit"),
    Attack("open files", "x = []\nwhile True: x.append(open('/dev/null'))", "Errno 24"),
    Attack("endless loop", "while True: pass", "over its wall limit", wall=0.3),
    Attack("cpu", "while True: pass", "over its cpu limit", limits={"cpu": 1}, wall=8.0),
    Attack("sleep", "time.sleep(10**6)", "over its wall limit", wall=0.2),
    Attack("deaf to signals", "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: time.sleep(1)", "over its wall limit", wall=0.3),
    Attack("stops itself", "os.kill(os.getpid(), signal.SIGSTOP); print('went on')", "over its wall limit", wall=0.3),
    Attack("flood stdout", "while True: print('x' * 1000)", "over its output limit"),
    Attack("flood stderr", "while True: sys.stderr.write('x' * 1000)", "over its output limit"),
    Attack("stack overflow", "sys.setrecursionlimit(10**9)\nexec('def f(): return f() + sum(map(g, [1]))\\ndef g(_): return f()\\nf()')", "SIGSEGV|SIGABRT|MemoryError|RecursionError|SystemError|wall limit|cpu limit|memory limit", wall=1.0),
    Attack("raised limits", "import resource\nfor what in (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):\n    held(lambda: resource.setrlimit(what, (resource.RLIM_INFINITY,) * 2))", r"(held: ValueError \n?.*){4}"),
    Attack("priority", "held(lambda: os.nice(-5)); held(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(9)))", "held: PermissionError 1\nheld: PermissionError 1"),
    # -- what it is not shown
    Attack("shadow", "held(lambda: open('/etc/shadow').read())", NONE),
    Attack("a file of the host", "held(lambda: open(host['secret']).read()); held(lambda: os.listdir(os.path.dirname(host['secret'])))", NONE + r"\n" + NONE),
    Attack("keys", "held(lambda: os.listdir(os.path.join(host['home'], '.ssh'))); held(lambda: open(os.path.join(host['home'], '.bashrc')).read())", NONE + r"\n" + NONE),
    Attack("the checkout", "held(lambda: os.listdir(host['checkout']))", NONE),
    Attack("up and out", "held(lambda: open('../' * 20 + host['secret'].lstrip('/')).read()); held(lambda: open('/proc/self/root/../..' + host['secret']).read()); held(lambda: open('/proc/self/cwd/../..' + host['secret']).read())", rf"{NONE}\n{NONE}\n{NONE}"),
    Attack("a link out", "os.symlink(host['secret'], 'link'); held(lambda: open('link').read())", NONE),
    Attack("a hard link out", "held(lambda: os.link(host['secret'], 'link')); held(lambda: os.link('/usr/bin/env', 'link'))", rf"{NONE}\nheld: (OSError 18|PermissionError 1)"),
    Attack("environment", "print('RONDEL' in str(os.environ), 'secret' in str(os.environ), os.environ['HOME'])", r"False False /box"),
    Attack("inherited files", "import resource\nopen_ = []\nfor fd in range(3, 1024):\n    try: os.fstat(fd); open_.append(fd)\n    except OSError: pass\nprint('open', open_)", r"open \[\]"),
    Attack("the first process", "for what in ('environ', 'mem', 'maps', 'root/etc', 'cwd/', 'fd'):\n    held(lambda: (os.listdir if what in ('root/etc', 'cwd/', 'fd') else lambda p: open(p, 'rb').read())('/proc/1/' + what))", r"(held: (FileNotFoundError 2|PermissionError 13)\n){6}"),
    Attack("processes of the host", "print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit() and int(n) > 20))", r"\| \[\]"),
    Attack("/sys", "held(lambda: open('/sys/kernel/uevent_helper', 'w')); held(lambda: os.listdir('/sys'))", NONE),
    Attack("/proc/sys", "for name in ('sys/kernel/core_pattern', 'sysrq-trigger', 'sys/kernel/hostname'):\n    held(lambda: open('/proc/' + name, 'w').write('|/box/x'))", r"(held: (FileNotFoundError 2|PermissionError 13|OSError 30)\n){3}"),
    Attack("memory of the kernel", "for name in ('/dev/mem', '/dev/kmem', '/dev/kmsg', '/proc/kcore', '/dev/vda', '/dev/sda'):\n    held(lambda: open(name, 'rb').read(1))", rf"({NONE}\n){{6}}"),
    Attack("control groups", "held(lambda: os.listdir('/sys/fs/cgroup')); held(lambda: open('/sys/fs/cgroup/pids/cgroup.procs', 'w').write('0'))", rf"{NONE}\n{NONE}"),
    # -- what it may not write
    Attack("write outside", "for name in ('/x', '/etc/passwd', '/usr/x', '/dev/x', '/proc/x', sys.executable, os.__file__):\n    held(lambda: open(name, 'a'))", r"(held: (FileNotFoundError 2|PermissionError (1|13)|OSError (30|26))\n){7}"),
    Attack("name with a newline", "for name in ('a\\nb', '-rf *', '\\x1b[2J', 'é' * 100, '..\\n'):\n    open(name, 'w').write('x')\nprint(len(os.listdir('.')))", r"\| 5\n"),
    Attack("shared memory left", "held(lambda: call(29, 7, 4096, 0o1666)); open('/dev/shm/rondel-left', 'w').write('x')", REFUSED),
    Attack("message queue left", "held(lambda: call(68, 7, 0o1666))", REFUSED),
    # -- the network
    Attack("a server of the host", "held(lambda: socket.create_connection(('127.0.0.1', host['tcp']), 1)); held(lambda: socket.create_connection(('::1', host['tcp']), 1))", r"held: (OSError (101|99|97)|ConnectionRefusedError 111)\nheld: (OSError (101|99|97)|ConnectionRefusedError 111)"),
    Attack("datagrams", "try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', host['udp'])); print('nobody heard it')\nexcept OSError as e: print('held', e.errno)", "nobody heard it|held 101"),
    Attack("names", "held(lambda: socket.getaddrinfo('example.com', 80))", "held: gaierror"),
    Attack("the world", "held(lambda: socket.create_connection(('192.0.2.1', 80), 1))", "held: OSError 101"),
    Attack("a unix socket", "s = socket.socket(socket.AF_UNIX); held(lambda: s.connect(host['unix']))", NONE),
    Attack("an abstract socket", "s = socket.socket(socket.AF_UNIX); held(lambda: s.connect('\\0' + host['abstract']))", "held: ConnectionRefusedError 111"),
    Attack("other sockets", "for family, kind in ((16, 3), (17, 3), (40, 1), (38, 5), (2, 3)):\n    held(lambda: socket.socket(family, kind))", r"(held: (PermissionError 1|OSError 9[34])\n){5}"),
    # -- other processes
    Attack("signals", "held(lambda: os.kill(host['victim'], 9)); held(lambda: os.kill(host['pytest'], 9)); os.kill(1, 9) if os.getuid() == 1000 else held(lambda: os.kill(1, 9)); print('here', os.getppid())", r"held: ProcessLookupError 3\nheld: ProcessLookupError 3\n(held: PermissionError 1\n)?here 1"),
    Attack("kill all", "os.kill(-1, 9); time.sleep(9)", "SIGKILL|exit code|wall", wall=1.0),
    Attack("ptrace", "held(lambda: call(101, 16, 1, 0, 0)); held(lambda: call(101, 16, host['victim'], 0, 0))", rf"{REFUSED}\n{REFUSED}"),
    Attack("another's memory", "held(lambda: call(310, host['pytest'], 0, 0, 0, 0, 0)); held(lambda: call(311, 1, 0, 0, 0, 0, 0))", rf"{REFUSED}\n{REFUSED}"),
    Attack("daemon", "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 9); time.sleep(10**6)\n    os._exit(0)\nprint('gone')", "exit code 0 . gone"),
    Attack("daemon that holds stdout", "if os.fork() == 0:\n    os.setsid(); time.sleep(10**6)\nprint('gone')", "exit code 0 . gone"),
    Attack("zombies", "for _ in range(15):\n    if os.fork() == 0: os._exit(0)\nprint('many')", "exit code 0 . many"),
    Attack("stdin is not read", "print('ok')", "exit code 0 . ok"),
    Attack("stdout is closed", "os.close(1); os.close(2); time.sleep(10**6)", "over its wall limit", wall=0.3),
    # -- the kernel
    Attack("mount", "held(lambda: call(165, b'x', b'/box', b'tmpfs', 0, 0)); held(lambda: call(165, b'x', b'/', b'', 4096 | 32, 0)); held(lambda: call(166, b'/proc', 2))", rf"{REFUSED}\n{REFUSED}\n{REFUSED}"),
    Attack("chroot", "held(lambda: os.chroot('/box')); held(lambda: call(155, b'/box', b'/box'))", rf"{REFUSED}\n{REFUSED}"),
    Attack("mknod", "held(lambda: os.mknod('mem', 0o666 | stat.S_IFCHR, os.makedev(1, 1))); held(lambda: os.mknod('disk', 0o666 | stat.S_IFBLK, os.makedev(254, 0)))", rf"{REFUSED}\n{REFUSED}"),
    Attack("namespaces", "held(lambda: call(272, 0x10000000)); held(lambda: call(272, 0x20000)); held(lambda: call(56, 0x10000000 | 17, 0, 0, 0, 0)); held(lambda: call(435, 0, 0))", rf"({REFUSED}\n){{4}}"),
    Attack("root", "held(lambda: os.setuid(0)); held(lambda: os.setgroups([0])); held(lambda: os.chown('/box', 0, 0)); print('uid', os.getuid())", r"(held: PermissionError 1\n){3}uid [1-9]"),
    Attack("a set-user-id program", "import shutil, subprocess\nshutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)\nprint(subprocess.run(['./id', '-u'], capture_output=True, text=True).stdout); print(subprocess.run(['su', '-c', 'id -u'], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout)", r"\| [1-9]\d+\n\n\s*\|"),
    Attack("a program it brought", "import subprocess\nopen('x', 'wb').write(open('/bin/cat', 'rb').read()); os.chmod('x', 0o755)\nprint(subprocess.run(['./x', host['secret'], '/etc/shadow'], capture_output=True, text=True).stderr)", r"No such file|Permission denied"),
    Attack("clock", "held(lambda: time.clock_settime(time.CLOCK_REALTIME, 0))", REFUSED),
    Attack("kernel doors", "for number in (425, 321, 298, 323, 250, 248, 304, 175, 246, 169, 308):\n    held(lambda: call(number, 0, 0, 0, 0, 0))", rf"({REFUSED}\n){{11}}"),
    Attack("another architecture's calls", "call(0x40000000 | 39)", "SIGSYS"),
    Attack("a terminal", "held(lambda: open('/dev/tty', 'w')); held(lambda: __import__('fcntl').ioctl(0, 0x5412, b'x'))", r"held: (OSError (6|30)|FileNotFoundError 2)\nheld: OSError 25"),
    Attack("core dump", "os.chdir('/box'); os.abort()", "SIGABRT"),
]  # fmt: skip
