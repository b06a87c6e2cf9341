"""Pictures through `rondel serve`: OpenAI's client and SGLang's payload show what the engine
sees in process, and nothing hostile breaks it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import struct
import zlib
from hashlib import blake2b

import numpy as np
import pytest
from PIL import Image as Pillow

from kits.engine import engine
from kits.serve import JSON, Server
from kits.vision import ask, image, model, own_logprobs, stream
from rondel.core.errors import EngineError
from rondel.core.types import Request, Sampling, sample_key
from rondel.generate.engine.foreign import ForeignEngine
from rondel.generate.engine.sglang import SglangServer
from rondel.generate.envs.chat import TokenChat
from rondel.generate.pictures import url_of
from rondel.models.save import save_model

pytestmark = pytest.mark.slow

KIND = "qwen2_5_vl"


def raw(seed: int, width: int = 61, height: int = 90) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file(array: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Pillow.fromarray(array).save(out, kind)
    return out.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(model(KIND), folder)
    running = Server(folder, tmp_path_factory.mktemp("server"), "--kv-pages", "4096")
    yield running
    assert running.process.poll() is None and "Traceback" not in running.said(), running.said()[-3000:]
    running.stop()


def drawn(prompt: list[int], media, seed: int, **sampling):
    """What the engine draws in process."""

    async def draw():
        return await engine(model(KIND)).generate(
            Request(prompt, Sampling(**sampling), key=sample_key(seed, 0, 0), media=tuple(media))
        )

    return asyncio.run(draw())


def said(*parts: str) -> list[dict]:
    """A user's message: data: URLs are images."""
    shown = [
        {"type": "image_url", "image_url": {"url": p}} if p.startswith("data:") else {"type": "text", "text": p}
        for p in parts
    ]
    return [{"role": "user", "content": shown}]


def test_a_chat_about_pictures_is_what_the_engine_sees(server):
    """Odd sizes, three formats: the prompt is TokenChat's to the token, and the answer that of the
    engine in process.
    """
    m = model(KIND)
    pictures = [url(file(raw(1))), url(file(raw(2, 112, 57), "WEBP"), "webp")]
    messages = said("look ", pictures[0], " and ", pictures[1], "?")
    own = TokenChat(m.tokenizer, None, sampling=Sampling(), key=lambda t: t, max_context=400, sight=m.sight)
    own.give(messages)
    prompt, media = own.trajectory.tokens, own.trajectory.media
    reply = server.client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=12,
        seed=5,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    (choice,) = reply.choices
    expected = drawn(prompt, media, 5, max_tokens=12, ignore_eos=True)
    assert reply.prompt_token_ids == prompt and reply.usage.prompt_tokens == len(prompt)
    assert choice.token_ids == expected.tokens
    assert max(abs(c.logprob - lp) for c, lp in zip(choice.logprobs.content, expected.logprobs)) < 1e-4
    (exact,) = own_logprobs(m, [(prompt + expected.tokens, media)])
    assert max(abs(lp - e) for lp, e in zip(expected.logprobs, exact[len(prompt) - 1 :])) < 1e-4
    pieces = server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, seed=5, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == choice.message.content
    other = server.client.chat.completions.create(
        model="tiny",
        messages=said("look ", url(file(raw(9))), " and ", pictures[1], "?"),
        max_tokens=12,
        seed=5,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert other.prompt_token_ids == prompt and other.choices[0].token_ids != choice.token_ids, (
        "the same tokens, another picture"
    )
    plain = server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "no picture"}], max_tokens=3
    )
    assert plain.usage.completion_tokens


