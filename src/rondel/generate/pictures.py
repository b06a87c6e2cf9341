"""Pictures on their way into a conversation: from what people have to what a model sees. Videos are in
generate/video.py.

part      {"type": "image", "image": path, data: URL, bytes, array or PIL image}, or OpenAI's {"type": "image_url", ...}
stored    the same, JSON-shaped, for task.data: a path or a data: URL, and a name made of its bytes
sent      what a client of a server sends: whole, as a data: URL; nothing is fetched, and no
          file is read that somebody else names
placed    tokens in which each single placeholder of the template has become as many as its image has cells
seen      an Image: RGB, scaled to whole cells of the model's sight
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rondel.core.errors import DataError
from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig, ImageTiles

Messages = list[dict[str, Any]]
PIXELS = 1 << 26  # of a picture before it is scaled: 64 megapixels; a small file may hold more than any memory
BYTES = 1 << 25  # of a file
ALL = 1 << 28  # pixels of the images that a client sends at once, before they are scaled
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # what is read; others have readers that run programs
HEADS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}
PICTURE_HEADS = (*HEADS, b"BM", b"II*\0", b"MM\0*")  # how the bytes of each of FORMATS begin
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
            f"a part of type {kind!r} in a message: text, images and videos as frames are carried, audio and files are "
            f"not. Use 'text', 'image' and 'video'"
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
        bare = [part if source is None else bare_part(source) for part, source in zip(parts, found)]
        plain.append({**message, "content": bare})
    return plain, sources


def bare_part(source: Any) -> dict[str, Any]:
    """What a template is given of an image: of one that was cut, how."""
    return {"type": "image"} | ({"tiles": [source.rows, source.columns]} if isinstance(source, ImageTiles) else {})


def place_images(
    tokens: list[int], images: Sequence[Image], sight: ImageProcessorConfig
) -> tuple[list[int], list[ImagePlaceholder]]:
    """One placeholder an image -> one a cell, and where each image then is."""
    at = [i for i, token in enumerate(tokens) if token in sight.placeholders]
    if len(at) != len(images):
        what = "images" if sight.video is None else "images and steps of videos"
        raise DataError(
            f"{len(at)} image placeholders for {len(images)} {what}: "
            + (
                "a text contains the placeholder itself; remove it"
                if len(at) > len(images)
                else "the chat template shows no place for an image"
            )
        )
    out: list[int] = []
    media: list[ImagePlaceholder] = []
    done = 0
    for i, image in zip(at, images):
        if tokens[i] != sight.placeholder_of(image):
            raise DataError("the chat template shows images and videos in another order than the messages have them")
        out += tokens[done:i]
        media.append(ImagePlaceholder(len(out), image))
        out += [tokens[i]] * image.tokens
        done = i + 1
    return out + tokens[done:], media


def tool_image_parts(result: Any) -> list[dict[str, Any]] | None:
    """What a tool returned, as parts, if there is a picture in it: opened, or an array of
    pixels, alone or in a list with texts.
    """
    pieces = result if isinstance(result, list | tuple) else [result]
    if not any(is_opened_image(piece) for piece in pieces):
        return None
    return [
        {"type": "image", "image": piece} if is_opened_image(piece) else {"type": "text", "text": str(piece)}
        for piece in pieces
    ]


def is_opened_image(value: Any) -> bool:
    """Whether it is an array of pixels or a PIL image."""
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
    sources = split_images(messages)[1]
    images = iter(await run_on_image_thread(_process_within, sources, sight, room) if sources else [])
    return [
        {**message, "content": [{"type": "image", "image": next(images)} if is_image(part) else part for part in parts]}
        if (parts := parts_of(message))
        else message
        for message in messages
    ]


async def all_seen(sources: Sequence[Any], sight: ImageProcessorConfig, room: int) -> list[Image]:
    """What a model sees of them, read on a thread, so that nobody else waits."""
    if not sources:
        return []
    return images_of(await run_on_image_thread(_process_within, sources, sight, room))


def images_of(seen: Sequence[Image | ImageTiles]) -> list[Image]:
    """Each tile an image."""
    return [image for one in seen for image in (one.images if isinstance(one, ImageTiles) else [one])]


async def run_on_image_thread(function: Callable[..., Any], *args: Any) -> Any:
    """On the thread for pictures: one at a time, since an open picture may take some hundred megabytes."""
    return await asyncio.get_running_loop().run_in_executor(_image_thread(), function, *args)


@cache
def _image_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "rondel-pictures")


def count_image_tokens(sources: Sequence[Any], sight: ImageProcessorConfig) -> list[int]:
    """Tokens that each will take, by its head alone; of one that is cut, those of its tiles."""
    sizes = [open_image_head(source).size for source in sources if not isinstance(source, ImageTiles)]
    if (pixels := sum(map(math.prod, sizes))) > ALL:
        raise TooLarge(
            f"{len(sizes)} images of {pixels >> 20} megapixels together; at most {ALL >> 20}: scale them down"
        )
    left = iter(sizes)
    return [
        sum(image.tokens for image in source.images)
        if isinstance(source, ImageTiles)
        else _image_tokens(sight, next(left))
        for source in sources
    ]


def _image_tokens(sight: ImageProcessorConfig, size: tuple[int, int]) -> int:
    each = math.prod(_fitted_size(sight, size)) // sight.token_pixels**2
    return each if sight.tiles is None else each * sight.tiles.tile_count(*size)


def _process_within(sources: Sequence[Any], sight: ImageProcessorConfig, room: int) -> list[Image | ImageTiles]:
    """Their heads are read first: what will not fit is not opened."""
    if (wanted := sum(count_image_tokens(sources, sight))) > room:
        raise TooLarge(
            f"{len(sources)} images of {wanted} tokens together; there is room for {room}: send fewer, or smaller ones"
        )
    return [process_image(source, sight) if sight.tiles is None else process_tiles(source, sight) for source in sources]


# -- from what people have -------------------------------------------------------------------------


def process_image(source: Any, sight: ImageProcessorConfig) -> Image:
    """What a model of this sight sees. Equal paths and URLs are read once."""
    if isinstance(source, Image):
        return source
    return _process_image_cached(source, sight) if isinstance(source, str) else _read_image(source, sight)


def process_tiles(source: Any, sight: ImageProcessorConfig) -> ImageTiles:
    """What a model sees that cuts images into tiles. Equal paths and URLs are read once."""
    if isinstance(source, ImageTiles):
        return source
    return _process_tiles_cached(source, sight) if isinstance(source, str) else _read_tiles(source, sight)


@lru_cache(maxsize=KEPT)
def _process_tiles_cached(source: str, sight: ImageProcessorConfig) -> ImageTiles:
    return _read_tiles(source, sight)


def _read_tiles(source: Any, sight: ImageProcessorConfig) -> ImageTiles:
    """Scaled, then to whole tiles, cut; and the whole, scaled once more: as transformers' processors do."""
    from PIL import Image as Pillow

    assert sight.tiles is not None, "a model that cuts images into tiles"
    head, side = open_image_head(source), sight.tiles.side
    rows, columns = sight.tiles.tile_grid(*head.size)
    whole = head
    if sight.tiles.longest is not None:
        size = sight.tiles.scaled_size(*head.size)
        whole = Pillow.fromarray(scaled_pixels(whole, size, sight))
        whole = Pillow.fromarray(scaled_pixels(whole, sight.tiles.cut_size(*size), sight))
    pixels = np.asarray(whole) if rows else None
    tiles = [
        Image.from_pixels(pixels[y * side : (y + 1) * side, x * side : (x + 1) * side], sight.token_pixels)
        for y in range(rows)
        for x in range(columns)
        if pixels is not None
    ]
    tiles.append(Image.from_pixels(scaled_pixels(whole, (side, side), sight), sight.token_pixels))
    return ImageTiles(tuple(tiles), rows, columns)


