"""Users of the shop that are models: a policy of the run, with a score of its own, and a server at an address."""

from __future__ import annotations

import asyncio
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pydantic import ValidationError

from kits.chat import Engine, chat, tokenizer
from kits.shop import database, task_of, tasks
from rondel.core.config.environment import ShopConfig
from rondel.core.errors import EnvError
from rondel.core.types import Score
from rondel.generate.envs.shop.database import ShopSession
from rondel.generate.envs.shop.env import Shop
from rondel.generate.envs.shop.model_user import PolicyUser, told_share
from rondel.generate.envs.shop.rules import Conduct
from rondel.generate.envs.shop.scripted_user import ScriptedUser
from rondel.generate.envs.shop.speech import PlainSpeech
from rondel.generate.envs.shop.wishes import UserGoal

LETTERS = {"random": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


def goal_of(task):
    return UserGoal.read(task.data["goal"])


def play_both(task, replies, **settings):
    """An episode in which one engine says what both sides say, in the order in which they are asked."""
    shop, tok = Shop(database(), user="policy", **settings), tokenizer("chatml")
    engine = Engine(
        *([*tok.encode(text, add_special_tokens=False), tok.eos_token_id] for text in replies or shop.gold(task))
    )
    found = asyncio.run(shop.run(task, chat(tok, engine, max_context=12000, max_tokens=400)))
    return found, engine


@pytest.mark.parametrize("short", [False, True])
def test_a_policy_plays_the_user_in_a_conversation_of_its_own(short):
    task = task_of("exchange")
    (agent, user), engine = play_both(task, None, short=short)
    tok = tokenizer("chatml")
    assert (agent.agent, user.agent) == ("agent", "user") and agent.score.value == user.score.value == 1.0
    assert user.score.parts == {"told": 1.0, "invented": 0.0, "misled": 0.0}
    asked = tok.decode(user.tokens)
    goal = goal_of(task)
    assert goal.identity in asked and goal.wishes[0].options[0] in asked, "it knows its goal"
    assert "find_user" not in asked, "and nothing of the agent's tools"
    assert sum(agent.mask) + sum(user.mask) == sum(len(turn) for turn in engine.turns)
    if not short:
        assert goal.wishes[0].payment not in tok.decode(engine.requests[0].tokens), "a hidden goal"


def user_of(task, asked, said):
    tok = tokenizer("chatml")
    user = PolicyUser(goal_of(task), PlainSpeech(), chat(tok, Engine()))
    user.asked, user.said = asked, said
    return user


def test_what_a_user_earns():
    task = task_of("cancel")
    goal, wish = goal_of(task), goal_of(task).wishes[0]
    conduct, failed, solved = Conduct(ShopSession(database())), Score(0.0), Score(1.0)
    asks = ["What is the order number?", "May I have your email address?"]
    honest = user_of(task, asks, [f"It is {wish.order}.", goal.identity])
    assert [honest.score(kind, conduct, failed).value for kind in ("goal", "hard", "shared")] == [1.0, 1.0, 0.0]
    assert [honest.score(kind, conduct, solved).value for kind in ("goal", "hard", "shared")] == [1.0, 0.0, 1.0]
    assert user_of(task, asks, [f"It is {wish.order}.", "No."]).score("hard", conduct, failed).value == 0.5
    assert (
        user_of(task, asks, [f"It is {wish.order}.", "me99@post.example"]).score("goal", conduct, failed).value == 0.0
    )
    conduct.agreed = [("cancel_order", {"order": "99999", "reason": "mistake"})]
    assert honest.score("goal", conduct, failed).parts["misled"] == 1.0
    assert told_share(goal, ["Hello."], ["Hello."]) == 1.0


def test_a_user_that_says_nothing_or_writes_calls_is_read_as_text():
    task = task_of("cancel")
    call = PlainSpeech().call(("cancel_order", {"order": goal_of(task).wishes[0].order, "reason": "mistake"}))
    (agent, user), _ = play_both(task, ["Hello?", f"yes {call}", "I see.", "[END]"])
    assert agent.score.parts["database"] == 0.0 and {t.role for t in agent.conversation} == {
        "system",
        "user",
        "assistant",
    }
    assert user.written and user.score.value == 1.0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"user": "oracle"}, 'it is "scripted" or "policy", or an address'),
        ({"user": "http://127.0.0.1:1/v1"}, "user_model names the model"),
        ({"user_model": "x"}, "give both, or neither"),
        ({"user_score": "hard"}, "user_score is what a policy earns"),
    ],
)
def test_settings_without_effect_are_refused(wrong, says):
    with pytest.raises(ValidationError, match=says):
        ShopConfig(path="x", **wrong)