def test_generate_takes_one_placeholder_or_all_of_them(server):
    m = model(KIND)
    tokens, media = stream(m, 3, image(m, 1), 2, image(m, 2, 2, 3), 4)
    pad = m.sight.placeholder
    short = [t for i, t in enumerate(tokens) if t != pad or tokens[i - 1] != pad]
    images = [url_of(place.image) for place in media]
    draw = {"sampling_params": {"max_new_tokens": 9, "sampling_seed": 4, "ignore_eos": True}, "return_logprob": True}
    whole = server.ok("/generate", input_ids=tokens, image_data=images, logprob_start_len=0, **draw)
    single = server.ok(
        "/generate", input_ids=short, image_data=[{"url": images[0]}, images[1].partition(",")[2]], **draw
    )
    expected = drawn(tokens, media, 4, max_tokens=9, ignore_eos=True)
    assert whole["output_ids"] == single["output_ids"] == expected.tokens
    assert whole["meta_info"]["prompt_tokens"] == single["meta_info"]["prompt_tokens"] == len(tokens)
    told = [lp for lp, *_ in whole["meta_info"]["output_token_logprobs"]]
    assert max(abs(a - b) for a, b in zip(told, expected.logprobs)) < 1e-4
    given = [lp for lp, *_ in whole["meta_info"]["input_token_logprobs"]][1:]
    (exact,) = own_logprobs(m, [(tokens, media)])
    behind = [i for i in range(len(exact)) if tokens[i + 1] != pad]
    assert max(abs(given[i] - exact[i]) for i in behind) < 1e-4
    many = server.ok("/generate", input_ids=[short, tokens[:3]], image_data=[images, None], **draw)
    assert [row["meta_info"]["prompt_tokens"] for row in many] == [len(tokens), 3] and many[0][
        "output_ids"
    ] == expected.tokens
    text = "see <|vision_start|><|image_pad|><|vision_end|> now"
    alone = server.ok("/generate", text=text, image_data=images[0], **draw)
    assert alone["meta_info"]["prompt_tokens"] == len(m.tokenizer.encode(text)) + media[0].image.tokens - 1


def test_the_adapter_draws_and_scores_over_http_what_is_drawn_in_process(server):
    """engine.kind = "sglang" -> rondel serve: tokens equal, logprobs within 1e-4; a
    placeholder that the policy drew is refused.
    """
    m = model(KIND)
    given = [
        stream(m, 3, image(m, 5), 2, seed=1),
        stream(m, 2, image(m, 6, 2, 3), 1, image(m, 5), 3, seed=2),
        stream(m, 6, seed=3),
    ]

    async def work():
        far = ForeignEngine(SglangServer(f"http://127.0.0.1:{server.port}"), version=0)
        assert "images" in (await far.status()).capabilities
        for key, (tokens, media) in enumerate(given):
            request = ask(tokens, media, key=key, n=10, temperature=0.7)
            seed = int.from_bytes(blake2b(f"{key}/0".encode(), digest_size=8).digest(), "little") >> 1
            theirs = await far.generate(request)
            ours = await engine(m).generate(
                Request(tokens, request.sampling, key=sample_key(seed, 0, 0), media=tuple(media))
            )
            assert (
                theirs.tokens == ours.tokens and max(abs(a - b) for a, b in zip(theirs.logprobs, ours.logprobs)) < 1e-4
            )
            scored = await far.score(ask(tokens, media))
            near = await engine(m).score(ask(tokens, media))
            assert max(abs(a - b) for a, b in zip(scored.logprobs, near.logprobs)) < 1e-4
        tokens, media = given[0]
        with pytest.raises(EngineError, match="tells images by their placeholders alone, and the policy has drawn one"):
            await far.generate(ask([*tokens, 7, m.sight.placeholder], media))
        await far.server.link.close()

    asyncio.run(work())


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few kilobytes that opens to width x height."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * min(1 << 24, height * (1 + width // 8))))
        + chunk(b"IEND", b"")
    )


