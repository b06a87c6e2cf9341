"""The sandbox that a recipe names: its settings, who gets it, and boxes of services, whose interfaces stand-ins speak."""

from __future__ import annotations

import base64
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from kits.runs import tiny
from rondel.assemble.components import env_of
from rondel.cli.sandbox import clean
from rondel.core.config.sandbox import SANDBOX_TABLES
from rondel.core.errors import BoxError, ConfigError, SandboxError
from rondel.core.sandbox_types import BoxUsage, CommandResult, Limits
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.generate.envs.python import python_tool
from rondel.generate.envs.sources import TaskSet
from rondel.runtime.sandbox import image_build, leftovers, oci_runtime, providers, relay, remote_box
from rondel.runtime.sandbox.box import SUBSTRATES, Sandbox
from rondel.runtime.sandbox.image_store import root_of
from rondel.runtime.sandbox.recipe import describe, sandbox_of
from rondel.runtime.sandbox.snapshot import snapshot
from rondel.runtime.sandbox.warm_pool import WaitingBoxes
from rondel.runtime.telemetry.card import box_rows
from rondel.runtime.telemetry.metrics import add_boxes
from rondel.score import build_reward, code_sandboxes
from rondel.score.code import Code

# -- settings ----------------------------------------------------------------------------------------


def test_a_substrate_is_named_with_its_settings():
    assert SANDBOX_TABLES.keys() == SUBSTRATES.keys()
    made = sandbox_of({"kind": "container", "image": "images/x", "tool": "crun", "memory": 1 << 28, "warm": 3})
    assert (made.kind, made.limits) == ("container", {"memory": 1 << 28, "network": False})
    assert made.settings == {"image": "images/x", "tool": "crun"} and not made.shows_host
    assert sandbox_of("process").shows_host and sandbox_of("bubblewrap").kind == "bubblewrap"
    seen = []
    made = Sandbox("process", limits={"memory": 1 << 28})
    made._start = lambda limits, settings: seen.append(limits)
    made.cell(Limits(wall=7.0))
    assert (seen[0].wall, seen[0].memory) == (7.0, 1 << 28), "a recipe's limit replaces the tool's, others stay"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("contaner", "sandbox.kind = 'contaner'.*Did you mean 'container'"),
        ({"kind": "container", "memry": 1}, "unknown key 'sandbox.memry'. Did you mean 'memory'"),
        ({"kind": "process", "image": "x"}, "unknown key 'sandbox.image'"),
        ({"kind": "process", "memory": 5}, "sandbox.memory = 5"),
        ({"kind": "gvisor"}, "'sandbox.image' is missing"),
        ({"kind": "http", "provider": "aws"}, "sandbox.provider = 'aws'"),
        (3, "sandbox = 3; it is a kind"),
    ],
)
def test_a_setting_that_there_is_not(spec, said):
    with pytest.raises(ConfigError, match=said):
        sandbox_of(spec)


