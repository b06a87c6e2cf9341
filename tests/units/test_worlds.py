"""Worlds of others: OpenEnv over its own protocol, TextArena's games, each against
the real package where it is installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading

import pytest

from kits.chat import chat
from kits.gateway import Policy, recorded, tok
from rondel.core.errors import ConfigError, EnvError
from rondel.core.types import Task
from rondel.generate.envs.external_envs import OpenEnv
from rondel.generate.envs.gym import Gym, world_factory
from rondel.generate.envs.sources import load_tasks

websockets = pytest.importorskip("websockets.sync.server")


@pytest.fixture
def server():
    """Doubles numbers until one is above 10; a word for a number is invalid, 13 breaks
    it. As openenv-core's /ws answers.
    """
    asked, ended = [], threading.Event()

    def session(link):
        for text in link:
            message = json.loads(text)
            asked.append(message)
            data = message.get("data", {})
            reply = {
                "type": "observation",
                "data": {"observation": {"said": f"seed {data.get('seed')}", "n": 0}, "reward": None, "done": False},
            }
            if message["type"] == "close":
                ended.set()
                return
            if message["type"] == "step":
                try:
                    number = int(data["number"])
                except (KeyError, ValueError):
                    errors = [{"loc": ["number"], "msg": "Input should be a valid integer"}]
                    reply = {
                        "type": "error",
                        "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors},
                    }
                else:
                    seen = {"said": f"twice is {2 * number}", "n": 2 * number}
                    reply = {
                        "type": "observation",
                        "data": {"observation": seen, "reward": 0.25 * number, "done": number > 10},
                    }
                    if number == 13:
                        reply = {"type": "error", "data": {"message": "bad luck", "code": "EXECUTION_ERROR"}}
            link.send(json.dumps(reply))

    with websockets.serve(session, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}", asked, ended
        running.shutdown()
        thread.join(10)


def play(url, *says, **args):
    policy = Policy(*says)
    [task, *_] = load_tasks({"kind": "gym", "name": f"openenv:{url}", "n": 1, "args": args}, env="gym").train
    found = asyncio.run(Gym(turns=8).run(task, chat(tok(), policy, max_tokens=60)))
    recorded(found, policy)
    return found, [tok().decode(r.tokens) for r in policy.requests]


def test_an_episode_on_a_server(server):
    url, asked, ended = server
    found, read = play(url, "3", "four", "11", action="number", show="said", reset={"level": 2})
    assert ended.wait(20)
    assert [m["type"] for m in asked] == ["reset", "step", "step", "step", "close"] and asked[0]["data"] == {
        "seed": 0,
        "level": 2,
    }
    assert "seed 0" in read[0] and "twice is 6" in read[1] and "number: Input should be a valid integer" in read[2]
    assert [value for _, value in found.score.steps] == [0.75, 0.0, 2.75] and found.score.value == 3.5


def test_whole_observations_and_whole_actions(server):
    found, read = play(server[0], "not json", '{"number": 12}')
    assert '{"said": "seed 0", "n": 0}' in read[0] and "not a JSON object" in read[1] and found.score.value == 3.0


def test_what_is_json_and_no_object_is_no_action(server):
    """It was sent as an empty action, which a server whose fields have defaults carries out and pays for."""
    url, asked, _ = server
    found, read = play(url, "5", "[1]", "[" * 50, '{"number": 12}')
    assert [m["data"] for m in asked if m["type"] == "step"] == [{"number": 12}]
    assert all("not a JSON object" in text for text in read[1:]) and found.score.value == 3.0


@pytest.mark.parametrize(
    ("says", "args", "message"), [("13", {"action": "number"}, "bad luck"), ("3", {"show": "sayd"}, "it has: said, n")]
)
def test_what_the_server_does_is_the_worlds_fault(server, says, args, message):
    with pytest.raises(EnvError, match=message):
        play(server[0], says, **args)


def test_an_address_that_is_none():
    with pytest.raises(ConfigError, match=r"openenv:http://127\.0\.0\.1:8000"):
        OpenEnv("127.0.0.1:8000")


def test_a_game_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    with pytest.raises(ConfigError, match="pip install textarena"):
        world_factory("textarena:GuessTheNumber-v0")()


@pytest.mark.skipif(importlib.util.find_spec("textarena") is None, reason="textarena is not installed")
def test_a_real_game_of_textarena():
    """Bisection finds any number from 1 to 20: the policy reads hints, and its reward comes with the end."""
    task, low, high = Task("g/5", "gym", {"world": "textarena:GuessTheNumber-v0", "seed": 5}), 1, 20
    world = world_factory(task.data["world"])()
    seen, _ = world.reset(seed=5)
    assert "between 1 and 20" in seen
    for _ in range(6):
        guess = (low + high) // 2
        seen, reward, done, _, _ = world.step(f"I say [{guess}]")
        if done:
            break
        assert "I say" not in seen and ("higher" in seen or "lower" in seen)
        low, high = (guess + 1, high) if "higher" in seen else (low, guess - 1)
    assert done and reward == 1.0


@pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="openenv-core is not installed")
def test_the_real_server_of_openenv():
    import socket
    import time

    import uvicorn
    from openenv.core.env_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        number: int

    class Seen(Observation):
        said: str = ""

    class Doubles(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **more):
            return Seen(said=f"seed {seed}", done=False)

        def step(self, action, timeout_s=None, **more):
            return Seen(said=f"twice is {2 * action.number}", reward=0.25 * action.number, done=action.number > 10)

        @property
        def state(self):
            return State()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = uvicorn.Server(
        uvicorn.Config(create_app(Doubles, Guess, Seen, max_concurrent_envs=4), port=port, log_level="error")
    )
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        while not running.started:
            time.sleep(0.05)
        found, read = play(f"http://127.0.0.1:{port}", "3", "four", "11", action="number", show="said")
        assert "seed 0" in read[0] and "twice is 6" in read[1] and "number" in read[2] and found.score.value == 3.5
    finally:
        running.should_exit = True
        thread.join(10)
