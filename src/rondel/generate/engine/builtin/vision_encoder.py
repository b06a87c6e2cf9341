"""What a request looks at, and what the tower has said of every picture under the weights that serve.

request   tokens ░░░░ ...   keys: where a picture is seen its digest, so that another picture is another prefix (law 7)
tower     once for each distinct picture and version; whatever prompt, chunk or sibling needs its cells again finds them
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rondel.core.errors import EngineError, UserError
from rondel.core.media import Image, ImagePlaceholder, ImageProcessorConfig, content_keys, position_rows, position_shift
from rondel.models.image_features import ImageFeatures, VisionFeatures

if TYPE_CHECKING:
    from rondel.core.types import Request
    from rondel.generate.engine.builtin.encoder_client import EncoderClient, RequestFeatures
    from rondel.models.loaded_model import LoadedModel

ROOM = 1 << 28  # bytes of features that are kept


@dataclass(frozen=True, slots=True, eq=False)
class RequestImages:
    """Of one request with pictures.

    keys       [P]    what its prompt is known by in the prefix cache
    positions  [4,P]  of its prompt; a token behind it stands at its index, and there at its index + shift
    mutual     no chunk may cut an image, whose tokens see those behind them
    ahead      features that another process makes before the prompt is computed, if there is one
    """

    media: Sequence[ImagePlaceholder]
    keys: list[int]
    positions: np.ndarray
    shift: int
    mutual: bool
    ahead: RequestFeatures | None = None

    @classmethod
    def from_request(
        cls, request: Request, sight: ImageProcessorConfig | None, encoder: EncoderClient | None = None
    ) -> RequestImages:
        tokens, media = request.tokens, request.media
        keys, rows = content_keys(tokens, media), position_rows(len(tokens), media)
        ahead = None if encoder is None else encoder.open_request(media)
        return cls(media, keys, rows, position_shift(media), sight is not None and sight.mutual, ahead)

    def lacks_features(self, first: int, *, urgent: bool) -> bool:
        """Whether tokens from `first` on must wait until pictures are encoded elsewhere."""
        return self.ahead is not None and self.ahead.are_missing(first, urgent=urgent)

    def chunk_size(self, first: int, n: int) -> int:
        """How many tokens from `first` a chunk of about n takes, if it must not cut an image: fewer, or the first
        image whole.
        """
        for place in self.media if self.mutual else ():
            if place.start < first + n < place.end:
                return place.start - first if place.start > first else place.end - first
        return n

    def position_ids(self, first: int, end: int) -> np.ndarray:
        """[4, end - first]"""
        n = self.positions.shape[1]
        behind = np.arange(max(first, n), max(end, n)) + np.array([[0], *[[self.shift]] * 3])
        return np.concatenate([self.positions[:, first:end], behind], 1)


class VisionEncoderCache:
    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.looked = 0  # pictures that the tower of this process has encoded
        self.encoder: EncoderClient | None = None  # another process that has the tower, too
        self.known: OrderedDict[str, ImageFeatures] = OrderedDict()

    def check_request(self, request: Request) -> None:
        """Before it is let in: a picture where there is no place for it would break the step of everyone."""
        sight = self.loaded.sight
        if sight is None:
            raise UserError(
                f"{len(request.media)} images for '{self.loaded.name}', which reads text alone: take a vision-language "
                f"model, or leave them out"
            )
        if self.encoder is not None and self.encoder.lost:
            raise EngineError(f"no picture is encoded any more: {self.encoder.lost}")
        at = 0
        for place in request.media:
            own = request.tokens[place.start : place.end]
            if (
                place.image.cell != sight.token_pixels
                or place.start < at
                or own != [sight.placeholder_of(place.image)] * place.image.tokens
            ):
                if sight.placeholder_of(place.image) is None:
                    raise UserError(
                        f"a step of {place.image.frames} frames for '{self.loaded.name}', which does not read videos "
                        "in such steps: send each frame as an image"
                    )
                raise UserError(
                    f"an image of {place.image.tokens} tokens at token {place.start}, where the prompt has no such run "
                    f"of this model's "
                    f"placeholder {sight.placeholder}; place images by the model's own sight"
                )
            at = place.end

    def forget_features(self) -> None:
        """Other weights serve, or the memory is wanted."""
        self.known.clear()

    def gather_features(self, fed: Sequence[tuple[int, int, RequestImages | None]]) -> VisionFeatures | None:
        """What is seen by tokens that are fed: (first, how many, gaze) of each run, in the order
        of the packed row. On the device's thread.
        """
        rows: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        cells: list[tuple[Image, int, int]] = []
        at = 0
        for first, n, gaze in fed:
            for place in () if gaze is None else gaze.media:
                begin, end = max(place.start, first), min(place.end, first + n)
                if begin < end:
                    rows.append(np.arange(at + begin - first, at + end - first))
                    numbers.append(np.full(end - begin, len(numbers)))
                    cells.append((place.image, begin - place.start, end - place.start))
            at += n
        if not rows:
            return None
        wanted = {image.digest: image for image, _, _ in cells}
        for first, n, gaze in fed:
            if gaze is not None and gaze.ahead is not None:
                self._take_ahead(gaze.ahead, wanted, first + n)
        features = self._encode_images(wanted)
        parts = [
            features[image.digest].select_rows(torch.arange(begin, end, device=self.loaded.device))
            for image, begin, end in cells
        ]
        at_rows, images = (torch.from_numpy(np.concatenate(x)).to(self.loaded.device) for x in (rows, numbers))
        return VisionFeatures(at_rows, ImageFeatures.concat_features(parts), images)

    def _take_ahead(self, ahead: RequestFeatures, wanted: dict[str, Image], end: int) -> None:
        """What another process has made of these pictures. Of a prompt
        that is computed up to `end` no more may be wanted."""
        for digest in wanted.keys() - self.known.keys():
            if (found := ahead.encoded(digest)) is not None:
                self.known[digest] = found.to(self.loaded.device)
        if end >= ahead.end:
            ahead.release()

    def _encode_images(self, wanted: dict[str, Image]) -> dict[str, ImageFeatures]:
        """The features of these pictures; those that nobody has asked for in a while go when there is no room."""
        if new := [image for digest, image in wanted.items() if digest not in self.known]:
            whole, at = self.loaded.encode_images(new), 0
            for image in new:
                self.known[image.digest] = whole.select_rows(
                    torch.arange(at, at + image.tokens, device=self.loaded.device)
                )
                at += image.tokens
            self.looked += len(new)
        for digest in wanted:
            self.known.move_to_end(digest)
        found = {digest: self.known[digest] for digest in wanted}
        while len(self.known) > len(wanted) and sum(f.feature_bytes for f in self.known.values()) > ROOM:
            self.known.popitem(last=False)
        return found
