"""One training step on one long sample: seconds and the peak of resident memory, by what is kept for the backward pass,
by where it waits and by optimizer.

    rondel bench activations --tokens 1024 4096 --recompute none layers --activations device disk --optimizer adamw

Each case is a process of its own; activations wait on disk under --recompute layers alone. The first half of the sample
is the prompt, the second is trained.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
SHORT = 64  # tokens of the first step


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench activations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="of the sample")
    parser.add_argument("--recompute", nargs="+", default=["none", "mlp", "layers"], choices=["none", "mlp", "layers"])
    parser.add_argument("--activations", nargs="+", default=["device"], choices=["device", "disk"])
    parser.add_argument("--optimizer", nargs="+", default=["adamw"], choices=["adamw", "adamw_8bit", "muon"])
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    if a.case:
        case = (a.tokens[0], a.recompute[0], a.activations[0], a.optimizer[0])
        print(json.dumps(measure(a.model, a.dtype, *case, threads=a.threads)))
        return
    rows = []
    for case in itertools.product(a.tokens, a.recompute, a.activations, a.optimizer):
        tokens, recompute, activations, optimizer = case
        if activations != "device" and recompute != "layers":
            continue
        command = [sys.executable, __file__, "--case", "--model", a.model, "--dtype", a.dtype, "--optimizer", optimizer]
        command += ["--tokens", str(tokens), "--recompute", recompute, "--activations", activations]
        command += ["--threads", str(a.threads)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(told.splitlines()[-1]))
        if not a.json:
            print("{tokens:6d} tokens  {recompute:6s}  {activations:6s}  {optimizer:10s}  {seconds:7.1f} s  {peak:6.2f} GB at most, "
                  "{before:5.2f} before the step, {moments:6.3f} of moments".format(**rows[-1]), flush=True)  # fmt: skip
    if a.json:
        print(json.dumps({"rows": rows}))


def measure(
    model: str, dtype: str, tokens: int, recompute: str, activations: str, optimizer: str, *, threads: int
) -> dict[str, object]:
    """A short step, which makes the moments, then the one that is timed, in this process."""
    import torch

    from rondel.algos.table import resolve_algorithm
    from rondel.core.types import Group, Score, Task, Trajectory
    from rondel.models.load import load_model
    from rondel.runtime.devices import Device
    from rondel.train.pack import batch_of
    from rondel.train.settings import TrainSettings
    from rondel.train.step import LocalTrainer

    device = Device("cpu", threads=threads) if threads else Device("cpu")
    loaded = device.call(lambda: load_model(model, dtype=dtype))
    algo, vocabulary = resolve_algorithm({"kind": "sft"}), loaded.model.config.get_text_config().vocab_size
    settings = TrainSettings(
        lr=1e-6, micro_tokens=1, start_probe=0, recompute=recompute, activations=activations, optimizer=optimizer
    )
    trainer = device.call(lambda: LocalTrainer(loaded, settings, run=device.run))

    def sample(seed: int, tokens: int) -> Trajectory:
        ids = torch.randint(5, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
        written, half = Trajectory(), tokens // 2
        written.extend(ids[:half])
        written.extend(ids[half:], logprobs=[-10.0] * (tokens - half), versions=[0] * (tokens - half))
        written.score = Score(1.0)
        return written

    def seconds_of_a_step(number: int, length: int) -> float:
        group = Group(number, Task("t", "bench", {}), [sample(number, length)], 0)
        batch = batch_of([group])
        began = time.perf_counter()
        asyncio.run(trainer.step(batch, algo))
        return time.perf_counter() - began

    before = resident_gb()
    seconds = [seconds_of_a_step(number, length) for number, length in enumerate((SHORT, tokens))][-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    moments = sum(tensor.nbytes for tensor in trainer.weights.state_tensors()["moments"]) / 1e9
    return {"tokens": tokens, "recompute": recompute, "activations": activations, "optimizer": optimizer,
            "seconds": seconds, "peak": peak, "before": before, "moments": moments}  # fmt: skip


def resident_gb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


if __name__ == "__main__":
    main()
