"""Nothing that code does in a box reaches out of it, costs more than its limits, or
outlives it: each attack, behind each wall.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from kits.sandbox_attacks import ATTACKS, PRELUDE
from kits.sweeps import covering
from rondel.core.errors import SandboxError
from rondel.core.sandbox_types import BoxFileError, Limits
from rondel.runtime.sandbox.cell import NamespaceCell
from rondel.runtime.sandbox.inside import groups
from rondel.runtime.sandbox.probe import WALLS, probe_isolation

pytestmark = pytest.mark.slow

SECRET = "the-secret-of-the-host"
# the base interpreter is shown to every box
VENV = sys.prefix if sys.prefix != sys.base_prefix else str(Path(pytest.__file__).parent)
SMALL = {
    "wall": 4.0,
    "cpu": 4.0,
    "memory": 128 << 20,
    "processes": 24,
    "disk": 16 << 20,
    "file": 8 << 20,
    "files": 500,
    "output": 20_000,
}


probed = functools.cache(probe_isolation)  # a worker comes back to a wall as often as it takes tests from others


@pytest.fixture(scope="module", params=["native", pytest.param("bubblewrap", marks=pytest.mark.slow)])
def wall(request):
    """The wall's name and what it was seen to hold; skipped by what the machine answered."""
    try:
        return probed(request.param)
    except SandboxError as error:
        pytest.skip(f"{request.param}: {error}")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What an attack would like to reach."""
    folder = tmp_path_factory.mktemp("host")
    secret = folder / "secret"
    secret.write_text(SECRET)
    for path in (secret, *folder.parents):
        if path.stat().st_uid == os.geteuid() and str(path).startswith("/tmp/"):
            path.chmod(0o755)
    os.environ["RONDEL_TEST_SECRET"] = SECRET
    inherited = os.open(secret, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    victim = subprocess.Popen(["sleep", "600"])
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(folder / "socket"))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + f"rondel-{os.getpid()}")
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    listening = [unix, abstract, tcp]
    for one in listening:
        one.listen()
        one.setblocking(False)
    udp.setblocking(False)
    yield {
        "victim": victim,
        "listening": listening,
        "udp": udp,
        "told": {
            "secret": str(secret), "home": str(Path.home()), "checkout": str(Path(__file__).parents[2]), "venv": VENV, "victim": victim.pid,
            "pytest": os.getpid(), "unix": str(folder / "socket"), "abstract": f"rondel-{os.getpid()}",
            "tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1],
        },
    }  # fmt: skip
    del os.environ["RONDEL_TEST_SECRET"]
    os.close(inherited)
    victim.kill()
    victim.wait()
    for one in (*listening, udp):
        one.close()


def descendants(of: int) -> list[int]:
    """Processes that are left of it: by parent, now."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, more = [], [of]
    while more:
        more = [pid for pid, parent in parents.items() if parent in more]
        found += more
    return found


def nothing_reached(host) -> None:
    assert host["victim"].poll() is None
    for one in host["listening"]:
        with pytest.raises(BlockingIOError):
            one.accept()
    with pytest.raises(BlockingIOError):
        host["udp"].recv(1)


# attack -> files that it left -> why its controller, who reads them as the box's own user, does not get them
UNREAD = {
    "a link out": {"link": "No such file|Permission denied"},
    "files with odd names to read": {
        "folder": "Is a directory",
        "endless": "over its output limit",
        "loop": "Too many levels",
    },
}


@pytest.fixture(scope="module")
def waiting():
    """wall -> a box in which the attacks before left no file."""
    cells: dict[str, NamespaceCell] = {}
    yield cells
    for cell in cells.values():
        cell.kill()


NAMES = [attack.name for attack in ATTACKS]
# all on the native wall; of each kind a few on the other one, whose promises are the same filter, groups and limits
ON_BOTH = [
    "fork bomb of a shell", "memory", "disk", "open files", "flood stdout", "raised limits", "fork bomb", "sleep",
    "shadow", "a file of the host", "up and out", "a link out", "environment", "inherited files", "processes of the host",
    "write outside", "message queue left", "a server of the host", "datagrams", "a unix socket", "an abstract socket",
    "signals", "ptrace", "daemon", "stdout is closed", "mount", "namespaces", "root", "a set-user-id program", "kernel doors",
    "another architecture's calls", "a folder held open", "a root inside a root", "mount points", "what a machine keeps",
    "packages of the run", "devices", "its own maps", "every signal to the first process", "limits of others",
    "one that adopts orphans", "rights back", "calls that are refused by name", "new namespaces by every flag",
    "every family of sockets", "a network that is up", "sockets among its objects", "every file number",
    "a death that looks like a limit", "modules left for others", "code for the next one", "files with odd names to read",
    "memory in files of memory", "timers", "both streams at once",
]  # fmt: skip


