"""The engine alone, on the four kinds of rollout work of
benchmarks/peers/{hf,vllm}_generate.py: tokens a second, cache cleared before each run.

rondel bench generate --model FOLDER --work equal|ragged|prefix|opening|all --groups 8 --group 8 --dtype bfloat16 --json
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or smollm2-135m")
    parser.add_argument("--work", default="all", choices=["equal", "ragged", "prefix", "opening", "all"])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--numerics", default="fast", choices=["fast", "aligned"])
    parser.add_argument("--eager", action="store_true", help="without the compiled serving pass (engine.compile)")
    parser.add_argument("--repeat", type=int, default=3, help="runs that count, after one that does not")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import gemm_peak, median, multiplications, opened, report
    from vllm_generate import work

    from rondel.core.types import Request, Sampling, sample_key
    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.models.aligned_numerics import align_numerics
    from rondel.models.cuda_graphs import serving_pass

    device, loaded = opened(a.model, a.dtype, a.threads)
    if a.numerics == "aligned":
        device.call(align_numerics, loaded)
    vocab = loaded.model.get_input_embeddings().weight.shape[0]
    dtype = str(loaded.dtype).removeprefix("torch.")
    began = time.perf_counter()
    compiled = None if a.eager or a.numerics == "aligned" else device.call(serving_pass, loaded, a.groups * a.group)
    start = time.perf_counter() - began
    engine = BuiltinEngine(loaded, run=device.run, kv_pages=65536, max_running=a.groups * a.group, compiled=compiled)

    async def once(kind: str, seed: int) -> tuple[int, float]:
        engine.scheduler.drop_cache(engine.version)
        jobs = [
            Request(list(p), Sampling(max_tokens=n, ignore_eos=True), key=sample_key(seed, g, s))
            for g, (p, lengths) in enumerate(work(kind, a.groups, a.group, vocab, seed=seed))
            for s, n in enumerate(lengths)
        ]
        began = time.perf_counter()
        outs = await asyncio.gather(*(engine.generate(r) for r in jobs))
        return sum(len(o.tokens) for o in outs), time.perf_counter() - began

    peak = (
        device.call(gemm_peak, dtype, device.threads) if loaded.device.type == "cpu" else 0.0
    )  # not here: a second thread pool halves the speed of both
    body, head = multiplications(loaded.model)
    for kind in ("equal", "ragged", "prefix", "opening") if a.work == "all" else (a.work,):
        rates, shares = [], []
        for r in range(a.repeat + 1):
            before = engine.scheduler.prefilled, engine.scheduler.decoded
            tokens, seconds = asyncio.run(once(kind, r))
            prefilled, decoded = engine.scheduler.prefilled - before[0], engine.scheduler.decoded - before[1]
            rates.append(tokens / seconds)
            shares.append(2 * (body * (prefilled + decoded) + head * tokens) / seconds / peak if peak else 0.0)
        prompts = sum(len(p) for p, _ in work(kind, a.groups, a.group, vocab, seed=a.repeat))
        row = {
            "engine": "rondel", "kind": kind, "dtype": dtype, "numerics": a.numerics, "compiled_in_s": round(start, 1) if compiled else None, "groups": a.groups, "group": a.group, "tok_s": round(median(rates[1:]), 1),
            "runs": [round(x, 1) for x in sorted(rates[1:])], "prompt_tokens": prompts, "prefilled": prefilled, "new_tokens": tokens,
            "share_of_gemm_peak": round(median(shares[1:]), 3), "gemm_peak_gflops": round(peak / 1e9, 1), "threads": device.threads,
        }  # fmt: skip
        report(row, only_json=a.json)
    device.close()


if __name__ == "__main__":
    main()
