"""Task folders of Harbor and of terminal-bench, unmodified.

harbor          task.toml, instruction.md, environment/Dockerfile, tests/test.sh, solution/solve.sh; the tests write a
                number to /logs/verifier/reward.txt, or numbers to reward.json
terminal-bench  task.yaml, Dockerfile, run-tests.sh (or pytest of tests/test_outputs.py), tests/, solution.sh; the exit
                code of the tests decides

The policy works in the image's WORKDIR, which has what the Dockerfile copies there. What else an image would be made
with (RUN, ADD) is in boxes of that image alone, and refused in others. `tests/` comes to /tests when it is graded.
"""

from __future__ import annotations

import posixpath
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any

from rondel.core.errors import DataError
from rondel.core.repository_files import RepositoryFile, Tree
from rondel.generate.envs.repository.task import RepositoryTask, TaskSettings, text_of
from rondel.generate.envs.repository.tree import subtree

APP = "/app"  # where neither image nor settings say
REWARD = "/logs/verifier"
IDLE = ("FROM", "WORKDIR", "COPY", "ENV", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "USER", "ARG", "SHELL", "STOPSIGNAL")
PROTECTED = ["tests/*"]


def read_harbor(tree: Mapping[str, RepositoryFile], where: str, name: str) -> RepositoryTask:
    """The task of a folder of Harbor. Its verifier decides, as a number."""
    try:
        told = tomllib.loads(text_of(tree, "task.toml", where))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{where}/task.toml: not TOML ({error})") from error
    if "steps/" in {f"{path.partition('/')[0]}/" for path in tree}:
        raise DataError(f"{where}: a task of several steps (steps/) is not read: give each step a folder of its own")
    if "tests/test.sh" not in tree:
        raise DataError(f"{where}: no tests/test.sh, which writes the reward")
    image = _Image(subtree(tree, "environment"), where)
    hidden = {f"/tests/{path}": file for path, file in subtree(tree, "tests").items()}
    solution = subtree(tree, "solution")
    settings = TaskSettings(
        test=f"mkdir -p {REWARD} /logs/agent && bash /tests/test.sh; "
        f"test -f {REWARD}/reward.txt || cp {REWARD}/reward.json {REWARD}/reward.txt",
        report="reward",
        reward_file=f"{REWARD}/reward.txt",
        protected=[],
        seconds=float(_table(told, "verifier").get("timeout_sec", 600.0)),
        workdir=str(_table(told, "environment").get("workdir") or image.workdir),
        places=["/logs", "/tests", "/solution", *image.places],
        env={**image.env, **{key: str(value) for key, value in _table(told, "verifier").get("env", {}).items()}},
        origin={"format": "harbor", "version": str(told.get("schema_version", told.get("version", "")))},
    )
    solve = (solution, "bash /solution/solve.sh") if "solve.sh" in solution else None
    statement = text_of(tree, "instruction.md", where).strip()
    return RepositoryTask(name, statement, image.files, settings, hidden, solve=solve, unmet=image.unmet)


def read_terminal_bench(tree: Mapping[str, RepositoryFile], where: str, name: str) -> RepositoryTask:
    """The task of a folder of terminal-bench. All of its tests must pass."""
    told = _read_yaml(text_of(tree, "task.yaml", where), where)
    if not isinstance(told.get("instruction"), str):
        raise DataError(f"{where}/task.yaml: no 'instruction'; it is what the policy reads")
    image = _Image({path: file for path, file in tree.items() if not path.startswith("tests/")}, where)
    hidden = {f"/tests/{path}": file for path, file in subtree(tree, "tests").items()}
    if "run-tests.sh" in tree:
        hidden["/tests/run-tests.sh"] = tree["run-tests.sh"]
    elif "/tests/test_outputs.py" not in hidden:
        raise DataError(f"{where}: neither run-tests.sh nor tests/test_outputs.py: one of them tests the task")
    test = "bash /tests/run-tests.sh" if "run-tests.sh" in tree else "python3 -m pytest /tests/test_outputs.py -rA"
    settings = TaskSettings(
        test=test,
        report="exit",
        protected=[],
        seconds=float(told.get("max_test_timeout_sec", 180.0)),
        workdir=image.workdir,
        places=["/tests", "/oracle", "/logs", *image.places],
        env={**image.env, "TEST_DIR": "/tests"},
        origin={"format": "terminal_bench", "difficulty": str(told.get("difficulty", ""))},
    )
    solution = {"solution.sh": tree["solution.sh"]} if "solution.sh" in tree else {}
    solve = (solution, "bash /oracle/solution.sh") if solution else None
    return RepositoryTask(
        name, told["instruction"].strip(), image.files, settings, hidden, solve=solve, unmet=image.unmet
    )