@pytest.mark.parametrize(
    ("wall", "name"),
    covering(
        product(WALLS, NAMES), [(wall, name) for wall in WALLS for name in (NAMES if wall == "native" else ON_BOTH)]
    ),
    indirect=["wall"],
    scope="module",
)
def test_an_attack_is_held(wall, host, waiting, name: str):
    number = NAMES.index(name)
    attack = ATTACKS[number]
    if attack.only and attack.only != wall.wall:
        pytest.skip(f"{wall.wall} does not promise this")
    if os.uname().machine != "x86_64" and "call(" in attack.code:
        pytest.skip("its system calls are numbered for x86_64")
    cell = None if attack.limits else waiting.pop(wall.wall, None)
    cell = cell or NamespaceCell(Limits(**{**SMALL, **attack.limits}), wall.wall)
    keep = False
    try:
        keeper = cell.process.pid
        first = descendants(keeper)
        stdin = json.dumps(host["told"]).encode() + b"\n" + (b"x" * (1 << 20) if "stdin" in attack.name else b"")
        began = time.monotonic()
        if (wall.wall == "native") == number % 2:
            ran = cell.run(["python3", "-I", "-c", PRELUDE + attack.code], stdin=stdin, wall=attack.wall)
        else:  # as the pool does it: a copy of the first process, which the code must not get the better of
            ran = cell.call(PRELUDE + attack.code, stdin=stdin, wall=attack.wall)
        outcome = f"{ran.ended} | {ran.stdout.decode(errors='replace')} | {ran.stderr.decode(errors='replace')}"
        assert "ESCAPED" not in outcome and SECRET not in outcome, outcome[:2000]
        assert re.search(attack.saw, outcome), outcome[:2000]
        assert len(ran.stdout) <= SMALL["output"] + 100 and len(ran.stderr) <= SMALL["output"] + 100
        assert time.monotonic() - began < attack.wall + 10
        assert descendants(keeper) == first, "a process of the command is left"
        again = cell.call("print(6 * 7)", wall=8)
        assert again.stdout == b"42\n", f"the box is of no use afterwards: {again}"
        for name, why in UNREAD.get(attack.name, {}).items():
            with pytest.raises(BoxFileError, match=why):
                cell.read(name)
        if attack.name == "core dump":
            assert b"core" not in cell.run(["ls", "/box"]).stdout
        keep = cell.clean and not attack.limits
    finally:
        if not keep:
            cell.kill()
    nothing_reached(host)
    assert not Path("/dev/shm/rondel-left").exists() and not Path("/box").exists()
    if keep:  # as the pool does
        waiting[wall.wall] = cell
        return
    assert cell.process.poll() is not None and all(not Path(f"/proc/{pid}").exists() for pid in (keeper, *first))
    assert not [
        name for home, _ in groups.cgroup_folders().values() for name in os.listdir(home) if name == f"rondel-{keeper}"
    ]


def test_there_are_enough_attacks():
    for wall in WALLS:
        assert len({attack.name for attack in ATTACKS if attack.only in ("", wall)}) >= 150
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


KEPT = "import os, time\nfor _ in range(3):\n    os.fork()\ntime.sleep(600)"
STARTS = """
import sys, threading, time
from rondel.runtime.sandbox.cell import NamespaceCell
from rondel.core.sandbox_types import BoxFileError, Limits
cell = NamespaceCell(Limits(wall=600), sys.argv[1])
print(cell.process.pid, flush=True)
cell.call(sys.argv[2])
"""


def test_a_box_ends_with_its_controller_however_that_ends(wall):
    controller = subprocess.Popen([sys.executable, "-c", STARTS, wall.wall, KEPT], stdout=subprocess.PIPE)
    keeper = int(controller.stdout.readline())
    until(lambda: len(descendants(keeper)) >= 5)
    family = [keeper, *descendants(keeper)]
    controller.kill()
    controller.wait()
    controller.stdout.close()
    until(lambda: not any(map(runs, family)))


def test_a_box_ends_with_its_keeper(wall):
    cell = NamespaceCell(Limits(wall=600), wall.wall)
    into = os.open(os.devnull, os.O_RDWR)
    cell.begin(KEPT, into, into, into)
    os.close(into)
    until(lambda: len(descendants(cell.process.pid)) >= 5)
    family = descendants(cell.process.pid)
    cell.process.kill()
    cell.process.wait()
    until(lambda: not any(map(runs, family)))
    with pytest.raises(SandboxError):
        cell.finish(1.0)