def open_image(source: Any) -> Any:
    """As a PIL image whose pixels have been read."""
    return _coloured(open_image_head(source))


def seen_as(picture: Any, sight: ImageProcessorConfig) -> Image:
    """An opened PIL image, scaled as transformers' processors do."""
    return Image.from_pixels(scaled_pixels(picture, _fitted_size(sight, picture.size), sight), sight.token_pixels)


def scaled_pixels(picture: Any, size: tuple[int, int], sight: ImageProcessorConfig) -> np.ndarray:
    """[H, W, 3] of a PIL image at this (width, height)."""
    from PIL import Image as Pillow

    picture = _coloured(picture)
    return np.asarray(
        picture if size == picture.size else picture.resize(size, Pillow.Resampling[sight.resample.upper()])
    )


@lru_cache(maxsize=KEPT)
def _process_image_cached(source: str, sight: ImageProcessorConfig) -> Image:
    return _read_image(source, sight)


def _read_image(source: Any, sight: ImageProcessorConfig) -> Image:
    return seen_as(open_image_head(source), sight)


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
    open_image_head(image.pixels).save(out, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def image_part(source: Any, folder: Path | None = None) -> dict[str, Any]:
    """A part for task.data. Paths count from `folder`; what has no path becomes a data: URL.
    The picture's head is read, so that what is none is known before the run."""
    if isinstance(source, dict) and source.keys() <= {"bytes", "path"}:  # as data sets of the hub have it
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and not source.startswith(("data:", "http:", "https:")):
        source = str((folder or Path()).joinpath(source).resolve())
    raw = image_bytes(source)
    picture = open_image_head(raw)
    size = picture.size
    if not isinstance(source, str):
        kind = next((kind for head, kind in HEADS.items() if raw.startswith(head)), "png")
        source = f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"
    return {"type": "image", "image": source, "name": _content_hash(raw), "size": list(size)}


def is_picture(value: Any) -> bool:
    """Whether a field of a row holds a picture, and not its path. Other bytes, a digest or a pickle, are none."""
    if isinstance(value, list):
        return bool(value) and is_picture(value[0])
    if isinstance(value, dict):
        value = value.get("bytes")
    return hasattr(value, "convert") or (isinstance(value, bytes) and value.startswith(PICTURE_HEADS))


def _content_hash(raw: bytes) -> str:
    return blake2b(raw, digest_size=8).hexdigest()


def image_bytes(source: Any) -> bytes:
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
        open_image_head(source).save(out, "PNG")
        raw = out.getvalue()
    if len(raw) > BYTES:
        raise DataError(f"an image of {len(raw) >> 20} MB; at most {BYTES >> 20} MB: scale it down")
    return raw


def open_image_head(source: Any) -> Any:
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
            picture = Pillow.open(io.BytesIO(image_bytes(source)), formats=FORMATS)
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
