"""What the policy may do in a repository: look at files, change them, run commands.
All of it in one box of the episode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rondel.core.errors import BoxError, EnvError, SandboxError
from rondel.core.sandbox_types import BoxFileError, CommandResult
from rondel.generate.envs.repository.grader import Changes, known_sums
from rondel.generate.envs.repository.task import RepositoryTask
from rondel.generate.envs.repository.workspace import Workspace, command_text, shell_word

LINES = 200  # of one read_file
FOUND = 50  # lines of one search
LISTED = 200  # paths of one list_files


class RepositoryTools:
    """The public methods are the tools of one episode; its box starts with the first call.

    most   characters that the policy reads of one call
    """

    def __init__(self, task: RepositoryTask, make: Callable[[], Workspace], *, most: int = 6000) -> None:
        self._task, self._make, self._most = task, make, most
        self._turn, self._closed = threading.Lock(), False
        self._box: Workspace | None = None

    @property
    def is_busy(self) -> bool:
        """Whether its box is open: what takes long then is what the policy had it run, or waits for that."""
        return self._box is not None

    # -- tools -----------------------------------------------------------------------------------

    def list_files(self, folder: str = ".") -> str:
        """The paths of all files below a folder of the repository."""
        found = self._ask("list", folder=folder, most=LISTED)
        more = f"\n[{found['left_out']} more left out]" if found["left_out"] else ""
        return ("\n".join(found["files"]) or "no files") + more

    def read_file(self, path: str, first: int = 1, last: int = 0) -> str:
        """Lines of a file with their numbers: from `first` to `last`, or 200 of them."""
        first = max(1, first)
        text = str(self._ask("read", path=path, first=first, last=last if last > 0 else first + LINES - 1)["text"])
        if len(text) > self._most:
            text = f"{text[: self._most]}\n[... cut: ask for fewer lines]"
        return text

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace the text `old`, which must stand at exactly one place of the file, by `new`."""
        return str(self._ask("edit", path=path, old=old, new=new)["text"])

    def write_file(self, path: str, text: str) -> str:
        """Write a whole file, new or not."""
        return str(self._ask("write", path=path, text=text)["text"])

    def search(self, text: str) -> str:
        """The lines of all files that contain a text."""
        return str(self._ask("search", text=text, most=FOUND)["text"])[: self._most]

    def run(self, command: str) -> str:
        """Run a shell command in the repository and read what it prints."""
        return self._run(lambda box: box.run(command))

    def run_tests(self, files: str = "") -> str:
        """Run the tests of the repository, or those in the given files."""
        named = files.split() or [name for name in self._task.settings.visible if name]
        command = self._task.settings.test.replace("{files}", " ".join(map(shell_word, named)))
        if self._task.settings.report == "reward":  # its tests are hidden
            return "error: this repository has no tests to run; try out what you need with run"
        return self._run(lambda box: box.run(command))

    # -- of the environment ----------------------------------------------------------------------

    def folder_digest(self) -> str:
        """Equal for equal files; "" where the box does not answer."""
        with self._turn:
            try:
                return self._box.folder_digest() if self._box is not None and not self._closed else ""
            except (OSError, SandboxError):
                return ""

    def _changes(self) -> Changes | None:
        """What the episode changed; None where the box does not give it any more."""
        with self._turn:
            if self._box is None:
                return {}
            try:
                return self._box.changes(known_sums(self._task.files))
            except (OSError, SandboxError):
                return None

    def _ask(self, verb: str, **what: Any) -> dict[str, Any]:
        answer = self._in_box(lambda box: box.ask(verb, **what))
        if "error" in answer:
            raise BoxFileError(answer["error"])
        return dict(answer)

    def _run(self, command: Callable[[Workspace], CommandResult]) -> str:
        return command_text(self._in_box(command), self._most)

    def _in_box(self, do: Callable[[Workspace], Any]) -> Any:
        with self._turn:
            if self._closed:
                raise EnvError("the episode is over")
            if self._box is None:
                self._box = self._make()
            try:
                return do(self._box)
            except BoxError as error:  # what the policy ran took the box with it: the files are lost
                self._box.close()
                self._box = None
                raise BoxFileError(
                    f"the box of the repository ended ({error}); its files are as they were at first"
                ) from None

    def close(self) -> None:
        """At once for the caller: the box ends beside."""
        self._closed = True
        if (box := self._box) is not None:
            threading.Thread(target=box.close, daemon=True).start()
