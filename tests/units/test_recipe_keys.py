"""How many keys a recipe has, and that each of them is read or refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from run_kit import tiny

from rondel.assemble import train
from rondel.core.config.job import Job
from rondel.core.config.renamed_keys import MOVED_KEYS
from rondel.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
MOST = 80


def page_maker():
    spec = importlib.util.spec_from_file_location("make_recipe", ROOT / "docs" / "make_recipe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe_keys():
    list_keys = page_maker().keys
    return list_keys()


def test_a_recipe_has_few_keys():
    """As docs/recipe.md lists them: a table of settings is one key."""
    names = [name for name, _ in recipe_keys()]
    assert len(names) <= MOST, f"{len(names)} keys, at most {MOST}: put settings of one thing into its table"


def test_every_key_and_every_setting_says_what_it_means():
    made = page_maker()
    fields = dict(made.keys()) | {
        f"{title}: {name}": field
        for title, model in made.setting_tables().items()
        for name, field in model.model_fields.items()
    }
    assert [name for name, field in fields.items() if not field.description] == []


def test_a_moved_key_is_none_of_today():
    today = {name for name, _ in recipe_keys()}
    assert not today & MOVED_KEYS.keys()


def test_a_key_that_allows_one_value_is_gone():
    kinds = [field.annotation for _, field in recipe_keys()]
    assert [k for k in kinds if str(k).startswith("typing.Literal") and len(k.__args__) < 2] == []


IDLE = {  # set, and read by nothing in a run like this one; or refused because of another key
    "place.address": ({"place__address": "auto"}, "place.address"),
    "place.patience": ({"place__patience": 5.0}, "place.patience"),
    "loop.late": ({"loop__late": "retry"}, "late"),
    "policies.critic": ({"policies__critic": {}}, "policies.critic"),
    "task.eval.every": ({"task__data__holdout": 0, "task__eval__every": 3}, "task.eval.every"),
    "engine.speculative.k": ({"engine__speculative__k": 2}, "k has no effect"),
}


@pytest.mark.parametrize("key", IDLE)
def test_a_set_key_that_nothing_reads_is_an_error(tmp_path, key):
    changes, match = IDLE[key]
    with pytest.raises(ConfigError, match=match):
        train(tiny(tmp_path, loop__warmup__steps=0, **changes), quiet=True)


def test_a_phase_that_is_left_out_has_no_settings(tmp_path):
    job = tiny(tmp_path, loop__warmup__steps=0)
    assert job.loop.warmup.lr == Job.model_fields["loop"].annotation.model_fields["warmup"].default.lr


@pytest.mark.slow
def test_workers_tell_what_they_read(tmp_path):
    """A split run has no section that is read on trust: what its workers read is counted there."""
    job = tiny(
        tmp_path, place__kind="split", loop__warmup__steps=0, loop__steps=1, trainer__optimizer__weight_decay=0.1
    )
    train(job, quiet=True)
    assert job.unread_keys() == [] and "weight_decay" in job.trainer.optimizer._read
    fresh = tiny(tmp_path, trainer__optimizer__weight_decay=0.1)
    assert "trainer.optimizer.weight_decay" in fresh.unread_keys()
    fresh.mark_read(job.read_keys())
    assert fresh.unread_keys() == ["loop.warmup.lr"], "that run had no such phase"
