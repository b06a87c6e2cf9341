"""A model folder of Hugging Face <-> a checkpoint of Megatron-Core, tensor by tensor, every number as it was.

DIR/latest_checkpointed_iteration.txt   "release": weights alone, of no step
DIR/release/                            the checkpoint (checkpoint_files.py)
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from rondel.core.errors import ModelError, error_boundary
from rondel.models.deferred_weights import INDEX, stored_files
from rondel.models.megatron.checkpoint_files import (
    Chunk,
    ChunkWriter,
    SafeReader,
    is_megatron,
    read_chunks,
    stored_shapes,
    write_chunks,
)
from rondel.models.megatron.tensor_rules import MegatronTensor, megatron_tensors
from rondel.models.prepare import locate_model
from rondel.models.save import make_readable
from rondel.system.files import guard_write

LATEST, RELEASE = "latest_checkpointed_iteration.txt", "release"
FILE_BYTES = 4_000_000_000  # of weights in one file of a model
OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def find_megatron(path: Path) -> Path | None:
    """The checkpoint in a folder of Megatron-Core: that of the step, or of the newest one in it. None: it is none."""
    if is_megatron(path):
        return path
    if not (told := path / LATEST).is_file():
        return None
    newest = told.read_text(encoding="utf-8").strip()
    folder = path / (newest if newest == RELEASE else f"iter_{int(newest):07d}" if newest.isdigit() else newest)
    if not is_megatron(folder):
        raise ModelError(
            f"{told} names {folder.name}, and {folder} is no checkpoint of torch_dist: Megatron's older format is not "
            "read. Load it with Megatron and save it with --ckpt-format torch_dist"
        )
    return folder


def write_megatron(model: str, into: Path) -> int:
    """Of a model folder, or what model.path takes. -> how many numbers it has.
    ModelError where a family has no rules."""
    folder = str(locate_model(model))
    with error_boundary(ModelError, f"reading {folder}"):
        config, files = AutoConfig.from_pretrained(folder), stored_files(folder)
    tensors = megatron_tensors(config)
    with ExitStack() as opened:
        sources = _Sources(folder, files, opened)
        shapes, chunks, makers = {}, {}, {}
        for tensor in tensors:
            first = [sources.shape(name) for name in tensor.sources_of((0,) * tensor.stacked)]
            whole = (*tensor.shape[: tensor.stacked], sum(shape[0] for shape, _ in first), *first[0][0][1:])
            if any(wanted not in (-1, there) for wanted, there in zip(tensor.shape, whole, strict=True)):
                raise ModelError(
                    f"{folder} holds {tensor.sources[0]} for a tensor {whole}; its config says {tensor.shape}"
                )
            shapes[tensor.name] = (whole, first[0][1])
            for at in itertools.product(*map(range, tensor.shape[: tensor.stacked])):
                chunk = (tensor.name, (*at, *(0,) * (len(whole) - tensor.stacked)))
                chunks[chunk] = (*(1,) * tensor.stacked, *whole[tensor.stacked :])
                makers[chunk] = (tensor, at)

        def make(chunk: Chunk) -> Tensor:
            tensor, at = makers[chunk]
            made = tensor.join([sources.read(name) for name in tensor.sources_of(at)])
            return made.to(shapes[tensor.name][1]).reshape(chunks[chunk]).contiguous()

        count = sum(math.prod(shape) for shape, _ in shapes.values())
        target = into / RELEASE
        with guard_write(into, sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())):
            target.mkdir(parents=True)
            write_chunks(target, ChunkWriter(shapes, chunks, make, _states(tensors)))
            (into / LATEST).write_text(RELEASE, encoding="utf-8")
    return count


def write_hugging_face(checkpoint: Path, like: str, into: Path) -> int:
    """The weights of a Megatron-Core checkpoint as a model folder with the config and the tokenizer of `like`. -> how
    many numbers it has. ModelError where the checkpoint is not of that model.
    """
    folder = str(locate_model(like))
    with error_boundary(ModelError, f"reading {folder}"):
        config = AutoConfig.from_pretrained(folder)
    reader = SafeReader(checkpoint)
    stored, wanted = stored_shapes(reader), megatron_tensors(config)
    tensors = [_as_stored(tensor, stored, checkpoint, like) for tensor in wanted]
    size = sum(math.prod(stored[t.name][0]) * stored[t.name][1].itemsize for t in tensors)
    writer = _ModelFiles(into)
    with guard_write(into, size):
        into.mkdir(parents=True)
        for tensor in tensors:
            shape, dtype = stored[tensor.name]
            for at in itertools.product(*map(range, shape[: tensor.stacked])):
                offsets = (*at, *(0,) * (len(shape) - tensor.stacked))
                part = torch.empty((*(1,) * tensor.stacked, *shape[tensor.stacked :]), dtype=dtype)
                read_chunks(reader, {(tensor.name, offsets): part})
                parts = tensor.split(part.reshape(shape[tensor.stacked :]))
                if not tensor.stacked and tensor.shape[0] == -1:
                    parts = [parts[0][: config.vocab_size].clone()]  # Megatron fills up to a multiple of its ranks
                for name, value in zip(tensor.sources_of(at), parts, strict=True):
                    writer.add(name, value)
        writer.close()
        for pattern in OTHER_FILES:
            for file in Path(folder).glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, into / file.name)
        make_readable(into)
    return writer.count


def _as_stored(tensor: MegatronTensor, stored: dict[str, Any], checkpoint: Path, like: str) -> MegatronTensor:
    """The rule under the name that the checkpoint has: a norm before a mixture has two,
    by the layers' implementation."""
    names = [
        tensor.name,
        tensor.name.replace("layers.pre_mlp_layernorm.weight", "layers.mlp.linear_fc1.layer_norm_weight"),
    ]
    name = next((name for name in names if name in stored), None)
    if name is None:
        raise ModelError(
            f"{checkpoint} holds no {tensor.name}: it is not of a model like '{like}', "
            "or its layers are stored one by one"
        )
    shape = stored[name][0]
    if len(shape) != len(tensor.shape) or any(w not in (-1, n) for w, n in zip(tensor.shape, shape)):
        raise ModelError(f"{checkpoint} holds {name} as {shape}; a model like '{like}' has {tensor.shape}")
    return MegatronTensor(name, tensor.shape, tensor.stacked, tensor.sources, tensor.join, tensor.split)


