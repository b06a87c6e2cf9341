"""K3 between engine and trainer by what a 16-bit model rounds, and what it costs, in turn (A B A B, medians).

    rondel bench precision --dtype bfloat16 --json

    rounded   logits and residual stream in the dtype of the products, as other engines have them
    logits    logits alone in float32            stream   the residual stream alone
    fast      both, the default                  aligned  the same bits in every batch
    engine:fp8          fast, and the engine's matrices alone in a number format; engine:fp8:encoded  held as codes
K3 is the mean of w - 1 - log w, w = pi_trainer / pi_engine of a sampled token, over --prompts x --samples answers whose
prompt is shared in training; with --steps after so many steps of GRPO with random rewards, too. Training is one step over
these answers, decoding the time between two tokens of --running requests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
MODES = ("rounded", "logits", "stream", "fast", "aligned")


def main(argv: list[str] | None = None) -> None:
    from rondel.planner.format_bits import FORMAT_BITS

    modes = [*MODES, *(f"engine:{name}{how}" for name in FORMAT_BITS for how in ("", ":encoded"))]
    parser = argparse.ArgumentParser(
        prog="rondel bench precision", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--modes", nargs="+", default=["rounded", "logits", "stream", "fast"], choices=modes)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="of each prompt")
    parser.add_argument("--new", type=int, default=64, help="longest answer")
    parser.add_argument("--steps", type=int, default=0, help="of training before the gap is measured once more")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--running", type=int, nargs="+", default=[8], help="requests that decode together")
    parser.add_argument("--rounds", type=int, default=0, help="of timing all modes in turn; 0 measures the gaps alone")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import median, report

    cases: dict[str, Case] = {}
    table: dict[str, dict[str, Any]] = {}
    for mode in a.modes:
        case = Case(a, mode)
        table[mode] = {"gap": case.measure_gap()}
        for _ in range(a.steps):
            case.train()
        if a.steps:
            table[mode][f"gap after {a.steps} steps"] = case.measure_gap()
        if a.rounds:
            cases[mode] = case
        else:
            case.close()
        if not a.json:
            print(mode, table[mode], flush=True)
    spent: dict[str, dict[str, list[float]]] = {mode: {} for mode in cases}
    for number in range(a.rounds + 1):  # the first one warms up
        for mode, case in cases.items():
            for what, seconds in case.times(a.running).items():
                spent[mode].setdefault(what, []).extend([seconds] * (number > 0))
    for mode, by_kind in spent.items():
        table[mode] |= {what: round(median(seconds), 4) for what, seconds in by_kind.items()}
        if mode != a.modes[0]:
            first = spent[a.modes[0]]
            table[mode] |= {
                f"{what}, share of {a.modes[0]}": round(median([s / f for s, f in zip(seconds, first[what])]), 3)
                for what, seconds in by_kind.items()
            }
    report({"bench": "precision", "dtype": a.dtype, "modes": table}, only_json=a.json)


class Case:
    """Engine and trainer over one module, in one mode."""

    def __init__(self, a: argparse.Namespace, mode: str) -> None:
        from _work import opened

        from rondel.generate.engine.builtin.engine import BuiltinEngine
        from rondel.models.aligned_numerics import align_numerics
        from rondel.models.fp32_sums import keep_fp32_stream
        from rondel.sync.from_tensor import FromTensor
        from rondel.train.settings import TrainSettings
        from rondel.train.step import LocalTrainer

        self.a = a
        self.device, self.loaded = opened(a.model, a.dtype, a.threads)
        if mode in ("rounded", "logits"):
            keep_fp32_stream(self.loaded.model, False)
        if mode in ("rounded", "stream"):
            self.loaded.head.rounded = self.loaded.model.rounded_logits = True
        if mode == "aligned":
            self.device.call(align_numerics, self.loaded)
        settings, served = TrainSettings(lr=a.lr, start_probe=0, every_answer=True), self.loaded
        _, self.form, held = f"{mode}::".split(":")[:3]
        if self.form:
            served = self.device.call(self.rounded_copy, bool(held))
        self.trainer = self.device.call(
            lambda: LocalTrainer(self.loaded, settings, run=self.device.run, transport=FromTensor())
        )
        most = max(*a.running, a.prompts * a.samples)
        self.engine = BuiltinEngine(served, run=self.device.run, kv_pages=most * 512, max_running=most)
        self.version, self.batch = 0, None

    def rounded_copy(self, held: bool) -> Any:
        """What the engine computes with, where it rounds alone."""
        from rondel.models import weight_formats
        from rondel.models.load import load_model

        served = load_model(self.a.model, dtype=self.a.dtype)
        weight_formats.send_rollout_format(self.loaded.model, self.form)
        (weight_formats.hold_format if held else weight_formats.apply_rollout_format)(served.model, self.form)
        return served

    def measure_gap(self) -> dict[str, Any]:
        """K3 and the mean gap of freshly drawn answers, and how far the K3 of so many tokens may be off."""
        from rondel.train.annotate import annotate_logprobs
        from rondel.train.pack import batch_of
        from rondel.train.step_metrics import measure_mismatch

        self.batch = batch_of(asyncio.run(self.draw()))
        self.device.call(lambda: annotate_logprobs(self.loaded, self.batch, "trained", budget=1024, temperature=1.0))
        found = measure_mismatch(self.batch.samples, self.version)
        x = self.batch.tokens().trained.double() - self.batch.tokens().behavior.double()
        each = x.exp() - 1 - x
        return {"tokens": len(x), "k3": float(f"{found['train/mismatch_k3']:.3g}"),
                "k3_error": float(f"{float(each.std()) / len(x) ** 0.5:.2g}"), "mean": float(f"{float(x.abs().mean()):.3g}")}  # fmt: skip

    async def draw(self) -> list[Any]:
        """Half of the prompts are sums, half ask for a story. Rewards are random: they only move the weights."""
        from _work import SUFFIX

        from rondel.core.types import Group, Request, Sampling, Score, Task, Trajectory, sample_key

        drawn, groups = random.Random(self.version), []
        for i in range(self.a.prompts):
            said = f"{3 + i} + {9 - i} =" + SUFFIX if i % 2 else f"Tell me a story about the number {i}."
            tokens = self.loaded.tokenizer.apply_chat_template(
                [{"role": "user", "content": said}], add_generation_prompt=True, return_dict=False
            )
            keys = [sample_key(self.version, i, n) for n in range(self.a.samples)]
            sampling = Sampling(max_tokens=self.a.new)
            outs = await asyncio.gather(*(self.engine.generate(Request(list(tokens), sampling, key=k)) for k in keys))
            group = Group(i, Task(f"{i}", "bench", {}), [Trajectory() for _ in outs], 0)
            for trajectory, out in zip(group.trajectories, outs):
                trajectory.extend(list(tokens))
                trajectory.extend(out.tokens, logprobs=out.logprobs, versions=[self.version] * len(out.tokens))
                trajectory.score = Score(drawn.random())
            groups.append(group)
        return groups

    def train(self) -> float:
        """One step over the answers drawn last, and its weights to the engine. -> seconds of the step."""
        from rondel.algos.table import resolve_algorithm
        from rondel.core.types import Begin, Commit, Route
        from rondel.models import names

        began = time.perf_counter()
        asyncio.run(self.trainer.step(self.batch, resolve_algorithm({"kind": "grpo"})))
        spent = time.perf_counter() - began
        self.version += 1
        route = Route("tensor", dict(names.named_weights(self.loaded.model)))
        if self.form:
            manifest, route = asyncio.run(self.trainer.publish(Route("tensor")))
        else:
            manifest = self.device.call(names.build_manifest, self.loaded.model, self.version)

        async def publish() -> None:
            await self.engine.receive(Begin(manifest))
            await self.engine.receive(route)
            await self.engine.receive(Commit(self.version, manifest.root))

        asyncio.run(publish())
        return spent

    def times(self, running: list[int]) -> dict[str, float]:
        from _work import median
        from decode import steps

        spent = {"training step, s": self.train()}
        for n in running:
            self.engine.scheduler.drop_cache(self.engine.version)
            spent[f"decode step of {n}, ms"] = 1e3 * median(
                clock for clock, _ in asyncio.run(steps(self.engine, n, 100, 20, self.version))
            )
        return spent

    def close(self) -> None:
        self.device.close()


if __name__ == "__main__":
    main()
