"""An engine of others under our contract: each token has the version that drew it, nothing
is drawn while weights change, nothing is lost.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import distributed as dist

from kits.fakes import Heard
from rondel.core.errors import ConfigError, EngineError, StalledError, SyncError, UserError
from rondel.core.events import Warned
from rondel.core.media import Image, ImagePlaceholder
from rondel.core.types import Abort, Begin, Commit, Manifest, Request, Route, Sampling, TensorInfo
from rondel.generate.engine.foreign import DrawnTokens, ForeignEngine
from rondel.generate.engine.http import ServerClient
from rondel.generate.engine.resumption import generate_until_done
from rondel.generate.engine.sglang import SglangServer
from rondel.generate.engine.sglang import drawn_tokens as sglang_piece
from rondel.generate.engine.sglang import sampling_params as sglang_params
from rondel.generate.engine.vllm import VllmServer
from rondel.generate.engine.vllm import drawn_tokens as vllm_piece
from rondel.sync.to_servers import ToServers
from rondel.sync.update import EngineMessages
from rondel.system.sockets import gloo_at


class Fake:
    """A server that draws a token a turn; its logprob tells the version that really drew it."""

    name, lacks, blind = "fake", frozenset({"grammar", "top_k"}), "it has no eyes"

    def __init__(self, seed: int = 0) -> None:
        self.serves, self.cut, self.running, self.loading, self.random = 0, 0, 0, False, random.Random(seed)
        self.seeds, self.asked, self.tells = [], [], True

    async def draw_tokens(self, tokens, media, sampling, seed, deadline):
        self.seeds.append(seed)
        self.asked.append(list(tokens))
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)  # on its way
        cut, drawn, logprobs = self.cut, [], []
        self.running += 1
        try:
            while len(drawn) < sampling.max_tokens and cut == self.cut:
                assert not self.loading, "a token is drawn while the weights change"
                drawn.append(len(tokens) + len(drawn))
                logprobs.append(-1.0 - self.serves)
                await asyncio.sleep(0)
            for _ in range(self.random.randrange(3)):
                await asyncio.sleep(0)  # on its way back
        finally:
            self.running -= 1
        finish = "length" if len(drawn) == sampling.max_tokens else "abort"
        return DrawnTokens(drawn, logprobs, finish, "x" * len(drawn), 0, str(self.serves) if self.tells else None)

    async def score(self, tokens, media):
        return [0.0] * len(tokens)

    async def interrupt(self):
        self.cut += 1

    async def load(self, folder, version):
        assert not self.running
        self.loading = True
        for _ in range(5):
            await asyncio.sleep(0)
        self.loading, self.serves = False, int(version)

    async def version(self):
        return str(self.serves)


def engine(**settings):
    fake = Fake()
    return ForeignEngine(fake, version=0, **settings), fake


def ask(n=20, key=1, **more):
    return Request([0, 1, 2], Sampling(max_tokens=n, **more), key=key)


def folder(place, version, root=None):
    manifest = Manifest(version, (TensorInfo("w", (version + 1,), "float32", "d"),))
    place.mkdir(exist_ok=True)
    (place / "manifest.json").write_text(json.dumps({"root": root or manifest.root}))
    return manifest, Route("disk", str(place), bytes=8)


async def update(e, place, version, how="hold"):
    manifest, route = folder(place, version)
    await e.receive(Begin(manifest, beside=True))
    await e.receive(route)
    await e.pause(how)
    served = await e.receive(Commit(version, manifest.root))
    await e.resume()
    return served


@pytest.mark.parametrize("seed", range(12))
def test_every_token_has_the_version_that_drew_it(tmp_path, seed):
    async def work():
        rng = random.Random(seed)
        e, fake = engine()
        fake.random, fake.tells = rng, seed % 2
        tasks = [asyncio.create_task(e.generate(ask(rng.randrange(1, 60), key=i))) for i in range(20)]
        for version in range(1, 6):
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            assert await update(e, tmp_path, version, how="hold" if rng.random() < 0.8 else "drain") == version
        done = await asyncio.gather(*tasks)
        for c in done:
            # no token twice, none left out
            assert c.finish_reason == "length" and c.tokens == list(range(3, 3 + len(c.tokens)))
            assert c.versions == [int(-1 - lp) for lp in c.logprobs] == sorted(c.versions) and c.text == "x" * len(
                c.tokens
            )
        assert any(len(set(c.versions)) > 1 for c in done)
        assert len(set(fake.seeds)) == len(fake.seeds)  # every piece has noise of its own
        s = await e.status()
        assert (s.running, s.waiting, s.parked, s.version, s.state, s.bytes_copied) == (0, 0, 0, 5, "serving", 8)

    asyncio.run(work())


def test_an_abort_returns_what_is_written_and_what_waits():
    async def work():
        e, _ = engine()
        running = asyncio.create_task(e.generate(ask(50)))
        for _ in range(10):
            await asyncio.sleep(0)
        await e.pause("hold")
        waiting = asyncio.create_task(e.generate(ask(50)))
        await asyncio.sleep(0)
        assert (await e.status()).state == "held" and (await e.status()).parked == 2
        await e.pause("abort")
        a, b = await asyncio.gather(running, waiting)
        assert a.finish_reason == b.finish_reason == "abort" and 0 < len(a.tokens) < 50 and b.tokens == []
        later = asyncio.create_task(e.generate(ask(5)))
        await asyncio.sleep(0)
        assert not later.done()
        await e.resume()
        assert len((await later).tokens) == 5

    asyncio.run(work())


def test_a_sample_that_goes_on_behind_an_abort_has_noise_of_its_own():
    """With the seed of its first piece the server would draw the same noise a second time."""

    async def work():
        e, fake = engine()
        whole = asyncio.create_task(generate_until_done(e.generate, ask(40)))
        for pieces in (1, 2):
            while len(fake.seeds) < pieces:
                await asyncio.sleep(0)
            for _ in range(8):
                await asyncio.sleep(0)
            await e.pause("abort")
            await e.resume()
        done = await whole
        assert done.tokens == list(range(3, 43)) and len(fake.seeds) == 3
        assert len(set(fake.seeds)) == len(fake.seeds)
        with pytest.raises(EngineError, match="penalties cannot go on behind an interruption"):
            await e.generate(replace(ask(4, presence_penalty=1.0), continuation=1))

    asyncio.run(work())


def test_a_folder_that_is_not_what_was_announced_leaves_the_old_version(tmp_path):
    async def work():
        e, fake = engine()
        manifest, route = folder(tmp_path, 1, root="another")
        await e.receive(Begin(manifest, beside=True))
        with pytest.raises(SyncError, match="root another"):
            await e.receive(route)
        with pytest.raises(SyncError, match="has not arrived whole"):
            await e.receive(Commit(1, manifest.root))
        with pytest.raises(SyncError, match="takes weights from a folder"):
            await e.receive(Begin(manifest))
        assert fake.serves == 0 and len((await e.generate(ask(3))).tokens) == 3
        manifest, route = folder(tmp_path, 1)
        await e.receive(Begin(manifest, beside=True))
        await e.receive(route)
        with pytest.raises(SyncError, match="pause the engine first"):
            await e.receive(Commit(1, manifest.root))

    asyncio.run(work())


def test_weights_that_did_not_arrive_make_it_refuse_until_a_good_update(tmp_path):
    async def work():
        e, fake = engine()
        whole = fake.load

        async def lies(folder, version):
            pass

        fake.load = lies
        with pytest.raises(SyncError, match="it says it serves '0'; the engine refuses"):
            await update(e, tmp_path, 1)
        await e.resume()
        assert (await e.status()).state == "refusing"
        for verb in (e.generate(ask()), e.score(ask())):
            with pytest.raises(EngineError, match="did not take version 1"):
                await verb
        fake.load = whole
        assert await update(e, tmp_path, 2) == 2
        assert (await e.generate(ask(2))).versions == [2, 2]

    asyncio.run(work())


def test_what_cannot_be_true_is_said():
    async def work():
        e, fake = engine(patience=0.05)
        for request, told in (
            (ask(top_k=5), "does not draw with top_k"),
            (Request([], Sampling()), "empty prompt"),
            (Request([1], Sampling(), wants=frozenset({"experts"})), "gives no experts"),
        ):
            with pytest.raises(UserError, match=told):
                await e.generate(request)
        with pytest.raises(EngineError, match="device of its own"):
            await e.sleep(("weights",))
        fake.serves = 7
        with pytest.raises(EngineError, match="drew with weights '7', and this run gave it '0'"):
            await e.generate(ask(2))
        fake.serves = 0
        cut = asyncio.create_task(e.generate(ask(50)))
        for _ in range(8):
            await asyncio.sleep(0)
        fake.cut += 1
        with pytest.raises(EngineError, match="nobody here interrupted"):
            await cut
        deaf = asyncio.create_task(e.generate(ask(10**6)))
        await asyncio.sleep(0)
        fake.interrupt = lambda: asyncio.sleep(0)
        with pytest.raises(StalledError, match=r"1 requests at fake have not come back from a hold for 0\.05 s"):
            await e.pause("hold")
        assert e.state == "serving"
        deaf.cancel()
        begun = asyncio.create_task(e.generate(ask(20_000)))
        await asyncio.sleep(0)
        began = time.perf_counter()
        await e.pause("drain")  # as long as the answer is: patience is for those that were interrupted
        assert begun.done() and len(begun.result().tokens) == 20_000 and time.perf_counter() - began > e.patience
        await e.resume()
        slow = Request([1], Sampling(max_tokens=10**6), deadline=0.02)
        with pytest.raises(StalledError, match=r"waits for fake since 0\.02 s; it had written"):
            await e.generate(slow)
        assert e.gate.drawing == 0

    asyncio.run(work())


def test_a_drain_that_takes_long_is_told_with_the_server_and_its_requests():
    """Nothing was said until the update was given up, and then neither the server nor that answers ran."""

    async def work():
        e, fake = engine(patience=0.05)
        fake.link = SimpleNamespace(url="http://there:8000")
        never = [asyncio.create_task(e.generate(ask(10**9, key=key))) for key in range(2)]
        for _ in range(8):
            await asyncio.sleep(0)
        with Heard(Warned) as heard, pytest.raises(StalledError) as stalled:
            await EngineMessages(0.2, "drain").pause([e], [])
        assert "engine 0: no answer to a pause for 0.2 s, and 2 requests still run" in str(stalled.value)
        assert "2 requests that fake at http://there:8000 still answers" in heard[0].message
        for task in never:
            task.cancel()
        await asyncio.gather(*never, return_exceptions=True)
        assert e.state == "serving" and e.gate.drawing == 0

    asyncio.run(work())


@pytest.mark.parametrize("told", [float("nan"), 2.5, float("-inf"), float("inf"), None])
def test_a_log_probability_that_is_none_is_refused(told):
    """NaN and positive ones were taken for 0, as if the policy had been certain."""

    async def work():
        e, fake = engine()
        fake.draw_tokens = lambda *given: asyncio.sleep(0, DrawnTokens([5, 6], [-0.5, told], "length", "x", 0, "0"))
        with pytest.raises(EngineError, match=rf"fake gave token 6 \(number 1 of 2\) a log-probability of {told}"):
            await e.generate(ask(2))
        fake.score = lambda tokens, media: asyncio.sleep(0, [0.0, told])
        with pytest.raises(EngineError, match=f"fake gave token 8 .* a log-probability of {told}"):
            await e.score(Request([7, 8]))
        fake.draw_tokens = lambda *given: asyncio.sleep(0, DrawnTokens([5, 6], [-0.5, 1e-5], "length", "x", 0, "0"))
        assert (await e.generate(ask(2))).logprobs == [-0.5, 0.0]  # rounding

    asyncio.run(work())


def test_an_update_that_is_aborted_after_its_commit_leaves_the_engine_refusing(tmp_path):
    async def work():
        e, _ = engine()
        await update(e, tmp_path, 1)
        await e.receive(Abort("SyncError: the probe differs"))
        with pytest.raises(EngineError, match=r"refuses .* aborted after its commit: SyncError: the probe differs"):
            await e.generate(ask(2))
        await update(e, tmp_path, 2)
        assert (await e.generate(ask(2))).versions == [2, 2]

    asyncio.run(work())


# -- what the servers of others say -----------------------------------------------------------------


def test_replies_of_sglang():
    """Shapes of SGLang v0.5 (srt/managers/tokenizer_manager.py: meta_info;
    srt/managers/schedule_batch.py: finish reasons).
    """
    meta = {
        "id": "r1", "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2, "weight_version": "4", "e2e_latency": 0.1,
        "output_token_logprobs": [[-0.5, 11, None], [-0.25, 2, None]],
    }  # fmt: skip
    got = sglang_piece(
        {"text": "a", "output_ids": [11, 2], "meta_info": {**meta, "finish_reason": {"type": "stop", "matched": 2}}}
    )
    assert got == DrawnTokens([11, 2], [-0.5, -0.25], "stop", "a", 2, "4")
    cut = {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None}
    got = sglang_piece(
        {"text": "", "output_ids": [], "meta_info": {"id": "r1", "finish_reason": cut, "weight_version": "default"}}
    )
    assert got == DrawnTokens([], [], "abort", "", 0, "default")
    sent = sglang_params(Sampling(stop=("END", 7), max_tokens=9), 5)
    assert (
        sent["top_k"] == -1
        and sent["stop"] == ["END"]
        and sent["stop_token_ids"] == [7]
        and sent["max_new_tokens"] == 9
    )


def test_replies_of_vllm():
    """Shapes of vLLM 0.32.0 (entrypoints/openai/completion/protocol.py), with return_token_ids and logprobs = 0."""
    choice = {
        "index": 0, "text": " Paris", "finish_reason": "length", "stop_reason": None, "token_ids": [7042, 30], "prompt_token_ids": [1, 2],
        "logprobs": {"text_offset": [0, 6], "token_logprobs": [-0.5, -1.5], "tokens": [" Paris", "."], "top_logprobs": [{}, {}]},
        "prompt_logprobs": None,
    }  # fmt: skip
    assert vllm_piece(choice) == DrawnTokens([7042, 30], [-0.5, -1.5], "length", " Paris")
    assert vllm_piece({"text": "", "finish_reason": "abort", "token_ids": [], "logprobs": None}) == DrawnTokens(
        [], [], "abort", ""
    )


def scripted(server, replies):
    """`replies`: {path: (status, body)}. -> the server, and what it was asked."""
    asked = []

    def answer(request):
        asked.append((request.url.path, json.loads(request.content) if request.content else None))
        status, body = replies[request.url.path]
        return httpx2.Response(status, json=body) if not isinstance(body, str) else httpx2.Response(status, text=body)

    server.link = ServerClient("http://gpu-7:30000", remedy="start it", transport=httpx2.MockTransport(answer))
    return server, asked


def test_faults_name_the_address_what_came_back_and_the_remedy():
    async def work():
        server, _ = scripted(SglangServer("http://gpu-7:30000"), {"/get_model_info": (500, "x" * 999)})
        with pytest.raises(EngineError, match=r"http://gpu-7:30000/get_model_info answered 500: x{200}\.\.\.$"):
            await server.version()
        lost = SglangServer("http://127.0.0.1:9")
        with pytest.raises(
            EngineError, match=r"http://127\.0\.0\.1:9/get_model_info cannot be reached \(ConnectError.*launch_server"
        ):
            await lost.version()
        with pytest.raises(EngineError, match="cannot be reached"):
            lost.open(Sampling())
        with pytest.raises(ConfigError, match=r"engine\.url = 'gpu-7'; it is an address"):
            SglangServer("gpu-7")
        replies = {"/update_weights_from_disk": (200, {"success": False, "message": "no such folder"})}
        body = {"model_path": "/weights/v-1", "weight_version": "1", "flush_cache": True}
        for serves, more in (("default", {}), ("0", {}), ("1", {}), ("2", {"rollback": True})):
            server, asked = scripted(
                SglangServer("http://a"), {**replies, "/get_model_info": (200, {"weight_version": serves})}
            )
            with pytest.raises(EngineError, match="no such folder"):
                await server.load("/weights/v-1", "1")
            assert asked == [("/get_model_info", None), ("/update_weights_from_disk", {**body, **more})]

    asyncio.run(work())


def test_images_go_as_they_are_seen_or_not_at_all():
    """Law 5 over a wire: the ids with all placeholders, lossless pixels; a server that
    made another prompt of them is refused.
    """
    picture = Image.from_pixels(np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3), 4)
    request = Request([1, 9, 9, 2], Sampling(max_tokens=1), media=(ImagePlaceholder(1, picture),))
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 3, None]], "prompt_tokens": 4}
    meta |= {"input_token_logprobs": [[None, 1, None], [-1.0, 777, None], [-2.0, 777, None], [-3.0, 2, None]]}

    async def work():
        replies = {"/generate": (200, {"text": "x", "meta_info": meta})}
        server, asked = scripted(SglangServer("http://a"), replies)
        e = ForeignEngine(server, version=0)
        assert (await e.generate(request)).tokens == [3] and (await e.score(request)).logprobs == [
            0.0,
            -1.0,
            -2.0,
            -3.0,
        ]
        for _, body in asked:
            (sent,) = body["image_data"]
            pixels = np.asarray(Pillow.open(io.BytesIO(base64.b64decode(sent.partition(",")[2]))))
            assert (
                body["input_ids"] == [1, 9, 9, 2]
                and sent.startswith("data:image/png;base64,")
                and (pixels == picture.pixels).all()
            )
        await e.generate(Request([1, 9], Sampling(max_tokens=1)))
        assert "image_data" not in asked[-1][1]
        meta["prompt_tokens"] = 3
        with pytest.raises(
            EngineError, match=r"made 3 tokens of a prompt of 4 with 1 images.*SGLANG_MM_AVOID_RETOKENIZE=1"
        ):
            await e.generate(request)
        with pytest.raises(EngineError, match="by their placeholders alone, and the policy has drawn one"):
            await e.generate(replace(request, tokens=[1, 9, 9, 2, 9]))
        for blind, why in (
            (ForeignEngine(Fake(), version=0), "it has no eyes"),
            (ForeignEngine(VllmServer("http://a")), "vllm-project/vllm#51472"),
        ):
            for verb in (blind.generate, blind.score):
                with pytest.raises(UserError, match=f"is sent no images: .*{why}"):
                    await verb(request)

    asyncio.run(work())


def test_vllm_is_asked_whether_it_can_carry_the_run():
    def opened(temperature, mode="raw_logprobs", dev=200):
        config = {"vllm_config": {"model_config": {"logprobs_mode": mode}, "device_config": {"device": "cuda"}}}
        models = {"data": [{"id": "m", "max_model_len": 512}]}
        server, _ = scripted(VllmServer("http://a"), {"/server_info": (dev, config), "/v1/models": (200, models)})
        return server.open(Sampling(temperature=temperature))

    assert opened(1.0) == opened(0.7, mode="processed_logprobs") == 512
    with pytest.raises(ConfigError, match=r"temperature = 0\.7.*--logprobs-mode processed_logprobs"):
        opened(0.7)
    with pytest.raises(ConfigError, match=r"development mode.*VLLM_SERVER_DEV_MODE=1"):
        opened(1.0, dev=404)


def test_vllm_takes_weights_in_order_and_forgets_its_cache(tmp_path):
    async def work():
        replies = {
            path: (200, {"success": True})
            for path in ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
        }
        server, asked = scripted(VllmServer("http://a"), replies)
        await server.load("/weights/v-3", "3")
        assert asked == [
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/weights/v-3"}}),
            ("/reset_prefix_cache", None),
            ("/update_weight_version", {"new_version": "3"}),
        ]
        replies["/reset_prefix_cache"] = (200, {"success": False})
        with pytest.raises(EngineError, match="requests of somebody else"):
            await server.load("/weights/v-4", "4")
        server.packs = True
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "a"}}))
        with pytest.raises(EngineError, match="whose head is tied"):
            await server.load(str(tmp_path), "5")

    asyncio.run(work())


# -- by broadcast ------------------------------------------------------------------------------------


class BroadcastServer:
    """What SGLang does at its endpoints: it joins with torch's own stores and helper, and loads each bucket as it comes."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.held, self.calls, self.serves = refuses, {}, [], "7"

    def engine(self) -> ForeignEngine:
        server = SglangServer("http://127.0.0.1:1")
        server.link = ServerClient(
            "http://127.0.0.1:1", remedy="", transport=httpx2.MockTransport(lambda r: self.answer(r))
        )
        return ForeignEngine(server, version=0)

    async def answer(self, request):
        path, body = request.url.path, json.loads(request.content or b"{}")
        self.calls.append((path, body))
        if path == "/get_model_info":
            return httpx2.Response(200, json={"weight_version": self.serves})
        if self.refuses and path == "/init_weights_update_group":
            return httpx2.Response(400, text=self.refuses)
        work = {"/init_weights_update_group": self.join, "/update_weights_from_distributed": self.load}.get(path)
        if work:
            await asyncio.to_thread(work, body)
        return httpx2.Response(200, json={"success": True, "message": ""})

    def join(self, body):
        rank, size, name = body["rank_offset"], body["world_size"], body["group_name"]
        store = dist.TCPStore(body["master_address"], body["master_port"], size, is_master=False)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self.group = dist.ProcessGroupGloo(store, rank, size, gloo_at(body["master_address"], 20))

    def load(self, body):
        shapes = [(getattr(torch, kind), shape) for kind, shape in zip(body["dtypes"], body["shapes"])]
        tensors = [torch.empty(shape, dtype=kind) for kind, shape in shapes]
        flat = torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([flat], options).wait()
        for name, tensor, piece in zip(body["names"], tensors, flat.split([t.nbytes for t in tensors])):
            tensor.view(-1).view(torch.uint8).copy_(piece)
            self.held[name] = tensor
        self.serves = body.get("weight_version", self.serves)


