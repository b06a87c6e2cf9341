"""kill -9 at a random moment of each of 20 repository episodes, then again until it ends; its folders and tokens against
those of the same episode left alone.

rondel bench repository_kills --kills 20       one JSON object on the last line, exit code 0 only if all are equal

From the source tree: the episodes are those of tests/kits/repository_kills.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["kits.repository_kills"])
COMPARED = ("tokens", "folders", "score")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rondel bench repository_kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    from kits.repository_kills import found_in, make_folder, moments

    began, equal, replayed, where = time.perf_counter(), 0, 0, []
    for number in range(args.kills):
        with tempfile.TemporaryDirectory(prefix="repository_kills-") as name:
            folder = make_folder(Path(name))
            live(folder, None, number)
            whole = found_in(folder)
            shutil.rmtree(folder / "wal")
            tries = iter(moments(100, 0.9 * whole["seconds"], args.seed + number))
            while live(folder, delay := next(tries), number) == 0:  # it ended before the kill
                shutil.rmtree(folder / "wal")
            live(folder, None, number)
            again = found_in(folder)
            same = all(again[key] == whole[key] for key in COMPARED)
            equal += same
            replayed += again["replayed"]
            where.append(round(delay / whole["seconds"], 2))
            print(f"{number + 1} of {args.kills}: {'equal' if same else 'other'}", file=sys.stderr, flush=True)
    seconds = round(time.perf_counter() - began)
    told = {"kills": args.kills, "equal": equal, "replayed_commands": replayed, "moments": where, "seconds": seconds}
    print(json.dumps(told))
    raise SystemExit(equal != args.kills)


def live(folder: Path, delay: float | None, seed: int) -> int:
    """One life of the controller. -> its exit code, -9 if it was killed."""
    from kits.repository_kills import life

    process = context.Process(target=life, args=(folder, delay, seed))
    process.start()
    process.join(300)
    code = process.exitcode
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"a life of the controller ended with {code}")
    return code


if __name__ == "__main__":
    main()
