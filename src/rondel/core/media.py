"""Pictures beside tokens. A stream has two buffers that only grow: its tokens, and what
is seen where placeholder tokens stand.

    tokens   <user> <start> ░ ░ ░ ░ <end> which colour ? <assistant> b
    media                   └ Placed(start=2, image) ┘

A picture takes one token for each `cell` x `cell` pixels. What is seen is a matter of
place, not of the token's number: a placeholder that the policy itself draws is a token like any other.
"""

from __future__ import annotations

import math
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rondel.core.tiles import TileConfig
    from rondel.core.video import VideoProcessorConfig

LONGEST = 200  # times as long as wide: the limit of the families that are carried


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """How a model looks at pictures.

    placeholder   the token that stands where a picture is seen
    patch, merge  pixels a side of what its tower reads, and how many of these a side become one token
    temporal      frames of a patch; a picture repeats itself, a step of a video has as many
    least, most   pixels of a picture, which is scaled to lie between; where they are equal it has as many as it can
    mean, std     of the three colours, in [0, 1]
    form          how pixels are laid out for the tower (models/vision_families.py)
    side          pixels a side of every image where all are made squares; None: their proportions are kept
    resample      how an image is scaled, as Pillow names it
    frame         tokens around an image where the chat template writes one token for it
    frame_mark    that token; None: the first of the frame, and line breaks are around what the processor writes
    mutual        the tokens of an image attend to each other, also to those behind them
    tiles         how an image is cut into several, each of `side`; None: it is one
    video         how it reads videos; None: each frame is an image
    """

    placeholder: int
    patch: int
    merge: int
    temporal: int
    least: int
    most: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    form: str = "patches"
    side: int | None = None
    resample: str = "bicubic"
    frame: tuple[int, int] | None = None
    frame_mark: int | None = None
    mutual: bool = False
    tiles: TileConfig | None = None
    video: VideoProcessorConfig | None = None

    def normalized(self, pixels: np.ndarray) -> np.ndarray:
        """[H, W, 3] uint8 -> fp32 of mean 0 and deviation 1 as the tower has learned them."""
        return (pixels.astype(np.float32) * np.float32(1 / 255) - np.asarray(self.mean, np.float32)) / np.asarray(
            self.std, np.float32
        )

    def write_media(self, text: str, messages: Sequence[dict[str, Any]], tokenizer: Any) -> str:
        """What a chat template writes of these messages, each image and video in it as the family's processor writes
        it: a placeholder for each Image that is seen.
        """
        lists = [m["content"] for m in messages if isinstance(m.get("content"), list)]
        parts = [part for content in lists for part in content if part.get("type") in ("image", "video")]
        if self.frame is None and self.tiles is None and not any(part["type"] == "video" for part in parts):
            return text
        slot, *frame = tokenizer.convert_ids_to_tokens([self.placeholder, *(self.frame or ())])
        marks = {frame[0] if frame and self.frame_mark is None else slot: "image"}
        if self.video is not None:
            marks[tokenizer.convert_ids_to_tokens(self.video.placeholder)] = "video"
        left = iter(parts)

        def write_one(found: re.Match[str]) -> str:
            part = next(left, None)
            if part is None or part["type"] != marks[found[0]]:
                return found[0]
            if part["type"] == "video" and self.video is not None:
                return self.video.written(part["times"], tokenizer)
            if self.tiles is not None:
                rows, columns = part.get("tiles", (0, 0))
                return self.tiles.written(rows, columns, slot)
            breaks = "\n\n" if self.frame_mark is None else ""
            return f"{breaks}{frame[0]}{slot}{frame[1]}{breaks}" if frame else slot

        return re.sub("|".join(map(re.escape, marks)), write_one, text)

    def placeholder_of(self, image: Image) -> int | None:
        """The token that stands where this is seen; None for a step of a video that this model does not read."""
        if image.frames == 1:
            return self.placeholder
        return self.video.placeholder if self.video is not None and self.video.step == image.frames else None

    @property
    def placeholders(self) -> set[int]:
        """Of images, and of videos."""
        return {self.placeholder} | (set() if self.video is None else {self.video.placeholder})

    @property
    def token_pixels(self) -> int:
        """Pixels a side of one token."""
        return self.patch * self.merge

    def frame_size(self, width: int, height: int, frames: int) -> tuple[int, int]:
        """(width, height) at which each frame of a video is seen, where steps of videos are read."""
        assert self.video is not None, "a model that reads frames as images"
        _check_proportions("a frame", width, height)
        if self.video.frame is None:
            each = replace(self, least=self.video.least, most=min(self.video.most, self.most))
            return each.target_size(width, height)
        return self.video.target_size(width, height, frames, cell=self.token_pixels, image_most=self.most)

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) at which a picture is seen: whole cells, its proportions kept as
        far as they go, between least and most.
        """
        if self.side is not None:
            return self.side, self.side
        if self.least == self.most:
            return _filling_size(width, height, self.token_pixels, self.most)
        _check_proportions("an image", width, height)
        sides = [round(side / self.token_pixels) * self.token_pixels for side in (width, height)]
        if math.prod(sides) > self.most:
            scale = math.sqrt(width * height / self.most)
            sides = [
                max(self.token_pixels, math.floor(side / scale / self.token_pixels) * self.token_pixels)
                for side in (width, height)
            ]
        elif math.prod(sides) < self.least:
            scale = math.sqrt(self.least / (width * height))
            sides = [math.ceil(side * scale / self.token_pixels) * self.token_pixels for side in (width, height)]
        return sides[0], sides[1]


def _filling_size(width: int, height: int, cell: int, most: int) -> tuple[int, int]:
    """(width, height) in whole cells, of as many pixels as there may be, and never more."""
    factor = math.sqrt(most / (height * width))
    wide, high = (math.floor(factor * side / cell) * cell for side in (width, height))
    if not wide and not high:
        raise ValueError(f"an image of {width}x{height} pixels has no room in {most} pixels; raise image_tokens")
    if not high:
        return min(width // height * cell, most // cell), cell
    if not wide:
        return cell, min(height // width * cell, most // cell)
    return wide, high


def _check_proportions(what: str, width: int, height: int) -> None:
    if max(width, height) > LONGEST * min(width, height):
        raise ValueError(f"{what} of {width}x{height} pixels is more than {LONGEST} times as long as wide; cut it")


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A picture as it is seen, or one step of a video: a few frames that become as many tokens as one.

    pixels   [F*H, W, 3] uint8, whole cells; the frames of a step below each other
    digest   of size and pixels: equal pictures are one wherever they are stored, encoded or cached
    frames   F; 1 for a picture
    time     of a step that stands right behind the one before it: how many positions behind the first one (Qwen2-VL);
             None for the first one, and for all that stands alone
    """

    pixels: np.ndarray
    cell: int
    digest: str
    frames: int = 1
    time: int | None = None

    @classmethod
    def from_pixels(cls, pixels: np.ndarray, cell: int, frames: int = 1, time: int | None = None) -> Image:
        pixels = np.ascontiguousarray(pixels)
        if (
            pixels.dtype != np.uint8
            or pixels.ndim != 3
            or pixels.shape[2] != 3
            or pixels.shape[0] % (cell * frames)
            or pixels.shape[1] % cell
        ):
            raise ValueError(
                f"pixels {pixels.shape} of {pixels.dtype}; they must be [H, W, 3] uint8 of whole cells of {cell}"
            )
        times = f"{frames}*" if frames > 1 else ""
        times += "" if time is None else f"@{time} "
        head = f"{times}{pixels.shape[0]}x{pixels.shape[1]}/{cell}:".encode()
        return cls(pixels, cell, blake2b(pixels.tobytes(), digest_size=16, key=head).hexdigest(), frames, time)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def rows(self) -> int:
        return self.pixels.shape[0] // self.cell // self.frames

    @property
    def columns(self) -> int:
        return self.pixels.shape[1] // self.cell

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def stored_fields(self) -> list[Any]:
        """JSON-shaped; `from_stored_fields` gives it back."""
        packed = b64encode(zlib.compress(self.pixels.tobytes(), 1)).decode()
        return [self.cell, self.rows, self.columns, packed, *self.step_fields]

    @property
    def step_fields(self) -> list[int]:
        """What is stored of a step of a video beside its pixels; nothing of a picture."""
        return [self.frames, *([] if self.time is None else [self.time])] if self.frames > 1 else []

    @classmethod
    def from_stored_fields(cls, stored: list[Any]) -> Image:
        cell, rows, columns, packed, *more = stored
        frames, time = more[0] if more else 1, more[1] if len(more) > 1 else None
        pixels = np.frombuffer(zlib.decompress(b64decode(packed)), np.uint8)
        return cls.from_pixels(pixels.reshape(frames * rows * cell, columns * cell, 3), cell, frames, time)

    @property
    def name(self) -> str:
        """For readers: `[image 56x56 3f2a91]`, of a video `[2 frames 56x56 3f2a91]`."""
        what = "image" if self.frames == 1 else f"{self.frames} frames"
        return f"[{what} {self.pixels.shape[1]}x{self.pixels.shape[0] // self.frames} {self.digest[:6]}]"


