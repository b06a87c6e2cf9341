"""One box with a repository in it: commands, files, and what has changed. Blocking, each verb with a deadline."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rondel.core.errors import BoxError, DataError, EnvError, SandboxError
from rondel.core.protocols import SandboxCell, SandboxFactory
from rondel.core.repository_files import RepositoryFile, Tree
from rondel.core.sandbox_types import BoxFileError, CommandResult, Limits
from rondel.generate.envs.repository.packages import installed_modules
from rondel.generate.envs.repository.task import RepositoryTask

SCRIPT = Path(__file__).with_name("box_files.py").read_text(encoding="utf-8")
# in a copy of the box's interpreter, whose path begins with the folder of the commands
IN_INTERPRETER = f"import sys\ndel sys.path[0]\n{SCRIPT}"
MODULES = ("base64", "difflib", "hashlib")  # that it imports beside those of a box
PLUGIN = Path(__file__).with_name("pytest_report.py").read_bytes()
OWN = "/tmp/.rondel"  # folder of a box with what is ours
REPORT = f"{OWN}/report.json"
PYTEST = b'#!/bin/sh\nexec python3 -m pytest "$@"\n'
SHELL = (
    'cd "$1" && PATH="$2:$PATH" && export PATH && if command -v bash >/dev/null; then exec bash -c "$3"; '
    'else exec sh -c "$3"; fi'
)
LIMITS: dict[str, Any] = {
    "cpu": 600.0, "memory": 1 << 30, "processes": 64, "disk": 256 << 20, "file": 64 << 20, "files": 40_000,
    "output": 16 << 20, "open_files": 256,
}  # fmt: skip
FILE_SECONDS = 60.0
Placed = tuple[str, Mapping[str, RepositoryFile]]  # a folder of the box, and files below it
# what differs from run to run: seconds that test runners print, and addresses of objects
SECONDS = re.compile(r"\b(in|took|after) \d+(?:\.\d+)? ?(s|ms|seconds)\b(?: \(\d+:\d\d:\d\d\))?")
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")


class Workspace:
    """`Workspace(task, sandbox)`; `close()` ends the box. SandboxError where none can be made.

    seconds   wall clock of one command
    shown     further folders of this machine that the box may read
    more      files beside the repository, put in one go with it
    network   False: none, not even the machine's own addresses
    """

    def __init__(
        self,
        task: RepositoryTask,
        sandbox: SandboxFactory,
        *,
        seconds: float = 60.0,
        files: Tree | None = None,
        shown: tuple[str, ...] = (),
        more: Sequence[Placed] = (),
    ) -> None:
        self.task, self.root, self.seconds = task, task.settings.workdir, seconds
        limits = Limits(wall=max(seconds, FILE_SECONDS), **LIMITS)
        self.imports: tuple[str, ...] = ()
        settings: dict[str, Any] = {}
        self._shows_host = shows_host(sandbox)
        if self._shows_host:
            modules, imports, _ = installed_modules(tuple(task.settings.packages))
            self.imports = tuple(map(os.path.realpath, imports))
            settings = {"shown": (*modules, *shown), "modules": MODULES}
        if places := self._places():
            settings["places"] = places
        self.cell: SandboxCell = sandbox.cell(limits, **settings)
        try:
            own = {"rondel_pytest_report.py": RepositoryFile(PLUGIN), "bin/pytest": RepositoryFile(PYTEST, True)}
            self.put((OWN, own), (self.root, task.files if files is None else files), *more)
        except BaseException:
            self.cell.kill()
            raise

    def _places(self) -> tuple[str, ...]:
        """Folders of the box that it can write beside its home and /tmp."""
        hidden = (f"/{path.split('/')[1]}" for path in self.task.hidden if path.startswith("/"))
        found = dict.fromkeys((self.root, *self.task.settings.places, *hidden))
        return tuple(path for path in found if not f"{path}/".startswith(("/box/", "/tmp/")))

    # -- files -----------------------------------------------------------------------------------

    def put(self, *placed: Placed) -> None:
        """Writes them in this order: a later file replaces an earlier one."""
        held = [(folder, {path: _encode_file(file) for path, file in files.items()}) for folder, files in placed]
        answer = self.ask("put", placed=held)
        if "error" in answer:
            raise SandboxError(f"the files of {self.task.name} cannot be put in a box: {answer['error']}")

    def ask(self, verb: str, **what: Any) -> dict[str, Any]:
        """One request to the script in the box. BoxFileError where it has no answer, which the policy may have caused:
        the disk is full, or a file is too large.
        """
        request = json.dumps({"do": verb, "root": self.root, **what}).encode()
        if self._shows_host:
            ran = self.cell.call("", prelude=IN_INTERPRETER, stdin=request, wall=FILE_SECONDS)
        else:
            ran = self.cell.run(["python3", "-I", "-S", "-c", SCRIPT], stdin=request, wall=FILE_SECONDS)
        if not ran.ok:
            said = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise BoxFileError(f"the files of the box cannot be reached ({said or ran.ended})")
        try:
            return dict(json.loads(ran.stdout))
        except ValueError as error:
            raise BoxFileError("the files of the box cannot be reached (an answer that is none)") from error

    def changes(self, known: Mapping[str, str]) -> dict[str, RepositoryFile | None]:
        """The files of the repository that are otherwise than `known` (path -> checksum); None for one that is gone."""
        return self.state(known)[0]

    def state(self, known: Mapping[str, str]) -> tuple[dict[str, RepositoryFile | None], str]:
        """`changes` and `folder_digest`, in one go."""
        answer = self.ask("state", known=dict(known))
        found: dict[str, RepositoryFile | None] = dict.fromkeys(answer["gone"])
        for path, (mode, data, link) in answer["changed"].items():
            found[path] = RepositoryFile(base64.b64decode(data), mode == 0o755, link)
        return dict(sorted(found.items())), str(answer["digest"])

    def folder_digest(self) -> str:
        return str(self.ask("digest")["digest"])

    # -- commands --------------------------------------------------------------------------------

    def run(self, command: str, *, seconds: float | None = None, env: Mapping[str, str] | None = None) -> CommandResult:
        """A line for the shell, in the repository. EnvError where the box is gone and the command is not to blame."""
        return self.cell.run(
            ["sh", "-c", SHELL, "run", self.root, f"{OWN}/bin", command],
            env=self.environment() | dict(env or {}),
            wall=seconds or self.seconds,
        )

    def environment(self) -> dict[str, str]:
        env = dict(self.task.settings.env)
        if self._shows_host:  # its python3 may have plugins beside it, which no task asked for
            env.setdefault("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        own = [os.path.join(self.root, part) for part in env.pop("PYTHONPATH", "").split(":") if part]
        return env | {
            "PYTHONPATH": ":".join([*own, OWN, *self.imports]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
        }

    def run_tests(self, files: list[str], *, seconds: float | None = None) -> tuple[CommandResult, dict[str, str]]:
        """The task's tests, in these files. -> what the command did, and what became of each test: "passed", "failed",
        "skipped", "xfailed"; nothing of a session that did not come to its end.
        """
        command = self.task.settings.test.replace("{files}", " ".join(map(shell_word, files))).strip()
        addopts = "-p no:cacheprovider -p rondel_pytest_report"
        env = {"PYTEST_ADDOPTS": addopts, "RONDEL_REPORT": REPORT}
        ran = self.run(command, seconds=seconds or self.task.settings.seconds, env=env)
        return ran, self._report() if self.task.settings.report == "pytest" and not ran.limit else {}

    def _report(self) -> dict[str, str]:
        try:
            held = self.cell.run(["cat", REPORT], wall=FILE_SECONDS)
            outcomes = json.loads(held.stdout) if held.ok else {}
        except (ValueError, BoxError):
            return {}
        return {str(name): str(end) for name, end in outcomes.items()} if isinstance(outcomes, dict) else {}

    def read_file(self, path: str, most: int = 1 << 16) -> str:
        """The text of any file of the box; "" where there is none."""
        held = self.cell.run(["head", "-c", str(most), path], wall=FILE_SECONDS)
        return held.stdout.decode(errors="replace") if held.ok else ""

    def close(self) -> None:
        self.cell.kill()


def _encode_file(file: RepositoryFile) -> tuple[int, str, str]:
    """(mode, base64, link), as the script in the box reads it."""
    return 0o755 if file.executable else 0o644, base64.b64encode(file.data).decode(), file.link


def shows_host(sandbox: Any) -> bool:
    """Whether its boxes have the programs of this machine; others have those of their image."""
    return bool(getattr(sandbox, "shows_host", getattr(sandbox, "kind", "process") == "process"))


def open_workspace(task: RepositoryTask, sandbox: SandboxFactory, **settings: Any) -> Workspace:
    """EnvError where no box can be made for the task."""
    if task.unmet and shows_host(sandbox):
        raise DataError(
            f"{task.name}: its image is made with '{task.unmet[0]}', which a box of this machine has not: build the "
            f'image and name it, task.env.sandbox = {{ kind = "container", image = ... }}'
        )
    try:
        return Workspace(task, sandbox, **settings)
    except (SandboxError, BoxFileError) as error:
        raise EnvError(f"no box for the repository of {task.name}: {error}") from error


def shell_word(word: str) -> str:
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "'" + word.replace("'", "'\\''") + "'"


def stable_text(text: str) -> str:
    """Without seconds of test runners and addresses of objects: an episode that is played again after a crash must read
    the same.
    """
    return ADDRESS.sub("0x...", SECONDS.sub(r"\1 0 \2", text))


def command_text(ran: CommandResult, most: int) -> str:
    """What a policy reads of a command: its output, how it ended, and of more than `most` characters a notice."""
    text = (ran.stdout + (b"\n" if ran.stdout and ran.stderr else b"") + ran.stderr).decode(errors="replace")
    text = stable_text(text).strip()
    if len(text) > most:
        cut = len(text) - most
        text = f"{text[: most // 3]}\n[... {cut} characters left out ...]\n{text[-(most - most // 3) :]}"
    return f"{text}\n[{ran.ended}]".strip()
