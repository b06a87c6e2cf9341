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
kinds |= dict.fromkeys(("parts", "lse", "entropy", "grad_logprob", "grad_entropy", "logits"), "*fp32")
kinds |= dict.fromkeys(("hidden", "weight", "bias", "out"), "*bf16")
for capability, tile in (80, module.LARGE), (90, module.LARGE), (100, module.SMALL), (86, module.SMALL):
    shaped = dict(CAPPED=capability == 80, BIAS=capability == 90)
    extras = dict(SPLITS=module.SPLITS, **tile.blocks, **shaped)
    made = compile_kernel(module._forward_kernel, capability, kinds, tile.options, **extras)
    assert len(made.asm["cubin"]) > 1000
    assert made.metadata.shared <= (module.LARGE_MEMORY if tile is module.LARGE else 99 * 1024), made.metadata
    assert {80: "mma.sync", 86: "mma.sync", 90: "wgmma", 100: "tcgen05"}[capability] in made.asm["ptx"]
    made = compile_kernel(module._dz_kernel, capability, kinds, dict(num_warps=4), COLUMNS=module.COLUMNS, **shaped)
    assert len(made.asm["cubin"]) > 1000
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
    kinds = {"out": "*fp32", "lse": "*fp32", "sinks": "*bf16", "merged": "*bf16"}
    made = compile_kernel(module._merge_kernel, capability, kinds, dict(num_warps=1), SPLITS=8, WIDE=96, WIDE_P=128, SINKS=True)
    assert len(made.asm["cubin"]) > 1000
"""
TREE = """
from rondel.models import tree_attention as module
kinds = dict.fromkeys(("q", "k", "v", "grad", "out"), "*bf16") | dict.fromkeys(("lse", "delta", "dk", "dv"), "*fp32")
kinds |= dict.fromkeys(("tiles", "segments", "first", "above", "below"), "*i32") | dict.fromkeys(("scale", "softcap"), "fp32")
for capability, size in (80, 128), (86, 256), (90, 64), (100, 64):
    for kernel in (module._forward_kernel, module._dq_kernel, module._dkv_kernel):
        tile = module.tile_of(size, 2, backward=kernel is not module._forward_kernel)
        fixed = dict(REPEATS=6, QUERIES=tile.queries, KEYS=tile.keys, SIZE=size, WIDE=size, SIZE_P=size, WIDE_P=size)
        options = dict(num_warps=tile.warps, num_stages=tile.stages)
        made = compile_kernel(kernel, capability, kinds, options, **fixed)
        assert len(made.asm["cubin"]) > 1000 and made.metadata.shared <= 99 * 1024, (kernel, capability, made.metadata)
        assert "mma" in made.asm["ptx"] or "tcgen05" in made.asm["ptx"]
"""
ROWS = """
from rondel.models import row_kernels as module
kinds = dict.fromkeys(("weight", "out", "gate", "up"), "*bf16") | dict.fromkeys(("x", "inverse", "partial", "dx"), "*fp32")
kinds |= {"grad": "*bf16", "eps": "fp32"}
for capability in (80, 90, 100):
    for kernel in (module._norm_kernel, module._norm_gradient_kernel, module._gate_kernel, module._gate_gradient_kernel):
        fixed = dict(SIZE_P=2048, ROUNDS=False, WANTS_WEIGHT=True, KEEPS=True, COLUMNS=module.COLUMNS)
        made = compile_kernel(kernel, capability, kinds, dict(num_warps=8), **fixed)
        assert len(made.asm["cubin"]) > 1000
"""


@pytest.mark.slow
def test_kernels_compile_for_cards_that_are_not_here():
    """Within the shared memory that the smallest card has, and with tensor cores where a tile is that of a run."""
    run_compiled(LOGPROBS + FP8 + PAGED + TREE + ROWS)
