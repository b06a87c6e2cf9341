"""Repository episodes of a controller that is killed: one life each, in a process of its own.

The policy is a random model whose tokens are logged. What it writes becomes calls: of its first reply a file and a run of
the tests, of its second an edit, and so on; so every token that it draws decides what its folder becomes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

from kits.engine import SIZE, tiny
from kits.repositories import environment, sums_task, the_task
from kits.token_log import serving
from rondel.core.types import Sampling, sample_key
from rondel.generate.calls import ToolCall
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.episode import EpisodeState
from rondel.runtime.journal.command_log import EpisodeCommandLog

KEY = sample_key(0, 5, 2)
TURNS = 4
PLAIN = 'test = "python3 check.py"\nreport = "exit"\nseconds = 20\n'
CHECK = "from sums import add\nprint(sorted(open('notes').read()))\nassert add(5, 3) == 8\n"


class CallingChat(TokenChat):
    """A conversation whose replies are read as calls of tools, whatever they say."""

    def give(self, messages, tools=()):
        super().give(messages)  # the schemas of the tools would fill the context of a small model

    async def reply(self):
        self.place()
        done = await super().reply()
        self.place()
        done.finish_reason = "stop"  # of a model that never ends by itself
        return done

    async def calls(self, done):
        turn = self.turn
        if turn >= TURNS:
            return []
        text = done.text or ""
        run = {"command": f"printf %s {ascii(text)!r} >> log; wc -c log notes; python3 check.py"}
        return [ToolCall("write_file", {"path": "notes", "text": text * turn}), ToolCall("run", run)]


class Recorder(EpisodeCommandLog):
    """Keeps the digests of this life, too."""

    def __init__(self, folder, place):
        super().__init__(folder)
        self.folders, self.place = [], place

    def record(self, episode, n, command, *, exit, folder):
        self.place()
        super().record(episode, n, command, exit=exit, folder=folder)
        self.place()
        self.folders.append(folder)


def life(folder: Path, delay: float | None, seed: int, at: int | None = None) -> None:
    """Whole, or killed so many seconds after the episode began, or at the place with that number: before or behind a
    reply or the record of a command. Its end is in found.json.
    """
    places = itertools.count(1)

    def place() -> None:
        if next(places) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    loaded = tiny("llama", **{**SIZE, "max_position_embeddings": 4096})
    engine, log = serving(folder / "wal" / "engine-0", loaded), Recorder(folder / "wal" / "commands", place)
    tok = engine.loaded.tokenizer
    talk = CallingChat(
        tok, engine.generate, sampling=Sampling(max_tokens=8), key=lambda turn: KEY + 1000 * seed + turn, max_context=2000,
        episode=EpisodeState(commands=log),
    )  # fmt: skip
    talk.place = place
    began = time.monotonic()
    if delay is not None:
        threading.Thread(target=_kill_after, args=(delay,), daemon=True).start()
    t = asyncio.run(environment(output=400, turns=TURNS + 1).run(the_task(folder / "task"), talk))
    found = {"tokens": list(t.tokens), "folders": log.folders, "replayed": log.replayed, "score": t.score.value}
    found["places"] = next(places) - 1
    (folder / "found.json").write_text(json.dumps(found | {"seconds": time.monotonic() - began}))


def _kill_after(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def make_folder(folder: Path) -> Path:
    changes = {"task.toml": PLAIN, "repository/check.py": CHECK, "statement.md": "go"}
    sums_task(folder / "task", **changes)
    return folder


def moments(count: int, seconds: float, seed: int = 0) -> list[float]:
    """Random moments within an episode that takes so many seconds."""
    rng = random.Random(seed)
    return [rng.uniform(0, seconds) for _ in range(count)]


def found_in(folder: Path) -> dict:
    return json.loads((folder / "found.json").read_text())