@dataclass(frozen=True, slots=True)
class ImageTiles:
    """An image as its tiles, row by row, and behind them the whole of it; no rows for one that is a single tile."""

    images: tuple[Image, ...]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class ImagePlaceholder:
    """Where in a stream a picture is seen: tokens [start, end)."""

    start: int
    image: Image

    @property
    def end(self) -> int:
        return self.start + self.image.tokens

    @staticmethod
    def check_placeholders(tokens: Sequence[int], media: Sequence[ImagePlaceholder]) -> None:
        """Placeholders and pictures agree: each picture lies on as many equal tokens as it has
        cells, behind the one before it, and that token stands nowhere else; steps of videos have a token of their own.
        ValueError where they do not."""
        at, places = 0, 0
        slots: dict[bool, int | None] = {}
        for place in media:
            own = tokens[place.start : place.end]
            slot = slots.setdefault(
                place.image.frames > 1, tokens[place.start] if 0 <= place.start < len(tokens) else None
            )
            if place.start < at or len(own) < place.image.tokens or any(token != slot for token in own):
                raise ValueError(
                    f"an image of {place.image.rows} x {place.image.columns} cells at token {place.start}: there it "
                    f"must find "
                    f"{place.image.tokens} placeholders of its own, and it finds {sum(t == slot for t in own)}"
                )
            at, places = place.end, places + place.image.tokens
        if media and (n := sum(token in slots.values() for token in tokens)) != places:
            raise ValueError(f"{n} placeholders for images of {places} cells: what stands for an image must have one")


