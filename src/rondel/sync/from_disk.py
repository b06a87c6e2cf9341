"""A folder a version: safetensors, and the manifest last. Whoever can read the folder
can follow, also an engine that starts late.

weights/v-000012/model-00001-of-00002.safetensors ... model.safetensors.index.json,
manifest.json     appears whole, by one rename

The files are named as transformers, vLLM and SGLang look for them; the oldest versions go.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rondel.core.errors import SyncError, error_boundary
from rondel.core.protocols import RolloutEngine, Tensors, Trainer, Weights
from rondel.core.types import Manifest, Route, TensorInfo
from rondel.sync.tensor_bytes import size_of
from rondel.system.files import drop_on_error, guard_write, numbered_paths


class FromDisk:
    """folder  where versions lie, on storage that the engines see under the same name
    keep    versions
    file    bytes of one file: what is held in memory beside the model while it is written
    """

    holds: Literal["commit"] = "commit"
    names: Literal["module", "checkpoint"] = "checkpoint"

    def __init__(self, folder: str | Path, *, keep: int = 2, file: int = 1 << 30) -> None:
        self.folder, self.keep, self.file = Path(folder), keep, file

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route:
        return Route("disk")

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        place = self.folder / f"v-{version:06d}"
        draft = place.with_name(f".{place.name}.tmp")
        with guard_write(place, error=SyncError), drop_on_error(draft):
            for left in self.folder.glob(".v-*.tmp"):  # of a writer that died
                shutil.rmtree(left, ignore_errors=True)
            draft.mkdir(parents=True)
            manifest = Manifest(version, tuple(self._write_tensors(draft, weights)))
            files = {path.name: path.stat().st_size for path in draft.iterdir()}
            (draft / "manifest.json").write_text(json.dumps(manifest.to_dict()))
            shutil.rmtree(place, ignore_errors=True)
            os.replace(draft, place)
            for old in outdated_versions(complete_versions(self.folder), version, self.keep):
                shutil.rmtree(old, ignore_errors=True)
        return manifest, Route("disk", str(place), bytes=sum(files.values()))

    def _write_tensors(self, folder: Path, weights: Weights) -> Iterator[TensorInfo]:
        held: dict[str, Tensor] = {}
        files: list[list[str]] = []
        size = total = 0

        def flush() -> None:
            with guard_write(path := folder / f"{len(files):05d}", size, SyncError):
                save_file(held, path, metadata={"format": "pt"})  # transformers asks for it
            files.append(list(held))

        for row, tensor in weights:
            if held and size + size_of(row) > self.file:
                flush()
                held, size = {}, 0
            held[row.name], size, total = tensor.detach().cpu().contiguous(), size + size_of(row), total + size_of(row)
            yield row
        flush()
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        for i, name in enumerate(names):
            os.replace(folder / f"{i:05d}", folder / name)
            (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors writes for its owner alone
        index = {
            "metadata": {"total_size": total},
            "weight_map": {key: name for name, keys in zip(names, files) for key in keys},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def send(self, route: Route, weights: Tensors) -> None: ...

    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        with error_boundary(SyncError, f"reading the weights in {route.data}"):
            for path in sorted(Path(route.data).glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118  no mapping
                        yield name, file.get_tensor(name)

    def close(self) -> None: ...


def outdated_versions(published: dict[int, Path], last: int, keep: int) -> list[Path]:
    """Versions to delete once `last` is published: all but the `keep` latest up to it, and every later one.

    A later version is of a run that was rolled back behind it: the run that goes on will
    publish other weights under the same number.
    """
    good = [version for version in published if version <= last][-keep:]
    return [path for version, path in published.items() if version not in good]


def complete_versions(folder: Path) -> dict[int, Path]:
    """Whole ones by their number, oldest first; what somebody else put there is not among them."""
    return {
        version: path for version, path in numbered_paths(folder, "v-").items() if (path / "manifest.json").is_file()
    }


def newest(folder: str | Path) -> tuple[Manifest, Route]:
    """What an engine that starts late takes first: `update.join(engine, *newest(folder))`."""
    found = complete_versions(Path(folder))
    if not found:
        raise SyncError(f"no version of the weights lies in {folder}")
    last = found[max(found)]
    with error_boundary(SyncError, f"reading {last / 'manifest.json'}"):
        return Manifest.from_dict(json.loads((last / "manifest.json").read_text())), Route("disk", str(last))