def test_what_is_missing_is_said_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("E2B_API_KEY", "DAYTONA_API_KEY", "KUBERNETES_TOKEN", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    folder = {"kind": "container", "image": str(tmp_path)}
    for spec, said in (
        (folder, "needs crun or runc or docker or podman, and none is on the PATH: apt install crun"),
        ({"kind": "container", "tool": "podman"}, "needs podman, and none is on the PATH: apt install podman"),
        ({"kind": "gvisor", "image": str(tmp_path)}, "needs runsc, which is not on the PATH"),
        ({"kind": "microvm", "kernel": "k", "root": "r"}, "needs firecracker"),
        ({"kind": "http", "provider": "modal"}, "Modal has no public HTTP interface"),
        ({"kind": "http", "provider": "e2b"}, "set the environment variable E2B_API_KEY"),
        ({"kind": "http", "provider": "kubernetes"}, "set url to the address of the API server"),
    ):
        with pytest.raises(SandboxError, match=said):
            describe(sandbox_of(spec))
    with pytest.raises(SandboxError, match="is no folder, and without docker or podman nothing fetches one"):
        root_of(str(tmp_path / "none"))


def test_a_tool_a_reward_and_an_environment_get_the_recipes_sandbox(tmp_path, monkeypatch):
    spec = {"kind": "http", "provider": "e2b"}
    lent = {"sandbox": lambda *given: ("made", *given), "deadline": lambda: 9.0}

    def mine(trajectory, task, sandbox=None):
        return float(sandbox == ("made", spec))

    monkeypatch.setitem(sys.modules, "my_reward", type(sys)("my_reward"))
    sys.modules["my_reward"].mine = mine
    assert build_reward({"kind": "my_reward:mine", "sandbox": spec}, lent)(None, None) == 1.0
    assert build_reward("my_reward:mine", lent)(None, None) == 0.0
    parts = {"a": {"kind": "code", "sandbox": spec}, "b": "code", "c": "number"}
    assert code_sandboxes({"kind": "combine", "parts": parts}) == [spec, "process"]

    class World:
        def __init__(self, sandbox):
            self.sandbox = sandbox

        async def run(self, task, chat): ...

    sys.modules["my_reward"].World = World
    job = tiny(tmp_path, task__env={"kind": "my_reward:World", "sandbox": {"kind": "bubblewrap", "warm": 2}})
    assert env_of(job, TaskSet([], [])).sandbox.kind == "bubblewrap"
    job = tiny(tmp_path, task__env={"kind": "tools", "tools": ["calculator"], "sandbox": "bubblewrap"})
    with pytest.raises(ConfigError, match=r'task\.env\.sandbox is for the tool "python"'):
        env_of(job, TaskSet([], []))
    job = tiny(tmp_path, task__env={"kind": "tools", "tools": ["python"], "sandbox": {"kind": "gvisor"}})
    with pytest.raises(ConfigError, match=r"'task\.env\.sandbox\.image' is missing"):
        env_of(job, TaskSet([], []))


# -- boxes that wait ---------------------------------------------------------------------------------


class FakeBox:
    def __init__(self, limits, settings):
        self.limits, self.alive = limits, True

    def kill(self):
        self.alive = False

    interrupt = kill


def test_boxes_that_wait_are_used_once_and_end_with_their_pool():
    made, ready = [], threading.Semaphore(0)

    def start(limits, settings):
        made.append(FakeBox(limits, settings))
        ready.release()
        return made[-1]

    pool = WaitingBoxes(start, 2)
    taken = [pool.take(Limits(), {})]
    for _ in range(3):  # the two that wait, and the first that was taken
        assert ready.acquire(timeout=10)
    taken += [pool.take(Limits(), {}) for _ in range(3)]
    assert len({id(box) for box in taken}) == 4, "none is used twice"
    other = pool.take(Limits(memory=1 << 30), {})
    assert other.limits.memory == 1 << 30, "one of other limits is another box"
    assert pool.take(Limits(), {"folder": "/x"}) not in taken
    pool.close()
    while sum(box.alive for box in made) > len(taken) + 2:
        assert ready.acquire(timeout=10)
    assert all(box.alive for box in (*taken, other)), "what was taken is not the pool's"


# -- services ----------------------------------------------------------------------------------------


class Service(BaseHTTPRequestHandler):
    """Boxes are commands of this machine; the three interfaces as their documentation has them."""

    boxes: ClassVar[dict[str, str]] = {}
    asked: ClassVar[list[tuple[str, str, dict[str, str]]]] = []
    flaky = 0

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        type(self).asked.append((self.command, self.path, dict(self.headers)))
        path = self.path.partition("?")[0]
        if self.command == "DELETE" and type(self).flaky:
            type(self).flaky -= 1
            return self.answer(503, {"message": "later"})
        if path.endswith("/process.Process/Start"):
            process = json.loads(body[5:])["process"]
            done = subprocess.run([process["cmd"], *process["args"]], capture_output=True)
            events = [
                {"event": {"start": {"pid": 1}}},
                {"event": {"data": {"stdout": base64.b64encode(done.stdout).decode()}}},
                {"event": {"end": {"exitCode": done.returncode, "exited": True}}},
            ]
            framed = b"".join(struct.pack(">BI", 0, len(m)) + m for m in (json.dumps(e).encode() for e in events))
            return self.answer(200, framed + struct.pack(">BI", 2, 2) + b"{}")
        if path.endswith("/process/execute") or path.endswith("/proxy/"):
            command = json.loads(body)["command"] if body else "true"
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
            return self.answer(200, {"exitCode": done.returncode, "code": done.returncode, "result": done.stdout})
        name = f"box{len(type(self).boxes)}"
        if self.command == "POST":
            type(self).boxes[name] = body.decode()
            full = {
                "sandboxID": name,
                "envdAccessToken": "t",
                "id": name,
                "state": "creating",
                "metadata": {"name": name},
            }
            return self.answer(201, full)
        if self.command == "DELETE":
            found = type(self).boxes.pop(path.rpartition("/")[2], None)
            return self.answer(200 if found else 404, {})
        if "/pods" in path:
            pods = [{"metadata": {"name": f"pod-{name}"}, "status": {"phase": "Running"}}]
            return self.answer(200, {"items": pods})
        return self.answer(200, {"id": path.rpartition("/")[2], "state": "started"})

    do_GET = do_POST = do_DELETE = handle_any

    def answer(self, code, value):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def service(monkeypatch, tmp_path):
    Service.boxes, Service.asked, Service.flaky = {}, [], 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    python = Path(sys.executable).resolve().parent  # else `python3` may be a script of pyenv's that looks for one
    monkeypatch.setenv("PATH", f"{python}{os.pathsep}{os.environ['PATH']}")
    for name in ("E2B_API_KEY", "DAYTONA_API_KEY", "KUBERNETES_TOKEN"):
        monkeypatch.setenv(name, "the-key")
    monkeypatch.setattr(providers.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(relay, "PLACE", str(tmp_path / "left-relay"))
    monkeypatch.setattr(remote_box, "WORDS", str(tmp_path / "left-words"))
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    for line in Path("/proc").glob("[0-9]*/cmdline"):  # boxes are deleted with what runs in them
        with suppress(OSError):
            if str(tmp_path / "left-relay").encode() in line.read_bytes():
                os.kill(int(line.parent.name), signal.SIGKILL)


class BoxOfThisMachine:
    def run(self, argv, *, stdin=b"", env=None, wall=None):
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=wall)
        return CommandResult(max(done.returncode, 0), 0, done.stdout, done.stderr, "", 0.0)

    def kill(self): ...


@pytest.mark.slow
def test_a_program_that_ends_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "PLACE", str(tmp_path / "left-relay"))
    (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
    program = relay.RelayedProgram(BoxOfThisMachine(), "print(int(input()) + 1)", read_in, write_out, write_out)
    os.write(write_in, b"41\n")
    os.close(write_in)
    assert program.finish(30).exit == 0 and os.read(read_out, 100) == b"42\n"
    assert program._thread.is_alive() is False and list(tmp_path.iterdir()) == []
    for fd in (read_in, read_out, write_out):
        os.close(fd)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["e2b", "daytona", "kubernetes"])