def message_text(content: Any) -> str:
    """The text of a message's content, an image in it by its name: what readers see,
    and by which questions are told apart.
    """
    if not isinstance(content, list):
        return str(content)
    return "".join(
        part["text"] if part.get("type") == "text" else f"[{_media_kind(part)} {part.get('name', '')}]"
        for part in content
    )


def _media_kind(part: dict[str, Any]) -> str:
    return "video" if str(part.get("type")).startswith("video") else "image"


def content_keys(tokens: Iterable[int], media: Sequence[ImagePlaceholder]) -> list[int]:
    """[T] What two streams must have in common to mean the same: the tokens, and where a
    picture is seen its digest, below 0.
    """
    keys = list(tokens)
    for place in media:
        keys[place.start : place.end] = [-1 - int(place.image.digest[:15], 16)] * place.image.tokens
    return keys


def position_rows(n: int, media: Sequence[ImagePlaceholder]) -> np.ndarray:
    """[4, n] index of each token, and its time, row and column: a model takes the first, or the other three."""
    return np.concatenate([np.arange(n)[None], rope_positions(n, media)])


def rope_positions(n: int, media: Sequence[ImagePlaceholder]) -> np.ndarray:
    """[3, n] time, row and column of each token (M-RoPE, arXiv:2409.12191). Text counts on
    in all three; the cells of a picture share one time and stand at their row and column; those of joined steps differ
    in time alone; text goes on behind the largest of the three. Of a prefix they are a prefix, also where it cuts
    a picture."""
    whole = max([n, *(place.end for place in media)])
    out = np.empty((3, whole), np.int64)
    at = shift = base = 0
    for place, (_, behind) in zip(media, _position_shifts(media)):
        image = place.image
        if image.time is None:
            out[:, at : place.start] = np.arange(at, place.start) + shift
            base = place.start + shift
        times = np.full(image.tokens, image.time or 0)
        out[:, place.start : place.end] = base + np.stack([times, *np.divmod(np.arange(image.tokens), image.columns)])
        at, shift = place.end, behind
    out[:, at:] = np.arange(at, whole) + shift
    return out[:, :n]


def _position_shifts(media: Iterable[ImagePlaceholder]) -> Iterator[tuple[ImagePlaceholder, int]]:
    """Each picture, and what the position of a token behind it is more than its index."""
    shift = extent = 0  # positions that a picture takes, or a run of joined steps so far
    for place in media:
        image = place.image
        before = 0 if image.time is None else extent
        extent = max(before, (image.time or 0) + 1, image.rows, image.columns)
        shift += extent - before - image.tokens
        yield place, shift


def position_shift(media: Iterable[ImagePlaceholder]) -> int:
    """What the position of a token behind all pictures is more than its index; mostly below 0."""
    return next(reversed([shift for _, shift in _position_shifts(media)]), 0)
