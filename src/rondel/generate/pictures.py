"""Pictures on their way into a conversation: from what people have to what a model sees.

part      {"type": "image", "image": path, data: URL, bytes, array or PIL image}, or OpenAI's {"type": "image_url", ...}
stored    the same, JSON-shaped, for task.data: a path or a data: URL, and a name made of its bytes
sent      what a client of a server sends: whole, as a data: URL; nothing is fetched, and no
          file is read that somebody else names
seen      an Image: RGB, scaled to whole cells of the model's sight
placed    tokens in which each single placeholder of the template has become as many as its image has cells
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rondel.core.errors import DataError
from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig

Messages = list[dict[str, Any]]
PIXELS = 1 << 26  # of a picture before it is scaled: 64 megapixels; a small file may hold more than any memory
BYTES = 1 << 25  # of a file
ALL = 1 << 28  # pixels of the images that a client sends at once, before they are scaled
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # what is read; others have readers that run programs
HEADS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}
KEPT = 64  # pictures that are kept as they are seen: siblings ask for the same


def parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message's content; of a plain text none."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def is_image(part: dict[str, Any]) -> bool:
    """DataError for what is neither text nor an image."""
    kind = part.get("type")
    if kind in ("image", "image_url", "input_image"):
        return True
    if kind != "text":
        raise DataError(
            f"a part of type {kind!r} in a message: text and images are carried, audio, video and files are not. Use "
            f"'text' and 'image'"
        )
    return False


def source_of(part: dict[str, Any]) -> Any:
    found = part.get("image", part.get("image_url"))
    if isinstance(found, dict) and "url" in found:
        found = found["url"]
    if found is None:
        raise DataError(
            f"an image part with the keys {sorted(part)}; it needs 'image': a path, a data: URL, bytes, an array or a "
            f"PIL image"
        )
    return found


def split_images(messages: Messages) -> tuple[Messages, list[Any]]:
    """Messages as a template reads them, where an image is only that, and the sources of their images in order."""
    sources: list[Any] = []
    plain: Messages = []
    for message in messages:
        if not (parts := parts_of(message)):
            plain.append(message)
            continue
        found = [source_of(part) if is_image(part) else None for part in parts]
        sources += [source for source in found if source is not None]
        plain.append(
            {
                **message,
                "content": [part if source is None else {"type": "image"} for part, source in zip(parts, found)],
            }
        )
    return plain, sources


def place_images(
    tokens: list[int], images: Sequence[Image], sight: ImageProcessorConfig
) -> tuple[list[int], list[ImagePlaceholder]]:
    """One placeholder an image -> one a cell, and where each image then is."""
    n = tokens.count(sight.placeholder)
    if n != len(images):
        raise DataError(
            f"{n} image placeholders for {len(images)} images: "
            + (
                "a text contains the placeholder itself; remove it"
                if n > len(images)
                else "the chat template shows no place for an image"
            )
        )
    out: list[int] = []
    media: list[ImagePlaceholder] = []
    at = 0
    for image in images:
        end = tokens.index(sight.placeholder, at)
        out += tokens[at:end]
        media.append(ImagePlaceholder(len(out), image))
        out += [sight.placeholder] * image.tokens
        at = end + 1
    return out + tokens[at:], media


def tool_image_parts(result: Any) -> list[dict[str, Any]] | None:
    """What a tool returned, as parts, if there is a picture in it: opened, or an array of
    pixels, alone or in a list with texts.
    """
    pieces = result if isinstance(result, list | tuple) else [result]
    if not any(_is_opened(piece) for piece in pieces):
        return None
    return [
        {"type": "image", "image": piece} if _is_opened(piece) else {"type": "text", "text": str(piece)}
        for piece in pieces
    ]


def _is_opened(value: Any) -> bool:
    return (isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3) or hasattr(value, "convert")


# -- from clients of a server ------------------------------------------------------------------------


class TooLarge(DataError):
    """Images that outgrow the room there is, alone."""


def parse_image_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    """A client's image part as ours. DataError for an image that is not in it."""
    url = part.get("image_url", part.get("image"))
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        what = f"the address {str(url)[:60]!r}" if url is not None else f"the keys {sorted(part)}"
        raise DataError(
            f"{where} has a part of type '{part.get('type')}' with {what}; an image is sent whole, as "
            f"data:image/png;base64,..."
        )
    return {"type": "image", "image": url}


