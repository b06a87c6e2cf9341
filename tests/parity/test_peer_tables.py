"""The keys and defaults that `rondel import` knows are those of the peers' releases, where a peer is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from rondel.algos.table import resolve_algorithm
from rondel.cli.import_ import RecipeTable
from rondel.core.config.job import Job
from rondel.importing.openrlhf import OPENRLHF
from rondel.importing.peer import PeerFormat
from rondel.importing.read import read_config
from rondel.importing.translate import nest_lines, translate_config
from rondel.importing.trl import TRL
from rondel.importing.verl import VERL


def installed(peer: PeerFormat) -> Path:
    """The folder of the peer's package, of the very release that the table is of."""
    found = importlib.util.find_spec(peer.name)
    if found is None or importlib.metadata.version(peer.name) != peer.release:
        pytest.skip(f"{peer.name} {peer.release} is not installed")
    return Path(str(found.submodule_search_locations[0]))


def compare(peer: PeerFormat, theirs: dict[str, Any]) -> None:
    assert len(theirs) > 100 and [key for key in theirs if not peer.knows_key(peer.canonical_key(key))] == []
    plain = {
        key: value
        for key, value in theirs.items()
        if key in peer.defaults and isinstance(value, bool | int | float | str)
    }
    assert {key: value for key, value in plain.items() if peer.defaults[key] != value} == {}


def test_trl():
    installed(TRL)
    from trl import GRPOConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    compare(
        TRL,
        {
            f.name: None if f.default is MISSING else f.default
            for cls in (GRPOConfig, ModelConfig, GRPOScriptArguments)
            for f in fields(cls)
        },
    )


def test_verl():
    text = (installed(VERL) / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    theirs = read_config("verl", text)
    compare(
        VERL, {key: value for key, value in theirs.items() if not key.endswith("_target_") and "${" not in str(value)}
    )


def test_openrlhf():
    tree = ast.parse((installed(OPENRLHF) / "cli" / "train_ppo_ray.py").read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    theirs = {}
    for call in calls:
        default = next((word.value for word in call.keywords if word.arg == "default"), None)
        if isinstance(call.args[0], ast.Constant):
            theirs[call.args[0].value.lstrip("-")] = default.value if isinstance(default, ast.Constant) else None
    compare(OPENRLHF, theirs)


def test_the_whole_config_of_verl_becomes_a_recipe():
    """A printed config names every key: all are known, none is lost, and the run is that of a bare command."""
    text = (installed(VERL) / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    given = read_config("verl", text)
    report, bare = translate_config(VERL, given, RecipeTable()), translate_config(VERL, {}, RecipeTable())
    assert sorted([*report.translated, *report.same, *report.missing]) == sorted(given) and not report.unknown
    whole, short = (Job.parse(nest_lines(r.lines)).to_dict() for r in (report, bare))
    rows = [
        resolve_algorithm({key: table for key, table in tree.pop("algo").items() if table and key != "group_size"})
        for tree in (whole, short)
    ]
    # speed and devices alone
    assert rows[0] == rows[1] and whole["engine"].pop("max_running") == 256 and short["engine"].pop("max_running") == 64
    assert whole["place"]["engines"]["tp"] == 2 and short["place"]["engines"] == 1
    assert whole["task"]["eval"].pop("sampling") == {"temperature": 0.0}, "greedy, as where nothing is said"
    assert not short["task"]["eval"].pop("sampling")
    apart = {"run", "place"}
    assert {name: whole[name] for name in whole.keys() - apart} == {name: short[name] for name in short.keys() - apart}
