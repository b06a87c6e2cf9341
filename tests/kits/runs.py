"""Whole tiny runs for tests: in this process, or in one that dies at a chosen moment.
Children are forked from a clean server.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from kits.nursery import fork_nursery
from rondel.core.config.job import Job
from rondel.core.errors import Stopped
from rondel.core.events import subscribe
from rondel.runtime.journal import store
from rondel.runtime.journal.log import read

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
FAST = {
    "loop.warmup.steps": 3, "loop.warmup.groups_per_step": 8, "loop.steps": 8, "loop.groups_per_step": 4, "algo.group_size": 4,
    "model.path.hidden_size": 32, "model.path.intermediate_size": 64, "model.path.num_hidden_layers": 2,
    "engine.max_running": 32, "place.threads": 1, "trainer.lr": 1e-3, "trainer.schedule": "constant", "loop.warmup.lr": 3e-3,
    "run.checkpoint.every": 3, "run.checkpoint.keep": 2, "run.sinks": [], "task.data.holdout": 10, "task.eval.every": 0,
}  # fmt: skip


class FromCleanServer(ForkServerProcess):
    """A process forked from the server that has imported `kits.preloaded`.

    Python 3.11 does not hand its search path to that server, which then imports nothing beforehand and says nothing.
    """

    def start(self) -> None:
        self.start_server()
        super().start()

    @staticmethod
    def start_server() -> None:
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [given])])
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop("PYTHONPATH")
            if given is not None:
                os.environ["PYTHONPATH"] = given


class CleanServer(ForkServerContext):
    Process = FromCleanServer


context = CleanServer()
context.set_forkserver_preload(["kits.preloaded"])


def start_clean_server(*preloaded: str) -> str:
    """-> its address: one server for all workers of a session, who would else import torch and transformers each.
    `preloaded`: modules that it imports, too.
    """
    context.set_forkserver_preload(["kits.preloaded", *preloaded])
    FromCleanServer.start_server()
    return forkserver._forkserver._forkserver_address


def use_clean_server(address: str) -> None:
    """The processes of this one are forked from a server that is another's child: it is not waited for, nor started."""
    server = forkserver._forkserver
    server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)


FLOW = RECIPE.with_name("flow.toml")
DIGITS = RECIPE.with_name("digits.toml")
VIDEO = RECIPE.with_name("video.toml")
BLOCKS = RECIPE.with_name("blocks.toml")
FAST_FLOW = {
    "loop.warmup.steps": 4, "loop.warmup.groups_per_step": 4, "loop.steps": 6, "loop.groups_per_step": 4,
    "algo.group_size": 4, "model.path.hidden_size": 16, "task.env": {"kind": "flow", "points": 8},
    "engine.sampling.max_tokens": 4, "place.threads": 1, "run.checkpoint.every": 3, "run.checkpoint.keep": 2, "run.sinks": [],
}  # fmt: skip
CARTPOLE = RECIPE.with_name("cartpole.toml")
PENDULUM = RECIPE.with_name("pendulum.toml")
CARTPOLE_MODEL = RECIPE.with_name("cartpole_model.toml")
PENDULUM_CHUNKS = RECIPE.with_name("pendulum_chunks.toml")
FAST_CONTROL = {
    "loop.steps": 4, "loop.groups_per_step": 4, "loop.updates_per_step": 2, "loop.epochs": 2, "algo.group_size": 1,
    "model.path.hidden_size": 16, "task.env.turns": 12, "task.data.n": 200, "task.data.eval_n": 2, "task.eval.every": 0,
    "place.threads": 1, "run.checkpoint.every": 3, "run.checkpoint.keep": 2, "run.sinks": [],
}  # fmt: skip
CATCH = RECIPE.with_name("catch.toml")
FAST_CATCH = {
    "loop.warmup.steps": 2, "loop.warmup.groups_per_step": 2, "loop.steps": 3, "loop.groups_per_step": 2, "algo.group_size": 4,
    "model.path.num_hidden_layers": 2, "task.data.n": 200, "task.data.eval_n": 2, "task.eval.every": 0,
    "place.threads": 1, "run.checkpoint.every": 3, "run.checkpoint.keep": 2, "run.sinks": [],
}  # fmt: skip
CATCH_CHUNKS = RECIPE.with_name("catch_chunks.toml")
FAST_CATCH_CHUNKS = {
    "model.path.backbone.num_hidden_layers" if name == "model.path.num_hidden_layers" else name: value
    for name, value in FAST_CATCH.items()
}
FAST_MODEL = FAST_CONTROL | {
    "policies.world.model.hidden_size": 16, "policies.world.model.ensemble": 2, "policies.world.epochs": 4,
    "task.env.model.branches": 3, "task.env.model.horizon": 4, "task.env.model.trust": 100.0, "task.env.model.memory": 60,
}  # fmt: skip


