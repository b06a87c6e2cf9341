"""Takes the pictures of dashboard.md anew: python docs/make_dashboard.py runs/tiny
runs/apart (needs Chromium on the PATH and playwright).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent / "dashboard"
DESK, PHONE = {"width": 1280, "height": 760}, {"width": 400, "height": 760}
PICTURES = {  # name -> (view, window, colours, run)
    "overview": ("overview", {"width": 1280, "height": 680}, "light", 0),
    "time": ("time", {"width": 1280, "height": 560}, "dark", 1),
    "answers": ("answers", {"width": 1280, "height": 560}, "light", 1),
    "planner": ("planner", DESK, "light", 0),
    "phone": ("overview", PHONE, "dark", 0),
}


def main(*runs: str) -> None:
    HERE.mkdir(exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    command = [sys.executable, "-c", "from rondel.cli import main; main()", "dashboard", *runs, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().split()[1]
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (view, window, colours, run) in PICTURES.items():
            page = browser.new_page(viewport=window, color_scheme=colours)
            page.goto(f"{url}/#/{view}")
            page.wait_for_selector("main:not(:has(.loading))")
            if run:
                page.locator("fieldset.which").first.locator("input").nth(run).check()
            page.wait_for_timeout(1500)  # the curves
            if view == "answers":
                page.get_by_label("gap of log-probabilities").check()
                page.get_by_role("button", name="look for it").click()
                page.locator(".diff").wait_for()
            page.screenshot(path=HERE / f"{name}.png")
            page.close()
        browser.close()
    server.send_signal(signal.SIGTERM)
    server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
