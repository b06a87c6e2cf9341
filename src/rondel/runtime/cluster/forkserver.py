"""Where workers begin with everything imported: one process per controller that has done it once, and forks.

    controller ── ticket, what it is made by; socket, log ──> nursery (imports that once, if it is ours, and torch in any case)
               <── born: ticket, pid ··· ended: pid, exit code ────     │ fork, instead of the seconds in which torch is imported
                                                                        worker: the same worker_main.main as in a
                                                                        process of its own

A worker dies with the nursery, the nursery with its controller (law 14). Only on Linux and
where nothing but a CPU is: what talks to a GPU must not be forked. Whatever goes wrong
here, the worker is started in the ordinary way.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from typing import Any

from rondel.system.interpreter import import_whole
from rondel.system.signals import die_with_parent, leave_to_controller

ROOM = 1 << 20  # bytes of one message: an environment, a path
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/accel")
NEVER_BORN = -1  # process id of a worker whose nursery ended first
PATIENCE = 120.0  # seconds for the first worker, which waits for the imports
OURS, BASE = "rondel.", "torch"


class ForkedProcess:
    """The part of `subprocess.Popen` that is asked of a worker; its exit code comes from the nursery."""

    def __init__(self) -> None:
        self.born: Future[int] = Future()
        self.ended: Future[int] = Future()

    @property
    def pid(self) -> int:
        return self.born.result(PATIENCE)

    def poll(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self.ended.result(timeout)
        except TooLate as error:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0) from error

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, TooLate):
            if self.poll() is None and (pid := self.pid) != NEVER_BORN:  # to the kernel -1 is every process
                os.kill(pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The controller's end."""

    def __init__(self) -> None:
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.waiting: dict[int, ForkedProcess] = {}  # by ticket
        self.living: dict[int, ForkedProcess] = {}  # by process id
        self.tickets = 0
        started: Future[tuple[socket.socket, subprocess.Popen[bytes]]] = Future()
        threading.Thread(target=self._start, args=(started,), name="nursery", daemon=True).start()
        self.socket, self.process = started.result()

    @property
    def is_alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def fork_worker(self, module: str, pipe: int, log: int, environment: dict[str, str]) -> ForkedProcess:
        """`pipe`: the worker's end of its socket pair. OSError if it cannot be asked."""
        with self.lock:
            self.tickets += 1
            ticket, process = self.tickets, ForkedProcess()
            self.waiting[ticket] = process
            told = pickle.dumps((ticket, module, os.getcwd(), _import_path(), environment))
            try:
                socket.send_fds(self.socket, [told], [pipe, log])
            except OSError:
                del self.waiting[ticket]
                raise
        return process

    def _start(self, started: Future[tuple[socket.socket, subprocess.Popen[bytes]]]) -> None:
        """Start the nursery in the thread that hears it: the kernel ends a child with the thread that started it, and
        this one ends with the nursery or with the process.
        """
        try:
            server = start_server()
        except BaseException as error:
            return started.set_exception(error)
        started.set_result(server)
        return self._receive_events(server[0])

    def _receive_events(self, events: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while told := events.recv(ROOM):
                kind, number, value = pickle.loads(told)
                with self.lock:
                    if kind == "born":
                        self.living[value] = process = self.waiting.pop(number)
                        process.born.set_result(value)
                    else:
                        self.living.pop(number).ended.set_result(value)
        with self.lock:  # whoever was born there died with it
            for process in [*self.waiting.values(), *self.living.values()]:
                if not process.born.done():
                    process.born.set_result(NEVER_BORN)
                process.ended.set_result(-signal.SIGKILL)
            self.waiting.clear()
            self.living.clear()

    def close(self) -> None:
        if self.owner == os.getpid():
            self.socket.close()
            self.process.kill()
            self.process.wait()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The ends of the controller and of the nursery."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
    return ends


def start_server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A nursery in an interpreter of its own, and the controller's end of what is between them."""
    ours, theirs = socket_pair()
    with theirs:
        return ours, subprocess.Popen(
            [sys.executable, "-m", "rondel.runtime.cluster.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


_nursery: ForkServer | None = None
_guard = threading.Lock()


def fork_from_server(
    make: Callable[..., Any], pipe: int, log: int, environment: dict[str, str]
) -> ForkedProcess | None:
    """A worker that begins with everything imported; None where it has to be started in the ordinary way."""
    global _nursery
    if sys.platform != "linux" or any(map(os.path.exists, ACCELERATORS)):
        return None
    with _guard:
        try:
            if _nursery is None or not _nursery.is_alive:
                _nursery = ForkServer()
                atexit.register(_nursery.close)
            module = make.__module__ if make.__module__.startswith(OURS) else BASE  # what is the user's is not run here
            return _nursery.fork_worker(module, pipe, log, environment)
        except OSError:
            return None


def forkserver_pid() -> int | None:
    """Of the one that this process has."""
    return _nursery.process.pid if _nursery is not None and _nursery.is_alive else None


def _import_path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


# -- in the nursery ------------------------------------------------------------------------------


def main(number: int) -> None:
    """`number`: of the descriptor of its end of the socket pair."""
    controller, own = os.getppid(), socket.socket(fileno=number)
    die_with_parent()  # at once, also from the imports, which take seconds
    if _is_closed(own):  # the controller was gone before that
        return
    leave_to_controller()
    heard, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([own.fileno(), heard], [], [], 1.0)
        if os.getppid() != controller:
            return
        if heard in ready:
            os.read(heard, 4096)
        while (ended := _reap_child()) is not None:
            own.send(pickle.dumps(("ended", *ended)))
        if own.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(own, ROOM, 2)
            if not message:
                return
            ticket, module, folder, path, environment = pickle.loads(message)
            import_whole(module)  # what is shared is not written to by a collection
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                own.close()
                os.close(heard)
                os.close(told)
                _run_child(fds[0], fds[1], folder, path, environment)
            for fd in fds:
                os.close(fd)
            own.send(pickle.dumps(("born", ticket, pid)))


def _is_closed(end: socket.socket) -> bool:
    """Whether nobody has the other end, whatever is still to be read."""
    poll = select.poll()
    poll.register(end, 0)
    return any(seen & select.POLLHUP for _, seen in poll.poll(0))


def _reap_child() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _run_child(pipe: int, log: int, folder: str, path: list[str], environment: dict[str, str]) -> None:
    """The forked process as a fresh interpreter would be."""
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        with contextlib.suppress(OSError):
            os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        random.seed()
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()

        from rondel.runtime.cluster import worker_main

        worker_main.run_worker(pipe, os.getppid())
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
