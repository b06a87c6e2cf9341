"""What runs inside a box to look after its files: one request as JSON on stdin, one answer as JSON on stdout.

{"do": "put", "placed": [[folder, {path: [mode, base64, link]}], ...]}   writes files, in this order
{"do": "state", "root", "known": {path: sum}}                     -> what is otherwise than known, and the digest
{"do": "digest" | "list" | "read" | "edit" | "write" | "search"}  tools of the policy

Nothing that the policy writes is imported by it, and it imports the standard library alone: it is sent as text to
`python3 -I -S`, or to a copy of the box's first interpreter, which has no folder of the box on its path. An answer
{"error": text} is for the policy to read.
"""

import base64
import difflib
import json
import os
import stat
import sys
from hashlib import blake2b

SKIPPED = ("__pycache__", ".git", ".hg", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache")
TIME = 946684800  # of every file that is put there: the first of January 2000


class Refused(Exception):
    """For the policy to read."""


def files_below(root):
    """Paths of all files and links, in order, without what tools leave behind."""
    found = []
    for folder, folders, names in os.walk(root):
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = sorted(name for name in folders if name not in SKIPPED and name not in linked)
        for name in names + linked:
            path = os.path.join(folder, name)
            if not name.endswith(".pyc") and stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFREG, stat.S_IFLNK):
                found.append(os.path.relpath(path, root))
    return sorted(found)


def contents(path):
    """(bytes, whether it can be run, where a link leads)"""
    if os.path.islink(path):
        return b"", False, os.readlink(path)
    mode = os.lstat(path).st_mode
    if not mode & 0o400:
        os.chmod(path, mode | 0o600)
    with open(path, "rb") as file:
        return file.read(), bool(mode & 0o100), ""


def checksum(held):
    data, runs, link = held
    return blake2b(f"{link}\0{int(runs)}\0".encode(errors="surrogateescape") + data, digest_size=16).hexdigest()


def put(root, placed):
    for path, (mode, data, link) in (
        (os.path.join(folder, path), held) for folder, files in placed for path, held in files.items()
    ):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.lexists(path):
            os.remove(path)
        if link:
            os.symlink(link, path)
            continue
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
        os.chmod(path, mode)
        os.utime(path, (TIME, TIME))
    return {}


def state(root, known):
    """Files that are new or otherwise, those that are gone, and the digest of all that are there."""
    changed, sums = {}, {}
    for path in files_below(root):
        held = contents(os.path.join(root, path))
        sums[path] = checksum(held)
        if known.get(path) != sums[path]:
            changed[path] = [0o755 if held[1] else 0o644, base64.b64encode(held[0]).decode(), held[2]]
    return {"changed": changed, "gone": sorted(set(known) - set(sums)), "digest": digest_of(sums)}


def digest(root):
    return {"digest": digest_of({path: checksum(contents(os.path.join(root, path))) for path in files_below(root)})}


def digest_of(sums):
    whole = blake2b(digest_size=16)
    for path, held in sums.items():
        whole.update(f"{path}\0{held}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


def existing_file(root, path):
    """The whole path of a file of the repository; else what there is under names like it."""
    whole = os.path.normpath(os.path.join(root, path))
    if os.path.isfile(whole):
        return whole
    if os.path.isdir(whole):
        raise Refused(f"{path} is a folder: list_files lists it")
    near = difflib.get_close_matches(path, files_below(root), n=3, cutoff=0.5)
    raise Refused(f"there is no file {path}." + (f" There is: {', '.join(near)}" if near else " See list_files"))


def text_at(root, path):
    whole = existing_file(root, path)
    try:
        with open(whole, encoding="utf-8", newline="") as file:
            return whole, file.read()
    except UnicodeDecodeError:
        raise Refused(f"{path} is not text") from None


def list_below(root, folder, most):
    whole = os.path.normpath(os.path.join(root, folder))
    if not os.path.isdir(whole):
        raise Refused(f"there is no folder {folder}")
    found = files_below(whole)
    return {"files": found[:most], "left_out": max(0, len(found) - most)}


def read_lines(root, path, first, last):
    _, text = text_at(root, path)
    lines = text.splitlines()
    if first > max(1, len(lines)):
        raise Refused(f"{path} has {len(lines)} lines")
    last = min(last, len(lines))
    shown = [f"{number:5d}  {line}" for number, line in enumerate(lines[first - 1 : last], first)]
    more = f"\n[{path} has {len(lines)} lines]" if first > 1 or last < len(lines) else ""
    return {"text": "\n".join(shown) + more}


def edit(root, path, old, new):
    whole, text = text_at(root, path)
    if not old:
        raise Refused("old is empty: name the text that is to be replaced, or write the whole file with write_file")
    if old == new:
        raise Refused("old and new are equal: nothing would change")
    places = text.count(old)
    if places > 1:
        lines = [str(text[:at].count("\n") + 1) for at in range(len(text)) if text.startswith(old, at)]
        raise Refused(
            f"old stands {places} times in {path} (lines {', '.join(lines[:8])}): take more lines with it, so that it "
            "is one place"
        )
    if not places:
        lines = text.splitlines()
        near = difflib.get_close_matches(old.splitlines()[0] if old.splitlines() else old, lines, n=1, cutoff=0.6)
        hint = f" The line most like it is {lines.index(near[0]) + 1}: {near[0]!r}" if near else ""
        raise Refused(f"old is not in {path}; it must be copied exactly, with its spaces.{hint}")
    with open(whole, "w", encoding="utf-8", newline="") as file:
        file.write(text.replace(old, new))
    return {"text": f"changed line {text[: text.index(old)].count(chr(10)) + 1} of {path}"}


def write(root, path, text):
    whole = os.path.normpath(os.path.join(root, path))
    if os.path.isdir(whole):
        raise Refused(f"{path} is a folder")
    os.makedirs(os.path.dirname(whole), exist_ok=True)
    with open(whole, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    return {"text": f"wrote {len(text.splitlines())} lines to {path}"}


def search(root, text, most):
    if not text:
        raise Refused("the text to search for is empty")
    found, more = [], 0
    for path in files_below(root):
        try:
            with open(os.path.join(root, path), encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for number, line in enumerate(lines, 1):
            if text in line:
                if len(found) < most:
                    found.append(f"{path}:{number}: {line.strip()[:200]}")
                else:
                    more += 1
    if more:
        found.append(f"[{more} more lines left out]")
    return {"text": "\n".join(found) or f"no file has {text!r}"}


VERBS = {
    "put": put,
    "state": state,
    "digest": digest,
    "list": list_below,
    "read": read_lines,
    "edit": edit,
    "write": write,
    "search": search,
}


def main():
    request = json.load(sys.stdin)
    verb = VERBS[request.pop("do")]
    try:
        answer = verb(**request)
    except Refused as error:
        answer = {"error": str(error)}
    except OSError as error:
        name = os.path.relpath(error.filename, request["root"]) if isinstance(error.filename, str) else "the file"
        answer = {"error": f"{name}: {error.strerror}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
