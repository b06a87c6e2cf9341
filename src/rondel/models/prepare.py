"""The stages of `rondel prepare`, each done once: locate, convert, stage, verify.

    locate    the files of a model: a folder, a GGUF (converted), the hub's cache (downloaded where something is
              missing)
    convert   where ranks could not read their shards of it: FP8, MXFP4, compressed-tensors, GPTQ, AWQ, .bin files,
              foreign names -> safetensors of at most 4 GB
    stage     copied, a file at a time, with the digest of each
    verify    digests of the copy; names, dtypes and shapes of all tensors against the model's config

What is interrupted goes on with the file that it was at; a conversion begins again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig
from transformers import logging as hf_logging

from rondel.core.errors import ModelError, UserError, error_boundary
from rondel.formats.checkpoint_layouts import METHODS, SUFFIXES, decode_stored
from rondel.models.architectures import auto_class, refuse_architecture
from rondel.models.deferred_weights import FLOATS, parameters_on_meta, stored_files
from rondel.models.model_copies import (
    WEIGHTS,
    model_files,
    prepared_name,
    read_manifest,
    write_manifest,
)
from rondel.models.model_folder import source_folder
from rondel.models.names import checkpoint_pieces
from rondel.system.files import make_folder, open_replacement
from rondel.system.whole_checkpoint import load_pretrained

SHARD = "4GB"  # of one file of a converted model

CHUNK = 1 << 22
LONGEST = 24 * 3600.0  # seconds that another one may take
DOWNLOADED = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.safetensors")
Progress = Callable[[str, str], None]  # (stage, what is to be said)


def prepare_model(path: str, stage_at: Path | None, cache: Path, progress: Progress, *, reread: bool = False) -> Path:
    """The folder that a run will read. Raises UserError, ModelError."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    source = locate_model(path)
    files = model_files(source)
    progress("locate", f"{source}: {len(files)} files, {_size(sum(file.stat().st_size for file in files))}")
    name = prepared_name(path, source)
    ready = _convert_model(path, source, cache / "prepared" / name, progress, reread)
    if stage_at is not None:
        ready = _stage_files(path, ready, stage_at / name, progress, reread)
    progress("verify", f"{check_tensors(ready)} tensors have the names and shapes of the model")
    return ready


def locate_model(path: str) -> Path:
    """Where all its files are on this node."""
    found = source_folder(path)
    if Path(found).is_dir():
        return Path(found)
    from huggingface_hub import snapshot_download

    with error_boundary(ModelError, f"fetching '{path}'"):
        folder = Path(snapshot_download(path, allow_patterns=list(DOWNLOADED)))
        if not any(file.suffix == ".safetensors" for file in folder.iterdir()):
            folder = Path(snapshot_download(path, allow_patterns=[*DOWNLOADED, "*.bin"]))
    return folder


def why_not_by_shards(folder: Path) -> str:
    """Why ranks cannot read their shards of it; empty where they can."""
    config = _config_of(folder)
    if quantised := getattr(config, "quantization_config", None):
        return f"stored in {_method_of(quantised)}"
    try:
        check_tensors(folder)
    except ModelError as error:
        return str(error).partition(f"{folder} ")[2] or str(error)
    return ""


def check_tensors(folder: Path) -> int:
    """How many tensors there are; each must have the shape that the model's config gives it, and be a plain one."""
    with error_boundary(ModelError, f"reading {folder}"):
        model = _empty_model(folder)
        files, held, pieces = stored_files(str(folder)), model.state_dict(), checkpoint_pieces(model)
    if not files:
        raise ModelError(f"{folder} holds no safetensors")
    if missing := sorted({piece.name for several in pieces.values() for piece in several} - files.keys()):
        raise ModelError(f"{folder} holds no tensor {missing[0]} ({len(missing)} are missing)")
    stored = {name: found for file in sorted(set(files.values())) for name, found in _headers_of(file).items()}
    for name in pieces.keys() & held.keys():
        whole = torch.empty(held[name].shape, device="meta")
        for piece in pieces[name]:
            shape, dtype = stored.get(piece.name, ((), "nothing"))
            if shape != tuple(piece.view(whole).shape):
                raise ModelError(f"{folder} holds {piece.name} as {shape}, not {tuple(piece.view(whole).shape)}")
            if held[name].is_floating_point() and dtype not in FLOATS:
                raise ModelError(f"{folder} holds {piece.name} in {dtype}, which is no plain floating point")
    return len(files)


