"""The model of a checkpoint as a folder of its own: what other tools load, without what only a resume needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rondel.models.control.kinds import is_control, reads_pictures
from rondel.models.flow.kinds import is_flow
from rondel.models.load import load_model
from rondel.models.program_export import export_program
from rondel.models.quantized_export import export_quantized
from rondel.models.save import make_readable
from rondel.models.weight_formats import MARK
from rondel.system.files import guard_write

OF_A_RUN = ("manifest.json", "state.json", "optimizer.safetensors")


def export_model(checkpoint: Path, into: Path) -> str:
    """Write the model or adapter of `checkpoint` to the folder `into`, which must not exist. -> the number format of a
    run with model.format, encoded; "" for all others, whose files are copied as they are, beside a program of torch for
    policies of points or actions that read no pictures.
    """
    config = checkpoint / "config.json"
    if config.is_file() and MARK in json.loads(config.read_text(encoding="utf-8")):
        return export_quantized(checkpoint, into)[0]
    model = str(checkpoint)
    programs = is_flow(model) or (is_control(model) and not reads_pictures(model))
    with guard_write(into, (1 + programs) * sum(p.stat().st_size for p in _model_files(checkpoint))):
        into.mkdir(parents=True)
        for path in _model_files(checkpoint):
            shutil.copyfile(path, into / path.name)
        if programs:
            export_program(load_model(str(into), device="cpu").model, into)
        make_readable(into)
    return ""


def _model_files(checkpoint: Path) -> list[Path]:
    """The main policy's: others are in policies/."""
    return [path for path in checkpoint.iterdir() if path.is_file() and path.name not in OF_A_RUN]
