"""Weights on their way into the engine's module: what is announced, what has come, and when it becomes what serves.

    begin ── data ── data ── commit          over    each tensor is written over the old one as it comes; digests are
    compared at the end
                                             beside  each is compared as it comes and laid beside; the commit lets
                                             the module point there

Between two tensors the device is free: an engine that is not parked goes on decoding. Weights in a number format come
as codes and scales, whose digests are compared, and are decoded here (models/encoded_weights.py).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.types import Begin, Commit, Manifest, Route, TensorInfo
from rondel.models import names

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.models.encoded_weights import EncodedArrival
    from rondel.models.loaded_model import LoadedModel

SLICE = 0.005  # seconds that the device takes tensors in before it looks for a step to do


class StagedWeights:
    """Tensors beside those that serve, until the module points at them. `copied`: some of the module's were written
    over.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.copied = model, False
        self.tensors: dict[str, Tensor] = {}  # by the module's name

    def add(self, of: str, piece: names.TensorSlice | None, tensor: Tensor) -> None:
        """A part of one of the module's tensors, as an expert of a mixture, goes to its place in a new one."""
        if piece is None or piece.all:
            self.tensors[of] = tensor
            return
        if of not in self.tensors:
            self.tensors[of] = torch.empty_like(self.model.get_parameter(of))
        piece.view(self.tensors[of]).copy_(tensor)

    def after_commit(self, name: str, serving: Tensor) -> Tensor:
        """What will serve under one of the module's names."""
        return self.tensors.get(name, serving)

    def swap_in(self) -> bool:
        """The module's parameters become the staged tensors; those of another device are copied. -> were any copied?"""
        for name, parameter in self.model.named_parameters():
            if (tensor := self.tensors.get(names.published_name(name))) is None:
                continue  # it lies under an adapter and did not travel
            if tensor.device == parameter.device:
                parameter.data = tensor
            else:
                self.copied = True
                parameter.data.copy_(tensor)
        for name, buffer in self.model.named_buffers():
            if (tensor := self.tensors.get(name)) is not None and not torch.equal(buffer, tensor.to(buffer.device)):
                self.copied = True
                buffer.copy_(tensor)
        return self.copied


