"""Modules import where Linux's own calls are missing; the help of each command and errors name pages that exist."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits import forked
from rondel.cli import PAGES, VERBS, main
from rondel.core.config.job import Job
from rondel.core.errors import SECTIONS, ConfigError, SyncError
from rondel.core.registry import EXPLAINED

ROOT = Path(__file__).parents[2]
WITHOUT_LINUX = """
import builtins, importlib, io, multiprocessing, os, sys
import torch, transformers  # they know other systems themselves; Rondel is imported anew
if (known := sys.modules.get("rondel.models.torch_library")) is not None:
    known.LIBRARY._destroy()  # its operators are registered once more
for name in [name for name in sys.modules if name.partition(".")[0] == "rondel"]:
    del sys.modules[name]
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
def test_every_module_imports_without_what_only_linux_has(tmp_path):
    source = ROOT / "src"
    names = [
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((source / "rondel").rglob("*.py"))
        if "templates" not in path.parts
    ]
    names = [name for name in names if not LEFT_OUT.match(name)]
    assert len(names) > 300
    (script := tmp_path / "without_linux.py").write_text(WITHOUT_LINUX)
    done = forked.run(names, script=script, timeout=120)
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


def named_pages() -> Iterator[tuple[str, str]]:
    """(where, page) of every page that an error names: page="docs/...", page = "docs/...", and the registry's."""
    for path in (ROOT / "src").rglob("*.py"):
        if "docs/" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            value = node.value if isinstance(node, ast.keyword) and node.arg == "page" else None
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "page":
                value = node.value
            if isinstance(value, ast.Constant) and str(value.value).startswith("docs/"):
                yield path.name, str(value.value)
    yield from EXPLAINED.items()


def test_help_and_errors_name_pages_that_exist(capsys):
    assert PAGES.keys() <= set(VERBS)
    pages = [*PAGES.items(), *named_pages()]
    assert len(pages) > 40
    for where, page in pages:
        file, _, anchor = page.partition("#")
        text = (ROOT / file).read_text()
        titles = [
            re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)", text, re.M)
        ]
        assert not anchor or anchor in titles, f"{where}: {page}"
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "More: docs/runs.md" in capsys.readouterr().out


def test_an_error_names_the_page_that_knows_more(capsys, tmp_path):
    """Below its own line, also as the cause of a group, and after a way through another process; most name none."""
    recipe = tmp_path / "run.toml"
    recipe.write_text('[model]\npath = "x"\nfoo = 1\n')
    key = ["explain", "recipes/tiny.toml", "--loop.groups_per_step=0"]
    for words, page in (
        (["explain", str(recipe)], "docs/recipe.md"),
        (key, "docs/recipe.md#loop"),
        (["card", str(tmp_path / "no")], ""),
    ):
        with pytest.raises(SystemExit):
            main(words)
        line, *more = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and more == ([f"More: {page}"] if page else [])
    sent = pickle.loads(pickle.dumps(ConfigError("no such mesh", page="docs/place.md#mesh")))
    assert (str(sent), sent.page, ConfigError("x").page) == ("no such mesh", "docs/place.md#mesh", "")
    assert pickle.loads(pickle.dumps(SyncError("lost"))).page == "docs/sync.md"
    assert ConfigError("with engine.numerics = 'aligned' place.mesh has to be 1").page == "docs/recipe.md#engine"
    assert pickle.loads(pickle.dumps(ConfigError("place.mesh", page="docs/place.md"))).page == "docs/place.md"
    for text in ("cannot read runs/run.toml", "module 'my.model.py' is none", "'loop.py' is a file"):
        assert ConfigError(text).page == "", text


def test_every_section_has_its_part_of_the_page():
    titles = re.findall(r"^## (\w+)$", (ROOT / "docs/recipe.md").read_text(), re.M)
    assert set(SECTIONS) == set(Job.model_fields) <= set(titles)


def test_doctor_tells_the_version():
    import rondel
    from rondel.cli.doctor import examine_machine

    first = next(iter(examine_machine()))
    assert (first.what, first.found) == ("rondel", rondel.__version__)
