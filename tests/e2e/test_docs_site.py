"""The site of docs/ builds with every link checked, and its notebooks run from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_notebooks_run(tmp_path, monkeypatch):
    """One after the other in one kernel, which imports torch once; none sees the names of the one before."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    first, own = (
        nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", 4) for name in ("first_hour", "own_loop")
    )
    cells = [cell for book in (first, own) for cell in book.cells]
    assert all(not cell.get("outputs") for cell in cells), "stored without outputs: they age"
    both = nbformat.v4.new_notebook(cells=[*first.cells, nbformat.v4.new_code_cell("%reset -f"), *own.cells])
    nbclient.NotebookClient(both, timeout=120, kernel_name="python3").execute(cwd=str(ROOT / "docs"))
    printed = "".join(o.get("text", "") for cell in both.cells for o in cell.get("outputs", []))
    assert "pass@8" in printed and "reward" in printed and "[0." in printed
