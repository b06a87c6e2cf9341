"""Answers to the code reward that want a point for nothing, no score, or that the
answers after them are judged otherwise.

None computes a square, so that each of them is worth 0.
"""

from __future__ import annotations

PROTOCOL = """
import sys
frame = sys._getframe()
while "end" not in frame.f_locals: frame = frame.f_back
end = frame.f_locals["end"]
def ask(do, *args):
    end.send({"do": do, "args": list(args), "kwargs": {}})
    message = end.receive()
    return {"y": message["value"]["r"][0]} if isinstance(message.get("value"), dict) and "r" in message["value"] else message
def answer(value, when=lambda order: True):
    own = end.carried_out
    end.carried_out = lambda order: {"value": value} if when(order) else own(order)
def f(x): return 0
"""
LEAVES = "\ndef f(x): return 0"
PARENTS = "\nfor n in (1, os.getppid()):\n    try: %s\n    except (OSError, ValueError): pass" + LEAVES
ANSWERS = (
    "import os\nfor fd in range(1, 64):\n    try:\n        while True: os.write(fd, %s)\n    except OSError: pass"
    + LEAVES
)

POISONS = {
    "leaves well": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "leaves with the verdict": "import os; os._exit(40)",
    "leaves later": "def f(x):\n    import os; os._exit(40)",
    "raises nothing bad": "def f(x): raise SystemExit(0)",
    "is equal to all": "class E:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = None\ndef f(x): return E()",
    "an int that is equal to all": "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(x): return E(7)",
    "a string that is equal": "class E(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef f(x): return E('x')",
    "other built-ins": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\nbuiltins.all = builtins.any = lambda *a: True\ndef f(x): return 0",
    "names of the test": "def assertEqual(*a): return True\ndef isinstance(*a): return True\ndef abs(x): return 4\nf = lambda x: 5",
    "prints the marker": "print('40'); print('{\"value\": {\"i\": \"0x4\"}}')\ndef f(x):\n    print('passed', flush=True)\n    return 0",
    "asserts off": "import sys\nsys.flags = None\n__debug__x = False\ndef f(x): return 0",
    "looks for the tests": "import gc, re\ndef f(x):\n    for o in gc.get_objects():\n        found = re.search(r'(f|candidate)\\(2\\) == (\\d)|expected\\W+(\\d)', repr(o)[:99999])\n        if found: return int(found[2] or found[3])\n    return -1",
    "replaces the harness": "import sys\nfor name, m in list(sys.modules.items()):\n    for k in ('judge', 'pack', 'ask'):\n        if hasattr(m, k): setattr(m, k, lambda *a, **b: 4)\ndef f(x): return 3",
    "patches the frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_globals['pack'] = lambda *a: {'i': '0x5'}\n    frame = frame.f_back\ndef f(x): return 0",
    "hangs": "while True: pass",
    "hangs when called": "def f(x):\n    while True: pass",
    "floods": "def f(x):\n    while True: print('x' * 10000)",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "kills": "import os\nos.kill(-1, 9)",
    "eats": "def f(x): return [bytearray(1 << 24) for _ in range(999)]",
    "nests": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "answers before it is asked": "import os, json\nfor fd in range(3, 30):\n    try: os.write(fd, b'{\"value\": null}\\n{\"value\": {\"i\": \"0x5\"}}\\n' * 9)\n    except OSError: pass\ndef f(x): return 0",
    "no python": "def f(x: return",
    # -- the box of the next one
    "closes its home": "import os; os.chmod('/box', 0)" + LEAVES,
    "closes all its places": "import os\nfor p in ('/box', '/tmp', '/dev/shm'): os.chmod(p, 0)" + LEAVES,
    "opens its home": "import os; os.chmod('/box', 0o7777)" + LEAVES,
    "sets times": "import os; os.utime('/box', (1, 1)); os.utime('/tmp', (1, 1))" + LEAVES,
    "sets attributes": "import os; os.setxattr('/box', 'user.x', b'1')" + LEAVES,
    "leaves modules": "for n in ('json', 'os', 'ast', 'copy', 'operator', 'sitecustomize', 'solution', 'task_test'):\n    open(f'/box/{n}.py', 'w').write('import os; os._exit(40)')" + LEAVES,
    "leaves settings": "import os; os.makedirs('/box/.local/lib/python3.11/site-packages'); open('/box/.local/lib/python3.11/site-packages/x.pth', 'w').write('import os; os._exit(40)')" + LEAVES,
    "leaves a folder that is closed": "import os; os.mkdir('/tmp/x'); open('/tmp/x/y', 'w'); os.chmod('/tmp/x', 0)" + LEAVES,
    "leaves links": "import os; os.symlink('/dev/zero', '/box/json.py'); os.symlink('x', '/tmp/x')" + LEAVES,
    "fills the disk": "n = 0\ntry:\n    while True:\n        n += 1\n        open(f'/tmp/{n}', 'wb').write(bytes(1 << 22))\nexcept OSError: pass" + LEAVES,
    "fills it with names": "try:\n    for n in range(10**5): open(f'/dev/shm/{n}', 'w')\nexcept OSError: pass" + LEAVES,
    "leaves processes": "import os, time\nfor _ in range(9):\n    if os.fork() == 0: time.sleep(600)" + LEAVES,
    "leaves a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: time.sleep(1)\n    os._exit(0)" + LEAVES,
    "leaves threads": "import threading, time\nfor _ in range(9): threading.Thread(target=time.sleep, args=(600,)).start()" + LEAVES,
    "uses up numbers": "import os\nfor _ in range(99):\n    if os.fork() == 0: os._exit(0)\n    os.wait()" + LEAVES,
    "leaves an alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)" + LEAVES,
    "lowers its own limits": "import resource\nfor what in range(16):\n    try: resource.setrlimit(what, (1, 1))\n    except (OSError, ValueError): pass" + LEAVES,
    "lowers limits above": "import os, resource" + PARENTS % "resource.prlimit(n, resource.RLIMIT_NPROC, (1, 1))",
    "slows who is above": "import os" + PARENTS % "os.setpriority(os.PRIO_PROCESS, n, 19); os.sched_setscheduler(n, os.SCHED_IDLE, os.sched_param(0))",
    "stops who is above": "import os, signal" + PARENTS % "[os.kill(n, s) for s in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL, signal.SIGCHLD)]",
    "makes itself hard to end": "import os, signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nos.setsid() if os.getsid(0) != os.getpid() else 0" + LEAVES,
    "eats by a file in memory": "import os\nfd = os.memfd_create('x')\ntry:\n    while True: os.write(fd, bytes(1 << 20))\nexcept OSError: pass" + LEAVES,
    "serves": "import socket\nfor port in (8000, 8080): socket.create_server(('0.0.0.0', port))\nsocket.socket(socket.AF_UNIX).bind('\\0solution')" + LEAVES,
    # -- the interpreter it runs in
    "forgets all modules": "import sys; sys.modules.clear()" + LEAVES,
    "has no built-ins": "import builtins\nfor name in list(vars(builtins)):\n    if not name.startswith('_'): delattr(builtins, name)",
    "imports nothing": "import builtins\nbuiltins.__import__ = None" + LEAVES,
    "clears its names": "globals().clear()",
    "writes other JSON": "import json\njson.dumps = lambda *a, **k: '{\"value\": {\"i\": \"0x5\"}, \"shared\": [], \"dropped\": []}'" + LEAVES,
    "reads other JSON": "import json\njson.loads = lambda *a, **k: {'code': '', 'shared': [], 'dropped': []}" + LEAVES,
    "closes every file": "import os; os.closerange(0, 100)" + LEAVES,
    "mixes its files": "import os\nfor fd in range(3, 9):\n    try: os.dup2(fd, (fd + 1) % 9)\n    except OSError: pass" + LEAVES,
    "traces": "import sys\nsys.settrace(lambda *a: None); sys.setprofile(lambda frame, *a: frame.f_globals.update(pack=lambda *a: 4)); sys.setrecursionlimit(60)" + LEAVES,
    "answers at its end": "import atexit, os\natexit.register(lambda: [os.write(fd, b'{\"value\": true}\\n') for fd in range(1, 5)])\ndef f(x): raise SystemExit(40)",
    "crashes": "import ctypes\ndef f(x): ctypes.memset(1, 0, 9)",
    "aborts": "import os\ndef f(x): os.abort()",
    "becomes another program": "import os\ndef f(x): os.execv('/bin/true', ['true'])",
    "becomes an echo": "import os\nfor fd in range(3, 9):\n    try: os.dup2(fd, fd % 2)\n    except OSError: pass\nos.execv('/bin/cat', ['cat'])",
    "answers without end": ANSWERS % "b'y\\n' * 9999",
    "answers with a long line": ANSWERS % "b'[' * 65536",
    "answers yes": ANSWERS % "b'{\"value\": true, \"shared\": [], \"dropped\": []}\\n'",
    "exchanges its frames": "import gc, sys\nfor one in gc.get_objects():\n    if type(one).__name__ == 'End':\n        one.send = lambda m: None\n        one.carried_out = lambda m: {'value': True}" + LEAVES,
    # -- what is returned and raised
    "returns itself": "def f(x): return f",
    "returns a module": "import sys\ndef f(x): return sys",
    "returns a file": "def f(x): return open('/dev/zero')",
    "returns its own list": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "returns without end": "def f(x):\n    while True: yield 0",
    "returns much": "def f(x): return list(range(10**6))",
    "returns a long number": "def f(x): return 1 << 10**7",
    "returns half a character": "def f(x): return '\\ud83d'",
    "returns nan": "def f(x): return float('nan')",
    "returns what has every attribute": "class A:\n    def __getattr__(s, n): return s\n    def __call__(s, *a): return s\ndef f(x): return A()",
    "returns what lies of its class": "class A:\n    __class__ = int\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "returns what raises": "class A:\n    def __eq__(s, o): raise SystemExit(40)\n    __bool__ = __abs__ = __len__ = __hash__ = __repr__ = __eq__\ndef f(x): return A()",
    "returns equal hashes": "def f(x): return {n * (2**61 - 1) for n in range(20000)}",
    "has a class of classes": "class M(type):\n    def __instancecheck__(s, o): return True\n    def __eq__(s, o): return True\n    __hash__ = type.__hash__\nclass f(metaclass=M):\n    def __init__(s, x): pass\n    def __eq__(s, o): return True",
    "raises the end of loops": "def f(x): raise StopIteration",
    "raises what cannot be said": "class E(Exception):\n    def __str__(s): raise E\n    __repr__ = __str__\n    args = property(lambda s: 1 / 0)\ndef f(x): raise E",
    "raises a test's own errors": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "raises past everything": "def f(x): raise KeyboardInterrupt",
    "raises that a module is missing": "def f(x): raise ModuleNotFoundError('no', name='no')",
    "imports what is missing": "import no_such_package" + LEAVES,
    # -- texts
    "half a character": "# \ud83d\n'\ud83d'" + LEAVES,
    "a zero byte": "x = '\0'" + LEAVES,
    "brackets": "(" * 5000 + ")" * 5000,
    "a million lines": "x = 1\n" * 100_000 + LEAVES,
    "other line ends": "x = 1\r\x0c\x0b\u2028" + LEAVES,
    "an encoding of its own": "# -*- coding: rot13 -*-" + LEAVES,
    "speaks for itself": PROTOCOL + "line = ask('get', {'r': [0, '']}, '_far_end')\nask('set', line, 'fault', 'the data is wrong')",
}  # fmt: skip
SLOW = {
    name
    for name in POISONS
    if any(
        word in name for word in ("hangs", "floods", "bomb", "eats", "without end", "equal hashes", "crashes", "aborts")
    )
}
