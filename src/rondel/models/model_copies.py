"""Models that `rondel prepare` has made ready: converted, or copied to a disk of this node.

    $RONDEL_MODELS/NAME-IDENTITY/        files of the model
                     prepared.json      where they are from, the digest of each, whether all are there

`model_folder` takes such a folder in place of the model that a recipe names. IDENTITY is that of the files it was made
from (names, sizes, times): a model that has changed is not found, and read where it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rondel.system.files import INDEX, SINGLE, replace_file

MANIFEST = "prepared.json"
MODELS = "RONDEL_MODELS"  # folders with prepared models, as PATH has them
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ckpt", ".tflite")


def model_files(folder: Path) -> list[Path]:
    """What of a model's folder a run reads: its safetensors, or else its other weights, and what is beside them."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    if (folder / SINGLE).is_file():
        stored = {SINGLE}
    elif (folder / INDEX).is_file():
        stored = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    else:
        stored = {path.name for path in files if path.suffix in WEIGHTS}
    return [path for path in files if path.name != MANIFEST and (path.suffix not in WEIGHTS or path.name in stored)]


def prepared_name(path: str, folder: Path) -> str:
    """What a prepared copy of this model is called: its name, and what tells its files from others."""
    seen = "\n".join(f"{file.name}|{(stat := file.stat()).st_size}|{stat.st_mtime_ns}" for file in model_files(folder))
    return f"{_slug(path)}-{blake2b(seen.encode(), digest_size=6).hexdigest()}"


def find_prepared(path: str, folder: Path | None, places: Iterable[Path]) -> Path | None:
    """The first complete copy. `folder`: where the model is itself; None where this node does not have it: then what
    was prepared under its name is all that there is.
    """
    for place in places:
        if folder is not None:
            found = [place / prepared_name(path, folder)]
        else:
            found = sorted(place.glob(f"{_slug(path)}-????????????"))
        complete = [one for one in found if is_complete(one)]
        if len(complete) == 1:
            return complete[0]
    return None


def prepared_places(cache: Path) -> list[Path]:
    """Where prepared models may be."""
    told = [Path(one) for one in os.environ.get(MODELS, "").split(os.pathsep) if one]
    return [place for place in (*told, cache / "prepared") if place.is_dir()]


def is_complete(folder: Path) -> bool:
    """Whether every file is there in its size."""
    manifest = read_manifest(folder)
    files = manifest.get("files", {})
    return bool(manifest.get("complete")) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == told["bytes"] for name, told in files.items()
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Empty where there is none that can be read: then nothing is prepared."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _slug(path: str) -> str:
    """ "Qwen/Qwen3-8B" -> "Qwen--Qwen3-8B"; of a folder its own name."""
    local = Path(path).expanduser()
    return (local.resolve().name if local.exists() else path.replace("/", "--")) or "model"
