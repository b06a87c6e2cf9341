"""Tools of a real MCP server: a process of its own for each episode, one for all, and one over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kits.chat import Engine, chat
from kits.gateway import call, tok
from rondel.core.errors import ConfigError, EnvError
from rondel.core.types import Completion, Sampling, Task

pytest.importorskip("mcp")
from kits.counter_server import png
from rondel.generate.envs.mcp import Mcp, McpEpisode
from rondel.generate.envs.tools import Tools

pytestmark = pytest.mark.slow

SERVER = Path(__file__).parents[1] / "kits" / "counter_server.py"
STDIO = f"{sys.executable} {SERVER}"
TASK = Task("t", "tools", {"prompt": "what is three plus four?"})


def episode(env: Tools, *says: str):
    """-> what the policy read in its last turn, as text."""
    t = tok()
    engine = Engine(*([*t.encode(s, add_special_tokens=False), t.eos_token_id] for s in says))

    async def play():
        await env.run(TASK, chat(t, engine))
        return t.decode(engine.requests[-1].tokens)

    return play()


def numbers(text: str) -> list[str]:
    return [line.split(" of ")[0] for line in text.splitlines() if " of " in line and line[0].isdigit()]


def process(text: str) -> int:
    return int(next(line for line in text.splitlines() if " of " in line and line[0].isdigit()).split(" of ")[1])


async def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def own():
    return Mcp(f"mcp:{STDIO}")


@pytest.fixture(scope="module")
def http():
    with subprocess.Popen([sys.executable, str(SERVER), "http"], stdout=subprocess.PIPE, text=True) as server:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
        server.kill()


def test_schemas_are_the_servers_and_state_is_the_episodes(own):
    env = Tools([own])
    _, schemas = env.prompt(TASK)
    by_name = {s["function"]["name"]: s["function"] for s in schemas}
    assert by_name.keys() == {"count", "refuse", "leave", "sleep", "look"}
    assert by_name["count"]["description"].startswith("Adds to a number")
    assert by_name["count"]["parameters"]["properties"]["by"]["type"] == "integer"

    async def both():
        told = await asyncio.gather(*(episode(env, call("count", by=n), call("count", by=n), "done.") for n in (3, 5)))
        return told, [await gone(process(text)) for text in told]

    told, ended = asyncio.run(both())
    assert [numbers(text) for text in told] == [["3", "6"], ["5", "10"]], "two episodes at once, two counters"
    assert ended == [True, True], "the servers end with their episodes"


def test_one_server_for_all():
    env = Tools([Mcp(f"mcp+shared:{STDIO}")])

    async def both():
        return [await episode(env, call("count", by=n), "done.") for n in (3, 5)]

    told = asyncio.run(both())
    assert [numbers(text) for text in told] == [["3"], ["8"]] and process(told[0]) == process(told[1])
    assert asyncio.run(gone(process(told[0]))), "it ends with the loop of the run"


def test_what_a_tool_refuses_is_read_and_what_the_server_does_is_a_fault(own):
    env = Tools([own], timeout=60.0)  # a server starts slowly on a busy machine
    told = asyncio.run(episode(env, call("refuse"), call("count", by="many"), "done."))
    assert told.count("error: ") == 2 and "refuse" in told.split("error: ")[1], (
        "its words where the server lets them out"
    )
    assert "Traceback" not in told and str(SERVER.parent) not in told
    with pytest.raises(EnvError, match="MCP server"):
        asyncio.run(episode(env, call("leave"), "done."))
    with pytest.raises(EnvError, match="did not answer within"):
        asyncio.run(episode(Tools([own], timeout=1.5), call("sleep", seconds=60), "done."))


TRACE = f"""no such row
Traceback (most recent call last):
  File "{SERVER}", line 7, in look
    return rows[3]
