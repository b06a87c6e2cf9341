"""The forest of conversations behind one key: what goes on, what forks, what is copied, and whose fault what is."""

from __future__ import annotations

import asyncio
import copy
import json
import random

import numpy as np
import pytest

from kits.chat import Engine, chat, tokenizer
from kits.gateway import AGAIN, ASK, TOOL, Policy, call, recorded, runs, tok
from rondel.generate.chat_apis.chat_request import ChatRequest
from rondel.generate.envs.gateway.openai import read_messages
from rondel.generate.envs.gateway.session import GatewaySession
from rondel.generate.template import Template
from rondel.system.http.response import RequestRefusal

SYSTEM = {"role": "system", "content": "be brief"}


def session(policy, **how):
    return GatewaySession(chat(tok(), policy, **{"max_tokens": 400, **how}))


async def ask(s, messages, tools=(), **more):
    """-> the conversation with the reply."""
    (reply,) = await s.generate_replies(ChatRequest(read_messages(copy.deepcopy(messages)), list(tools), **more))
    return [*messages, openai_message(reply)]


def openai_message(reply):
    """As OpenAI's clients send it back."""
    calls = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for i, n, a in reply.calls
    ]
    return {"role": "assistant", "content": reply.text or None, **({"tool_calls": calls} if calls else {})}


def said(trajectory):
    """What the policy wrote, turn by turn."""
    parts = [tok().decode([t]) if m else "\0" for t, m in zip(trajectory.tokens, trajectory.mask)]
    return [part for part in "".join(parts).split("\0") if part]


def forest(policy, play, **how):
    """-> what each leaf's policy said, turn by turn."""
    s = session(policy, **how)
    asyncio.run(play(s))
    found = s.forest.leaf_trajectories()
    for trajectory in found:
        recorded(trajectory, policy)
    return [said(t) for t in found]


def ended(*texts):
    return [text + "<|im_end|>" for text in texts]


# -- what goes on ----------------------------------------------------------------------------------


def test_what_the_policy_wrote_is_never_tokenised_again():
    """Letter by letter, as no tokenizer would write it: decode and encode would give other ids."""
    t = tok()
    letters = [t.encode(c, add_special_tokens=False)[0] for c in "seven"]
    assert t.encode("seven", add_special_tokens=False) != letters
    engine = Engine([*letters, t.eos_token_id], [t.eos_token_id])
    s = GatewaySession(chat(t, engine))

    async def play():
        await ask(s, [*await ask(s, ASK), AGAIN])

    asyncio.run(play())
    (one,) = s.forest.leaf_trajectories()
    assert [x for x, m in zip(one.tokens, one.mask) if m] == [*letters, t.eos_token_id, t.eos_token_id]
    assert engine.requests[1].tokens[: len(engine.requests[0].tokens)] == engine.requests[0].tokens


def test_a_conversation_reads_as_the_template_writes_it_whole():
    """With a tool, appended turn by turn; and the same rendered at once, in a session that knows none of it."""
    call_text = "look." + call(a=3, b=4)
    policy = Policy(call_text, "seven.", "12")
    s = session(policy)

    async def play(s):
        messages = await ask(s, [SYSTEM, *ASK], [TOOL])
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "7"})
        return [*await ask(s, messages, [TOOL]), AGAIN]

    messages = asyncio.run(play(s))
    asyncio.run(ask(s, messages, [TOOL]))
    afresh = Policy("12")
    asyncio.run(ask(session(afresh), messages, [TOOL]))
    assert policy.requests[2].tokens == afresh.requests[0].tokens


def change(**new):
    return lambda message: {**message, **new}


def calls(**function):
    return lambda m: {
        **m,
        "tool_calls": [{**m["tool_calls"][0], "function": {**m["tool_calls"][0]["function"], **function}}],
    }


