"""An engine whose pictures another process encodes, as its scheduling process knows it.

    event loop   request ──ask──> encoder process: tower      a request stands still until its pictures are encoded
    device       decode │ decode │ decode ...                 and everyone else goes on
                 prompt  <── features, by memory that both map
Features belong to the weights that they were made with: none is used after an update, whoever asked for it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from rondel.core.errors import EngineError, WorkerError
from rondel.generate.engine.builtin.shared_tensors import SharedTensors
from rondel.models.image_features import FeatureWidths, ImageFeatures, feature_shapes

if TYPE_CHECKING:
    from rondel.core.media import Image, ImagePlaceholder
    from rondel.models.loaded_model import LoadedModel

ROOM = 1 << 28  # bytes of features that requests wait for or hold
MOST = 64  # pictures that may be asked for and not yet encoded
LOOKED = 32  # waiting requests whose pictures are encoded ahead of their turn

Features = Future[ImageFeatures | None]  # None: the weights changed meanwhile


class EncoderClient:
    """
    ask      calls a verb of the encoder process, as `RemoteWorker.ask`
    widths   (width, dtype) of the features of one cell: for the embeddings, then for each layer that reads more
    digests  of the tensors that the encoder has, by the model's names
    updates  of the encoder's weights, as it counts them
    known    features of pictures that were seen lately
    lost     why it answers no more; "" while it lives
    wake     called on the event loop when a picture is encoded
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ask: Callable[..., Future[Any]],
        widths: FeatureWidths,
        digests: dict[str, str],
    ) -> None:
        self.loaded, self.ask, self.widths, self.digests = loaded, ask, widths, digests
        self.updates, self.lost = 0, ""
        self.wake: Callable[[], None] = lambda: None
        self.encoded = 0  # pictures that were asked for
        self.known: dict[str, ImageFeatures] = {}
        self._features: WeakValueDictionary[tuple[int, str], Features] = WeakValueDictionary()
        self._bytes = self._unanswered = 0  # of features that some request waits for or has; pictures asked for
        self._returned: deque[tuple[int, int]] = deque()  # how much less of both, told by whatever thread it came from
        self._cell_bytes = sum(width * getattr(torch, dtype).itemsize for width, dtype in widths)

    def open_request(self, media: Sequence[ImagePlaceholder]) -> RequestFeatures:
        return RequestFeatures(self, media)

    def ask_ahead(self, waiting: Iterable[RequestFeatures | None]) -> None:
        """Let pictures be encoded while their requests wait for a place, in the order of arrival."""
        for ahead in islice(waiting, LOOKED):
            if ahead is not None:
                ahead.are_missing(0)

    def has_room(self, images: Iterable[Image]) -> bool:
        """Whether all of these may be asked for: all or none, so nobody waits for what another one holds while it
        waits. Where nothing is held anyone may.
        """
        while self._returned:
            size, answers = self._returned.popleft()
            self._bytes -= size
            self._unanswered -= answers
        new = [image for image in images if (self.updates, image.digest) not in self._features]
        size = sum(image.tokens for image in new) * self._cell_bytes
        return not self._bytes or (self._bytes + size <= ROOM and self._unanswered + len(new) <= MOST)

    def request_features(self, image: Image) -> Features:
        """Those of a picture under the present weights, now or later; whoever asks for the same one shares them."""
        known = self.updates, image.digest
        if (found := self._features.get(known)) is not None:
            return found
        self._features[known] = features = Features()
        if (kept := self.known.get(image.digest)) is not None:
            features.set_result(kept)
            return features
        size = image.tokens * self._cell_bytes
        weakref.finalize(features, self._returned.append, (size, 0)).atexit = False
        self._bytes += size
        self._unanswered += 1
        self.encoded += 1
        memory = SharedTensors(feature_shapes(self.widths, image.tokens))
        take = partial(self._take_features, features, memory, asyncio.get_running_loop())
        try:
            self.ask("encode", image, memory.path, self.updates).add_done_callback(take)
        except WorkerError as error:
            answer = Future[bool]()
            answer.set_exception(error)
            take(answer)
        return features

    async def wait_for(self, begun: Iterable[RequestFeatures | None]) -> bool:
        """Until the pictures that these requests wait for are encoded. -> were there any?"""
        asked = [features for ahead in begun if ahead is not None for features in ahead.unanswered]
        waited = [asyncio.wrap_future(features) for features in asked]
        if waited:
            await asyncio.wait(waited)
        return bool(waited)

    def change_weights(self, digests: dict[str, str], updates: int) -> None:
        """The encoder has new tensors with these digests. On the device's thread,
        in which nothing is computed meanwhile."""
        self.known.clear()
        self.digests |= digests
        self.updates = updates

    def _take_features(
        self, features: Features, memory: SharedTensors, loop: asyncio.AbstractEventLoop, answer: Future[bool]
    ) -> None:
        """In the thread that hears the encoder; requests learn of it on the event loop, between two steps."""
        told: Callable[[], None]
        try:
            main, *deep = memory.read_tensors().values() if answer.result() else (None,)
            told = partial(features.set_result, None if main is None else ImageFeatures(main, tuple(deep)))
        except Exception as error:
            told = partial(features.set_exception, error)
        memory.close()
        self._returned.append((0, 1))

        def tell() -> None:
            told()
            self.wake()

        with suppress(RuntimeError):  # the loop has ended, and whoever waited with it
            loop.call_soon_threadsafe(tell)


class RequestFeatures:
    """Features of the pictures of one request: asked for before its prompt is computed, held until it is.

    end   the token behind its last picture
    """

    def __init__(self, client: EncoderClient, media: Sequence[ImagePlaceholder]) -> None:
        self._client, self._media, self.end = client, media, media[-1].end
        self._parts: dict[str, Features] = {}
        self._updates = 0

    def are_missing(self, first: int, *, urgent: bool = False) -> bool:
        """Whether tokens from `first` on must wait for pictures,
        which are asked for if there is room or it is urgent."""
        if first >= self.end:
            return False
        if self._updates != self._client.updates:
            self.release()
        seen = {place.image.digest: place.image for place in self._media if place.end > first}
        if new := [image for digest, image in seen.items() if digest not in self._parts]:
            if not urgent and not self._client.has_room(new):
                return True
            self._updates = self._client.updates
            self._parts |= {image.digest: self._client.request_features(image) for image in new}
        return bool(self.unanswered)

    def encoded(self, digest: str) -> ImageFeatures | None:
        """On the host, those of a picture under the present weights, if they are there.
        EngineError if they never will."""
        features = self._parts.get(digest) if self._updates == self._client.updates else None
        if features is None or not features.done():
            return None
        if (error := features.exception()) is not None:
            raise EngineError(f"a picture was not encoded: {error}") from error
        return features.result()

    @property
    def unanswered(self) -> list[Features]:
        return [features for features in self._parts.values() if not features.done()]

    def release(self) -> None:
        """They are computed, or of other weights."""
        self._parts = {}
