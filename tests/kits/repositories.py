"""Small repository tasks, in our format and in those of others, and policies that work on them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kits.chat import Engine, chat, tokenizer
from rondel.core.errors import SandboxError
from rondel.core.repository_files import RepositoryFile
from rondel.core.types import Task
from rondel.generate.envs.repository.env import RepositoryEnv
from rondel.generate.envs.repository.unified_diff import write_diff
from rondel.generate.envs.rows import repository
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.cell import OWN
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
    """Whether boxes can be had here that show this Python: each has a /tmp of its own."""
    if any(f"{Path(sys.prefix).resolve()}/".startswith(f"{place}/") for place in OWN):
        return False
    try:
        find_isolation()
    except SandboxError:
        return False
    return True


needs_walls = pytest.mark.skipif(
    not has_walls(), reason="nothing would contain the code, or this Python lies where a box has memory of its own"
)


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
    if "agent" in settings:
        from rondel.generate.envs.gateway.env import Gateway  # needs starlette

        settings["gateway"] = Gateway(None, timeout=120)
    return RepositoryEnv(Sandbox(), **settings)


def read_by_policy(policy: Engine) -> str:
    """All that the last request held."""
    return tokenizer().decode(policy.requests[-1].tokens)


HARBOR = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n[environment]\ncpus = 1\n',
    "instruction.md": "Write the word done into /app/out.txt.\n",
    "environment/Dockerfile": "FROM python:3.11-slim\n# the work\nWORKDIR /app\nCOPY data.txt ./\n",
    "environment/data.txt": "1\n2\n",
    "tests/test.sh": "#!/bin/bash\nif grep -qx done /app/out.txt && grep -q 2 data.txt; then\n  echo 1 > /logs/verifier/reward.txt\n"
    "else\n  echo 0 > /logs/verifier/reward.txt\nfi\n",
    "solution/solve.sh": "#!/bin/bash\necho done > /app/out.txt\n",
}
TERMINAL_BENCH = {
    "task.yaml": "instruction: |-\n  Write the word done into out.txt.\ndifficulty: easy\nparser_name: pytest\nmax_test_timeout_sec: 60\n",
    "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620\nWORKDIR /app\n",
    "run-tests.sh": "#!/bin/bash\npython3 -m pytest -q $TEST_DIR/test_outputs.py\n",
    "tests/test_outputs.py": "from pathlib import Path\n\n\ndef test_out():\n    assert Path('/app/out.txt').read_text().strip() == 'done'\n",
    "solution.sh": "#!/bin/bash\necho done > out.txt\n",
}


def swebench_row(**changes):
    row = {
        "instance_id": "me__sums-1",
        "repo": "me/sums",
        "base_commit": "0123456789abcdef",
        "problem_statement": "add gives wrong sums",
        "patch": PATCH,
        "test_patch": write_diff({}, {"tests/test_more.py": RepositoryFile(HIDDEN.encode())}),
        "FAIL_TO_PASS": '["tests/test_more.py::test_more"]',
        "PASS_TO_PASS": ["tests/test_sums.py::test_twice"],
        "hints_text": "",
    }
    return row | changes


def swebench_rows(folder, **changes):
    write_files(folder / "checkouts" / "me__sums-1", {"sums.py": SUMS, "tests/test_sums.py": TEST})
    (folder / "rows.jsonl").write_text(json.dumps(swebench_row(**changes)) + "\n")
    return folder / "rows.jsonl", str(folder / "checkouts")