class ScriptedServer(BaseHTTPRequestHandler):
    """OpenAI's chat completions, by the scripted user of the task whose goal the system message has."""

    users, seen = {}, []

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, asked))
        brief = asked["messages"][0]["content"]
        if brief == "broken":
            self.send_error(503)
            return
        said = self.users[brief].answer(asked["messages"][-1]["content"])
        body = json.dumps({"choices": [{"message": {"content": f"{said.text} {'[END]' * said.ends}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    pytest.importorskip("httpx2")
    ScriptedServer.users, ScriptedServer.seen = {}, []
    one = HTTPServer(("127.0.0.1", 0), ScriptedServer)
    Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{one.server_port}/v1"
    one.shutdown()
    one.server_close()


@pytest.mark.slow
def test_a_model_at_an_address_plays_the_user(server):
    speech, tok = PlainSpeech(), tokenizer("chatml")
    shop = Shop(database(), user=server, user_model="m")
    for task in tasks()[:4]:
        ScriptedServer.users = {speech.brief(goal_of(task)): ScriptedUser(goal_of(task), speech)}
        gold = Shop(database()).gold(task)
        engine = Engine(*([*tok.encode(text, add_special_tokens=False), tok.eos_token_id] for text in gold))
        found = asyncio.run(shop.run(task, chat(tok, engine, max_context=12000, max_tokens=400)))
        assert found.score.value == 1.0
    path, last = ScriptedServer.seen[-1]
    assert path == "/v1/chat/completions" and last["model"] == "m"
    assert [m["role"] for m in last["messages"][:3]] == ["system", "assistant", "user"]


@pytest.mark.parametrize("broken", ["no server", "refuses"])
def test_a_user_that_cannot_be_reached_is_a_fault_of_the_world(server, broken, monkeypatch):
    monkeypatch.setattr(PlainSpeech, "brief", lambda self, goal: "broken")
    url = "http://127.0.0.1:9/v1" if broken == "no server" else server
    tok = tokenizer("chatml")
    engine = Engine([*tok.encode("Hello", add_special_tokens=False), tok.eos_token_id])
    with pytest.raises(EnvError, match=r"task\.env\.user: http://127"):
        asyncio.run(
            Shop(database(), user=url, user_model="m").run(task_of("cancel"), chat(tok, engine, max_context=12000))
        )


@pytest.mark.slow
def test_every_role_is_trained_from_its_own_score(tmp_path):
    """One step of the shop with a user of its own weights, a debate, and a proposer with a solver."""
    from rondel.assemble import train
    from rondel.cli.shop_tasks import make_shop
    from rondel.core.config.job import Job
    from rondel.runtime.journal.store import read_step

    make_shop(tmp_path / "shop", 100, 0)
    path = str(tmp_path / "shop")
    questions = [{"prompt": "Is 7 prime?", "answer": "yes", "wrong": "no"}]
    sources = [
        {"source": "shop", "kind": "shop_tasks", "path": path,
         "env": {"kind": "shop", "path": path, "short": True, "user": "policy", "user_score": "goal", "turns": 2}},
        {"source": "debate", "kind": "list", "rows": questions, "env": "debate"},
        {"source": "sums", "kind": "list", "rows": [{"prompt": "1+1", "answer": ""}], "env": "proposer_solver"},
    ]  # fmt: skip
    smaller = {
        "task.data": {"kind": "mix", "sources": sources}, "task.env": "single_turn", "loop.steps": 1, "loop.warmup.steps": 0,
        "loop.groups_per_step": 3, "algo.group_size": 2, "model.path": LETTERS,
        "engine.sampling.max_tokens": 8, "policies": {"user": {"lr": 1e-3, "agents": ["user", "judge"]}},
        "run.folder": str(tmp_path / "run"), "run.sinks": [], "place.threads": 1, "task.filters": [], "task.eval.every": 0,
    }  # fmt: skip
    train(Job.read(Path(__file__).parents[2] / "recipes" / "shop.toml", smaller), quiet=True)
    parts = {
        "agent": {"database", "said", "rules"},
        "user": {"told", "invented", "misled"},
        "judge": {"decided"},
        "first": {"honest"},
        "second": {"honest"},
        "proposer": {"valid"},
    }
    rows = read_step(tmp_path / "run", 1)
    assert {row["agent"] for row in rows} >= parts.keys() - {"user"}, "a model that ends no reply never meets its user"
    for row in rows:
        assert row["policy"] == ("user" if row["agent"] in ("user", "judge") else "policy")
        assert {*row["reward_parts"]} >= parts.get(row["agent"], {"correct"})
