"""What the processes of a run would refuse as they start is refused by the recipe, or by `rondel check`, which starts none."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from kits.engine import SIZE
from kits.engine import tiny as engine_model
from kits.engine_ranks import whole
from kits.runs import tiny
from kits.vision import model as vision_model
from rondel.assemble.format_refusals import ROW_SCALES, TENSOR_SCALES, refuse_formats
from rondel.assemble.rows import rows_of
from rondel.checks.layout_check import check_layouts
from rondel.checks.recipe_check import _check_reward_device, check
from rondel.core.config.place import PlaceConfig
from rondel.core.errors import ConfigError
from rondel.formats import FORMATS
from rondel.models.weight_formats import apply_format

SPLIT = {"place__kind": "split"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"place__ranks": 2, "trainer__memory__offload": True}, "trainer.memory.offload = true with place.ranks = 2"),
        (SPLIT | {"place__engines": {"tp": 2}, "run__record": True}, "place.engines.tp = 2 .*set run.record = false"),
        (SPLIT | {"engine__kind": "sglang"}, "needs an address: engine.url"),
    ],
)
def test_a_check_refuses_what_a_run_of_several_processes_refuses(tmp_path, changes, said):
    """Its own parts are in one process, where all of these would go unseen."""
    [found] = check(tiny(tmp_path, **changes))
    assert (found.what, found.ok) == ("recipe", False)
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(found.message)


def test_formats_whose_scales_every_cut_shares():
    """The names that a recipe is refused by are what the formats say of themselves."""
    of_tensor = {name for name, form in FORMATS.items() if form.scales_tensor or form.block[0] == 0}
    of_row = {name for name, form in FORMATS.items() if form.block[1] == 0}
    assert (of_tensor, of_row - of_tensor) == (TENSOR_SCALES, ROW_SCALES)


@pytest.mark.parametrize(
    ("name", "mesh", "said"),
    [
        ("nvfp4", {"shards": 2}, r"a scale for a whole tensor, .*\{ shards = 2 \} cut.*replicas alone"),
        ("fp8_tensor", {"cp": 2}, "a scale for a whole tensor, .*replicas alone"),
        ("fp8_row", {"tp": 2}, "a scale for a whole row, .*shards or cp instead of tp"),
        ("nvfp4", {"replicas": 2}, ""),
        ("fp8_row", {"shards": 2, "cp": 2}, ""),
        ("fp8", {"tp": 2}, ""),
    ],
)
def test_a_recipe_whose_ranks_would_cut_scales_is_refused(tmp_path, name, mesh, said):
    job = tiny(tmp_path, **SPLIT, model__format=name, place__mesh=mesh)
    if not said:
        return refuse_formats(job, rows_of(job))
    with pytest.raises(ConfigError, match=said):
        refuse_formats(job, rows_of(job))


def layouts(tmp_path, loaded, **changes):
    trainer = SimpleNamespace(loaded=loaded)
    parts = SimpleNamespace(trainer=trainer, placed=SimpleNamespace(trainers={"policy": trainer}))
    [found] = check_layouts(tiny(tmp_path, **SPLIT, **changes), parts)
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "said"),
    [
        ("fp8", {"tp": 2}, r"blocks of 128 x 128, and a rank of the trainer holds \[32, 64\] of .*take a format"),
        ("fp8", {"shards": 2}, "blocks of 128 x 128.*or fewer ranks"),
        ("int4_128", {"tp": 2}, r"blocks of 1 x 128, .*\[64, 32\] of .*o_proj.* take shards or cp instead of tp"),
        ("int4", {"tp": 2}, ""),
        ("int4_128", {"shards": 2}, ""),
    ],
)
def test_a_check_says_which_blocks_ranks_would_cut(tmp_path, name, mesh, said):
    loaded = engine_model("llama", **SIZE | {"intermediate_size": 128})
    apply_format(loaded.model, name)
    found = layouts(tmp_path, loaded, model__format=name, place__mesh=mesh)
    assert found.ok == (not said), found.message
    with pytest.raises(ConfigError, match=said or "heads, experts and layers divide"):
        raise ConfigError(found.message)


@pytest.mark.parametrize(
    ("load", "engines", "said"),
    [
        (partial(whole, "deepseek_v32"), {"tp": 2}, "an indexer cannot be cut"),
        (partial(whole, "llama"), {"dp": 2, "ep": 2}, "has no experts"),
        (partial(whole, "llama"), {"tp": 2, "ep": 2}, "leave ep out"),
        (partial(whole, "llama"), {"encoders": 1}, "the model reads text alone. Leave out encoders"),
        (vision_model, {"prefill": True}, ""),
        (vision_model, {"tp": 2, "encoders": 1}, ""),
    ],
)
def test_a_check_says_what_processes_of_an_engine_would_refuse(tmp_path, load, engines, said):
    found = layouts(tmp_path, load(), place__engines=engines)
    sizes = PlaceConfig(kind="split", engines=engines).engine_sizes
    assert found.ok == (not said) and (said or f"place.engines: {sizes}: heads") in found.message


def test_a_check_says_that_a_reward_cannot_leave_its_device(tmp_path):
    """Of one's own, which no key of the recipe tells of: the trainer of two ranks has no one module that it sleeps beside."""
    parts = SimpleNamespace(pool=SimpleNamespace(naps=True))
    assert _check_reward_device(tiny(tmp_path), parts) == []
    [found] = _check_reward_device(tiny(tmp_path, place__ranks=2), parts)
    assert not found.ok and "is for one policy with place.kind = 'shared' and one rank" in found.message
