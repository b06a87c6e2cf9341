"""Agents with the clients and a framework of the field, unmodified: they get a base_url
and a key, and what they do is recorded.
"""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from kits.chat import chat
from kits.gateway import ADD, AGAIN, ASK, TOOL, Policy, call, play, recorded, runs, tok
from rondel.core.types import Task
from rondel.generate.envs.gateway.agent import function_agent
from rondel.generate.envs.gateway.env import Gateway

pytestmark = pytest.mark.slow

LOOK = "look. " + call(a=3, b=4)


def spoken(trajectory):
    return tok().decode([t for t, m in zip(trajectory.tokens, trajectory.mask) if m])


# -- openai ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_openai_chat_with_a_tool(stream):
    def agent(task, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [{"role": "user", "content": task.data["prompt"]}]
        for _ in range(3):
            if stream:
                with client.chat.completions.stream(model="gpt-x", messages=messages, tools=[TOOL]) as s:
                    message = s.get_final_completion().choices[0].message
            else:
                message = (
                    client.chat.completions.create(model="gpt-x", messages=messages, tools=[TOOL]).choices[0].message
                )
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float(message.content == "the answer is 7.")
            assert message.content == "look."
            for asked in message.tool_calls:
                given = json.loads(asked.function.arguments)
                messages.append({"role": "tool", "tool_call_id": asked.id, "content": str(given["a"] + given["b"])})

    policy = Policy(LOOK, "the answer is 7.")
    (one,) = play(agent, policy)
    assert runs(one) == 2 and one.score.value == 1.0 and one.finish_reason == "stop"
    text = tok().decode(one.tokens)
    assert "<tool_response>\n7\n</tool_response>" in text and text.count("The sum of two numbers.") == 1
    assert spoken(one) == LOOK + "<|im_end|>the answer is 7.<|im_end|>"


def test_openai_numbers_are_exact():
    async def agent(task, base_url, api_key):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        whole = await client.chat.completions.create(model="m", messages=ASK, logprobs=True, max_completion_tokens=2)
        content = whole.choices[0].logprobs.content
        assert (
            whole.choices[0].finish_reason == "length" and [c.logprob for c in content] == policy.drawn[0][1].logprobs
        )
        assert whole.usage.prompt_tokens == len(policy.requests[0].tokens) and whole.usage.completion_tokens == 2
        assert [m.id async for m in await client.models.list()] == ["policy"]
        two = await client.chat.completions.create(model="m", messages=ASK, n=2)
        assert [c.message.content for c in two.choices] == ["seven.", "12"] and two.choices[1].index == 1

    policy = Policy("the answer", "seven.", "12")
    found = play(agent, policy)
    assert [runs(t) for t in found] == [1, 1, 1] and found[0].finish_reason == "length"
    assert len({r.key for r in policy.requests}) == 3, "samples from one place are drawn with noise of their own"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_openai_completions_go_on_from_their_text(stream):
    """An agent that stops at a string writes it again itself; the policy wrote it already, and it is there once."""

    def agent(task, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)

        def ask(prompt):
            if stream:
                return "".join(
                    c.choices[0].text
                    for c in client.completions.create(model="m", prompt=prompt, stop="Obs:", stream=True)
                )
            return client.completions.create(model="m", prompt=prompt, stop="Obs:").choices[0].text

        prompt = "what is 3 + 4?\n"
        said = ask(prompt)
        assert said == "add 3 4 "
        assert ask(prompt + said + "Obs: 7\n") == "seven."

    policy = Policy("add 3 4 Obs: 12", "seven.")
    (one,) = play(agent, policy)
    assert runs(one) == 2 and tok().decode(one.tokens) == "what is 3 + 4?\nadd 3 4 Obs: 7\nseven.<|im_end|>"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("remembers", [False, True], ids=["items", "previous id"])
def test_openai_responses_with_a_tool(stream, remembers):
    def agent(task, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        how = dict(model="m", instructions="be brief", tools=[{"type": "function", **ADD}])

        def ask(**more):
            if not stream:
                return client.responses.create(**how, **more)
            with client.responses.stream(**how, **more) as s:
                return s.get_final_response()

        items = [{"role": "user", "content": task.data["prompt"]}]
        first = ask(input=items)
        (said, asked) = first.output
        assert said.content[0].text == "look." and json.loads(asked.arguments) == {"a": 3, "b": 4}
        answer = {"type": "function_call_output", "call_id": asked.call_id, "output": "7"}
        if remembers:
            last = ask(input=[answer], previous_response_id=first.id)
        else:
            last = ask(input=[*items, *(item.model_dump(exclude_none=True) for item in first.output), answer])
        assert last.usage.input_tokens == len(policy.requests[1].tokens)
        return {"correct": float(last.output_text == "the answer is 7."), "brevity": 0.5}

    policy = Policy(LOOK, "the answer is 7.")
    (one,) = play(agent, policy)
    assert runs(one) == 2 and one.score.value == 1.5 and one.score.parts == {"correct": 1.0, "brevity": 0.5}
    assert tok().decode(one.tokens).count("be brief") == 1


# -- anthropic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("address", ["/v1", ""], ids=["as given", "bare"])
def test_anthropic_messages_with_a_tool(stream, address):
    import anthropic  # 3,000 modules, which no other worker needs

    def agent(task, base_url, api_key):
        client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1") + address, api_key=api_key, max_retries=0)
        tools = [{"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}]
        how = dict(model="claude-x", max_tokens=100, system=[{"type": "text", "text": "be brief"}], tools=tools)

        def ask():
            if not stream:
                return client.messages.create(messages=messages, **how)
            with client.messages.stream(messages=messages, **how) as s:
                return s.get_final_message()

        messages = [{"role": "user", "content": task.data["prompt"]}]
        first = ask()
        assert (
            first.stop_reason == "tool_use"
            and first.content[0].text == "look."
            and first.content[1].input == {"a": 3, "b": 4}
        )
        answer = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "7"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [answer]}]
        last = ask()
        assert last.stop_reason == "end_turn" and last.usage.output_tokens == len(policy.drawn[1][1].tokens)
        return last.content[0].text == "the answer is 7."

    policy = Policy(LOOK, "the answer is 7.")
    (one,) = play(agent, policy)
    assert runs(one) == 2 and one.score.value == 1.0 and tok().decode(one.tokens).count("be brief") == 1


def test_anthropic_stop_sequences_limits_and_counts():
    import anthropic

    def agent(task, base_url, api_key):
        client = anthropic.Anthropic(base_url=base_url, api_key=api_key, max_retries=0)
        size = len(tok().apply_chat_template(ASK, add_generation_prompt=True, return_dict=False))
        assert client.messages.count_tokens(model="m", messages=ASK).input_tokens == size
        said = client.messages.create(model="m", max_tokens=50, messages=ASK, stop_sequences=["plus"])
        assert (said.stop_reason, said.stop_sequence, said.content[0].text) == ("stop_sequence", "plus", "three ")
        assert client.messages.create(model="m", max_tokens=1, messages=ASK).stop_reason == "max_tokens"

    assert [t.finish_reason for t in play(agent, Policy("three plus four", "seven."))] == ["stop", "length"]


# -- a framework -----------------------------------------------------------------------------------


@pytest.mark.parametrize("thought", ["", "<think>\nhm.\n</think>\n\n"], ids=["", "thinking"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai_drives_an_episode(api, thought):
    """In chat it takes thoughts out of the text, and sends them back with line breaks of its own."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def agent(task, base_url, api_key):
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind("gpt-x", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
        helper = Agent(model, instructions="be brief")

        @helper.tool_plain
        def add(a: int, b: int) -> int:
            """The sum of two numbers."""
            return a + b

        first = await helper.run(task.data["prompt"])
        last = await helper.run("look again.", message_history=first.all_messages())
        return float(last.output.endswith("seven."))

    says = [thought + text for text in (LOOK, "the answer is 7.", "seven.")]
    (one,) = play(agent, Policy(*says))
    assert runs(one) == 3 and one.score.value == 1.0
    assert spoken(one) == "".join(text + "<|im_end|>" for text in says)


# -- branches ---------------------------------------------------------------------------------------


def test_a_sub_agent_and_a_compaction_are_branches_and_the_main_one_comes_first():
    def agent(task, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)

        def ask(messages):
            return (
                client.chat.completions.create(model="m", messages=messages)
                .choices[0]
                .message.model_dump(exclude_none=True)
            )

        main = [{"role": "system", "content": "you lead"}, *ASK]
        main.append(ask(main))
        found = ask([{"role": "system", "content": "you search"}, *ASK])["content"]
        main.append({"role": "user", "content": f"it found: {found}"})
        main.append(ask(main))
        main[2:4] = [{"role": "user", "content": "so far: nothing."}]  # compacted
        main += [AGAIN]
        ask(main)
        return 0.5

    found = play(agent, Policy("plan", "three", "four", "seven."))
    assert [t.text for t in found] == ["plan\nfour", "three", "seven."] and [
        t.score and t.score.value for t in found
    ] == [0.5, None, None]
    assert "it found: three" in tok().decode(found[0].tokens) and "assistant\nfour" in tok().decode(found[2].tokens)


# -- many at once ----------------------------------------------------------------------------------


def test_many_sessions_at_once_see_nothing_of_each_other():
    keys, shared = [], []

    async def agent(task, base_url, api_key):
        keys.append(api_key)
        client = shared[0].with_options(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": f"secret {task.id}"}]
        for _ in range(3):
            reply = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
            assert reply.content.endswith(f"secret {task.id}")
            messages += [reply.model_dump(exclude_none=True), AGAIN]

    def echo(text):
        return "you said " + text.split("user\n")[1].split("<|im_end|>")[0]

    async def all_of_them():
        gateway = Gateway(function_agent(agent), timeout=60)
        policies = [Policy(echo) for _ in range(60)]
        tasks = [Task(f"n{i}n", "gateway", {}) for i in range(60)]
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=60) as client:
            shared.append(client)
            return policies, await asyncio.gather(
                *(gateway.run(t, chat(tok(), p, max_tokens=200)) for t, p in zip(tasks, policies))
            )

    policies, found = asyncio.run(all_of_them())
    assert len(set(keys)) == 60
    for i, (policy, one) in enumerate(zip(policies, found)):
        recorded(one, policy)
        text = tok().decode(one.tokens)
        assert runs(one) == 3 and text.count(f"secret n{i}n") == text.count("secret") == 4
