"""The import rule of docs/design.md: down, never sideways between stages, never in a
circle; and who must start without torch.

core system text  ->  algos formats planner importing  ->  models, the strangers  ->  loop driver checks
                  simulate pipeline training_api assemble  ->  cli dashboard
0                     1                           2                          3                                      4
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "rondel"
LAYERS = (
    {"core", "system", "text"},
    {"algos", "formats", "planner", "importing"},
    {"models", "generate", "score", "filter", "train", "sync", "runtime", "buffer"},
    {"loop", "driver", "checks", "simulate", "pipeline", "training_api", "assemble"},
    {"cli", "dashboard"},
    {"__main__"},
)
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}
SIDEWAYS = {("generate.engine", "models"), ("train", "models")}  # all exceptions
DEEPEST = 9
TORCH_FREE = (
    "rondel",
    "core",
    "system",
    "text",
    "algos",
    "planner",
    "importing",
    "assemble.rows",
    "generate.envs",
    "score",
    "filter",
    "buffer",
    "loop",
    "simulate",
    "pipeline",
    "runtime.journal",
)
FOREIGN = ("vllm", "sglang", "megatron", "ray")  # each in one file at most

MODULES = {
    ".".join(("rondel", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SRC.rglob("*.py"))
}


@cache
def all_imports(name: str) -> list[tuple[str, int, bool]]:
    """Each import of `name`: what, its line, and whether it is for the type checker only."""
    found: list[tuple[str, int, bool]] = []

    def walk(node: ast.AST, typing: bool) -> None:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{MODULES[name]}:{node.lineno}: a relative import; write it from rondel down"
            found.extend((f"{node.module}.{alias.name}", node.lineno, typing) for alias in node.names)
        elif isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, typing) for alias in node.names)
        elif isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):  # no expression holds one
            typing = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            for child in ast.iter_child_nodes(node):
                walk(child, typing)

    walk(ast.parse(MODULES[name].read_text(encoding="utf-8")), False)
    return found


def imports(name: str, typed: bool = False) -> dict[str, int]:
    """What `name` imports, each with a line: imports inside functions count, those for the type checker only if `typed`."""
    found: dict[str, int] = {}
    for target, line, typing in all_imports(name):
        if typed or not typing:
            found.setdefault(target, line)
    return found


def ours(name: str, typed: bool = False) -> dict[str, int]:
    """The modules of this house among them: `rondel.core.types.Task` is rondel.core.types."""
    found: dict[str, int] = {}
    for target, line in imports(name, typed).items():
        while target and target not in MODULES:
            target = target.rpartition(".")[0]
        if target not in ("", "rondel", name):
            found.setdefault(target, line)
    return found


@cache
def graph() -> dict[str, dict[str, int]]:
    """Not made where the tests are collected: every worker would read all of the source."""
    return {name: ours(name) for name in MODULES}


def part(module: str, depth: int = 1) -> str:
    """rondel.generate.engine.builtin.pages -> generate, or with depth 2 generate.engine."""
    return ".".join(module.split(".")[1 : 1 + depth])


def fault(importer: str, target: str) -> str:
    """Why this import is against the rule, or nothing."""
    mine, theirs = part(importer), part(target)
    if mine == theirs:
        return (
            "engine and envs are strangers"
            if {part(importer, 2), part(target, 2)} == {"generate.engine", "generate.envs"}
            else ""
        )
    if {(mine, theirs), (part(importer, 2), theirs)} & SIDEWAYS:
        return ""
    return (
        "up" if LAYER[theirs] > LAYER[mine] else "between strangers" if LAYER[theirs] == LAYER[mine] in (1, 2) else ""
    )


def test_every_room_has_a_layer():
    assert {part(name) for name in MODULES if name != "rondel"} <= LAYER.keys()


def test_imports_go_down_and_never_between_strangers():
    edges = [(name, target, line) for name in MODULES if name != "rondel" for target, line in graph()[name].items()]
    assert [f"{MODULES[a]}:{line}: {a} -> {b}: {why}" for a, b, line in edges if (why := fault(a, b))] == []


def test_no_circle_and_no_long_chain():
    try:
        order = list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")
    chain: dict[str, list[str]] = {}
    for name in order:
        chain[name] = [name, *max((chain[target] for target in graph()[name]), key=len, default=[])]
    deepest = max((chain[name] for name in order if name != "rondel"), key=len)
    assert len(deepest) <= DEEPEST, f"{len(deepest)} deep: {' > '.join(deepest)}"


def test_no_circle_of_types():
    try:
        TopologicalSorter({name: ours(name, typed=True) for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"modules name each other's types: {' -> '.join(error.args[1])}")


def test_a_foreign_engine_or_trainer_is_imported_in_one_file():
    for package in FOREIGN:
        users = [name for name in MODULES if any(target.split(".")[0] == package for target in imports(name))]
        assert len(users) <= 1, f"{package} is imported by {', '.join(users)}"


def starts_without_torch(code: str, *words: str) -> None:
    child = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr[-2000:]


IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""
ASK_FOR_HELP = """
import sys
from rondel.cli import main
try:
    main(["--help"])
finally:
    if "torch" in sys.modules:
        sys.exit("rondel --help imports torch")
"""


DO = """
import sys
from rondel.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split("|"))
    except SystemExit as end:
        assert not end.code, line
    if "torch" in sys.modules:
        sys.exit(f"rondel {line} imports torch")
"""


def test_verbs_of_a_laptop_work_without_torch():
    """Not their help alone: the whole answer, the formula of a loss included."""
    recipe, theirs = (
        str(SRC.parent.parent / "recipes" / "tiny.toml"),
        "x.py --model_name_or_path a --loss_type dapo --num_generations 8",
    )
    starts_without_torch(
        DO, f"explain|{recipe}", f"import|--from|trl|{theirs}", f"plan|{recipe}", f"simulate|{recipe}|--steps|2"
    )


def test_what_starts_without_torch():
    """In a process of its own, by sys.modules; the first module that brings torch is named."""
    free = [name for name in MODULES if {name, part(name), part(name, 2)} & {*TORCH_FREE}]
    starts_without_torch(IMPORT_EACH, *free)
    starts_without_torch(ASK_FOR_HELP)


def test_no_module_has_the_name_of_a_verb():
    """`from rondel.assemble import again` would be whichever was imported last."""
    import rondel.assemble

    assert not [verb for verb in rondel.assemble.VERBS if f"rondel.assemble.{verb}" in MODULES]