SAME = {
    "absent content": lambda m: {k: v for k, v in m.items() if k != "content"},
    "an empty text": change(content=""),
    "white space": change(content=" \n"),
    "parts": change(content=[{"type": "text", "text": ""}]),
    "fields of clients": change(refusal=None, annotations=[], audio=None, name=None),
    "JSON written anew": calls(arguments='{"b":4.0,\n"a": 3}'),
    "another id": lambda m: {**m, "tool_calls": [{**m["tool_calls"][0], "id": "x"}]},
}
OTHER = {
    "a thought": change(content="hm."),
    "another argument": calls(arguments='{"a": 3, "b": 5}'),
    "another tool": calls(name="sub"),
    "no call": change(tool_calls=None),
    "two calls": lambda m: {**m, "tool_calls": m["tool_calls"] * 2},
}


@pytest.mark.parametrize("how", [*SAME, *OTHER])
def test_what_clients_change_on_the_way_is_known_and_what_an_agent_changes_forks(how):
    sent = (SAME | OTHER)[how]

    async def play(s):
        messages = await ask(s, ASK, [TOOL])
        back = sent(messages[-1])
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "7"} for c in back.get("tool_calls") or []]
        await ask(s, [*ASK, back, *answers, AGAIN], [TOOL])

    asked = call(a=3, b=4)
    found = forest(Policy(asked, "seven."), play)
    assert found == ([ended(asked, "seven.")] if how in SAME else [ended(asked), ended("seven.")])


@pytest.mark.parametrize(
    "given",
    [" what is three plus four?", "what is three plus four? ", [{"type": "text", "text": "What is three plus four?"}]],
)
def test_what_was_given_is_compared_to_the_letter(given):
    async def play(s):
        messages = await ask(s, ASK)
        await ask(s, [{**messages[0], "content": given}, *messages[1:], AGAIN])

    assert forest(Policy("seven.", "12"), play) == [ended("seven."), ended("12")]


# -- what forks ------------------------------------------------------------------------------------


def test_compaction_a_sub_agent_and_samples_from_one_place():
    async def play(s):
        one = await ask(s, [SYSTEM, *ASK])
        two = await ask(s, [*one, AGAIN])
        sub = await ask(s, [{"role": "system", "content": "you search"}, *ASK])
        await ask(s, [*two, AGAIN])
        await ask(s, [*sub, AGAIN])
        await asyncio.gather(*(ask(s, [*one, {"role": "user", "content": f"try {i}"}]) for i in range(2)))
        await ask(s, [SYSTEM, {"role": "user", "content": "so far: seven twice"}])  # compacted

    policy = Policy(*"abcdefgh")
    found = forest(policy, play)
    assert found == [ended(*turns) for turns in ("abd", "ce", "af", "ag", "h")]
    assert len({r.key for r in policy.requests}) == 8


def test_samples_asked_for_at_once_share_the_turns_before():
    async def play(s):
        one = await ask(s, ASK)
        await s.generate_replies(ChatRequest(read_messages([*one, AGAIN]), n=3))

    assert forest(Policy(*"abcd"), play) == [ended("a", x) for x in "bcd"]


def test_other_tools_are_another_conversation():
    async def play(s):
        await ask(s, [*await ask(s, ASK, [TOOL]), AGAIN])

    assert forest(Policy("seven.", "12"), play) == [ended("seven."), ended("12")]


@pytest.mark.parametrize("seed", range(8))
def test_any_forest_is_recorded_as_it_grew(seed):
    """Against a tree of ten lines: an agent goes on from anywhere, and now and then rewrites what was said before."""
    draw = random.Random(seed)
    # messages that can be gone on from, and which of them are replies that a branch holds
    states = [([SYSTEM, *ASK], {})]
    expected = []

    async def play(s):
        for n in range(25):
            messages, held = draw.choice(states)
            messages = [*messages, {"role": "user", "content": f"turn {n}"}]
            spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            if spoken and draw.random() < 0.3:
                i = draw.choice(spoken)
                messages[i] = {"role": "assistant", "content": f"rewritten {n}"}
                held = {j: reply for j, reply in held.items() if j < i}
            states.append((await ask(s, messages), {**held, len(messages): n}))
            expected.append(tuple(states[-1][1].values()))

    found = forest(Policy(*(f"reply {n}." for n in range(25))), play, max_context=1 << 14)
    leaves = [p for p in expected if not any(q != p and q[: len(p)] == p for q in expected)]
    assert sorted(found) == sorted(ended(*(f"reply {n}." for n in path)) for path in leaves)


