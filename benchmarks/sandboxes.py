"""Many sandboxes at once: start time, memory in total and for each box, and what a killed controller leaves.

    rondel bench sandboxes --boxes 500 --kinds namespaces bubblewrap crun --image images/python --json

`start_ms_p50`, `start_ms_p99`  from the request for a box to its being there, `--parallel` at a time
`answer_ms_p50`                 one snippet of Python in an open box
`memory_mb`, `memory_kb_each`   of all boxes open at once: proportional set sizes (PSS) of their processes, keepers and tools
`left`                          of the processes, control groups, mounts and folders that came with them, what is there after
                                kill -9 of the controller
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
TOOLS = ("crun", "runc", "podman", "docker")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench sandboxes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--boxes", type=int, default=500)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument(
        "--kinds", nargs="+", default=["namespaces", "bubblewrap"], help=f"beside the walls: {', '.join(TOOLS)}"
    )
    parser.add_argument("--image", default="", help="a folder of `rondel sandbox image`, for containers")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the controller that will be killed
    a = parser.parse_args(argv)
    if a.one:
        return hold(a.one, a.image, a.boxes, a.parallel)

    from _work import report

    found: dict[str, Any] = {"boxes": a.boxes, "parallel": a.parallel}
    for kind in a.kinds:
        before = traces()
        command = [
            sys.executable,
            __file__,
            "--one",
            kind,
            "--image",
            a.image,
            "--boxes",
            str(a.boxes),
            "--parallel",
            str(a.parallel),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as controller:
            assert controller.stdout
            line = controller.stdout.readline()
            row = json.loads(line) if line.startswith("{") else {"failed": line.strip()}
            family, came = descendants(controller.pid), traces()
            memory = sum(map(proportional_size, family))
            row["memory_mb"], row["memory_kb_each"] = round(memory / 1e6, 1), round(memory / 1e3 / max(1, a.boxes))
            row["processes"] = len(family)
            controller.send_signal(signal.SIGKILL)
        new = {name: came[name] - before[name] for name in before}
        own = {str(pid) for pid, _ in family} | {str(controller.pid)}
        new["groups"] = {path for path in new["groups"] if path.rpartition("/")[2].split("-")[1] in own}
        ended = time.monotonic()
        while time.monotonic() < ended + 120 and (any(map(runs, family)) or traces()["groups"] & new["groups"]):
            time.sleep(0.2)
        row["gone_seconds"] = round(time.monotonic() - ended, 1)
        after = traces()
        row["left"] = {"processes": sum(map(runs, family)), **{name: len(after[name] & new[name]) for name in new}}
        row["came"] = {name: len(new[name]) for name in new}
        found[kind] = row
        if not a.json:
            print(f"{kind:12} {row}", flush=True)
    report(found, only_json=True)


def hold(kind: str, image: str, boxes: int, parallel: int) -> None:
    """Opens them, says what that took, and waits to be killed."""
    from rondel.core.errors import SandboxError
    from rondel.core.sandbox_types import Limits
    from rondel.runtime.sandbox.recipe import describe, sandbox_of

    sandbox = sandbox_of({"kind": "container", "image": image, "tool": kind} if kind in TOOLS else kind)
    try:
        describe(sandbox)
    except SandboxError as error:
        print(f"{kind}: {error}", flush=True)
        return
    limits = Limits(wall=600, memory=64 << 20)
    taken: list[float] = []
    lock = threading.Lock()

    def start(_: int) -> Any:
        began = time.perf_counter()
        cell = sandbox.cell(limits)
        with lock:
            taken.append(1e3 * (time.perf_counter() - began))
        return cell

    began = time.perf_counter()
    with ThreadPoolExecutor(parallel) as threads:
        cells = list(threads.map(start, range(boxes)))
    seconds = time.perf_counter() - began
    answers = []
    for cell in cells[:: max(1, boxes // 20)]:
        began = time.perf_counter()
        assert cell.call("print(6 * 7)", wall=60).stdout == b"42\n"
        answers.append(1e3 * (time.perf_counter() - began))
    taken.sort()
    answers.sort()
    row = {
        "start_ms_p50": round(taken[len(taken) // 2], 1), "start_ms_p99": round(taken[int(0.99 * (len(taken) - 1))], 1),
        "all_seconds": round(seconds, 1), "answer_ms_p50": round(answers[len(answers) // 2], 1), "open": sum(c.alive for c in cells),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    time.sleep(600)


def traces() -> dict[str, set[str]]:
    """What boxes leave their names on: control groups, mounts of this machine, folders for files of a moment."""
    from rondel.runtime.sandbox.usage import own_folders

    groups = {f"{home}/{name}" for home in own_folders() for name in os.listdir(home) if name.startswith("rondel-")}
    mounts = set(Path("/proc/self/mountinfo").read_text().splitlines())
    folders = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("rondel-bundle")}
    return {"groups": groups, "mounts": mounts, "folders": folders}


def descendants(of: int) -> list[tuple[int, str]]:
    """(process, when it began) of all that came of it."""
    rows = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (words := stat_words(int(name))):
            rows[int(name)] = (int(words[1]), words[19])
    found, more = [], {of}
    while more := {pid for pid, (parent, _) in rows.items() if parent in more}:
        found += [(pid, rows[pid][1]) for pid in more]
    return found


def stat_words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def runs(process: tuple[int, str]) -> bool:
    words = stat_words(process[0])
    return bool(words) and words[19] == process[1] and words[0] != "Z"


def proportional_size(process: tuple[int, str]) -> int:
    """Its memory in bytes, of pages that several share its part."""
    try:
        rows = Path(f"/proc/{process[0]}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(row.split()[1]) for row in rows if row.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
