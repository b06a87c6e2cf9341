"""Boxes of a service over HTTP: one driver, and for each provider an adapter that creates, carries out and deletes.

A command goes as one shell line of a small runner, which carries stdin in and all that came of it out as JSON: so
every provider has exact bytes, both streams, signals and limits, whatever its own interface knows of them.
The identifiers of open boxes are kept on the disk (leftovers.py): what a killed run left is ended by the next, or by
`rondel sandbox clean`. Keys are read from the environment and are never written anywhere.
"""

from __future__ import annotations

import base64
import json
import shlex
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from rondel.core.errors import BoxError, SandboxError
from rondel.core.sandbox_types import CommandResult, Limits
from rondel.runtime.sandbox.external import ENV, ExternalSandbox
from rondel.runtime.sandbox.leftovers import Leftovers, end_left_boxes
from rondel.runtime.sandbox.providers import PROVIDERS, Provider, delete_box
from rondel.runtime.sandbox.relay import PYTHON

CHUNK = 60_000  # characters of one shell line
MARK = "rondel-result:"
# argv: a JSON object in base64, or the file that holds it
RUNNER = """
import base64, json, os, resource, signal, subprocess, sys
word = sys.argv[1]
if word.startswith("@"):
    path = word[1:]
    word = open(path).read()
    os.unlink(path)
asked = json.loads(base64.b64decode(word))
def narrow():
    for what, value in (("RLIMIT_CPU", asked["cpu"]), ("RLIMIT_FSIZE", asked["file"]), ("RLIMIT_CORE", 0)):
        resource.setrlimit(getattr(resource, what), (value, value))
home = "/box" if os.access("/box", os.W_OK) else os.path.join("/tmp", "box")
os.makedirs(home, exist_ok=True)
limit = ""
try:
    one = subprocess.Popen(asked["argv"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=home,
                           env={**os.environ, **asked["env"], "HOME": home}, preexec_fn=narrow, start_new_session=True)
except (OSError, ValueError) as error:
    code, out, err = 127 if getattr(error, "errno", 0) == 2 else 126, b"", f"{asked['argv'][0]}: {error}".encode()
else:
    try:
        out, err = one.communicate(base64.b64decode(asked["stdin"]), asked["wall"])
    except subprocess.TimeoutExpired:
        limit = "wall"
        os.killpg(one.pid, signal.SIGKILL)
        out, err = one.communicate()
    code = one.returncode
most = asked["output"]
if not limit and max(len(out), len(err)) > most:
    limit = "output"
if not limit and code == -signal.SIGXCPU:
    limit = "cpu"
streams = {name: base64.b64encode(data[:most]).decode() for name, data in (("stdout", out), ("stderr", err))}
print("rondel-result:" + json.dumps({"exit": max(code, 0), "signal": max(-code, 0), "limit": limit, **streams}))
"""


WORDS = "/tmp/.rondel"  # of a command that is too long for a shell line, until it begins


def make_remote_box(limits: Limits, *, provider: str = "", **settings: Any) -> RemoteBox:
    """SandboxError for a provider that this driver does not speak to, and for a key that is not set."""
    settings.pop("folder", None)
    made = PROVIDERS.get(provider)
    if made is None:
        raise SandboxError(
            f"provider = '{provider}': "
            + (
                "Modal has no public HTTP interface, only its own client; call it from an environment of your own"
                if provider == "modal"
                else f"it must be one of {', '.join(PROVIDERS)}"
            )
        )
    with suppress(SandboxError):  # of earlier runs; `rondel sandbox clean` says why not
        end_left_boxes(delete_box)
    known = {name: settings[name] for name in ("image", "url", "timeout", "namespace") if name in settings}
    return RemoteBox(made(**known), limits)


class RemoteBox(ExternalSandbox):
    """One box of a service."""

    def __init__(self, provider: Provider, limits: Limits, leftovers: Leftovers | None = None) -> None:
        self.provider, self.limits, self.tool = provider, limits, provider.name
        self._leftovers = leftovers or Leftovers()
        self._count, self._lock = 0, threading.Lock()
        with self._leftovers.opening(provider.name, provider.place) as note:
            self.name = provider.create(limits)
            note(self.name)
        self._end = weakref.finalize(self, _delete_box, provider, self.name, self._leftovers)

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult:
        if not self.alive:
            raise BoxError("the box has ended")
        began, wall = time.monotonic(), wall or self.limits.wall
        asked = {
            "argv": argv, "env": {**ENV, **(env or {})}, "stdin": base64.b64encode(stdin).decode(), "wall": wall,
            "cpu": int(self.limits.cpu + 1), "file": self.limits.file, "output": self.limits.output,
        }  # fmt: skip
        word = base64.b64encode(json.dumps(asked).encode()).decode()
        if len(word) > CHUNK:
            word = self._upload(word)
        said = self.provider.execute(self.name, f"{shlex.join((*PYTHON, RUNNER))} {word}", wall + 30.0)
        _, mark, rest = said.rpartition(MARK)
        try:
            told = json.loads(rest.splitlines()[0]) if mark else {}
        except (ValueError, IndexError):
            told = {}
        if not told:
            raise BoxError(f"{self.tool}: a command came to no result: {said.strip()[-200:] or 'it said nothing'}")
        streams = {name: base64.b64decode(told[name]) for name in ("stdout", "stderr")}
        return CommandResult(
            told["exit"], told["signal"], **streams, limit=told["limit"], seconds=time.monotonic() - began
        )

    def _upload(self, word: str) -> str:
        """The words in a file of the box, in pieces that a shell line can have."""
        with self._lock:
            self._count += 1
            path = f"{WORDS}-{self._count}"
        for begin in range(0, len(word), CHUNK):
            sign = ">" if begin == 0 else ">>"
            self.provider.execute(self.name, f"printf %s {word[begin : begin + CHUNK]} {sign} {path}", 30.0)
        return f"@{path}"

    def kill(self) -> None:
        self.alive = False
        self._end()


def _delete_box(provider: Provider, name: str, leftovers: Leftovers) -> None:
    """One that cannot be deleted now stays on the list."""
    with suppress(SandboxError):
        provider.delete(name)
        leftovers.forget(name)
