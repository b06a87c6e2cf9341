"""The door to the boxes: sessions that are cut off and go on, pools, other substrates, and
what happens where nothing would contain anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from kits.box_remains import FEW, LEFT, leave_and_look
from kits.sweeps import covering
from rondel.core.errors import ConfigError, SandboxError, UnknownOutcome, UserError
from rondel.core.sandbox_types import BoxFileError, CommandResult, Limits
from rondel.core.types import Task
from rondel.generate.envs.python import python_tool
from rondel.runtime.sandbox import container, machine, probe, users
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.pool import Functions
from rondel.runtime.sandbox.session import open_session

pytestmark = pytest.mark.slow

try:
    probe.find_isolation()
    MISSING = ""
except SandboxError as error:
    MISSING = str(error)
boxed = pytest.mark.skipif(bool(MISSING), reason=MISSING)


# -- a session ---------------------------------------------------------------------------------------

CONTROLLER = """
import asyncio, sys
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.session import open_session
from rondel.core.errors import UnknownOutcome
async def main():
    async with open_session(Sandbox(), sys.argv[1], resume=True) as session:
        before = set(session.log.ran)
        for n in range(12):
            try:
                ran = await session.run(["sh", "-c", f"sleep 0.01; echo {n} >> f; sleep 0.01; echo said {n}"])
            except UnknownOutcome:
                continue
            assert ran.stdout == b"said %d\\n" % n, ran
            if n not in before:
                print(n, flush=True)
                await asyncio.sleep(0.02)
