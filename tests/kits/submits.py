"""A recipe on a cluster, as `rondel submit` lays it out."""

from __future__ import annotations

from pathlib import Path

from rondel.cli import read_job
from rondel.planner.cluster_layout import ClusterLayout

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def layout(nodes: int, gpus: int, *overrides: str, way: str = "ray", recipe: Path = RECIPE) -> ClusterLayout:
    place = ("--place.kind=split", f"--place.cluster={way}")
    return ClusterLayout(recipe, read_job(str(recipe), *overrides, *place)[0], nodes, gpus, overrides).check_layout(way)
