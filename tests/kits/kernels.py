"""Triton without a GPU: an interpreter that multiplies bfloat16, bytes that a kernel loads and stores, compilation for
cards that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def bfloat16_interpreter() -> Iterator[None]:
    """Triton 3.9's interpreter keeps bfloat16 as integers: it multiplies these, and rounds to zero. Here it computes with
    the numbers, and rounds to nearest. On a GPU this does nothing.
    """
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def numbers(handle: Any) -> Any:
        return cast(None, handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    def create_dot(self, a, b, d, *how):
        return dot(self, numbers(a), numbers(b), d, *how)

    def cast_impl(self, source, kind):
        if kind.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return cast(self, source, kind)
        rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(rounded, tl.bfloat16)

    with (
        patch.object(InterpreterBuilder, "create_dot", create_dot),
        patch.object(InterpreterBuilder, "cast_impl", cast_impl),
        patch.object(InterpreterBuilder, "create_fp_trunc", cast_impl),
    ):
        yield


@contextmanager
def moved_bytes() -> Iterator[Counter[str]]:
    """Yields what interpreted kernels have loaded and stored so far, masked numbers left out: {"load": ..., "store": ...}."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: Counter[str] = Counter()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(how: str, pointers: Any, mask: Any) -> None:
        found[how] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def create_masked_load(self, pointers, mask, *rest):
        count("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def create_masked_store(self, pointers, value, mask, *rest):
        count("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", create_masked_load),
        patch.object(InterpreterBuilder, "create_masked_store", create_masked_store),
    ):
        yield found


def compile_kernel(kernel: Any, capability: int, kinds: dict[str, str], options: dict[str, int], **fixed: Any) -> Any:
    """To machine code of `capability`, 80 or 90 or 100. `kinds`: Triton's type of each argument, i32 where it has none. Only
    in a process with TRITON_INTERPRET=0, see `run_compiled`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name.isupper() else kinds.get(name, "i32") for name in names}
    pointers = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {name: value for name, value in fixed.items() if name in names}, pointers)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def run_compiled(code: str) -> None:
    """Runs `code`, which calls `compile_kernel`, in a process whose Triton compiles."""
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"from kits.kernels import compile_kernel\n{code}\nprint('compiled')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.endswith("compiled\n"), done.stderr[-2000:]