class VllmTransferServer(BroadcastServer):
    """vLLM's weight transfer, with the backend of vllm_worker.py in its worker: an update is begun, comes in buckets, and is
    finished; anything else is its error.
    """

    def __init__(self, workers: int = 1) -> None:
        super().__init__()
        self.workers, self.updating = workers, False

    def engine(self) -> ForeignEngine:
        server = VllmServer("http://127.0.0.1:1")
        server.link = ServerClient("http://127.0.0.1:1", remedy="", transport=httpx2.MockTransport(self.answer))
        return ForeignEngine(server, version=0)

    async def answer(self, request):
        path, body = request.url.path, json.loads(request.content or b"{}")
        self.calls.append((path, body))
        if path in ("/update_weights", "/finish_weight_update") and not self.updating:
            return httpx2.Response(500, text="no update is active")
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            names = {"rank": "rank_offset", "size": "world_size", "name": "group_name"}
            names |= {"host": "master_address", "port": "master_port", "deadline": "deadline"}
            await asyncio.to_thread(self.join, {names[key]: value for key, value in info.items()})
        if path == "/update_weights":
            await asyncio.to_thread(self.load, body["update_info"])
        if path == "/finish_weight_update":
            self.serves = body["weight_version"]
        if path in ("/start_weight_update", "/finish_weight_update"):
            self.updating = path == "/start_weight_update"
        told = {"/get_world_size": {"world_size": self.workers}, "/weight_info": {"weight_version": self.serves}}
        return httpx2.Response(200, json=told.get(path, {"success": True}))


