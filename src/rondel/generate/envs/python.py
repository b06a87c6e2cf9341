"""The python tool: what the policy writes runs in a box of the episode, and variables live from call to call."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rondel.core.clocks import poll_until, running_time
from rondel.core.errors import EnvError, SandboxError
from rondel.core.protocols import SandboxCell, SandboxFactory
from rondel.core.sandbox_types import Limits
from rondel.core.types import Task
from rondel.text.error_lines import visible_error

SECONDS = 10.0  # one call
MOST = 4000  # characters that the policy reads of one call
GRACE = 2.0  # seconds after which an interpreter that was told to stop is ended
LIMITS = Limits(wall=3600.0, cpu=120.0)
REPL = Path(__file__).with_name("repl.py")


class SandboxInterpreter:
    """One box with an interpreter that waits for text."""

    def __init__(self, sandbox: SandboxFactory) -> None:
        self.cell: SandboxCell = sandbox.cell(LIMITS)
        self._began = time.monotonic()
        asks, answers, none = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDWR)
        try:
            self.cell.begin(
                f"{REPL.read_text(encoding='utf-8')}\nserve({SECONDS}, {MOST})\n", asks[0], answers[1], none
            )
        except BaseException:
            os.close(asks[1])
            os.close(answers[0])
            self.cell.kill()
            raise
        finally:
            for fd in (asks[0], answers[1], none):
                os.close(fd)
        self.asks, self.answers = asks[1], answers[0]
        os.set_blocking(self.asks, False)

    def run_code(self, code: str) -> str | None:
        """What it printed; None when it ended, or does not hear."""
        return self._ask({"code": code})

    def folder_digest(self) -> str | None:
        """Of its folder as it is now; None as above."""
        return self._ask({})

    def _ask(self, asked: dict[str, str]) -> str | None:
        deadline = running_time() + SECONDS + GRACE
        rest, line = json.dumps(asked).encode() + b"\n", b""
        try:
            while rest:
                _until_ready(self.asks, select.POLLOUT, deadline)
                rest = rest[os.write(self.asks, rest) :]
            while not line.endswith(b"\n") and len(line) < 8 * MOST:
                _until_ready(self.answers, select.POLLIN, deadline)
                if not (piece := os.read(self.answers, 1 << 16)):
                    return None
                line += piece
            text = json.loads(line)["text"]
            return text if isinstance(text, str) else None
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            RecursionError,
        ):  # late, a broken pipe; or the code wrote into the answers itself
            return None

    def usage(self) -> dict[str, float]:
        """Seconds that it is open, and what is counted of its box: {"box_seconds", "box_cpu", "box_peak"}."""
        found = {"box_seconds": time.monotonic() - self._began}
        used = self.cell.usage() if hasattr(self.cell, "usage") else None
        if used is not None and used.cpu is not None:
            found["box_cpu"] = used.cpu
        if used is not None and used.peak is not None:
            found["box_peak"] = float(used.peak)
        return found

    def end_process(self) -> str:
        """-> how it ended."""
        try:
            ended = self.cell.finish(0.2)
            return "it took too long" if ended.limit == "wall" else ended.ended
        except SandboxError as error:
            return str(error)
        finally:
            self.cell.kill()
            os.close(self.asks)
            os.close(self.answers)


def python_tool(sandbox: Callable[[], SandboxFactory]) -> type:
    """The tool as a class, of which every episode has its own."""

    class Python:
        def __init__(self, task: Task) -> None:
            self._turn, self._closed, self._task = threading.Lock(), False, task
            self._open: SandboxInterpreter | None = None
            self._spent: dict[str, float] = {}  # of its boxes that have ended

        @property
        def is_busy(self) -> bool:
            """Whether its box is open: what takes long then is what the policy had it run. Between two of its calls, too:
            who waits for its turn waits for them."""
            return self._open is not None

        def python(self, code: str) -> str:
            """Run Python code and read what it prints; the value of a last expression is shown. Variables and files are
            kept between calls. There is no network.
            """
            with self._turn:  # calls of one reply are carried out one after the other
                if self._closed:
                    raise EnvError("the episode is over")
                try:
                    self._open = self._open or SandboxInterpreter(sandbox())
                except SandboxError as error:
                    raise EnvError(f"no box for the code of {self._task.id}: {error}") from error
                text = None if self._closed else self._open.run_code(code)
                if text is None:  # and a box that was opened for an episode that is over ends too
                    self._spent = _added(self._spent, self._open.usage())
                    how, self._open = self._open.end_process(), None
                    return f"error: the interpreter ended ({visible_error(how)}); its variables and files are lost"
                return middle_out(text)

        def folder_digest(self) -> str:
            """Of the box's folder; "" where there is none, or it does not answer."""
            with self._turn:
                return (self._open.folder_digest() if self._open is not None and not self._closed else None) or ""

        def box_usage(self) -> dict[str, float]:
            """Of all its boxes so far; nothing where none was opened."""
            with self._turn:
                return _added(self._spent, self._open.usage()) if self._open is not None else self._spent

        def interrupt(self) -> None:
            """The time of the episode is over: the code that runs ends, with its box."""
            if (opened := self._open) is not None:
                opened.cell.kill()

        def close(self) -> None:
            """At once for the caller: the box ends beside."""
            self._closed = True
            if (opened := self._open) is not None:
                threading.Thread(target=self._release_interpreter, args=(opened,), daemon=True).start()

        def _release_interpreter(self, opened: SandboxInterpreter) -> None:
            opened.cell.kill()  # who waits for it hears that it ended
            with self._turn:
                if self._open is opened:
                    opened.end_process()
                    self._open = None

    return Python


def _added(spent: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return spent | {
        name: max(spent.get(name, 0.0), value) if name == "box_peak" else spent.get(name, 0.0) + value
        for name, value in more.items()
    }


def middle_out(text: str, most: int = MOST + 200) -> str:
    """The box says how much it left out; what it says is not trusted to be short."""
    return (
        text
        if len(text) <= most
        else f"{text[: most // 2]}\n[... {len(text) - most} characters left out ...]\n{text[-most // 2 :]}"
    )


def _until_ready(fd: int, what: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, what)
    if not poll_until(poll, deadline):
        raise TimeoutError
