"""The site of docs/ builds with every link checked, and its notebooks run from top to bottom."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kits import forked

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in (page for page in pages if page.name != "404.html"):  # whose links begin at the root of a host
        for target in re.findall(r'(?:href|src)="([^"#:]+)(?:#[^"]*)?"', page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
    assert not re.search(r"https?://[^\"]*\.(?:js|css)", (tmp_path / "overview.html").read_text())  # of its own


SHELL = """
import asyncio, json, sys
from IPython.core.interactiveshell import InteractiveShell


async def run():
    shell = InteractiveShell.instance()
    for book in json.load(open(sys.argv[1])):
        for cell in book:
            shell.run_cell(cell).raise_error()
        shell.reset()


asyncio.run(run())
"""


@pytest.mark.slow
def test_notebooks_run(tmp_path, monkeypatch):
    """One after the other as a kernel runs them, inside a running event loop, in a process that has torch; none sees the
    names of the one before.
    """
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("IPython")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first, own = (
        nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", 4) for name in ("first_hour", "own_loop")
    )
    cells = [cell for book in (first, own) for cell in book.cells]
    assert all(not cell.get("outputs") for cell in cells), "stored without outputs: they age"
    books = [[cell.source for cell in book.cells if cell.cell_type == "code"] for book in (first, own)]
    (tmp_path / "shell.py").write_text(SHELL)
    (tmp_path / "books.json").write_text(json.dumps(books))
    monkeypatch.chdir(ROOT / "docs")
    done = forked.run([tmp_path / "books.json"], script=tmp_path / "shell.py", timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    printed = done.stdout
    assert "pass@8" in printed and "reward" in printed and "[0." in printed
