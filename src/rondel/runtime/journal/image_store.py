"""The pictures of a run, each once whoever saw it: PNG files that anyone can open, named by their digest.

rollouts/media/3f2a….png     as the model saw it, frames of a video that it merges below each other; and the file of a
                             task's picture, where the task has it as a data: URL
"""

from __future__ import annotations

import io
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rondel.core.errors import CheckpointError
from rondel.core.media import Image, ImagePlaceholder
from rondel.system.files import make_folder, replace_file

KEPT = re.compile(r"media:([0-9a-f]{32})\.([a-z]+)")
IMAGE_URL = "data:image/"  # begins every picture that a task holds itself
URL = re.compile(IMAGE_URL + r"([a-z]+);base64,([A-Za-z0-9+/=]+)")


class ImageStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "media"
        self._known: dict[str, Image] = {}

    def store_images(self, media: list[ImagePlaceholder]) -> list[list[Any]]:
        """-> [start, digest, cell] of each, and of a step of a video its frames and its time; `load_images` is the
        inverse.
        """
        for place in media:
            if not (path := self._image_path(place.image.digest)).exists():
                out = io.BytesIO()
                _import_pillow().fromarray(place.image.pixels).save(out, "PNG")
                self._write_file(path, out.getvalue())
        return [[place.start, place.image.digest, place.image.cell, *place.image.step_fields] for place in media]

    def load_images(self, rows: list[list[Any]]) -> list[ImagePlaceholder]:
        return [ImagePlaceholder(start, self._load_image(*stored)) for start, *stored in rows]

    def replace_data_urls(self, data: Any) -> Any:
        """A task's data with the names of files instead of data: URLs; `restore_data_urls` is the inverse."""
        return _map_images(data, self._store_url)

    def restore_data_urls(self, data: Any) -> Any:
        return _map_images(data, self._load_data_url)

    def _load_image(self, digest: str, cell: int, frames: int = 1, time: int | None = None) -> Image:
        if digest not in self._known:
            image = Image.from_pixels(
                np.asarray(_import_pillow().open(io.BytesIO(self._read_file(self._image_path(digest))))),
                cell,
                frames,
                time,
            )
            if image.digest != digest:
                raise CheckpointError(
                    f"{self._image_path(digest)} is another picture than was trained on: its digest is {image.digest}"
                )
            self._known[digest] = image
        return self._known[digest]

    def _store_url(self, url: str) -> str:
        if not (found := URL.fullmatch(url)):
            return url
        raw = b64decode(found[2])
        if b64encode(raw).decode() != found[2]:  # written in another way: it stays as it is
            return url
        name = f"{blake2b(raw, digest_size=16).hexdigest()}.{found[1]}"
        if not (path := self.folder / name).exists():
            self._write_file(path, raw)
        return f"media:{name}"

    def _load_data_url(self, name: str) -> str:
        if not (found := KEPT.fullmatch(name)):
            return name
        return f"data:image/{found[2]};base64,{b64encode(self._read_file(self.folder / f'{found[1]}.{found[2]}')).decode()}"

    def _image_path(self, digest: str) -> Path:
        return self.folder / f"{digest}.png"

    def _write_file(self, path: Path, raw: bytes) -> None:
        make_folder(self.folder)
        replace_file(path, raw)

    def _read_file(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}, a picture of these rollouts, cannot be read: {error.strerror}") from error


def _map_images(data: Any, change: Callable[[str], str]) -> Any:
    """`change` for the source of every image part, and for the frames of every video part."""
    if isinstance(data, list):
        return [_map_images(inner, change) for inner in data]
    if not isinstance(data, dict):
        return data
    kind, out = data.get("type"), {key: _map_images(inner, change) for key, inner in data.items()}
    if kind == "image" and isinstance(data.get("image"), str):
        out["image"] = change(data["image"])
    elif kind == "video" and isinstance(data.get("video"), list):
        out["video"] = [change(frame) if isinstance(frame, str) else frame for frame in data["video"]]
    return out


def _import_pillow() -> Any:
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise CheckpointError(
            "the pictures of rollouts need the package pillow: pip install 'rondel[vision]'"
        ) from error
    return Pillow
