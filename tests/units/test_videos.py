"""Videos in tasks, conversations and stored rollouts: what is read, what is refused, and in which words."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from PIL import Image as Pillow

from kits.engine import engine
from kits.vision import ask, image, model, stream, trajectory
from rondel.buffer.state import decode, encode
from rondel.cli.view import trajectory_view
from rondel.core.errors import DataError, UserError
from rondel.core.types import Group, Sampling, Score, Task
from rondel.generate.engine.foreign import ForeignEngine
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.sources import load_tasks, question_text
from rondel.generate.video import process_video, video_frames
from rondel.runtime.journal.store import groups_of, read_step, write_step

FRAMES = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)


def chat(m, **more) -> TokenChat:
    return TokenChat(m.tokenizer, None, sampling=Sampling(), key=int, max_context=512, sight=m.sight, **more)


def said(*parts) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


def png(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Pillow.fromarray(array).save(out, "PNG")
    return out.getvalue()


def gif(path, frames=FRAMES, duration=500):
    first, *others = [Pillow.fromarray(frame) for frame in frames]
    first.save(path, "WEBP", save_all=True, append_images=others, duration=duration, lossless=True)
    return path


@pytest.fixture
def folder(tmp_path):
    """Frames whose names are ten apart: frame10 is behind frame9."""
    (made := tmp_path / "clip").mkdir()
    for number, frame in zip((8, 9, 10, 11), FRAMES):
        (made / f"frame{number}.png").write_bytes(png(frame))
    (made / "notes.txt").write_text("no frame")
    return made


def test_a_list_a_folder_an_array_and_an_animation_are_the_same_video(folder, tmp_path):
    sight = model("qwen3_vl").sight
    paths = [str(folder / f"frame{n}.png") for n in (8, 9, 10, 11)]
    url = f"data:image/webp;base64,{base64.b64encode(gif(tmp_path / 'a.webp').read_bytes()).decode()}"
    sources = [list(FRAMES), FRAMES, paths, [f"file://{p}" for p in paths], str(folder), str(tmp_path / "a.webp"), url]
    seen = [process_video(video_frames({"type": "video", "video": source}), sight) for source in sources]
    assert len(seen[0]) == 2 and all(steps == seen[0] for steps in seen)
    assert np.array_equal(seen[0][0].pixels, np.concatenate(FRAMES[:2])), "two frames below each other"
    assert seen[0][0] != seen[0][1]
    openai = {"type": "video_url", "video_url": {"url": str(tmp_path / "a.webp")}}
    assert process_video(video_frames(openai), sight) == seen[0]


def test_times_are_those_of_the_part_the_rate_or_the_file(tmp_path):
    path, plain = str(gif(tmp_path / "a.webp", duration=250)), {"type": "video", "video": FRAMES}
    assert video_frames(plain).times == (0.0, 0.5, 1.0, 1.5), "2 a second where nobody says"
    assert video_frames({**plain, "fps": 4}).times == (0.0, 0.25, 0.5, 0.75)
    assert video_frames({**plain, "sample_fps": "1"}).times == (0.0, 1.0, 2.0, 3.0)
    assert video_frames({**plain, "times": [0, 1, 5, 9]}).times == (0.0, 1.0, 5.0, 9.0)
    assert video_frames({"type": "video", "video": path}).times == (0.0, 0.25, 0.5, 0.75)
    few = video_frames({**plain, "num_frames": 2})
    assert few.times == (0.0, 1.5) and np.array_equal(few.frames[1], FRAMES[3])
    assert model("qwen3_vl").sight.video.step_times([0.0, 0.5, 1.0]) == [0.25, 1.0], "the last frame is repeated"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"video": "a.mp4"}, r"decodes no video files. Make frames of it, `mkdir frames && ffmpeg -i a.mp4 -vf fps=2"),
        ({"video": "nowhere"}, "no video at nowhere: give a folder of frames"),
        ({"video": "https://x.y/z.webm"}, "a run fetches nothing; download it"),
        ({"video": ["nowhere.png"]}, "no image at nowhere.png"),
        ({"video": []}, "a video of 0 frames: give at least one, or leave the video out"),
        ({"video": 7}, "a video of type int; give a list of frames, a folder"),
        ({}, "a video of type NoneType"),
        ({"video": FRAMES, "fps": 0}, "a video with fps = 0: it is the number of its frames that are one second"),
        ({"video": FRAMES, "fps": "fast"}, "a video with fps = 'fast'"),
        ({"video": FRAMES, "num_frames": 0}, "num_frames = 0: it is a whole number, at least 1"),
        ({"video": FRAMES, "times": [1, 2]}, "a video of 4 frames with times = .*: they are 4 seconds, one a frame"),
        ({"video": FRAMES, "max_pixels": 99}, "a video part with 'max_pixels', which is not read"),
        ({"video": [FRAMES[0], FRAMES[0][:32]]}, "frame 1 of a video has 64x32 pixels and frame 0 64x64"),
        ({"video": b"no image"}, "cannot be read"),
    ],
)
def test_a_bad_video_is_refused_by_what_is_wrong_with_it(part, words):
    with pytest.raises(DataError, match=words):
        chat(model("qwen3_vl")).give(said({"type": "video", **part}))


def test_an_empty_folder_has_no_frames(tmp_path):
    with pytest.raises(DataError, match=r"a folder without frames; they are images, \.png"):
        video_frames({"type": "video", "video": str(tmp_path)})


def test_a_video_stands_where_the_template_shows_it():
    """Between texts, beside an image, in an observation; a placeholder that a text spells is text."""
    m = model("qwen3_vl")
    c = chat(m)
    c.give(said("<|video_pad|>", {"type": "image", "image": FRAMES[0]}, {"type": "video", "video": FRAMES[:3]}, "?"))
    tokens, media = c.trajectory.tokens, c.trajectory.media
    assert [(p.image.frames, tokens[p.start]) for p in media] == [
        (1, m.sight.placeholder),
        (2, m.sight.video.placeholder),
        (2, m.sight.video.placeholder),
    ]
    assert sum(t in m.sight.placeholders for t in tokens) == sum(p.image.tokens for p in media)
    assert "<0.2 seconds><|vision_start|>" in m.tokenizer.decode(tokens)
    with pytest.raises(DataError, match="a model that reads text alone"):
        blind = chat(m)
        blind.sight = None
        blind.give(said({"type": "video", "video": FRAMES}))
    with pytest.raises(DataError, match="leaves no room for an answer: the context holds 20"):
        full = chat(m)
        full.max_context = 20
        full.give(said({"type": "video", "video": FRAMES}))
        asyncio.run(full.reply())


def test_a_row_brings_its_video(folder, tmp_path):
    file = tmp_path / "tasks.jsonl"
    rows = [
        {"prompt": "what is in <video>?", "answer": "1", "clip": "clip"},
        {"prompt": "what is in <video>?", "answer": "2", "clip": {"video": "clip", "fps": 1}},
        {"prompt": "which?", "answer": "3", "clip": ["clip/frame8.png", "clip/frame9.png"]},
        {"prompt": "<video> or <video>?", "answer": "4", "clip": [{"video": "clip"}, ["clip/frame9.png"]]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    tasks = load_tasks({"kind": "jsonl", "path": str(file), "video": "clip"}, env="x").train
    shown = [[p for p in task.data["messages"][0]["content"] if p["type"] == "video"] for task in tasks]
    assert [[len(p["video"]) for p in parts] for parts in shown] == [[4], [4], [2], [4, 1]]
    assert len({task.id for task in tasks}) == 4, "another rate is another question"
    assert shown[0][0]["video"][2] == str((folder / "frame10.png").resolve()) and shown[0][0]["size"] == [64, 64]
    assert "what is in [video " in question_text(tasks[0])
    assert json.loads(json.dumps(tasks[0].data)) == tasks[0].data
    m = model("qwen3_vl")
    (c := chat(m)).give(*SingleTurn(suffix=" say").prompt(tasks[0]))
    assert [p.image.frames for p in c.trajectory.media] == [2, 2]
    for row, words in (
        ({"prompt": "a", "answer": "1", "videos": "clip"}, "the field 'videos' is said to hold videos"),
        ({"prompt": "<video><video>", "answer": "1", "clip": "clip"}, "2 times <video> in the question, and 1 videos"),
        ({"prompt": "a", "answer": "1", "clip": "there.mp4"}, r"tasks.jsonl:1: .*ffmpeg -i there.mp4"),
    ):
        file.write_text(json.dumps(row))
        with pytest.raises(DataError, match=words):
            load_tasks({"kind": "jsonl", "path": str(file), **({"video": "clip"} if "clip" in row else {})}, env="x")
    messages = said({"type": "video", "video": str(folder), "fps": 1}, "what?")
    file.write_text(json.dumps({"messages": messages, "answer": "1"}))
    [task] = load_tasks({"kind": "jsonl", "path": str(file)}, env="x").train
    assert task.data["messages"][0]["content"][0]["times"] == [0.0, 1.0, 2.0, 3.0]


def test_stored_rollouts_have_each_step_once_and_give_it_back(tmp_path):
    m = model("qwen3_vl")
    given = stream(m, 3, image(m, 1, frames=2), 2, image(m, 2, 1, 2), 2)
    url = f"data:image/png;base64,{base64.b64encode(png(FRAMES[0])).decode()}"
    part = {"type": "video", "video": [url, url], "times": [0.0, 0.5], "name": "x"}
    members = [trajectory(m, given, [7, 8 + i], [-1.0, -2.0]) for i in range(3)]
    for t in members:
        t.score = Score(1.0)
    group = Group(4, Task("t", "single_turn", {"messages": said(part, "which?"), "answer": "b"}), members, 0)
    write_step(tmp_path, 1, [group])
    assert len(list((tmp_path / "rollouts" / "media").glob("*.png"))) == 3, "a step, an image, and the task's frame"
    rows = read_step(tmp_path, 1)
    [again] = groups_of(rows)
    whole = decode(json.loads(json.dumps(encode(group))))
    for read in (again, whole):
        assert read.task == group.task
        assert all(a.media == b.media for a, b in zip(read.trajectories, members))
        assert read.trajectories[0].media[0].image.frames == 2
    pieces = trajectory_view(rows[0], m.tokenizer.decode)["pieces"]
    assert pieces[0][1].count("[2 frames 64x64 ") == 1 and "<|video_pad|>" not in pieces[0][1]


def test_an_engine_says_what_it_does_not_read():
    m, other = model("qwen3_vl"), model("smolvlm")
    tokens, media = stream(m, 3, image(m, 1, frames=2), 2)
    with pytest.raises(UserError, match="an image of 4 tokens at token 3, where the prompt has no such run"):
        asyncio.run(engine(m).generate(ask([m.sight.placeholder] * len(tokens), media)))
    step = image(other, 1, frames=2)
    with pytest.raises(UserError, match="a step of 2 frames for 'random-smolvlm', which does not read videos"):
        asyncio.run(engine(other).generate(ask([5] * 9, [type(media[0])(1, step)])))
    server = object.__new__(ForeignEngine)
    server.server = type("Server", (), {"name": "SGLang", "blind": ""})()
    with pytest.raises(UserError, match=r'SGLang is sent no videos.*engine\.kind = "builtin"'):
        server._check_images(ask(tokens, media))
