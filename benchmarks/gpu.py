"""The engine on a GPU: decode steps at several batches with and without recorded graphs, prefill,
the first token, and the share of the memory's speed.

    rondel bench gpu --json
A random dense model of 1.5 billion weights in bf16, unless --model names another or --size
tiny makes one for a look on a CPU. A decode step reads all weights, and keys and values of
every context; `share` is these bytes over the step's
seconds and over what a copy of 1 GiB reaches here, in the same run. The plain pass, graphs, and graphs whose next step
is begun before the host reads one (`ahead`; without a GPU the plain pass, in one thread) are timed in turn (A B C A B C),
medians of each; `equal` says whether all drew the same tokens with logprobs of the same bits.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
SIZES: dict[str, dict[str, Any]] = {
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 32768,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="folder, hub id or smollm2-135m; without one a random model of --size"
    )
    parser.add_argument("--size", default="1.5b", choices=[*SIZES])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--running", default="1,64,256", help="requests that decode together")
    parser.add_argument("--context", type=int, default=512, help="tokens of each when it begins")
    parser.add_argument("--new", type=int, default=64, help="tokens of each, so steps of a round")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of graph and plain pass in turn, after one that does not count"
    )
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt of prefill and first token")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    import torch
    from _work import median, multiplications, opened, report
    from decode import steps

    from rondel.core.types import Request, Sampling, sample_key
    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.models.cuda_graphs import DecodeGraphs

    device, loaded = opened(a.model or {"random": "qwen2", "seed": 0, **SIZES[a.size]}, a.dtype, 0)
    gpu = loaded.device.type == "cuda"
    sizes = [int(n) for n in a.running.split(",")]
    pages = max(max(sizes) * (a.context + 2 * a.new + 64), 2 * a.prompt)
    engine = BuiltinEngine(
        loaded, run=device.run, kv_pages=pages, max_running=max(sizes), prefill_tokens=8192, decode_ahead=True
    )
    ahead = engine.serving.ahead
    passes: dict[str, tuple[Any, Any]] = {"plain": (loaded.hidden_states, None)}
    if gpu:
        passes["graph"] = device.call(DecodeGraphs, loaded, max(sizes)).hidden_states, None
    passes["ahead"] = passes["graph" if gpu else "plain"][0], ahead
    element, weights = torch.finfo(loaded.dtype).bits // 8, sum(multiplications(loaded.model))
    config = loaded.model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * element
    speed = device.call(copy_speed, loaded.device)

    def ask(seed: int, row: int, length: int, new: int) -> Request:
        tokens = [(7919 * (row + 1) + 31 * seed + 13 * t) % loaded.head.weight.shape[0] for t in range(length)]
        return Request(tokens, Sampling(max_tokens=new, ignore_eos=True), key=sample_key(seed, row, 0))

    def drawn(name: str, running: int) -> Any:
        """What a pass draws from the same requests."""
        engine.runner.hidden, engine.serving.ahead = passes[name]
        engine.scheduler.drop_cache(engine.version)

        async def together() -> Any:
            return await asyncio.gather(
                *(engine.generate(ask(7, row, min(a.context, 64), 8)) for row in range(running))
            )

        return [(out.tokens, out.logprobs) for out in asyncio.run(together())]

    table = {}
    for n in sizes:
        spent: dict[str, list[float]] = {name: [] for name in passes}
        for seed in range(a.rounds + 1):
            for name in passes:
                engine.runner.hidden, engine.serving.ahead = passes[name]
                engine.scheduler.drop_cache(engine.version)
                spent[name] += [median(clock for clock, _ in asyncio.run(steps(engine, n, a.context, a.new, seed)))] * (
                    seed > 0
                )
        read = element * weights + n * (a.context + a.new / 2) * token
        row: dict[str, Any] = {"bytes": round(read)}
        for name, seconds in spent.items():
            best = median(seconds)
            row[name] = {"ms": round(1e3 * best, 3), "tok_s": round(n / best), "share": round(read / best / speed, 3)}
        row["equal"] = all(drawn("plain", n) == drawn(name, n) for name in passes)
        table[str(n)] = row
        if not a.json:
            print(f"{n:>4} requests   {row}", flush=True)

    firsts = []
    for seed in range(a.rounds + 1):
        engine.scheduler.drop_cache(engine.version)
        began = time.perf_counter()
        asyncio.run(engine.generate(ask(seed, 0, a.prompt, 1)))
        firsts += [time.perf_counter() - began] * (seed > 0)
    report(
        {
            "card": torch.cuda.get_device_name() if gpu else "cpu",
            "weights": weights,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "context": a.context,
            "copy_gb_s": round(speed / 1e9, 1),
            "decode": table,
            "prompt": a.prompt,
            "first_token_ms": round(1e3 * median(firsts), 2),
            "prefill_tok_s": round(a.prompt / median(firsts)),
        },
        only_json=a.json,
    )
    device.close()


def copy_speed(where: Any) -> float:
    """Bytes read and written a second by a copy, best of several."""
    import torch

    gpu = where.type == "cuda"
    here = torch.ones((1 << 30) if gpu else (1 << 26), dtype=torch.uint8, device=where)
    there = torch.empty_like(here)
    best = 0.0
    for _ in range(6):
        began = time.perf_counter()
        there.copy_(here)
        if gpu:
            torch.cuda.synchronize()
        best = max(best, 2 * len(here) / (time.perf_counter() - began))
    return best


if __name__ == "__main__":
    main()