def spoiled(n: int):
    """Files with a bit, a byte or an end that is wrong."""
    rng = random.Random(7)
    for i in range(n):
        data = bytearray(file(raw(i, 40, 40), ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")[i % 6]))
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield bytes(data[: rng.randrange(1, len(data))] if i % 3 == 0 else data)


GOOD = url(file(raw(3)))
BAD = {
    "an address": ("https://x.y/z.png", "an image is sent whole"),
    "a path": ("/etc/passwd", "an image is sent whole"),
    "no base64": ("data:image/png;base64,????", "base64 is broken"),
    "not ascii": ("data:image/png;base64,\u00e9\u00e9", "base64 is broken"),
    "another type": ("data:text/html,hello", "an image is data:image/png;base64"),
    "no picture": (url(b"GIF9 no"), "cannot be read"),
    "PostScript": (url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "cannot be read"),
    "cut": (url(file(raw(3))[:200]), "cannot be shown"),
    "a bomb": (url(bomb(60000, 60000)), "3600000000 pixels"),
    "a bomb that Pillow would open": (url(bomb(12000, 12000)), "12000x12000 pixels; at most 64 megapixels"),
    "a line": (url(file(raw(3, 900, 2))), "more than 200 times as long as wide"),
    "too many tokens": (url(bomb(7000, 7000)), "tokens together; there is room for"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_a_400_that_says_why(server, name):
    sent, words = BAD[name]
    status, reply = server.post("/v1/chat/completions", model="tiny", messages=said("see"), max_tokens=1)
    assert status == 200, reply
    part = {"type": "image_url", "image_url": {"url": sent}}
    status, reply = server.post(
        "/v1/chat/completions", model="tiny", messages=[{"role": "user", "content": [part]}], max_tokens=1
    )
    assert status == 400 and words in reply["error"]["message"], reply
    status, reply = server.post("/generate", text="<|image_pad|>", image_data=sent)
    assert status == 400, reply


def test_what_is_no_image_where_one_must_be(server):
    def told(path, **body):
        status, reply = server.post(path, **body)
        assert status == 400, reply
        return reply["error"]["message"]

    chat, ids = "/v1/chat/completions", {"input_ids": [5, 6, 7]}
    status, reply = server.post(chat, messages=[{"role": "user", "content": "<|image_pad|>"}], max_tokens=1)
    # what a text spells is no place for one
    assert status == 200 and reply["usage"]["prompt_tokens"] == len("<|image_pad|>") + 2
    assert "must be a string or a list of parts of type text or image_url" in told(
        chat, messages=[{"role": "user", "content": [{"type": "input_audio"}]}]
    )
    assert "parts of type text" in told(chat, messages=[{"role": "system", "content": said(GOOD)[0]["content"]}])
    low = [{"type": "image_url", "image_url": {"url": GOOD, "detail": "low"}}]
    assert 'detail = "low"' in told(chat, messages=[{"role": "user", "content": low}])
    assert "the keys ['type']" in told(chat, messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    assert "0 image placeholders for 1 images and steps of videos: the chat template shows no place" in told(
        "/generate", **ids, image_data=GOOD
    )
    assert "must be a list of 2" in told("/generate", input_ids=[[5], [6]], image_data=[GOOD])
    assert "image_data has 7" in told("/generate", **ids, image_data=[7])
    pad = model(KIND).sight.placeholder
    few = told("/generate", input_ids=[5, pad, pad, 6], image_data=url(file(raw(1, 84, 56))))
    assert "2 image placeholders for 1 images of 6 cells: one for each image, or one for each cell" in few
    torn = [5, *[pad] * 3, 6, *[pad] * 3]  # six cells of an image of 2 x 3
    assert "there it must find 6 placeholders of its own, and it finds 5" in told(
        "/generate", input_ids=torn, image_data=url(file(raw(1, 84, 56)))
    )


def test_spoiled_files_never_break_it(server):
    """Whatever a decoder raises is the request's fault; and the engine goes on."""
    statuses = []
    for data in spoiled(30):
        statuses.append(server.post("/v1/chat/completions", messages=said("see ", url(data)), max_tokens=1)[0])
    assert set(statuses) <= {200, 400} and 400 in statuses
    assert server.raw("POST", "/generate", b"x" * (65 << 20), JSON)[0] == 413
    assert server.get("/health") == {"status": "serving"}
    body = json.dumps({"messages": said("see", url(b"\0" * (33 << 20))), "max_tokens": 1}).encode()
    status, _, reply = server.raw("POST", "/v1/chat/completions", body, JSON)
    assert status == 400 and b"an image of 33 MB; at most 32 MB" in reply
    server.idle()


@pytest.mark.sweep  # how tiles are read and written: tests/parity/test_vision_tiles.py
def test_a_chat_about_an_image_in_tiles_is_what_the_engine_sees(tmp_path):
    """The text around the tiles is written before the prompt is made; ids with one placeholder an image are refused."""
    m = model("smolvlm")
    save_model(m, tmp_path / "model")
    running = Server(tmp_path / "model", tmp_path, "--kv-pages", "4096")
    try:
        messages = said("look ", url(file(raw(1, 100, 37))), " and ", url(file(raw(2, 30, 30))), "?")
        own = TokenChat(m.tokenizer, None, sampling=Sampling(), key=lambda t: t, max_context=500, sight=m.sight)
        own.give(messages)
        prompt, media = own.trajectory.tokens, own.trajectory.media
        assert len(media) == 3 + 5
        reply = running.client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=8,
            seed=5,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        expected = asyncio.run(
            engine(m).generate(
                Request(prompt, Sampling(max_tokens=8, ignore_eos=True), key=sample_key(5, 0, 0), media=tuple(media))
            )
        )
        assert reply.prompt_token_ids == prompt and reply.choices[0].token_ids == expected.tokens
        alone = [5, m.sight.placeholder, 6]
        status, said_back = running.post("/generate", input_ids=alone, image_data=[url(file(raw(1, 100, 37)))])
        assert status == 400 and "1 image placeholders for 3 images" in json.dumps(said_back)
    finally:
        running.stop()
