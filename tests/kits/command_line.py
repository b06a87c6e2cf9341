"""The command line, asked in this process: what it says, and the one line of an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondel.cli import main

TINY = Path(__file__).parents[2] / "recipes" / "tiny.toml"


SMALL = [
    "--loop.warmup.steps=0",
    "--loop.steps=2",
    "--loop.groups_per_step=2",
    "--algo.group_size=2",
    "--run.sinks=[]",
    "--place.threads=1",
    "--loop.max_refills=1",
]


def say(capfd, *words: str) -> tuple[int, str]:
    """Run the command line; -> (exit code, what it said on stderr)."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return end.value.code or 0, capfd.readouterr().err


def broken(capfd, tmp_path, *overrides: str, verb: str = "train", recipe: Path = TINY) -> str:
    code, err = say(capfd, verb, str(recipe), f"--run.folder={tmp_path / 'run'}", *SMALL, *overrides)
    assert code == 1, err
    assert "Traceback" not in err and "bug of ours" not in err
    (line,) = [row for row in err.splitlines() if row.startswith("error:")]
    return line