async def load_message_images(messages: Messages, sight: ImageProcessorConfig | None, room: int) -> Messages:
    """The same messages, each image as it is seen. What is no image, and what `room` tokens cannot hold, is refused."""
    if sight is None or not any(parts_of(message) for message in messages):
        return messages
    images = iter(await all_seen(split_images(messages)[1], sight, room))
    return [
        {**message, "content": [{"type": "image", "image": next(images)} if is_image(part) else part for part in parts]}
        if (parts := parts_of(message))
        else message
        for message in messages
    ]


async def all_seen(sources: Sequence[Any], sight: ImageProcessorConfig, room: int) -> list[Image]:
    """What a model sees of them, read on a thread, so that nobody else waits."""
    return await run_on_image_thread(_process_within, sources, sight, room) if sources else []


async def run_on_image_thread(function: Callable[..., Any], *args: Any) -> Any:
    """On the thread for pictures: one at a time, since an open picture may take some hundred megabytes."""
    return await asyncio.get_running_loop().run_in_executor(_image_thread(), function, *args)


@cache
def _image_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "rondel-pictures")


def count_image_tokens(sources: Sequence[Any], sight: ImageProcessorConfig) -> list[int]:
    """Tokens that each will take, by its head alone."""
    sizes = [_open_image(source).size for source in sources]
    if (pixels := sum(map(math.prod, sizes))) > ALL:
        raise TooLarge(
            f"{len(sizes)} images of {pixels >> 20} megapixels together; at most {ALL >> 20}: scale them down"
        )
    return [math.prod(_fitted_size(sight, size)) // sight.token_pixels**2 for size in sizes]


def _process_within(sources: Sequence[Any], sight: ImageProcessorConfig, room: int) -> list[Image]:
    """Their heads are read first: what will not fit is not opened."""
    if (wanted := sum(count_image_tokens(sources, sight))) > room:
        raise TooLarge(
            f"{len(sources)} images of {wanted} tokens together; there is room for {room}: send fewer, or smaller ones"
        )
    return [process_image(source, sight) for source in sources]


# -- from what people have -------------------------------------------------------------------------


def process_image(source: Any, sight: ImageProcessorConfig) -> Image:
    """What a model of this sight sees. Equal paths and URLs are read once."""
    if isinstance(source, Image):
        return source
    return _process_image_cached(source, sight) if isinstance(source, str) else _read_image(source, sight)


def open_image(source: Any) -> Any:
    """As a PIL image whose pixels have been read."""
    return _coloured(_open_image(source))


def seen_as(picture: Any, sight: ImageProcessorConfig) -> Image:
    """An opened PIL image, scaled as transformers' processors do."""
    from PIL import Image as Pillow

    size, picture = _fitted_size(sight, picture.size), _coloured(picture)
    if size != picture.size:
        picture = picture.resize(size, Pillow.Resampling[sight.resample.upper()])
    return Image.from_pixels(np.asarray(picture), sight.token_pixels)


@lru_cache(maxsize=KEPT)
def _process_image_cached(source: str, sight: ImageProcessorConfig) -> Image:
    return _read_image(source, sight)


def _read_image(source: Any, sight: ImageProcessorConfig) -> Image:
    return seen_as(_open_image(source), sight)


def _coloured(picture: Any) -> Any:
    try:
        return picture.convert("RGB")
    except (
        Exception
    ) as error:  # a file that ends too early, or that was made to break its reader: each raises what it likes
        raise DataError(f"an image that cannot be shown: {type(error).__name__}: {error}"[:200]) from error


def _fitted_size(sight: ImageProcessorConfig, size: tuple[int, int]) -> tuple[int, int]:
    try:
        return sight.target_size(*size)
    except ValueError as error:
        raise DataError(str(error)) from error


@lru_cache(maxsize=KEPT)
def url_of(image: Image) -> str:
    """What a model sees as a data: URL, without loss: a model of the same sight sees it again."""
    out = io.BytesIO()
    _open_image(image.pixels).save(out, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def image_part(source: Any, folder: Path | None = None) -> dict[str, Any]:
    """A part for task.data. Paths count from `folder`; what has no path becomes a data: URL.
    The picture's head is read, so that what is none is known before the run."""
    if isinstance(source, dict) and source.keys() <= {"bytes", "path"}:  # as data sets of the hub have it
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and not source.startswith(("data:", "http:", "https:")):
        source = str((folder or Path()).joinpath(source).resolve())
    raw = _image_bytes(source)
    picture = _open_image(raw)
    size = picture.size
    if not isinstance(source, str):
        kind = next((kind for head, kind in HEADS.items() if raw.startswith(head)), "png")
        source = f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"
    return {"type": "image", "image": source, "name": _content_hash(raw), "size": list(size)}


def is_picture(value: Any) -> bool:
    """Whether a field of a row holds a picture, and not its path."""
    if isinstance(value, list):
        return bool(value) and is_picture(value[0])
    return (
        isinstance(value, bytes)
        or hasattr(value, "convert")
        or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes))
    )


