"""`rondel init` writes a project that runs; `rondel recipes` writes what comes with Rondel; both from a wheel, too."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rondel.cli import main
from rondel.cli.init import project_files
from rondel.cli.package_files import PACKAGE, shipped_folder
from rondel.cli.recipes import list_recipes, named_examples
from rondel.core.config.job import Job
from rondel.driver import event_loop_watchdog

ROOT = Path(__file__).parents[2]
NAMES = ("recipe.toml", "reward.py", "environment.py")


@pytest.fixture
def rondel(capsys, monkeypatch, tmp_path):
    """`rondel("init", "a")` in an empty folder -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("reward", "environment"):  # of the folder of another test
        monkeypatch.delitem(sys.modules, name, raising=False)

    def call(*words):
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        return (end.value.code or 0, *capsys.readouterr())

    yield call
    for name in ("reward", "environment"):
        sys.modules.pop(name, None)


# -- init ------------------------------------------------------------------------------------------


def test_init_writes_three_files_and_the_next_three_commands(rondel, tmp_path):
    code, out, _ = rondel("init", "my project")
    assert code == 0 and {p.name for p in (tmp_path / "my project").iterdir()} == set(NAMES)
    assert "\ncd 'my project'\nrondel check recipe.toml " in out and "\nrondel train recipe.toml " in out
    assert f"\nrondel view {Job.read('my project/recipe.toml').run.folder} " in out
    assert "cd " not in rondel("init")[1] and {p.name for p in tmp_path.glob("*.*")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_init_overwrites_nothing(rondel, tmp_path, name):
    (tmp_path / name).write_text("mine")
    code, _, err = rondel("init")
    assert code == 1 and f"has {name} already; nothing was written" in err and len(err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


def test_init_refuses_a_file_and_a_name_that_is_no_model(rondel, tmp_path):
    (tmp_path / "there").write_text("")
    assert "there is a file; name a folder" in rondel("init", "there")[2]
    assert "is no model folder and no hub id" in rondel("init", "a", "--model", 'x"y')[2]
    assert not (tmp_path / "a").exists()


def test_init_of_a_pretrained_model_differs_in_the_recipe_alone(rondel):
    assert rondel("init", "a")[0] == rondel("init", "b", "--model", "Qwen/Qwen3-0.6B")[0] == 0
    job = Job.read("b/recipe.toml")
    assert job.model.path == "Qwen/Qwen3-0.6B" and job.loop.warmup.steps == 0
    assert Job.read("a/recipe.toml").model.path["random"] == "llama"
    assert all(Path("a", name).read_text() == Path("b", name).read_text() for name in NAMES[1:])


@pytest.mark.slow
def test_what_init_wrote_is_checked_played_and_trained(rondel, tmp_path, monkeypatch):
    monkeypatch.setattr(event_loop_watchdog, "LATE", 60.0)  # on a busy machine a loop stands still for seconds
    assert rondel("init", "a")[0] == 0
    for verb in ("check", "check-env"):
        code, out, err = rondel(verb, "a/recipe.toml", "--place.threads=1")
        assert code == 0 and "checks passed" in out, out + err
    small = ("--loop.warmup.steps=2", "--loop.steps=2", "--loop.groups_per_step=2", "--place.threads=1")
    code, out, err = rondel("train", "a/recipe.toml", *small)
    assert code == 0 and "run folder  runs/first   (4 steps" in out, err
    assert rondel("view", "runs/first", "--limit", 2)[0] == 0


# -- recipes ---------------------------------------------------------------------------------------


def test_recipes_are_listed_with_their_first_line_printed_and_written(rondel, tmp_path):
    code, out, _ = rondel("recipes")
    assert code == 0 and set(list_recipes()) == {
        p.relative_to(ROOT / "recipes").with_suffix("").as_posix() for p in (ROOT / "recipes").rglob("*.toml")
    }
    assert all(f"\n{name} " in f"\n{out}" for name in list_recipes()) and re.search(
        r"\ntiny +A random 0.3M-parameter", out
    )
    text = (ROOT / "recipes" / "quickstart.toml").read_text(encoding="utf-8")
    assert rondel("recipes", "quickstart") == (0, text, "")
    assert rondel("recipes", "quickstart.toml", "-o", "recipe.toml")[0] == 0
    assert (tmp_path / "recipe.toml").read_text(encoding="utf-8") == text
    code, _, err = rondel("recipes", "tiny", "-o", "recipe.toml")
    assert code == 1 and "nothing was written" in err and (tmp_path / "recipe.toml").read_text(encoding="utf-8") == text


def test_a_recipe_is_written_with_the_modules_that_it_names(rondel, tmp_path):
    assert [path.name for path in named_examples(list_recipes()["calculator"].read_text())] == ["sums.py"]
    assert "it names sums.py" in rondel("recipes", "calculator")[2]
    assert rondel("recipes", "calculator", "-o", tmp_path / "c.toml")[0] == 0
    assert (tmp_path / "sums.py").read_text() == (ROOT / "examples" / "sums.py").read_text()
    code, out, _ = rondel("recipes", "pipelines/specialists", "-o", tmp_path / "p.toml")
    assert code == 0 and f"rondel pipeline {tmp_path / 'p.toml'}" in out and (tmp_path / "three_digits.py").is_file()


def test_a_wrong_name_of_a_recipe_names_the_right_one(rondel):
    assert (
        "no recipe 'quikstart'. Did you mean 'quickstart'? Known: blocks, calculator, "
        in rondel("recipes", "quikstart")[2]
    )
    assert "needs the name of a recipe" in rondel("recipes", "-o", "x")[2]
    assert "`rondel recipes` lists those that come with Rondel" in rondel("check", "quickstart")[2]


def test_a_list_of_recipes_tells_whole_sentences(rondel):
    told = " ".join(rondel("recipes")[1].split())
    assert "by Dr. GRPO: no division by the deviation of a group or by the length of an answer. flow A two-" in told
    assert "and refuses to cancel what was shipped. tiny A random 0.3M-parameter model" in told


# -- the wheel -------------------------------------------------------------------------------------


def test_shipped_folders_are_ours(tmp_path, monkeypatch):
    assert shipped_folder("recipes") == ROOT / "recipes" and shipped_folder("no_such_folder") is None
    package = tmp_path / "lib" / "site-packages" / "rondel"  # as installed: parents[1] is lib
    (package / "recipes").mkdir(parents=True)
    (tmp_path / "lib" / "recipes").mkdir()  # a stranger's
    monkeypatch.setattr("rondel.cli.package_files.PACKAGE", package)
    assert shipped_folder("recipes") == package / "recipes"


@pytest.mark.slow
def test_the_wheel_brings_templates_recipes_examples_and_benchmarks(tmp_path):
    pytest.importorskip("hatchling")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    inside = set(zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).namelist())
    for folder in ("recipes", "examples", "benchmarks"):
        ours = {f"rondel/{p.relative_to(ROOT)}" for end in ("toml", "py") for p in (ROOT / folder).glob(f"*.{end}")}
        assert ours and ours <= inside
    assert "rondel/recipes/pipelines/specialists.toml" in inside
    package = {f"rondel/{p.relative_to(PACKAGE)}" for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert package <= inside and "rondel/cli/templates/random_model.toml" in inside
    assert not [name for name in inside if name.startswith(("tests/", "docs/")) or name.endswith(".pyc")]


@pytest.mark.slow
def test_completion_knows_verbs_and_recipes():
    def complete(words):
        env = os.environ | {"_RONDEL_COMPLETE": "complete_bash", "COMP_WORDS": words}
        env["COMP_CWORD"] = str(len(words.split()) - 1)
        return subprocess.run([sys.executable, "-m", "rondel"], env=env, capture_output=True, text=True).stdout.split()

    assert complete("rondel tra") == ["train", "trace"] and complete("rondel recipes qu") == ["quickstart"]


def test_templates_are_the_files_of_a_project():
    files = project_files("random")
    assert (
        tuple(files) == NAMES and "environment:sums" in files["recipe.toml"] and "reward:grade" in files["recipe.toml"]
    )
