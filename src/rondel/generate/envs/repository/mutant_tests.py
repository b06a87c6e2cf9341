"""What runs inside a box to try bugs: pytest is imported once, and each bug is tried in a fork of it.

stdin   {"root", "folder": the package, "args": of pytest, "options": those of every run,
         "mutants": [[path, first byte, last byte, text, line], ...], "seconds": of computing for one,
         "want": how many bugs that are found are enough, "most": failing tests}
stdout  {"outcomes": {test: outcome}, "found": [[number, {failing test: message}, [tests that pass], ...]]}

The first pass notes which test files call which functions, so that a bug is tried with those alone.
"""

import json
import os
import resource
import signal
import sys

import pytest

WALL = 10  # times the seconds of computing, after which one that waits is ended


class Watch:
    """What becomes of each test, and with `folder` which functions it calls."""

    def __init__(self, folder=None):
        self.folder, self.outcomes, self.messages, self.calls, self.seen = folder, {}, {}, {}, set()

    def pytest_runtest_logreport(self, report):
        before, now = self.outcomes.get(report.nodeid), report.outcome
        if now == "passed" and (before is not None or report.when != "call"):
            now = before
        elif now == "skipped" and hasattr(report, "wasxfail"):
            now = "xfailed"
        if now is not None and before != "failed":
            self.outcomes[report.nodeid] = now
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.messages[report.nodeid] = getattr(crash, "message", "").split("\n")[0][:300]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if self.folder is None:
            return (yield)
        self.seen = set()
        sys.settrace(self.note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            file = item.nodeid.partition("::")[0]
            for function in self.seen:
                self.calls.setdefault(function, set()).add(file)

    def note(self, frame, event, argument):
        """Of each call, and of no line in it."""
        code = frame.f_code
        if code.co_filename.startswith(self.folder):
            self.seen.add((code.co_filename, code.co_firstlineno))


def in_a_fork(work, seconds):
    """What `work()` returns, from a copy of this process; None where it takes too long or ends otherwise."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        signal.alarm(int(WALL * seconds))
        silent = os.open(os.devnull, os.O_RDWR)
        for own in (0, 1, 2):
            os.dup2(silent, own)
        try:
            with os.fdopen(writes, "w") as file:
                json.dump(work(), file)
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def session(args, watch):
    """One run of pytest. Modules of the repository are imported by it, and by nothing before."""
    pytest.main([*args, "-q", "-p", "no:cacheprovider"], plugins=[watch])


def first_pass(root, folder, args):
    def work():
        watch = Watch(os.path.join(root, folder))
        session(args, watch)
        calls = [[os.path.relpath(file, root), line, sorted(tests)] for (file, line), tests in watch.calls.items()]
        return [watch.outcomes, calls]

    return work


def trial(args, files):
    def work():
        watch = Watch()
        session([*args, *files], watch)
        return [watch.outcomes, watch.messages]

    return work


def main():
    asked = json.load(sys.stdin)
    root = asked["root"]
    os.chdir(root)
    sys.path.insert(0, root)
    limit = asked["seconds"]
    traced = in_a_fork(first_pass(root, asked["folder"], asked["args"]), 20 * limit)
    plain = in_a_fork(trial(asked["args"], []), 20 * limit)
    if traced is None or plain is None:
        print(json.dumps({"error": "its tests do not end"}))
        return
    (outcomes, calls), (again, _) = traced, plain
    good = {name for name, end in outcomes.items() if end == "passed" == again.get(name)}
    files_of = {(file, line): tests for file, line, tests in calls}
    found, tried, functions = [], 0, set()
    for number, (path, first, last, text, line) in enumerate(asked["mutants"]):
        files = files_of.get((path, line), [])
        if not files or (path, line) in functions or len(files) > asked["files"]:
            continue
        with open(path, "rb") as file:
            whole = file.read()
        with open(path, "wb") as file:
            file.write(whole[:first] + text.encode() + whole[last:])
        tried += 1
        ended = in_a_fork(trial(asked["options"], files), limit)
        with open(path, "wb") as file:
            file.write(whole)
        if ended is None:
            continue
        known = {name for name in good if name.partition("::")[0] in files}
        failed = sorted(name for name in known if ended[0].get(name) != "passed")
        if failed and len(failed) <= max(3, asked["share"] * len(known)) and set(failed) <= set(ended[0]):
            functions.add((path, line))
            passing = sorted(known - set(failed))
            found.append([number, {name: ended[1].get(name, "") for name in failed}, passing])
            if len(found) >= asked["want"]:
                break
    print(json.dumps({"tests": len(good), "tried": tried, "found": found}))


if __name__ == "__main__":
    main()
