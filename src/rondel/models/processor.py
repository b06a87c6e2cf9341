"""What this CPU multiplies quickly, by what it is: a timing would give other bits in the next process."""

from __future__ import annotations

import functools
import platform

import torch

HALVES = (torch.bfloat16, torch.float16)


@functools.cache
def has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 itself. oneDNN says yes wherever it can convert: with
    AVX-512 alone, at a fifth of float32's speed.
    """
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return not x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@functools.cache
def multiplies_in_vectors(dtype: torch.dtype) -> bool:
    """Whether the tiles of cpu_tiles.h are written for this CPU and this dtype, float32 or bfloat16: for AVX-512 that
    multiplies bfloat16, with AMX or without, and for AVX2 alone, which multiplies bfloat16 as fp32 numbers.
    """
    here = torch.cpu._is_avx512_bf16_supported()
    return dtype in (torch.float32, torch.bfloat16) and (here or has_avx2_alone())


@functools.cache
def has_avx2_alone() -> bool:
    """Whether vectors of this CPU are those of AVX2: 8 fp32 numbers, and no AVX-512."""
    return torch.cpu._is_avx2_supported() and not torch.cpu._is_avx512_supported()


@functools.cache
def is_widened(dtype: torch.dtype) -> bool:
    """Whether products of this dtype on a CPU are computed in fp32 and rounded."""
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bf16_products())


@functools.cache
def knows_mkl() -> bool:
    """Whether MKL is the faster one in sums over tokens: on CPUs that have AVX2 alone, and on Intel's own without tiles, beside
    which it takes the same time and is less exact. With AVX-512 on others it takes twice oneDNN's time.
    """
    if multiplies_in_vectors(torch.float32) and not has_avx2_alone():
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return torch.backends.mkl.is_available() and (has_avx2_alone() or "GenuineIntel" in file.read(4096))
    except OSError:  # not Linux
        return False