IndexError: 3 of {SERVER.parent / "rows.csv"}"""


@pytest.mark.parametrize("how", ["text", "image", "structured", "refused"])
def test_an_error_of_a_server_has_no_traceback_and_no_folder_of_its_machine(how):
    """Whatever form it comes in; what the policy named itself stays."""
    asked = {"path": "/data/mine/rows.csv"}
    said = {"type": "text", "text": f"{TRACE}\n/data/mine/rows.csv is empty"}
    picture = {"type": "image", "data": png(4, 4, (255, 0, 0), False), "mimeType": "image/png"}
    answers = {"text": [said], "image": [said, picture], "structured": []}

    async def call_method(verb, name, arguments):
        if how == "refused":
            raise type("McpError", (Exception,), {"code": -32602, "message": said["text"]})
        structured = {"structuredContent": {"result": said["text"]}} if how == "structured" else {}
        return {"isError": True, "content": answers[how], **structured}

    episode = McpEpisode(SimpleNamespace(listed=[], is_shared=False, where="a server"))
    episode._open_session = lambda: SimpleNamespace(call_method=call_method)
    told = asyncio.run(episode.call_tool("look", asked))
    assert isinstance(told, list) == (how == "image")
    text = "\n".join(part for part in told if isinstance(part, str)) if isinstance(told, list) else told
    assert text.startswith("error:") and "no such row" in text and "IndexError: 3 of rows.csv" in text
    assert "/data/mine/rows.csv is empty" in text
    assert "Traceback" not in text and "line 7" not in text and str(SERVER.parent) not in text


def test_over_http(http):
    env = Tools([Mcp(f"mcp:{http}")])
    told = asyncio.run(episode(env, call("count", by=4), call("count", by=1), "done."))
    assert numbers(told) == ["4", "5"]
    with pytest.raises(ConfigError, match="did not list its tools"):
        Mcp("mcp:http://127.0.0.1:9/mcp")


def test_a_server_ends_when_the_run_is_killed(tmp_path):
    """Also one that does not hear the end of its input."""
    deaf = tmp_path / "deaf.py"
    deaf.write_text(
        f"import os, sys; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nimport time; time.sleep(300)"
    )
    code = f"from rondel.generate.envs.mcp import Mcp; Mcp('mcp:{sys.executable} {deaf}')"
    with subprocess.Popen([sys.executable, "-c", code]) as run:
        for _ in range(400):
            if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text():
                break
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
    assert asyncio.run(gone(int((tmp_path / "pid").read_text())))


def test_a_command_that_is_not_there():
    with pytest.raises(ConfigError, match="no command 'nosuch'"):
        Mcp("mcp:nosuch --fast")


def test_a_picture_of_a_server_is_seen_by_who_can_see(http):
    """A vision model reads its pixels; another one its name; one that cannot be read is the server's fault."""
    pillow = pytest.importorskip("PIL")
    from kits.vision import model
    from rondel.generate.envs.chat import TokenChat

    m, asked, env = model(), [], Tools([Mcp(f"mcp:{http}")])

    def play(said: str, **more):
        t = m.tokenizer

        async def answer(request):
            asked.append(request)
            tokens = t.encode(said if len(asked) == 1 else "done", add_special_tokens=False)
            return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", len(request.tokens), text="x")

        asked.clear()
        own_chat = TokenChat(t, answer, sampling=Sampling(max_tokens=64), key=lambda n: n, max_context=2048, **more)
        return asyncio.run(env.run(TASK, own_chat))

    seen = play(call("look"), sight=m.sight)
    (place,) = seen.media
    assert pillow and (place.image.rows, place.image.columns) == (3, 2) and (place.image.pixels == (255, 0, 0)).all()
    assert asked[1].media == (place,) and "here" in m.tokenizer.decode(seen.tokens[: place.start])
    with pytest.raises(EnvError, match=r"answered with an image that cannot be shown"):
        play(call("look", spoiled=True), sight=m.sight)
    blind = play(call("look"))
    assert not blind.media and "here[image" in m.tokenizer.decode(blind.tokens).replace(" ", "")
