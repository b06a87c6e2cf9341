"""Small repository tasks, in our format and in those of others, and policies that work on them."""

from __future__ import annotations

import json
from pathlib import Path

from kits.chat import Engine, chat, tokenizer
from rondel.core.errors import SandboxError
from rondel.core.types import Task
from rondel.generate.envs.repository.env import RepositoryEnv
from rondel.generate.envs.rows import repository
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.probe import find_isolation

SUMS = "def add(x, y):\n    return x - y\n\n\ndef twice(x):\n    return 2 * x\n"
MENDED = SUMS.replace("x - y", "x + y")
TEST = "from sums import add, twice\n\n\ndef test_add():\n    assert add(5, 3) == 8\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
HIDDEN = "from sums import add\n\n\ndef test_more():\n    assert add(-1, 1) == 0\n"
PATCH = """--- a/sums.py
+++ b/sums.py
@@ -1,5 +1,5 @@
 def add(x, y):
-    return x - y
+    return x + y
 
 
 def twice(x):
"""
TOML = """
fail_to_pass = ["tests/test_sums.py::test_add", "tests/test_more.py::test_more"]
pass_to_pass = ["tests/test_sums.py::test_twice"]
visible = ["tests/test_sums.py"]
seconds = 30
"""


def has_walls() -> bool:
    try:
        find_isolation()
    except SandboxError:
        return False
    return True


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def sums_task(folder: Path, **changes: str) -> Path:
    """A task whose one line is wrong; `changes` are further files, or other texts of these."""
    files = {
        "task.toml": TOML,
        "statement.md": "add gives wrong sums. Mend it.",
        "repository/sums.py": SUMS,
        "repository/tests/test_sums.py": TEST,
        "hidden/tests/test_more.py": HIDDEN,
        "gold.patch": PATCH,
    }
    return write_files(folder, files | changes)


def the_task(path: Path, **settings: str) -> Task:
    """The first task of a path, as a run has it."""
    row = next(iter(repository(str(path), **settings)))
    return Task(f"{row.name}/1", "repository", row.fields)


def written_call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted_chat(*turns: str, **settings: object):
    """A conversation with a policy that says these turns. -> (chat, the engine it asks)"""
    tok = tokenizer()
    policy = Engine(*([*tok.encode(text, add_special_tokens=False), tok.eos_token_id] for text in turns))
    return chat(tok, policy, max_context=1 << 16, **settings), policy


def environment(**settings: object) -> RepositoryEnv:
    return RepositoryEnv(Sandbox(), **settings)


def read_by_policy(policy: Engine) -> str:
    """All that the last request held."""
    return tokenizer().decode(policy.requests[-1].tokens)
