"""Hooks of the documentation's site (mkdocs.yml): files that pages name outside docs/ are copied as text, and
notebooks become pages. A link to a file that is not there ends the build.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?(\))")
PAGE = {".md"}


def notebook_text(path: Path) -> str:
    """A notebook as Markdown: its text and its code. Its outputs are those of whoever runs it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [
        "".join(c["source"]) if c["cell_type"] == "markdown" else "```python\n" + "".join(c["source"]) + "\n```"
        for c in cells
    ]
    return "\n\n".join([*parts, f"[The notebook]({path.name})"]) + "\n"


def on_files(files, config):
    docs, wanted = Path(config["docs_dir"]), {}
    for path in sorted((docs / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_text(path)))
    for page in sorted(docs.glob("*.md")):
        for _, target, _, _ in LINK.findall(page.read_text(encoding="utf-8")):
            source = (page.parent / target).resolve()
            if not source.exists() or not source.is_relative_to(ROOT):
                raise PluginError(f"{page.name} links to {target}, which is not there")
            wanted[_address(source)] = source
    for address, source in wanted.items():
        text = (
            "\n".join(sorted(p.name for p in source.iterdir() if not p.name.startswith(("_", "."))))
            if source.is_dir()
            else source.read_text(encoding="utf-8", errors="replace")
        )
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    here = posixpath.dirname(page.file.src_uri)

    def to_copy(found: re.Match) -> str:
        source = (Path(config["docs_dir"]) / here / found[2]).resolve()
        return f"{found[1]}{posixpath.relpath(_address(source), here or '.')}{found[4]}"

    return markdown if here else LINK.sub(to_copy, markdown)


def _address(source: Path) -> str:
    """Beside the pages, as plain text, so that a browser shows it."""
    return f"source/{source.relative_to(ROOT).as_posix()}.txt"
