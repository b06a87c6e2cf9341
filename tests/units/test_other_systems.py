"""Modules import where Linux's own calls are missing, and the help of each command names a page that exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rondel.cli import PAGES, VERBS
from rondel.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
WITHOUT_LINUX = """
import builtins, importlib, io, multiprocessing, os, sys
import torch, transformers  # they know other systems themselves
for name in ("sched_setaffinity", "sched_getaffinity", "pidfd_open", "memfd_create", "O_DIRECT", "splice", "sendfile", "eventfd"):
    if hasattr(os, name):
        delattr(os, name)
plain, exists, context = io.open, os.path.exists, multiprocessing.get_context
def missing(path):
    if isinstance(path, (str, bytes, os.PathLike)) and os.fspath(path) != "" and str(os.fspath(path)).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "no such file", path)
def opened(path, *more, **how):
    missing(path)
    return plain(path, *more, **how)
def chosen(kind=None):
    if kind == "fork":
        raise ValueError("cannot find context for 'fork'")
    return context(kind)
builtins.open = io.open = opened
multiprocessing.get_context = chosen
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rondel"):
            failed.append(f"{name}: {error}")
    except BaseException as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
print("\\n".join(failed))
"""
# what runs inside a sandbox's box, which Linux alone has, and what a package of a GPU machine imports
LEFT_OUT = re.compile(r"rondel\.(?:runtime\.sandbox\.inside|generate\.engine\.vllm_worker|__main__)")


@pytest.mark.slow
def test_every_module_imports_without_what_only_linux_has():
    source = ROOT / "src"
    names = [
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((source / "rondel").rglob("*.py"))
        if "templates" not in path.parts
    ]
    names = [name for name in names if not LEFT_OUT.match(name)]
    assert len(names) > 300
    done = subprocess.run([sys.executable, "-c", WITHOUT_LINUX, *names], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_metal_is_taken_where_torch_has_it(monkeypatch):
    import torch

    from rondel.runtime.devices import pick_device

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("mps") == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no Metal device"):
        pick_device("mps")
    with pytest.raises(ConfigError, match="or 'mps'"):
        pick_device("metal")


def test_help_names_a_page_that_exists(capsys):
    from rondel.cli import main

    assert PAGES.keys() <= set(VERBS)
    for verb, page in PAGES.items():
        file, _, anchor = page.partition("#")
        text = (ROOT / file).read_text()
        titles = [
            re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)", text, re.M)
        ]
        assert not anchor or anchor in titles, f"{verb}: {page}"
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "More: docs/runs.md" in capsys.readouterr().out


def test_doctor_tells_the_version():
    import rondel
    from rondel.cli.doctor import examine_machine

    first = next(iter(examine_machine()))
    assert (first.what, first.found) == ("rondel", rondel.__version__)