def _headers_of(file: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor in a file."""
    with error_boundary(ModelError, f"reading {file}"), safe_open(file, "pt") as opened:
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def _config_of(folder: Path) -> Any:
    with error_boundary(ModelError, f"reading {folder}"):
        config = AutoConfig.from_pretrained(folder)
    refuse_architecture(config)
    return config


def _empty_model(folder: Path) -> nn.Module:
    config = _config_of(folder)
    with parameters_on_meta():
        return auto_class(config).from_config(config, attn_implementation="eager")


def _convert_model(path: str, source: Path, target: Path, progress: Progress, reread: bool) -> Path:
    reason = why_not_by_shards(source)
    if not reason:
        progress("convert", "not needed: its tensors can be read one at a time")
        return source
    with _alone(target):
        if read_manifest(target).get("complete"):
            if not (broken := _differing_files(target, reread)):
                progress("convert", f"done before: {target}")
                return target
            progress("convert", f"{', '.join(broken)} is not what was written: made again")
        shutil.rmtree(target, ignore_errors=True)
        for left in target.parent.glob(f".{target.name}-*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        began, draft = time.perf_counter(), make_folder(target.parent / f".{target.name}-draft")
        progress("convert", f"{reason}: reading it whole")
        with error_boundary(ModelError, f"converting {source}"):
            _write_converted(source, draft)
        digests = {file.name: _describe(file, _digest_of(file)) for file in model_files(draft)}
        write_manifest(draft, {"source": path, "files": digests, "complete": True})
        draft.rename(target)
    if reason := why_not_by_shards(target):
        raise ModelError(f"'{path}' cannot be converted: {reason}. Ranks load it whole; leave `rondel prepare` out")
    progress("convert", f"{target}: {len(digests)} files in {time.perf_counter() - began:.0f} s")
    return target


def _write_converted(source: Path, draft: Path) -> None:
    """Safetensors in the dtype that it computes in, under the names of its family."""
    config = _config_of(source)
    more: dict[str, Any] = {}
    if quantised := getattr(config, "quantization_config", None):
        method = _method_of(quantised)
        if method == "fp8":
            from transformers import FineGrainedFP8Config

            more["quantization_config"] = FineGrainedFP8Config(dequantize=True)
        elif method == "mxfp4":
            from transformers.utils.quantization_config import Mxfp4Config

            more["quantization_config"] = Mxfp4Config(dequantize=True)
        elif method in METHODS:
            with tempfile.TemporaryDirectory(dir=draft.parent, prefix=f"{draft.name}-") as scratch:
                _decode_weights(
                    source, Path(scratch), quantised if isinstance(quantised, dict) else quantised.to_dict()
                )
                return _write_converted(Path(scratch), draft)
        else:
            raise ModelError(
                f"{source} is stored in {method}, which is not decoded here (fp8, mxfp4, {', '.join(METHODS)} are): "
                "take the model in 16 bits"
            )
    more["dtype"] = torch.bfloat16 if more else "auto"
    loaded = load_pretrained(auto_class(config), str(source), pretrained_model_name_or_path=source, **more)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # one that remembers nothing of how it was stored: `save_pretrained` would store it so again
    with parameters_on_meta():
        model = auto_class(config).from_config(config, dtype=config.dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(draft, max_shard_size=SHARD)
    for file in model_files(source):
        if file.suffix not in WEIGHTS and not file.name.endswith(".index.json") and not (draft / file.name).exists():
            shutil.copyfile(file, draft / file.name)


def _decode_weights(source: Path, into: Path, config: dict[str, Any]) -> None:
    """The same checkpoint with whole weights in bfloat16, a file at a time."""
    files = sorted(set(stored_files(str(source)).values()))
    coded: dict[str, set[str]] = {}  # module -> the ends of the names of its tensors
    for name, (_, dtype) in [found for file in files for found in _headers_of(file).items()]:
        module, _, part = name.rpartition(".")
        if part in SUFFIXES or dtype not in FLOATS:
            coded.setdefault(module, set()).add(part)
    waiting: dict[str, dict[str, torch.Tensor]] = {}  # of modules whose tensors lie in several files
    for number, file in enumerate(files):
        found: dict[str, torch.Tensor] = {}
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                module, _, part = name.rpartition(".")
                if part not in coded.get(module, ()):
                    found[name] = opened.get_tensor(name)
                    continue
                parts = waiting.setdefault(module, {})
                parts[part] = opened.get_tensor(name)
                if parts.keys() == coded[module]:
                    found[f"{module}.weight"] = decode_stored(waiting.pop(module), config, module).to(torch.bfloat16)
        save_file(found, into / f"part-{number:05d}.safetensors", metadata={"format": "pt"})
    names = {name: file.name for file in sorted(into.glob("part-*")) for name in _headers_of(str(file))}
    (into / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for beside in model_files(source):
        if beside.suffix not in WEIGHTS and not beside.name.endswith(".index.json"):
            shutil.copyfile(beside, into / beside.name)
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    told.pop("quantization_config", None)
    (into / "config.json").write_text(json.dumps(told | {"dtype": "bfloat16"}))


def _stage_files(path: str, source: Path, target: Path, progress: Progress, reread: bool) -> Path:
    """Copies of the files that are not there yet; then all digests are those that were read."""
    files = model_files(source)
    whole, began, copied = sum(file.stat().st_size for file in files), time.perf_counter(), 0
    with _alone(target):
        for attempt in range(2):
            manifest = read_manifest(target) or {"source": path, "files": {}, "complete": False}
            make_folder(target)
            for number, file in enumerate(files, 1):
                told = manifest["files"].get(file.name)
                if told and (target / file.name).is_file() and (target / file.name).stat().st_size == told["bytes"]:
                    continue
                manifest["files"][file.name] = _copy_with_digest(file, target / file.name)
                manifest["complete"] = False
                write_manifest(target, manifest)
                copied += file.stat().st_size
                progress("stage", f"{number}/{len(files)} {file.name}, {_size(copied)} of {_size(whole)}")
            broken = _differing_files(target, reread or not manifest["complete"])
            if not broken:
                break
            progress("stage", f"{', '.join(broken)} is not what was copied: copied again")
            manifest["files"] = {name: told for name, told in manifest["files"].items() if name not in broken}
            write_manifest(target, manifest | {"complete": False})
            if attempt:
                raise UserError(
                    f"{target / broken[0]} is read with other bytes than were written, twice: try another disk"
                )
        files_now = {name: _describe(target / name, told["digest"]) for name, told in manifest["files"].items()}
        write_manifest(target, manifest | {"files": files_now, "complete": True})
    seconds = time.perf_counter() - began
    progress("stage", f"{target}: {_size(copied)} copied in {seconds:.0f} s" if copied else f"done before: {target}")
    return target


def _copy_with_digest(source: Path, target: Path) -> dict[str, Any]:
    digest = blake2b(digest_size=16)
    with source.open("rb") as opened, open_replacement(target, source.stat().st_size) as copy:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
            copy.write(chunk)
    return _describe(target, digest.hexdigest())


def _differing_files(folder: Path, reread: bool) -> list[str]:
    """Files that are not what the manifest says. One of the same size and time is read only if `reread`."""

    def differs(name: str, told: dict[str, Any]) -> bool:
        file = folder / name
        if not file.is_file() or file.stat().st_size != told["bytes"]:
            return True
        return (reread or file.stat().st_mtime_ns != told["time"]) and _digest_of(file) != told["digest"]

    return [name for name, told in read_manifest(folder).get("files", {}).items() if differs(name, told)]


def _describe(file: Path, digest: str) -> dict[str, Any]:
    stat = file.stat()
    return {"bytes": stat.st_size, "digest": digest, "time": stat.st_mtime_ns}


def _digest_of(file: Path) -> str:
    digest = blake2b(digest_size=16)
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One at a time: all ranks of a node may be asked to prepare it."""
    lock = make_folder(target.parent) / f".{target.name}.lock"
    try:
        with FileLock(lock, timeout=LONGEST):
            yield
    except Timeout as error:
        raise UserError(f"another `rondel prepare` has held {lock} for a day: end it, and start again") from error


def _method_of(quantised: Any) -> str:
    told = quantised if isinstance(quantised, dict) else quantised.to_dict()
    return str(getattr(told.get("quant_method"), "value", told.get("quant_method")))


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
