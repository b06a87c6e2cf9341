"""What code tries that wants out of its box, or wants more than its share: each says what it must have seen instead.

`held(act)` prints "held: PermissionError 1" where the act failed, and "ESCAPED" where it
did not; `host` names things of the host.
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
    Attack("memory of many", "for i in range(20):\n    if os.fork() == 0:\n        x = b'x' * (60 << 20); time.sleep(1); os._exit(0)\n    time.sleep(.01)\ntry:\n    while True: os.wait()\nexcept ChildProcessError: print('ended')", "ended|memory limit", limits={"memory": 100 << 20}, wall=30.0),
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
    Attack("processes of the host", "print(sorted({int(n) for n in os.listdir('/proc') if n.isdigit()} - {1, os.getppid(), os.getpid()}))", r"\| \[\]"),
    Attack("/sys", "held(lambda: open('/sys/kernel/uevent_helper', 'w')); held(lambda: os.listdir('/sys'))", NONE),
    Attack("/proc/sys", "for name in ('sys/kernel/core_pattern', 'sysrq-trigger', 'sys/kernel/hostname'):\n    held(lambda: open('/proc/' + name, 'w').write('|/box/x'))", r"(held: (FileNotFoundError 2|PermissionError 13|OSError 30)\n){3}"),
    Attack("memory of the kernel", "for name in ('/dev/mem', '/dev/kmem', '/dev/kmsg', '/proc/kcore', '/dev/vda', '/dev/sda'):\n    held(lambda: open(name, 'rb').read(1))", rf"({NONE}\n){{6}}"),
    Attack("control groups", "held(lambda: os.listdir('/sys/fs/cgroup') or open('/nothing is in it')); held(lambda: open('/sys/fs/cgroup/pids/cgroup.procs', 'w').write('0'))", rf"{NONE}\n{NONE}"),
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
    Attack("root", "held(lambda: os.setuid(0)); held(lambda: os.setgroups([0])); held(lambda: os.chown('/box', 0, 0)); print('uid', os.getuid())", r"(held: (PermissionError 1|OSError 22)\n){3}uid [1-9]"),
    Attack("a set-user-id program", "import shutil, subprocess\nshutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)\nprint(subprocess.run(['./id', '-u'], capture_output=True, text=True).stdout); print(subprocess.run(['su', '-c', 'id -u'], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout)", r"\| [1-9]\d+\n\n\s*\|"),
    Attack("a program it brought", "import subprocess\nopen('x', 'wb').write(open('/bin/cat', 'rb').read()); os.chmod('x', 0o755)\nprint(subprocess.run(['./x', host['secret'], '/etc/shadow'], capture_output=True, text=True).stderr)", r"No such file|Permission denied"),
    Attack("clock", "held(lambda: time.clock_settime(time.CLOCK_REALTIME, 0))", REFUSED),
    Attack("kernel doors", "for number in (425, 321, 298, 323, 250, 248, 304, 175, 246, 169, 308):\n    held(lambda: call(number, 0, 0, 0, 0, 0))", rf"({REFUSED}\n){{11}}"),
    Attack("another architecture's calls", "call(0x40000000 | 39)", "SIGSYS"),
    Attack("a terminal", "held(lambda: open('/dev/tty', 'w')); held(lambda: __import__('fcntl').ioctl(0, 0x5412, b'x'))", r"held: (OSError (6|30)|FileNotFoundError 2)\nheld: OSError 25"),
    Attack("core dump", "os.chdir('/box'); os.abort()", "SIGABRT"),
    # -- ways around the root it has
    Attack("a folder held open", "d = os.open('/', os.O_RDONLY)\nfor name in ('..', '../..', '../../old', '../old'):\n    held(lambda: os.open(name + host['secret'], os.O_RDONLY, dir_fd=d))", rf"({NONE}\n){{4}}"),
    Attack("a root inside a root", "os.makedirs('r'); held(lambda: os.chroot('r')); held(lambda: call(161, b'/box/r')); held(lambda: call(155, b'/box', b'/box/r'))", rf"({REFUSED}\n){{3}}"),
    Attack("mount points", "for act in (lambda: os.rmdir('/tmp'), lambda: os.rename('/box', '/x'), lambda: os.rmdir('/dev/shm'), lambda: os.unlink('/dev/null'), lambda: os.symlink('/', '/dev/x'), lambda: os.mkdir('/y')):\n    held(act)", r"(held: (OSError (16|30|18)|PermissionError (1|13)) ?\n){6}"),
    Attack("a link that changes while it is read", "import threading\ndef flip():\n    for n in range(300):\n        os.symlink('ok' if n % 2 else host['secret'], f'l{n}'); os.replace(f'l{n}', 'link')\nopen('ok', 'w').write('fine'); os.symlink('ok', 'link')\nt = threading.Thread(target=flip); t.start()\nwhile t.is_alive():\n    try: print(open('link').read()[:4]) if 'the-s' in open('link').read() else 0\n    except OSError: pass\nprint('never')", r"\| never"),
    Attack("where it is mounted from", "text = ''.join(open(n).read() for n in ('/proc/self/mountinfo', '/proc/self/mounts') if os.path.exists(n))\nprint(os.path.dirname(host['secret']) in text, host['venv'] in text)", "False False"),
    Attack("all that it can walk to", "found = [p for top in ('/etc', '/dev', '/box', '/tmp', *(f'/{n}' for n in os.listdir('/') if n not in ('usr', 'proc', 'lib', 'lib64', 'bin', 'sbin', 'root', 'opt')))\n  for p, _, names in os.walk(top) if 'secret' in names]\nprint('found', found)", r"found \[\]"),
    Attack("what a machine keeps", "for name in ('/sys', '/home', '/var', '/run', '/srv', '/mnt', '/media', '/boot', '/opt/secrets', '/etc/ssh', '/etc/machine-id', '/etc/hostname', '/var/run/docker.sock', '/run/dbus', '/run/user'):\n    held(lambda: os.stat(name))", rf"({NONE}\n){{15}}"),
    Attack("users of the host", "for name in ('/etc/passwd', '/etc/group'): print(len(open(name).read().splitlines()) if os.path.exists(name) else 'none')", r"\| (2\n2|none\nnone)\n"),
    Attack("packages of the run", "held(lambda: os.listdir(host['venv'])); held(lambda: __import__('safetensors')); sys.path.append(os.path.join(host['venv'], 'lib')); held(lambda: __import__('rondel.core'))", NONE + r"\n(held: ModuleNotFoundError ?\n){2}"),
    Attack("devices", "for name in ('kvm', 'fuse', 'net/tun', 'loop-control', 'loop0', 'mapper/control', 'vhost-net', 'vsock', 'port', 'hpet', 'nvidia0', 'input/event0', 'snapshot', 'btrfs-control', 'autofs'):\n    held(lambda: os.open('/dev/' + name, os.O_RDWR))", rf"({NONE}\n){{15}}"),
    Attack("times of the devices", "for name in ('null', 'zero', 'full', 'random', 'urandom'): held(lambda: os.utime('/dev/' + name))\nopen('/dev/null', 'w').write('x'); print(open('/dev/zero', 'rb').read(1))", r"(held: OSError 30\n){5}b'.x00'", only="native"),
    Attack("a new terminal", "held(lambda: os.openpty())", r"held: (FileNotFoundError 2|OSError \d+|PermissionError 13)", only="native"),
    Attack("its own maps", "for name in ('uid_map', 'gid_map', 'setgroups', 'projid_map', 'oom_score_adj', 'oom_adj'):\n    held(lambda: os.write(os.open('/proc/self/' + name, os.O_WRONLY), b'0 0 1' if 'map' in name else b'-1'))", r"(held: (PermissionError (1|13)|FileNotFoundError 2|OSError (22|30)) ?\n){6}"),
    Attack("maps of the first process", "for name in ('uid_map', 'oom_score_adj', 'mem', 'clear_refs', 'comm', 'coredump_filter', 'timerslack_ns'):\n    held(lambda: os.write(os.open('/proc/1/' + name, os.O_WRONLY), b'1'))", r"(held: (PermissionError (1|13)|FileNotFoundError 2|OSError 30) ?\n){7}"),
    Attack("namespaces of the first process", "for name in ('net', 'mnt', 'pid', 'user', 'ipc', 'uts', 'cgroup'):\n    held(lambda: os.open('/proc/1/ns/' + name, os.O_RDONLY))", rf"({NONE}\n){{7}}"),
    Attack("the kernel's pages", "for name in ('kallsyms', 'kcore', 'kmsg', 'keys', 'slabinfo', 'vmallocinfo', 'timer_list', 'sched_debug', 'config.gz', 'cmdline', 'iomem', 'modules', 'mounts'):\n    held(lambda: open('/proc/' + name).read())", rf"({NONE}\n){{12}}", only="native"),
    Attack("the switch of the kernel", "for name in ('sysrq-trigger', 'sys/kernel/panic', 'sys/vm/drop_caches', 'sys/fs/protected_symlinks', 'sys/net/ipv4/ip_forward', 'sys/kernel/ns_last_pid', 'sys/vm/overcommit_memory', 'irq/0/smp_affinity'):\n    held(lambda: os.write(os.open('/proc/' + name, os.O_WRONLY), b'1'))", r"(held: (PermissionError (1|13)|FileNotFoundError 2|OSError 30) ?\n){8}"),
    Attack("more rights in a file", "open('x', 'w'); held(lambda: os.setxattr('x', 'security.capability', b'\\1\\0\\0\\2' + b'\\xff' * 16)); held(lambda: os.setxattr('x', 'trusted.x', b'1')); held(lambda: os.chown('x', 0, 0)); held(lambda: os.chown('x', os.getuid(), 0))", r"(held: (PermissionError (1|13)|OSError (95|22)) ?\n){4}"),
    Attack("a file that nobody can change", "import fcntl, struct\nf = os.open('x', os.O_CREAT | os.O_RDWR)\nfor flag in (0x10, 0x20): held(lambda: fcntl.ioctl(f, 0x40086602, struct.pack('l', flag)))", r"(held: (PermissionError 1|OSError (25|95)) ?\n){2}"),
    Attack("a program in memory", "f = os.memfd_create('x') if hasattr(os, 'memfd_create') else 0\nos.write(f, open('/bin/cat', 'rb').read())\nimport subprocess\nprint(subprocess.run([f'/proc/self/fd/{f}', host['secret']], capture_output=True, text=True, pass_fds=[f]).stderr)", r"No such file|Permission|PermissionError"),
    Attack("libraries before others", "import subprocess\nopen('x.so', 'wb').write(b'\\x7fELF'); os.environ['LD_PRELOAD'] = '/box/x.so'; os.environ['LD_LIBRARY_PATH'] = '/box'\nprint('as', subprocess.run(['id', '-u'], capture_output=True, text=True).stdout)", r"as [1-9]\d*"),
    Attack("programs that give rights", "import shutil, subprocess\nfor name in ('sudo', 'su', 'mount', 'umount', 'newuidmap', 'passwd', 'chsh', 'pkexec', 'ping', 'unshare', 'nsenter', 'setpriv', 'chroot', 'mknod', 'bwrap'):\n    if shutil.which(name):\n        args = {'su': ['-c', 'id -u'], 'sudo': ['-n', 'id', '-u'], 'unshare': ['-r', 'id', '-u'], 'nsenter': ['-t', '1', '-m', 'id', '-u'], 'setpriv': ['--reuid=0', 'id', '-u'], 'chroot': ['/', 'id', '-u'], 'mount': ['-t', 'tmpfs', 'x', '/box'], 'umount': ['/box'], 'mknod': ['n', 'c', '1', '3'], 'bwrap': ['--ro-bind', '/', '/', 'id', '-u']}.get(name, [])\n        ran = subprocess.run([name, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=3)\n        if ran.stdout.strip() == '0' or (name in ('mount', 'umount', 'mknod') and ran.returncode == 0): print('ESCAPED', name)\nprint('as', os.getuid())", r"as [1-9]\d*"),
    # -- ways to other processes
    Attack("every signal to the first process", "for n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass\nprint('here', os.getppid())", "here 1"),
    Attack("groups of processes", "for group in (1, 2): held(lambda: os.killpg(group, 9)); held(lambda: os.setpgid(1, 0)); held(lambda: os.kill(-host['pytest'], 9)); held(lambda: os.kill(host['victim'], 19))", r"(held: (ProcessLookupError 3|PermissionError (1|13)|OSError \d+) ?\n){8}"),
    Attack("signals by other calls", "for number, args in ((234, (host['victim'], host['victim'], 9)), (200, (host['victim'], 9)), (129, (host['victim'], 9, 0)), (434, (host['victim'], 0)), (424, (0, 9, 0, 0))):\n    held(lambda: call(number, *args))", r"(held: (ProcessLookupError 3|PermissionError 1|OSError \d+) ?\n){5}"),
    Attack("a handle of the first process", "p = os.pidfd_open(1)\nheld(lambda: call(438, p, 0, 0)); held(lambda: call(440, p, 0, 0, 0, 0)); held(lambda: call(448, p, 0)); held(lambda: call(308, p, 0x40000000))", r"(held: (PermissionError 1|OSError \d+|BlockingIOError 11) ?\n){4}"),
    Attack("limits of others", "import resource\nfor pid in (host['pytest'], host['victim']):\n    held(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1)))\nheld(lambda: os.setpriority(os.PRIO_PROCESS, host['pytest'], 19)); held(lambda: os.setpriority(os.PRIO_USER, 54321, 19)); held(lambda: os.sched_setaffinity(host['pytest'], {0})); held(lambda: os.sched_setscheduler(host['pytest'], os.SCHED_IDLE, os.sched_param(0)))", r"(held: (ProcessLookupError 3|PermissionError 1) ?\n){6}"),
    Attack("a debugger of its own", "import subprocess\npid = os.fork()\nif pid == 0: time.sleep(5); os._exit(0)\nheld(lambda: call(101, 16, pid, 0, 0)); held(lambda: call(310, pid, 0, 0, 0, 0, 0)); os.kill(pid, 9)", rf"{REFUSED}\n{REFUSED}"),
    Attack("a child of somebody else", "for flags in (0x8000 | 17, 0x8000 | 0x80000 | 17):\n    pid = libc.syscall(56, flags, 0, 0, 0, 0)\n    if pid == 0:\n        time.sleep(600); os._exit(0)\nprint('gone')", "exit code 0 . gone"),
    Attack("one that adopts orphans", "libc.prctl(36, 1, 0, 0, 0)\nfor _ in range(4):\n    if os.fork() == 0:\n        if os.fork() == 0:\n            os.setsid(); time.sleep(600)\n        os._exit(0)\nprint('gone')", "exit code 0 . gone"),
    Attack("a child at every signal", "def again(*_):\n    if os.fork() == 0: time.sleep(600)\nfor n in (1, 2, 3, 10, 12, 15, 17): signal.signal(n, again)\nfor n in (1, 2, 3, 10, 12, 15, 17): os.kill(os.getpid(), n)\nprint('gone')", "exit code 0 . gone"),
    Attack("children that die slowly", "for _ in range(12):\n    if os.fork() == 0:\n        x = bytearray(4 << 20)\n        while True: signal.pause()\nprint('gone')", "exit code 0 . gone"),
    # -- rights and calls
    Attack("rights back", "for option, value in ((38, 0), (22, 0), (47, 2), (28, 0), (8, 1), (35, 1)):\n    if libc.prctl(option, value, 0, 0, 0) >= 0 and option != 8: print('ESCAPED', option)\nheld(lambda: call(126, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xffffffff] * 6)))", r"held: (PermissionError 1|OSError \d+)"),
    Attack("users and groups", "for act in (lambda: os.setresuid(0, 0, 0), lambda: os.setreuid(0, -1), lambda: os.seteuid(0), lambda: os.setegid(0), lambda: os.setgid(0), lambda: os.initgroups('root', 0)):\n    held(act)\nlibc.setfsuid(0); libc.setfsgid(0); held(lambda: open('/etc/shadow').read())", rf"(held: (PermissionError 1|OSError 22) ?\n){{6}}{NONE}"),
    Attack("nobody's rights", "print(''.join(line for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNewPrivs', 'Seccomp:'))))", r"CapInh:\t0+\nCapPrm:\t0+\nCapEff:\t0+\nCapBnd:\t0+\nCapAmb:\t0+\nNoNewPrivs:\t1\nSeccomp:\t2"),
    Attack("calls that are refused by name", "for number in (103, 159, 163, 164, 167, 168, 169, 170, 171, 172, 173, 179, 212, 227, 300, 305, 312, 320, 313, 176, 428, 429, 430, 431, 432, 433, 442, 447 if host['tcp'] == 0 else 426, 427):\n    held(lambda: call(number, 0, 0, 0, 0, 0))", rf"({REFUSED}\n){{29}}"),
    Attack("the same calls by 32 bits", "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\nctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\nprint('ESCAPED')", "SIGSYS|SIGSEGV"),
    Attack("new namespaces by every flag", "for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):\n    held(lambda: call(272, flag)); held(lambda: call(56, flag | 17, 0, 0, 0, 0))", rf"({REFUSED}\n){{16}}"),
    Attack("keys of the kernel", "for number, args in ((248, (b'user', b'x', b'y', 1, -2)), (249, (b'user', b'x', 0, -2)), (250, (0, -4, 1))):\n    held(lambda: call(number, *args))", rf"({REFUSED}\n){{3}}"),
    Attack("queues and semaphores", "for number, args in ((29, (7, 4096, 0o1666)), (64, (7, 1, 0o1666)), (68, (7, 0o1666)), (240, (b'/x', 0o102, 0o666, 0))):\n    held(lambda: call(number, *args))", rf"({REFUSED}\n){{4}}"),
    Attack("pages of a file that is only read", "import mmap\nf = open('/etc/passwd' if os.path.exists('/etc/passwd') else sys.executable, 'rb'); before = f.read()\nheld(lambda: mmap.mmap(f.fileno(), 1, mmap.MAP_SHARED, mmap.PROT_WRITE))\nr, w = os.pipe(); f.seek(0); os.splice(f.fileno(), w, 1) if hasattr(os, 'splice') else 0; os.write(w, b'X')\nm = mmap.mmap(f.fileno(), len(before), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE); m[0:1] = b'X'\nprint('same', open(f.name, 'rb').read() == before)", r"held: PermissionError 13\nsame True"),
    # -- the network again
    Attack("every family of sockets", "left = [n for n in range(1, 47) if n not in (1, 2, 10)]\nfor family in left:\n    for kind in (1, 2, 3, 5):\n        try: socket.socket(family, kind); print('ESCAPED', family, kind)\n        except OSError: pass\nprint('none')", r"\| none"),
    Attack("sockets that see all", "for args in ((2, 3, 1), (2, 3, 255), (10, 3, 58), (2, 2, 1), (10, 2, 58)):\n    held(lambda: socket.socket(*args))", r"(held: (PermissionError (1|13)|OSError 9[34]) ?\n){5}"),
    Attack("a network that is up", "import fcntl, struct\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nheld(lambda: fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x41))); held(lambda: fcntl.ioctl(s, 0x8916, struct.pack('16s16s', b'lo', b''))); print([name for _, name in socket.if_nameindex()])", r"(held: (PermissionError 1|OSError \d+) ?\n){2}\['lo'|held"),
    Attack("to all who listen", "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)\nheld(lambda: s.sendto(b'x', ('255.255.255.255', host['udp']))); held(lambda: s.setsockopt(0, 35, socket.inet_aton('224.0.0.1') + bytes(4))); held(lambda: s.sendto(b'x', ('224.0.0.1', host['udp'])))", r"(held: OSError \d+ ?\n){3}"),
    Attack("data before a connection", "s = socket.socket(); held(lambda: s.sendto(b'x', 0x20000000, ('127.0.0.1', host['tcp'])))", r"held: OSError (101|99|95|106)|held: ConnectionRefusedError"),
    Attack("ports of the machine", "for port in (22, 80, 443): held(lambda: socket.create_server(('127.0.0.1', port)))\nheld(lambda: socket.create_server(('0.0.0.0', 1)))", r"(held: (PermissionError 13|OSError \d+) ?\n){4}"),
    Attack("addresses of clouds", "for address in ('169.254.169.254', '10.0.0.1', '192.168.0.1', '172.17.0.1', '100.100.100.200'):\n    held(lambda: socket.create_connection((address, 80), 1))", r"(held: OSError 101 ?\n){5}"),
    Attack("doors of the machine", "for name in ('/run/docker.sock', '/var/run/docker.sock', '/run/dbus/system_bus_socket', '/run/systemd/private', '/tmp/.X11-unix/X0', '/dev/log'):\n    s = socket.socket(socket.AF_UNIX); held(lambda: s.connect(name))", rf"({NONE}\n){{6}}"),
    # -- the interpreter it is a copy of
    Attack("sockets among its objects", "import gc\nfor one in gc.get_objects():\n    if isinstance(one, socket.socket):\n        held(lambda: one.send(b'{\"exit\": 0, \"signal\": 0, \"oom\": false, \"left\": false, \"cpu\": 0}'))\nprint('sent')", "sent"),
    Attack("every file number", "for fd in range(3, 1024):\n    try: os.write(fd, b'{\"exit\": 0, \"signal\": 0, \"oom\": false, \"left\": false, \"cpu\": 0}'); print('ESCAPED', fd)\n    except OSError: pass\nprint('none')", r"\| none"),
    Attack("frames above it", "frame = sys._getframe()\nwhile frame:\n    for name in ('control', 'groups', 'spec', 'order', 'files'):\n        if name in frame.f_locals: frame.f_locals[name] = None\n    frame.f_globals['changed'] = lambda *a: False; frame.f_globals['stop_all'] = lambda: None\n    frame = frame.f_back\nprint('mine')", "mine"),
    Attack("modules it has", "for name, module in list(sys.modules.items()):\n    for what in ('serve', 'drop', 'call', 'condition', 'install', 'print_exception', 'dumps'):\n        if hasattr(module, what): setattr(module, what, lambda *a, **k: print('ESCAPED'))\nsys.modules.clear(); print('mine')", "mine"),
    Attack("built-in functions", "import builtins\nfor name in ('print', 'open', 'compile', 'exec', '__import__', 'len', 'isinstance'):\n    setattr(builtins, name, lambda *a, **k: None)", "exit code"),
    Attack("what runs at the end", "import atexit, threading, weakref\natexit.register(lambda: open('/box/later', 'w')); threading._register_atexit(lambda: open('/box/later', 'w'))\nsys.excepthook = sys.unraisablehook = lambda *a: os.write(1, b'hooked')\nraise ValueError('x')", "ValueError: x|hooked"),
    Attack("traces", "import threading\nsys.settrace(lambda *a: None); sys.setprofile(lambda *a: None); threading.settrace(lambda *a: None); sys.setswitchinterval(1000); sys.setrecursionlimit(30)\nprint('on')", r"on|RecursionError"),
    Attack("alarms", "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01); signal.signal(signal.SIGALRM, signal.SIG_IGN); import faulthandler; faulthandler.dump_traceback_later(0.05); time.sleep(0.1); print('late')", "late"),
    Attack("a broken heap", "ctypes.memset(1, 0, 10)", "SIGSEGV"),
    Attack("a wrong free", "libc.free(ctypes.c_void_p(12345678))", "SIGABRT|SIGSEGV"),
    Attack("verdicts by exit codes", "os._exit(40)", "exit code 40"),
    Attack("death by the same signal", "os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    Attack("a death that looks like a limit", "os.kill(os.getpid(), signal.SIGXCPU)", "SIGXCPU"),
    Attack("modules left for others", "for name in (os.path.dirname(os.__file__) + '/sitecustomize.py', os.path.dirname(os.__file__) + '/__pycache__/os.cpython-311.pyc', '/usr/lib/python3/x.py', '/usr/local/x.pth', '/etc/ld.so.preload'):\n    held(lambda: open(name, 'w'))\nopen('/box/sitecustomize.py', 'w').write('print(1)'); os.makedirs('/box/.local/lib'); os.makedirs('/box/.config')", r"(held: (PermissionError (1|13)|OSError 30|FileNotFoundError 2) ?\n){5}"),
    Attack("code for the next one", "open('/box/json.py', 'w').write('raise SystemExit(0)'); open('/box/os.py', 'w').write('raise SystemExit(0)'); open('/tmp/x.pth', 'w').write('import os; os._exit(0)'); print('left')", "left"),
    Attack("files with odd names to read", "held(lambda: os.mkfifo('fifo')); os.mkdir('folder'); os.symlink('/dev/zero', 'endless'); os.symlink('loop', 'loop'); print('made')", r"held: PermissionError 1 ?\nmade"),
    # -- more than its share, in other ways
    Attack("one program after the other", "os.execv(sys.executable, [sys.executable, '-S', '-I', '-c', 'import os, sys; os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])'])", "over its (wall|cpu) limit", wall=0.3),
    Attack("a fork bomb that hides", "while True:\n    try:\n        if os.fork(): os._exit(0)\n        os.setsid()\n    except BlockingIOError: pass", "exit code 0|wall|SIG", wall=0.5),
    Attack("threads of the C library", "n = 0\nwhile libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None) == 0: n += 1\nprint('made', n)", r"made \d+\n"),
    Attack("memory in files of memory", "f = os.memfd_create('x')\nwhile True: os.write(f, bytes(1 << 20))", r"over its memory limit|Errno (27|28|1)\b|SIGXFSZ|MemoryError|PermissionError"),
    Attack("memory held by a small program", "f = os.memfd_create('x', 0)\nos.set_inheritable(f, True)\nos.execv('/bin/sh', ['sh', '-c', 'for n in 1 2 3 4 5 6 7 8 9; do head -c 7000000 /dev/zero >/proc/self/fd/%d || exit 3; done; echo all' % f])", r"over its memory limit|exit code|SIG", limits={"memory": 64 << 20}),
    Attack("memory in pipes", "x = []\nwhile True:\n    r, w = os.pipe(); os.set_blocking(w, False); x.append((r, w))\n    try:\n        while True: os.write(w, bytes(65536))\n    except BlockingIOError: pass", "Errno 24|memory limit"),
    Attack("memory in sockets", "x = []\nwhile True:\n    a, b = socket.socketpair(); a.setblocking(False); x.append((a, b))\n    try:\n        while True: a.send(bytes(65536))\n    except (BlockingIOError, OSError): pass", "Errno 24|memory limit|wall limit"),
    Attack("memory in tables", "import mmap\nm = [mmap.mmap(-1, 1 << 36, mmap.MAP_PRIVATE | 0x4000) for _ in range(4)]\nfor one in m:\n    for i in range(0, 1 << 36, 1 << 21): one[i]", r"MemoryError|memory limit|Cannot allocate|cpu limit|wall limit|Errno 12", wall=1.5),
    Attack("memory that stays", "held(lambda: call(149, 0, 1 << 30)); held(lambda: call(151, 1)); import mmap\nheld(lambda: mmap.mmap(-1, 1 << 21, 0x40000 | 0x22))", r"(held: (PermissionError 1|OSError \d+|MemoryError|BlockingIOError 11) ?\n){3}"),
    Attack("space by its size", "held(lambda: os.posix_fallocate(os.open('x', os.O_CREAT | os.O_RDWR), 0, 1 << 40)); held(lambda: os.posix_fallocate(os.open('/dev/shm/x', os.O_CREAT | os.O_RDWR), 0, 7 << 20) or os.posix_fallocate(os.open('/dev/shm/y', os.O_CREAT | os.O_RDWR), 0, 7 << 20) or os.posix_fallocate(os.open('/dev/shm/z', os.O_CREAT | os.O_RDWR), 0, 7 << 20))", r"held: OSError (27|28) ?\nheld: OSError 28|SIGXFSZ"),
    Attack("space in attributes", "open('x', 'w')\nfor n in range(10**6): os.setxattr('x', f'user.{n}', bytes(60000))", r"Errno (28|95|1|12|7)\b|(memory|cpu|wall) limit"),
    Attack("space in names", "held(lambda: open('x' * 256, 'w')); held(lambda: os.mkdir('d/' * 3000))\nfor n in range(400):\n    try: os.symlink('y' * 4000, str(n))\n    except OSError as e: print('full', e.errno); break\nprint('end')", r"held: OSError 36 ?\nheld: OSError 36 ?\n(full 28\n)?end"),
    Attack("files nobody can name", "x = []\nwhile True:\n    f = open('x', 'wb'); os.unlink('x'); f.write(bytes(1 << 20)); f.flush(); x.append(f)", "Errno (28|24)|memory limit"),
    Attack("watches", "import ctypes\nf = libc.inotify_init()\nn = 0\nwhile libc.inotify_add_watch(f, b'/usr', 1 << (n % 12)) >= 0 and n < 2000: n += 1\nx = []\ntry:\n    while True: x.append(libc.inotify_init()); assert x[-1] >= 0\nexcept AssertionError: print('none left')", "none left"),
    Attack("timers", "import ctypes\nn, t = 0, ctypes.c_int()\nwhile libc.syscall(222, 1, 0, ctypes.byref(t)) == 0 and n < 3000: n += 1\nprint('ended', n)", r"ended|memory limit"),
    Attack("locks", "import fcntl\nf = open('x', 'wb')\ntry:\n    for n in range(60000): fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * n)\nexcept OSError as e: print('held', e.errno)\nprint('end')", r"end|wall limit|cpu limit|memory limit", wall=1.0),
    Attack("names that do not exist", "n = 0\nwhile True:\n    n += 1\n    os.path.exists(f'/tmp/{n}')", "over its (wall|cpu|memory) limit", wall=0.4),
    Attack("all cores", "import threading\nfor _ in range(8):\n    if os.fork() == 0:\n        while True: pass\nwhile True: pass", "over its (wall|cpu) limit", wall=0.3),
    Attack("a number without end", "x = 7\nwhile True: x = x * x", "over its (wall|cpu|memory) limit|MemoryError", wall=0.4),
    Attack("a pattern without end", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", "over its (wall|cpu) limit", wall=0.3),
    Attack("a text that grows", "import zlib\nd = zlib.decompressobj()\nx = d.decompress(zlib.compress(bytes(1 << 22)))\ny = [x + x for _ in range(99)]", "MemoryError|memory limit"),
    Attack("equal hashes", "x = {n * (2**61 - 1) for n in range(10**5)}", "over its (wall|cpu) limit|exit code", wall=0.3),
    Attack("both streams at once", "for _ in range(6):\n    if os.fork() == 0:\n        while True: os.write(1, b'x' * 4096); os.write(2, b'y' * 4096)\ntime.sleep(600)", "over its output limit"),
    Attack("a line without end", "while True: os.write(1, b'x')", "over its (output|wall|cpu) limit", wall=0.5),
    Attack("a trace without end", "sys.setrecursionlimit(10**5)\ndef f(n): return f(n + 1)\ntry: f(0)\nexcept RecursionError as e: raise ValueError('x' * 10**6) from e", r"limit|SIG|ValueError"),
    Attack("output that drips", "while True: os.write(1, b'.'); time.sleep(0.02)", "over its wall limit", wall=0.2),
    Attack("an end that is a flood", "import threading\nthreading.Thread(target=lambda: [os.write(1, b'z' * 60000) for _ in range(99)]).start()\nos.close(0)", "over its output limit|exit code"),
]  # fmt: skip
