"""`rondel serve` as a process on loopback: what clients of OpenAI and SGLang use, what
they do wrong, and what they do to it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import itertools
import json
import pickle
import re
import shutil
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from kits.engine import SIZE, engine, plain_logits, plain_logprobs, tiny, twin
from kits.serve import JSON, Server, until
from kits.sweeps import covering
from rondel.cli import main
from rondel.core.errors import UserError
from rondel.core.types import Request, Sampling, sample_key
from rondel.generate.engine.server.app import CONTROL, FACTS, GENERATING
from rondel.models import names
from rondel.models.random_model import CHAT
from rondel.models.save import save_model

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai")
CALLS = (
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + (c['function'] | tojson) + '</tool_call>' }}{% endfor %}"
)
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT.replace(
    "+ m['content'] }}", "+ m['content'] }}" + CALLS
)
KEY = "k-7c1"
ROOT = Path(__file__).parents[2]


def trained(loaded, seed):
    """Other weights in other memory."""
    other, g = twin(loaded), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1 + 0.2 * torch.randn(p.shape, generator=g))
    return other


@pytest.fixture(scope="module")
def model():
    loaded = tiny("llama", **{**SIZE, "max_position_embeddings": 4096})
    loaded.tokenizer.chat_template = TEMPLATE
    return loaded


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(model, path)
    return path


@pytest.fixture(scope="module")
def running(folder, tmp_path_factory):
    server = Server(folder, tmp_path_factory.mktemp("server"), "--kv-pages", "20000")
    yield server
    server.stop()


@pytest.fixture
def server(running):
    """The one process of these tests; each leaves it as it found it, and it may not have crashed inside."""
    before = len(running.said())
    yield running
    running.ok("/continue_generation")
    running.idle()
    assert running.process.poll() is None and "Traceback" not in running.said()[before:], running.said()[before:][
        -3000:
    ]


@pytest.fixture
def first(server, folder):
    """Afterwards the weights that it began with serve again."""
    yield
    server.ok("/update_weights_from_disk", model_path=str(folder))


def expected(model, prompt, *, seed, n=1, **sampling):
    """What the engine itself draws for this prompt and seed."""

    async def ask():
        e = engine(model)
        requests = [Request(list(prompt), Sampling(**sampling), key=sample_key(seed, 0, j)) for j in range(n)]
        return await asyncio.gather(*(e.generate(r) for r in requests))

    return asyncio.run(ask())


# -- OpenAI's client -------------------------------------------------------------------------------


def test_completions_are_what_the_engine_draws(server, model):
    prompt = model.tokenizer.encode("Once upon")
    want = expected(model, prompt, seed=7, n=3, max_tokens=20, temperature=0.7)
    for given in ("Once upon", prompt):
        got = server.client.completions.create(
            model="tiny",
            prompt=given,
            n=3,
            seed=7,
            max_tokens=20,
            temperature=0.7,
            logprobs=0,
            extra_body={"return_token_ids": True},
        )
        assert got.prompt_token_ids == prompt and str(got.weight_version) == server.info()["weight_version"]
        for choice, c in zip(got.choices, want, strict=True):
            assert choice.token_ids == c.tokens and choice.finish_reason == c.finish_reason
            assert choice.text == model.tokenizer.decode(c.tokens, skip_special_tokens=True)
            assert choice.logprobs.token_logprobs == pytest.approx(c.logprobs, abs=1e-5)
            assert len(choice.weight_versions) == len(c.tokens)
        assert got.usage.prompt_tokens == len(prompt) and got.usage.completion_tokens == sum(
            len(c.tokens) for c in want
        )
    assert got.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1


def test_a_chat_at_once_and_as_a_stream(server):
    ask = dict(
        model="tiny",
        messages=[{"role": "user", "content": "Say hello"}],
        n=2,
        seed=3,
        max_completion_tokens=25,
        logprobs=True,
        top_logprobs=0,
    )
    whole = server.client.chat.completions.create(**ask)
    texts, logprobs, reasons, usage = ["", ""], [[], []], [None, None], None
    for chunk in server.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += [t.logprob for t in choice.logprobs.content] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices] and texts[0] != texts[1]
    assert reasons == [c.finish_reason for c in whole.choices]
    for mine, choice in zip(logprobs, whole.choices):
        assert mine == pytest.approx([t.logprob for t in choice.logprobs.content], abs=1e-5) and all(
            lp <= 0 for lp in mine
        )
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, logprobs))


def test_a_stream_of_completions_is_the_text(server):
    ask = dict(model="tiny", prompt=["ab", "abc"], seed=4, max_tokens=12, temperature=1.5)
    pieces = ["", ""]
    for chunk in server.client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [c.text for c in server.client.completions.create(**ask).choices] and all(pieces)


def test_stop_strings_end_a_text_before_them(server, model):
    ask = dict(
        model="tiny", prompt="abc", seed=11, max_tokens=40, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    whole = server.client.completions.create(**ask).choices[0]
    text, stop = whole.text, whole.text[9:12]
    cut = text.index(stop)
    needed = next(n for n in range(41) if stop in model.tokenizer.decode(whole.token_ids[:n], skip_special_tokens=True))
    for stops in (stop, ["never there", stop]):
        got = server.client.completions.create(**ask, stop=stops)
        assert (got.choices[0].text, got.choices[0].finish_reason) == (text[:cut], "stop")
        assert got.choices[0].token_ids == whole.token_ids[:needed], "it went on after the stop string"
        assert (
            "".join(c.choices[0].text for c in server.client.completions.create(**ask, stop=stops, stream=True))
            == text[:cut]
        )


def test_a_special_token_is_a_stop(server, model):
    reply = server.ok(
        "/generate",
        text="abc",
        sampling_params={"max_new_tokens": 3000, "stop": ["<user>"], "sampling_seed": 1, "temperature": 1.5},
    )
    assert reply["meta_info"]["finish_reason"]["matched"] in (
        model.tokenizer.convert_tokens_to_ids("<user>"),
        model.tokenizer.eos_token_id,
    )


def test_without_a_seed_two_answers_differ_and_greedy_ones_do_not(server):
    ask = dict(model="tiny", prompt="abc", max_tokens=30)
    a, b = (server.client.completions.create(**ask).choices[0].text for _ in range(2))
    assert a != b
    a, b = (server.client.completions.create(**ask, temperature=0).choices[0].text for _ in range(2))
    assert a == b


def test_likeliest_tokens_are_those_of_the_model(server, model):
    prompt = model.tokenizer.encode("abc")
    ask = dict(
        model="tiny",
        prompt=prompt,
        max_tokens=4,
        temperature=0,
        logprobs=3,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    got = server.client.completions.create(**ask).choices[0]
    logp = plain_logits(model, prompt + got.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
    best = logp.topk(3)
    assert got.logprobs.token_logprobs == pytest.approx(best.values[:, 0].tolist(), abs=1e-4)
    for top, ids, values in zip(got.logprobs.top_logprobs, best.indices.tolist(), best.values.tolist()):
        assert top == pytest.approx({model.tokenizer.decode([i]): v for i, v in zip(ids, values)}, abs=1e-4)
    streamed = [c.choices[0].logprobs for c in server.client.completions.create(**ask, stream=True)]
    tops = [t for lp in streamed for t in lp.top_logprobs or []]  # of a cached prompt, now
    assert all(
        one == pytest.approx(other, abs=1e-5) for one, other in zip(tops, got.logprobs.top_logprobs, strict=True)
    )
    chat = server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=3, logprobs=True, top_logprobs=5
    )
    assert [len(t.top_logprobs) for t in chat.choices[0].logprobs.content] == [5] * chat.usage.completion_tokens
    given = {
        "input_ids": prompt,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 2},
    }
    meta = server.ok("/generate", **given)["meta_info"]
    read = [lp for lp, _, _ in meta["input_token_logprobs"][1:]]
    assert read == pytest.approx(plain_logprobs(model, prompt), abs=1e-4) and len(meta["output_top_logprobs"][0]) == 2
    with pytest.raises(openai.BadRequestError, match="in one scale"):
        server.client.completions.create(model="tiny", prompt="a", logprobs=2, temperature=0.7)


def test_penalties_bias_and_schemas_reach_the_engine(server, model):
    prompt = model.tokenizer.encode("abcab")
    ways = {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {42: 3.0},
        "min_p": 0.01,
        "top_k": 50,
    }
    (c,) = expected(model, prompt, seed=2, max_tokens=20, min_tokens=5, **ways)
    body = ways | {
        "logit_bias": {"42": 3},
        "model": "tiny",
        "prompt": prompt,
        "seed": 2,
        "max_tokens": 20,
        "min_tokens": 5,
    }
    assert server.ok("/v1/completions", **body, return_token_ids=True)["choices"][0]["token_ids"] == c.tokens
    forced = (
        server.client.completions.create(model="tiny", prompt="a", max_tokens=3, logit_bias={"42": 100}, temperature=0)
        .choices[0]
        .text
    )
    assert forced == model.tokenizer.decode([42] * 3)
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    chat = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        response_format=wanted,
        max_tokens=200,
        seed=1,
        temperature=0.3,
    )
    assert chat.choices[0].finish_reason == "length" or type(json.loads(chat.choices[0].message.content)["ok"]) is bool
    reply = server.ok("/generate", text="a", sampling_params={"regex": "(yes|no)", "max_new_tokens": 9})
    assert reply["text"] in ("yes", "no")
    for bad in (
        {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
        {"type": "xml"},
        {"type": "json_schema"},
    ):
        assert (
            server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], response_format=bad)[0]
            == 400
        )
    assert server.post("/generate", text="a", sampling_params={"regex": "("})[0] == 400


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


def test_an_answer_that_must_call_calls_at_once_and_as_a_stream(server):
    """A random model, which would never do it by itself."""
    ask = dict(
        model="tiny", messages=[{"role": "user", "content": "1 + 2?"}], max_tokens=200, tools=[ADD, CLOCK], seed=3
    )
    make = server.client.chat.completions.create
    for choice, known, parallel in (
        ("required", {"add", "clock"}, False),
        ({"type": "function", "function": {"name": "add"}}, {"add"}, True),
    ):
        (whole,) = make(**ask, tool_choice=choice, parallel_tool_calls=parallel).choices
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        (call,) = whole.message.tool_calls
        given = json.loads(call.function.arguments)
        assert call.type == "function" and call.function.name in known
        assert given == {} if call.function.name == "clock" else (0 <= given["a"] <= 99 and given["b"] in ("x", "y"))
        chunks = list(make(**ask, tool_choice=choice, parallel_tool_calls=parallel, stream=True))
        (told,) = [c.choices[0] for c in chunks if c.choices[0].delta.tool_calls]
        assert not any(c.choices[0].delta.content for c in chunks) and told.finish_reason == "tool_calls"
        assert told.delta.tool_calls[0].function == type(told.delta.tool_calls[0].function)(
            **call.function.model_dump()
        )
    said = [
        *ask["messages"],
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    assert make(**{**ask, "messages": said, "max_tokens": 4}).choices[0].finish_reason in ("length", "stop")
    for wrong, param in (
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            make(**{**ask, **wrong})
        assert refused.value.param == param


def test_anthropics_client_and_responses_are_answered_too(server, model):
    """A tool that must be called, its answer, streams, tokens counted, a conversation that goes on, and refusals in each shape."""
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0)
    tool = {"name": "add", "description": "a + b", "input_schema": ADD["function"]["parameters"]}
    ask = dict(model="tiny", max_tokens=200, messages=[{"role": "user", "content": "1 + 2?"}], tools=[tool])
    got = client.messages.create(**ask, tool_choice={"type": "tool", "name": "add"}, extra_body={"temperature": 0.5})
    (call,) = got.content
    assert got.stop_reason == "tool_use" and call.name == "add" and call.input["b"] in ("x", "y")
    assert client.messages.count_tokens(
        **{k: ask[k] for k in ("model", "messages", "tools")}
    ).input_tokens == got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0)
    answered = [
        *ask["messages"],
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]},
    ]
    said = client.messages.create(**{**ask, "messages": answered, "max_tokens": 5, "extra_body": {"temperature": 0}})
    with client.messages.stream(
        **{**ask, "messages": answered, "max_tokens": 5, "extra_body": {"temperature": 0}}
    ) as stream:
        assert stream.get_final_message().content[0].text == said.content[0].text and said.usage.output_tokens == 5
    for wrong in (
        {"tool_choice": {"type": "tool", "name": "sub"}},
        {"extra_body": {"temperature": 3}},
        {"extra_body": {"beams": 3}},
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**{**ask, **wrong})
        assert refused.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ask, "model": "other"})

    create = server.client.responses.create
    function = {"type": "function", **ADD["function"]}
    first = create(
        model="tiny",
        input="1 + 2?",
        tools=[function],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments)["b"] in ("x", "y")
    output = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    then = create(model="tiny", input=output, previous_response_id=first.id, max_output_tokens=4, temperature=0)
    assert then.status == "incomplete" and then.usage.output_tokens == 4
    events = list(create(model="tiny", input="hi", max_output_tokens=4, temperature=0, stream=True))
    assert (
        events[-1].response.output_text
        == create(model="tiny", input="hi", max_output_tokens=4, temperature=0).output_text
    )
    with pytest.raises(openai.BadRequestError):
        create(model="tiny", input="hi", previous_response_id="resp_unknown")


def test_a_prompt_is_told_with_its_logprobs(server, model):
    """As evaluations of multiple choice read them: echo, one token or none, the likeliest beside each."""
    prompt = model.tokenizer.encode("Once upon a time")
    want = plain_logits(model, prompt).log_softmax(-1)
    create = server.client.completions.create
    for n in (0, 1):
        got = create(
            model="tiny", prompt=[prompt, prompt[:5]], echo=True, max_tokens=n, logprobs=2, temperature=0, seed=1
        )
        for choice, tokens in zip(got.choices, (prompt, prompt[:5])):
            told = choice.logprobs
            assert len(told.token_logprobs) == len(told.tokens) == len(told.top_logprobs) == len(tokens) + n
            assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
            values = [float(want[i, t]) for i, t in enumerate(tokens[1:])]
            assert told.token_logprobs[1 : len(tokens)] == pytest.approx(values, abs=1e-4)
            best = [row.max().item() for row in want[: len(tokens) - 1]]
            assert [max(top.values()) for top in told.top_logprobs[1 : len(tokens)]] == pytest.approx(best, abs=1e-4)
            assert "".join(told.tokens) == choice.text or n
            assert got.usage.completion_tokens == 2 * n
    again = server.ok("/v1/completions", model="tiny", prompt=prompt, max_tokens=1, prompt_logprobs=1)["choices"][0]
    rows = again["prompt_logprobs"]
    assert rows[0] is None and [row[str(t)]["logprob"] for row, t in zip(rows[1:], prompt[1:])] == pytest.approx(
        [float(want[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-4
    )


def test_tokens_of_texts_and_chats_and_the_version(server, model):
    text = "Once upon"
    told = server.ok("/tokenize", prompt=text, return_token_strs=True)
    assert told["tokens"] == model.tokenizer.encode(text) and told["count"] == len(told["tokens"]) == len(
        told["token_strs"]
    )
    assert server.ok("/detokenize", tokens=told["tokens"])["prompt"] == model.tokenizer.decode(told["tokens"])
    chat = [{"role": "user", "content": "hi"}]
    want = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert server.ok("/detokenize", tokens=server.ok("/tokenize", messages=chat)["tokens"])["prompt"] == want
    assert server.get("/version")["version"]
    goes_on = [*chat, {"role": "assistant", "content": "Well, "}]
    tokens = server.ok("/tokenize", messages=goes_on, continue_final_message=True, add_generation_prompt=False)[
        "tokens"
    ]
    assert model.tokenizer.decode(tokens) == want + "Well, "
    status, said = server.post("/tokenize", messages=chat, continue_final_message=True, add_generation_prompt=False)
    assert status == 400 and "assistant" in said["error"]["message"]
    assert server.post("/detokenize", tokens=[1 << 29])[0] == 400


def test_an_answer_has_the_form_that_is_asked_for(server):
    ask = dict(model="tiny", messages=[{"role": "user", "content": "?"}], max_tokens=60, seed=2)
    for wanted, pattern in (
        ({"regex": "[0-9]{3}"}, r"\d{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 2]}},
                    "required": ["a"],
                    "additionalProperties": False,
                }
            },
            r'\{ ?"a": ?[12] ?\}',
        ),
    ):
        got = server.client.chat.completions.create(**ask, extra_body={"structured_outputs": wanted}).choices[0]
        assert got.finish_reason == "stop" and re.fullmatch(pattern, got.message.content), got.message.content
    status, said = server.post("/v1/chat/completions", **ask, structured_outputs={"regex": "a", "choice": ["b"]})
    assert status == 400 and "give one" in said["error"]["message"]


def test_tools_reach_the_template(server):
    ask = dict(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    plain = server.client.chat.completions.create(**ask).usage.prompt_tokens
    assert server.client.chat.completions.create(**ask, tools=tools).usage.prompt_tokens == plain + len(
        json.dumps(tools)
    )
    assert server.client.chat.completions.create(**ask, tools=tools, tool_choice="none").usage.prompt_tokens == plain


def test_the_snippet_of_the_docs_runs(server, capsys):
    page = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")
    (snippet,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "from openai import OpenAI" in b]
    exec(snippet.replace(":8000", f":{server.port}").replace('"smollm2-135m"', '"tiny"'), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("[")


def test_errors_have_openais_shape(server):
    ask = dict(model="tiny", prompt="abc")
    with pytest.raises(openai.NotFoundError) as error:
        server.client.completions.create(**ask | {"model": "gpt-5"})
    assert error.value.code == "model_not_found" and "'tiny'" in error.value.message
    for more, param in [
        ({"n": 0}, "n"), ({"n": 10**30}, "n"), ({"temperature": -1}, "temperature"), ({"temperature": 1e-300}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 5000}, "max_tokens"), ({"frequency_penalty": 5}, "frequency_penalty"),
        ({"stop": [""]}, "stop"), ({"extra_body": {"top_kk": 3}}, "top_kk"), ({"extra_body": {"min_tokens": 99}}, None), ({"echo": "yes"}, "echo"),
    ]:  # fmt: skip
        with pytest.raises(openai.BadRequestError) as error:
            server.client.completions.create(**ask | more)
        assert (
            error.value.type == "invalid_request_error"
            and error.value.param == param
            and (param or "min_tokens") in error.value.message
        )
    with pytest.raises(openai.BadRequestError, match="exceed the 4096"):
        server.client.completions.create(model="tiny", prompt=[5] * 5000)
    with pytest.raises(
        openai.BadRequestError,
        match=r"messages\[1\].content has a part of type .image_url. with the address .x.; an image is sent whole",
    ):
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        server.client.chat.completions.create(model="tiny", messages=[{"role": "system", "content": "s"}, picture])
    assert server.client.completions.create(
        **ask, max_tokens=1, user="me", extra_body={"metadata": {"a": "b"}, "frequency_penalty": 0}
    )
    assert [m.id for m in server.client.models.list()] == ["tiny"] and server.client.models.retrieve(
        "tiny"
    ).max_model_len == 4096


def test_what_is_not_there_says_what_is(server):
    status, _, body = server.raw("GET", "/v1/embeddings")
    told = json.loads(body)["error"]["message"]
    assert status == 404 and all(
        path in told for path in [*CONTROL, *FACTS, *GENERATING, "/health", "/metrics", "/v1/models"]
    )
    status, headers, _ = server.raw("GET", "/v1/completions")
    assert status == 405 and headers["Allow"] == "POST"


# -- SGLang's names --------------------------------------------------------------------------------


def test_generate_in_sglangs_shape(server, model):
    prompt = model.tokenizer.encode("abc")
    (c,) = expected(model, prompt, seed=5, max_tokens=8, ignore_eos=True)
    params = {"max_new_tokens": 8, "sampling_seed": 5, "ignore_eos": True}
    for given in ({"text": "abc"}, {"input_ids": prompt}):
        one = server.ok("/generate", **given, sampling_params=params, return_logprob=True, rid="r1")
        assert (
            one["output_ids"] == c.tokens
            and one["meta_info"]["id"] == "r1"
            and one["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
        )
        assert [t for _, t, _ in one["meta_info"]["output_token_logprobs"]] == c.tokens
        assert [lp for lp, _, _ in one["meta_info"]["output_token_logprobs"]] == pytest.approx(c.logprobs, abs=1e-5)
    many = server.ok("/generate", text=["abc", "d"], sampling_params={**params, "n": 2})
    assert [r["meta_info"]["prompt_tokens"] for r in many] == [3, 3, 1, 1] and many[0]["output_ids"] == c.tokens
    _, headers, body = server.raw(
        "POST", "/generate", json.dumps({"text": "abc", "sampling_params": params, "stream": True}), JSON
    )
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert headers["content-type"].startswith("text/event-stream") and lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["text"] == one["text"] and json.loads(lines[-2])["output_ids"] == c.tokens


class Streaming(threading.Thread):
    """A request to /generate that is being read in the background."""

    def __init__(self, server, *, rid="", n=1, **params):
        super().__init__(daemon=True)
        body = {
            "text": "abc",
            "rid": rid,
            "stream": True,
            "sampling_params": {"ignore_eos": True, "temperature": 1.0, "n": n, **params},
        }
        self.link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self.link.request("POST", "/generate", json.dumps(body), JSON)
        self.last, self.count = None, 0
        self.start()

    def run(self):
        with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            reply = self.link.getresponse()
            for line in reply:
                if line.startswith(b"data: {"):
                    self.last = json.loads(line[6:])
                    self.count += 1

    def wrote(self, n):
        until(lambda: self.count >= n, 20)
        return self

    def end(self):
        self.join(240)
        assert not self.is_alive()
        return self.last


def test_a_paused_answer_goes_on_under_new_weights(server, first, model, tmp_path):
    save_model(trained(model, 1), tmp_path / "new")
    old = int(server.info()["weight_version"])
    answer = Streaming(server, max_new_tokens=250).wrote(20)
    assert server.ok("/pause_generation", mode="in_place")["parked"] == 1
    time.sleep(0.2)
    stands = answer.count
    time.sleep(0.2)
    assert answer.count == stands and server.info()["state"] == "held"
    reply = server.ok("/update_weights_from_disk", model_path=str(tmp_path / "new"), flush_cache=False)
    assert reply["weight_version"] == server.get("/get_weight_version")["weight_version"] == str(old + 1)
    assert answer.is_alive() and answer.count == stands and server.info()["state"] == "held"
    server.ok("/continue_generation")
    done = answer.end()
    versions = done["meta_info"]["weight_versions"]
    assert len(done["output_ids"]) == 250 and done["meta_info"]["finish_reason"]["type"] == "length"
    assert versions == [old] * stands + [old + 1] * (250 - stands)


def test_new_weights_from_a_folder_draw_what_they_must(server, first, model, tmp_path):
    prompt, params = model.tokenizer.encode("abcdef"), {"max_new_tokens": 12, "sampling_seed": 5}
    other = trained(model, 2)
    save_model(other, tmp_path / "new")
    before = server.ok("/generate", text="abcdef", sampling_params=params)
    version = int(before["meta_info"]["weight_version"])
    reply = server.ok("/update_weights_from_disk", model_path=str(tmp_path / "new"), weight_version=str(version + 5))
    assert reply["success"] is True and reply["weight_version"] == str(version + 5)
    after = server.ok("/generate", text="abcdef", sampling_params=params)
    (c,) = expected(other, prompt, seed=5, max_tokens=12)
    assert after["output_ids"] == c.tokens != before["output_ids"]
    assert after["meta_info"]["weight_version"] == str(version + 5) and after["meta_info"]["cached_tokens"] == 0


def test_tensors_travel_as_safetensors_and_never_as_pickle(server, first, model):
    other = trained(model, 3)
    weights = {n: t.contiguous() for n, t in names.named_weights(other.model)}
    blob, params = safetensors.torch.save(weights), {"max_new_tokens": 12, "sampling_seed": 5}
    (c,) = expected(other, model.tokenizer.encode("abc"), seed=5, max_tokens=12)
    octets = {"Content-Type": "application/octet-stream"}
    version = int(server.info()["weight_version"])
    status, _, body = server.raw("POST", f"/update_weights_from_tensor?weight_version={version + 2}", blob, octets)
    assert status == 200 and json.loads(body)["weight_version"] == str(version + 2), body
    assert server.ok("/generate", text="abc", sampling_params=params)["output_ids"] == c.tokens
    reply = server.ok("/update_weights_from_tensor", serialized_named_tensors=[base64.b64encode(blob).decode()])
    assert reply["weight_version"] == str(version + 3)
    assert server.ok("/generate", text="abc", sampling_params=params)["output_ids"] == c.tokens
    few = safetensors.torch.save(dict(itertools.islice(weights.items(), 3)))
    halved = safetensors.torch.save({n: t.bfloat16() for n, t in weights.items()})
    for bad, says in [
        (pickle.dumps(weights), "safetensors"),
        (few, "missing"),
        (halved, "dtype"),
        (blob[:-9], "safetensors"),
        (b"", "safetensors"),
    ]:
        status, _, body = server.raw("POST", "/update_weights_from_tensor", bad, octets)
        assert status == 400 and json.loads(body)["success"] is False and says in json.loads(body)["message"]
    for bad in (["not base64!"], [], ["YQ==", "YQ=="], [7], [base64.b64encode(pickle.dumps(weights)).decode()]):
        assert server.post("/update_weights_from_tensor", serialized_named_tensors=bad)[0] == 400
    assert server.ok("/generate", text="abc", sampling_params=params)["output_ids"] == c.tokens
    assert server.info()["weight_version"] == str(version + 3)


def spoil(what, path):
    file = path / "model.safetensors"
    data = safetensors.torch.load_file(file)
    name = next(n for n in data if n.endswith("q_proj.weight"))
    if what == "cut short":
        file.write_bytes(file.read_bytes()[:-1000])
    elif what == "no safetensors":
        file.rename(path / "pytorch_model.bin")
    elif what == "a lying header":
        file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])
    elif what == "another model":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    else:
        if what == "one missing":
            data.pop(name)
        elif what == "one unknown":
            data["model.extra.weight"] = torch.zeros(3)
        elif what == "another shape":
            data[name] = data[name][:-1].contiguous()
        elif what == "not a number":
            data[name][3, 4] = float("nan")
        safetensors.torch.save_file(data, file, metadata={"format": "pt"})


FAULTS = {
    "cut short": "reading the weights",
    "no safetensors": "no folder with .safetensors",
    "a lying header": "reading the weights",
    "another model": "rms_norm_eps = 0.5",
    "one missing": "missing keys",
    "one unknown": "unexpected keys",
    "another shape": "mismatched keys",
    "not a number": "holds NaN",
}


def test_a_bad_folder_leaves_the_old_version_serving(server, model, folder, tmp_path):
    params = {"max_new_tokens": 12, "sampling_seed": 5}
    before = server.ok("/generate", text="abc", sampling_params=params)
    other = trained(model, 4)
    for what, says in FAULTS.items():
        bad = tmp_path / what.replace(" ", "-")
        save_model(other, bad)
        spoil(what, bad)
        status, reply = server.post("/update_weights_from_disk", model_path=str(bad))
        assert (
            status == 400
            and reply["success"] is False
            and says in reply["message"]
            and "goes on serving" in reply["message"]
        ), (
            what,
            reply,
        )
        shutil.rmtree(bad)
    for path in ("/no/such/folder", str(tmp_path), "", "hub/id", "\0", "x" * 100_000):
        assert server.post("/update_weights_from_disk", model_path=path)[0] == 400
    version = int(before["meta_info"]["weight_version"])
    for odd in ("v2", -1, 1.5, True, 10**30):
        assert server.post("/update_weights_from_disk", model_path=str(folder), weight_version=odd)[0] == 400
    after = server.ok("/generate", text="abc", sampling_params=params)
    assert (after["output_ids"], after["meta_info"]["weight_version"]) == (before["output_ids"], str(version))


def test_updates_beside_requests(server, first, folder, model, tmp_path):
    """Every answer is whole, and its versions only rise."""
    save_model(trained(model, 5), tmp_path / "new")
    answers = [Streaming(server, max_new_tokens=80 + 20 * i) for i in range(4)]
    for i in range(6):
        server.ok(
            "/update_weights_from_disk", model_path=str(tmp_path / "new" if i % 2 else folder), flush_cache=bool(i % 3)
        )
    for i, answer in enumerate(answers):
        done = answer.end()
        versions = done["meta_info"]["weight_versions"]
        assert len(versions) == len(done["output_ids"]) == 80 + 20 * i and versions == sorted(versions)


def test_pause_by_drain_and_by_abort(server):
    answers = [Streaming(server, max_new_tokens=100).wrote(3) for _ in range(2)]
    server.ok("/pause_generation", mode="drain")
    assert [len(a.end()["output_ids"]) for a in answers] == [100, 100] and server.info()["state"] == "held"
    server.ok("/continue_generation")
    answer = Streaming(server, max_new_tokens=3000).wrote(3)
    server.ok("/pause_generation")  # SGLang's default is abort
    done = answer.end()
    assert done["meta_info"]["finish_reason"]["type"] == "abort"
    assert 3 <= len(done["output_ids"]) == len(done["meta_info"]["weight_versions"]) < 3000


def test_a_pause_whose_controller_is_gone_ends(server):
    server.ok("/pause_generation", mode="hold", lease=0.4)
    began = time.monotonic()
    assert (
        len(server.ok("/generate", text="abc", sampling_params={"max_new_tokens": 2, "ignore_eos": True})["output_ids"])
        == 2
    )
    assert 0.2 < time.monotonic() - began < 10
    assert "nobody resumed it" in server.said()


def test_one_request_is_aborted_by_its_name(server):
    one, other = (Streaming(server, rid=rid, n=2, max_new_tokens=1500).wrote(4) for rid in ("one", "other"))
    assert server.ok("/abort_request", rid="nobody")["aborted"] == 0
    assert server.ok("/abort_request", rid="one")["aborted"] == 2
    assert one.end()["meta_info"]["finish_reason"]["type"] == "abort" and other.is_alive()
    assert server.ok("/abort_request", abort_all=True)["aborted"] == 2
    assert other.end()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.post("/abort_request")[0] == 400


def test_cache_and_memory_are_given_back(server):
    params = {"max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True}
    want = server.ok("/generate", text="abcdefgh", sampling_params=params)["output_ids"]
    assert server.ok("/generate", text="abcdefgh", sampling_params=params)["meta_info"]["cached_tokens"] == 7
    assert server.raw("GET", "/flush_cache")[0] == 200
    pages = server.info()["pages"]
    assert pages["free"] == pages["total"]
    assert server.ok("/generate", text="abcdefgh", sampling_params=params)["meta_info"]["cached_tokens"] == 0
    answer = Streaming(server, max_new_tokens=300).wrote(3)
    for path in ("/flush_cache", "/release_memory_occupation"):
        status, reply = server.post(path)
        assert status == 409 and "pause the engine first" in reply["message"]
    server.ok("/pause_generation", mode="retract")
    assert server.ok("/release_memory_occupation", tags=["kv_cache"])["freed_bytes"] > 0
    assert server.info()["state"] == "asleep" and server.raw("GET", "/health_generate")[0] == 503
    server.ok("/continue_generation")
    server.ok("/resume_memory_occupation", tags=["kv_cache"])
    assert len(answer.end()["output_ids"]) == 300
    assert server.ok("/generate", text="abcdefgh", sampling_params=params)["output_ids"] == want
    for tags in (["kv"], "kv_cache", [["kv_cache"]], [None], 3):
        assert server.post("/release_memory_occupation", tags=tags)[0] == 400


def test_health_and_metrics(server):
    from prometheus_client.parser import text_string_to_metric_families as families

    server.ok("/generate", text="abc", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    assert server.get("/health") == {"status": "serving"} and len(server.get("/health_generate")["tokens"]) == 1
    rows = {
        (s.name, *s.labels.values()): s.value
        for f in families(server.raw("GET", "/metrics")[2].decode())
        for s in f.samples
    }
    assert rows["rondel_running",] == rows["rondel_open",] == 0 and rows["rondel_state", "serving"] == 1
    assert rows["rondel_pages", "free"] + rows["rondel_pages", "cached"] == rows["rondel_pages", "total"]
    assert rows["rondel_tokens_total", "generated"] >= 5 and rows["rondel_requests_total", "/generate", "200"] >= 1
    assert server.get("/get_model_info")["weight_version"] == str(int(rows["rondel_weight_version",]))


# -- what clients do wrong, and to it --------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "a"}]
GOOD = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/pause_generation": {"mode": "hold", "lease": 0.01},
    "/abort_request": {"rid": "x"},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["YQ=="]},
    "/release_memory_occupation": {"tags": []},
}
VALUES = [
    -1,
    0.5,
    10**400,
    True,
    "x",
    "\ud800",
    "\0",
    [],
    {},
    [[]],
    [{}],
    [None],
    {"a": {"b": []}},
    [-1],
    [10**9],
    [1e9],
    ["a", 1],
    "\U0001f600" * 50,
]
BODIES = [
    b"", b"{", b"null", b"[]", b"7", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b'{"max_tokens": Infinity}', b'{"temperature": 1e999}',
    b'{"n": -1e-999}', b"[" * 100_000, b'{"a":' * 50_000, b'{"seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "prompt": 1}', b"\0" * 100, b"{}" * 1000,
    b'{"prompt": "' + b"a" * 1_000_000 + b'"}', b'{"text": "' + b"a " * 500_000 + b'"}', b'{"' + b"k" * 300_000 + b'": 1}',
    b'{"messages": [' + b'{"role":"user","content":"a"},' * 30_000 + b'{"role":"user","content":"a"}]}',
    b'{"prompt": [' + b"5," * 400_000 + b"5]}", b"\xef\xbb\xbf{}",
]  # fmt: skip


def bad_requests():
    for path in [*GENERATING, *CONTROL]:
        yield from ((path, body, JSON) for body in BODIES)
        yield path, b"{}", {"Content-Type": "text/plain"}
        yield path, b"{}", {"Content-Type": "application/json; charset=utf-16"}
    for path, good in GOOD.items():
        for field, value in itertools.product(good, VALUES):
            yield path, json.dumps(good | {field: value}).encode(), JSON
        for field, value in itertools.product(
            [
                "zz",
                "stream",
                "n",
                "stop",
                "temperature",
                "logprobs",
                "tools",
                "stream_options",
                "rid",
                "logit_bias",
                "response_format",
                "top_logprobs",
            ],
            VALUES,
        ):
            yield path, json.dumps(good | {field: value}).encode(), JSON
    for key, value in itertools.product(
        [
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "max_new_tokens",
            "stop",
            "stop_token_ids",
            "sampling_seed",
            "json_schema",
            "regex",
            "logit_bias",
        ],
        VALUES,
    ):
        yield (
            "/generate",
            json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1, key: value}}).encode(),
            JSON,
        )
    for message in (
        {},
        {"role": "user"},
        {"role": [], "content": "a"},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "tool", "content": None},
        3,
    ):
        yield "/v1/chat/completions", json.dumps({"messages": [message]}).encode(), JSON


LARGE = 100_000  # bytes


@pytest.mark.slow
@pytest.mark.parametrize("every", covering([1, 4], [4]))
def test_malformed_requests_are_told_and_never_break_it(server, every):
    """Large ones on each fourth path, by turns. Some 1,500 of them (3,600 more in test_gateway_bodies.py) on one connection each way: a 4xx in OpenAI's shape,
    or, where chance made it sensible, an answer.
    """
    link, seen = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30), {}
    large = itertools.count()
    for path, body, headers in bad_requests():
        if len(body) >= LARGE and next(large) % every:
            continue
        link.request("POST", path, body, headers)
        reply = link.getresponse()
        data = reply.read()
        seen[reply.status] = seen.get(reply.status, 0) + 1
        assert reply.status < 500, (path, body[:200], data)
        if reply.status >= 400:
            error = json.loads(data)["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 2000
    link.close()
    server.ok("/continue_generation")
    server.ok("/resume_memory_occupation")
    assert (
        sum(seen.values()) > 1000
        and seen[400] > 500
        and server.client.completions.create(model="tiny", prompt="a", max_tokens=1)
    )


def test_bytes_that_are_not_http_and_bodies_that_never_end(server):
    for noise in (b"\0" * 64, b"GET\r\n\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a" * 100_000,
                  b"POST /generate HTTP/1.1\r\nHost: [\r\nContent-Length: 2\r\n\r\n{}", b"GET /\xff\xfe%00%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
                  b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
                  b"900\r\n\r\n{",
                  b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
            link.sendall(noise)
            link.settimeout(0.3)
            with contextlib.suppress(TimeoutError, ConnectionError):
                assert not link.recv(4096).startswith(b"HTTP/1.1 5")
    assert server.get("/health") == {"status": "serving"}


def test_web_pages_are_turned_away(server):
    for headers in (
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
        {"Origin": "http://["},
        {"Host": "["},
    ):
        assert server.raw("POST", "/pause_generation", "{}", JSON | headers)[0] in (400, 403)
    assert server.info()["state"] == "serving"


async def asks(port, body):
    """One request on a connection of its own -> status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    writer.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
    head = await reader.readline()
    await reader.read()
    writer.close()
    return int(head.split()[1])


