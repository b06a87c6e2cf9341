"""The first process of a box: carries out one command at a time, and leaves nothing running after it.

control   SOCK_SEQPACKET: {"do": "run" | "call" | "write" | "read", ...} with the files of the
          command -> {"exit", "signal", ...}; {"do": "kill"} meanwhile ends the command. The
          end of the socket is the end of the box

It never runs the box's code in itself, and no process of the box may signal, trace or read it.
"""

from __future__ import annotations

import importlib
import json
import marshal
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from rondel.runtime.sandbox.inside.condition import condition, initial_condition, next_process
from rondel.runtime.sandbox.inside.drop import drop
from rondel.runtime.sandbox.inside.kernel import DUMPABLE, prctl
from rondel.runtime.sandbox.inside.view import shut_devices

MOST = 1 << 18  # bytes of one message


def serve(control: socket.socket, spec: dict[str, Any], groups: list[int], counter: int = -1) -> None:
    """counter: open file that counts what the kernel killed for its memory."""
    if os.getpid() != 1:
        raise SystemExit("not the first process of a box: it would kill what is not its own")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    prctl(DUMPABLE, 0)
    for name in spec["modules"]:
        importlib.import_module(name)
    # a folder of the host's is kept as it is, and its box is never used again
    new = () if spec["folder"] else initial_condition(spec["home"])
    control.send(json.dumps({"ready": True, "grouped": spec["grouped"]}).encode())
    while True:
        message, files, _, _ = socket.recv_fds(control, MOST, 8)
        if not message:
            return
        order = json.loads(message)
        if order["do"] == "kill":  # its command has just ended
            continue
        before = count_oom_kills(counter)
        answer = carry_out(order, files, control, spec, groups)
        answer["oom"] = count_oom_kills(counter) > before
        answer["left"] = changed(answer.pop("process"), new, spec["home"])
        control.send(json.dumps(answer).encode())


def carry_out(
    order: dict[str, Any], files: list[int], control: socket.socket, spec: dict[str, Any], groups: list[int]
) -> dict[str, Any]:
    broken, tells = os.pipe()  # closed unread once the box's code runs; else it says why it does not
    child = os.fork()
    if child == 0:
        try:
            exec_command(order, files, spec, groups, tells)
        except BaseException as error:
            with suppress(OSError):
                os.write(tells, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os._exit(127)
    for fd in (*files, tells):
        os.close(fd)
    answer = wait_for_child(child, control)
    os.set_blocking(broken, False)
    with suppress(BlockingIOError):
        answer["broken"] = os.read(broken, 4000).decode(errors="replace")
    os.close(broken)
    return answer | {"process": child}


def exec_command(order: dict[str, Any], files: list[int], spec: dict[str, Any], groups: list[int], tells: int) -> None:
    """In the child: becomes the command."""
    for target in range(3):
        os.dup2(files[target], target)
    keep = (*files[3:], tells)
    drop(spec, groups, keep)
    match order["do"]:
        case "run":
            command = order["argv"]
            try:
                os.execvpe(command[0], command, order["env"])
            except (OSError, ValueError) as error:  # a ValueError: a zero byte, or what is no text
                os.write(2, f"{command[0]}: {getattr(error, 'strerror', error)}\n".encode(errors="replace"))
                os._exit(127 if getattr(error, "errno", 0) == 2 else 126)
        case "call":
            os.close(tells)
            call(files[3], files[4:], order["env"])
        case "write":
            os.close(tells)
            copy_file(order, reads=False)
        case "read":
            os.close(tells)
            copy_file(order, reads=True)


def call(source: int, prelude: list[int], env: dict[str, str]) -> None:
    """A function of the pool: no new program, this interpreter's copy runs the text. A prelude is compiled already."""
    with os.fdopen(source, encoding="utf-8") as file:
        text = file.read()
    before = [marshal.loads(os.pread(fd, os.fstat(fd).st_size, 0)) for fd in prelude]
    for fd in prelude:
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c"]
    sys.path = [
        os.getcwd(),
        *filter(os.path.isdir, sys.path),
        *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    status = 0
    try:
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        for code in before:
            exec(code, main.__dict__)
        exec(compile(text, "<code>", "exec"), main.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException as error:
        status = 1
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)


def copy_file(order: dict[str, Any], *, reads: bool) -> None:
    """A file of the box to file 1, or file 0 to it: as the box's own user, so that a link
    leads nowhere that the box may not go.
    """
    try:
        path = os.path.join(os.getcwd(), order["path"])
        if not reads:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        # a pipe must not hold it
        flags = os.O_RDONLY | os.O_NONBLOCK if reads else os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
        file = os.open(path, flags, order.get("mode", 0o644))
        source, target = (file, 1) if reads else (0, file)
        while piece := os.read(source, 1 << 16):
            while piece:
                piece = piece[os.write(target, piece) :]
    except (OSError, ValueError) as error:
        os.write(2, f"{order['path']}: {getattr(error, 'strerror', error)}\n".encode(errors="replace"))
        os._exit(1)
    os._exit(0)


def wait_for_child(child: int, control: socket.socket) -> dict[str, Any]:
    """Until it ends or is told to; then nothing of it is left."""
    ends = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ends, select.POLLIN)
    poll.register(control, select.POLLIN)
    status, usage, told = None, None, False
    while status is None:
        ready = dict(poll.poll(100))
        if control.fileno() in ready:
            message = control.recv(MOST)
            if not message:
                os._exit(0)  # the last process of a box takes all others with it
            told = told or json.loads(message)["do"] == "kill"
        if told:
            stop_all()
        status, usage = reap_children(child)
    os.close(ends)
    stop_all()
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
        stop_all()
    exited = os.waitstatus_to_exitcode(status)
    cpu = usage.ru_utime + usage.ru_stime if usage else 0.0
    return {
        "exit": max(exited, 0),
        "signal": max(-exited, 0),
        "cpu": cpu,
        "peak": usage.ru_maxrss * 1024 if usage else 0,
    }


def reap_children(child: int) -> tuple[Any, Any]:
    """All who have ended, among them orphans that nobody waits for. -> the child's
    (status, usage), when it is among them.
    """
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return 0, None
        if pid == 0:
            return None, None
        if pid == child:
            return status, usage


def stop_all() -> None:
    """Every process of the box but this one: none can fork past a signal that waits for it."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def count_oom_kills(counter: int) -> int:
    if counter < 0:
        return 0
    rows = os.pread(counter, 4096, 0).decode().split()
    return int(rows[rows.index("oom_kill") + 1]) if "oom_kill" in rows else 0


def changed(process: int, new: tuple[Any, ...], home: str) -> bool:
    """Whether the next command could see that this one, whose number is given, has been."""
    try:
        return not new or next_process() != process + 1 or condition(home) != new
    except OSError:
        return True


def main() -> None:
    """Inside bubblewrap: the walls stand already, but for what it leaves open to a root's box, and
    to a plain user's.
    """
    spec = json.loads(sys.argv[1])
    with suppress(OSError):
        shut_devices()
    with suppress(OSError), open("/proc/self/projid_map", "w") as file:
        file.write("0 0 1")
    serve(socket.socket(fileno=spec["control"]), spec, spec["groups"], spec["counter"])
