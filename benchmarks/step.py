"""One whole RL step on a real model, through the real loop: generate, score, train, sync.

CPU seconds, of the engine's passes and of all else in a step, are those of the process: for a machine that others use.
`hop_ns` is how long a line of memory takes from one core to another while answers are generated, of each step that counts:
30 where both share a cache, 300 between two sockets, and on a machine that others use it changes by the minute.
`not_computed` is the share of the tokens whose answers have no advantage and need no pass in training.
`gemm_peak_gflops` is what one large product reaches before and after each step of training, and shares of peak are stated
against the two that lie around a phase: a machine that others use has another limit every minute. No time of a step has it.
The same work as benchmarks/peers/trl_grpo.py; run them in turn on one machine:
    rondel bench step --model FOLDER --prompts 8 --group 8 --new 64 --dtype bfloat16 --force-len --json
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="longest completion")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"], help="compute dtype")
    parser.add_argument("--force-len", action="store_true", help="every completion has exactly --new tokens")
    parser.add_argument("--steps", type=int, default=4, help="at least 2; the first is dropped")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import SUFFIX, SUM_TASK, gemm_peak, median, multiplications, report

    from rondel.assemble import train
    from rondel.assemble.worker_devices import usable_cores
    from rondel.core.config.job import Job
    from rondel.core.events import StepDone, subscribe
    from rondel.models.cpu_kernels import hop_ns
    from rondel.planner.memory import memory_bills
    from rondel.planner.workload import of_job

    parts, rows, generating, hops, peaks = [], [], [0.0], [], []
    aside = [0.0, 0.0]  # seconds and CPU seconds in which only the peak was measured
    threads = a.threads or len(usable_cores())

    def note(event) -> None:
        if isinstance(event, StepDone):
            scheduler = parts[0].engine.scheduler
            used = (scheduler.prefilled, scheduler.decoded, generating[0], time.process_time() - aside[1], aside[0])
            rows.append((event, *used, [*hops]))
            hops.clear()

    def measure_peak() -> None:
        began = time.perf_counter(), time.process_time()
        peaks.append(gemm_peak(str(parts[0].trainer.loaded.dtype).removeprefix("torch."), threads, rounds=2))
        aside[0] += time.perf_counter() - began[0]
        aside[1] += time.process_time() - began[1]

    def built(made) -> None:
        parts.append(made)
        plain_step, plain_training = made.engine.runner.step, made.trainer._step

        def timed(*plans):
            hops.append(hop_ns())
            began = time.process_time()
            out = plain_step(*plans)
            generating[0] += time.process_time() - began
            return out

        def between_peaks(*batch):
            measure_peak()
            stats = plain_training(*batch)
            measure_peak()
            return stats

        made.engine.runner.step, made.trainer._step = timed, between_peaks

    subscribe(note)
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "model": {"path": a.model, "dtype": a.dtype},
            "task": {"data": SUM_TASK, "reward": "number", "env": {"kind": "single_turn", "suffix": SUFFIX}},
            "algo": {"kind": "grpo", "group_size": a.group, "aggregate": {"kind": "token_mean"}},
            "loop": {"steps": a.steps, "groups_per_step": a.prompts, "seed": a.seed},
            "engine": {"sampling": {"max_tokens": a.new, "ignore_eos": a.force_len}},
            "trainer": {"lr": a.lr},
            "place": {"threads": a.threads or "auto"},
            "run": {"folder": folder, "checkpoint": {"every": 0}, "sinks": []},
        }
        job = Job.parse(tree, "rondel bench step")
        train(job, quiet=True, built=built)
    loaded = parts[0].trainer.loaded
    dtype = str(loaded.dtype).removeprefix("torch.")
    body, head = multiplications(loaded.model)
    used = [e for e, *_ in rows[1:]]
    prefilled, decoded, gen_cpu, all_cpu, measuring = (
        [now[k] - before[k] for before, now in pairwise(rows)] for k in (1, 2, 3, 4, 5)
    )
    seconds = [e.seconds for e in used]
    tokens = [e.metrics["train/tokens"] for e in used]
    packed = [e.metrics["train/packed_tokens"] for e in used]
    left_out = [e.metrics.get("train/not_computed", 0.0) for e in used]
    # of training, of what lies between two steps of it, and so on
    between = [(before + after) / 2 for before, after in pairwise(peaks)]
    gen_peak, train_peak = median(between[1::2]), median(between[2::2])
    gen_s = median([s["wait"] for s in seconds])
    step_s = median([s["step"] - spent for s, spent in zip(seconds, measuring, strict=True)])
    new = median(tokens)
    gen_flop = 2 * (body * (median(prefilled) + median(decoded)) + head * new)
    train_s = step_s - gen_s
    computed = median([n * (1 - share) for n, share in zip(tokens, left_out)])
    train_flop = 2 * 3 * (body * median(packed) + head * computed)  # what is computed again does not count
    out = {
        "bench": "step", "s_per_step": round(step_s, 2), "gen_s": round(gen_s, 2), "train_s": round(train_s, 2), "new_tokens": new,
        "gen_tok_s": round(new / gen_s, 1), "train_tok_s": round(new / train_s, 1), "prefilled": median(prefilled), "packed_tokens": median(packed), "padding": 0,
        "not_computed": round(median(left_out), 3), "hop_ns": [round(median(row[-1])) for row in rows[1:]],
        "gemm_peak_gflops": [round(peak / 1e9, 1) for peak in peaks[1:]],
        "gen_share_of_peak": round(gen_flop / gen_s / gen_peak, 3), "train_share_of_peak": round(train_flop / train_s / train_peak, 3),
        "forward_backward_s": round(median([e.metrics["train/forward_backward_s"] for e in used]), 2),
        "optimizer_s": round(median([e.metrics["train/optimizer_s"] for e in used]), 2), "sync_s": round(median([s["sync"] for s in seconds]), 3),
        "gen_cpu_s": round(median(gen_cpu), 2), "other_cpu_s": round(median(all_cpu) - median(gen_cpu), 2),
        "annotate_s": round(median([e.metrics["train/annotate_s"] for e in used]), 2),
        "dtype": dtype, "threads": threads, "prompts": a.prompts, "group": a.group, "new": a.new, "force_len": a.force_len, "steps": len(used),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "planned_rss_mb": int(memory_bills(of_job(job))[0].peak_phase[1] / 1024**2),
    }  # fmt: skip
    report(out, only_json=a.json)


if __name__ == "__main__":
    main()
