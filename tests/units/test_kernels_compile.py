"""Every kernel is compiled to machine code for cards that are not here: an A100, an H100 and a B200. A
process imports Triton once for all of them; the tile of a real run goes to one card, small ones (a sweep) to the others.
"""

from __future__ import annotations

import pytest

from kits.kernels import run_compiled

pytest.importorskip("triton", reason="pip install triton")

LOGPROBS = """
from rondel.models import logprob_kernel as module
kinds = {"target": "*i64"} | dict.fromkeys(("scale", "softcap", "temperature"), "fp32")
kinds |= dict.fromkeys(("parts", "lse", "entropy", "grad_logprob", "grad_entropy", "out", "out_bias"), "*fp32")
kinds |= dict.fromkeys(("hidden", "weight", "bias", "buffer"), "*bf16")
whole = {(module._forward_kernel, 80), (module._dhidden_kernel, 90), (module._dweight_kernel, 100)}
for capability in (80, 90, 100):
    for kernel in (module._forward_kernel, module._dhidden_kernel, module._dweight_kernel):
        if ((kernel, capability) in whole) == SMALL:
            continue
        tile = module.TileShape(16, 16, 16) if SMALL else module.tile_of(2)
        extras = dict(CAPPED=capability == 80, BIAS=capability == 90, WANTS_BIAS=capability == 90, SPLITS=module.SPLITS, PROGRAMS=148)
        made = compile_kernel(kernel, capability, kinds, module.OPTIONS, **tile.blocks, **extras)
        assert len(made.asm["cubin"]) > 1000 and made.metadata.shared <= 99 * 1024, made.metadata
        cores = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}[capability]
        assert SMALL or cores in made.asm["ptx"]
"""
FP8 = """
from rondel.formats import fp8_kernel as module
for capability, dtype in (80, "bf16"), (90, "fp32"), (100, "fp16"):
    kinds = {"numbers": "*" + dtype, "codes": "*u8", "scales": "*fp32"}
    for kernel in (module._encode_kernel, module._decode_kernel):
        rows = module.TILE_ROWS if capability > 80 else 128
        fixed = dict(ROWS=rows, COLUMNS=module.COLUMNS, BY_ROW=capability > 80)
        made = compile_kernel(kernel, capability, kinds, module.OPTIONS, **fixed)
        assert len(made.asm["cubin"]) > 1000 and made.metadata.shared <= 99 * 1024, made.metadata
        assert kernel is module._decode_kernel or "div.rn.f32" in made.asm["ptx"]
"""
PAGED = """
from rondel.models import paged_attention as module
decode, prefill = ("bf16", 2, 128, 6, 1, 8, 0), ("bf16", 2, 128, 6, 512, 1, 0)
latent, wide = ("bf16", 2, 512, 16, 1, 8, 64), ("fp32", 4, 256, 2, 512, 1, 0)
for capability, cases in (80, [decode]), (86, [prefill, latent, wide]), (90, [prefill]):
    for dtype, element, size, repeats, new, splits, tail in cases:
        kinds = dict.fromkeys(("q", "keys", "values"), "*" + dtype) | dict.fromkeys(("table", "feeds", "tiles"), "*i32")
        kinds |= dict.fromkeys(("out", "lse", "slopes"), "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
        shape, power = module.KernelShape.for_sizes(repeats, new, size, size, element), module._next_power
        fixed = dict(REPEATS=repeats, QUERIES=shape.queries, ROWS=shape.rows, BLOCK=shape.block, SIZE=size, WIDE=size)
        fixed |= dict(SIZE_P=power(size), WIDE_P=power(size), SPLITS=splits, SLOPES=new == 1, TAIL=tail, TAIL_P=power(tail))
        options = dict(num_warps=4, num_stages=2)
        made = compile_kernel(module._attention_kernel, capability, kinds, options, **fixed)
        assert len(made.asm["cubin"]) > 1000 and made.metadata.shared <= 99 * 1024, (capability, dtype, made.metadata)
        assert dtype != "bf16" or "mma" in made.asm["ptx"]
"""


@pytest.mark.slow
def test_kernels_compile_for_cards_that_are_not_here():
    """Within the shared memory that the smallest card has, and with tensor cores where a tile is that of a run."""
    run_compiled("SMALL = False" + LOGPROBS + FP8 + PAGED)


@pytest.mark.sweep
def test_small_tiles_compile_for_the_other_cards():
    run_compiled("SMALL = True" + LOGPROBS)
