"""The environments of examples/, played by scripts: what deserves their score gets it, and nothing else does."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kits.chat import chat
from kits.gateway import Policy, call, recorded, tok
from rondel.core.types import Task
from rondel.generate.envs.python import python_tool
from rondel.generate.envs.sources import load_tasks
from rondel.generate.envs.tools import Tools
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.probe import find_isolation
from rondel.score import build_reward

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
boxed = pytest.mark.skipif(not find_isolation("auto").wall, reason="nothing contains code here")


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("search", "shop", "repair"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def play(env, task, *says):
    """-> the trajectory, and what the policy was asked with."""
    policy = Policy(*says)
    found = asyncio.run(env.run(task, chat(tok(), policy, max_tokens=600, max_context=8192)))
    recorded(found, policy)
    return found, [tok().decode(r.tokens) for r in policy.requests]


def written(name: str, text: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'write_file', 'arguments': {'name': name, 'text': text}})}</tool_call>"


READ = '<tool_call>{"name": "read_file", "arguments": {"name": "main.py"}}</tool_call>'


def tasks(kind: str) -> list[Task]:
    return load_tasks({"kind": kind}, env=kind).train


def test_search_finds_what_is_asked():
    pytest.importorskip("bm25s")
    import search

    year = next(t for t in tasks("search:questions") if t.data["answer"] == "1874")
    found, asked = play(
        search.Search(), year, call("search", query="the year the lighthouse of Orm was lit", k=2), "It was 1874."
    )
    assert "Orm since 1874" in asked[1] and search.grade(found, year) == 1.0
    found, _ = play(search.Search(), year, "1902")
    assert search.grade(found, year) == 0.0
    missed = [
        t.data["prompt"] for t in tasks("search:questions") if t.data["answer"] not in search.search(t.data["prompt"])
    ]
    assert missed == [], "three sentences are enough for every question as it stands"


def test_a_customer_is_served_by_what_is_done_not_said():
    import shop

    cancel, change = (next(t for t in tasks("shop:wishes") if t.data["order"] == n) for n in (6, 7))
    found, asked = play(shop.Shop(), cancel, "What can I do?", call("cancel", order=6), "Done.", "Bye.")
    assert (
        found.score.value == 1.0
        and "Please cancel order 6." in asked[1]
        and "cancelled" in asked[2]
        and "that is all" in asked[3]
    )
    assert play(shop.Shop(), cancel, "What?", "I have cancelled it.", "Bye.")[0].score.value == 0.0
    assert (
        play(shop.Shop(), cancel, "What?", call("cancel", order=6) + call("cancel", order=7), "Done.", "Bye.")[
            0
        ].score.value
        == 0.0
    )
    item = change.data["item"]
    assert play(shop.Shop(), change, "What?", call("change", order=7, item=item), "Done.", "Bye.")[0].score.value == 1.0
    assert play(shop.Shop(), change, *[call("cancel", order="?")] * 6)[0].score.value == 0.0


def test_the_customer_may_be_a_model(monkeypatch):
    import shop

    heard = []

    class Model(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = {"role": "assistant", "content": f"wish number {len(heard)}"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = json.dumps(
                {"id": "x", "object": "chat.completion", "created": 0, "model": "user", "choices": [choice]}
            ).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("USER_URL", f"http://127.0.0.1:{server.server_port}/v1")
        task = next(t for t in tasks("shop:wishes") if t.data["order"] == 6)
        _, asked = play(shop.Shop(), task, "What can I do?", "Anything else?", "Bye.")
        server.shutdown()
    assert "wish number 1" in asked[1] and "wish number 2" in asked[2]
    assert (
        "cancel order 6" in heard[0]["messages"][0]["content"]
        and heard[1]["messages"][1]["content"] == "Anything else?"
    )


@boxed
def test_a_repository_is_mended_by_a_passing_test():
    import repair

    task = next(t for t in tasks("repair:bugs") if t.data["right"] == "x + y")
    write = written("main.py", "def f(x, y):\n    return x + y\n")
    found, asked = play(repair.Repair(), task, call("run_tests") + READ, write + call("run_tests"), "Done.")
    assert (
        found.score.value == 1.0
        and "AssertionError" in asked[1]
        and "return x - y" in asked[1]
        and "passed" in asked[2]
    )
    cheat = written("test.py", "")
    found, asked = play(repair.Repair(), task, cheat, "Done.")
    assert found.score.value == 0.0 and "only main.py may be written" in asked[1]
    for early in (
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import __main__, os; print(vars(__main__).get('word'), flush=True); os._exit(0)",
    ):
        found, _ = play(repair.Repair(), task, written("main.py", early), "Done.")
        assert found.score.value == 0.0, "a test that was not reached has not passed"


@boxed
def test_an_interpreter_helps_to_a_number():
    task = Task("sum/1", "tools", {"prompt": "17 * 23 + 4 =", "answer": "395"})
    found, asked = play(Tools([python_tool(Sandbox)]), task, call("python", code="17 * 23 + 4"), "It is 395")
    assert "\n395\n" in asked[1] and build_reward("number")(found, task) == 1.0
