"""Speculative decoding by look-up, on and off in turn: tokens a second on text that repeats and on text that does not.

    copy    a text that stands twice in the prompt and is begun a third time, greedy and at temperature 1
    story   "Write a story", temperature 1: little to look up

Every answer has exactly --new tokens.

rondel bench speculative --model FOLDER --running 1,4,8 --k 4 --pairs 3 --dtype bfloat16 --json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

KINDS = {"copy, greedy": ("copy", 0.0), "copy": ("copy", 1.0), "story": ("story", 1.0)}


def sentence(rng: random.Random) -> str:
    who = rng.choice(["Ada", "Bela", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana"])
    did = rng.choice(["counted", "painted", "carried", "sold", "hid", "repaired"])
    what = rng.choice(["boxes", "lamps", "violins", "maps", "kettles", "ladders", "clocks"])
    where = rng.choice(
        ["in the north hall", "behind the mill", "at the old harbour", "under the stairs", "near the orchard"]
    )
    return (
        f"On {rng.choice(['Monday', 'Tuesday', 'Friday', 'Sunday'])} {who} {did} {rng.randint(2, 99)} {what} {where}."
    )


def copied(seed: int) -> str:
    rng = random.Random(seed)
    text = " ".join(sentence(rng) for _ in range(8))
    return f"{text}\n\n{text}\n\n{text[: text.find('.') + 1]}"


def told(seed: int) -> str:
    return f"Write a short story that begins like this: {sentence(random.Random(seed))}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench speculative", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or smollm2-135m")
    parser.add_argument("--draft", default="", help="a smaller model with the same tokenizer instead of look-ups")
    parser.add_argument("--kind", default="all", choices=["all", *KINDS])
    parser.add_argument("--running", default="1,4,8", help="answers at once")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--k", type=int, default=4, help="most guesses")
    parser.add_argument("--always", action="store_true", help="guess whether it pays or not")
    parser.add_argument(
        "--pairs", type=int, default=3, help="runs without and with that count, after one pair that does not"
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import median, opened, report

    from rondel.core.types import Request, Sampling, sample_key
    from rondel.generate.engine.builtin.draft import DraftModel
    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
    from rondel.generate.template import Template
    from rondel.models.load import load_model

    device, loaded = opened(a.model, a.dtype, a.threads)
    other = device.call(lambda: load_model(a.draft, dtype=a.dtype, device=str(loaded.device))) if a.draft else None
    template = Template(loaded.tokenizer)

    async def once(engine: BuiltinEngine, kind: str, heat: float, running: int, seed: int) -> tuple[int, float]:
        engine.scheduler.drop_cache(engine.version)
        seeds = [1000 * seed + i for i in range(running)]
        if kind == "copy":
            prompts = [loaded.tokenizer.encode(copied(n)) for n in seeds]
        else:
            prompts = [template.render_opening([{"role": "user", "content": told(n)}]) for n in seeds]
        sampling = Sampling(temperature=heat, max_tokens=a.new, ignore_eos=True)
        began = time.perf_counter()
        outs = await asyncio.gather(
            *(engine.generate(Request(p, sampling, key=sample_key(seed, i, 0))) for i, p in enumerate(prompts))
        )
        return sum(len(o.tokens) for o in outs), time.perf_counter() - began

    for name in KINDS if a.kind == "all" else (a.kind,):
        kind, heat = KINDS[name]
        for running in map(int, a.running.split(",")):
            ahead = SpeculativeDecoder(a.k, DraftModel(other) if other is not None else None, always=a.always)
            engines = [
                BuiltinEngine(loaded, run=device.run, kv_pages=16384, max_running=running, speculation=s)
                for s in (None, ahead)
            ]
            rates: list[list[float]] = [[], []]
            before = (0, 0, 0)
            for pair in range(a.pairs + 1):
                if pair == 1:
                    before = (ahead.rounds, ahead.proposed, ahead.accepted)
                for rate, engine in zip(rates, engines):
                    tokens, seconds = asyncio.run(once(engine, kind, heat, running, pair))
                    rate.append(tokens / seconds)
            rounds, proposed, accepted = (n - m for n, m in zip((ahead.rounds, ahead.proposed, ahead.accepted), before))
            off, on = (median(rate[1:]) for rate in rates)
            row = {
                "work": name, "running": running, "k": a.k, "guesses": "draft" if other is not None else "ngram", "always": a.always,
                "tok_s_off": round(off, 1), "tok_s_on": round(on, 1), "speedup": round(on / off, 2), "acceptance": round(accepted / max(1, proposed), 2),
                "tokens_per_round": round(1 + accepted / max(1, rounds), 2), "rounds": rounds, "runs_off": [round(x, 1) for x in rates[0][1:]],
                "runs_on": [round(x, 1) for x in rates[1][1:]], "dtype": str(loaded.dtype).removeprefix("torch."), "threads": device.threads,
            }  # fmt: skip
            report(row, only_json=a.json)
    device.close()


if __name__ == "__main__":
    main()
