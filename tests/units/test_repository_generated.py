"""Bugs in programs, and tasks made of a package with its tests."""

from __future__ import annotations

import ast

import pytest

from kits.repositories import needs_walls
from kits.sweeps import covering
from rondel.cli.tasks import TaskFamily, run
from rondel.core.errors import DataError, UserError
from rondel.core.repository_files import RepositoryFile
from rondel.generate.envs.repository import task_set
from rondel.generate.envs.repository.catalogue import PACKAGES, SourcePackage
from rondel.generate.envs.repository.mutations import mutations_of, without_tests
from rondel.generate.envs.repository.reader import load_task, task_specs
from rondel.generate.envs.repository.sdists import sdist_of
from rondel.generate.envs.repository.tree import read_tree, tree_digest, write_tree
from rondel.runtime.sandbox.box import Sandbox

CODE = b'''"""Text: 1 < 2."""
LIMIT = 3


def f(x, y=2, *, deep=False):
    """Whether 1 < 2."""
    if not x:
        return None
    total = x + 1  # a < b
    for one in range(y, 10):
        if one == x and deep:
            continue
        one = abs(one)
        total += one
    total = total * 2
    return g(x, total)


def g(a, b):
    return a if a < b else b


class Box:
    def has(self, one):
        return one in self.items
'''
TESTS = """import pytest
from small import Box, f, g


def test_g():
    assert g(1, 2) == 1 and g(2, 1) == 1


@pytest.mark.parametrize(("x", "y", "total"), [(5, 2, 5), (0, 2, None), (1, 9, 1)])
def test_f(x, y, total):
    assert f(x, y) == total


def test_deep():
    assert f(100, 9, deep=True) == 100 and f(9, 9, deep=True) == 9


def test_many():
    assert [f(x, 8) for x in range(1, 40, 7)] == [1, 8, 15, 22, 29, 36]


class TestBox:
    def test_has(self):
        box = Box()
        box.items = [1]
        assert box.has(1) and not box.has(2)

    def test_empty(self):
        box = Box()
        box.items = []
        assert not box.has(1)
"""
SMALL = SourcePackage("small", "1.0", "0" * 64, "MIT", "small.py", ("tests",))
FILES = {
    "small.py": RepositoryFile(CODE),
    "tests/test_small.py": RepositoryFile(TESTS.encode()),
    "tests/conftest.py": RepositoryFile(b""),
    "PKG-INFO": RepositoryFile(b"Name: small"),
    "small.egg-info/SOURCES.txt": RepositoryFile(b""),
}


def test_each_bug_changes_one_place_of_one_function_and_parses():
    found = mutations_of(CODE)
    for bug in found:
        text = bug.apply(CODE)
        ast.parse(text)
        before, after = CODE.splitlines(), text.splitlines()
        assert text != CODE and after[:4] == before[:4] and sum(a not in after for a in before) <= 1
        assert (b'"""Whether 1 < 2."""' in text and b"# a < b" in text) or bug.kind == "lost"
    said = {(bug.kind, bug.function, bug.text.decode().strip()) for bug in found}
    assert said >= {
        ("default", "f", "3"), ("default", "f", "True"), ("negation", "f", ""), ("operator", "f", "-"),
        ("operator", "f", "or"), ("operator", "f", "-="), ("operator", "f", "//"), ("comparison", "f", "!="),
        ("early_end", "f", "break"), ("arguments", "f", "total, x"), ("arguments", "f", "10, y"),
        ("off_by_one", "f", "11"), ("lost", "f", ""), ("early_end", "f", "return None"), ("comparison", "g", "<="),
        ("comparison", "Box.has", "not in"),
    }  # fmt: skip


def test_tests_are_removed_whole_or_not_at_all():
    text = without_tests(TESTS, {"test_f", "TestBox.test_has"})
    assert "parametrize" not in text and "test_has" not in text and "def test_g" in text and "test_empty" in text
    ast.parse(text)
    assert without_tests(TESTS, {"TestBox.test_has", "TestBox.test_empty"}) is None


def test_the_list_of_packages_is_pinned_and_licensed():
    assert len(PACKAGES) > 10
    for name, package in PACKAGES.items():
        assert package.name == name and len(bytes.fromhex(package.sha256)) == 32 and package.licence and package.tests


def test_a_source_with_another_sum_is_refused(tmp_path):
    (tmp_path / "small-1.0.tar.gz").write_bytes(b"other")
    with pytest.raises(DataError, match=r"has the sha256 .*, and small 1\.0 has 0000"):
        sdist_of(SMALL, tmp_path)


def test_the_command_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="name what is to be checked"):
        run(TaskFamily.check)
    with pytest.raises(UserError, match="--out is missing"):
        run(TaskFamily.repositories)
    with pytest.raises(UserError, match="Did you mean 'toolz'"):
        run(TaskFamily.repositories, out=tmp_path, package=["tools"])


@pytest.mark.slow
@needs_walls
@pytest.mark.parametrize("twice", covering([False, True], [False]))
def test_tasks_of_a_package_are_good_and_equal_for_a_seed(tmp_path, monkeypatch, twice):
    write_tree(FILES, tmp_path / "small-1.0")
    monkeypatch.setattr(task_set, "sdist_of", lambda package, cache: tmp_path / "small-1.0")
    monkeypatch.setattr(task_set, "SPARE", 0)
    said: list[str] = []

    def make(out, n=1):
        return task_set.make_task_set([SMALL], out, Sandbox(), n=n, seed=3, cache=tmp_path, say=said.append)

    digest = make(tmp_path / "one")
    assert "small 1.0: 8 tests" in said[0] and "untouched 0, solved 1" in said[-1]
    assert digest == tree_digest(read_tree(tmp_path / "one"))
    assert not twice or digest == make(tmp_path / "two")
    for _, spec in task_specs(str(tmp_path / "one"), "auto", "", ""):
        own = load_task(spec)
        assert own.solved()["small.py"].data == CODE and own.files["small.py"].data != CODE
        assert "PKG-INFO" not in own.files and " small.py" not in own.statement and "line" not in own.statement
        assert own.hidden["tests/test_small.py"].data.decode() == TESTS and 0 < own.settings.difficulty < 1
        assert own.settings.licence == "MIT" and own.settings.fail_to_pass
    with pytest.raises(DataError, match="has tasks already"):
        make(tmp_path / "one")
