"""What the token log costs: one block a step of the engine, with and without fsync.

    rondel bench wal --rows 64 --json
`microseconds` is the median time of one block of `--rows` tokens. A decode step of SmolLM2-135M
with 64 requests takes 40 ms and more on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench wal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--folder", default=None, help="on which disk; a scratch folder when left out")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import median, report

    from rondel.runtime.journal.wal import ROW, TokenLog

    drawn = [(2**127 + i, 0, 12345, -1.5, i, 7) for i in range(a.rows)]
    result: dict[str, Any] = {"rows": a.rows, "bytes_a_token": ROW.itemsize}
    with tempfile.TemporaryDirectory(dir=a.folder) as scratch:
        for durability in ("process", "disk"):
            log = TokenLog(Path(scratch) / durability, durable=durability == "disk")
            log.record_version(7, "root")
            times = []
            for _ in range(a.blocks):
                began = time.perf_counter()
                log.write(drawn)
                times.append(time.perf_counter() - began)
            log.close()
            result[f"microseconds_{durability}"] = round(1e6 * median(times), 1)
    report(result, only_json=a.json)


if __name__ == "__main__":
    main()