def test_a_box_of_a_service(provider, service, tmp_path):
    Service.flaky = 2  # what may pass by is asked for again
    made = sandbox_of({"kind": "http", "provider": provider, "url": service, "image": "mine"})
    box = made.cell(Limits(wall=20, output=1000))
    (told,) = Service.boxes.values()
    assert "mine" in told and leftovers.left_boxes() == []
    if provider == "kubernetes":
        pod = json.loads(told)["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    ran = box.run(["sh", "-c", "cat; echo e >&2; exit 4"], stdin=b"\x00\xffin")
    assert (ran.exit, ran.stdout, ran.stderr) == (4, b"\x00\xffin", b"e\n")
    big = os.urandom(90_000)
    box.write(str(tmp_path / "file"), big)
    assert (tmp_path / "file").read_bytes() == big, "more than a shell line can have"
    assert box.run(["sh", "-c", "kill -9 $$"]).signal == 9 and box.run(["sleep", "60"], wall=0.3).limit == "wall"
    assert box.run(["sh", "-c", "head -c 5000 /dev/zero"]).limit == "output" and box.run(["no-such"]).exit == 127
    tool = python_tool(lambda: made)(Task("t", "tools", {}))
    assert tool.python("x = 6") == "" and tool.python("x * 7") == "42\n", "and it can be talked to"
    assert tool.box_usage().keys() == {"box_seconds"}, "nobody counts more"
    (door,) = tmp_path.glob("left-*")
    assert door.is_socket(), "programs and long commands have removed their files"
    tool._release_interpreter(tool._open)
    box.kill()
    box.kill()
    assert Service.boxes == {} and not list((tmp_path / "state").rglob("*.jsonl"))
    with pytest.raises(BoxError, match="has ended"):
        box.run(["true"])
    assert all("the-key" not in path for _, path, _ in Service.asked)


@pytest.mark.slow
def test_a_command_is_never_sent_twice(service, monkeypatch):
    client = providers.HttpClient("x", "http://127.0.0.1:1", {})
    pauses = []
    client.pause = pauses.append
    with pytest.raises(SandboxError, match="refused"):
        client.request("POST", "/run", {}, again=False)
    assert pauses == []
    with pytest.raises(SandboxError, match="refused"):
        client.request("GET", "/")
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


LEAVES = """
import os, sys
from rondel.core.sandbox_types import Limits
from rondel.runtime.sandbox.recipe import sandbox_of
box = sandbox_of({"kind": "http", "provider": "daytona", "url": sys.argv[1]}).cell(Limits())
print(box.name, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_what_a_killed_run_left_is_ended_by_the_next(service, tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVES, service], capture_output=True, text=True)
    assert done.returncode == -9 and list(Service.boxes) == [done.stdout.strip()], done.stderr
    ((path, row),) = leftovers.left_boxes()
    assert row["name"] == done.stdout.strip() and "the-key" not in path.read_text()
    box = sandbox_of({"kind": "http", "provider": "daytona", "url": service}).cell(Limits())
    assert list(Service.boxes) == [box.name] and leftovers.left_boxes() == [] and not path.exists()
    box.kill()


FILES = """
import os, pathlib, socket, sys, tempfile
from rondel.runtime.sandbox import machine, oci_runtime, relay, snapshot
home, relay.PLACE = pathlib.Path(tempfile.gettempdir()), sys.argv[1]
(home / "base").mkdir()
copy = snapshot.box_copy(home / "base")
bundle = tempfile.mkdtemp(prefix=f"{oci_runtime.BUNDLES}{os.getpid()}-")
(home / f"{machine.CONFIGS}{os.getpid()}-x.json").write_text("{}")
door = socket.socket(socket.AF_UNIX)
door.bind(f"{relay.PLACE}-{os.getpid()}")
door.listen()
pathlib.Path(f"{relay.PLACE}-{os.getpid()}.py").write_text("print()")
print("here", flush=True)
sys.stdin.read()
"""


def test_clean_removes_files_of_killed_runs_and_of_no_living_one(tmp_path, monkeypatch, capsys):
    """One is killed, one goes on: bundles, copies, settings of machines and relays of the first go."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(relay, "PLACE", str(tmp_path / ".relay"))
    monkeypatch.setattr(oci_runtime, "SECONDS_OF_BUNDLE", -1)
    runs = []
    for _ in range(2):
        command = [sys.executable, "-c", FILES, relay.PLACE]
        runs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert runs[-1].stdout.readline() == "here\n"
        (tmp_path / "base").rmdir()
    (tmp_path / "rondel-machine-of-nobody.json").write_text("{}")

    def files_of(pid: int) -> list[str]:
        return sorted(str(path) for path in tmp_path.rglob(f"*{pid}*"))

    before = [files_of(run.pid) for run in runs]
    assert [len(files) for files in before] == [5, 5]
    runs[0].kill()
    runs[0].wait()
    for told in ("5 temporary files and folders removed", "0 temporary files and folders removed"):
        clean()
        assert told in capsys.readouterr().out
        assert [files_of(run.pid) for run in runs] == [[], before[1]]
    assert (tmp_path / "rondel-machine-of-nobody.json").exists()
    runs[1].communicate("")


@pytest.mark.slow
def test_the_code_reward_in_boxes_of_a_service(service):
    made = sandbox_of({"kind": "http", "provider": "e2b", "url": service})
    judge = Code(sandbox=made, packages=[], seconds=60.0, deadline=300.0)
    task = Task("t", "x", {"tests": ["assert f(2) == 4", {"input": "3\n", "output": "9\n"}]})
    good = "def f(x): return x * x\nif __name__ == '__main__': print(f(int(input())))"
    assert judge(Trajectory(text=good), task) == Score(1.0, {"passed": 1.0})
    task = Task("t", "x", {"tests": task.data["tests"][1:]})
    assert judge(Trajectory(text="print(5)"), task) == Score(0.0, {"passed": 0.0})


# -- images, snapshots -------------------------------------------------------------------------------


@pytest.fixture(params=["", "without tarfile's filters"])
def unpacked(request, monkeypatch, tmp_path):
    """As Python 3.11.3 and older unpack, too."""
    if request.param:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_equal_files_make_an_equal_image_and_it_is_unpacked_once(unpacked, tmp_path):

    def members(turn):
        found = {
            "usr/bin/x": (image_build.plain_entry("usr/bin/x", b"0", 0o755, size=2), b"hi"),
            "usr/bin/y": (image_build.plain_entry("usr/bin/y", b"2", 0o777, link="/usr/bin/x"), b""),
        }
        return dict(sorted(found.items(), reverse=bool(turn)))

    digests = [image_build.write_layout(tmp_path / f"i{turn}", members(turn), {}) for turn in (0, 1)]
    assert digests[0] == digests[1]
    index = json.loads((tmp_path / "i0" / "index.json").read_text())
    assert index["manifests"][0]["digest"] == digests[0]
    said = []
    root = root_of(str(tmp_path / "i0"), said.append)
    assert root_of(str(tmp_path / "i1"), said.append) == root and len(said) == 1
    assert (root / "usr/bin/y").read_text() == "hi" and (root / "usr/bin/x").stat().st_mode & 0o111
    assert (root / "bin").is_symlink() and (root / "bin" / "x").read_text() == "hi"
    assert image_build.merged_path("./bin/a") == "usr/bin/a" and image_build.merged_path("./") == ""


@pytest.mark.parametrize(
    "entry",
    [
        image_build.plain_entry("../out", b"0", 0o644, size=1),
        image_build.plain_entry("usr/../../out", b"0", 0o644, size=1),
        image_build.plain_entry("usr/out", b"2", 0o777, link="../../out"),
        image_build.plain_entry("usr/out", b"1", 0o644, link="../out"),
        image_build.plain_entry("../kept/.wh.file", b"0", 0o644, size=1),
        image_build.plain_entry(".wh...", b"0", 0o644, size=1),  # removes ".."
        image_build.plain_entry(".wh..", b"0", 0o644, size=1),
        image_build.plain_entry("../kept", b"5", 0o755),
    ],
    ids=lambda entry: f"{entry.name} {entry.linkname}",
)
def test_an_entry_that_leads_out_of_its_image_is_refused(unpacked, tmp_path, entry):
    kept = tmp_path / "cache" / "rondel" / "images" / "kept" / "file"
    kept.parent.mkdir(parents=True)
    kept.touch()
    image_build.write_layout(tmp_path / "bad", {entry.name: (entry, b"x" * entry.size)}, {})
    with pytest.raises(tarfile.TarError, match="outside"):
        root_of(str(tmp_path / "bad"))
    assert kept.exists() and not list(tmp_path.rglob("out"))


def test_a_snapshot_is_a_copy_that_does_not_change(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_text("1")
    (tmp_path / "a" / "link").symlink_to("b/f")
    made = snapshot(tmp_path / "a", tmp_path / "kept")
    (tmp_path / "a" / "b" / "f").write_text("2")
    assert (made / "b" / "f").read_text() == "1" and os.readlink(made / "link") == "b/f"
    with pytest.raises(ValueError, match="exists already"):
        snapshot(tmp_path / "a", tmp_path / "kept")
    with pytest.raises(SandboxError, match="sees no folder of this machine"):
        Sandbox("vm").cell(base=tmp_path)


# -- what they cost ----------------------------------------------------------------------------------


class Counted:
    """A factory of boxes that answer nothing; each has used what it says."""

    def cell(self, limits, **settings):
        box = FakeBox(limits, settings)
        box.begin = lambda *words, **more: None
        box.finish = lambda wall: CommandResult(0, 0, b"", b"")
        box.usage = lambda: BoxUsage(cpu=0.5, peak=7 << 20)
        return box


def test_what_boxes_used_is_on_the_card():
    tool = python_tool(Counted)(Task("t", "tools", {}))
    assert tool.box_usage() == {} and tool.python("1").startswith("error: the interpreter ended")
    assert tool.box_usage()["box_cpu"] == 0.5 and tool.box_usage()["box_peak"] == 7 << 20
    tool.python("1")
    assert tool.box_usage()["box_cpu"] == 1.0 and tool.box_usage()["box_peak"] == 7 << 20, "of two boxes"
    answers = [
        Trajectory(timings={"box_seconds": 2.0, "box_cpu": 1.0, "box_peak": 5e6}),
        Trajectory(timings={"box_seconds": 1.0}),
    ]
    used = Group(0, Task("t", "x", {}), answers, 0).sum_boxes()
    assert used == {"episodes": 2.0, "seconds": 3.0, "cpu": 1.0, "peak": 5e6}
    assert Group(0, Task("t", "x", {}), [Trajectory()], 0).sum_boxes() == {}
    total = add_boxes([used, {}, {"episodes": 1.0, "seconds": 0.5, "peak": 9e6}])
    assert total == {"episodes": 3.0, "seconds": 3.5, "cpu": 1.0, "peak": 9e6}
    rows = dict(box_rows(total))
    assert rows["boxes open"] == "3.5 s, 1.17 s an episode" and rows["memory of a box"].startswith("9.0 MB")
    assert dict(box_rows({"episodes": 1.0, "seconds": 1.0}))["computing in boxes"] == "not counted here"


def test_the_runner_of_a_service_needs_no_package():
    assert "rondel." not in remote_box.RUNNER and Path(remote_box.__file__).exists()
