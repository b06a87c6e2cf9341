"""Programs that are talked to, in boxes that can carry out whole commands only (machines, services over HTTP).

controller ──stdin──> pump ──one command a step──> box: supervisor ──pipes──> program
           <─stdout──      <─what it said since──
The supervisor stays in the box and holds the program's pipes; a step is a command that hands it more stdin and waits a
little for output. The pump steps at once when there is stdin, and less and less often while nobody says anything.
"""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rondel.core.errors import BoxError, SandboxError
from rondel.core.sandbox_types import CommandResult

LONG, SHORT = 1.0, 0.5  # seconds that a step waits for output that is due; between two looks at nothing
PLACE = "/tmp/.relay"
PYTHON = ("python3", "-I", "-S", "-c")  # the standard library alone, whatever lies where it starts
# stdin: the program, which removes its file when it has read it. The supervisor answers on a socket that only this box
# has, and removes it before it tells of the program's end
SUPERVISOR = """
import base64, json, os, socket, subprocess, sys, threading
code = sys.stdin.read()
home = sys.argv[1]
door = socket.socket(socket.AF_UNIX)
if os.path.exists(home): os.unlink(home)
door.bind(home)
door.listen(8)
if os.fork(): os._exit(0)
os.setsid()
null = os.open(os.devnull, os.O_RDWR)
for fd in range(3): os.dup2(null, fd)
with open(home + ".py", "w", encoding="utf-8", errors="surrogateescape") as file: file.write(code)
one = subprocess.Popen(["python3", "-c", "import os, sys; p = sys.argv.pop(1); f = open(p, encoding='utf-8'); sys.argv = ['-c']; t = f.read(); f.close(); os.unlink(p); del p; sys.path[0] = ''; exec(compile(t, '<code>', 'exec'))", home + ".py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
said, news, open_ones = {"stdout": b"", "stderr": b""}, threading.Condition(), {"stdout", "stderr"}
def read(name):
    stream = getattr(one, name)
    while piece := os.read(stream.fileno(), 65536):
        with news:
            said[name] += piece
            news.notify_all()
            while len(said[name]) > 1 << 20: news.wait()
    with news:
        open_ones.discard(name)
        news.notify_all()
for name in said: threading.Thread(target=read, args=(name,), daemon=True).start()
def feed(data, end):
    try:
        one.stdin.write(data); one.stdin.flush()
        if end: one.stdin.close()
    except (OSError, ValueError): pass
while True:
    caller, _ = door.accept()
    with caller, caller.makefile("rwb") as lines:
        try: asked = json.loads(lines.readline())
        except ValueError: continue
        feed(base64.b64decode(asked["stdin"]), asked["end"])
        with news:
            news.wait_for(lambda: any(said.values()) or not open_ones, asked["wait"])
            code = None if open_ones else one.wait()
            told = {name: base64.b64encode(data).decode() for name, data in said.items()}
            said.update(stdout=b"", stderr=b"")
            news.notify_all()
        if code is not None: os.unlink(home)
        lines.write(json.dumps({"code": code, **told}).encode() + b"\\n")
        lines.flush()
    if code is not None: break
"""
STEP = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
f = s.makefile("rwb")
f.write(sys.stdin.buffer.read() + b"\\n")
f.flush()
sys.stdout.buffer.write(f.readline())
"""


class CommandBox(Protocol):
    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult: ...
    def kill(self) -> None: ...


class RelayedProgram:
    """A Python text that runs in `box` on open files of the controller's."""

    def __init__(self, box: CommandBox, code: str, stdin: int, stdout: int, stderr: int) -> None:
        self.box, self.place = box, f"{PLACE}-{os.urandom(4).hex()}"
        self.began, self.code, self.fault = time.monotonic(), None, ""  # type: float, int | None, str
        done = box.run([*PYTHON, SUPERVISOR, self.place], stdin=code.encode(errors="replace"), wall=30.0)
        if not done.ok:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise SandboxError(f"a program of the box did not begin: {said or done.ended}")
        self._files = [os.dup(fd) for fd in (stdin, stdout, stderr)]
        self._thread = threading.Thread(target=self._pump, name="sandbox", daemon=True)
        self._thread.start()

    def finish(self, wall: float) -> CommandResult:
        self._thread.join(wall)
        limit = ""
        if self._thread.is_alive():
            limit = "wall"
            self.box.kill()
            self._thread.join(10.0)
        elif self.fault:
            raise BoxError(self.fault)
        code = self.code if self.code is not None else -9
        return CommandResult(max(code, 0), max(-code, 0), b"", b"", limit, time.monotonic() - self.began)

    def _pump(self) -> None:
        into, out, err = self._files
        pace, ended = 0.01, False
        try:
            while self.code is None:
                data = b""
                if not ended and select.select([into], [], [], pace)[0]:
                    data = os.read(into, 1 << 16)
                    ended = not data
                elif ended:
                    time.sleep(pace)
                told = self._step(data, end=ended, wait=LONG if data else 0.0)
                for fd, name in ((out, "stdout"), (err, "stderr")):
                    _write_all(fd, base64.b64decode(told[name]))
                self.code = told["code"]
                pace = 0.01 if data or told["stdout"] or told["stderr"] else min(SHORT, 2 * pace)
        except Exception as error:
            self.fault = f"the box broke down: {error}"
        finally:
            for fd in self._files:
                os.close(fd)

    def _step(self, data: bytes, *, end: bool, wait: float) -> dict[str, Any]:
        asked = {"stdin": base64.b64encode(data).decode(), "end": end, "wait": wait}
        done = self.box.run([*PYTHON, STEP, self.place], stdin=json.dumps(asked).encode(), wall=wait + 30)
        try:
            told: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise BoxError(f"its supervisor does not answer ({done.ended})") from None
        return told


def remove_dead_relays() -> list[Path]:
    """Where a box is on this machine and shares its folder of temporary files: sockets on which no supervisor listens,
    and programs that were never read. -> those that are gone now.
    """
    home = Path(PLACE)
    removed = []
    for stem in sorted({path.with_suffix("") for path in home.parent.glob(f"{home.name}-*")}):
        if not _has_supervisor(stem):
            here = [path for path in (stem, stem.with_suffix(".py")) if path.exists()]
            for path in here:
                path.unlink(missing_ok=True)
            removed += here
    return removed


def _has_supervisor(home: Path) -> bool:
    """It binds its socket before it writes the program, and removes it last.
    One that is busy or another user's lives."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(0.2)
        try:
            door.connect(str(home))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _write_all(fd: int, data: bytes) -> None:
    with suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]
