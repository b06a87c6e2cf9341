"""A recorded run of points, actions, chunks, learned worlds, blocks or several policies, done again bit for bit (law 9).

Requests are answered slowly, so that new weights come while episodes and chains are under way.
"""

from __future__ import annotations

import pytest

from kits.recordings import SPLIT, again, record_job
from kits.runs import (
    BLOCKS,
    CARTPOLE,
    CARTPOLE_MODEL,
    CATCH,
    CATCH_CHUNKS,
    DIGITS,
    FLOW,
    PENDULUM_CHUNKS,
    events,
    run,
    tiny,
)
from kits.sweeps import covering
from rondel.core.errors import ConfigError
from rondel.driver import replay

pytestmark = pytest.mark.slow
RECORDED = {
    "run__record": True,
    "loop__max_staleness": 1,
    "loop__window": "auto",
    "loop__steps": 4,
    "engine__max_running": 8,
}
ALIGNED = {"engine__numerics": "aligned"}
IMPORTANCE = {"algo__correction": {"kind": "importance"}}
PAIR = [{"agent": "writer", "says": "{prompt}"}, {"agent": "critic", "says": "{prompt}? {writer} "}]
RELAY = {
    "task__env": {"kind": "agents", "agents": PAIR}, "policies__critic": {}, "loop__warmup__steps": 0,
    "model__path__max_position_embeddings": 128, "algo__group_size": 2, "engine__sampling": {"max_tokens": 6},
}  # fmt: skip
FEW = {"loop__warmup__steps": 1, "loop__groups_per_step": 2, "loop__steps": 3}
KINDS = {  # seconds that a step of the engine waits at most, and the recipe
    "points": (0.02, {"recipe": FLOW, **FEW, "loop__groups_per_step": 4}),
    "images": (0.02, {"recipe": DIGITS, **FEW}),
    "actions": (0.02, {"recipe": CARTPOLE, **IMPORTANCE}),
    "chunks": (0.05, {"recipe": PENDULUM_CHUNKS, **IMPORTANCE}),
    "chunks from pictures": (0.5, {"recipe": CATCH_CHUNKS, **FEW}),
    "actions as tokens": (0.05, {"recipe": CATCH, **FEW, **ALIGNED}),
    "learned worlds": (0.02, {"recipe": CARTPOLE_MODEL, **IMPORTANCE}),
    "blocks": (0.02, {"recipe": BLOCKS, **FEW, **ALIGNED, "engine__sampling": {"max_tokens": 12, "ignore_eos": True}}),
    "several policies": (0.02, {**RELAY, **IMPORTANCE, **ALIGNED, "loop__groups_per_step": 2}),
}  # fmt: skip


def record(folder, kind, seed=3, **changes):
    """Under delays of this seed. The run is one that nothing but its schedule determines: some of it was behind."""
    engine_s, given = KINDS[kind]
    record_job(tiny(folder, **{**RECORDED, **SPLIT, **given, **changes}), seed, engine_s=engine_s)
    assert any(e["version"] > min(e["born"]) for e in events(folder, "GroupsTaken")), "nothing was behind"


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_run_is_replayed_bit_for_bit(kind, tmp_path):
    record(tmp_path / "run", kind)
    again(tmp_path / "run", tmp_path / "again", seed=7)


def test_beside_weights_that_stay_as_they_are(tmp_path):
    """Their answers have the version of the episode, whenever they are computed."""
    frozen = {"model": {"random": "mlp_world", "hidden_size": 16, "ensemble": 2}, "frozen": True}
    agents = ["world.observed", "world.predicted"]
    record(tmp_path / "run", "learned worlds", policies={"world": {**frozen, "agents": agents}})
    again(tmp_path / "run", tmp_path / "again", seed=7)


CUT = [(kind, how) for kind in ("points", "actions", "learned worlds", "blocks") for how in ("abort", "drain")]


@pytest.mark.parametrize(
    ("kind", "how"), covering(CUT, [("points", "abort"), ("blocks", "abort"), ("learned worlds", "drain")])
)
def test_whatever_becomes_of_answers_in_flight(kind, how, tmp_path):
    record(tmp_path / "run", kind, loop__in_flight=how)
    again(tmp_path / "run", tmp_path / "again", seed=8)


def test_without_the_schedule_it_is_another_run(tmp_path):
    """Or the law would hold of runs that nothing disturbs."""
    record(tmp_path / "run", "points")
    record(tmp_path / "other", "points", seed=9)
    assert replay.differences(tmp_path / "run", tmp_path / "other")


def test_engines_in_processes_are_replayed_in_one_and_ranks_as_so_many(tmp_path):
    given = {**RECORDED, **KINDS["points"][1], "loop__steps": 2}
    run(tmp_path / "run", **given, place__kind="split", place__engines=2, place__ranks=2)
    again(tmp_path / "run", tmp_path / "again")


def test_blocks_whose_bits_depend_on_their_batch_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.record: engine\.numerics = \"fast\""):
        run(tmp_path, **{**RECORDED, **KINDS["blocks"][1], "engine__numerics": "fast"})
