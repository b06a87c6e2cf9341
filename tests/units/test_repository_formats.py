"""Task folders: ours, Harbor's, terminal-bench's and rows of SWE-bench, read without a box."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile

import pytest

from kits.repositories import (
    HARBOR,
    HIDDEN,
    MENDED,
    PATCH,
    TERMINAL_BENCH,
    TEST,
    sums_task,
    swebench_rows,
    the_task,
    write_files,
)
from rondel.core.errors import DataError
from rondel.core.repository_files import RepositoryFile
from rondel.generate.envs.repository.box_files import checksum, contents
from rondel.generate.envs.repository.reader import load_task
from rondel.generate.envs.repository.tree import read_tree, tree_digest, write_tree
from rondel.generate.envs.repository.unified_diff import apply_diff, write_diff
from rondel.generate.envs.rows import repository
from rondel.generate.envs.sources import load_tasks


def test_a_folder_a_tar_file_and_a_row_are_the_same_task(tmp_path):
    folder = sums_task(tmp_path / "set" / "one")
    with tarfile.open(tmp_path / "one.tar.gz", "w:gz") as tar:
        tar.add(folder, "one")
    (tmp_path / "rows.jsonl").write_text('{"path": "set/one"}\n')
    found = [
        load_task(the_task(path).data["repository"]) for path in (tmp_path / "set", folder, tmp_path / "one.tar.gz")
    ]
    found.append(load_task(the_task(tmp_path / "rows.jsonl").data["repository"]))
    assert all(task == found[0] for task in found)
    own = found[0]
    assert own.statement == "add gives wrong sums. Mend it." and own.solved()["sums.py"].data.decode() == MENDED
    assert sorted(own.files) == ["sums.py", "tests/test_sums.py"] and own.test_files == [
        "tests/test_more.py",
        "tests/test_sums.py",
    ]
    assert (
        own.is_protected("tests/test_more.py") and own.is_protected("a/conftest.py") and not own.is_protected("sums.py")
    )


def test_tasks_are_read_as_data_of_a_run(tmp_path):
    sums_task(tmp_path / "one", **{"task.toml": 'difficulty = 0.5\nreport = "exit"\n'})
    sums_task(tmp_path / "two", **{"statement.md": "Another."})
    tasks = load_tasks({"kind": "repository", "path": str(tmp_path)}, env="repository").train
    assert [(t.env, t.data["name"], t.data.get("difficulty")) for t in tasks] == [
        ("repository", "one", 0.5), ("repository", "two", None),
    ]  # fmt: skip
    assert "fail_to_pass" not in json.dumps(tasks[0].data), "the row names the folder alone"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task.toml": "fail_to_pas = []"}, r"one/task.toml: fail_to_pas: .* Did you mean 'fail_to_pass'\?"),
        ({"task.toml": "seconds = ["}, "one/task.toml: not TOML"),
        ({"task.toml": "seconds = -1"}, "one/task.toml: seconds: .*greater than 0"),
        ({"task.toml": ""}, "fail_to_pass is empty, .* name at least one test"),
        (
            {"task.toml": 'fail_to_pass = ["test_a.py::test_b"]'},
            "test file test_a.py is neither in repository/ nor in hidden/",
        ),
        ({"task.toml": 'report = "reward"'}, "needs reward_file"),
        ({"task.toml": TEST.join(["x = '''", "'''"])}, "task.toml: x: "),
        ({"statement.md": " \n"}, "one/statement.md is empty"),
        ({"gold.patch": PATCH.replace("x - y", "x * y")}, "one/gold.patch: sums.py: the diff does not fit at line 1"),
        ({"gold.patch": PATCH.replace("sums.py", "../sums.py")}, "which is out of the repository"),
    ],
)
def test_a_malformed_folder_is_refused_with_its_file_and_the_rule(tmp_path, changes, says):
    sums_task(tmp_path / "one", **changes)
    with pytest.raises(DataError, match=says):
        list(repository(str(tmp_path)))


def test_what_is_no_task_at_all_is_refused(tmp_path):
    with pytest.raises(DataError, match="no repository task there"):
        list(repository(str(tmp_path)))
    folder = sums_task(tmp_path / "one")
    (folder / "statement.md").rename(folder / "statment.md")
    with pytest.raises(DataError, match=r"no statement.md. Did you mean 'statment.md'\?"):
        list(repository(str(tmp_path)))
    (folder / "repository" / "out").symlink_to("../../../etc")
    with pytest.raises(DataError, match="out of the folder"):
        list(repository(str(tmp_path)))
    held = tarfile.TarInfo("../evil.py")
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.addfile(held, io.BytesIO())
    with pytest.raises(DataError, match="leads out of the archive"):
        list(repository(str(tmp_path / "evil.tar")))


def test_rows_of_swebench_need_their_checkout(tmp_path):
    rows, source = swebench_rows(tmp_path)
    own = load_task(the_task(rows, source=source).data["repository"])
    assert own.name == "me__sums-1" and own.settings.fail_to_pass == ["tests/test_more.py::test_more"]
    assert own.hidden["tests/test_more.py"].data.decode() == HIDDEN and "tests/test_more.py" not in own.files
    assert own.solved()["sums.py"].data.decode() == MENDED
    with pytest.raises(DataError, match=r"nothing is downloaded: set task\.data\.source .* me/sums at 0123456789ab"):
        list(repository(str(rows)))
    with pytest.raises(DataError, match="neither me__sums-2/ nor a tar file"):
        list(repository(str(swebench_rows(tmp_path, instance_id="me__sums-2", repo="me/other")[0]), source=source))
    for changes, says in (
        ({"FAIL_TO_PASS": "[test"}, "neither a list nor the JSON"),
        ({"FAIL_TO_PASS": ["test_add (sums.Tests)"]}, "no test of pytest"),
        ({"test_patch": PATCH.replace("x - y", "x")}, "is the folder of base_commit 0123456789ab"),
        ({"patch": None}, "no 'patch'; a row of SWE-bench has"),
    ):
        with pytest.raises(DataError, match=says):
            list(repository(str(swebench_rows(tmp_path, **changes)[0]), source=source))


def test_folders_of_harbor_and_terminal_bench_are_read_as_they_are(tmp_path):
    write_files(tmp_path / "h" / "words", HARBOR)
    own = load_task(the_task(tmp_path / "h").data["repository"])
    assert own.settings.workdir == "/app" and own.files["data.txt"].data == b"1\n2\n" and own.settings.seconds == 60
    assert own.settings.report == "reward" and sorted(own.hidden) == ["/tests/test.sh"] and not own.unmet
    write_files(tmp_path / "t" / "words", TERMINAL_BENCH)
    own = load_task(the_task(tmp_path / "t").data["repository"])
    assert own.settings.report == "exit" and sorted(own.hidden) == ["/tests/run-tests.sh", "/tests/test_outputs.py"]
    built = HARBOR["environment/Dockerfile"] + "RUN apt-get update && \\\n    apt-get install -y jq\n"
    write_files(tmp_path / "h" / "words", {"environment/Dockerfile": built})
    own = load_task(the_task(tmp_path / "h").data["repository"])
    assert own.unmet == ("RUN apt-get update && apt-get install -y jq",)
    (tmp_path / "h" / "words" / "tests" / "test.sh").unlink()
    with pytest.raises(DataError, match=r"no tests/test\.sh"):
        list(repository(str(tmp_path / "h")))


CASES = [
    ("a\nb\nc\n", "a\nB\nc\n"), ("", "a\n"), ("a\n", ""), ("a", "b"), ("a\nb", "a\nb\n"), ("a\nb\n", "a\nb"),
    ("".join(f"{i}\n" for i in range(40)), "".join(f"{i}\n" for i in range(40) if i not in (3, 30)) + "x"),
    ("\n\n", "\n"), ("a\n\tb \n", "a\n\tb\n"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), CASES)
def test_a_diff_gives_what_it_was_made_of_and_what_git_makes_of_it(tmp_path, before, after):
    old, new = ({"f.txt": RepositoryFile(text.encode())} for text in (before, after))
    assert apply_diff(old, write_diff(old, new)) == new
    write_tree({"a/f.txt": old["f.txt"], "b/f.txt": new["f.txt"]}, tmp_path)
    told = subprocess.run(
        ["git", "diff", "--no-index", "a/f.txt", "b/f.txt"], cwd=tmp_path, capture_output=True, text=True
    )
    assert apply_diff({"f.txt": old["f.txt"]}, told.stdout.replace("a/a/", "a/").replace("b/b/", "b/")) == new


def test_a_diff_makes_moves_and_removes_files():
    old = {"a.py": RepositoryFile(b"1\n"), "b.py": RepositoryFile(b"2\n")}
    text = (
        "diff --git a/a.py b/c.py\nsimilarity index 50%\nrename from a.py\nrename to c.py\n--- a/a.py\n+++ b/c.py\n"
        "@@ -1 +1 @@\n-1\n+3\ndiff --git a/b.py b/b.py\ndeleted file mode 100644\n--- a/b.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-2\n"
        "diff --git a/run.sh b/run.sh\nnew file mode 100755\n--- /dev/null\n+++ b/run.sh\n@@ -0,0 +1 @@\n+ls\n"
    )
    assert apply_diff(old, text) == {"c.py": RepositoryFile(b"3\n"), "run.sh": RepositoryFile(b"ls\n", True)}


def test_both_ends_compute_the_same_sums_and_digests_know_files_alone(tmp_path):
    tree = {"a/b.txt": RepositoryFile(b"x"), "run": RepositoryFile(b"#!", True), "to": RepositoryFile(link="run")}
    write_tree(tree, tmp_path / "one")
    assert read_tree(tmp_path / "one") == tree
    assert all(checksum(contents(str(tmp_path / "one" / name))) == checksum(file) for name, file in tree.items())
    write_files(tmp_path / "one", {"__pycache__/x.pyc": "", ".git/HEAD": "ref"})
    assert (
        tree_digest(read_tree(tmp_path / "one"))
        == tree_digest(tree)
        != tree_digest(tree | {"run": RepositoryFile(b"#!")})
    )
