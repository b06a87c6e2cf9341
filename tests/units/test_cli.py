"""The command line: exit codes, one readable line for each error, and a start without torch."""

import ast
import json
import re
import runpy
import subprocess
import sys
import sysconfig
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kits.run_folder import evaluated, group, write_run
from rondel import cli, run
from rondel.cli import VERBS, describe_error, main
from rondel.cli.doctor import examine_machine
from rondel.cli.doctor_kernels import kernel_rows
from rondel.cli.view import load_tokenizer, logprob_gap
from rondel.core.config.job import Job
from rondel.core.config.renamed_keys import SYNONYMS
from rondel.core.config.toml_reader import ORIGIN
from rondel.core.errors import EngineError, UserError
from rondel.core.registry import import_attribute, locate_path
from rondel.models.native_library import chosen_library, native_library
from rondel.runtime.journal.store import path_of, write_step

RECIPE = """[model]
path = "tiny"
[task]
data = { kind = "digits" }
[loop]
steps = 3
groups_per_step = 4
[run]
folder = "runs/x"
"""


@pytest.fixture
def rondel(capsys):
    """`rondel("card", "runs/x")` -> (exit code, stdout, stderr)."""

    def call(*words):
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def assemble(monkeypatch):
    """The module that runs things, as the command line sees it."""
    module = ModuleType("rondel.assemble")
    monkeypatch.setitem(sys.modules, "rondel.assemble", module)
    return module


