"""How many keys a recipe has, and that each of them says what it means."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kits.runs import tiny
from rondel.core.config.job import Job
from rondel.core.config.renamed_keys import MOVED_KEYS

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


def test_a_phase_that_is_left_out_has_no_settings(tmp_path):
    job = tiny(tmp_path, loop__warmup__steps=0)
    assert job.loop.warmup.lr == Job.model_fields["loop"].annotation.model_fields["warmup"].default.lr
