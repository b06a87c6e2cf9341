"""kill -9 at random moments of a tiny run, the same command again until it is complete;
then every bit against an uninterrupted run.

rondel bench kill_resume --kills 20        one JSON object on the last line, exit code 0 only if the runs are equal
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.toml"
COMMAND = [sys.executable, "-c", "from rondel.cli import main; main()", "train", str(RECIPE), "--quiet"]
SMALLER = [
    "--run.checkpoint.every=5",
    "--place.threads=1",
    "--task.eval.every=0",
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rondel bench kill_resume", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="of the run, a third of them supervised")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the runs live; a temporary folder unless given"
    )
    args = parser.parse_args(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kill_resume-"))
    whole, killed = folder / "whole", folder / "killed"
    began = time.perf_counter()
    finish(whole, args.steps)
    length = time.perf_counter() - began
    draw, after, kills = random.Random(args.seed), [], 0
    while kills < args.kills:
        seconds = draw.uniform(0.0, length / 2)
        if interrupted(killed, args.steps, seconds):
            kills += 1
            after.append(round(seconds, 2))
            print(f"kill {kills} of {args.kills} after {seconds:.1f} s", file=sys.stderr, flush=True)
        else:  # it was complete before the kill: begin another one
            check(whole, killed)
            shutil.rmtree(killed)
    finish(killed, args.steps)
    print(
        json.dumps(
            {
                "kills": kills,
                "equal": check(whole, killed),
                "seconds": round(time.perf_counter() - began, 1),
                "uninterrupted_s": round(length, 1),
                "killed_after_s": after,
            }
        )
    )
    if args.folder is None:
        shutil.rmtree(folder)


def command(folder: Path, steps: int) -> list[str]:
    phases = [f"--loop.warmup.steps={steps // 3}", f"--loop.steps={steps - steps // 3}"]
    return [*COMMAND, *SMALLER, *phases, f"--run.folder={folder}"]


def finish(folder: Path, steps: int) -> None:
    done = subprocess.run(command(folder, steps), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the run did not complete ({done.returncode}): {done.stderr[-2000:]}")


def interrupted(folder: Path, steps: int, seconds: float) -> bool:
    """Start the command and kill it. -> whether there was something to kill."""
    process = subprocess.Popen(command(folder, steps), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    if process.returncode:
        sys.exit(f"the run broke instead of going on: {said.decode()[-2000:]}")
    return False


def check(whole: Path, killed: Path) -> bool:
    """Model, optimizer and ledger, or exit with what differs."""
    import torch
    from safetensors.torch import load_file

    from rondel.runtime.journal.log import read

    last = sorted((whole / "checkpoints").glob("step-*"))[-1].name
    for file in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(run / "checkpoints" / last / file) for run in (whole, killed))
        if wrong := sorted(a.keys() ^ b.keys()) or [name for name in a if not torch.equal(a[name], b[name])]:
            sys.exit(
                f"{file} differs in {len(wrong)} tensors, first {wrong[0]}; the folders are kept in {whole.parent}"
            )
    books = [[(e["step"], e["ledger"]) for e in read(run) if e["kind"] == "StepDone"] for run in (whole, killed)]
    if books[0] != books[1]:
        sys.exit(f"the ledgers differ; the folders are kept in {whole.parent}")
    return True


if __name__ == "__main__":
    main()
