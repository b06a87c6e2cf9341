"""What test modules and kits import, once, before workers are forked: packages and Rondel, not what pytest rewrites."""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
from pathlib import Path

NAMES = re.compile(r"""^(?:from|import) ([\w.]+)|^\w.*importorskip\(["']([\w.]+)""", re.MULTILINE)
REWRITTEN = {"kits", "hypothesis", "pytest", "_pytest", "xdist"}

gc.disable()
for path in sorted(Path(__file__).parents[1].glob("*/*.py")):
    for name in map("".join, NAMES.findall(path.read_text(encoding="utf-8"))):
        if name.partition(".")[0] not in REWRITTEN:
            with contextlib.suppress(ImportError):  # an example, or a package that is not here: said where it is tested
                importlib.import_module(name)
gc.collect()
gc.enable()
gc.freeze()
