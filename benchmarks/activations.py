"""One training step on one long sample: seconds and the peak of resident memory, by what is kept for the backward pass,
by where it waits, by whose code computes the layers (place.mesh.layers) and by optimizer.

    rondel bench activations --tokens 1024 4096 --recompute none layers --activations device disk --optimizer adamw

Each case is a process of its own; activations wait on disk under --recompute layers alone. Nothing is generated: the
tokens are given, the first half of the sample is the prompt, the second is trained. With --trl PYTHON, an interpreter
that has TRL, its GRPO trainer takes the same step (peers/trl_long.py), without and with its checkpointing. A sample may
be longer than the model's context: positions are numbers, and only memory and time are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
SHORT = 64  # tokens of the first step, and of the sample that the long one is compared with
PEER = Path(__file__).parent / "peers" / "trl_long.py"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench activations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="of the sample")
    parser.add_argument("--recompute", nargs="+", default=["none", "mlp", "layers"], choices=["none", "mlp", "layers"])
    parser.add_argument("--activations", nargs="+", default=["device"], choices=["device", "disk"])
    parser.add_argument("--layers", nargs="+", default=["transformers"], choices=["transformers", "megatron"])
    parser.add_argument("--optimizer", nargs="+", default=["adamw"], choices=["adamw", "adamw_8bit", "muon"])
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--trl", metavar="PYTHON", help="an interpreter that has TRL, for its step beside ours")
    parser.add_argument("--most-gb", type=float, default=float("inf"), help="a case that holds more is ended")
    parser.add_argument("--most-seconds", type=float, default=float("inf"), help="a case that takes longer is ended")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    if a.case:
        case = (a.tokens[0], a.recompute[0], a.activations[0], a.layers[0], a.optimizer[0])
        print(json.dumps(measure(a.model, a.dtype, *case, threads=a.threads)))
        return
    rows: list[dict[str, Any]] = []

    def add(told: dict[str, Any], command: list[str]) -> None:
        rows.append(told | run_case(command, most_gb=a.most_gb, most_seconds=a.most_seconds))
        if not a.json:
            print(as_line(rows[-1]), flush=True)

    for tokens in a.tokens:
        for recompute, activations, layers, optimizer in itertools.product(
            a.recompute, a.activations, a.layers, a.optimizer
        ):
            if (activations != "device" and recompute != "layers") or (recompute == "mlp" and layers == "megatron"):
                continue
            case = {"tokens": tokens, "recompute": recompute, "activations": activations, "layers": layers}
            case |= {"optimizer": optimizer}
            named = [part for name, value in case.items() for part in (f"--{name}", str(value))]
            same = ["--model", a.model, "--dtype", a.dtype, "--threads", str(a.threads)]
            add({"who": "rondel"} | case, [sys.executable, __file__, "--case", *same, *named])
        for recompute, given in {"none": [], "layers": ["--checkpointing"]}.items() if a.trl else ():
            case = {"tokens": tokens, "recompute": recompute, "activations": "device", "layers": "transformers"}
            case |= {"optimizer": "adamw"}
            given = [*given, *(["--amp"] if a.dtype == "bfloat16" else [])]  # weights, like our masters, in float32
            given += ["--tokens", str(tokens), "--threads", str(a.threads or cores())]
            add({"who": "trl"} | case, [a.trl, str(PEER), "--model", folder_of(a.model), *given])
    if a.json:
        print(json.dumps({"rows": rows}))


def run_case(command: list[str], *, most_gb: float, most_seconds: float) -> dict[str, Any]:
    """What the last line of a process says, or where and when it was ended."""
    began, held = time.perf_counter(), 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None:
            held, seconds = max(held, resident_gb(process.pid)), time.perf_counter() - began
            if held > most_gb or seconds > most_seconds:
                process.kill()
                return {"ended": f"{held:.2f} GB after {seconds:.0f} s"}
            time.sleep(0.2)
        assert process.stdout is not None
        told = process.stdout.read()
    return json.loads(told.splitlines()[-1]) if process.returncode == 0 else {"ended": f"rc {process.returncode}"}


def as_line(row: dict[str, Any]) -> str:
    name = "{who:6s}  {tokens:6d} tokens  {recompute:6s}  {activations:6s}  {layers:12s}  {optimizer:10s}".format(**row)
    if "ended" in row:
        return f"{name}  ended at {row['ended']}"
    return (
        f"{name}  {row['seconds']:7.1f} s, {row['cpu_seconds']:7.1f} of a core  {row['peak']:6.2f} GB at most, "
        f"{row['before']:5.2f} before the step"
    )


def measure(
    model: str, dtype: str, tokens: int, recompute: str, activations: str, layers: str, optimizer: str, *, threads: int
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
    if layers == "megatron":
        from rondel.models.megatron.layers import install_megatron_layers

        device.call(lambda: install_megatron_layers(loaded, run_twice=recompute == "layers"))
    algo, vocabulary = resolve_algorithm({"kind": "grpo"}), loaded.model.config.get_text_config().vocab_size
    settings = TrainSettings(
        lr=1e-6, micro_tokens=1, start_probe=0, recompute=recompute, activations=activations, optimizer=optimizer
    )
    trainer = device.call(lambda: LocalTrainer(loaded, settings, run=device.run))

    def sample(seed: int, tokens: int, reward: float) -> Trajectory:
        ids = torch.randint(5, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
        written, half = Trajectory(), tokens // 2
        written.extend(ids[:half])
        written.extend(ids[half:], logprobs=[-10.0] * (tokens - half), versions=[0] * (tokens - half))
        written.score = Score(reward)
        return written

    def time_step(number: int, length: int) -> tuple[float, float]:
        """A group of two: the sample that counts, and a short one whose reward differs."""
        both = [sample(2 * number, length, 1.0), sample(2 * number + 1, SHORT, 0.0)]
        batch = batch_of([Group(number, Task("t", "bench", {}), both, 0)])
        began = time.perf_counter(), time.process_time()
        done = asyncio.run(trainer.step(batch, algo))
        assert done.stepped and done.metrics["train/grad_norm"] > 0, done
        return time.perf_counter() - began[0], time.process_time() - began[1]

    before = resident_gb()
    seconds, spent = [time_step(number, length) for number, length in enumerate((SHORT, tokens))][-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    moments = sum(tensor.nbytes for tensor in trainer.weights.state_tensors()["moments"]) / 1e9
    return {"seconds": seconds, "cpu_seconds": spent, "peak": peak, "before": before, "moments": moments}


def resident_gb(pid: int | str = "self") -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return pages * resource.getpagesize() / 1e9


def cores() -> int:
    return len(os.sched_getaffinity(0))


def folder_of(model: str) -> str:
    """Of a model by its short name: what transformers can load."""
    from rondel.models.model_folder import model_folder

    return model_folder(model)


if __name__ == "__main__":
    main()
