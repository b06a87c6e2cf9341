"""What the clean server of `kits.runs` does before it forks, and what every run would do again: imports, and the
patterns of all the names that transformers gives weights. Together they take 0.7 s of a core.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
from pathlib import Path

gc.disable()  # what is imported stays: looking through it in between would take a third of the time

from transformers import conversion_mapping  # noqa: E402

for name in (
    "rondel.driver.controller",
    "rondel.assemble.components",
    "rondel.assemble.workers",
    "rondel.assemble.engine_ranks",
    "pyarrow.dataset",
    "pyarrow.parquet",
):
    importlib.import_module(name)
for name in ("pandas", "peft"):  # pyarrow imports the one where it is there, an adapter the other
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(AttributeError):  # of another version
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
importlib.import_module("kits.runs")
# what is forked has the variable as whoever asked for it (kits.runs.FromCleanServer)
given = os.environ.pop("PYTHONPATH").removeprefix(str(Path(__file__).parents[1])).removeprefix(os.pathsep)
if given:
    os.environ["PYTHONPATH"] = given
gc.collect()
gc.enable()
gc.freeze()  # a collection in a forked process would write to every page that it shares
atexit.register(gc.unfreeze)
