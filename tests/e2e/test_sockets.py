"""What a run or a server listens on: every socket of every mode is listed here, and none
can be reached from another machine unasked.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kits.engine import tiny as tiny_model
from kits.forked import Forked
from kits.nursery import parent_of
from kits.runs import run
from kits.sweeps import covering
from rondel.models.save import save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel does not list its sockets here"),
]

SHORT = {"loop__steps": 1, "loop__warmup__steps": 1}
SPLIT = {"place__kind": "split", **SHORT}
TWO = {**SPLIT, "place__ranks": 2}
MODES = {  # what is set, and how many sockets listen at once
    "shared": (SHORT, 0),
    "split": (SPLIT, 0),
    "split, weights by disk": ({**SPLIT, "sync__kind": "disk"}, 0),
    # the store, and a pair a member
    "split, weights by torch.distributed": ({**SPLIT, "sync__kind": "distributed"}, 3),
    "two ranks": (TWO, 3),
    "an engine of two processes": ({**SPLIT, "place__engines": {"tp": 2}}, 3),
    "two ranks, weights by torch.distributed": ({**TWO, "sync__kind": "distributed"}, 6),
    "page of metrics": ({**SHORT, "run__sinks": "free"}, 1),
    "gateway": ({**SHORT, "task__env": {"kind": "gateway", "agent": "kits.gateway:three_turns"}}, 1),
}


def _free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


def _family(process: int) -> set[int]:
    """It and all that descend from it."""
    above = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            above[int(entry.name)] = parent_of(int(entry.name))
        except OSError:
            continue
    found, new = set(), {process}
    while new:
        found |= new
        new = {child for child, parent in above.items() if parent in new} - found
    return found


def listening(process: int) -> set[tuple[str, int]]:
    """(address, port) of what a process and its descendants listen on, in IPv4 and IPv6."""
    inodes: dict[str, tuple[str, int]] = {}
    for name, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A":
                address, _, port = local.partition(":")
                words = bytes.fromhex(address)
                raw = b"".join(
                    struct.pack(">I", *struct.unpack("=I", words[i : i + 4])) for i in range(0, len(words), 4)
                )
                inodes[f"socket:[{inode}]"] = socket.inet_ntop(kind, raw), int(port, 16)
    found = set()
    for pid in _family(process):
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found |= {inodes[link]} if (link := os.readlink(file)) in inodes else set()
            except OSError:
                continue
    return found


@contextmanager
def watched() -> Iterator[list[set[tuple[str, int]]]]:
    """What this process and those it starts listen on, moment by moment, beside what it had before."""
    before, seen, over = listening(os.getpid()), [], threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            seen.append(listening(os.getpid()) - before)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


AMONG_OTHERS = {
    "split",
    "split, weights by disk",
    "split, weights by torch.distributed",
    "two ranks",
    "an engine of two processes",
}  # alone what others add up; processes of an engine meet as ranks do


@pytest.mark.parametrize("mode", covering(MODES, MODES.keys() - AMONG_OTHERS))
def test_a_run_on_one_machine_listens_to_nobody_else(tmp_path, mode):
    changes, number = MODES[mode]
    page = [{"kind": "prometheus", "port": _free_port()}]
    changes = {key: page if value == "free" else value for key, value in changes.items()}
    with watched() as seen:
        run(tmp_path, **changes)
    assert {address for now in seen for address, _ in now} <= {"127.0.0.1", "::1"}, seen
    assert max(map(len, seen)) == number, seen


@pytest.mark.parametrize("command", ["serve", "dashboard"])
def test_a_server_listens_at_one_port_of_this_machine(tmp_path, command):
    folder = tmp_path / "it"
    if command == "serve":
        save_model(tiny_model("llama"), folder)
    else:
        run(folder, loop__steps=1)
    program = Forked([command, folder, "--port", "0"], stdout=subprocess.PIPE)
    try:
        assert program.stdout is not None
        said = next(line for line in program.stdout if "http://127.0.0.1:" in line)
        (there,) = listening(program.pid)
        assert there[0] == "127.0.0.1" and f"http://127.0.0.1:{there[1]}" in said
    finally:
        program.kill()
        program.wait(30)