def tiny(folder: Path, recipe: Path = RECIPE, **changes: Any) -> Job:
    """The tiny recipe, or that of a flow or of a world, smaller still; `loop__max_staleness=1` sets loop.max_staleness."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    fast = {FLOW: FAST_FLOW, DIGITS: FAST_FLOW, VIDEO: FAST_FLOW, CARTPOLE: FAST_CONTROL, PENDULUM: FAST_CONTROL}
    fast |= {CARTPOLE_MODEL: FAST_MODEL, PENDULUM_CHUNKS: FAST_CONTROL, CATCH: FAST_CATCH}
    fast = (fast | {CATCH_CHUNKS: FAST_CATCH_CHUNKS}).get(recipe, FAST)
    return Job.read(recipe, {**fast, "run.folder": str(folder), **dotted})


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    from rondel.assemble import train

    return train(tiny(folder, **changes), quiet=True)


def run_and_die(folder: Path, moment: tuple[str, int], what: signal.Signals = signal.SIGKILL, **changes: Any) -> int:
    """The same run in another process, which signals itself at the n-th event of a kind, or
    the n-th fsync. -> -9 if it was killed. Fails with its traceback where it has one: its stderr is that of the server.
    """
    last_words = folder.parent / f"{folder.name}-traceback.txt"
    child = context.Process(target=_child, args=(folder, moment, what, changes, last_words))
    child.start()
    child.join(120)
    assert child.exitcode is not None, "the child hangs"
    assert not last_words.exists(), last_words.read_text()
    return child.exitcode


def _child(
    folder: Path, moment: tuple[str, int], what: signal.Signals, changes: dict[str, Any], last_words: Path
) -> None:
    try:
        fork_nursery()
        _run_until(folder, moment, what, changes)
    except Exception:
        last_words.write_text(traceback.format_exc())
        raise


def _run_until(folder: Path, moment: tuple[str, int], what: signal.Signals, changes: dict[str, Any]) -> None:
    kind, n = moment
    seen = 0

    def tick(name: str) -> None:
        nonlocal seen
        seen += name == kind
        if seen == n and name == kind:
            os.kill(os.getpid(), what)

    if kind == "fsync":  # the manifest of a checkpoint is being written
        plain = os.fsync
        os.fsync = lambda descriptor: (tick("fsync"), plain(descriptor))[1]
    subscribe(lambda event: tick(type(event).__name__))
    try:
        run(folder, **changes)
    except Stopped as stopped:
        sys.exit(stopped.code)


def final(folder: Path) -> dict[str, Any]:
    """All tensors of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return {f"{path.stem}/{key}": t for path in newest.glob("*.safetensors") for key, t in load_file(path).items()}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read(folder) if e["kind"] == kind]


def steps(folder: Path) -> list[tuple]:
    """What every step measured, without the clock."""
    return [
        (e["step"], e["version"], {k: v for k, v in e["metrics"].items() if not k.endswith("_s")}, e["ledger"])
        for e in events(folder, "StepDone")
    ]


def balances(ledger: dict[str, int]) -> bool:
    return ledger["issued"] == sum(n for name, n in ledger.items() if name != "issued")


def check(folder: Path, *, staleness: int, total: int, groups: int = 4, size: int = 4, block: int = 1) -> list[dict]:
    """Ledger, versions, lag, rollouts of a finished run. -> the stored rows. Tokens of one `block` are written in any order."""
    done = events(folder, "StepDone")
    assert [e["step"] for e in done] == [e["version"] for e in done] == list(range(1, total + 1))
    assert all(balances(e["ledger"]) and not e["note"] for e in done)
    assert events(folder, "RunEnded")[-1]["step"] == total
    born = {e["number"]: e["version"] for e in events(folder, "Admitted")}
    rows = []
    for taken in events(folder, "GroupsTaken"):
        assert all(0 <= taken["version"] - b <= staleness for b in taken["born"])
        step = store.read_step(folder, taken["step"])
        rows += step
        assert {r["group"] for r in step} == set(taken["numbers"])
        for row in step:
            assert row["trained_at"] == taken["version"]
            written = [v for v, m in zip(row["versions"], row["mask"]) if m]
            assert all(v == -1 for v, m in zip(row["versions"], row["mask"]) if not m)
            if row["agent"] == "world.predicted":  # nothing learns from it
                continue
            assert len(row["trainer_logprobs"]) == len(row["advantages"]) == len(row["tokens"])
            if row["env"] and written and any(row["behavior_logprobs"]):  # sampled, not shown
                assert row["born"] <= min(written) and max(written) <= taken["version"]
                blocks = [written[i : i + block] for i in range(0, len(written), block)]
                assert all(max(before) <= min(after) for before, after in pairwise(blocks))
                fresh = set(written) == {taken["version"]}
                gap = max(
                    abs(a - b) for a, b, m in zip(row["trainer_logprobs"], row["behavior_logprobs"], row["mask"]) if m
                )
                assert gap < 2e-4 or not fresh, "the trainer recomputes what its own version wrote"
    assert born
    assert final(folder)
    return rows


PLACES = {
    "shared": {},
    "two devices": {"place__kind": "split", "place__cluster": "local"},
    "processes": {"place__kind": "split"},
}