asyncio.run(main())
"""


@boxed
def test_a_session_that_is_killed_runs_no_command_twice(tmp_path):
    """kill -9 of the controller at random moments, and again, until one comes to the end."""
    draw, folder, kills = random.Random(7), tmp_path / "session", 0
    for _ in range(20):
        controller = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(draw.randint(3, 5)):  # commands that it has carried out itself
            controller.stdout.readline()
        time.sleep(draw.uniform(0, 0.06))
        controller.send_signal(signal.SIGKILL)
        _, said = controller.communicate()
        assert controller.returncode in (0, -9), said.decode()[-2000:]
        kills += controller.returncode == -9
        if controller.returncode == 0:
            break
    begun, ended = rows(folder)
    lines = [int(line) for line in (folder / "box" / "f").read_text().split()]
    whole = sorted(n for n, row in ended.items() if row["ran"] is not None)
    assert controller.returncode == 0 and kills >= 2 and begun == ended.keys() == set(range(12))
    assert [n for n in lines if n in whole] == whole, "each that has a result ran exactly once, in order"
    assert all(lines.count(n) <= 1 for n in begun), "and one whose outcome is unknown at most once"
    assert len(whole) >= 4


def rows(folder: Path) -> tuple[set[int], dict[int, dict]]:
    found = [
        json.loads(line)
        for line in (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]
    return {row["n"] for row in found if "begin" in row}, {row["n"]: row for row in found if "ran" in row}


@boxed
def test_a_session_goes_on_where_its_log_ends(tmp_path):
    add = ["sh", "-c", "echo x >> f; wc -l < f"]

    async def first():
        async with open_session(Sandbox(), tmp_path) as session:
            await session.write("kept", b"text")
            return [
                await session.run(add),
                await session.run(add, stdin=b"1"),
                await session.run(["sh", "-c", "exit 3"]),
            ]

    async def again(*, more: bool):
        async with open_session(Sandbox(), tmp_path, resume=True) as session:
            await session.write("kept", b"text")
            ran = [
                await session.run(add),
                await session.run(add, stdin=b"1"),
                await session.run(["sh", "-c", "exit 3"]),
            ]
            assert session.replayed == 4
            return ran, (await session.run(add)).stdout if more else b"", await session.read("kept")

    before = asyncio.run(first())
    assert [ran.exit for ran in before] == [0, 0, 3] and before[1].stdout.strip() == b"2"
    after, third, kept = asyncio.run(again(more=True))
    assert [(r.exit, r.stdout, r.stderr) for r in after] == [(r.exit, r.stdout, r.stderr) for r in before]
    assert third.strip() == b"3" and kept == b"text", "the file was there, and no command ran a second time"
    with pytest.raises(UserError, match="resume=True continues it"):
        asyncio.run(first())


@boxed
@pytest.mark.parametrize("idempotent", [False, True])
def test_what_was_begun_and_has_no_result(tmp_path, idempotent):
    async def one(resume: bool):
        async with open_session(Sandbox(), tmp_path, resume=resume) as session:
            return await session.run(["sh", "-c", "echo x >> f; cat f"], idempotent=idempotent)

    asyncio.run(one(False))
    log = tmp_path / "log.jsonl"
    begun, ran = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(begun + ran[:20])  # the end came while the result was written
    if idempotent:
        assert asyncio.run(one(True)).stdout == b"x\nx\n"
    else:
        for _ in range(2):
            with pytest.raises(UnknownOutcome, match="its outcome is unknown"):
                asyncio.run(one(True))
        assert (tmp_path / "box" / "f").read_text() == "x\n"


@boxed
def test_another_session_is_not_answered_from_this_log(tmp_path):
    async def one(command: str, resume: bool):
        async with open_session(Sandbox(), tmp_path, resume=resume) as session:
            return await session.run(["sh", "-c", command])

    asyncio.run(one("echo 1", False))
    with pytest.raises(UserError, match="only the same session"):
        asyncio.run(one("echo 2", True))


# -- boxes and pools ---------------------------------------------------------------------------------


@boxed
def test_a_box_for_a_coroutine_and_its_end_when_that_is_cancelled():
    async def main():
        async with Sandbox().open(Limits(wall=30)) as box:
            await box.write("a/b.txt", b"\x00\xff" * 1000)
            assert await box.read("a/b.txt") == b"\x00\xff" * 1000
            ran = await box.run(["python3", "-c", "print(open(0).read()[::-1])"], stdin=b"abc", timeout=10)
            assert (ran.ok, ran.stdout) == (True, b"cba\n")
            assert (await box.run(["no-such-program"])).exit == 127
            with pytest.raises(OSError, match="No such file"):
                await box.read("nothing")
            sleeping = asyncio.ensure_future(box.run(["sleep", "600"], timeout=600))
            await asyncio.sleep(0.1)
            sleeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sleeping
            return box.cell.process

    assert asyncio.run(main()).poll() is not None


@boxed
def test_a_slow_command_delays_no_other_box():
    async def main():
        async with Sandbox().open(Limits(wall=30)) as slow, Sandbox().open() as quick:
            waits = asyncio.ensure_future(slow.call("import time; time.sleep(3)", timeout=20))
            answers = [(await quick.call(f"print({n})")).stdout for n in range(5)]
            assert not waits.done() and answers == [b"%d\n" % n for n in range(5)]
            waits.cancel()

    asyncio.run(main())


@boxed
def test_a_snippet_finds_nothing_of_the_one_before():
    with Functions(Sandbox(), Limits(wall=5), size=1) as pool:
        first = pool.call(
            "import builtins, sys, os; builtins.left = sys.left = 1; os.environ['LEFT'] = '1'; print(os.getpid())"
        )
        assert first.ok
        seen = "import sys, os; print(hasattr(sys, 'left'), 'left' in dir(__builtins__), 'LEFT' in os.environ, os.listdir('.'), os.listdir('/tmp'))"
        assert pool.call(seen).stdout == b"False False False [] []\n"
        (before,) = pool._all
        assert pool.call("open('/tmp/left', 'w'); open('left', 'w')").ok
        assert pool.call(seen).stdout == b"False False False [] []\n", "another box"
        assert before not in pool._all and not before.alive
        assert (
            pool.call("raise SystemExit(3)").exit == 3 and pool.call("import os; os.kill(os.getpid(), 9)").signal == 9
        )
        assert pool.call("while True: pass", wall=0.2).limit == "wall" and pool.call("print(1)").stdout == b"1\n"
        (last,) = pool._all
    assert last.process.poll() is not None


# all on the native wall, one of each kind on the other one
REMAINS = pytest.mark.parametrize(
    ("wall", "few"),
    covering(product(probe.WALLS, [False, True]), [(wall, wall != "native") for wall in probe.WALLS]),
)


@boxed
@REMAINS
def test_a_box_is_used_again_only_if_it_is_as_new(wall, few):
    """Whatever the command before was: the next one sees what it would see in a box of its own."""
    try:
        probe.probe_isolation(wall)
    except SandboxError as error:
        pytest.skip(f"{wall}: {error}")
    kept, seen = leave_and_look(wall, FEW if few else tuple(LEFT))
    assert len(seen) == 1, "all saw the same"
    assert "a closed home" not in kept or wall == "bubblewrap", "there it is the root's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only a root can become a plain user")
@REMAINS
def test_a_plain_users_box_is_used_again_only_if_it_is_as_new(wall, few):
    """There a command has the user of the first process, and may change more."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        ["/usr/bin/python3", "-B", "-m", "kits.box_remains", wall, *["few"] * few], env={"PYTHONPATH": f"{tests.parent / 'src'}:{tests}", "PATH": "/usr/bin:/bin"},
        user=65534, group=65534, extra_groups=[], capture_output=True, text=True, cwd="/", timeout=60,
    )  # fmt: skip
    if done.returncode and not done.stderr.startswith("AssertionError"):
        pytest.skip(f"{wall} is not for plain users here: {done.stderr.strip()[-200:]}")
    assert done.stdout.startswith("all saw the same"), done.stdout + done.stderr


