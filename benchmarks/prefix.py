"""Shared-prefix training against plain packing: the prompt of a group computed once, or once for every completion.

    rondel bench prefix --model FOLDER --prompt 256 --completion 32 --group 16 --json
    rondel bench prefix --model FOLDER --preamble 512 --prompt 32 --completion 64 --group 8 --groups 16 --json
Both ways in turn on the same batch (A B A B ...): the ratio of the median times, and the
largest difference of any gradient entry. With a preamble that all groups begin with (a system message, the signatures of
tools), what is compared is: once a micro-batch, or once a group.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench prefix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--preamble", type=int, default=0, help="tokens that the prompts of all groups begin with")
    parser.add_argument("--completion", type=int, default=32)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--micro-tokens", type=int, default=0, help="0: as a trainer has it")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from rondel.runtime.devices import Device, prepare_process

    prepare_process()
    import numpy as np
    import torch
    from _work import median, report

    from rondel.algos.table import resolve_algorithm
    from rondel.algos.tokens import TokenBatch
    from rondel.models.load import load_model
    from rondel.train import pack
    from rondel.train.pack import TrainBatch, TrainSample
    from rondel.train.settings import TrainSettings
    from rondel.train.step import LocalTrainer
    from rondel.train.step_metrics import StepMetricSums

    device = Device("cpu", a.threads or None)
    loaded = device.call(lambda: load_model(a.model, dtype=a.dtype))
    row = resolve_algorithm({"kind": "grpo"}).bounded(a.completion)
    rng = np.random.default_rng(0)
    vocab = loaded.head.weight.shape[0]

    def sample(group: int, index: int, prompt: np.ndarray) -> TrainSample:
        tokens = np.concatenate([prompt, rng.integers(0, vocab, a.completion)])
        trainable = np.arange(len(prompt), len(tokens))
        behavior = np.full(a.completion, -1.0, np.float32)
        advantages = np.full(a.completion, rng.normal(), np.float32)
        known = TokenBatch(
            torch.zeros(a.completion, dtype=torch.int64),
            behavior=torch.from_numpy(behavior),
            versions=torch.zeros(a.completion, dtype=torch.int64),
            advantages=torch.from_numpy(advantages),
        )
        return TrainSample(group, index, tokens, trainable, 0.0, known)

    preamble = rng.integers(0, vocab, a.preamble)
    prompts = [np.concatenate([preamble, rng.integers(0, vocab, a.prompt)]) for _ in range(a.groups)]
    batch = TrainBatch([sample(g, i, prompts[g]) for g in range(a.groups) for i in range(a.group)])
    settings = TrainSettings(
        lr=0.0, start_probe=0, every_answer=True, **({"micro_tokens": a.micro_tokens} if a.micro_tokens else {})
    )
    trainer = device.call(lambda: LocalTrainer(loaded, settings, run=device.run))
    alike = pack.ALIKE

    def gradient(share: bool) -> tuple[float, int, torch.Tensor]:
        if a.preamble:
            pack.ALIKE = alike if share else sys.maxsize
        else:
            trainer.main = replace(trainer.main, share_prompts=share)
        trainer.weights.zero_grad()
        sums, began = StepMetricSums(), time.perf_counter()
        trainer._accumulate_gradients(batch, row, sums, proximal_noted=False)
        spent = time.perf_counter() - began
        return spent, sums.packed, torch.cat([m.grad.flatten() for m in trainer.weights.masters])

    device.call(gradient, True)
    runs = [(device.call(gradient, True), device.call(gradient, False)) for _ in range(a.repeat)]
    shared, plain = runs[0]
    out = {
        "bench": "prefix", "preamble": a.preamble, "prompt": a.prompt, "completion": a.completion, "group": a.group, "groups": a.groups, "dtype": str(loaded.dtype).removeprefix("torch."),
        "shared_s": round(median([s[0] for s, _ in runs]), 3), "plain_s": round(median([p[0] for _, p in runs]), 3),
        "times_faster": round(median([p[0] / s[0] for s, p in runs]), 2), "shared_tokens": shared[1], "plain_tokens": plain[1],
        "largest_gradient_difference": float((shared[2] - plain[2]).abs().max()), "largest_gradient": float(plain[2].abs().max()),
        "relative_norm_difference": float((shared[2] - plain[2]).norm() / plain[2].norm()),
    }  # fmt: skip
    report(out, only_json=a.json)


if __name__ == "__main__":
    main()
