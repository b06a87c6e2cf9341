"""Episodes in a repository: tools in a box, grading in a fresh one, and what the policy cannot do to its grade."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from kits.repositories import (
    HARBOR,
    HIDDEN,
    MENDED,
    SUMS,
    TERMINAL_BENCH,
    environment,
    needs_walls,
    read_by_policy,
    scripted_chat,
    sums_task,
    swebench_rows,
    the_task,
    write_files,
    written_call,
)
from kits.sweeps import covering
from rondel.core.errors import DataError, EnvError
from rondel.core.repository_files import RepositoryFile
from rondel.core.sandbox_types import CommandResult
from rondel.core.types import Task
from rondel.generate.envs.episode import EpisodeState
from rondel.generate.envs.episode_budget import EpisodeBudget
from rondel.generate.envs.repository.grader import grade, known_sums, reward_in, split_changes
from rondel.generate.envs.repository.reader import load_task
from rondel.generate.envs.repository.self_check import check_in_boxes
from rondel.generate.envs.repository.workspace import command_text, open_workspace, stable_text
from rondel.runtime.journal.command_log import EpisodeCommandLog
from rondel.runtime.sandbox.box import Sandbox

PLAIN = 'test = "python3 check.py"\nreport = "exit"\nprotected = ["check.py"]\nseconds = 20\n'  # without pytest: quick
CHECK = "from sums import add\nassert add(5, 3) == 8\n"


def plain_task(folder, **changes):
    return sums_task(folder / "one", **{"task.toml": PLAIN, "repository/check.py": CHECK, **changes})


def read(path, **settings):
    return load_task(the_task(path, **settings).data["repository"])


def play(task, *turns, env=None, **settings):
    talk, policy = scripted_chat(*turns, **settings)
    trajectory = asyncio.run((env or environment()).run(task, talk))
    return trajectory, read_by_policy(policy)


@pytest.mark.slow
@needs_walls
def test_a_policy_reads_edits_tests_and_is_graded_by_hidden_tests(tmp_path):
    sums_task(tmp_path / "one")
    t, read_text = play(
        the_task(tmp_path),
        written_call("list_files") + written_call("read_file", path="sums.py", last=2),
        written_call("edit_file", path="sums.py", old="return", new="x") + written_call("search", text="test_more"),
        written_call("edit_file", path="sums.py", old="x - y", new="x + y") + written_call("run_tests"),
        "done",
    )
    assert (t.score.value, t.score.parts) == (1.0, {"fail_to_pass": 1.0, "pass_to_pass": 1.0, "tests_edited": 0.0})
    for said in (
        "sums.py\ntests/test_sums.py\n</tool_response>",
        "    2      return x - y\n[sums.py has 6 lines]",
        "error: old stands 2 times in sums.py (lines 2, 6): take more lines with it",
        "no file has 'test_more'",
        "changed line 2 of sums.py",
        "2 passed in 0 s\n[exit code 0]",
    ):
        assert said in read_text, said


@pytest.mark.slow
@needs_walls
def test_mistakes_are_read_without_our_tracebacks_and_long_output_is_cut(tmp_path):
    plain_task(tmp_path)
    t, text = play(
        the_task(tmp_path),
        written_call("read_file", path="sum.py") + written_call("edit_file", path="sums.py", old="x-y", new="z"),
        written_call("read_file", path="tests") + written_call("write_file", path="/usr/x", text=""),
        written_call("run", command="seq 5000; echo end; exit 3") + written_call("run", command="sleep 30"),
        written_call("run", command="head -c 300000000 /dev/zero > big; rm -f big; ls"),
        "done",
        env=environment(seconds=1.5),
    )
    for said in (
        "error: there is no file sum.py. There is: sums.py",
        "error: old is not in sums.py; it must be copied exactly, with its spaces.",
        "error: tests is a folder: list_files lists it",
        "Read-only file system",
        "characters left out ...]",
        "end\n[exit code 3]",
        "over its wall limit]",
        "check.py\nsums.py\ntests",
    ):
        assert said in text, said
    assert "Traceback" not in text and "rondel" not in text.replace("/tmp/.rondel", "") and t.score.value == 0.0


@pytest.mark.slow
@needs_walls
def test_tests_and_what_stands_in_for_them_are_restored_and_counted(tmp_path):
    """A policy that makes tests pass, and not the code."""
    own = read(sums_task(tmp_path / "one"))
    cheats = {
        "tests/test_sums.py": RepositoryFile(b"def test_add(): pass\ndef test_twice(): pass\n"),
        "tests/test_more.py": RepositoryFile(b"def test_more(): pass\n"),
        "conftest.py": RepositoryFile(
            b"import pytest\n@pytest.hookimpl\ndef pytest_runtest_call(item): item.obj = lambda: 0\n"
        ),
        "pytest.py": RepositoryFile(b"raise SystemExit(0)\n"),
        "src/json/__init__.py": RepositoryFile(b""),
        "sitecustomize.py": RepositoryFile(b"import os; os._exit(0)\n"),
        "setup.cfg": RepositoryFile(b"[tool:pytest]\naddopts = --collect-only\n"),
    }
    files, undone = split_changes(own, {**cheats, "notes.txt": RepositoryFile(b"x"), "sums.py": None})
    assert sorted(undone) == sorted(cheats) and sorted(files) == ["notes.txt", "tests/test_sums.py"]
    assert files["tests/test_sums.py"] == own.files["tests/test_sums.py"]
    score = grade(own, cheats, Sandbox())
    assert (score.value, score.parts) == (0.0, {"fail_to_pass": 0.0, "pass_to_pass": 1.0, "tests_edited": 7.0})
    plugin = {
        "quiet.py": RepositoryFile(b"def pytest_runtest_call(item): item.obj = lambda: 0\n"),
        "quiet-1.dist-info/METADATA": RepositoryFile(b"Name: quiet\nVersion: 1\n"),
        "quiet-1.dist-info/entry_points.txt": RepositoryFile(b"[pytest11]\nquiet = quiet\n"),
    }
    everything = {"protected": [], "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}}
    for kept, value in ((["protected", "env"], 1.0), (["protected"], 0.0), (["env"], 0.0)):
        settings = own.settings.model_copy(update={key: everything[key] for key in kept})
        assert grade(replace(own, settings=settings), plugin, Sandbox()).value == value, "a plugin of the policy's own"
    gone = grade(own, {"sums.py": RepositoryFile(b"import os\nos._exit(0)\n")}, Sandbox())
    assert gone.value == 0.0 and gone.parts["pass_to_pass"] == 0.0, "a run of the tests without an end is no pass"


@needs_walls
@pytest.mark.slow
@pytest.mark.parametrize(
    "formats", covering([["harbor", "rows"], ["bench"]], [["harbor", "rows"]])
)  # bench: the same task
def test_tasks_of_other_formats_are_played_unmodified(tmp_path, formats):
    write_files(tmp_path / "harbor" / "words", HARBOR)
    write_files(tmp_path / "bench" / "words", TERMINAL_BENCH)
    rows, source = swebench_rows(tmp_path)
    written = {
        "harbor": read(tmp_path / "harbor"),
        "bench": read(tmp_path / "bench"),
        "rows": read(rows, source=source),
    }
    for own in map(written.get, formats):
        found = check_in_boxes(own, Sandbox())
        assert (found.fault, found.untouched, found.solved) == ("", 0.0, 1.0), own.name
    t, text = play(
        the_task(tmp_path / "harbor"),
        written_call("run", command="pwd; ls; ls /tests /solution; echo done > /app/out.txt")
        + written_call("run_tests"),
        "done",
    )
    assert t.score.value == 1.0 and "/app\ndata.txt\n/solution:\n\n/tests:\n[exit code 0]" in text
    assert "no tests to run" in text


@needs_walls
def test_what_an_image_would_have_is_refused_in_a_box_without_it(tmp_path):
    write_files(tmp_path / "words", HARBOR | {"environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN make all\n"})
    with pytest.raises(DataError, match=r"'RUN make all', which a box of this machine has not: build the image"):
        open_workspace(read(tmp_path), Sandbox())


@needs_walls
def test_an_episode_that_does_nothing_is_graded_once(tmp_path):
    plain_task(tmp_path)
    env, task = environment(), the_task(tmp_path)
    scores = [play(task, said, env=env)[0].score for said in ("no", "never")]
    assert [s.value for s in scores] == [0.0, 0.0] and scores[0].parts == {"tests_edited": 0.0}
    with pytest.raises(EnvError, match=r'plays task\.data\.kind = "repository"'):
        play(Task("t/1", "repository", {"prompt": "x", "answer": ""}), "no", env=env)


@pytest.mark.slow
@needs_walls
def test_each_call_is_logged_with_the_folder_behind_it(tmp_path):
    plain_task(tmp_path)
    log = EpisodeCommandLog(tmp_path / "log")
    play(
        the_task(tmp_path),
        written_call("read_file", path="sums.py") + written_call("write_file", path="sums.py", text=MENDED),
        written_call("run", command="python3 -m compileall -q . ; touch sums.py") + written_call("read_file", path="x"),
        "done",
        episode=EpisodeState(commands=log),
    )
    rows = [json.loads(line) for line in (tmp_path / "log" / "000000.jsonl").read_text().splitlines()]
    folders = [row["folder"] for row in rows]
    assert [row["exit"] for row in rows] == [0, 0, 0, 1] and "" not in folders
    assert folders[0] != folders[1] and len(set(folders[1:])) == 1, "times and caches are no part of a folder"


AGENT = '''
"""A command-line agent: asks what a file should be, and writes it. It knows nothing of Rondel."""
import json, os, pathlib, urllib.request

def ask(content):
    body = {"model": "any", "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

task = json.loads(os.environ["RONDEL_TASK"])
name = ask(task["prompt"] + " Which file? There are: " + " ".join(sorted(os.listdir("."))))
pathlib.Path(name).write_text(ask("What should be in it? It has:\\n" + pathlib.Path(name).read_text()))
'''


@pytest.mark.slow
@needs_walls
def test_a_command_line_agent_works_in_the_box_and_asks_the_policy_over_http(tmp_path):
    pytest.importorskip("starlette")
    plain_task(tmp_path / "tasks")
    write_files(tmp_path / "agent", {"agent.py": AGENT})
    env = environment(agent=["python3", "{files}/agent.py"], agent_files=tmp_path / "agent")
    log = EpisodeCommandLog(tmp_path / "log")
    task = the_task(tmp_path / "tasks")
    found, text = play(task, "sums.py", MENDED, env=env, episode=EpisodeState(commands=log))
    assert found[0].score.value == 1.0 and [t.written > 0 for t in found] == [True, True]
    assert SUMS.strip() in text and (tmp_path / "log" / "000000.jsonl").read_text().count("\n") == 1
    with pytest.raises(EnvError, match=r"(?s)ended with exit code 1: .*FileNotFoundError.*nothing"):
        play(task, "nothing.py", MENDED, env=env)


@pytest.mark.slow
@needs_walls
def test_the_files_of_an_agent_that_fails_without_its_budget_are_graded(tmp_path):
    """It is refused an answer, and ends with exit code 1: the task's reward was asked for a score in place of the
    tests, and read a number in what the policy had said.
    """
    pytest.importorskip("starlette")
    plain_task(tmp_path / "tasks")
    write_files(tmp_path / "agent", {"agent.py": f'{AGENT}\nask("Is it right?")\n'})
    env, task = (
        environment(agent=["python3", "{files}/agent.py"], agent_files=tmp_path / "agent"),
        the_task(tmp_path / "tasks"),
    )
    for text, worth in ((MENDED, 1.0), (SUMS, 0.0)):
        found, _ = play(task, "sums.py", text, env=env, episode=EpisodeState(budget=EpisodeBudget(turns=2)))
        assert found[0].score.value == worth and found[0].score.parts


class CountedBoxes(Sandbox):
    """What each box was told to do, in order."""

    def __init__(self):
        super().__init__()
        self.told = []

    def cell(self, *limits, **settings):
        box, told = super().cell(*limits, **settings), []
        self.told.append(told)
        for verb in ("run", "call", "begin"):
            setattr(box, verb, partial(self._note, told, verb, getattr(box, verb)))
        return box

    def _note(self, told, verb, do, *what, **how):
        told.append(verb)
        return do(*what, **how)


@pytest.mark.slow
@needs_walls
def test_an_episode_of_an_agent_asks_its_boxes_no_more_than_it_must(tmp_path):
    """Its files in one go and what became of them in one; hidden files come with the others into the fresh box."""
    pytest.importorskip("starlette")
    plain_task(tmp_path / "tasks")
    write_files(tmp_path / "agent", {"agent.py": AGENT})
    env = environment(agent=["python3", "{files}/agent.py"], agent_files=tmp_path / "agent")
    env.sandbox = CountedBoxes()
    found, _ = play(the_task(tmp_path / "tasks"), "sums.py", MENDED, env=env)
    assert found[0].score.value == 1.0
    assert env.sandbox.told == [["call", "begin", "call"], ["call", "run"]]


@pytest.mark.slow
@needs_walls
def test_an_agent_that_waits_for_the_policy_holds_nobody_up(tmp_path):
    """Not even where the event loop has one thread: another episode ends and is graded meanwhile."""
    pytest.importorskip("starlette")
    plain_task(tmp_path / "tasks")
    write_files(tmp_path / "agent", {"agent.py": AGENT})
    env = environment(agent=["python3", "{files}/agent.py"], agent_files=tmp_path / "agent")
    task, ended = the_task(tmp_path / "tasks"), asyncio.Event()

    async def run_slow():
        talk, _ = scripted_chat("sums.py", MENDED)
        ask = talk.generate

        async def ask_late(request):
            await asyncio.wait_for(ended.wait(), 60)
            return await ask(request)

        talk.generate = ask_late
        return await env.run(task, talk)

    async def run_fast():
        found = await env.run(task, scripted_chat("sums.py", MENDED)[0])
        ended.set()
        return found

    async def run_both():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return await asyncio.gather(run_slow(), run_fast())

    assert [found[0].score.value for found in asyncio.run(run_both())] == [1.0, 1.0]


@pytest.mark.slow
@needs_walls
def test_what_looks_after_the_files_imports_nothing_of_the_box(tmp_path):
    plain_task(tmp_path)
    box = open_workspace(read(tmp_path), Sandbox())
    try:
        known = known_sums(box.task.files)
        before = box.state(known)
        lies = "".join(
            f"echo 'raise SystemExit(7)' > {place}/{name}.py; "
            for place in ("/box", "/tmp", "/tmp/.rondel", "$HOME", ".")
            for name in ("base64", "json", "difflib", "hashlib", "stat", "sitecustomize")
        )
        assert box.run(lies).ok and not box.run("python3 -c 'import base64'").ok
        changed, digest = box.state(known)
        assert len(changed) == 6 and digest == box.folder_digest() != before[1]
        box.put((box.root, {"more.py": RepositoryFile(b"x")}))
        assert box.read_file(f"{box.root}/more.py") == "x"
        assert box.run("rm base64.py json.py difflib.py hashlib.py stat.py sitecustomize.py more.py").ok
        assert box.state(known) == before
    finally:
        box.close()


def test_what_differs_from_run_to_run_is_not_read():
    told = "1 failed, 2 passed in 0.53s\nRan 3 tests in 0.001s\n<f at 0x7f12ab34cd50> in 3 lines\n=== 1 passed in 75.10s (0:01:15) ==="
    assert stable_text(told) == (
        "1 failed, 2 passed in 0 s\nRan 3 tests in 0 s\n<f at 0x...> in 3 lines\n=== 1 passed in 0 s ==="
    )
    ran = CommandResult(0, 9, b"a" * 500 + b"z", b"err", "memory")
    shown = command_text(ran, 90)
    assert re.fullmatch(
        r"a{30}\n\[\.\.\. 415 characters left out \.\.\.\]\na*z\nerr\n\[SIGKILL, over its memory limit\]", shown
    )


def test_a_reward_is_a_number_or_numbers_by_name():
    assert reward_in("1\n", "r") == (1.0, {}) and reward_in("0.25", "r") == (0.25, {})
    assert reward_in('{"reward": 0.5, "speed": 2}', "r") == (0.5, {"speed": 2.0})
    assert reward_in('{"a": 1, "b": 0}', "r") == (0.5, {"a": 1.0, "b": 0.0})
    for text in ("", "yes", '{"reward": "1"}', "NaN", "{}", "[1]"):
        with pytest.raises(EnvError, match="wrote no reward to r"):
            reward_in(text, "r")


def test_hidden_tests_are_in_no_message(tmp_path):
    task = the_task(sums_task(tmp_path / "one"))
    messages, tools = environment().prompt(task)
    told = json.dumps([messages, tools])
    assert HIDDEN not in json.dumps(task.data) and "test_more" not in told
    assert [tool["function"]["name"] for tool in tools] == [
        "edit_file", "list_files", "read_file", "run", "run_tests", "search", "write_file",
    ]  # fmt: skip
