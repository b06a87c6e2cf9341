"""Source distributions of PyPI, fetched by pip at a pinned version, with their sha256 compared."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from rondel.core.errors import DataError
from rondel.generate.envs.repository.catalogue import SourcePackage

SECONDS = 300.0


def sdist_of(package: SourcePackage, cache: Path) -> Path:
    """The file in `cache`, fetched where it is not there. DataError with pip's last words."""
    if (found := _in_cache(package, cache)) is None:
        cache.mkdir(parents=True, exist_ok=True)
        needs = cache / f"{package.name}.txt"
        needs.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--require-hashes", "--dest", str(cache), "--requirement", str(needs)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"pip cannot fetch the source of {package.title}: {error}") from error
        finally:
            needs.unlink()
        if (found := _in_cache(package, cache)) is None:
            said = ran.stderr.strip().rpartition("\n")[2] or f"exit code {ran.returncode}"
            raise DataError(
                f"pip cannot fetch the source of {package.title}: {said}. Is the machine online? Or put the file into "
                f"{cache}"
            )
    held = hashlib.sha256(found.read_bytes()).hexdigest()
    if held != package.sha256:
        raise DataError(f"{found} has the sha256 {held}, and {package.title} has {package.sha256}: remove the file")
    return found


def _in_cache(package: SourcePackage, cache: Path) -> Path | None:
    stem = package.name.replace("-", "_")
    found = [path for name in (stem, package.name) for path in cache.glob(f"{name}-{package.version}.tar.gz")]
    return found[0] if found else None
