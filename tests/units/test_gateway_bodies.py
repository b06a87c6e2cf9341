"""Bodies that an agent should not send: each is answered or refused, none is a fault of the gateway."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx2
import pytest

from kits.chat import chat
from kits.gateway import ADD, TOOL, Policy, call, tok
from kits.sweeps import covering
from rondel.generate.envs.gateway.app import build_app
from rondel.generate.envs.gateway.session import GatewaySession

CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": TALK, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 5, "n": 1, "stop": ["x"], "logprobs": True, "stream": True,
        "stream_options": {"include_usage": True}, "logit_bias": {"1": 1},
    },
    "/v1/completions": {"prompt": ["abc", [1, 2]], "max_tokens": 3, "logprobs": 1, "stop": "x", "stream": True, "stream_options": {"include_usage": True}},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
        "instructions": "i", "tools": [{"type": "function", **ADD}], "previous_response_id": None, "max_output_tokens": 5, "stream": True,
    },
    "/v1/messages": {
        "max_tokens": 5, "system": "s", "tools": [{"name": "add", "input_schema": {}}], "stop_sequences": ["x"], "stream": True,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]}]},
        ],
    },
    "/v1/messages/count_tokens": {"system": "s", "messages": [{"role": "user", "content": "u"}], "tools": [{"name": "add", "input_schema": {}}]},
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1 << 70, 1.5, -1e308, "", "\ud83d", "\0", "\x1b[2J", "<|im_start|>system", "9" * 5000,
    [], [None], [1], ["a"] * 300, [[]], [{}], {}, {"\ud83d": "\ud83d"}, {"type": 7}, {"type": "text", "text": None}, {"a": {"b": [1]}},
]  # fmt: skip
RAW = [
    b"",
    b"[",
    b"\xff",
    b'"\xed\xa0\x80"',
    b'{"a":' * 3000,
    b"[]",
    b"9" * 6000,
    b'{"x": NaN}',
    b'{"messages": []}',
    b"{}",
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in it."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(inner, (*at, key))


def with_odd(body: Any, at: tuple[Any, ...], odd: Any) -> Any:
    body = found = copy.deepcopy(body)
    for key in at[:-1]:
        found = found[key]
    found[at[-1]] = odd
    return body


def bodies_for(path: str) -> list[bytes]:
    """What is no JSON, and the good body with something odd in every place."""
    whole = BODIES[path]
    made = [with_odd(whole, at, odd) for at in places(whole) for odd in ODD]
    return [*RAW, *(json.dumps(body).encode() for body in made)]


async def asked(path: str, bodies: list[bytes]) -> list[tuple[bytes, int, str]]:
    policy = Policy(lambda text: call(a=1, b=2) if len(policy.requests) % 3 == 0 else "seven.")
    sessions: dict[str, GatewaySession] = {}
    out = []
    transport = httpx2.ASGITransport(app=build_app(sessions, lambda name, rule: None))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for body in bodies:
            sessions["k"] = GatewaySession(chat(tok(), policy, max_tokens=8, max_context=4096))
            reply = await client.post(path, content=body, headers={"x-api-key": "k"})
            out.append((body[:300], reply.status_code, reply.text[:300]))
            assert sessions["k"].fault is None
    return out


# each odd value and each place: of every body, a third of the pairs
@pytest.mark.slow
@pytest.mark.parametrize(("path", "every"), covering(product(BODIES, [1, 3]), [(path, 3) for path in BODIES]))
def test_no_body_is_a_fault_of_the_gateway(path, every):
    pairs = bodies_for(path)[len(RAW) :: every]
    assert len(ODD) % 3, "or some values would never have their turn"
    answers = asyncio.run(asked(path, [json.dumps(BODIES[path]).encode(), *RAW, *pairs]))
    assert answers[0][1] == 200, answers[0]
    assert [answer for answer in answers if answer[1] not in (200, 400)] == []
    assert Counter(status for _, status, _ in answers)[400] > len(RAW)


@pytest.mark.parametrize("wrong", [True, 7, "x", [None], ["x"], [[]], [{}], [{"function": "add"}], {"function": {}}])
def test_calls_of_a_wrong_type_are_named(wrong):
    talk = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "tool_calls": wrong},
        {"role": "user", "content": "u"},
    ]
    ((_, status, said),) = asyncio.run(asked("/v1/chat/completions", [json.dumps({"messages": talk}).encode()]))
    assert status == 400 and "messages[1].tool_calls must be a list of objects" in said


def test_nothing_to_count_and_ids_of_half_a_character():
    count = [
        json.dumps(body).encode() for body in ({}, {"messages": []}, {"messages": [{"role": "user", "content": "u"}]})
    ]
    assert [status for _, status, _ in asyncio.run(asked("/v1/messages/count_tokens", count))] == [400, 400, 200]
    before = json.dumps({"input": "u", "previous_response_id": "\ud83d"}).encode()
    ((_, status, said),) = asyncio.run(asked("/v1/responses", [before]))
    assert status == 400 and "is not known here" in said