@boxed
def test_code_that_closes_the_home_of_its_session_is_no_fault_of_the_world(tmp_path):
    """What it does to its own box its own next command finds; the box takes commands as before."""

    async def main():
        async with open_session(Sandbox(), tmp_path, Limits(disk=1 << 20)) as session:
            await session.run(["sh", "-c", "chmod 0 /box"])
            assert (await session.run(["ls"])).exit == 2 and (await session.run(["pwd"])).stdout == b"/box\n"
            with pytest.raises(BoxFileError, match="cannot write 'f' in the box: f: Permission denied"):
                await session.box.write("f", b"")
            for broken in ("a\0b", "\ud83d"):
                assert (await session.run([broken])).exit == 126 and (await session.run(["echo", broken])).exit == 126
                with pytest.raises(BoxFileError, match="cannot read"):
                    await session.read(broken)
            return await session.run(["sh", "-c", "chmod 700 /box; echo kept"])

    assert asyncio.run(main()).stdout == b"kept\n"


@pytest.mark.parametrize(
    ("uid", "gid", "expected"),
    [
        ([range(0, 1 << 32)], [range(0, 1 << 32)], range((1000 + (1 << 31)) // 2, 1 << 31)),
        ([range(0, 1)], [range(0, 1)], range(0)),
        ([range(0, 1), range(1, 65537)], [range(0, 1), range(1, 65537)], range(33268, 65537)),
        ([range(0, 65536)], [range(0, 1)], range(0)),
    ],
)
def test_the_numbers_that_boxes_may_have(uid, gid, expected, monkeypatch):
    monkeypatch.setattr(users, "mapped_ids", lambda kind: uid if kind == "uid" else gid)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert users.sandbox_ids() == expected and users.is_real_root() == bool(expected)
    assert users.random_user_id() in (expected or [users.PLAIN])


@boxed
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("wall", probe.WALLS)
def test_a_root_with_a_single_number_has_boxes_as_a_plain_user_does(wall):
    trial = "from rondel.runtime.sandbox.probe import probe_isolation; import sys; print(probe_isolation(sys.argv[1]).summary_line())"
    python = ["/usr/bin/python3", "-B"] if os.access("/usr/bin/python3", os.X_OK) else [sys.executable]
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["unshare", "-Ur", *python, "-c", trial, wall], env=env, capture_output=True, text=True, cwd="/", timeout=60
    )
    if re.search("unshare: |No module named|bwrap is not installed|Operation not permitted", done.stderr):
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert all(what in done.stdout for what in ("files", "network", "processes", "user")), done.stderr[-2000:]


# -- where it cannot be ------------------------------------------------------------------------------


def test_where_nothing_would_contain_it_no_code_runs(monkeypatch):
    def none(wall):
        raise SandboxError("unshare: Operation not permitted" if wall == "native" else "bwrap is not installed")

    monkeypatch.setattr(probe, "probe_isolation", none)
    with pytest.raises(
        SandboxError, match=r"native: unshare.*bubblewrap: bwrap is not installed.*apt install bubblewrap"
    ):
        probe.find_isolation.__wrapped__()
    monkeypatch.setattr(probe, "probe_isolation", lambda wall: probe.Isolation(wall, ("files", "processes", "user")))
    with pytest.raises(SandboxError, match="native: does not hold network"):
        probe.find_isolation.__wrapped__()


def test_what_holds_and_what_does_not_is_one_line():
    assert probe.Isolation("native", ("files", "network", "processes", "count")).summary_line() == (
        "native: files, network, processes, count; no user; no filter of system calls; memory is held for each process "
        "only"
    )


def test_limits_that_mean_nothing_are_refused():
    for wrong in ({"wall": 0}, {"processes": -1}, {"memory": "1g"}, {"memory": 1 << 20}, {"cpu": True}):
        with pytest.raises(UserError, match="sandbox limit"):
            Limits(**wrong)
    with pytest.raises(ConfigError, match="Did you mean 'container'"):
        Sandbox("containr")


def test_a_substrate_without_its_tool_is_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="needs docker or podman, and none is on the PATH"):
        Sandbox("container").cell()
    with pytest.raises(SandboxError, match="needs firecracker, which is not on the PATH"):
        Sandbox("microvm").cell()
    with pytest.raises(SandboxError, match="needs qemu-system-"):
        Sandbox("vm").cell()
    script(tmp_path / "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    with pytest.raises(SandboxError, match=r"Cannot connect.*is its engine running"):
        Sandbox("container").cell()
    for name in ("firecracker", f"qemu-system-{os.uname().machine}"):
        script(tmp_path / name, "exit 1")
    for kind in ("microvm", "vm"):
        with pytest.raises(ConfigError, match="kernel = 'no/kernel' is no file"):
            Sandbox(kind, kernel="no/kernel").cell()


def test_the_command_of_a_container_takes_everything_away():
    command = container.container_command("docker", "n", Limits(memory=128 << 20, processes=9), "image", None)
    text = " ".join(command)
    for needed in (
        "--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--user ", "--pids-limit 11",
        f"--memory {128 << 20}", f"--memory-swap {128 << 20}", "--ulimit core=0", "--tmpfs /box:rw,nosuid,nodev",
        f"--ulimit data={256 << 20}", f"--shm-size {Limits().disk}b", "--tmpfs /sys/fs/cgroup:ro",
    ):  # fmt: skip
        assert needed in text, needed
    assert command[-4:-1] == ["image", "sh", "-c"] and "--privileged" not in text and "--user 0" not in text
    assert "--volume /w:/box:rw" in " ".join(container.container_command("podman", "n", Limits(), "image", "/w"))


def test_the_machines_have_no_network_and_keep_nothing():
    text = " ".join(machine.machine_command("qemu-system-x86_64", Limits(memory=256 << 20), "k", "r"))
    for needed in ("-nic none", "-nodefaults", "-m 256M", "snapshot=on", "-sandbox on,", "-kernel k", "-serial stdio"):
        assert needed in text, needed
    config = machine.micro_config(Limits(memory=256 << 20), "k", "r")
    assert (
        "network-interfaces" not in config
        and config["drives"][0]["is_read_only"]
        and config["machine-config"]["mem_size_mib"] == 256
    )


DOCKER = """
import subprocess, sys
words = sys.argv[1:]
open({log!r}, "a").write(" ".join(words) + "\\n")
if words[0] == "exec":
    words = words[1:]
    while words[0].startswith("--"):
        words = words[2:] if words[0] == "--env" else words[1:]
    sys.exit(subprocess.call(words[1:]))
if words[0] == "run":
    sys.exit(subprocess.call(words[words.index("python:3.11-slim") + 1 :]))
"""
AGENT = """
import base64, json, subprocess, sys
print("[    0.1] a kernel boots\\n" + json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    done = subprocess.run(order["argv"], input=base64.b64decode(order["stdin"]), capture_output=True)
    streams = {n: base64.b64encode(getattr(done, n)).decode() for n in ("stdout", "stderr")}
    print(json.dumps({"exit": max(done.returncode, 0), "signal": max(-done.returncode, 0), **streams}), flush=True)
"""


@pytest.mark.parametrize("kind", ["container", "vm"])
def test_the_same_verbs_by_other_tools(kind, monkeypatch, tmp_path):
    """With stand-ins of ten lines for docker and for a machine with its agent."""
    log = tmp_path / "log"
    name = "docker" if kind == "container" else f"qemu-system-{os.uname().machine}"
    program = tmp_path / "program.py"
    program.write_text(DOCKER.format(log=str(log)) if kind == "container" else AGENT)
    script(tmp_path / name, f'exec {sys.executable} {program} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = {} if kind == "container" else {"kernel": str(program), "root": str(program)}

    async def main() -> list[CommandResult]:
        async with Sandbox(kind, **settings).open(Limits(wall=20, output=1000)) as box:
            await box.write(str(tmp_path / "x" / "file"), b"abc")
            assert await box.read(str(tmp_path / "x" / "file")) == b"abc"
            return [
                await box.run(["cat"], stdin=b"said"),
                await box.run(["sh", "-c", "exit 4"]),
                await box.run(["sleep", "60"], timeout=0.3),
            ]

    said, four, late = asyncio.run(main())
    assert (said.ok, said.stdout, four.exit, late.limit) == (True, b"said", 4, "wall")
    if kind == "container":
        assert log.read_text().splitlines()[-1].startswith("rm --force rondel-"), "and it is gone"


def test_the_python_tool_in_a_container(monkeypatch, tmp_path):
    """With the stand-in for docker; and in a machine, which carries out whole commands, through a relay."""
    program = tmp_path / "program.py"
    program.write_text(DOCKER.format(log=str(tmp_path / "log")))
    script(tmp_path / "docker", f'exec {sys.executable} {program} "$@"')
    program.with_name("agent.py").write_text(AGENT)
    script(tmp_path / f"qemu-system-{os.uname().machine}", f"exec {sys.executable} {program.with_name('agent.py')}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = python_tool(lambda: Sandbox("container"))(Task("t", "tools", {}))
    assert made.python("x = 3") == "" and made.python("x + 1") == "4\n"
    assert "the interpreter ended (exit code 3)" in made.python("import os; os._exit(3)")
    made.close()
    made = python_tool(lambda: Sandbox("vm", kernel=str(program), root=str(program)))(Task("t", "tools", {}))
    assert made.python("x = 3") == "" and made.python("x + 1") == "4\n"
    assert "the interpreter ended (exit code 3)" in made.python("import os; os._exit(3)")
    made.close()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