def test_without_control_groups_a_process_is_still_held(wall):
    cell = NamespaceCell(Limits(**SMALL), wall.wall, group=False)
    try:
        assert not cell.grouped
        for one in (
            "x = [bytearray(1 << 24) for _ in range(99)]",
            "import mmap\nx = [mmap.mmap(-1, 1 << 24) for _ in range(99)]",
        ):
            ran = cell.call(one)
            assert ran.exit == 1 and (b"MemoryError" in ran.stderr or b"Cannot allocate" in ran.stderr), ran
        hoard = cell.call(
            "import os\nx = []\nwhile True:\n    x.append(os.memfd_create('x')); os.write(x[-1], bytes(1 << 20))"
        )
        assert "calls" not in wall.holds or b"PermissionError" in hoard.stderr, hoard
        if "user" in wall.holds:
            assert b"BlockingIOError" in cell.call("import os\nwhile True:\n    os.fork()").stderr
    finally:
        cell.kill()


def test_a_folder_of_the_host_is_held_to_its_size(wall, tmp_path):
    (tmp_path / "box").mkdir()
    cell = NamespaceCell(Limits(**SMALL), wall.wall, folder=tmp_path / "box")
    try:
        cell.write("kept", b"before")
        assert (tmp_path / "box" / "kept").read_bytes() == b"before"
        assert cell.call("n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(bytes(1 << 20)); n += 1").limit in (
            "disk",
            "cpu",
            "wall",
        )
        ran = cell.call("import os\nos.symlink('/etc/shadow', 'link'); os.chmod('.', 0o4777)")
        assert ran.exit == 0 or ran.limit == "disk"
        with pytest.raises(OSError):
            cell.read("link")
    finally:
        cell.kill()
    size = sum(f.stat().st_size for f in (tmp_path / "box").iterdir() if not f.is_symlink())
    assert size < 512 << 20, "it was noticed while it was written"


@pytest.mark.skipif(os.geteuid() != 0, reason="only a root can become a plain user")
@pytest.mark.parametrize("name", WALLS)
def test_a_plain_users_box_holds_too(name):
    """The same by user namespaces; with the system's interpreter, because another's home may not be open to all."""
    if not os.access("/usr/bin/python3", os.X_OK) or (
        name == "bubblewrap" and not os.access("/usr/bin/bwrap", os.X_OK)
    ):
        pytest.skip(f"no interpreter for all, or no {name}")
    trial = "from rondel.runtime.sandbox.probe import probe_isolation; import sys; print(probe_isolation(sys.argv[1]).summary_line())"
    done = subprocess.run(
        ["/usr/bin/python3", "-B", "-c", trial, name], env={"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PATH": "/usr/bin:/bin"},
        user=65534, group=65534, extra_groups=[], capture_output=True, text=True, cwd="/", timeout=60,
    )  # fmt: skip
    if done.returncode and re.search(
        "No module named|can't open file|Permission denied: '/|unshare|user namespace", done.stderr
    ):
        pytest.skip(f"{name} is not for plain users here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(what in done.stdout for what in ("files", "network", "processes", "user", "count")), done.stdout


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs a root, and setpriv")
def test_a_root_that_may_not_do_much_has_a_box_by_user_namespaces_or_none():
    """As in a container without CAP_SYS_ADMIN. And one that may do nothing at all is told the remedy."""
    trial = "from rondel.runtime.sandbox.probe import find_isolation; print(find_isolation('native').summary_line())"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    some, none = (
        subprocess.run(
            ["setpriv", f"--bounding-set=-{what}", sys.executable, "-c", trial],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        for what in ("sys_admin", "all")
    )
    held = re.match(r"native: files, network, processes, user", some.stdout)
    assert held or "nothing would contain it" in some.stderr, some.stderr[-2000:]
    assert none.returncode and "nothing would contain it" in none.stderr and "apt install bubblewrap" in none.stderr


def runs(pid: int) -> bool:
    """Not one that only waits for its new parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.02)


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/box"])
def test_what_a_box_would_hide_is_not_shown(place):
    """A virtual environment below /tmp: its packages were "not installed" in the box."""
    with pytest.raises(SandboxError, match=rf"{place}/venv/numpy cannot be shown .* elsewhere than below {place}"):
        NamespaceCell(Limits(), WALLS[0], shown=(f"{place}/venv/numpy",))
