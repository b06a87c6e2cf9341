"""Videos on their way into a conversation: from what people have to the frames that a model sees.

part    {"type": "video", "video": [frame, ...], "fps": 2}; a frame is what an image is, and instead of the list there
        may be a folder of frames, an animated GIF or WebP, or an array [F, H, W, 3]
stored  the same for task.data: paths or data: URLs of the frames, the second at which each is seen, a name
seen    steps of a few frames for a model that reads videos so (core/video.py), for every other one each frame an image

Nothing is decoded but what Pillow reads: a file of a video codec is refused with the command that makes frames of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rondel.core.errors import DataError
from rondel.core.media import Image, ImageProcessorConfig, ImageTiles
from rondel.generate.pictures import (
    ALL,
    Messages,
    bare_part,
    image_part,
    images_of,
    is_image,
    is_opened_image,
    open_image_head,
    parts_of,
    process_image,
    process_tiles,
    scaled_pixels,
    source_of,
)

FPS = 2.0  # frames a second where nobody says: as Qwen's processors sample
KEYS = ("type", "video", "video_url", "fps", "sample_fps", "times", "num_frames", "name", "size")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
CODECS = (".mp4", ".mkv", ".avi", ".mov", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts", ".3gp")
KEPT = 16  # videos that are kept as they are seen: siblings ask for the same


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """Frames of equal size, each what an image is, and the second at which each is seen."""

    frames: tuple[Any, ...]
    times: tuple[float, ...]


# -- in a conversation ------------------------------------------------------------------------------


def split_media(messages: Messages, sight: ImageProcessorConfig | None) -> tuple[Messages, list[Any]]:
    """Messages as a template reads them, where an image or a video is only that, and their sources in order. Where a
    model of this sight does not read videos, their frames are images.
    """
    sources: list[Any] = []
    plain: Messages = []
    for message in messages:
        if parts := parts_of(message):
            content = [bare for part in parts for bare in _bare_parts(part, sight, sources)]
            message = {**message, "content": content}
        plain.append(message)
    return plain, sources


def _bare_parts(
    part: dict[str, Any], sight: ImageProcessorConfig | None, sources: list[Any]
) -> Iterator[dict[str, Any]]:
    """What a template is given of a part; its source is added to `sources`."""
    if is_video(part):
        video = video_frames(part)
        if sight is not None and sight.video is not None:
            sources.append(video)
            yield {"type": "video", "times": list(video.times)}
        else:
            sources += video.frames
            yield from ({"type": "image"} for _ in video.frames)
    elif is_image(part):
        source = source_of(part)
        if sight is not None and sight.tiles is not None:
            source = process_tiles(source, sight)
        sources.append(source)
        yield bare_part(source)
    else:
        yield part


def process_media(sources: Sequence[Any], sight: ImageProcessorConfig) -> list[Image]:
    """What a model of this sight sees of them, in order."""
    seen: list[Image | ImageTiles] = []
    for source in sources:
        if isinstance(source, VideoFrames):
            seen += process_video(source, sight)
        else:
            seen.append(source if isinstance(source, ImageTiles) else process_image(source, sight))
    return images_of(seen)


# -- what a part says --------------------------------------------------------------------------------


def is_video(part: dict[str, Any]) -> bool:
    return part.get("type") in ("video", "video_url")


def video_frames(part: dict[str, Any], folder: Path | None = None) -> VideoFrames:
    """The frames of a part, `num_frames` of them evenly spaced if it says so. Paths count from `folder`."""
    if odd := [key for key in part if key not in KEYS]:
        raise DataError(
            f"a video part with '{odd[0]}', which is not read: give 'video', the frames, and 'fps', 'times' or "
            f"'num_frames'; frames are scaled by the model's own settings and model.vision.image_tokens"
        )
    found = part.get("video", part.get("video_url"))
    frames, times = _read_frames(found["url"] if isinstance(found, dict) and "url" in found else found, folder)
    if not frames:
        raise DataError("a video of 0 frames: give at least one, or leave the video out")
    times = _frame_times(part, len(frames), times)
    wanted = part.get("num_frames", len(frames))
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise DataError(f"a video with num_frames = {wanted!r}: it is a whole number, at least 1")
    if wanted < len(frames):
        kept = np.linspace(0, len(frames) - 1, wanted).round().astype(int)
        frames, times = [frames[i] for i in kept], [times[i] for i in kept]
    return VideoFrames(tuple(frames), tuple(times))


def video_part(part: Any, folder: Path | None = None) -> dict[str, Any]:
    """A part for task.data from a part, or from its frames alone. The heads of all frames are read."""
    plain = part if isinstance(part, dict) and not part.keys() <= {"bytes", "path"} else {"video": part}
    video = video_frames(plain, folder)
    stored = [image_part(frame, folder) for frame in video.frames]
    if odd := next((i for i, one in enumerate(stored) if one["size"] != stored[0]["size"]), None):
        raise _unequal(odd, stored[odd]["size"], stored[0]["size"])
    name = blake2b(repr(([one["name"] for one in stored], video.times)).encode(), digest_size=8).hexdigest()
    return {
        "type": "video",
        "video": [one["image"] for one in stored],
        "times": list(video.times),
        "name": name,
        "size": stored[0]["size"],
    }


def process_video(video: VideoFrames, sight: ImageProcessorConfig) -> list[Image]:
    """The steps that a model of this sight sees, each an Image of a few frames; or each frame as an image."""
    return _process_cached(video, sight) if all(isinstance(f, str) for f in video.frames) else _process(video, sight)


@lru_cache(maxsize=KEPT)
def _process_cached(video: VideoFrames, sight: ImageProcessorConfig) -> list[Image]:
    return _process(video, sight)


def _process(video: VideoFrames, sight: ImageProcessorConfig) -> list[Image]:
    if (how := sight.video) is None:
        return [process_image(frame, sight) for frame in video.frames]
    heads = [open_image_head(frame) for frame in video.frames]
    if odd := next((i for i, head in enumerate(heads) if head.size != heads[0].size), None):
        raise _unequal(odd, heads[odd].size, heads[0].size)
    try:
        width, height = heads[0].size
        size = sight.frame_size(width, height, len(heads))
    except ValueError as error:
        raise DataError(str(error)) from error
    seen = [scaled_pixels(head, size, sight) for head in heads]
    seen += [seen[-1]] * (-len(seen) % how.step)
    return [
        Image.from_pixels(np.concatenate(seen[i * how.step : (i + 1) * how.step]), sight.token_pixels, how.step, time)
        for i, time in enumerate(how.step_positions(video.times))
    ]


def _unequal(at: int, size: Sequence[int], first: Sequence[int]) -> DataError:
    return DataError(
        f"frame {at} of a video has {size[0]}x{size[1]} pixels and frame 0 {first[0]}x{first[1]}: give frames of one "
        "size"
    )


def _frame_times(part: dict[str, Any], n: int, known: list[float] | None) -> list[float]:
    """Seconds of each frame: "times", or by "fps" (qwen-vl-utils calls it "sample_fps"), or as the file has them."""
    if (times := part.get("times")) is not None:
        if not isinstance(times, list | tuple) or len(times) != n or not all(map(_is_time, times)):
            raise DataError(f"a video of {n} frames with times = {times!r:.60}: they are {n} seconds, one a frame")
        return [float(time) for time in times]
    fps = part.get("fps", part.get("sample_fps"))
    if fps is None:
        return known if known is not None else [i / FPS for i in range(n)]
    try:
        rate = float(fps)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 < rate < math.inf:
        raise DataError(f"a video with fps = {fps!r}: it is the number of its frames that are one second, above 0")
    return [i / rate for i in range(n)]


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _read_frames(found: Any, folder: Path | None) -> tuple[list[Any], list[float] | None]:
    """Frames, and their seconds where the file says them."""
    if isinstance(found, np.ndarray) and found.ndim == 4:
        return list(found), None
    if isinstance(found, list | tuple):
        return [_without_scheme(frame) for frame in found], None
    if isinstance(found, dict) and found.keys() <= {"bytes", "path"}:  # as data sets of the hub have it
        found = found.get("bytes") or found.get("path")
    found = _without_scheme(found)
    if isinstance(found, str) and not found.startswith(("data:", "http:", "https:")):
        path = (folder or Path()).joinpath(found)
        if path.is_dir():
            return _folder_frames(path), None
        if path.suffix.lower() in CODECS:
            raise DataError(
                f"the video {found}: Rondel decodes no video files. Make frames of it, "
                f"`mkdir frames && ffmpeg -i {found} -vf fps=2 frames/%05d.png`, and give video = 'frames' with fps = 2"
            )
        if not path.exists():
            raise DataError(
                f"no video at {found}: give a folder of frames, a list of frames, or an animated GIF or WebP"
            )
        found = str(path)
    if isinstance(found, str | bytes) or is_opened_image(found):
        return _animation_frames(found)
    raise DataError(
        f"a video of type {type(found).__name__}; give a list of frames, a folder of them, an animated GIF or WebP, or "
        f"an array [F, H, W, 3]"
    )


def _without_scheme(source: Any) -> Any:
    return source.removeprefix("file://") if isinstance(source, str) else source


def _folder_frames(path: Path) -> list[str]:
    """Its images in the order of their names, in which frame10 is behind frame9."""
    frames = [one for one in path.iterdir() if one.suffix.lower() in SUFFIXES]
    if not frames:
        raise DataError(f"the video {path}: a folder without frames; they are images, {', '.join(SUFFIXES)}")
    return [str(one) for one in sorted(frames, key=lambda one: _natural_key(one.name))]


def _natural_key(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _animation_frames(source: Any) -> tuple[list[Any], list[float] | None]:
    """Of a GIF or WebP each frame as an opened image, and the second at which it is shown."""
    from PIL import ImageSequence

    picture = open_image_head(source)
    frames: list[Any] = []
    times, at = [], 0.0
    try:
        if (pixels := getattr(picture, "n_frames", 1) * picture.size[0] * picture.size[1]) > ALL:
            raise DataError(f"a video of {pixels >> 20} megapixels; at most {ALL >> 20}: give fewer or smaller frames")
        for frame in ImageSequence.Iterator(picture):
            frames.append(frame.convert("RGB"))
            times.append(at)
            at += (frame.info.get("duration") or 100) / 1000
    except DataError:
        raise
    except Exception as error:  # a file that ends too early, or that was made to break its reader
        raise DataError(f"a video whose frames cannot be read: {type(error).__name__}: {error}"[:200]) from error
    return frames, times if len(frames) > 1 else None
