"""An episode behind the gateway from outside: agents as functions and commands, their scores, and
whose fault what is.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import time

import anthropic
import httpx2
import openai
import pytest

from kits.chat import chat
from kits.gateway import ADD, AGAIN, ASK, TASK, TOOL, Policy, call, play, recorded, runs, tok
from rondel.core.errors import ConfigError, EngineError, EnvError
from rondel.core.events import Warned, subscribe
from rondel.core.types import OutOfBudget, Score
from rondel.generate.envs.episode import EpisodeState, episode_of
from rondel.generate.envs.episode_budget import EpisodeBudget
from rondel.generate.envs.gateway.agent import agent_of, command_agent, function_agent, score_of
from rondel.generate.envs.gateway.env import Gateway
from rondel.generate.envs.gateway.session import GatewaySession


def speak(base_url, api_key, messages=ASK, **more):
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return client.chat.completions.create(model="m", messages=messages, **more).choices[0].message.content


# -- whose fault what is ---------------------------------------------------------------------------


@pytest.mark.slow
def test_an_agent_that_raises_or_hangs_or_says_nothing_is_a_fault_of_the_world():
    def breaks(task, base_url, api_key):
        speak(base_url, api_key)
        raise ValueError("no such file")

    def leaves(task, base_url, api_key):
        sys.exit("enough")

    async def hangs(task, base_url, api_key):
        await asyncio.sleep(60)

    def stands(task, base_url, api_key):
        assert threading.current_thread().daemon, "one that hangs must not keep the process"
        threading.Event().wait(60)

    async def silent(task, base_url, api_key):
        return 1.0

    def own_timeout(task, base_url, api_key):
        raise TimeoutError("a page")

    for agent, said in (
        (breaks, "the agent raised ValueError: no such file"),
        (leaves, r"sys.exit\('enough'\)"),
        (silent, "without an answer of the policy"),
        (own_timeout, "raised TimeoutError"),
    ):
        with pytest.raises(EnvError, match=said):
            play(agent, Policy("seven."))
    for agent in (hangs, stands):
        with pytest.raises(EnvError, match=r"did not end within 0.05 s \(task.env.timeout\)"):
            play(agent, Policy("seven."), timeout=0.05)


def test_an_agent_that_outlives_the_episodes_seconds_is_ended_and_scored():
    heard = []

    async def slow(task, base_url, api_key):
        try:
            heard.append(await asyncio.to_thread(speak, base_url, api_key))
            await asyncio.sleep(60)
        finally:
            heard.append("ended")

    policy, state = Policy("seven."), EpisodeState(EpisodeBudget(seconds=5.0))
    talk = chat(tok(), policy, episode=state)

    async def episode():
        return await state.finish(await episode_of(Gateway(function_agent(slow)), TASK, talk))

    [one] = asyncio.run(asyncio.wait_for(episode(), 60))
    assert heard == ["seven.", "ended"] and one.outcome == OutOfBudget("seconds") and one.score is None
    recorded(one, policy)

    silent = chat(tok(), Policy(), episode=EpisodeState(EpisodeBudget(seconds=0.05)))
    with pytest.raises(EnvError, match="without an answer of the policy"):  # what the run rescues, as out of budget
        asyncio.run(Gateway(function_agent(lambda **_: threading.Event().wait(60))).run(TASK, silent))
    assert silent.episode.is_out_of_budget
    with pytest.raises(EnvError, match=r"did not end within 0.05 s \(task.env.timeout\)"):
        patient = chat(tok(), Policy(), episode=EpisodeState(EpisodeBudget(seconds=60.0)))
        asyncio.run(Gateway(function_agent(lambda **_: threading.Event().wait(60)), timeout=0.05).run(TASK, patient))


def test_what_the_engine_does_wrong_is_not_put_on_the_agent():
    def agent(task, base_url, api_key):
        with pytest.raises(openai.InternalServerError, match="refuses"):
            speak(base_url, api_key)
        return 0.0

    policy = Policy(EngineError("refuses"))
    with pytest.raises(EngineError, match="refuses"):
        play(agent, policy)
    assert len(policy.requests) == 1


@pytest.mark.slow
def test_an_agent_that_fails_on_a_full_context_is_scored():
    def agent(task, base_url, api_key):
        first = speak(base_url, api_key)
        speak(
            base_url,
            api_key,
            [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "look again. " * 40}],
        )

    (one,) = play(agent, Policy("seven."), max_context=100)
    assert one.finish_reason == "length" and runs(one) == 1 and one.score is None
    with pytest.raises(EnvError, match="its first prompt alone fills the context"):
        play(agent, Policy("seven."), max_context=10)


@pytest.mark.slow
def test_a_full_context_has_the_code_that_agents_look_for():
    import anthropic  # 3,000 modules, which the other tests do without

    def agent(task, base_url, api_key):
        with pytest.raises(openai.BadRequestError) as seen:
            speak(base_url, api_key, [{"role": "user", "content": "look again. " * 400}])
        assert seen.value.code == "context_length_exceeded" and "maximum context length is 300 tokens" in str(
            seen.value
        )
        with (
            anthropic.Anthropic(base_url=base_url, api_key=api_key) as client,
            pytest.raises(anthropic.BadRequestError) as seen,
        ):
            client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "look again. " * 400}]
            )
        assert "prompt is too long" in str(seen.value) and seen.value.body["error"]["type"] == "invalid_request_error"
        return float(speak(base_url, api_key) == "seven.")

    (one,) = play(agent, Policy("seven."), max_context=300)
    assert one.score.value == 1.0 and one.finish_reason == "stop"


@pytest.mark.slow
def test_an_agent_that_outlives_its_episode_is_not_heard_of(caplog):
    late = threading.Event()

    def agent(task, base_url, api_key):
        try:
            late.wait(30)
            speak(base_url, api_key)
        finally:
            over.set()

    async def episode():
        with pytest.raises(EnvError, match="did not end"):
            await Gateway(function_agent(agent), timeout=0.05).run(TASK, chat(tok(), Policy("seven.")))
        late.set()
        await asyncio.to_thread(over.wait, 30)

    over = threading.Event()
    asyncio.run(episode())
    gc.collect()
    assert over.is_set() and not caplog.records


def test_answers_leave_at_once():
    """Nagle's algorithm and delayed acknowledgements cost 40 ms a turn, and asyncio turns
    the former off only where it sees TCP.
    """
    seen = []

    async def agent(task, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="m", messages=ASK)
            for link in gateway.listening.port.server.server_state.connections:
                seen.append(link.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    gateway = Gateway(function_agent(agent))
    asyncio.run(gateway.run(TASK, chat(tok(), Policy("seven."))))
    assert len(seen) == 1 and seen[0]


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_key_is_one_episodes_and_ends_with_it():
    seen = []

    import anthropic

    def agent(task, base_url, api_key):
        for key in ("other", api_key[:-1], *seen):
            with pytest.raises(openai.AuthenticationError) as refused:
                speak(base_url, key)
            assert refused.value.code == "invalid_api_key"
        with (
            anthropic.Anthropic(base_url=base_url, api_key="other") as client,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            client.messages.create(model="m", max_tokens=9, messages=ASK)
        assert refused.value.body["error"]["type"] == "authentication_error"
        seen.append(api_key)
        return float(speak(base_url, api_key) == "seven.")

    async def both():
        gateway = Gateway(function_agent(agent))
        async with gateway.listening.serve_session(
            GatewaySession(chat(tok(), Policy()))
        ):  # another episode keeps the port open
            for _ in range(2):
                await gateway.run(TASK, chat(tok(), Policy("seven.")))

    asyncio.run(both())
    assert len(set(seen)) == 2


@pytest.mark.slow
def test_a_client_that_leaves_takes_its_request_along():
    ended = threading.Event()

    class Slow(Policy):
        async def generate(self, request):
            if self.requests:
                return await super().generate(request)
            self.requests.append(request)
            self.drawn.append((request, None))
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

    def agent(task, base_url, api_key):
        with pytest.raises(openai.APITimeoutError):
            speak(base_url, api_key, timeout=0.3)
        assert ended.wait(30)
        assert speak(base_url, api_key) == "seven."

    policy = Slow("-", "seven.")
    gateway = Gateway(function_agent(agent))
    one = asyncio.run(gateway.run(TASK, chat(tok(), policy)))
    del policy.drawn[0]
    recorded(one, policy)
    assert runs(one) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", b"{", "not JSON"),
        ("/v1/chat/completions", b"[]", "must be an object"),
        ("/v1/chat/completions", b"{}", "nothing to answer"),
        ("/v1/chat/completions", b'{"messages": [{"role": "critic", "content": "x"}]}', "must be one of system"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "part of type 'image_url'",
        ),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "at least 1"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web"}]}',
            "tool of type 'web'",
        ),
        ("/v1/completions", b'{"prompt": [1, 99999999]}', "token ids below"),
        ("/v1/responses", b'{"input": "x", "previous_response_id": "r"}', "is not known here"),
        (
            "/v1/messages",
            b'{"messages": [{"role": "assistant", "content": "x"}]}',
            "the last message is the assistant's",
        ),
        ("/v1/embeddings", b"{}", "this gateway has"),
    ],
)
def test_what_cannot_be_answered_says_why(path, body, said):
    def agent(task, base_url, api_key):
        link = httpx2.Client(
            base_url=base_url.removesuffix("/v1"), headers={"Authorization": f"Bearer {api_key}"}, trust_env=False
        )
        with link:
            reply = link.post(path, content=body)
            assert reply.status_code in (400, 404) and said in reply.json()["error"]["message"]
        speak(base_url, api_key)

    play(agent, Policy("seven."))


def test_what_a_client_asks_of_the_sampling_is_told_once_and_not_done():
    heard = []
    stop = subscribe(lambda event: heard.append(event.message) if isinstance(event, Warned) else None)

    def agent(task, base_url, api_key):
        for _ in range(2):
            speak(
                base_url,
                api_key,
                temperature=0.0,
                top_p=1.0,
                seed=3,
                user="me",
                max_tokens=5,
                response_format={"type": "text"},
            )

    try:
        policy = Policy("seven.", "seven.")
        play(agent, policy)
    finally:
        stop()
    assert all(r.sampling.temperature == 1.0 and r.sampling.max_tokens == 5 for r in policy.requests)
    assert sorted(m.split(":")[0] for m in heard) == ["the agent asks for seed", "the agent asks for temperature"]


def test_one_call_where_a_client_allows_one():
    """Both APIs have a word for it, which was passed over in silence."""

    def agent(task, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        for more, n in (({}, 2), ({"parallel_tool_calls": False}, 1)):
            done = client.chat.completions.create(model="policy", messages=ASK, tools=[TOOL], **more)
            assert len(done.choices[0].message.tool_calls) == n
        claude = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
        one = {"type": "auto", "disable_parallel_tool_use": True}
        tool = {"name": "add", "input_schema": ADD["parameters"]}
        said = claude.messages.create(model="policy", max_tokens=200, messages=ASK, tools=[tool], tool_choice=one)
        assert [block.type for block in said.content] == ["tool_use"]

    play(agent, Policy(lambda text: call(a=1, b=2) + call(a=3, b=4)))


def test_prompts_are_counted_each_and_none_is_empty():
    """Of several prompts in one request the first alone was counted; an empty one was drawn from behind no token."""
    policy = Policy(lambda text: "seven.")

    def agent(task, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        for prompts in (["what?", ""], [[300], []]):
            with pytest.raises(openai.BadRequestError, match="one of the prompts is empty"):
                client.completions.create(model="policy", prompt=prompts)
        usage = client.completions.create(model="policy", prompt=["what?", "what is three plus four?"]).usage
        assert usage.prompt_tokens == sum(len(request.tokens) for request in policy.requests)
        assert len(policy.requests) == 2 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    play(agent, policy)


def test_half_a_character_has_no_bytes():
    """They were those of the mark that stands for it; clients join the bytes of tokens to a text."""

    def agent(task, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        told = client.chat.completions.create(model="policy", messages=ASK, logprobs=True).choices[0].logprobs.content
        assert [one.bytes for one in told][:3] == [[ord("a")], None, None]

    play(agent, Policy("a\u00e9"))


def test_a_prompt_is_counted_with_the_system_message_that_the_run_puts_before_it():
    def agent(task, base_url, api_key):
        client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
        counted = client.messages.count_tokens(model="policy", messages=ASK).input_tokens
        assert counted == client.messages.create(model="policy", max_tokens=9, messages=ASK).usage.input_tokens

    talk = chat(tok(), Policy("seven."), max_tokens=200, max_context=8192)
    talk.system = "You are a helpful assistant."
    asyncio.run(Gateway(function_agent(agent)).run(TASK, talk))


# -- scores ----------------------------------------------------------------------------------------


def test_what_an_agent_returns_is_a_score_or_nothing():
    assert score_of(None) is None and score_of(True) == Score(1.0) and score_of(0.5) == Score(0.5)
    assert (
        score_of({"a": 1, "b": 0.5}) == Score(1.5, {"a": 1.0, "b": 0.5}) and score_of({"a": 1, "total": 9}).value == 9.0
    )
    for strange in (float("nan"), "good", {}, {"a": "b"}, [1]):
        with pytest.raises(EnvError, match="may return nothing, a finite number"):
            score_of(strange)


def test_the_score_of_an_episode_is_with_its_first_branch():
    def agent(task, base_url, api_key):
        for words in ("search", "write"):
            speak(base_url, api_key, [{"role": "system", "content": words}, *ASK])
        return {"correct": 1.0}

    found = play(agent, Policy("a", "b"))
    assert [t.text for t in found] == ["a", "b"] and [t.score for t in found] == [Score(1.0, {"correct": 1.0}), None]


# -- commands --------------------------------------------------------------------------------------

SCRIPT = """
import json, os, urllib.request as u
task = json.loads(os.environ["RONDEL_TASK"])
body = json.dumps({"messages": [{"role": "user", "content": task["data"]["prompt"]}]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"] and os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
said = json.load(u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)))
print("thinking")
print(json.dumps({"correct": float(task["data"]["answer"] in said["choices"][0]["message"]["content"])}))
"""


def episode(words, policy, timeout=60.0):
    return asyncio.run(Gateway(command_agent(words), timeout=timeout).run(TASK, chat(tok(), policy)))


@pytest.mark.slow
def test_a_command_is_an_agent_and_its_last_line_the_score():
    policy = Policy("7")
    one = episode([sys.executable, "-c", SCRIPT], policy)
    recorded(one, policy)
    assert one.score == Score(1.0, {"correct": 1.0}) and one.text == "7"
    quiet = SCRIPT.replace("print(json.dumps", "(json.dumps")
    assert episode([sys.executable, "-c", quiet], Policy("7")).score is None


def test_a_command_that_fails_tells_its_last_words():
    with pytest.raises(EnvError, match="ended with 3: no such page"):
        episode(["sh", "-c", "echo no such page >&2; exit 3"], Policy("7"))


def gone(pid):
    """Ended, or a zombie that waits for its reaper."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_a_command_that_hangs_ends_with_its_children(tmp_path):
    with pytest.raises(EnvError, match=r"did not end within 0\.5 s"):
        episode(
            ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; echo $$ >> {tmp_path}/pid; wait"],
            Policy("7"),
            timeout=0.5,
        )
    pids = [int(line) for line in (tmp_path / "pid").read_text().split()]
    end = time.monotonic() + 20
    while not all(map(gone, pids)):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(pids) == 2 and os.getpid() not in pids


def test_what_cannot_be_an_agent_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        agent_of("nowhere:agent")
    with pytest.raises(ConfigError, match="must be a function"):
        agent_of("kits.gateway:QWEN")
    with pytest.raises(ConfigError, match=r"task.env.agent is empty"):
        agent_of("")
    with pytest.raises(ConfigError, match="no command 'there-is-no-such-agent'"):
        agent_of("there-is-no-such-agent --fast")


def test_a_stream_of_another_turn_goes_on():
    def agent(task, base_url, api_key):
        messages = list(ASK)
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(3):
                text = ""
                options = {"include_usage": True}
                for chunk in client.chat.completions.create(
                    model="m", messages=messages, stream=True, stream_options=options
                ):
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                    usage = chunk.usage
                assert usage.completion_tokens
                messages += [{"role": "assistant", "content": text}, AGAIN]

    (one,) = play(agent, Policy("a", "b", "c"))
    assert one.text == "a\nb\nc"
