"""Number formats of weights: fp8, mxfp8, int4, mxfp4, nvfp4. Each encodes, decodes, and fakes."""

from __future__ import annotations

from rondel.core.errors import ConfigError
from rondel.formats.fp4 import Mxfp4, Nvfp4
from rondel.formats.fp8 import Fp8, Mxfp8
from rondel.formats.int4 import Int4
from rondel.formats.number_format import NumberFormat

FORMATS: dict[str, NumberFormat] = {
    "fp8": Fp8(),
    "fp8_row": Fp8((1, 0)),
    "fp8_tensor": Fp8((0, 0)),
    "mxfp8": Mxfp8(),
    "int4": Int4(),
    "int4_128": Int4((1, 128)),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
}


def format_of(name: str) -> NumberFormat:
    """By the name that a recipe gives it."""
    if name not in FORMATS:
        raise ConfigError(f'"{name}" is no number format; there are {", ".join(FORMATS)}')
    return FORMATS[name]
