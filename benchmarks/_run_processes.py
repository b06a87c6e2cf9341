"""The processes of a tiny run that benchmarks start and strike: its command, who belongs to it, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.toml"
MARK = "RONDEL_CHAOS"  # in the environment of everything that a run starts
TINY = {
    "loop.warmup.steps": 0, "loop.groups_per_step": 4, "algo.group_size": 4, "engine.max_running": 32,
    "model.path.hidden_size": 32, "model.path.intermediate_size": 64, "model.path.num_hidden_layers": 2, "place.threads": 1,
    "trainer.schedule": "constant", "run.checkpoint.every": 3, "run.sinks": [], "task.eval.every": 0,
}  # fmt: skip
MIXTURE = {
    "random": "mixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64,
}  # fmt: skip


def start_run(changes: dict[str, Any], folder: Path, mark: str) -> tuple[subprocess.Popen, Path]:
    """`rondel train` of the tiny recipe in a session of its own. -> the process, and the file of what it says."""
    words = [f"--{key}={toml(value)}" for key, value in {**TINY, **changes, "run.folder": str(folder)}.items()]
    command = [sys.executable, "-c", "from rondel.cli import main; main()", "train", str(RECIPE), "--quiet", *words]
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / f"stderr-{len(list(folder.glob('stderr-*')))}"
    with said.open("w") as file:
        environment = {**os.environ, MARK: mark}
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=file, env=environment, start_new_session=True
        ), said


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def marked(mark: str) -> dict[int, str]:
    """The living processes of a run: process id -> engine-0, trainer-1, reward, or the program's name."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            root = Path(f"/proc/{pid}")
            if (
                mark.encode() not in (root / "environ").read_bytes()
                or (root / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            ):
                continue
            found[pid] = called(root)
        except OSError:
            continue
    return found


def called(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    if any("rondel.runtime.cluster." in word for word in words):  # in the nursery, which has no log, or forked there
        return Path(os.readlink(process / "fd/1")).stem
    if words[0].startswith("ray::"):  # an actor's log says who it is, at last when it was built
        log = Path(os.readlink(process / "fd/1")).read_text(errors="replace")
        return log.rpartition(":actor_name:")[2].partition("\n")[0] or words[0]
    if any("rondel.score.worker" in word for word in words):
        return "reward"
    return "controller" if "train" in words else words[0]


def family(mark: str) -> dict[int, str]:
    """The same, and their children without the mark: Ray's agents write over their environment."""
    found, grown = marked(mark), True
    while grown:
        grown = False
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if pid not in found and stat(pid)[1:2] and int(stat(pid)[1]) in found:
                found[pid], grown = f"child of {stat(pid)[1]}", True
    return found


def stat(pid: int) -> list[str]:
    """State, parent, and so on of a process that lives; of one that does not, nothing."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if words[0] == "Z" else words


def wait_for_none(mark: str, known: dict[int, str], within: float) -> dict[int, str]:
    """Law 14: no process is left, and so no port that it listens on. -> those that were, which are killed."""
    deadline = time.monotonic() + within
    while (
        left := {**{pid: name for pid, name in known.items() if stat(pid)}, **marked(mark)}
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left