@pytest.mark.slow
def test_five_hundred_at_once(server):
    body = {"text": "abcdefgh", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}

    async def all_at_once():
        return await asyncio.gather(*(asks(server.port, body | {"stream": i % 2 == 0}) for i in range(500)))

    assert asyncio.run(all_at_once()) == [200] * 500


def test_clients_that_vanish_leave_nothing(server):
    def vanish(path, body, after):
        link = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        data = json.dumps(body).encode()
        link.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), len(data))
        )
        link.sendall(data)
        if after:
            link.recv(10)
        # a reset, as from a killed process
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return link

    long = {"ignore_eos": True, "max_new_tokens": 4000}
    links = [
        vanish("/generate", {"text": "abc" * i, "sampling_params": long, "stream": True}, True) for i in range(1, 6)
    ]
    links += [vanish("/generate", {"text": "xyz", "sampling_params": long | {"n": 4}}, False) for _ in range(4)]
    until(lambda: server.info()["open"] == 5 + 16, 20)
    server.ok("/pause_generation", mode="hold")  # those that are parked are let go, too
    for link in links[:4]:
        link.close()
    until(lambda: server.info()["open"] == 1 + 16, 20)
    server.ok("/continue_generation")
    for link in links[4:]:
        link.close()
    server.idle(10)