def test_a_rewritten_history_keeps_the_turns_before_and_their_record():
    policy = Policy("one", "two", "three", "four")
    s = session(policy)

    async def play():
        messages = [*await ask(s, [*await ask(s, [*await ask(s, ASK), AGAIN]), AGAIN])]
        messages[3] = {"role": "assistant", "content": "2"}
        await ask(s, [*messages, AGAIN])

    asyncio.run(play())
    old, new = s.forest.leaf_trajectories()
    n = len(policy.requests[0].tokens) + len(policy.drawn[0][1].tokens)
    for what in ("tokens", "mask", "logprobs", "versions"):
        assert getattr(old, what)[:n] == getattr(new, what)[:n]
    assert runs(old) == 3 and runs(new) == 2 and new.text == "one\nfour"
    assert "assistant\n2<|im_end|>\n" in tok().decode(new.tokens) and "assistant\nthree<|im_end|>\n" in tok().decode(
        new.tokens
    )


def test_a_fork_takes_routes_and_support_along():
    t = tok()
    talk = chat(t, Engine([7, 8, 9], [10, 11]))

    async def play():
        talk.give(ASK)
        done = await talk.reply()
        mark = talk.turn_mark
        assert done.finish_reason == "stop"
        talk.trajectory.experts = np.arange(len(talk.trajectory.tokens) - 1)[:, None, None]
        talk.trajectory.support = [None] * len(talk.trajectory.tokens)
        talk.give([AGAIN])
        await talk.reply()
        return mark

    mark = asyncio.run(play())
    twin = talk.fork(mark)
    n = len(twin.trajectory.tokens)
    assert (
        twin.trajectory.tokens == talk.trajectory.tokens[:n]
        and twin.trajectory.tokens[-3:] == [7, 8, 9]
        and twin.turn == 1
    )
    assert (
        twin.trajectory.experts.shape == (n - 1, 1, 1)
        and twin.trajectory.support == [None] * n
        and twin.turn_mark == mark
    )


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["<tool_call>\n{'name'}\n</tool_call>", call(a=1) + "<tool_call>"])
def test_a_call_that_cannot_be_read_is_text(bad):
    s = session(Policy(bad, bad))
    (reply,) = asyncio.run(s.generate_replies(ChatRequest(read_messages(ASK), [TOOL])))
    assert reply.text == bad and not reply.calls


def test_nothing_is_called_where_nothing_was_offered_or_allowed():
    asked = call(a=1, b=2)
    s = session(Policy(asked, asked))
    replies = [
        asyncio.run(s.generate_replies(ChatRequest(read_messages(ASK), tools, calls=not tools)))[0]
        for tools in ([], [TOOL])
    ]
    assert [(r.text, r.calls) for r in replies] == [(asked, [])] * 2


def test_a_thought_of_a_call_stays_a_thought():
    thought = "<think>perhaps " + call(a=9, b=9) + "</think>"
    s = session(Policy(thought + "look. " + call(a=3, b=4) + call(a=1, b=1)))
    (reply,) = asyncio.run(s.generate_replies(ChatRequest(read_messages(ASK), [TOOL])))
    assert [(name, given) for _, name, given in reply.calls] == [("add", {"a": 3, "b": 4}), ("add", {"a": 1, "b": 1})]
    assert reply.text == thought + "look." and len({id for id, _, _ in reply.calls}) == 2