# -- starting --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_help_lists_every_verb_without_torch():
    code = (
        "import sys, contextlib\nfrom rondel.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'pydantic') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    for verb in VERBS:
        assert f"  {verb} " in out
    assert "..." not in out.split("Commands:")[1]  # no sentence is cut


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(rondel, verb):
    code, out, _ = rondel(verb, "--help")
    assert code == 0 and f"rondel {verb}" in out


def test_the_table_of_the_readme_has_every_verb():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `rondel ([a-z-]+)", text, re.MULTILINE)
    assert [verb for verb in VERBS if verb not in rows] == []


def test_a_wrong_verb_exits_with_the_usage(rondel):
    code, _, err = rondel("trian", "x.toml")
    assert code == 2 and "trian" in err


# -- endings ---------------------------------------------------------------------------------------


def test_endings():
    tree = ExceptionGroup(
        "crew", [ExceptionGroup("in", [KeyError("x"), EngineError("no\n  pages")]), UserError("later")]
    )
    assert describe_error(tree) == ("error: no pages (and 2 more; --debug shows them)", 1)
    assert describe_error(KeyboardInterrupt()) == ("stopped; continue with the same command", 130)
    assert describe_error(BaseExceptionGroup("crew", [KeyboardInterrupt()]))[1] == 130
    assert describe_error(KeyError("x")) == ("error: KeyError: 'x'; run again with --debug; this is a bug of ours", 2)


def test_the_notebook_raises_the_error_and_no_group_of_them(assemble, recipe):
    group = ExceptionGroup("crew", [KeyError("x"), EngineError("no pages")])

    def train(job, quiet):
        raise group

    assemble.train = train
    with pytest.raises(EngineError, match="no pages") as caught:
        run(str(recipe), quiet=True)
    assert caught.value.__cause__ is group


def test_debug_before_or_after_the_verb_shows_the_traceback(rondel, tmp_path):
    for words in (["--debug", "card", tmp_path / "no"], ["card", tmp_path / "no", "--debug"]):
        code, _, err = rondel(*words)
        assert code == 1 and "Traceback" in err and err.splitlines()[-1].startswith("error: no run folder at")
    code, _, err = rondel("card", tmp_path / "no")
    assert code == 1 and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folder", "x"], "add --training, or leave it out"),
        (["--training", "--drain", "5"], "--drain with --training has no effect"),
        (["--training", "--deadline", "5"], "--deadline with --training has no effect"),
    ],
)
def test_options_of_a_server_that_have_no_effect_are_refused(rondel, words, message):
    code, _, err = rondel("serve", "nowhere", *words)
    assert code == 1 and message in err


def test_an_interrupted_training_says_how_to_go_on(rondel, recipe, assemble):
    def train(job, *, quiet=False):
        raise KeyboardInterrupt

    assemble.train = train
    assert rondel("train", recipe) == (130, "", "stopped; continue with the same command\n")


# -- verbs that run things -------------------------------------------------------------------------


def test_train_reads_recipe_and_overrides_in_any_order(rondel, recipe, assemble):
    seen = []
    nothing = {"eval_before": None, "eval_after": None, "samples_before": [], "samples_after": [], "steps": 0, "seconds": 0.0,
               "score_is_share": True}  # fmt: skip
    assemble.train = lambda job, *, quiet=False: seen.append((job.loop.steps, job.model.path, quiet)) or nothing
    assert rondel("train", recipe, "--loop.steps=7", "--quiet")[0] == 0
    assert rondel("train", "--model.path=big", recipe)[0] == 0
    assert seen == [(7, "tiny", True), (3, "big", False)]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--quite"], "'--quite' is not an override; write --section.key=value"),
        (["--loop.stepz=3"], "unknown key 'loop.stepz'. Did you mean 'steps'?"),
        (["--trainer.learning_rate=1e-6"], "unknown key 'trainer.learning_rate'. Did you mean 'trainer.lr'?"),
        (["--engine.temperature=1.0"], "unknown key 'engine.temperature'. Did you mean 'engine.sampling.temperature'?"),
        (["--algo.beta=0.1"], "Did you mean 'algo.kl.coef'?"),
        (["other.toml"], "one recipe is needed and 2 were given"),
    ],
)
def test_faults_in_the_words_are_named(rondel, recipe, words, message):
    code, out, err = rondel("train", recipe, *words)
    line, *page = err.splitlines()
    assert (code, out) == (1, "") and message in line
    assert page == (["More: docs/recipe.md"] if "run.toml: " in line else [])  # of keys there is a page


def test_check_exits_1_if_anything_is_wrong(rondel, recipe, assemble):
    good = SimpleNamespace(ok=True, what="data", message="48 tasks", remedy="", warning=False)
    bad = SimpleNamespace(
        ok=False, what="signal", message="0 % of groups differ", remedy="take an easier task", warning=False
    )
    assemble.check = lambda job, *, asked=False, say=None: [good, bad]
    code, out, _ = rondel("check", recipe)
    assert (
        code == 1
        and "✗ signal  0 % of groups differ" in out
        and "do: take an easier task" in out
        and "1 of 2 checks failed" in out
    )
    seen = []
    assemble.check = lambda job, *, asked=False, say=None: seen.append(asked) or [good]
    assert rondel("check", recipe)[0] == rondel("check", recipe, "--self-test")[0] == 0 and seen == [False, True]


def test_eval_as_a_sentence_and_as_json(rondel, monkeypatch, recipe):
    from rondel.driver.evaluation import SetEvaluation

    calls = []
    module = ModuleType("rondel.driver.checkpoint_evaluation")
    module.evaluate_sets = lambda *words: calls.append(words[:3]) or [SetEvaluation(evaluated(4, 4, 0.6), [], [])]
    monkeypatch.setitem(sys.modules, "rondel.driver.checkpoint_evaluation", module)
    code, out, _ = rondel("eval", "runs/x", "--n", "48", "--engine.sampling.max_tokens=9")
    assert code == 0 and "runs/x: score 60.0% on 48 held-out tasks, 95 % interval 50.0% to 70.0%" in out
    assert json.loads(rondel("eval", "model", recipe, "--json")[1])["score"] == 0.6
    failed = replace(evaluated(4, 4, 0.6, scale=2.0), request={"failed": 3})
    module.evaluate_sets = lambda *words: [SetEvaluation(failed, [], [])]
    _, out, _ = rondel("eval", "runs/x")
    assert "runs/x: mean reward 1.2 on 48 held-out tasks, 95 % interval 1 to 1.4\n3 of them could not be scored" in out
    assert calls == [("runs/x", None, {"engine.sampling.max_tokens": 9, "task.eval.n": 48}), ("model", str(recipe), {})]


def test_eval_takes_no_word_without_effect(rondel, monkeypatch, tmp_path):
    calls = []
    module = ModuleType("rondel.driver.checkpoint_evaluation")
    module.rate = lambda *words: calls.append(words) or [{"pass_rate": 0.5}]
    monkeypatch.setitem(sys.modules, "rondel.driver.checkpoint_evaluation", module)
    out = str(tmp_path / "rated.jsonl")
    for words, why in {
        ("--loop.steps=3",): "--loop.steps=3 has no effect on an evaluation",
        ("--trainer.lr=1e-3", "--rates", out): "--trainer.lr=0.001 has no effect",
        ("--algo.kind=dapo",): "--algo.kind=dapo has no effect on an evaluation",
        ("--algo.group_size=4", "--rates", out): "--algo.group_size=4 has no effect on an evaluation",
        ("--task.filters=[]",): "--task.filters=[] has no effect on an evaluation",
        ("--task.eval.every=2",): "--task.eval.every=2 has no effect on an evaluation",
        ("--policies.judge.lr=1e-3",): "--policies.judge.lr=0.001 has no effect on an evaluation",
        ("--engine.speculative.lr=0",): "--engine.speculative.lr=0 has no effect on an evaluation",
        ("--task.eval.samples=3", "--rates", out): "--task.eval.samples=3 has no effect with --rates",
        ("--samples", "4"): "--samples 4 belongs to --rates FILE; --draws 4",
        ("--rates", out, "--json", "--n", "3"): "--n, --json with --rates",
    }.items():
        code, _, said = rondel("eval", "runs/x", *words)
        assert code == 1 and why in said
    assert not calls
    assert rondel("eval", "runs/x", "--rates", out, "--best", "--loop.seed=3")[0] == 0
    assert calls[0][2:4] == ({"loop.seed": 3}, 10) and calls[0][5] is True


def test_replay_compares_and_names_the_steps_that_exist(rondel, tmp_path, assemble):
    write_run(tmp_path)
    assemble.replay = lambda folder, step: {"train/entropy": 1.0, "train/gap_max": 3e-6}
    code, out, _ = rondel("replay", tmp_path, "--step", "2")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert (
        rows["train/entropy"].endswith("equal")
        and rows["train/gap_max"].endswith("+1.0e-06")
        and "only one side" in rows["train/loss"]
    )
    code, _, err = rondel("replay", tmp_path, "--step", "9")
    assert code == 1 and "has no finished step 9; finished: 1 to 4" in err


def test_a_recorded_run_is_replayed_whole_or_the_differences_are_named(rondel, tmp_path, assemble):
    ran = []
    assemble.again = lambda folder, into: (folder, into)
    assemble.train = lambda job, quiet, schedule: ran.append((job, schedule))
    assemble.differences = lambda folder, into: []
    code, out, _ = rondel("replay", tmp_path, "--into", tmp_path / "again")
    assert code == 0 and "bit for bit" in out
    assert ran == [(tmp_path, tmp_path / "again")]
    assemble.differences = lambda folder, into: ["version 3: root"]
    code, out, _ = rondel("replay", tmp_path, "--into", tmp_path / "again", "--json")
    assert code == 1 and json.loads(out)["differences"] == ["version 3: root"]
    for words in ([], ["--step", "1", "--into", tmp_path / "again"]):
        code, _, err = rondel("replay", tmp_path, *words)
        assert code == 2 and "--into FOLDER" in err


# -- verbs that show things ------------------------------------------------------------------------


def test_explain_says_who_set_what_the_arithmetic_and_the_loss(rondel, recipe):
    pytest.importorskip("rondel.algos.objective")
    code, out, _ = rondel("explain", recipe, "--algo.group_size=2")
    rows = {line.split()[0]: line.split(None, 3) for line in out.splitlines() if "." in line[:20]}
    assert code == 0
    assert rows["loop.steps"][1:] == ["recipe", "3"] and rows["algo.group_size"][1:] == ["command", "line", "2"]
    assert rows["trainer.lr"][1:] == ["default", "1e-05"]
    assert (
        "4 groups x 2 samples = 8 answers of at most 64 tokens, in 1 update; 3 steps = 24 answers" in out
        and "\nloss " in out
    )


def test_explain_shows_an_algorithm_without_a_recipe(rondel):
    pytest.importorskip("rondel.algos.objective")
    code, out, _ = rondel("explain", "gspo")
    assert code == 0 and out.startswith("gspo  (arXiv:2507.18071)\nloss ")
    assert "no recipe and no algorithm 'gsp'. Did you mean 'gspo'?" in rondel("explain", "gsp")[2]
    assert (
        "changes a recipe: rondel explain RUN.toml --algo.kind=gspo" in rondel("explain", "gspo", "--loop.steps=3")[2]
    )


def test_explain_shows_how_passes_became_steps(rondel, recipe):
    text = recipe.read_text().replace("steps = 3", "passes = 2", 1)
    assert text.count("passes = 2") == 1
    recipe.write_text(text)
    code, out, _ = rondel("explain", recipe)
    rows = {line.split()[0]: line.split(None, 2) for line in out.partition("\n\n")[0].splitlines()}
    assert code == 0 and rows["loop.steps"][1] == "loop.passes" and rows["loop.passes"][1:] == ["recipe", "2.0"]
    assert f"loop.steps = {rows['loop.steps'][2]}: 2 passes over" in out


def test_explain_shows_what_is_trained_beside(rondel, recipe):
    _, out, _ = rondel("explain", recipe, '--algo.beside=[{ kind = "sft", weight = 0.3, groups_per_step = 5 }]')
    main, _, shown = out.partition("\nbeside    0.3 · the loss below, over 5 demonstrations a step")
    assert "\nloss " in main and "l = -logp" in shown and "l = -logp" not in main


def test_explain_shows_every_leaf(recipe):
    from rondel.cli.explain import list_values

    def leaves(model, prefix=""):
        for name, f in model.model_fields.items():
            inner = hasattr(f.annotation, "model_fields")
            yield from leaves(f.annotation, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]

    assert [key for key, _, _ in list_values(Job.read(recipe), set())] == list(leaves(Job))


def test_card_prints_what_it_wrote(rondel, tmp_path):
    write_run(tmp_path)
    code, out, _ = rondel("card", tmp_path)
    assert code == 0 and out.startswith("# Run card") and out.strip() == (tmp_path / "card.md").read_text().strip()
    assert json.loads(rondel("card", tmp_path, "--json")[1])["steps"] == 4


def test_view_filters(rondel, tmp_path):
    write_run(tmp_path)
    code, out, _ = rondel("view", tmp_path)
    assert code == 0 and "8 of 8 trajectories of step 4; --step shows others (1 to 4 are stored)" in out
    assert "the <b>sum</b> is 1.0" in out and "gap" in out and "\x1b" not in out
    assert (
        "1 of 8 trajectories of step 2, 1 match"
        in rondel("view", tmp_path, "--step", 2, "--group", 3, "--min-reward", 0.9)[1]
    )
    failed = rondel("view", tmp_path, "--errors")[1]
    assert "2 match" in failed and "reward failed: timeout 10 s" in failed and "no reward" in failed


def test_view_errors_name_what_exists(rondel, tmp_path):
    assert rondel("view", tmp_path / "no")[2].startswith("error: no run folder at")
    write_run(tmp_path)
    assert "has no rollouts of step 9; stored: 1 to 4" in rondel("view", tmp_path, "--step", 9)[2]
    assert "step 4 has no group 0; it has 6, 7" in rondel("view", tmp_path, "--group", 0)[2]
    path_of(tmp_path, 4).write_bytes(b"noise")
    code, _, err = rondel("view", tmp_path)
    assert code == 1 and "cannot be read; the file is damaged" in err
    assert err.splitlines()[1:] == ["More: docs/runs.md#the-folder"]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


def test_the_web_page_is_escaped_and_needs_nothing_else(rondel, tmp_path):
    """Prompts hold <script>, answers hold <b>: neither becomes a tag."""
    write_run(tmp_path)
    code, _, _ = rondel("view", tmp_path, "--html", tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    page = Tags()
    page.feed(text)
    assert (
        code == 0
        and page.tags.count("script") == 1
        and page.tags.count("article") == 8
        and page.tags.count("input") == 1
    )
    assert page.tags.count("b") == 8 and page.links == [] and "&lt;script&gt;" in text and "http" not in text


def test_tokens_are_read_by_the_tokenizer_of_the_run(rondel, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    write_step(tmp_path, 1, [group(1, 0, [1.0])])
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    vocabulary.save(str(tmp_path / "checkpoints" / "step-000001" / "tokenizer.json"))
    tokens = group(1, 0, [1.0]).trajectories[0].tokens
    out = rondel("view", tmp_path)[1]
    assert " ".join(f"w{t}" for t in tokens[:5]) in out and " ".join(f"w{t}" for t in tokens[5:]) in out
    assert load_tokenizer(tmp_path / "elsewhere") is None


def test_the_gap_is_over_written_tokens_only():
    row = {"mask": [False, True, True], "trainer_logprobs": [9.0, -1.0, -2.5], "behavior_logprobs": [0.0, -1.0, -2.0]}
    assert logprob_gap(row) == 0.5 and logprob_gap(row | {"trainer_logprobs": None}) is None


@pytest.mark.slow
def test_doctor_finds_this_machine_fit(rondel):
    code, out, _ = rondel("doctor", "--json")
    report = json.loads(out)
    assert code == 0 and report["healthy"]
    signs = {sign["what"]: sign for sign in report["signs"]}
    assert signs["python"]["state"] != "broken" and signs["torch"]["state"] == "ok"
    assert "GFLOP/s" in signs["matrix product"]["found"]


@pytest.mark.parametrize(
    ("arguments", "flag", "state"),
    [
        ("'--enable-shared'", "-fprofile-use", "note"),  # pyenv's
        ("'--enable-optimizations' '--with-lto'", "-fprofile-use", "ok"),
        ("'--prefix=/usr'", None, "ok"),  # Debian's, which runs the steps itself
        (None, None, "ok"),
    ],
)
def test_doctor_tells_an_interpreter_that_was_compiled_without_a_profile(monkeypatch, arguments, flag, state):
    monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": arguments, "PGO_PROF_USE_FLAG": flag}.get)
    signs = examine_machine()
    sign = (next(signs), next(signs))[1]
    assert (sign.what, sign.state, bool(sign.fix)) == ("python", state, state == "note")


def test_doctor_names_the_kernels_that_compute_here(monkeypatch, tmp_path):
    """The loops with their file; why not, where not: by choice, without a compiler, by a switch that says nothing."""
    found = {}
    native_library.cache_clear()
    for name, switch, path in (("own", "", ""), ("plain", "0", ""), ("bare", "1", str(tmp_path)), ("odd", "yes", "")):
        with monkeypatch.context() as patched:
            patched.setenv("RONDEL_CPU_KERNELS", switch)
            if path:
                native_library.cache_clear()
                patched.setenv("PATH", path)
                patched.delenv("CXX", raising=False)
            found[name], on_cpu = kernel_rows(on_gpu=False)
    native_library.cache_clear()
    assert on_cpu[1] == "ok" and on_cpu[2].startswith("no GPU")
    if chosen_library() is not None:
        assert "loops in C++" in found["own"][2] and Path(found["own"][2].split(" in ")[-1]).is_file()
    assert found["plain"][1:3] == ("ok", "torch's operations: RONDEL_CPU_KERNELS=0 in the environment")
    assert found["bare"][1] == "note" and "no C++ compiler is here" in found["bare"][2] and "g++" in found["bare"][3]
    assert found["odd"][1] == "broken" and found["odd"][3] == "unset RONDEL_CPU_KERNELS"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, gpu = kernel_rows(on_gpu=True)
    assert gpu == ("kernels on a GPU", "note", "no Triton: the plain code computes on a GPU", "pip install triton")


def test_doctor_names_one_fix_for_each_fault():
    from rondel.cli.doctor import _check_package

    old, missing = _check_package("pytest", (999, 0)), _check_package("no-such-package", (1, 2))
    assert old.state == missing.state == "broken"
    assert old.fix == "pip install 'pytest>=999.0'" and missing.fix == "pip install 'no-such-package>=1.2'"


def test_every_synonym_leads_to_a_key():
    from rondel.algos.table import GRPO

    tree = {**{name: field.annotation for name, field in Job.model_fields.items()}}
    for target in SYNONYMS.values():
        node: object = tree[target.partition(".")[0]]
        for name in target.split(".")[1:]:
            if hasattr(node, "model_fields") and name in node.model_fields:
                node = node.model_fields[name].annotation
            else:
                node = getattr(GRPO, target.split(".")[1], None)
                assert node is not None and hasattr(node, target.split(".")[-1]), target
                break


def test_what_a_recipe_names_lies_beside_it(tmp_path, monkeypatch):
    """Then in the current folder; a run's own copy of the recipe means the folder of the first."""
    home, here, run = (tmp_path / name for name in ("home", "here", "run"))
    for folder in (home, here, run):
        folder.mkdir()
        (folder / "rondel_both_have_it.py").write_text(f"where = {folder.name!r}")
        (folder / "both.jsonl").write_text("")
    (here / "only_here.jsonl").write_text("")
    (home / "run.toml").write_text(RECIPE)
    (run / "job.toml").write_text(RECIPE)
    (run / ORIGIN).write_text(str(home / "run.toml"))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for recipe in (home / "run.toml", run / "job.toml"):
        monkeypatch.delitem(sys.modules, "rondel_both_have_it", raising=False)
        assert Job.read(recipe).origin == str(home / "run.toml")
        assert import_attribute("reward", "rondel_both_have_it:where") == "home"
        assert (
            locate_path("both.jsonl") == home / "both.jsonl"
            and locate_path("only_here.jsonl") == here / "only_here.jsonl"
        )
        assert locate_path("nowhere") == Path("nowhere") and locate_path(str(run / "both.jsonl")) == run / "both.jsonl"
    monkeypatch.delitem(sys.modules, "rondel_both_have_it")


@pytest.mark.slow
def test_no_message_speaks_of_a_law_by_its_number():
    """The numbered list is docs/design.md, for developers; a user reads in words what was violated."""
    found = []
    for path in sorted(Path(cli.__file__).parents[1].rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\blaws? \d", text):
            continue
        tree = ast.parse(text)
        papers = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        texts = (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in papers
        )
        found += [f"{path.name}:{node.lineno}" for node in texts if re.search(r"\blaws? \d", node.value)]
    assert found == []


def test_python_m_rondel_is_rondel(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rondel", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("rondel", run_name="__main__")
    assert not end.value.code and "rondel doctor" in capsys.readouterr().out
