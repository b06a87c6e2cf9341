"""How long until a person sees something: the dashboard on a run of a million events, in a real
browser; and what it keeps up with while a run goes on.

    rondel bench dashboard --json

The browser (Chromium, found on the PATH, driven by playwright) is open before; from the address to the first paint and
to the first curves are the medians of some fresh servers. `sample` and `whole` are seconds of the reading thread alone,
`bytes` what the browser was sent until the
curves stood, `live` how many events a second are folded as they are appended.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
LAUNCH = "from rondel.cli import main; main()"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=10**6)
    parser.add_argument("--repeat", type=int, default=3, help="fresh servers; the median is reported")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _long import write_long
    from _work import report

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_long(Path(scratch) / "long", a.events)
        row: dict[str, Any] = {
            "events": a.events,
            "megabytes": round((folder / "journal.jsonl").stat().st_size / 1e6, 1),
            **reading(folder),
        }
        row |= live(Path(scratch) / "live", min(a.events, 20_000))
        browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        row |= painting(folder, browser, a.repeat) if browser else {"painting": "no Chromium on the PATH"}
    report(row, only_json=a.json)


def reading(folder: Path) -> dict[str, float]:
    from rondel.dashboard.run import DashboardRun
    from rondel.runtime.telemetry.diagnose import findings

    began, run = time.perf_counter(), DashboardRun(folder, findings)
    run.poll_journal()
    sampled = time.perf_counter()
    while run.poll_journal():
        pass
    return {"sample_seconds": round(sampled - began, 3), "whole_seconds": round(time.perf_counter() - sampled, 2)}


def live(folder: Path, events: int) -> dict[str, float]:
    """Appended in small pieces, as a run does."""
    from _long import write_long

    from rondel.dashboard.run import DashboardRun
    from rondel.runtime.telemetry.diagnose import findings

    lines = (write_long(folder / "told", events) / "journal.jsonl").read_bytes().split(b"\n")[:-1]
    (folder / "now").mkdir()
    run, spent = DashboardRun(folder / "now", findings), 0.0
    with (folder / "now" / "journal.jsonl").open("ab") as file:
        for at in range(0, len(lines), 40):
            file.write(b"\n".join(lines[at : at + 40]) + b"\n")
            file.flush()
            began = time.perf_counter()
            run.poll_journal()
            spent += time.perf_counter() - began
    return {"live_events_a_second": round(len(lines) / spent)}


def painting(folder: Path, chromium: str, repeat: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    paints, curves, sizes = [], [], []
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        browser.new_page().goto("about:blank")
        for _ in range(repeat):
            command = [sys.executable, "-c", LAUNCH, "dashboard", str(folder), "--port", "0"]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            url = server.stdout.readline().split()[1]
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(url, wait_until="commit")
            page.wait_for_selector(".chart canvas")
            curves.append(page.evaluate("performance.now()") / 1e3)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3)
            sizes.append(
                page.evaluate("performance.getEntriesByType('resource').reduce((n, e) => n + e.transferSize, 0)")
            )
            page.close()
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        browser.close()
    return {
        "first_paint_seconds": round(statistics.median(paints), 3),
        "first_curves_seconds": round(statistics.median(curves), 3),
        "bytes": round(statistics.median(sizes)),
    }


if __name__ == "__main__":
    main()
