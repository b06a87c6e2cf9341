"""Routing replay over a server that tells routed experts as SGLang does: the numbers, the client, a run."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from kits.engine import SIZE, ask, prompt
from kits.engine import tiny as tiny_model
from kits.routing import MOES, own_routes
from kits.runs import events, run
from rondel.assemble.served_engine import ServerSettings, open_engine
from rondel.core.errors import ConfigError, EngineError, UserError
from rondel.generate.engine.foreign import ForeignEngine
from rondel.generate.engine.routed_experts import RoutedExperts
from rondel.generate.engine.sglang import SglangServer
from rondel.models.load import load_model
from rondel.models.save import save_model

serve_kit = pytest.importorskip("kits.serve")
TOLD = RoutedExperts((1, 2), depth=3, experts=8)  # of deepseek_v3 below, whose first layer has none


def test_what_is_told_is_read_and_what_cannot_be_is_refused():
    routes = np.random.default_rng(0).integers(0, 8, (6, 2, 2)).astype(np.uint16)
    text = TOLD.encode(routes)
    rows = np.frombuffer(b64decode(text), np.int32).reshape(6, 3, 2)
    assert (rows[:, 0] == 0).all() and (rows[:, 1:] == routes).all()
    assert (TOLD.decode(text, 7, "here") == routes).all() and TOLD.decode(text, 7, "here").dtype == np.uint16
    for bad, tokens, why in (
        (text, 6, "not as many for each of 5 tokens and 3 layers"),
        (b64encode(rows.tobytes()[:-4]).decode(), 7, "has 35 numbers, which are not as many"),
        ("?" * 8, 7, "no base64"),
        (b64encode(np.full((6, 3, 2), 8, np.int32).tobytes()).decode(), 7, "names expert 8, and a layer has 8"),
        (b64encode(np.full((6, 3, 2), -1, np.int32).tobytes()).decode(), 7, "names expert -1"),
    ):
        with pytest.raises(EngineError, match=why):
            TOLD.decode(bad, tokens, "here")


def test_a_dense_model_has_none_to_tell():
    with pytest.raises(UserError, match="is dense: it has no routers; leave it out"), ExitStack() as ends:
        open_engine({"random": "llama", **SIZE}, ServerSettings(routed_experts=True, device="cpu", threads=1), ends)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    save_model(tiny_model("deepseek_v3", **{**MOES["deepseek_v3"], "max_position_embeddings": 512}), path)
    return path


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    words = ("--kv-pages", "8192", "--enable-return-routed-experts")
    running = serve_kit.Server(folder, tmp_path_factory.mktemp("server"), *words)
    yield running
    running.stop()


@pytest.mark.slow
def test_experts_over_http_are_those_of_the_model_in_every_turn(server, folder):
    loaded = load_model(str(folder), dtype="float32")
    assert RoutedExperts.of_model(loaded) == TOLD
    asked = {"input_ids": prompt(1, 9), "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    assert "routed_experts" not in server.ok("/generate", **asked)["meta_info"]
    reply = server.ok("/generate", **asked, return_routed_experts=True)
    rows = np.frombuffer(b64decode(reply["meta_info"]["routed_experts"]), np.int32).reshape(9 + 6 - 1, 3, 2)
    wanted = own_routes(loaded, [*prompt(1, 9), *reply["output_ids"]])[:-1]
    assert (np.sort(rows[:, 1:], -1) == wanted).all() and (rows[:, 0] == 0).all()

    async def two_turns():
        e = ForeignEngine(SglangServer(f"http://127.0.0.1:{server.port}"), version=0)
        with pytest.raises(UserError, match="gives no experts"):
            await e.generate(replace(ask(prompt(2, 9), n=5), wants=frozenset({"experts"})))
        e.server.experts, tokens = TOLD, prompt(2, 9)
        for turn in range(2):  # the second finds the first in the cache
            done = await e.generate(replace(ask(tokens, n=5, key=turn), wants=frozenset({"experts"})))
            tokens = [*tokens, *done.tokens]
            assert (np.sort(done.experts, -1) == own_routes(loaded, tokens)[:-1]).all()
            tokens += prompt(3, 4)
        await e.server.link.close()

    asyncio.run(two_turns())


@pytest.mark.slow
def test_a_run_replays_what_a_server_tells(server, folder, tmp_path):
    """The trainer sends every token where the server sent it: hardly any of its own choices differ, and trainer and server
    agree on what was drawn. A server that does not tell is named with the remedy.
    """
    how = {"model__path": str(folder), "engine__kind": "sglang", "engine__url": f"http://127.0.0.1:{server.port}"}
    how |= {"model__dtype": "float32", "engine__sampling": {"max_tokens": 8}, "place__kind": "split"}
    how |= {"loop__warmup__steps": 1, "loop__steps": 2}
    run(tmp_path / "run", **how)
    done = [e["metrics"] for e in events(tmp_path / "run", "StepDone")][1:]
    assert len(done) == 2 and all(m["train/route_flips"] < 0.01 and m["train/gap_max"] < 1e-3 for m in done)
    with pytest.raises(ConfigError, match=r'engine.kind = "vllm" tells no routed experts .* 2 routers'):
        run(tmp_path / "vllm", **how | {"engine__kind": "vllm"})
