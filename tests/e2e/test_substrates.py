"""Containers for real, where this machine has their tools: the python tool, the code reward, attempts to get out,
folders that boxes begin from, and what a killed controller leaves.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import rondel
from kits.attack_table import INSIDE, attacked_host, attempt
from kits.root_folder import make_root
from kits.sandbox_attacks import ATTACKS
from kits.sweeps import covering
from rondel.core.errors import SandboxError
from rondel.core.sandbox_types import Limits
from rondel.core.types import Score, Task, Trajectory
from rondel.generate.envs.python import python_tool
from rondel.runtime.sandbox import container, oci_runtime
from rondel.runtime.sandbox.box import Sandbox
from rondel.runtime.sandbox.inside.filter import TABLE
from rondel.runtime.sandbox.oci_runtime import bundle_config
from rondel.runtime.sandbox.recipe import describe, sandbox_of
from rondel.runtime.sandbox.usage import own_folders
from rondel.score.code import Code

TOOLS = ("crun", "runc", "podman")
# what is ours above the runtime's commands, which the other tests give to both
ONE = covering(["crun", "runc"], ["crun"])
TRIED = (  # a few of each kind; tests/kits/attack_table.py tries all
    "the secret", "mounts", "devices", "the first process", "a fork bomb", "memory", "namespaces", "abstract", "ptrace", "signals",
)  # fmt: skip


def test_a_bundle_takes_everything_away(tmp_path):
    """As the runtime reads it, on every machine."""
    spec = bundle_config(Limits(processes=9, open_files=50), tmp_path, None, uid=4242)
    process, linux = spec["process"], spec["linux"]
    assert process["noNewPrivileges"] and not any(process["capabilities"].values()) and spec["root"]["readonly"]
    kinds = {one["type"] for one in linux["namespaces"]}
    assert kinds >= {"pid", "mount", "ipc", "uts", "network"} and (process["user"]["uid"] == 4242 or "user" in kinds)
    assert {"network"} - {
        one["type"] for one in bundle_config(Limits(network=True), tmp_path, None, uid=1)["linux"]["namespaces"]
    }
    assert {"type": "RLIMIT_NOFILE", "soft": 50, "hard": 50} in process["rlimits"]
    refused = {name for rule in linux["seccomp"]["syscalls"] for name in rule["names"]}
    assert refused >= {row.split()[0] for row in TABLE.splitlines()} | {"clone", "clone3", "socket"}
    assert linux["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    assert {"type": "RLIMIT_DATA", "soft": Limits().memory, "hard": Limits().memory} in spec["process"]["rlimits"]
    assert not any(mount["type"] == "bind" for mount in spec["mounts"]), "nothing of the host but the root"
    assert "seccomp" not in bundle_config(Limits(), tmp_path, None, uid=1, gvisor=True)["linux"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    if not any(map(shutil.which, TOOLS)):
        pytest.skip("needs crun, runc or podman: apt install crun")
    found = make_root(tmp_path_factory.mktemp("image") / "root")
    if found is None:
        pytest.skip("needs /usr/bin/python3 for a root folder")
    for folder in (found, *found.parents):
        if folder.stat().st_uid == os.geteuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    return found


@pytest.fixture(scope="module", params=["crun", "runc"])
def sandbox(request, root):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed: apt install {request.param}")
    made = sandbox_of({"kind": "container", "tool": request.param, "image": str(root)})
    try:
        assert f"container by {request.param}" in describe(made)
    except SandboxError as error:
        pytest.skip(str(error))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", ONE, indirect=True)
def test_the_python_tool_and_the_code_reward_in_a_container(sandbox):
    tool = python_tool(lambda: sandbox)(Task("t", "tools", {}))
    assert tool.python("x = 6\nopen('f', 'w').write('y')") == "1\n" and tool.python("x * 7") == "42\n"
    assert "Network is unreachable" in tool.python("import socket; socket.create_connection(('192.0.2.1', 80))")
    assert "exit code 3" in tool.python("import os; os._exit(3)") and "NameError" in tool.python("x")
    used = tool.box_usage()
    assert used["box_seconds"] > 0 and (not os.access("/sys/fs/cgroup", os.W_OK) or used.get("box_cpu", 1) > 0)
    tool.close()
    judge = Code(sandbox=sandbox, packages=[], seconds=20.0, deadline=90.0)
    task = Task("t", "x", {"tests": ["assert f(2) == 4"]})
    assert judge(Trajectory(text="def f(x): return x * x"), task) == Score(1.0, {"passed": 1.0})
    assert judge(Trajectory(text="def f(x): return 5"), task) == Score(0.0, {"passed": 0.0})
    for cell in judge._cells.values():
        cell.kill()


@pytest.mark.slow
def test_limits_hold_in_a_container(sandbox):
    cell = sandbox.cell(Limits(wall=20, memory=64 << 20, processes=16, output=1000))
    try:
        assert cell.call("x = [bytearray(1 << 20) for _ in range(500)]; print('all')").stdout == b""
        assert b"File too large" in cell.call("f = open('x', 'wb')\nfor _ in range(40): f.write(bytes(1 << 20))").stderr
        cell.write("a/b", b"\x00text")
        assert cell.read("a/b") == b"\x00text"
        assert cell.run(["cat"], stdin=b"said").stdout == b"said" and cell.run(["no-such"]).exit != 0
        assert cell.call("import os; os.remove('x')").ok  # it counts as memory
        forks = "import os, time\nn = 0\ntry:\n  while os.fork(): n += 1\n  time.sleep(1)\nexcept OSError: print(n < 20); time.sleep(2)"
        assert cell.call(forks).stdout == b"True\n"
        assert cell.call("while True: print('x' * 99)").limit == "output" and not cell.alive
    finally:
        cell.kill()


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", ONE, indirect=True)
def test_without_control_groups_memory_is_held_for_each_process_and_that_is_said(sandbox, monkeypatch):
    """A plain user has none: rootless containers held no memory at all, and nobody said so."""
    cell = sandbox.cell(Limits())
    whole = cell.grouped
    cell.kill()
    for made in (sandbox, Sandbox(sandbox.kind, limits={"memory": 1 << 30}, **sandbox.settings)):
        assert ("memory" in describe(made)) != whole, "the trial has limits of its own, whatever the recipe's are"
    monkeypatch.setattr(oci_runtime, "make_group", lambda name, limits: ({}, None))
    monkeypatch.setattr(sandbox, "_waiting", None, raising=False)
    assert describe(sandbox).endswith("memory is held for each process only")


PLAIN = """
import os, sys
from pathlib import Path
from rondel.core.sandbox_types import Limits
from rondel.runtime.sandbox.oci_runtime import OciContainer
box = OciContainer(sys.argv[1], Limits(), Path(sys.argv[2]))
print(box.grouped, [box.run(["python3", "-c", f"print({n} * 7)"]).stdout for n in (6, 7)])
box.kill()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("runc"), reason="only a root can become a plain user")
def test_a_plain_user_without_a_run_folder_has_containers():
    """runc keeps what it knows of a container in /run, where a user may write nothing."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        if make_root(Path(place, "root")) is None:
            pytest.skip("needs Debian's python3 and dash")
        os.chmod(Path(place, "root"), 0o755)
        source = str(Path(rondel.__file__).parents[1])
        done = subprocess.run(
            ["/usr/bin/python3", "-B", "-c", PLAIN, shutil.which("runc"), f"{place}/root"],
            env={"PYTHONPATH": source, "PATH": os.environ["PATH"], "TMPDIR": place},
            user=65534, group=65534, extra_groups=[], capture_output=True, text=True, cwd="/", timeout=120,
        )  # fmt: skip
        assert done.stdout.endswith(" [b'42\\n', b'49\\n']\n"), done.stderr
        assert not list(Path(place).glob("rondel-bundle-*/state/*")), "what runc knew is gone with the box"


@pytest.mark.parametrize(("hybrid", "root", "tool", "takes"), [
    (True, False, "auto", "runc"), (True, False, "runc", "runc"), (True, True, "auto", "crun"), (False, False, "auto", "crun"), (True, False, "crun", None),
])  # fmt: skip
def test_crun_is_not_for_a_plain_user_where_both_versions_of_control_groups_are(
    monkeypatch, tmp_path, hybrid, root, tool, takes
):
    monkeypatch.setattr(container, "is_hybrid", lambda: hybrid)
    monkeypatch.setattr(container, "is_real_root", lambda: root)
    monkeypatch.setattr(container.shutil, "which", lambda name: f"/bin/{name}")
    if takes is None:
        with pytest.raises(SandboxError, match=r"only a root can hide one of them .* use tool = 'runc'"):
            container.find_container_tool(str(tmp_path), tool)
    else:
        assert container.find_container_tool(str(tmp_path), tool) == f"/bin/{takes}"


@pytest.mark.slow
def test_a_few_attempts_to_get_out_of_a_container(sandbox):
    wanted = [a for a in ATTACKS if not a.only and a.name not in INSIDE and a.name.startswith(TRIED)]
    assert len(wanted) >= 5, "the names of the attacks changed"
    if sandbox.settings["tool"] != "crun":  # the same bundle: one attack of each kind
        wanted = list({kind: a for a in wanted for kind in TRIED if a.name.startswith(kind)}.values())
    with attacked_host() as host:
        assert {a.name: got for a in wanted[:12] if (got := attempt(sandbox, a, host))} == {}


@pytest.mark.slow
def test_a_box_begins_from_a_prepared_folder(sandbox, tmp_path):
    (tmp_path / "kept").write_text("1\n")
    sandboxes = [sandbox]
    try:
        describe(sandbox_of("process"))
        sandboxes.append(sandbox_of("process"))
    except SandboxError:
        pass
    for one in sandboxes:
        cells = [one.cell(Limits(wall=20), base=tmp_path) for _ in range(2)]
        assert [c.run(["sh", "-c", "cat kept; echo 2 >> kept; cat kept"]).stdout for c in cells] == [b"1\n1\n2\n"] * 2
        copies = [Path(cell.kill.args[1]) for cell in cells]
        for cell in cells:
            cell.kill()
        assert (tmp_path / "kept").read_text() == "1\n" and not any(copy.exists() for copy in copies)


HOLDS = """
import json, os, sys, time
from rondel.core.sandbox_types import Limits
from rondel.runtime.sandbox.recipe import sandbox_of
sandbox = sandbox_of(json.loads(sys.argv[1]))
cells = [sandbox.cell(Limits(wall=60)) for _ in range(4)]
print(json.dumps([getattr(cell, "_kept", cell).process.pid for cell in cells]), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_container_whose_controller_was_killed(sandbox):
    spec = {"kind": "container", **sandbox.settings}
    controller = subprocess.Popen([sys.executable, "-c", HOLDS, json.dumps(spec)], stdout=subprocess.PIPE, text=True)
    keepers = json.loads(controller.stdout.readline())
    mark = f"rondel-{controller.pid}-"

    def left() -> list[str]:
        groups = [name for home in own_folders() for name in os.listdir(home) if name.startswith(mark)]
        bundles = [path.name for path in Path("/tmp").glob(f"rondel-bundle-{controller.pid}-*")]
        return groups + bundles + [str(pid) for pid in keepers if runs(pid)]

    assert len(left()) >= 8
    controller.kill()
    controller.wait()
    controller.stdout.close()
    until = time.monotonic() + 60
    while left() and time.monotonic() < until:
        time.sleep(0.1)
    assert left() == []


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