def _content_hash(raw: bytes) -> str:
    return blake2b(raw, digest_size=8).hexdigest()


def _image_bytes(source: Any) -> bytes:
    """The bytes of a picture's file; arrays and opened pictures become PNG."""
    if isinstance(source, bytes):
        raw = source
    elif isinstance(source, str) and source.startswith("data:"):
        head, _, body = source.partition(",")
        if not head.endswith(";base64") or not head.startswith("data:image/"):
            raise DataError(f"a URL that begins {head[:40]!r}: an image is data:image/png;base64,...")
        try:
            raw = base64.b64decode(body, validate=True)
        except ValueError as error:
            raise DataError(f"a data: URL whose base64 is broken: {error}") from error
    elif isinstance(source, str) and source.startswith(("http:", "https:")):
        raise DataError(
            f"the image {source[:80]}: a run fetches nothing; download it and give its path, or a data: URL"
        )
    elif isinstance(source, str):
        try:
            raw = Path(source).read_bytes()
        except OSError as error:
            raise DataError(f"no image at {source}: {error.strerror}") from error
    else:
        out = io.BytesIO()
        _open_image(source).save(out, "PNG")
        raw = out.getvalue()
    if len(raw) > BYTES:
        raise DataError(f"an image of {len(raw) >> 20} MB; at most {BYTES >> 20} MB: scale it down")
    return raw


def _open_image(source: Any) -> Any:
    """A PIL image whose head is read, and nothing else of it."""
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise DataError("images need the package pillow: pip install 'rondel[vision]'") from error
    if isinstance(source, np.ndarray):
        sides, colours = source.shape[:2], source.shape[2:]
        if source.dtype != np.uint8 or len(sides) < 2 or not source.size or colours not in ((), (3,), (4,)):
            raise DataError(f"an array {source.shape} of {source.dtype} is no image; give [H, W, 3] or [H, W] of uint8")
        picture = Pillow.fromarray(source)
    elif hasattr(source, "convert"):
        picture = source
    elif isinstance(source, bytes | str):
        try:
            picture = Pillow.open(io.BytesIO(_image_bytes(source)), formats=FORMATS)
        except DataError:
            raise
        except Exception as error:  # as above
            raise DataError(f"an image that cannot be read: {type(error).__name__}: {error}"[:200]) from error
    else:
        raise DataError(
            f"an image of type {type(source).__name__}; give a path, a data: URL, bytes, an array or a PIL image"
        )
    if not 0 < picture.size[0] * picture.size[1] <= PIXELS:
        raise DataError(
            f"an image of {picture.size[0]}x{picture.size[1]} pixels; at most {PIXELS >> 20} megapixels: scale it down"
        )
    return picture


# -- in the rows of a data set ---------------------------------------------------------------------


def interleave_images(asked: Any, images: Sequence[dict[str, Any]]) -> Messages:
    """A question with its images as messages: each in place of an "<image>" of the text,
    or all before the last user's words.
    """
    messages: Messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(m) for m in asked]
    marks = sum(str(m["content"]).count("<image>") for m in messages if isinstance(m.get("content"), str))
    if marks and marks != len(images):
        raise DataError(f"{marks} times <image> in the question, and {len(images)} images: one for each")
    left = iter(images)
    for message in messages:
        if marks and isinstance(message.get("content"), str) and "<image>" in message["content"]:
            message["content"] = list(_interleave_images(message["content"], left))
    if not marks and images:
        last = next((m for m in reversed(messages) if m.get("role") == "user"), messages[-1])
        own = last["content"]
        last["content"] = [*images, *([{"type": "text", "text": own}] if isinstance(own, str) else own)]
    return messages


def _interleave_images(text: str, images: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(text.split("<image>")):
        if number:
            yield next(images)
        if piece:
            yield {"type": "text", "text": piece}
