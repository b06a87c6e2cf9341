"""Several clients, each with an adapter of its own on one base, against each alone.

    rondel bench adapters --model smollm2-135m --clients 4 --steps 50 --json

A client's step: samples of its own snapshot, a loss over them (importance sampling, reward: the share of even token
ids), optim_step (AdamW, eps 1e-8). Run together and one after the other: the time of both, and the largest difference of any weight.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench adapters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--aligned", action="store_true", help="numerics whose bits do not depend on company")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    import numpy as np
    import torch
    from _work import opened, report

    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.models.adapter_bank import AdapterBank
    from rondel.models.aligned_numerics import align_numerics
    from rondel.training_api.backend import Adam, AdapterSpec, Example, SampleSettings
    from rondel.training_api.service import AdapterService

    device, loaded = opened(a.model, a.dtype, a.threads)
    if a.aligned:
        device.call(align_numerics, loaded)
    device.call(AdapterBank, loaded)
    rooms = a.clients * a.samples * (a.prompt + a.new) * 4

    async def client(service: AdapterService, name: str, folder: Path) -> list[torch.Tensor]:
        number = int(name.removeprefix("client"))
        rng = np.random.default_rng(number)
        await service.create_adapter(name, AdapterSpec(a.rank, seed=number))
        prompt = rng.integers(loaded.vocabulary // 2, loaded.vocabulary - 1, a.prompt).tolist()
        for step in range(a.steps):
            served = f"{name}/{step}"
            await service.save(name, folder / served, optimizer=False)
            await service.serve_adapter(served, folder / served)
            drawn = await service.sample(
                prompt, served, SampleSettings(n=a.samples, max_tokens=a.new, seed=1000 * number + step)
            )
            await service.drop_served(served)
            rewards = np.array([np.mean([t % 2 == 0 for t in tokens]) for tokens, *_ in drawn.sequences])
            examples = []
            for (tokens, logprobs, _), advantage in zip(drawn.sequences, rewards - rewards.mean(), strict=True):
                before = [0] * (a.prompt - 1)
                inputs = {
                    "logprobs": np.array([*before, *logprobs], np.float32),
                    "advantages": np.array([*before, *[advantage] * len(tokens)], np.float32),
                }
                examples.append(Example([*prompt, *tokens[:-1]], np.array([*prompt[1:], *tokens], np.int64), inputs))
            await service.forward(name, examples, "importance_sampling", {}, backward=True)
            await service.optim_step(name, Adam(a.lr, eps=1e-8))
        weights = [t.detach().clone() for t in service._trained[name].weights.tensors]
        await service.drop_adapter(name)
        return weights

    async def train(groups: list[list[str]]) -> tuple[float, dict[str, list[torch.Tensor]]]:
        engine = BuiltinEngine(loaded, run=device.run, kv_pages=rooms, max_running=64)
        service = AdapterService(loaded, engine, run=device.run, name="base")
        out, began = {}, time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            for names in groups:
                done = await asyncio.gather(*(client(service, name, Path(folder)) for name in names))
                out |= dict(zip(names, done, strict=True))
        return time.perf_counter() - began, out

    names = [f"client{i}" for i in range(a.clients)]
    steps, a.steps = a.steps, 2
    asyncio.run(train([["client99"]]))  # the first passes pack the weights
    a.steps = steps
    together, by_all = asyncio.run(train([names]))
    alone, by_one = asyncio.run(train([[name] for name in names]))
    apart = max(float((x - y).abs().max()) for name in names for x, y in zip(by_all[name], by_one[name], strict=True))
    moved = max(float(t.abs().max()) for t in by_one[names[0]][1::2])
    report(
        {
            "clients": a.clients,
            "steps": a.steps,
            "together_s": round(together, 2),
            "one_after_the_other_s": round(alone, 2),
            "ratio": round(alone / together, 3),
            "largest_difference": apart,
            "largest_b": moved,
        },
        only_json=a.json,
    )


if __name__ == "__main__":
    main()
