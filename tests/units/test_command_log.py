"""Commands of sandboxed episodes: an episode that was killed is played again to the same folder and the same tokens, and
a command that ends otherwise is a fault with its number."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal

import pytest

from kits.chat import Engine, chat, tokenizer
from kits.repositories import needs_walls
from kits.runs import context
from kits.token_log import serving
from rondel.core.errors import EnvError
from rondel.core.types import Sampling, Task, sample_key
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.episode import EpisodeState
from rondel.generate.envs.python import python_tool
from rondel.generate.envs.tools import Tools
from rondel.runtime.journal.command_log import EpisodeCommandLog
from rondel.runtime.sandbox.box import Sandbox

TASK = Task("t/1", "notes", {"prompt": "go"})
KEY = sample_key(0, 5, 2)


def test_a_command_that_ends_otherwise_is_a_fault_and_another_command_is_another_way(tmp_path):
    first = EpisodeCommandLog(tmp_path)
    first.record(KEY, 0, ["python", {"code": "a"}], exit=0, folder="f0")
    first.record(KEY, 1, ["python", {"code": "b"}], exit=1, folder="f1")
    first.record(KEY + 1, 0, "ls", exit=0, folder="f0")
    first.record(KEY, 0, ["python", {"code": "a"}], exit=0, folder="f0")  # the same life asks nobody
    first.close()
    with (tmp_path / "000000.jsonl").open("a") as file:
        file.write('{"episode": "torn')

    again = EpisodeCommandLog(tmp_path)
    again.record(KEY, 0, ["python", {"code": "a"}], exit=0, folder="f0")
    for exit, folder in ((1, "f2"), (0, "f1")):
        with pytest.raises(EnvError, match=r"command 1 of the episode \(\[\"python\", .*b.* run again .* f1 then"):
            again.record(KEY, 1, ["python", {"code": "b"}], exit=exit, folder=folder)
    assert again.replayed == 3
    again.record(KEY + 1, 0, "rm", exit=0, folder="f9")
    again.record(KEY + 1, 1, "ls", exit=0, folder="f0")
    again.record(KEY + 2, 0, "ls", exit=0, folder="f0")
    assert again.replayed == 3
    again.close()
    for _ in range(5):
        EpisodeCommandLog(tmp_path, keep=3).close()  # a life without a command leaves no file
        life = EpisodeCommandLog(tmp_path, keep=3)
        life.record(9, 0, "ls", exit=0, folder="f")
        life.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000004.jsonl", "000005.jsonl", "000006.jsonl"]


class Notes:
    """A tool with a working folder."""

    def __init__(self, task):
        self.lines = []

    def note(self, line: str) -> str:
        """Write a line."""
        self.lines.append(line)
        return "ok"

    def folder_digest(self) -> str:
        return "/".join(self.lines)


def test_tools_with_a_working_folder_are_logged_call_by_call(tmp_path):
    tok, log = tokenizer(), EpisodeCommandLog(tmp_path)
    notes = [{"name": "note", "arguments": {"line": line}} for line in "abc"]
    said = "".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in notes)
    policy = Engine(*([*tok.encode(text, add_special_tokens=False), tok.eos_token_id] for text in (said, "done")))
    talk = chat(tok, policy, episode=EpisodeState(commands=log))
    asyncio.run(Tools([Notes]).run(TASK, talk))
    rows = [json.loads(line) for line in (tmp_path / "000000.jsonl").read_text().splitlines()]
    assert [(row["n"], row["exit"], row["folder"]) for row in rows] == [(0, 0, "a"), (1, 0, "a/b"), (2, 0, "a/b/c")]
    assert "folder_digest" not in tok.decode(policy.requests[0].tokens)


class Writes:
    """Three turns; each is written into the folder of a box, and its size is read."""

    def __init__(self, folder, moment):
        self.folder, self.moment = folder, moment

    def dies(self, moment):
        if moment == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    async def run(self, task, talk):
        box, seen = python_tool(Sandbox)(task), "go"
        try:
            for turn in range(3):
                talk.give([{"role": "user", "content": seen}])
                done = await talk.reply()
                self.dies((turn, "drawn"))
                code = f"open('notes', 'a').write({done.text!r})\nimport os; print(os.path.getsize('notes'))"
                seen = await asyncio.to_thread(box.python, code)
                self.dies((turn, "run"))
                self.folder.append(box.folder_digest())
                talk.log_command(code, exit=0, folder=self.folder[-1])
                self.dies((turn, "logged"))
        finally:
            box.close()
        return talk.trajectory


def live(folder, moment) -> None:
    """One life of a controller: whole, or until `moment`."""
    engine, log, digests = serving(folder / "wal" / "engine-0"), EpisodeCommandLog(folder / "wal" / "commands"), []
    tok = engine.loaded.tokenizer
    talk = TokenChat(
        tok, engine.generate, sampling=Sampling(max_tokens=6), key=lambda turn: KEY + turn, max_context=400,
        episode=EpisodeState(commands=log),
    )  # fmt: skip
    t = asyncio.run(Writes(digests, moment).run(TASK, talk))
    found = {"tokens": list(t.tokens), "logprobs": list(t.logprobs), "folders": digests, "replayed": log.replayed}
    (folder / "found.json").write_text(json.dumps(found))


def in_a_process(folder, moment):
    process = context.Process(target=live, args=(folder, moment))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@needs_walls
def test_an_episode_that_is_killed_goes_on_to_the_same_folder_and_the_same_tokens(tmp_path):
    """kill -9 before a command, behind one that is not logged, and behind one that is: as if it never was."""
    live(tmp_path, None)
    whole = json.loads((tmp_path / "found.json").read_text())
    assert len(set(whole["folders"])) == 3 and whole["replayed"] == 0
    shutil.rmtree(tmp_path / "wal")
    for moment in ((0, "drawn"), (1, "run"), (2, "logged")):
        in_a_process(tmp_path, moment)
    live(tmp_path, None)
    again = json.loads((tmp_path / "found.json").read_text())
    assert again["replayed"] == 3 and (again["tokens"], again["folders"]) == (whole["tokens"], whole["folders"])
    assert again["logprobs"] == pytest.approx(whole["logprobs"], abs=1e-5), "read in one pass, and not one by one"
