"""Advantages along time: the chunked scan against a loop over tokens that takes all samples at once.

    rondel bench gae --samples 8 --tokens 65536 --json
Both in float32 and in turn, the scan ten times for each loop, which takes as long as
hundreds of them; the ratio of the median times, and how far each is from the scan in float64, relative to its norm.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench gae", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=65536, help="of each sample")
    parser.add_argument("--gamma", type=float, default=1.0)
    parser.add_argument("--lam", type=float, default=0.95)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from rondel.runtime.devices import prepare_process

    prepare_process()
    import torch
    from _work import median, report

    from rondel.algos.discount import gae

    if a.threads:
        torch.set_num_threads(a.threads)
    draw = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(a.samples, a.tokens, generator=draw).to(a.device) for _ in range(2))
    sample = torch.arange(a.samples, device=a.device).repeat_interleave(a.tokens)

    def loop() -> torch.Tensor:
        advantage = value = torch.zeros(a.samples, device=a.device)
        out = torch.empty_like(rewards)
        for t in reversed(range(a.tokens)):
            advantage = rewards[:, t] + a.gamma * value - values[:, t] + a.gamma * a.lam * advantage
            value = values[:, t]
            out[:, t] = advantage
        return out.flatten()

    def scan(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return gae(rewards.flatten().to(dtype), values.flatten().to(dtype), sample, gamma=a.gamma, lam=a.lam)[0]

    def timed(function) -> tuple[float, torch.Tensor]:
        began = time.perf_counter()
        result = function()
        if a.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - began, result

    def apart(x: torch.Tensor, exact: torch.Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    timed(scan)
    loops, scans = [], []
    for _ in range(a.repeat):
        loops.append(timed(loop))
        scans += [timed(scan) for _ in range(10)]
    loop_s, scan_s, exact = median([s for s, _ in loops]), median([s for s, _ in scans]), scan(torch.float64)
    out = {
        "bench": "gae", "samples": a.samples, "tokens": a.tokens, "gamma": a.gamma, "lam": a.lam, "device": a.device, "threads": torch.get_num_threads(),
        "loop_ms": round(1e3 * loop_s, 2), "scan_ms": round(1e3 * scan_s, 2), "times_faster": round(loop_s / scan_s, 1),
        "loop_error": apart(loops[0][1], exact), "scan_error": apart(scans[0][1], exact),
    }  # fmt: skip
    report(out, only_json=a.json)


if __name__ == "__main__":
    main()
