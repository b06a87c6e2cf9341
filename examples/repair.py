"""A repository with a bug and a test that shows it: `env = "repair:Repair"`, `data = { kind =
"repair:bugs" }`. What the policy writes runs in a box without a network; the episode is worth 1
if the test passes in the end, as it was given.
"""

import asyncio
import json
from hashlib import blake2b

from rondel.core.errors import EnvError, SandboxError
from rondel.core.sandbox_types import Limits
from rondel.core.types import Score, Task, Trajectory
from rondel.generate.envs.tools import Tools
from rondel.runtime.sandbox.box import Sandbox
from rondel.score.code import Code

RUN = """import json, pathlib, runpy, sys
for name, text in json.load(sys.stdin).items():
    pathlib.Path(name).write_text(text)
sys.path.insert(0, ".")
runpy.run_path("test.py")
"""
BUGS = [
    ("x + y", "x - y", "f(5, 3) == 8"),
    ("max(x, y)", "min(x, y)", "f(5, 3) == 5"),
    ("x * y", "x ** y", "f(5, 3) == 15"),
    ("x % y", "x // y", "f(5, 3) == 2"),
]


def bugs(n=20):
    """The tasks: one line of main.py is wrong."""
    for i in range(n):
        right, wrong, claim = BUGS[i % len(BUGS)]
        files = {
            "main.py": f"def f(x, y):  # number {i}\n    return {wrong}\n",
            "test.py": f"from main import f\nassert {claim}, f(5, 3)\n",
        }
        yield {
            "prompt": f"The test of repository {i} fails. Mend main.py.",
            "files": files,
            "right": right,
            "answer": "",
        }


class Repository:
    def __init__(self, task):
        self._files = dict(task.data["files"])

    def read_file(self, name: str) -> str:
        """The text of main.py or test.py."""
        return self._files[name]

    def write_file(self, name: str, text: str) -> str:
        """Write main.py anew."""
        if name != "main.py":
            raise ValueError("only main.py may be written")
        self._files[name] = text
        return "written"

    def run_tests(self) -> str:
        """Run test.py."""
        try:
            cell = Sandbox().cell(Limits(wall=10, cpu=5))
        except SandboxError as error:
            raise EnvError(f"no box for the test: {error}") from error
        try:
            ran = cell.run(["python3", "-c", RUN], stdin=json.dumps(self._files).encode())
        finally:
            cell.kill()
        return "passed" if ran.ok else f"failed: {ran.ended}\n{ran.stderr.decode(errors='replace')[-500:]}"

    def folder_digest(self) -> str:
        """No tool: what an episode that a crash cut off must find again behind each command (chat.log_command)."""
        return blake2b(json.dumps(self._files, sort_keys=True).encode()).hexdigest()

    def _score(self) -> Score:
        """Not what run_tests says: there main.py and the test are one process, and main.py
        could say it. Here they have a box each.
        """
        judge = Code(sandbox=Sandbox(), packages=[])
        test = self._files["test.py"].replace("from main import", "from solution import")
        return judge(Trajectory(text=self._files["main.py"]), Task("repair", "repair", {"tests": [test]}))


class Repair:
    turns = 6

    async def run(self, task, chat):
        repository = Repository(task)
        trajectory = await Tools([repository], turns=self.turns).run(task, chat)
        trajectory.score = await asyncio.to_thread(repository._score)
        return trajectory
