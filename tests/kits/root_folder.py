"""A root file system for containers, of this machine's own shell and /usr/bin/python3: no download, no image."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("/usr/bin/python3", "/bin/dash", "/bin/cat", "/bin/mkdir", "/bin/chmod", "/usr/bin/dirname", "/bin/sleep")
FOLDERS = ("box", "dev", "proc", "sys", "tmp", "etc", "usr/bin", "usr/lib")


def make_root(folder: Path) -> Path | None:
    """None where the machine has no such interpreter."""
    if not all(Path(name).exists() for name in PROGRAMS):
        return None
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    (folder / "usr/lib64").mkdir()
    found = {name: f"usr/bin/{Path(name).name}" for name in PROGRAMS}
    libraries = sorted(Path("/usr/lib").glob("python3.*/lib-dynload/*.so"))
    told = subprocess.run(["ldd", *PROGRAMS, *map(str, libraries)], capture_output=True, text=True).stdout
    for path in set(re.findall(r"(/\S+\.so\S*) \(0x", told)):
        found[path] = path.lstrip("/") if path.startswith("/usr") else f"usr{path}"
    for source, inside in found.items():
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(source).resolve(), folder / inside)
        (folder / inside).chmod(0o755)
    (folder / "usr/bin/sh").symlink_to("dash")
    home = Path("/usr/lib") / Path("/usr/bin/python3").resolve().name
    leave = shutil.ignore_patterns("__pycache__", "test", "idlelib", "tkinter", "config-*", "lib2to3", "distutils")
    shutil.copytree(home, folder / home.relative_to("/"), ignore=leave, symlinks=True, ignore_dangling_symlinks=True)
    return folder
