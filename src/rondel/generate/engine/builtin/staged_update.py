"""Weights that are read whole and checked beside those that serve: a bad folder or a
bad body leaves the old version serving.

read ──> every name, shape, dtype, finite ──> pause, commit ──> as it was before, at the new version
  └── anything wrong: the old version goes on serving (law 6)
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from rondel.core.errors import SyncError, error_boundary
from rondel.core.types import Abort, Begin, Commit, Manifest, Route, TensorInfo
from rondel.models import adapter_files, names

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.models.loaded_model import LoadedModel

FLOATS = {"F64", "F32", "F16", "BF16"}  # as safetensors calls what can be served without a scale beside it
LOOKS = {
    "dtype",
    "torch_dtype",
    "transformers_version",
    "architectures",
    "use_cache",
    "name_or_path",
}  # keys of a config that compute nothing


def from_disk(loaded: LoadedModel, folder: str) -> dict[str, Tensor]:
    """A folder of Hugging Face safetensors, cast to the engine's dtype, or an adapter's for an adapted model. Runs on
    the device's thread: transformers sets global state.
    """
    with error_boundary(SyncError, f"reading the weights in '{folder}'"):
        path = Path(folder).expanduser()
        if not path.is_dir() or not list(path.glob("*.safetensors")):
            raise SyncError(f"'{folder}' is no folder with .safetensors on this machine")
        if loaded.adapter is not None:
            return adapter_files.read_adapter(loaded, path)
        if adapter_files.is_adapter(path):
            raise SyncError(
                f"'{folder}' is an adapter, and the model that serves has none: serve an adapter to replace it, or "
                f"merge this one"
            )
        _same_architecture(loaded, path)
        _of_floats(path)
        model, report = type(loaded.model).from_pretrained(
            path,
            config=copy.deepcopy(loaded.model.config),
            **_generation_config(loaded.model),  # weights alone are enough
            dtype=loaded.dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that they are named in the report, and refused below
            output_loading_info=True,
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if odd := sorted(map(str, report.get(what) or ())):
            raise SyncError(f"'{folder}' has {len(odd)} {what.replace('_', ' ')}, first {odd[0]}")
    return dict(names.named_weights(model))


def _generation_config(model: Any) -> dict[str, Any]:
    """Of a model of text."""
    return {"generation_config": copy.deepcopy(model.generation_config)} if hasattr(model, "generation_config") else {}


def _same_architecture(loaded: LoadedModel, path: Path) -> None:
    """Equal shapes can still mean another model: another rope, another activation."""
    if not (path / "config.json").is_file():
        return
    configs = (loaded.model.config, AutoConfig.from_pretrained(path, local_files_only=True))
    mine, theirs = (_computing_keys(config.to_dict()) for config in configs)
    differ = [k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k)]
    if differ:
        k = differ[0]
        raise SyncError(
            f"'{path}' is another model: its config says {k} = {theirs.get(k)}, the one that serves {mine.get(k)}"
        )


def _computing_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what computes nothing, those of its parts (text, vision) included."""
    return {
        key: _computing_keys(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (key in LOOKS or str(key).startswith("_"))
    }


def _of_floats(path: Path) -> None:
    """transformers casts whatever it reads: whole numbers, such as codes of a quantised
    checkpoint, would be served as weights.
    """
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                if (kind := tensors.get_slice(name).get_dtype()) not in FLOATS:
                    raise SyncError(f"{file.name}: {name} is {kind}; weights are {', '.join(sorted(FLOATS))}")


def from_bytes(loaded: LoadedModel, blob: bytes) -> dict[str, Tensor]:
    """One safetensors file in memory, under the names and in the dtypes of the model."""
    with error_boundary(SyncError, "reading the safetensors of the body"):
        return safetensors.torch.load(blob)


async def apply_update(
    engine: BuiltinEngine,
    run: Callable[..., Awaitable[Any]],
    read: Callable[[LoadedModel, Any], dict[str, Tensor]],
    source: Any,
    *,
    version: int,
    keep: bool,
) -> int:
    """Serve what `read` finds; `run` is the device's thread. -> the version served.

    `keep`: parked requests keep the keys and values that older weights computed, else they compute them again.
    """

    def stage_tensors() -> tuple[Manifest, dict[str, Tensor]]:
        tensors = read(engine.loaded, source)
        for name, tensor in tensors.items():
            if not bool(names.is_finite(tensor).all()):
                raise SyncError(f"{name} holds NaN or infinity")
        rows = (
            TensorInfo(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), names.tensor_digest(t))
            for n, t in tensors.items()
        )
        return Manifest(version, tuple(rows), names.base_digest(engine.loaded.model)), tensors

    manifest, tensors = await run(stage_tensors)
    return await deliver_update(engine, manifest, Route("tensor", tensors), keep=keep)


async def deliver_update(engine: BuiltinEngine, manifest: Manifest, route: Route, *, keep: bool) -> int:
    """One update of one engine, beside what it serves. -> the version served."""
    serving = False
    try:
        await engine.receive(Begin(manifest, beside=True, anew=True))  # who says a version means it
        await engine.receive(route)
        if serving := engine.state == "serving":
            await engine.pause("hold")  # else it is paused already, and its lease goes on
        if not keep:
            await engine.flush_cache()
        return await engine.receive(Commit(manifest.version, manifest.root))
    except BaseException as error:
        await engine.receive(Abort(f"{type(error).__name__}: {error}"))
        raise
    finally:
        if serving:
            await engine.resume()
