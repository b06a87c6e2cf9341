"""The files of a Megatron-Core checkpoint ("torch_dist"): those of torch.distributed.checkpoint, a tensor in chunks.

Chunks are made while they are written and read one by one: of a model, one layer's joined matrix is in memory.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_planned
from torch.distributed.checkpoint.state_dict_saver import save as save_planned

from rondel.core.errors import ModelError

METADATA, FORMAT = ".metadata", "metadata.json"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
CLASSES = {  # that the index of a checkpoint is made of; it is a pickle, and may come from anywhere
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "StorageMeta"},
    "torch.distributed.checkpoint.planner": {  # Megatron's own keeps the plan of what was saved
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "Path"},
}
Chunk = tuple[str, tuple[int, ...]]  # name of a tensor, offsets


class SafeReader(FileSystemReader):
    """torch's, but its index may name nothing but the classes of an index, and is read once."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **how: Any) -> Metadata:
        if self._index is None:
            self._index = self._read_index()
        return self._index

    def _read_index(self) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            found = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
            raise ModelError(f"{path} is no index of a checkpoint: {error}") from error
        if not isinstance(found, Metadata):
            raise ModelError(f"{path} is no index of a checkpoint: it holds a {type(found).__name__}")
        return found


def _member_of(kind: Any, name: str) -> Any:
    if not (isinstance(kind, EnumType) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r}, which no index needs")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # as Python 3.11.0 to 3.11.3 pickle a member of an enumeration
            return _member_of
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


def is_megatron(folder: Path) -> bool:
    return (folder / METADATA).is_file() and (folder / FORMAT).is_file()


def stored_shapes(reader: SafeReader) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a checkpoint."""
    told = reader.read_metadata().state_dict_metadata
    return {
        name: (tuple(one.size), one.properties.dtype)
        for name, one in told.items()
        if isinstance(one, TensorStorageMetadata)
    }


class ChunkReader(DefaultLoadPlanner):
    """Reads parts of tensors: `{(name, offsets): tensor to be filled}`."""

    def __init__(self, wanted: dict[Chunk, Tensor]) -> None:
        super().__init__()
        self._wanted = wanted

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for (name, offsets), into in self._wanted.items():
            chunk = ChunkStorageMetadata(torch.Size(offsets), into.shape)
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        into = self._wanted[index.fqn, tuple(index.offset)]
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            into = into.narrow(axis, start, length)
        return into

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


@contextmanager
def _alone() -> Iterator[None]:
    """torch warns of a process without a group, which is what `no_dist` says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def read_chunks(reader: SafeReader, wanted: dict[Chunk, Tensor]) -> None:
    with _alone():
        load_planned({}, storage_reader=reader, planner=ChunkReader(wanted), no_dist=True)


class ChunkWriter(DefaultSavePlanner):
    """Writes tensors in chunks, each made when its turn comes.

    shapes  of whole tensors, and their dtypes
    chunks  (name, offsets) -> shape of the chunk
    make    the chunk
    states  names of what Megatron keeps beside a matrix, for numbers of 8 bits: nothing
    """

    def __init__(
        self,
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        chunks: dict[Chunk, tuple[int, ...]],
        make: Callable[[Chunk], Tensor],
        states: list[str],
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shapes, self._chunks, self._make, self._states = shapes, chunks, make, states

    def create_local_plan(self) -> SavePlan:
        items = []
        for (name, offsets), size in self._chunks.items():
            shape, dtype = self._shapes[name]
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))
            data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._states]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        index = write_item.index
        if write_item.type is WriteItemType.BYTE_IO:
            torch.save([None], told := io.BytesIO())
            told.seek(0)
            return told
        assert index.offset is not None
        return self._make((index.fqn, tuple(index.offset)))


def write_chunks(folder: Path, planner: ChunkWriter) -> None:
    """A checkpoint that Megatron-Core loads, in `folder`, which exists."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    with _alone():
        save_planned({}, storage_writer=writer, planner=planner, no_dist=True)
    torch.save({}, folder / "common.pt")
    (folder / FORMAT).write_text(json.dumps(BACKEND), encoding="utf-8")