def published(transport, engines, version, seed):
    """-> tensors, manifest, route, of weights in three dtypes."""
    draw = torch.Generator().manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.int64]
    tensors = {f"w{i}": torch.randn(3 + i, 5, generator=draw).mul(100).to(kind) for i, kind in enumerate(kinds)} | {
        "one": torch.randn((), generator=draw)
    }
    rows = [TensorInfo(n, tuple(t.shape), str(t.dtype)[6:], f"{seed}{n}") for n, t in tensors.items()]
    route = asyncio.run(transport.plan_route(None, engines))
    return tensors, *transport.publish(route, version, iter(zip(rows, tensors.values())))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BroadcastServer, VllmTransferServer])
def test_servers_take_a_broadcast_in_buckets_and_serve_its_bits(kind):
    servers = [kind(), kind()]
    engines, transport = [server.engine() for server in servers], ToServers(bucket=128, deadline=20)

    async def deliver(tensors, manifest, route):
        for e in engines:
            await e.pause("hold")
            await e.receive(Begin(manifest, beside=False))
        sent = asyncio.to_thread(transport.send, route, iter(tensors.items()))
        await asyncio.gather(sent, *(e.receive(route) for e in engines))
        with pytest.raises(EngineError, match="on its way"):
            await engines[0].generate(ask())
        for e in engines:
            assert await e.receive(Commit(manifest.version, manifest.root)) == manifest.version
            await e.resume()
            assert (e.version, e.state, e.bytes_copied) == (manifest.version, "serving", route.bytes)

    for version in (1, 2):
        tensors, manifest, route = published(transport, engines, version, seed=version)
        asyncio.run(deliver(tensors, manifest, route))
        for server in servers:
            assert server.held.keys() == tensors.keys() and server.serves == str(version)
            assert all(torch.equal(server.held[n], t) and server.held[n].dtype == t.dtype for n, t in tensors.items())
    transport.close()
    if kind is VllmTransferServer:
        update = ["/start_weight_update", *["/update_weights"] * len(route.data["buckets"]), "/finish_weight_update"]
        once = ["/get_world_size", "/init_weight_transfer_engine"]
        for server in servers:
            paths = [path for path, _ in server.calls if path not in ("/weight_info", "/reset_prefix_cache")]
            assert paths == once + 2 * update
        return
    for server in servers:
        paths = [path for path, _ in server.calls]
        loads = [body for path, body in server.calls if path == "/update_weights_from_distributed"]
        assert paths.count("/init_weights_update_group") == 1  # the group is kept
        assert len(loads) == 2 * len(route.data["buckets"]) and len(route.data["buckets"]) > 2
        last = [body["flush_cache"] for body in loads]
        assert last == ([False] * (len(loads) // 2 - 1) + [True]) * 2
        assert [body.get("rollback") for body in loads if body["flush_cache"]] == [True, None]  # it served 7 before
    assert sorted(body["rank_offset"] for s in servers for path, body in s.calls if "init" in path) == [1, 2]


@pytest.mark.parametrize(
    "server, why", [(BroadcastServer("backend: nccl"), "backend: nccl"), (VllmTransferServer(2), "has 2 workers")]
)
def test_a_server_that_does_not_join_holds_up_nobody(server, why):
    """The trainer is told why, long before its deadline, and the engine refuses until a good update."""
    servers = [server, server]
    engines, transport = [server.engine() for server in servers], ToServers(deadline=300)
    tensors, manifest, route = published(transport, engines, 1, seed=0)

    async def deliver():
        for e in engines:
            await e.pause("hold")
            await e.receive(Begin(manifest, beside=False))
        sent = asyncio.to_thread(transport.send, route, iter(tensors.items()))
        return await asyncio.gather(sent, *(e.receive(route) for e in engines), return_exceptions=True)

    told = asyncio.run(deliver())
    assert all(isinstance(error, SyncError) and why in str(error) for error in told)
    assert [e.state for e in engines] == ["refusing"] * 2
    again = published(transport, engines, 2, seed=1)[2].data["name"]
    assert again != route.data["name"]  # the next update makes a group anew
    transport.close()


def test_a_server_that_reads_folders_alone_takes_no_broadcast():
    e, _ = engine()
    with pytest.raises(SyncError, match="takes weights from a folder"):
        asyncio.run(e.receive(Begin(Manifest(1, ()), beside=False)))