class _Image:
    """What a Dockerfile says of the files: where work is done, what is copied there, and what a box has not.

    workdir  of the last WORKDIR
    files    those below it, by their paths from there
    places   folders of others that were copied
    """

    def __init__(self, context: Tree, where: str) -> None:
        self.workdir, self.files, self.env = APP, Tree(), dict[str, str]()
        self.places: list[str] = []
        unmet: list[str] = []
        copied: Tree = {}
        for number, line in _instructions(context.get("Dockerfile", RepositoryFile()).data.decode(errors="replace")):
            word, _, rest = line.partition(" ")
            word, rest = word.upper(), rest.strip()
            if word == "WORKDIR":
                self.workdir = posixpath.normpath(posixpath.join(self.workdir, rest))
            elif word == "COPY" and "--from" not in rest:
                copied |= self._copied(context, rest, f"{where}: Dockerfile:{number}")
            elif word == "ENV":
                self.env |= dict(part.split("=", 1) for part in shlex.split(rest) if "=" in part)
            elif word not in IDLE or word == "COPY":
                unmet.append(line)
        self.files = {
            path[len(self.workdir) + 1 :]: f for path, f in copied.items() if path.startswith(f"{self.workdir}/")
        }
        if outside := [path for path in copied if not path.startswith(f"{self.workdir}/")]:
            unmet += [f"COPY ... {path}" for path in outside]
        self.unmet = tuple(unmet)

    def _copied(self, context: Tree, rest: str, where: str) -> Tree:
        words = [word for word in shlex.split(rest) if not word.startswith("--")]
        if len(words) < 2:
            raise DataError(f"{where}: COPY {rest}: it has a source and a target")
        target = posixpath.normpath(posixpath.join(self.workdir, words[-1]))
        many = words[-1].endswith("/") or words[-1] in (".", "./") or len(words) > 2
        found: Tree = {}
        for source in words[:-1]:
            source = posixpath.normpath(source.lstrip("/"))
            inside = {
                p: f for p, f in (context if source == "." else subtree(context, source)).items() if p != "Dockerfile"
            }
            if source in context:
                found[posixpath.join(target, posixpath.basename(source)) if many else target] = context[source]
            elif inside:
                found |= {posixpath.join(target, path): file for path, file in inside.items()}
            else:
                raise DataError(f"{where}: COPY {source}: there is no such file beside the Dockerfile")
        return found


def _instructions(text: str) -> list[tuple[int, str]]:
    """(line, instruction), continued lines joined, comments left out."""
    found, whole, first = list[tuple[int, str]](), "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or whole):
            continue
        first = first if whole else number
        whole += line.rstrip().removesuffix("\\").strip() + " "
        if not line.rstrip().endswith("\\"):
            found.append((first, whole.strip()))
            whole = ""
    return found


def _table(told: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = told.get(key, {})
    return found if isinstance(found, dict) else {}


def _read_yaml(text: str, where: str) -> dict[str, Any]:
    import yaml

    try:
        told = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"{where}/task.yaml: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(told, dict):
        raise DataError(f"{where}/task.yaml: a {type(told).__name__}; it is a table of settings")
    return told
