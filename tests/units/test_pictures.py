"""Pictures in tasks, conversations, stored rollouts and over the gateway: what is
accepted, what is refused, and in which words.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import time

import numpy as np
import pytest
from PIL import Image as Pillow

from kits.engine import engine
from kits.vision import image, model, stream, trajectory
from rondel.buffer.state import decode, encode
from rondel.cli.view import trajectory_view as card
from rondel.core.errors import CheckpointError, DataError
from rondel.core.types import Completion, Group, Sampling, Score, Task
from rondel.generate import pictures
from rondel.generate.chat_apis import anthropic, responses
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.gateway.agent import function_agent
from rondel.generate.envs.gateway.env import Gateway
from rondel.generate.envs.gateway.openai import read_messages
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.sources import load_tasks, question_text
from rondel.runtime.journal.store import groups_of, read_step, write_step
from rondel.system.http.response import RequestRefusal

QWEN = (  # of Qwen2.5-VL, without its videos
    "{% set image_count = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] "
    "}}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}Picture {{ image_count.value }}: "
    "{% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] "
    "}}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def raw(seed: int = 0, width: int = 56, height: int = 56) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Pillow.fromarray(array).save(out, "PNG")
    return out.getvalue()


def url(array: np.ndarray) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(array)).decode()}"


def chat(m, **more) -> TokenChat:
    async def answer(request):
        chat.asked = request
        return Completion([5, 6], [-1.0, -2.0], [0, 0], "stop", len(request.tokens), text="ab")

    return TokenChat(
        m.tokenizer, answer, sampling=Sampling(), key=lambda turn: turn, max_context=512, sight=m.sight, **more
    )


def said(*parts) -> dict:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


# -- conversations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, QWEN])
def test_a_conversation_with_images_only_grows(template):
    """The opening, a tool's answer with an image, another one from the user: each at its
    place, and what came before untouched.
    """
    m = copy.copy(model())
    if template:
        m.tokenizer = copy.deepcopy(m.tokenizer)
        m.tokenizer.chat_template = template
    c, pad = chat(m), m.sight.placeholder
    wide = raw(1, 112, 56)
    c.give(
        [
            said(
                "look ",
                {"type": "image", "image": raw(0)},
                " and ",
                {"type": "image_url", "image_url": {"url": url(wide)}},
                "?",
            )
        ]
    )
    first = list(c.trajectory.tokens)
    assert [p.image.tokens for p in c.trajectory.media] == [4, 8] and first.count(pad) == 12
    for place in c.trajectory.media:
        assert (
            first[place.start : place.end] == [pad] * place.image.tokens
            and first[place.start - 1] != pad != first[place.end]
        )
    asyncio.run(c.reply())
    assert chat.asked.media == tuple(c.trajectory.media)
    c.give(
        [
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "image": Pillow.fromarray(raw(2))}]},
            said("again"),
        ]
    )
    assert c.trajectory.tokens[: len(first)] == first and len(c.trajectory.media) == 3
    place = c.trajectory.media[2]
    assert not any(c.trajectory.mask[place.start : place.end])
    asyncio.run(c.reply())
    mark = c.turn_mark
    c.give([said({"type": "image", "image": raw(0)}, "same")])
    assert c.trajectory.media[3].image.digest == c.trajectory.media[0].image.digest
    twin = c.fork(mark)
    assert twin.trajectory.media == c.trajectory.media[:3] and twin.sight is m.sight


def test_what_stands_for_an_image_must_have_one():
    m = model()
    with pytest.raises(
        DataError, match="1 image placeholders for 0 images and steps of videos: a text contains the placeholder itself"
    ):
        chat(m).give([{"role": "user", "content": "see <|image_pad|>", "split_special_tokens": False}])
    (c := chat(m)).give([{"role": "user", "content": "see <|image_pad|>"}])  # text, unless the data means it
    assert m.sight.placeholder not in c.trajectory.tokens and not c.trajectory.media
    with pytest.raises(DataError, match="a model that reads text alone"):
        blind = copy.copy(m)
        blind.sight = None
        chat(blind).give([said({"type": "image", "image": raw()})])
    m = copy.copy(m)
    m.tokenizer = copy.deepcopy(m.tokenizer)
    m.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(DataError, match="the chat template shows no place for an image"):
        chat(m).give([said({"type": "image", "image": raw()})])
    with pytest.raises(DataError, match=r"a part of type 'input_audio'.*audio and files are not"):
        chat(m).give([said({"type": "input_audio", "input_audio": {}})])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("https://x.y/z.png", "a run fetches nothing; download it"),
        ("/nowhere/z.png", "no image at /nowhere/z.png"),
        ("data:image/png;base64,????", "base64 is broken"),
        ("data:text/html,hello", "an image is data:image/png;base64"),
        (b"GIF9 no", "cannot be read"),
        (png(raw())[:200], "cannot be shown"),
        (np.zeros((4, 4), np.float32), r"an array \(4, 4\) of float32 is no image"),
        (np.zeros((2, 900, 3), np.uint8), "more than 200 times as long as wide"),
        (Pillow.new("L", (9000, 9000)), "at most 64 megapixels"),
        (7, "an image of type int"),
    ],
)
def test_a_bad_image_is_refused_by_what_is_wrong_with_it(source, words):
    with pytest.raises(DataError, match=words):
        pictures.process_image(source, model().sight)


def test_a_large_image_is_scaled_to_the_budget():
    from dataclasses import replace

    sight = replace(model().sight, most=16 * 28 * 28)
    seen = pictures.process_image(raw(0, 900, 300), sight)
    assert (seen.rows, seen.columns) == (2, 6) and seen.tokens <= 16
    assert pictures.process_image(raw(0, 20, 20), sight).tokens == 4


# -- tasks -----------------------------------------------------------------------------------------


def test_a_row_brings_its_image_as_path_bytes_or_picture(tmp_path):
    """The same picture four ways is one question; another picture under the same words is another."""
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics" / "a.png").write_bytes(png(raw(1)))
    rows = [
        {"prompt": "what?", "answer": "1", "image": "pics/a.png"},
        {"prompt": "what?", "answer": "1", "image": url(raw(1))},
        {"prompt": "what?", "answer": "2", "image": url(raw(2))},
    ]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in rows))
    tasks = load_tasks({"kind": "jsonl", "path": str(file), "image": "image"}, env="single_turn")
    assert len(tasks.train) == 2 and tasks.duplicates == 1
    assert json.loads(json.dumps(tasks.train[0].data)) == tasks.train[0].data
    assert question_text(tasks.train[0]).startswith("user: [image ") and question_text(tasks.train[0]).endswith(
        "]what?"
    )
    c = chat(model())
    c.give(*SingleTurn(suffix=" say").prompt(tasks.train[0]))
    assert c.trajectory.media[0].image.tokens == 4

    from pyarrow import Table
    from pyarrow import parquet as format

    held = [
        {
            "prompt": "<image> or <image>?",
            "answer": "1",
            "pictures": [{"bytes": png(raw(i)), "path": None} for i in (4, 5)],
        }
    ]
    format.write_table(Table.from_pylist(held), tmp_path / "t.parquet")
    [task] = load_tasks({"kind": "parquet", "path": str(tmp_path / "t.parquet"), "image": "pictures"}, env="x").train
    assert [p["type"] for p in task.data["messages"][0]["content"]] == ["image", "text", "image", "text"]
    with pytest.raises(DataError, match="row 1: the field 'pictures' holds an image; say image = 'pictures'"):
        load_tasks({"kind": "parquet", "path": str(tmp_path / "t.parquet")}, env="x")
    digest = {"prompt": "1", "answer": "2", "digest": b"\x00\x01abc"}
    assert load_tasks({"kind": "list", "rows": [digest]}, env="x").train[0].data == digest, "bytes, and no picture"
    with pytest.raises(DataError, match=r"t.jsonl:1: no image at .*/b.png"):
        file.write_text(json.dumps({"prompt": "what?", "answer": "1", "image": "b.png"}))
        load_tasks({"kind": "jsonl", "path": str(file), "image": "image"}, env="x")
    with pytest.raises(DataError, match="2 times <image> in the question, and 1 images"):
        data = {"kind": "list", "image": "i", "rows": [{"prompt": "<image><image>", "answer": "1", "i": url(raw(1))}]}
        load_tasks(data, env="x")


# -- what is stored --------------------------------------------------------------------------------


def test_stored_rollouts_have_each_picture_once_and_give_it_back(tmp_path):
    m = model()
    given = stream(m, 3, image(m, 1), 2, image(m, 2, 1, 2), 2)
    task = Task(
        "t",
        "single_turn",
        {"messages": [said({"type": "image", "image": url(raw(7)), "name": "x"}, "which?")], "answer": "b"},
    )
    members = [trajectory(m, given, [7, 8 + i], [-1.0, -2.0]) for i in range(3)]
    for t in members:
        t.score = Score(1.0)
    group = Group(4, task, members, 0)
    for step in (1, 2):
        write_step(tmp_path, step, [group])
    files = sorted(p.name for p in (tmp_path / "rollouts" / "media").iterdir())
    assert len(files) == 3 and all(name.endswith(".png") for name in files), "two that were seen, and the task's own"
    rows = read_step(tmp_path, 2)
    [again] = groups_of(rows)
    assert again.task == task
    for mine, theirs in zip(members, again.trajectories):
        assert [(p.start, p.image.digest) for p in mine.media] == [(p.start, p.image.digest) for p in theirs.media]
        assert np.array_equal(mine.media[0].image.pixels, theirs.media[0].image.pixels)
    whole = decode(json.loads(json.dumps(encode(group))))
    assert whole.trajectories[2].media[1].image.digest == members[0].media[1].image.digest
    pieces = card(rows[0], m.tokenizer.decode)["pieces"]
    assert (
        pieces[0][1].count("[image 56x56 ") == 1
        and pieces[0][1].count("[image 56x28 ") == 1
        and "<|image_pad|>" not in pieces[0][1]
    )
    assert "[image x]which?" in card(rows[0])["pieces"][0][1]
    (tmp_path / "rollouts" / "media" / f"{members[0].media[0].image.digest}.png").write_bytes(png(raw(9)))
    with pytest.raises(CheckpointError, match="is another picture than was trained on"):
        read_step(tmp_path, 1)


def test_an_agent_sends_images_whole():
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url(raw())}}]
    [message] = read_messages([{"role": "user", "content": parts}])
    assert message["content"][1] == {"type": "image", "image": url(raw())}
    c = chat(model())
    c.give([message])
    assert len(c.trajectory.media) == 1
    for address in ("https://x.y/z.png", "/etc/passwd", "file:///etc/passwd"):
        with pytest.raises(RequestRefusal, match="an image is sent whole"):
            read_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}])
    assert read_messages([{"role": "user", "content": [{"type": "text", "text": "a"}]}])[0]["content"] == "a"


def block(array: np.ndarray, **source) -> dict:
    whole = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(array)).decode()}
    return {"type": "image", "source": source or whole}


def test_blocks_and_items_are_the_same_messages():
    """Anthropic's image blocks, also in a tool's result, and the input_image of Responses: as
    OpenAI's chat says them.
    """
    shown = [{"type": "text", "text": "what?"}, {"type": "image", "image": url(raw())}]
    words = {"type": "text", "text": "what?"}
    asked = {"role": "user", "content": [words, block(raw())]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [words, block(raw())]}
    said_by = anthropic.read_messages(None, [asked, call, {"role": "user", "content": [result]}])
    assert [m["content"] for m in said_by] == [shown, "", shown] and said_by[2]["role"] == "tool"
    (_, bad) = anthropic.read_messages(None, [asked, {"role": "user", "content": [{**result, "is_error": True}]}])
    assert bad["content"] == [{"type": "text", "text": "error: "}, *shown]
    image = {"type": "input_image", "image_url": url(raw()), "detail": "auto"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what?"}, image]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "what?"}, image]},
    ]
    assert [m["content"] for m in responses.read_items(items)] == [shown, "", shown]
    for source in ({"type": "url", "url": "https://x.y/z.png"}, {"type": "file", "file_id": "f1"}, {"type": "base64"}):
        with pytest.raises(RequestRefusal, match="an image is sent whole"):
            anthropic.read_messages(None, [{"role": "user", "content": [block(raw(), **source)]}])
    with pytest.raises(RequestRefusal, match="an image is sent whole"):
        responses.read_items([{"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}])
    with pytest.raises(RequestRefusal, match="a part of type 'document'"):
        anthropic.read_messages(None, [{"role": "user", "content": [{"type": "document", "source": {}}]}])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm"])
@pytest.mark.parametrize("api", ["messages", "responses"])
def test_other_clients_talk_about_pictures_over_two_turns(api, kind):
    """A question with a picture, then one more: the first is known again, both are seen, and
    count_tokens counts them.
    """
    m = model(kind)
    e, counted = engine(m), []

    async def with_messages(task, base_url, api_key):
        import anthropic

        messages = [{"role": "user", "content": [{"type": "text", "text": "what?"}, block(raw(4))]}]
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0) as client:
            counted.append((await client.messages.count_tokens(model="m", messages=messages)).input_tokens)
            for _ in range(2):
                reply = await client.messages.create(model="m", messages=messages, max_tokens=4)
                counted.append(reply.usage.input_tokens + reply.usage.cache_read_input_tokens)
                again = {"role": "user", "content": [block(raw(5, 112, 56)), {"type": "text", "text": "and this?"}]}
                messages += [{"role": "assistant", "content": [c.model_dump() for c in reply.content]}, again]
            with pytest.raises(anthropic.BadRequestError, match="cannot be read"):
                await client.messages.create(
                    model="m",
                    messages=[{"role": "user", "content": [block(raw(4), type="base64", data="AAAA")]}],
                    max_tokens=4,
                )
        return 1.0

    async def with_responses(task, base_url, api_key):
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            before = None
            for picture in (raw(4), raw(5, 112, 56)):
                content = [
                    {"type": "input_text", "text": "what?"},
                    {"type": "input_image", "image_url": url(picture), "detail": "auto"},
                ]
                reply = await client.responses.create(
                    model="m",
                    input=[{"role": "user", "content": content}],
                    previous_response_id=before,
                    max_output_tokens=4,
                )
                before = reply.id
            with pytest.raises(openai.BadRequestError, match="cannot be shown"):
                content = [
                    {
                        "type": "input_image",
                        "image_url": f"data:image/png;base64,{base64.b64encode(png(raw())[:300]).decode()}",
                        "detail": "auto",
                    }
                ]
                await client.responses.create(model="m", input=[{"role": "user", "content": content}])
        return 1.0

    own = TokenChat(
        m.tokenizer, e.generate, sampling=Sampling(max_tokens=4), key=lambda t: t + 1, max_context=400, sight=m.sight
    )
    agent = {"messages": with_messages, "responses": with_responses}[api]
    found = asyncio.run(Gateway(function_agent(agent), timeout=60.0).run(Task("t", "gateway", {"prompt": "x"}), own))
    [trajectory] = found if isinstance(found, list) else [found]
    assert trajectory.score.value == 1.0
    process = pictures.process_image if m.sight.tiles is None else pictures.process_tiles
    shown = pictures.images_of([process(p, m.sight) for p in (raw(4), raw(5, 112, 56))])
    assert [place.image for place in trajectory.media] == shown and e.runner.eyes.looked == len(shown)
    assert len(shown) == {"qwen2_5_vl": 2, "smolvlm": 5 + 3}[kind]
    assert sum(now and not before for before, now in zip([False, *trajectory.mask], trajectory.mask)) == 2
    assert counted == [] or counted[0] == counted[1] == trajectory.mask.index(True)


@pytest.mark.slow
def test_pictures_of_clients_are_read_beside_the_loop(monkeypatch):
    """While a picture is read the loop goes on; and what will not fit is found out
    from the heads, before any is opened.
    """
    m, opened = model(), []
    read = pictures._coloured
    monkeypatch.setattr(
        pictures, "_coloured", lambda picture: (opened.append(picture.size), time.sleep(0.2), read(picture))[2]
    )

    async def work():
        beats, look = (
            0,
            asyncio.create_task(
                pictures.load_message_images([said("a", {"type": "image", "image": url(raw(31))})], m.sight, 100)
            ),
        )
        while not look.done():
            await asyncio.sleep(0.01)
            beats += 1
        return beats, look.result()

    beats, [message] = asyncio.run(work())
    assert beats > 5 and message["content"][1]["image"] == pictures.process_image(raw(31), m.sight)
    many = [said(*({"type": "image", "image": url(raw(40 + i))} for i in range(3)))]
    opened.clear()
    with pytest.raises(pictures.TooLarge, match="3 images of 12 tokens together; there is room for 11"):
        asyncio.run(pictures.load_message_images(many, m.sight, 11))
    assert opened == []
    vast = [said(*({"type": "image", "image": Pillow.new("L", (8000, 8000))} for i in range(5)))]
    with pytest.raises(pictures.TooLarge, match="5 images of 305 megapixels together; at most 256"):
        asyncio.run(pictures.load_message_images(vast, m.sight, 1 << 30))


def test_what_is_sent_as_png_is_seen_as_it_was():
    m = model()
    for seed, rows, columns in ((1, 2, 2), (2, 1, 5), (3, 7, 3)):
        one = image(m, seed, rows, columns)
        assert (
            pictures.process_image(pictures.url_of(one), m.sight) == one and pictures.process_image(one, m.sight) is one
        )


@pytest.mark.slow
def test_an_unmodified_client_talks_about_a_picture_over_two_turns():
    """The real engine behind the gateway: the second request sends the picture again,
    and it is known again, not a branch.
    """
    m = model()
    e = engine(m)

    async def agent(task, base_url, api_key):
        import openai

        said = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url(raw(4))}}]
        messages = [{"role": "user", "content": said}]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
                messages += [
                    reply.choices[0].message.model_dump(exclude_none=True),
                    {"role": "user", "content": "again"},
                ]
        return 1.0

    own = TokenChat(
        m.tokenizer, e.generate, sampling=Sampling(max_tokens=4), key=lambda t: t + 1, max_context=400, sight=m.sight
    )
    found = asyncio.run(Gateway(function_agent(agent), timeout=60.0).run(Task("t", "gateway", {"prompt": "x"}), own))
    [trajectory] = found if isinstance(found, list) else [found]
    assert [place.image.tokens for place in trajectory.media] == [4] and e.runner.eyes.looked == 1
    assert sum(now and not before for before, now in zip([False, *trajectory.mask], trajectory.mask)) == 2