def _states(tensors: list[MegatronTensor]) -> list[str]:
    """Names under which each matrix of each layer, and expert, has what 8-bit training keeps."""
    found = []
    for tensor in tensors:
        if ".linear_" in tensor.name and tensor.name.endswith(".weight"):
            counts = tensor.shape[: tensor.stacked]
            for at in itertools.product(*map(range, counts)):
                number, of = (".".join(map(str, x)) for x in (at, counts))
                found.append(f"{tensor.name.removesuffix('weight')}_extra_state/shard_{number}_{of}")
    return found


class _Sources:
    """Tensors of a model folder, by name; files are opened once."""

    def __init__(self, folder: str, files: dict[str, str], opened: ExitStack) -> None:
        self._folder, self._files, self._opened = folder, files, opened
        self._open: dict[str, Any] = {}

    def _file(self, name: str) -> Any:
        if (path := self._files.get(name)) is None:
            raise ModelError(
                f"{self._folder} holds no tensor {name}. Weights in another format or under other names are converted "
                "by `rondel prepare RUN.toml`"
            )
        if path not in self._open:
            self._open[path] = self._opened.enter_context(safe_open(path, "pt"))
        return self._open[path]

    def shape(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        part = self._file(name).get_slice(name)
        shape = tuple(part.get_shape())
        return shape, part[0:1].dtype

    def read(self, name: str) -> Tensor:
        found: Tensor = self._file(name).get_tensor(name)
        return found


class _ModelFiles:
    """Safetensors of a model folder, a new one after FILE_BYTES, with their index."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._held, self._bytes = folder, dict[str, Tensor](), 0
        self._placed: list[list[str]] = []
        self.count = 0

    def add(self, name: str, value: Tensor) -> None:
        size = value.numel() * value.element_size()
        if self._held and self._bytes + size > FILE_BYTES:
            self._flush()
        self._held[name] = value
        self._bytes += size
        self.count += value.numel()

    def _flush(self) -> None:
        save_file(self._held, self._folder / f"part-{len(self._placed) + 1}.safetensors", metadata={"format": "pt"})
        self._placed.append(list(self._held))
        self._held, self._bytes = {}, 0

    def close(self) -> None:
        self._flush()
        many, placed = len(self._placed), dict[str, str]()
        for i, names in enumerate(self._placed, 1):
            file = "model.safetensors" if many == 1 else f"model-{i:05d}-of-{many:05d}.safetensors"
            (self._folder / f"part-{i}.safetensors").rename(self._folder / file)
            placed |= dict.fromkeys(names, file)
        if many > 1:
            index = {"metadata": {"total_parameters": self.count}, "weight_map": placed}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
