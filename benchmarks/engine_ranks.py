"""An engine of several processes against one process: do they write the same, and how fast is each?

    rondel bench engine_ranks --json                        every family of text in tests/kits/families.py, tp = 2
    rondel bench engine_ranks --families llama qwen3_moe --tp 2
    rondel bench engine_ranks --requests-apart --json       dp = ep = 2
    rondel bench engine_ranks --families --speed MODEL --running 8 --new 64
    rondel bench engine_ranks --pictures 24 --running 4 --new 96 --json     encoders = 1

families   six answers of 12 tokens, three greedy: families that write equal tokens, the largest difference of a logprob,
           and why the others are refused
speed      tokens a second of decoding, one process on as many threads as there are ranks, and tp processes of one thread
           each, in turn; all over gloo on the processors of this machine
pictures   a random qwen2_5_vl of 15 M parameters decodes texts, and beside them answers one prompt with a new picture of
           N x N tokens after the other: seconds from a prompt to its first token, and tokens a second of the texts; one
           process on two threads, and engine and encoder on one each, in turn
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench engine_ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument(
        "--experts-apart", action="store_true", help="experts are not cut, each lies whole on one process"
    )
    parser.add_argument(
        "--requests-apart",
        action="store_true",
        help="experts alone are shared, and each process has requests of its own",
    )
    parser.add_argument("--families", nargs="*", default=["all"])
    parser.add_argument("--speed", default="", metavar="MODEL", help="a folder, or { random = ... }")
    parser.add_argument("--pictures", type=int, default=0, metavar="N", help="prompts with pictures beside decoding")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import report

    from kits.engine_ranks import RankedEngines

    if a.pictures:
        report({"pictures": _measure_pictures(a)}, only_json=a.json)
        return
    with tempfile.TemporaryDirectory() as folder:
        engines = RankedEngines(
            Path(folder), tp=a.tp, experts_apart=a.experts_apart or a.requests_apart, requests_apart=a.requests_apart
        )
        try:
            told = _compare_families(engines, a.families) if a.families else {}
            if a.speed:
                told["speed"] = _measure_speed(engines, a)
        finally:
            engines.close()
    report({"tp": a.tp, **told}, only_json=a.json)


def _compare_families(engines: Any, families: list[str]) -> dict[str, Any]:
    from kits.engine import all_of, ask, engine, prompt
    from kits.engine_ranks import whole
    from kits.families import FAMILIES
    from kits.vision import EYES
    from rondel.core.errors import UserError

    gaps: dict[str, float] = {}
    other, refused = [], {}
    for kind in [kind for kind in FAMILIES if kind not in EYES] if families == ["all"] else families:
        try:
            ours = engines.of(kind)
        except UserError as error:
            refused[kind] = str(error)
            continue
        one = engine(whole(kind))
        most = min(50, one.loaded.token_count - 1)
        requests = [
            ask(prompt(i // 2, 12 + 7 * (i // 2), most), key=i, n=12, temperature=float(i % 2 == 0)) for i in range(6)
        ]
        a, b = (asyncio.run(all_of(e, requests)) for e in (ours, one))
        if any(x.tokens != y.tokens for x, y in zip(a, b)):
            other.append(kind)
        gaps[kind] = max(abs(p - q) for x, y in zip(a, b) for p, q in zip(x.logprobs, y.logprobs))
    worst = sorted(gaps, key=lambda kind: -gaps[kind])[:3]
    return {
        "equal_tokens": len(gaps) - len(other),
        "other_tokens": other,
        "worst_gaps": {kind: gaps[kind] for kind in worst},
        "refused": refused,
    }


def _measure_speed(engines: Any, a: argparse.Namespace) -> dict[str, Any]:
    from kits.engine import all_of, ask, engine, prompt
    from kits.engine_ranks import whole
    from rondel.runtime.devices import Device

    device = Device("cpu", a.tp)
    loaded = device.call(partial(whole, f"from {a.speed}"))
    one = device.call(lambda: engine(loaded, run=device.run))
    several = engines.of(f"from {a.speed}")
    rates: dict[str, list[float]] = {"one process": [], f"tp = {a.tp}": []}
    for number in range(a.rounds):
        for name, e in zip(rates, (one, several)):
            requests = [ask(prompt(100 * number + i, 32, 50), key=i, n=a.new) for i in range(a.running)]
            began = time.perf_counter()
            answers = asyncio.run(all_of(e, requests))
            rates[name].append(sum(len(x.tokens) for x in answers) / (time.perf_counter() - began))
    device.close()
    return {name: sorted(found)[len(found) // 2] for name, found in rates.items()}


LOOKS = {
    "random": "qwen2_5_vl",
    **dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2),
    "max_position_embeddings": 4096,
    "vision_config": {"depth": 8, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024, "window_size": 112},
}


def _measure_pictures(a: argparse.Namespace) -> dict[str, Any]:
    from kits.engine import engine
    from kits.engine_ranks import EncodedEngines
    from rondel.models.load import load_model
    from rondel.runtime.devices import Device

    load = partial(load_model, LOOKS, dtype="float32")
    device = Device("cpu", 2)
    with tempfile.TemporaryDirectory() as folder:
        engines = EncodedEngines(Path(folder))
        try:
            loaded = device.call(load)
            e = {"one process": device.call(lambda: engine(loaded, run=device.run)), "encoders = 1": engines.of(load)}
            told: dict[str, list[tuple[float, float]]] = {name: [] for name in e}
            for number in range(2 * a.rounds):  # A B A B
                name = [*e][number % 2]
                told[name].append(asyncio.run(_look_beside(e[name], a, number)))
            assert e["encoders = 1"].runner.eyes.looked == 0
        finally:
            engines.close()
            device.close()
    told = {name: rows[1:] or rows for name, rows in told.items()}  # the first one warms up
    rows = [[*zip(*told[name])] for name in told]
    return {
        **{
            name: {"seconds a picture": sorted(s)[len(s) // 2], "tokens a second": sorted(t)[len(t) // 2]}
            for name, (s, t) in zip(told, rows)
        },
        "pairs": [
            {"seconds a picture": new / old, "tokens a second": more / less}
            for (old, less), (new, more) in zip(*told.values())
        ],
    }


async def _look_beside(e: Any, a: argparse.Namespace, number: int) -> tuple[float, float]:
    """-> median seconds from a prompt with a picture to its first token, and tokens a second of the texts."""
    from kits.engine import all_of, prompt
    from kits.engine import ask as ask_text
    from kits.vision import ask, image, stream

    async def decode_texts() -> float:
        began = time.perf_counter()
        await all_of(e, [ask_text(prompt(1000 * number + i, 16), key=i, n=a.new) for i in range(a.running)])
        return a.running * a.new / (time.perf_counter() - began)

    texts, seconds = asyncio.ensure_future(decode_texts()), list[float]()
    while not texts.done():
        seed = 1000 * number + len(seconds)
        looks = ask(*stream(e.loaded, 4, image(e.loaded, seed, a.pictures, a.pictures), 4, seed=seed), key=seed, n=1)
        start = time.perf_counter()
        await e.generate(looks)
        seconds.append(time.perf_counter() - start)
        await asyncio.sleep(0)
    return sorted(seconds)[len(seconds) // 2], await texts


if __name__ == "__main__":
    main()
