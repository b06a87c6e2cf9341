"""Each Triton kernel of training beside what torch computes without it, on a GPU: milliseconds (medians, in turn), the
ratio, and the share of the card's limit, measured in the same run: a product of 8192 for those that multiply, a copy of
1 GiB for those that move numbers.

    rondel bench kernels --json

`logprobs` and `attention` count the multiplications of a forward pass once and of a backward pass twice (attention 2.5
times, whose backward pass computes the scores again). `norm`, `gate` and `fp8` count each number that goes in or out once.
--size tiny is for a look without a GPU, through Triton's interpreter (TRITON_INTERPRET=1): its times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))
SIZES = {  # tokens, D, V, heads, key heads, numbers of a head, I
    "1.5b": (8192, 1536, 151936, 12, 2, 128, 8960),
    "tiny": (24, 32, 70, 2, 1, 16, 48),
}
PACKS = {  # groups, tokens of a prompt, answers, tokens of an answer
    "1.5b": [(2, 256, 8, 480), (1, 2048, 8, 768), (8, 128, 8, 112), (1, 8192, 0, 0)],
    "tiny": [(1, 8, 2, 8)],
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1.5b", choices=[*SIZES])
    parser.add_argument("--only", nargs="*", default=["logprobs", "attention", "norm", "gate", "fp8"])
    parser.add_argument("--rounds", type=int, default=3, help="of kernel and plain code in turn")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    import torch
    from _work import median, report
    from gpu import copy_speed

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timed = _card_ms if where.type == "cuda" else _once_ms
    side = 8192 if where.type == "cuda" else 64
    square = torch.randn(side, side, device=where).bfloat16()
    limits = {"flop": 2 * side**3 / timed(lambda: square @ square) * 1e3, "byte": copy_speed(where)}
    rows: dict[str, Any] = {}
    for name, plain, kernel, work, unit in (row for only in a.only for row in CASES[only](where, a.size)):
        spent: dict[str, list[float]] = {"plain": [], "kernel": []}
        for _ in range(a.rounds):
            spent["plain"].append(timed(plain))
            spent["kernel"].append(timed(kernel))
        ms = {how: median(found) for how, found in spent.items()}
        rows[name] = {how: round(found, 3) for how, found in ms.items()} | {
            "ratio": round(ms["plain"] / ms["kernel"], 2),
            "share": round(work / (ms["kernel"] / 1e3) / limits[unit], 3),
        }
        if not a.json:
            print(f"{name:<44} {rows[name]}", flush=True)
    report(
        {
            "card": torch.cuda.get_device_name() if where.type == "cuda" else "cpu",
            "product_tflops": round(limits["flop"] / 1e12, 1),
            "copy_gb_s": round(limits["byte"] / 1e9, 1),
            "ms": rows,
        },
        only_json=a.json,
    )


def _card_ms(work: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(work, warmup=10, rep=60, return_mode="median"))


def _once_ms(work: Callable[[], Any]) -> float:
    import time

    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def _without_kernels() -> Any:
    """The plain code, while it holds."""
    from rondel.system.kernel_choice import KernelChoice

    no = KernelChoice(False, "the benchmark asks for the plain code")
    return patch("rondel.train.logprobs.choose_logprob_kernel", lambda *_, **__: no), no


def _logprobs(where: Any, size: str) -> Any:
    import torch
    from torch import nn

    from rondel.models.head import LMHead
    from rondel.models.logprob_kernel import LogitShape
    from rondel.train.logprobs import fused_logprob_and_entropy, logprob_and_entropy

    tokens, d, vocab, *_ = SIZES[size]
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float16
    hidden = torch.randn(tokens, d, device=where).to(dtype).requires_grad_()
    head = LMHead(nn.Parameter((torch.randn(vocab, d, device=where) * 0.02).to(dtype)), None)
    target = torch.randint(0, vocab, (tokens,), device=where)

    def plain() -> Any:
        with _without_kernels()[0]:
            return logprob_and_entropy(hidden, target, head)

    def kernel() -> Any:
        return fused_logprob_and_entropy(hidden, head.weight, None, target, LogitShape())

    def both(forward: Callable[[], Any]) -> None:
        logprob, entropy = forward()
        (logprob.sum() + 0.01 * entropy.sum()).backward()
        hidden.grad = head.weight.grad = None

    def alone(forward: Callable[[], Any]) -> None:
        with torch.no_grad():
            forward()

    flop = 2 * tokens * d * vocab
    yield "logprobs forward", lambda: alone(plain), lambda: alone(kernel), flop, "flop"
    yield "logprobs forward and backward", lambda: both(plain), lambda: both(kernel), 3 * flop, "flop"


def _attention(where: Any, size: str) -> Any:
    import torch

    from rondel.models.dense_attention import ScoreRule
    from rondel.models.packed_layout import PackedLayout, PackedSegment
    from rondel.models.tree_attention import SegmentTree, tree_attention

    heads, shared, width = SIZES[size][3:6]
    dtype, rule = torch.bfloat16 if where.type == "cuda" else torch.float16, ScoreRule(width**-0.5)
    for groups, prompt, answers, length in PACKS[size]:
        segments: list[PackedSegment] = []
        for _ in range(groups):
            root = len(segments)
            for n, parent in [(prompt, None), *[(length, root)] * answers]:
                start = segments[-1].start + segments[-1].length if segments else 0
                segments.append(PackedSegment(start, n, parent))
        tokens = sum(s.length for s in segments)
        q, k, v = (
            torch.randn(tokens, n, width, device=where).to(dtype).requires_grad_() for n in (heads, shared, shared)
        )
        up = torch.randn(tokens, heads, width, device=where).to(dtype)
        layout, tree = PackedLayout(segments, where), SegmentTree.from_segments(segments, where)
        setattr(layout, "choose_kernel", lambda *_: _without_kernels()[1])  # noqa: B010

        def plain(layout: Any = layout, q: Any = q, k: Any = k, v: Any = v) -> Any:
            return layout.attend(0, q, k, v, rule)

        def kernel(tree: Any = tree, q: Any = q, k: Any = k, v: Any = v) -> Any:
            return tree_attention(q, k, v, tree, rule)

        def both(forward: Callable[[], Any], leaves: Any = (q, k, v), up: Any = up) -> None:
            torch.autograd.grad(forward(), leaves, up)

        def alone(forward: Callable[[], Any]) -> None:
            with torch.no_grad():
                forward()

        over = {i: segments[s.parent].length if s.parent is not None else 0 for i, s in enumerate(segments)}
        pairs = sum(s.length * (s.length + 1) / 2 + s.length * over[i] for i, s in enumerate(segments))
        name, flop = f"attention {groups} x ({prompt} + {answers} x {length})", 4 * pairs * heads * width
        yield f"{name} forward", lambda p=plain: alone(p), lambda k=kernel: alone(k), flop, "flop"
        yield f"{name} forward and backward", lambda p=plain: both(p), lambda k=kernel: both(k), 3.5 * flop, "flop"


def _norm(where: Any, size: str) -> Any:
    import torch
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    from rondel.models.kept_inputs import keep_inputs
    from rondel.models.row_kernels import rms_norm

    tokens, d, *_ = SIZES[size]
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float16
    norm = Qwen2RMSNorm(d).to(where, dtype)
    x, up = torch.randn(tokens, d, device=where, requires_grad=True), torch.randn(tokens, d, device=where).to(dtype)

    def plain() -> Any:
        return keep_inputs(norm.forward, [x], [norm.weight]).to(dtype)

    def kernel() -> Any:
        return rms_norm(x, norm.weight, norm.variance_epsilon)

    forward = tokens * d * (4 + 2)
    leaves = [x, norm.weight]
    yield "norm forward", _no_grad(plain), _no_grad(kernel), forward, "byte"
    both = [lambda f=f: torch.autograd.grad(f(), leaves, up) for f in (plain, kernel)]
    yield "norm forward and backward", *both, forward + tokens * d * (4 + 2 + 4), "byte"


def _gate(where: Any, size: str) -> Any:
    import functools

    import torch
    from torch import nn

    from rondel.models.kept_inputs import _gate, keep_inputs
    from rondel.models.row_kernels import swiglu

    tokens, *_, inner = SIZES[size]
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float16
    gate, up, dy = (torch.randn(tokens, inner, device=where).to(dtype) for _ in range(3))
    leaves, act = [gate.requires_grad_(), up.requires_grad_()], functools.partial(_gate, nn.SiLU())

    def plain() -> Any:
        return keep_inputs(act, leaves)

    def kernel() -> Any:
        return swiglu(*leaves)

    each = tokens * inner * 2
    yield "gate forward", _no_grad(plain), _no_grad(kernel), 3 * each, "byte"
    both = [lambda f=f: torch.autograd.grad(f(), leaves, dy) for f in (plain, kernel)]
    yield "gate forward and backward", *both, 8 * each, "byte"


def _fp8(where: Any, size: str) -> Any:
    import torch

    from rondel.formats.fp8 import Fp8
    from rondel.formats.fp8_kernel import decode_blocks, encode_blocks

    _, d, *_, inner = SIZES[size]
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float16
    weight = torch.randn(8, inner, d, device=where).to(dtype)
    moved = weight.numel() * 3
    for block in ((128, 128), (1, 128)):
        form = Fp8(block=block)
        codes, scale = encode_blocks(weight, block[0])
        with patch.object(Fp8, "choose_kernel", lambda *_: _without_kernels()[1]):
            named = form.encode(weight)

        def plain_encode(form: Any = form) -> Any:
            with patch.object(Fp8, "choose_kernel", lambda *_: _without_kernels()[1]):
                return form.encode(weight)

        def plain_decode(form: Any = form, named: Any = named) -> Any:
            with patch.object(Fp8, "choose_kernel", lambda *_: _without_kernels()[1]):
                return form.decode(named, dtype)

        rows = block[0]
        yield f"fp8 encode {rows} x 128", plain_encode, lambda r=rows: encode_blocks(weight, r), moved, "byte"
        yield (
            f"fp8 decode {rows} x 128", plain_decode,
            lambda r=rows, c=codes, s=scale: decode_blocks(c, s, r, dtype), moved, "byte",
        )  # fmt: skip


def _no_grad(forward: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    return torch.no_grad()(forward)


CASES = {"logprobs": _logprobs, "attention": _attention, "norm": _norm, "gate": _gate, "fp8": _fp8}

if __name__ == "__main__":
    main()
