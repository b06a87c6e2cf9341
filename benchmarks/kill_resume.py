"""kill -9 at random moments of a tiny run, the same command again until it is complete;
then every bit against an uninterrupted run.

rondel bench kill_resume --kills 20        one JSON object on the last line, exit code 0 only if the runs are equal
rondel bench kill_resume --loop.groups_per_step=8        settings of the run

Every command is forked from a server that has imported everything: no moment is lost to the start of an interpreter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.toml"
SMALLER = [
    "--run.checkpoint.every=5",
    "--place.threads=1",
    "--task.eval.every=0",
]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["rondel.driver.controller"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rondel bench kill_resume", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="of the run, a third of them supervised")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the runs live; a temporary folder unless given"
    )
    args, settings = parser.parse_known_args(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kill_resume-"))
    folder.mkdir(parents=True, exist_ok=True)
    whole, killed = folder / "whole", folder / "killed"
    began = time.perf_counter()
    finish(whole, args.steps, settings)
    length = time.perf_counter() - began
    draw, after, kills = random.Random(args.seed), [], 0
    reached: list[int] = []
    while kills < args.kills:
        seconds = draw.uniform(0.0, length / 2)
        if interrupted(killed, args.steps, settings, seconds):
            kills += 1
            after.append(round(seconds, 2))
            reached.append(steps_done(killed))
            print(f"kill {kills} of {args.kills} after {seconds:.1f} s", file=sys.stderr, flush=True)
        else:  # it was complete before the kill: begin another one
            check(whole, killed)
            shutil.rmtree(killed)
    finish(killed, args.steps, settings)
    print(
        json.dumps(
            {
                "kills": kills,
                "equal": check(whole, killed),
                "seconds": round(time.perf_counter() - began, 1),
                "uninterrupted_s": round(length, 1),
                "killed_after_s": after,
                "killed_after_steps": reached,
            }
        )
    )
    if args.folder is None:
        shutil.rmtree(folder)


def start(folder: Path, steps: int, settings: list[str]) -> multiprocessing.process.BaseProcess:
    """`rondel train` in a process of its own; what it says goes to a file beside its folder."""
    phases = [f"--loop.warmup.steps={steps // 3}", f"--loop.steps={steps - steps // 3}"]
    words = ["train", str(RECIPE), "--quiet", *SMALLER, *phases, *settings, f"--run.folder={folder}"]
    process = context.Process(target=_command, args=(words, f"{folder}.log"))
    process.start()
    return process


def _command(words: list[str], log: str) -> None:
    into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(into, 1)
    os.dup2(into, 2)
    from rondel.cli import main

    main(words)


def finish(folder: Path, steps: int, settings: list[str]) -> None:
    process = start(folder, steps, settings)
    process.join()
    if process.exitcode:
        sys.exit(f"the run did not complete ({process.exitcode}): {Path(f'{folder}.log').read_text()[-2000:]}")


def interrupted(folder: Path, steps: int, settings: list[str], seconds: float) -> bool:
    """Start the command and kill it. -> whether there was something to kill."""
    process = start(folder, steps, settings)
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return True
    if process.exitcode:
        sys.exit(f"the run broke instead of going on: {Path(f'{folder}.log').read_text()[-2000:]}")
    return False


def steps_done(folder: Path) -> int:
    from rondel.runtime.journal.log import read

    return max((e["step"] for e in read(folder) if e["kind"] == "StepDone"), default=0)


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
