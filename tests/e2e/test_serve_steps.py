"""`rondel serve` of what does not write token after token: blocks of masks, points of a flow, actions of a policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest

from kits import blocks, control, flows, worlds
from rondel.assemble.served_engine import ServerSettings, open_engine
from rondel.core.errors import UserError
from rondel.core.types import Request, Sampling, Task, sample_key
from rondel.generate.envs.flow import Flow
from rondel.models.save import save_model

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")

from rondel.assemble.server import service_of  # noqa: E402  it wants starlette

pytestmark = pytest.mark.slow
SETTINGS = ServerSettings(dtype="float32", device="cpu", threads=1, name="mine")


@pytest.fixture
def asked(tmp_path):
    """asked(loaded, talk): what `talk(client)` says to a server of this model, as its folder brings it."""

    def talk_to(loaded, talk):
        save_model(loaded, tmp_path / "model")

        async def meet():
            with contextlib.ExitStack() as ends:
                served = open_engine(str(tmp_path / "model"), SETTINGS, ends)
                service, app = service_of(served, SETTINGS)
                transport = httpx.ASGITransport(app=app)
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                    try:
                        return await talk(client)
                    finally:
                        await served.engine.pause("abort")
                        service.close()

        return asyncio.run(meet())

    return talk_to


def drawn(engine, requests):
    async def ask():
        return await asyncio.gather(*(engine.generate(one) for one in requests))

    return asyncio.run(ask())


def ok(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_block_model_completes_chats_and_streams(asked):
    """Tokens, log-probabilities and text are those of the engine itself; a stream adds up to the same answer."""
    loaded = blocks.block_model()
    prompt = [5, 40, 9]
    wanted = drawn(
        blocks.engine(loaded),
        [Request(prompt, Sampling(max_tokens=10), key=sample_key(3, 0, j)) for j in range(2)],
    )

    async def talk(client):
        body = {"prompt": prompt, "max_tokens": 10, "n": 2, "seed": 3, "temperature": 1, "return_token_ids": True}
        got = ok(await client.post("/v1/completions", json={**body, "logprobs": 0}))
        assert [choice["token_ids"] for choice in got["choices"]] == [list(done.tokens) for done in wanted]
        assert [choice["text"] for choice in got["choices"]] == [done.text for done in wanted]
        for choice, done in zip(got["choices"], wanted, strict=True):
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(list(done.logprobs), abs=1e-5)
        lines = (await client.post("/v1/completions", json={**body, "stream": True})).text.splitlines()
        pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        told = {0: "", 1: ""}
        for piece in pieces:
            for choice in piece["choices"]:
                told[choice["index"]] += choice["text"]
        assert told == {i: done.text for i, done in enumerate(wanted)}
        assert len(pieces) > 4  # block by block, not at the end
        chat = {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4, "temperature": 0}
        assert "content" in ok(await client.post("/v1/chat/completions", json=chat))["choices"][0]["message"]
        for more, why in (({"top_p": 0.5}, "top_p"), ({"logprobs": 2}, "tells only what it drew")):
            refused = await client.post("/v1/completions", json={**body, **more})
            assert refused.status_code == 400 and why in refused.text
        assert "rondel_open 0.0" in (await client.get("/metrics")).text
        assert ok(await client.post("/flush_cache", json={}))["success"]

    asked(loaded, talk)


def test_a_flow_draws_points(asked):
    """The points of the engine itself, for the prompt as a rollout gives it; weights are updated from a folder."""
    loaded = flows.flow()
    tokenizer = loaded.tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ring"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text)
    sampling = Sampling(max_tokens=4, temperature=0.7)
    wanted = drawn(flows.engine(loaded), [Request(prompt, sampling, key=sample_key(1, 0, j)) for j in range(3)])
    above = Flow(system="kind").prompt(Task("t", "flow", {"prompt": "ring"}))[0]  # as under task.system of a run
    told = tokenizer.encode(tokenizer.apply_chat_template(above, tokenize=False, add_generation_prompt=True))
    steered = drawn(flows.engine(loaded), [Request(told, sampling, key=sample_key(1, 0, 0))])[0]

    async def talk(client):
        body = {"prompt": "ring", "n": 3, "steps": 4, "temperature": 0.7, "seed": 1}
        got = ok(await client.post("/draw", json=body))
        assert got["points"] == [done.steps.drawn[-1].tolist() for done in wanted] and got["weight_version"] == "0"
        assert np.shape(ok(await client.post("/draw", json={**body, "prompt": ["ring", "a"]}))["points"]) == (2, 3, 2)
        other = ok(await client.post("/draw", json={**body, "system": "kind"}))["points"][0]
        assert other == steered.steps.drawn[-1].tolist() and other != got["points"][0]
        for odd, why in (
            ({"prompt": "ring"}, "engine.sampling.max_tokens"),
            ({"prompt": 3, "steps": 4}, "must be a text"),
            ({**body, "top_p": 1}, "no field 'top_p'"),
            ({**body, "n": 1000}, "from 1 to 128"),
        ):
            refused = await client.post("/draw", json=odd)
            assert refused.status_code == 400 and why in refused.text, refused.text
        lost = await client.post("/v1/completions", json={"prompt": "ring"})
        assert lost.status_code == 404 and "POST /draw" in lost.text
        assert ok(await client.get("/get_model_info"))["model_type"] == "flow_mlp"
        assert ok(await client.get("/v1/models"))["data"][0]["id"] == "mine"

    asked(loaded, talk)


@pytest.mark.parametrize("kind", ["choices", "numbers", "chunks"])
def test_a_policy_acts(asked, kind):
    loaded = control.POLICIES[kind]()
    requests = [control.asked(i, temperature=0) for i in range(2)]
    wanted = drawn(control.engine(loaded), requests)

    async def talk(client):
        seen = [request.observation.tolist() for request in requests]
        one = ok(await client.post("/act", json={"observation": seen[0]}))
        many = ok(await client.post("/act", json={"observation": seen}))
        if kind == "choices":
            assert many["action"] == [int(done.actions[0][0]) for done in wanted]
        elif kind == "numbers":
            assert np.allclose(many["action"], [done.actions[0] for done in wanted], atol=1e-6)
            assert many["logprob"] == pytest.approx([done.logprobs[0] for done in wanted], abs=1e-5)
        else:  # a chunk begins with the noise of its key
            assert np.shape(many["action"]) == (2, 2, 3)
        assert one["action"] == many["action"][0]
        refused = await client.post("/act", json={"observation": [1.0]})
        assert refused.status_code == 400 and "a list of 4 numbers" in refused.text

    asked(loaded, talk)


def test_a_policy_that_reads_pictures_is_told_an_instruction(asked):
    loaded = control.vla_policy()
    text = [{"role": "user", "content": "catch"}]
    prompt = loaded.tokenizer.encode(
        loaded.tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
    )
    request = replace(control.pictured(0, temperature=0), tokens=prompt, key=sample_key(0, 0, 0))
    wanted = drawn(control.engine(loaded), [request])[0]

    async def talk(client):
        body = {"observation": request.observation.tolist(), "instruction": "catch"}
        got = ok(await client.post("/act", json=body))
        assert np.array_equal(np.float32(got["action"]), wanted.actions)
        refused = await client.post("/act", json={"observation": body["observation"]})
        assert refused.status_code == 400 and "task.env.instruction" in refused.text
        shares = {**body, "observation": [x / 255 for x in body["observation"]]}
        refused = await client.post("/act", json=shares)
        assert refused.status_code == 400 and "whole numbers from 0 to 255" in refused.text

    asked(loaded, talk)


def test_weights_of_a_served_policy_come_from_a_folder(asked, tmp_path):
    later, request = control.policy(seed=5), control.asked(0, temperature=0)
    save_model(later, tmp_path / "later")
    wanted = drawn(control.engine(later), [request])[0]

    async def talk(client):
        body = {"observation": request.observation.tolist()}
        before = ok(await client.post("/act", json=body))["logprob"]
        ok(await client.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "later")}))
        after = ok(await client.post("/act", json=body))
        assert after["weight_version"] == "1" and after["logprob"] == pytest.approx(wanted.logprobs[0], abs=1e-5)
        assert before != pytest.approx(after["logprob"], abs=1e-3)

    asked(control.policy(), talk)


def test_what_has_no_cache_of_pages_is_told(tmp_path):
    save_model(control.policy(), tmp_path / "policy")
    save_model(worlds.world_model(), tmp_path / "world")
    for folder, settings, why in (
        ("policy", {"speculative": "ngram"}, "--speculative is of models"),
        ("policy", {"kv_pages": 9}, "--kv-pages is of models"),
        ("policy", {"adapters": {}}, "--adapter, --enable-adapters or --training is of models"),
        ("world", {}, "draws transitions of a world"),
    ):
        with contextlib.ExitStack() as ends, pytest.raises(UserError, match=why):
            open_engine(str(tmp_path / folder), ServerSettings(device="cpu", threads=1, **settings), ends)