def test_a_template_without_tools_tells_a_history_with_tools_in_words():
    made = Template(tokenizer("chatml"))
    history = [
        *ASK,
        {"role": "assistant", "content": "look.", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3}}}]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "seven."},
        {"role": "tool", "content": "9"},
    ]
    text = made.tokenizer.decode(made.render_opening(history))
    assert text.endswith(
        'assistant\nlook.\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nseven.<|im_end|>\n<|im_start|>user\n<tool_response>\n9\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


# -- what comes to nothing -------------------------------------------------------------------------


def test_an_engine_that_fails_leaves_no_trace_of_its_turn():
    policy = Policy("one", RuntimeError("gone"), "two")
    s = session(policy)

    async def play():
        one = await ask(s, ASK)
        with pytest.raises(RequestRefusal, match="gone"):
            await ask(s, [*one, AGAIN])
        await ask(s, [*one, AGAIN])

    asyncio.run(play())
    assert [said(t) for t in s.forest.leaf_trajectories()] == [ended("one", "two")] and isinstance(
        s.fault, RuntimeError
    )


class HangsOnce(Policy):
    """Never answers the second request."""

    async def generate(self, request):
        if len(self.requests) == 1:
            self.requests.append(request)
            await asyncio.Event().wait()
        return await super().generate(request)


def test_a_request_that_is_given_up_leaves_no_trace():
    policy = HangsOnce("one", "-", "two")
    s = session(policy)

    async def play():
        one = await ask(s, ASK)
        work = s.start_task(ask(s, [*one, AGAIN]))
        while len(policy.requests) < 2:
            await asyncio.sleep(0)
        other = await ask(s, [*one, AGAIN])
        await s.close()
        assert work.cancelled() and other[-1]["content"] == "two"

    asyncio.run(play())
    assert [said(t) for t in s.forest.leaf_trajectories()] == [ended("one", "two")], (
        "the one that was left is a part of the other"
    )


def test_replies_to_one_request_are_kept_together_or_not_at_all():
    """The agent left while the second was written: the first, which it never read, was trained, and came first, so that
    its text was what the reward judged.
    """
    policy = HangsOnce("one", "-", "two")
    s = session(policy)

    async def play():
        work = s.start_task(s.generate_replies(ChatRequest(ASK, n=2)))
        while len(policy.drawn) < 1:
            await asyncio.sleep(0)
        for _ in range(9):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([work])
        await ask(s, ASK)
        with pytest.raises(RequestRefusal, match="prompt is too long"):
            await s.generate_families([ChatRequest("what?"), ChatRequest("what is " * 9000)])

    asyncio.run(play())
    assert [said(t) for t in s.forest.leaf_trajectories()] == [ended("two")]


def test_a_full_context_is_told_and_ends_the_branch_with_length():
    size = len(tok().apply_chat_template(ASK, add_generation_prompt=True, return_dict=False))
    s = session(Policy("seven."), max_context=size + 20)

    async def play():
        one = await ask(s, ASK)
        with pytest.raises(RequestRefusal, match=f"maximum context length is {size + 20} tokens"):
            await ask(s, [*one, {"role": "user", "content": "look again. " * 20}])

    asyncio.run(play())
    (one,) = s.forest.leaf_trajectories()
    assert s.full and one.finish_reason == "length" and one.mask[-1] and runs(one) == 1


def test_what_a_template_cannot_write_is_the_requests_fault():
    t = tokenizer("alternating")
    engine = Engine([*t.encode("seven", add_special_tokens=False), t.eos_token_id])
    s = GatewaySession(chat(t, engine))

    async def play():
        for strange in ([SYSTEM, *ASK], [*ASK, *ASK]):
            with pytest.raises(RequestRefusal, match="cannot be written as tokens") as seen:
                await ask(s, strange)
            assert seen.value.status == 400
        await ask(s, ASK)

    asyncio.run(play())
    assert s.fault is None and len(s.forest.leaf_trajectories()) == len(engine.requests) == 1
