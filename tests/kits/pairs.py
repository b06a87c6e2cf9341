"""A processor that multiplies bfloat16 in vectors; on another one the same sums are taken in fp32."""

from __future__ import annotations

import pytest

from rondel.models import cpu_kernels, linear, native_library, packed_layout


def use_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    if (library := native_library.native_library()) is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(cpu_kernels, "_loaded", library)
    for module in (linear, packed_layout):
        monkeypatch.setattr(module, "multiplies_in_vectors", lambda dtype: dtype in cpu_kernels.CODES)
