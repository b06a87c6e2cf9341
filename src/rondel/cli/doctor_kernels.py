"""Which kernels compute on this machine, for `rondel doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from typing import Literal

from rondel.core.errors import UserError
from rondel.core.events import Event, Warned, subscribe

Row = tuple[str, Literal["ok", "note", "broken"], str, str]  # what, state, found, fix


def kernel_rows(on_gpu: bool) -> Iterator[Row]:
    """The loops of a CPU, compiled now where they are not yet, and Triton's kernels of a GPU."""
    yield _loops_row()
    yield _triton_row(on_gpu)


def _loops_row() -> Row:
    import torch

    from rondel.models.cpu_kernels import LOOPS, PLAIN_KERNELS
    from rondel.models.native_library import SWITCH, chosen_library

    what, told = "kernels on the CPU", list[str]()

    def hear(event: Event) -> None:
        if isinstance(event, Warned):
            told.append(event.message)

    forget = subscribe(hear)
    try:
        library = chosen_library()
    except UserError as error:
        return what, "broken", str(error), f"unset {SWITCH}"
    finally:
        forget()
    instructions = torch.backends.cpu.get_cpu_capability()
    if library is not None:
        own = f"{instructions}, bfloat16 by AMX" if library.rondel_has_amx() else instructions
        return what, "ok", f"{LOOPS}, for this processor ({own}), in {library._name}", ""
    if told:
        return what, "note", told[0], "apt install g++, or name a working compiler in CXX"
    why = (
        f"{SWITCH}=0 in the environment"
        if os.environ.get(SWITCH)
        else f"no AVX2 here ({instructions}); {SWITCH}=1 tries"
    )
    return what, "ok", f"{PLAIN_KERNELS}: {why}", ""


def _triton_row(on_gpu: bool) -> Row:
    what = "kernels on a GPU"
    if importlib.util.find_spec("triton") is None:
        found = "no Triton: the plain code computes on a GPU" if on_gpu else "no GPU and no Triton: none"
        return what, "note" if on_gpu else "ok", found, "pip install triton" if on_gpu else ""
    version = importlib.metadata.version("triton")
    return (
        what,
        "ok",
        f"Triton {version}" if on_gpu else f"no GPU: none (Triton {version} interprets them in tests)",
        "",
    )