class WeightReceiver:
    """The engine's side of one update at a time. Tensors themselves need no transport;
    every other route names one of `transports`.
    """

    def __init__(self, loaded: LoadedModel, transports: Mapping[str, Transport]) -> None:
        self.loaded, self._transports = loaded, dict(transports)
        self.root = ""  # of the last commit
        self.bytes_copied = 0
        self._begun: Begin | None = None
        self._came = False  # all of its data
        self._untouched = False  # since the last begin: what serves is still the old version, whole
        self._awaited: dict[str, TensorInfo] = {}
        self.staged = StagedWeights(loaded.model)
        # where each of the checkpoint's tensors lies in one of the module's
        self._parts: Mapping[str, tuple[str, names.TensorSlice]] = {}
        self._encoded: EncodedArrival | None = None  # of the update under way, where weights come encoded
        self._held: Mapping[str, Tensor] = {}  # codes and scales that serve, for a transport that sends what changed

    @property
    def route_kinds(self) -> set[str]:
        return {"tensor", "disk", *self._transports}

    @property
    def is_overwriting(self) -> bool:
        """Whether an update is under way that writes over the weights."""
        return self._begun is not None and not self._begun.beside

    def begin_update(self, begin: Begin, version: int) -> None:
        self._untouched = begin.beside
        asked = [row.name for row in begin.manifest.tensors]
        self._encoded = None
        if (encoding := names.encoding_of(self.loaded.model)) is not None:
            how: dict[str, Any] = {"keep": "delta" in self._transports, "held": self._held}
            self._encoded = encoding.open_arrival(self.loaded.model, asked, shapes=self._whole_shapes(), **how)
        _compare_announced(begin.manifest, self._expected_tensors(asked))
        if begin.manifest.version < version and not begin.anew:
            raise SyncError(f"version {begin.manifest.version} is older than {version}, which the engine serves")
        self._begun, self._came = begin, False
        self.staged = StagedWeights(self.loaded.model)
        # where each of the checkpoint's tensors lies in the module; empty if the module's own names are asked for
        self._parts = self._encoded.plain_slices() if self._encoded else names.tensor_slices(self.loaded.model, asked)
        self._awaited = {row.name: row for row in begin.manifest.tensors}

    def _whole_shapes(self) -> Mapping[str, names.TensorShape]:
        """Of parameters of which only a part is here."""
        return {}

    def _updatable(self, asked: Collection[str]) -> dict[str, Tensor]:
        """What an update writes and does not come encoded."""
        return self._encoded.plain_tensors() if self._encoded else names.updatable_tensors(self.loaded.model, asked)

    def _expected_tensors(self, asked: list[str]) -> dict[str, names.TensorShape]:
        """(shape, dtype) of every tensor that an update must announce, under the names that are asked for."""
        plain = {name: names.shape_of(t) for name, t in self._updatable(asked).items()}
        return plain | (self._encoded.shapes if self._encoded else {})

    def _own_tensors(self) -> dict[str, Tensor]:
        """What the announced tensors are written to, by their names."""
        return self._updatable(self._awaited) | (self._encoded.base_tensors() if self._encoded else {})

    async def receive_data(self, route: Route, run: Callable[..., Awaitable[Any]]) -> None:
        """All data of the route; `run` is the device's thread."""
        mine, stream = self.open_route(route)
        try:
            while await run(_receive_some, self.accept_tensor, stream, mine):
                pass
        finally:
            await run(stream.close)  # there, because a cancelled wait leaves the thread inside it
        self.finish_data(route)

    def open_route(self, route: Route) -> tuple[dict[str, Tensor], Generator[tuple[str, Tensor], None, None]]:
        """What is written to, by name, and the tensors that will come."""
        if (begun := self._begun) is None:
            raise SyncError("data without begin")
        if self._came:
            raise SyncError("the data of this update came twice")
        if route.base and route.base != self.root:
            raise SyncError(
                f"the data changes weights with root {route.base[:8]}; those that serve have "
                f"{self.root[:8] or 'none yet'}"
            )
        mine = self._own_tensors()
        self.bytes_copied = 0
        return mine, self._open_stream(route, begun.manifest, mine)

    def finish_data(self, route: Route) -> None:
        """No more will come: all that was announced must be here."""
        if self._awaited:
            raise SyncError(
                f"{len(self._awaited)} tensors were announced but did not travel, first {min(self._awaited)}"
            )
        self._came, self.bytes_copied = True, route.bytes or self.bytes_copied

    def _open_stream(
        self, route: Route, manifest: Manifest, mine: dict[str, Tensor]
    ) -> Generator[tuple[str, Tensor], None, None]:
        if isinstance(route.data, dict):  # the tensors themselves
            yield from route.data.items()
        elif route.kind in self._transports:
            yield from self._transports[route.kind].receive(route, manifest, mine)
        else:
            raise SyncError(
                f"weights come by '{route.kind}'; this engine takes them by {', '.join(sorted(self.route_kinds))}"
            )

    def accept_tensor(self, name: str, tensor: Tensor, mine: dict[str, Tensor]) -> None:
        """The next tensor of the stream."""
        if name not in self._awaited:
            raise SyncError(
                f"{name} came twice" if name in mine else f"tensors came that were not announced, first {name}"
            )
        row = self._awaited.pop(name)
        shape = self._arriving_shape(row)
        if (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) != (shape, row.dtype):
            raise SyncError(
                f"{name} was announced as {row.dtype} {list(shape)} and came as {tensor.dtype} {list(tensor.shape)}"
            )
        if self._encoded is not None and name in self._encoded:
            self._accept_part(self._encoded, row, tensor)
        else:
            self._take_tensor(row, tensor, mine, beside=not self.is_overwriting)

    def _accept_part(self, encoded: EncodedArrival, row: TensorInfo, part: Tensor) -> None:
        """Codes or scales; the weight is decoded with the last of them. What has come counts, not what it becomes."""
        check_digest(row, part)
        came = self.bytes_copied + part.nbytes
        beside = not self.is_overwriting
        if (decoded := encoded.add_part(row.name, part, beside=beside)) is not None:
            of, tensor = decoded
            whole = TensorInfo(of, *names.shape_of(tensor), encoded.digests[of])
            self._take_tensor(whole, tensor, encoded.targets, beside=beside)
        self.bytes_copied = came

    def _arriving_shape(self, row: TensorInfo) -> tuple[int, ...]:
        return row.shape

    def _take_tensor(self, row: TensorInfo, tensor: Tensor, mine: dict[str, Tensor], *, beside: bool) -> None:
        name = row.name
        if beside:
            check_digest(row, tensor)
            of, piece = self._parts.get(name, (name, None))
            self.staged.add(of, piece, tensor)
        elif tensor.data_ptr() != mine[name].data_ptr() or tensor.device != mine[name].device:
            mine[name].copy_(tensor)
            self.bytes_copied += tensor.numel() * tensor.element_size()

    def commit_update(self, commit: Commit) -> None:
        """On the device's thread, between two steps."""
        begun = self._check_commit(commit)
        if self._encoded is not None:
            self._encoded.swap_in()
        if not begun.beside or self.staged.swap_in():
            self._compare_manifest(begun.manifest)
        if self._encoded is not None:
            self._held, self._encoded = self._encoded.kept, None
        self.root, self._untouched = commit.root, False
        self._begun, self.staged = None, StagedWeights(self.loaded.model)

    def _check_commit(self, commit: Commit) -> Begin:
        """Raises SyncError unless what has come is what is committed. -> how it was begun."""
        if (begun := self._begun) is None:
            raise SyncError("commit without begin")
        version, root = begun.manifest.version, begun.manifest.root
        if (commit.version, commit.root) != (version, root):
            raise SyncError(
                f"version {commit.version} with root {commit.root[:8]} is committed, but {version} with {root[:8]} was "
                f"begun"
            )
        if not self._came:
            raise SyncError("commit without data")
        if names.base_digest(self.loaded.model) != begun.manifest.base:
            raise SyncError(
                "the adapter belongs to another base than the one that serves: their frozen weights have other bits"
            )
        return begun

    def _compare_manifest(self, manifest: Manifest) -> None:
        if self._encoded is not None:
            sent = {row.name: row.digest for row in manifest.tensors}
            wrong = [n for n, t in self._encoded.plain_tensors().items() if names.tensor_digest(t) != sent[n]]
            if wrong := wrong + self._encoded.wrong_weights(sent):
                raise SyncError(f"{len(wrong)} tensors arrived with other bits than were sent, first {wrong[0]}")
            return
        arrived = names.build_manifest(self.loaded.model, manifest.version, [t.name for t in manifest.tensors])
        if arrived.root != manifest.root:
            sent = {t.name: t.digest for t in manifest.tensors}
            wrong = [t.name for t in arrived.tensors if sent[t.name] != t.digest]
            raise SyncError(f"{len(wrong)} tensors arrived with other bits than were sent, first {wrong[0]}")

    def drop_update(self) -> bool:
        """Forget the update under way. -> is the old version whole?"""
        whole = self._untouched and not self.staged.copied
        self._encoded = None
        self._begun, self.staged, self._awaited = None, StagedWeights(self.loaded.model), {}
        return whole


def check_digest(row: TensorInfo, tensor: Tensor) -> None:
    if names.tensor_digest(tensor) != row.digest:
        raise SyncError(f"1 tensors arrived with other bits than were sent, first {row.name}")


def _compare_announced(manifest: Manifest, mine: Mapping[str, names.TensorShape]) -> None:
    """SyncError unless exactly the tensors of this engine are announced."""
    theirs = {t.name: (t.shape, t.dtype) for t in manifest.tensors}
    missing, unknown = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    wrong = sorted(n for n in set(mine) & set(theirs) if mine[n] != theirs[n])
    for what, found in (("missing", missing), ("unknown", unknown), ("of another shape or dtype", wrong)):
        if found:
            raise SyncError(f"{len(found)} tensors are {what}, first {found[0]}")


def _receive_some(accept: Callable[..., None], stream: Iterator[tuple[str, Tensor]], mine: dict[str, Tensor]) -> bool:
    """Tensors for a few milliseconds. -> is there more?"""
    until = time.perf_counter() + SLICE
    for name, tensor in stream:
        accept(name, tensor, mine)
        if time.perf_counter() > until:
            return True
    return False