# -- the process -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_key_limits_kill_restart_and_drain(folder, tmp_path):
    limits = ("--max-queue", "6", "--max-samples", "4", "--max-body", "2000", "--drain", "60")
    server = Server(folder, tmp_path, *limits, key=KEY)
    try:
        assert server.raw("GET", "/health")[0] == 200
        for path, auth in itertools.product(
            ("/get_server_info", "/metrics", "/nope"), (None, "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", "Bearer \xff")
        ):
            status, headers, body = server.raw("GET", path, headers={"Authorization": auth or ""})
            assert (
                status == 401
                and headers["WWW-Authenticate"] == "Bearer"
                and json.loads(body)["error"]["code"] == "invalid_api_key"
            )
        assert server.raw("POST", "/pause_generation", "{}", {"Authorization": ""})[0] == 401
        assert server.info()["state"] == "serving" and server.client.models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="wrong").models.list()

        assert server.post("/generate", text="a" * 3000)[0] == 413
        status, reply = server.post("/generate", text="a", sampling_params={"n": 5})
        assert status == 400 and "from 1 to 4" in reply["error"]["message"]
        assert server.post("/generate", text=["a"] * 5)[0] == 400
        server.ok("/pause_generation", mode="hold")
        waiting = [
            threading.Thread(target=server.post, args=("/generate",), kwargs={"text": "a", "sampling_params": {"n": 3}})
            for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        until(lambda: server.info()["open"] == 6, 20)
        status, headers, body = server.raw("POST", "/generate", json.dumps({"text": "a"}), JSON)
        assert status == 429 and headers["Retry-After"] == "1" and json.loads(body)["error"]["code"] == "queue_full"
        server.ok("/continue_generation")
        for thread in waiting:
            thread.join(20)
        server.idle()
    finally:
        server.stop()

    again = Server(folder, tmp_path, *limits, port=server.port, key=KEY)
    try:
        assert again.port == server.port and again.info()["weight_version"] == "0"
        done = []
        ask = {"text": "a", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        thread = threading.Thread(target=lambda: done.append(again.post("/generate", **ask)))
        thread.start()
        until(lambda: again.info()["running"] == 1, 20)
        halves = [socket.create_connection(("127.0.0.1", again.port)) for _ in range(3)]
        for half in halves:  # of a body, and they never send the rest
            half.sendall(
                f"POST /generate HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n{{".encode()
            )
        assert again.stop(signal.SIGTERM) == 0, again.said()
        thread.join(10)
        assert done[0][0] == 200 and len(done[0][1]["output_ids"]) == 200
        with pytest.raises(ConnectionError):
            again.raw("GET", "/health")
    finally:
        again.process.kill()


@pytest.mark.slow
def test_a_drain_that_takes_too_long_returns_what_is_written(folder, tmp_path):
    server = Server(folder, tmp_path, "--drain", "1")
    try:
        answer = Streaming(server, max_new_tokens=4000).wrote(5)
        server.ok("/pause_generation", mode="hold")  # it would never end
        began = time.monotonic()
        assert server.stop(signal.SIGINT) == 0 and time.monotonic() - began < 8
        assert answer.end()["meta_info"]["finish_reason"]["type"] == "abort"
    finally:
        server.process.kill()


@pytest.mark.parametrize(
    "words, says",
    [
        (["--host", "0.0.0.0"], "give --api-key"),
        (["--host", "example.com"], "give --api-key"),
        (["--device", "cuda"], "sees no CUDA")
        if not torch.cuda.is_available()
        else (["--host", "::"], "give --api-key"),
    ],
)
def test_what_cannot_be_served_is_one_line(capsys, monkeypatch, words, says):
    monkeypatch.delenv("RONDEL_API_KEY", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["serve", "nowhere", "--port", "0", *words])
    assert end.value.code == 1 and says in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_line(capsys):
    with socket.socket() as other, pytest.raises(SystemExit) as end:
        other.bind(("127.0.0.1", 0))
        other.listen()
        main(["serve", "nowhere", "--port", str(other.getsockname()[1])])
    assert end.value.code == 1 and "choose another --port" in capsys.readouterr().err


# -- guesses ahead ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_a_server_that_guesses_ahead_answers_the_same(folder, model, tmp_path, kind):
    """Look-ups change no token; a draft none of a greedy answer. /metrics tells what they brought."""
    server = Server(
        folder, tmp_path, "--kv-pages", "4000", "--speculative", "ngram" if kind == "ngram" else f"draft:{folder}"
    )
    try:
        prompt = model.tokenizer.encode("over and over and over and over and ")
        heat = 0.3 if kind == "ngram" else 0.0
        (want,) = expected(model, prompt, seed=5, max_tokens=60, temperature=heat, ignore_eos=True)
        body = dict(model="tiny", prompt=prompt, max_tokens=60, seed=5, temperature=heat)
        got = server.client.completions.create(**body, extra_body={"return_token_ids": True, "ignore_eos": True})
        assert got.choices[0].token_ids == want.tokens
        text = server.raw("GET", "/metrics")[2].decode()
        counts = {k: float(v) for k, v in re.findall(r'^rondel_guesses_total\{kind="(\w+)"\} (\S+)', text, re.M)}
        # whether more is tried depends on the clock
        assert counts["proposed"] > 0 and counts["proposed"] >= counts["accepted"]
        server.idle()
    finally:
        server.stop()


def test_a_wish_for_guesses_that_nobody_knows(folder):
    from rondel.generate.engine.notebook import speculation_of

    for wish in ("draft", "draft:", "eagle", "ngram:4"):
        with pytest.raises(UserError, match="off, ngram or draft:MODEL"):
            speculation_of(wish, dtype="auto", device="cpu")
    assert speculation_of("off", dtype="auto", device="cpu") is None
