"""A finished group as JSON-shaped data, for the state of a buffer; pictures once for each that there is."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from rondel.core.drawn_steps import steps_from_rows
from rondel.core.media import Image, ImagePlaceholder
from rondel.core.types import (
    FLAGS,
    IDS,
    NUMBERS,
    Drift,
    EnvFault,
    Failed,
    Group,
    Ok,
    OutOfBudget,
    PolicyFault,
    Score,
    Task,
    TokenColumn,
    Trajectory,
    Turn,
    bytes_to_text,
    text_to_bytes,
)

COLUMNS = {"tokens": IDS, "mask": FLAGS, "logprobs": NUMBERS, "versions": IDS}


def encode(group: Group) -> dict[str, Any]:
    """A finished group as JSON-shaped data; `decode` gives it back."""
    row = _shallow_dict(group) | {
        "task": asdict(group.task),
        "trajectories": [_shallow_dict(whole) for whole in group.trajectories],
    }
    if any(whole.media for whole in group.trajectories):
        row["images"] = {
            place.image.digest: place.image.stored_fields for whole in group.trajectories for place in whole.media
        }
    for plain, whole in zip(row["trajectories"], group.trajectories):
        plain |= {name: TokenColumn.of(kind, getattr(whole, name)).to_text() for name, kind in COLUMNS.items()}
        plain["media"] = [[place.start, place.image.digest] for place in whole.media]
        plain["score"] = None if whole.score is None else [type(whole.score).__name__, asdict(whole.score)]
        if isinstance(whole.score, Score):
            plain["score"][1]["steps"] = [list(step) for step in whole.score.steps]
        if whole.support is not None:
            plain["support"] = [None if ids is None else [int(i) for i in ids] for ids in whole.support]
        if whole.behavior_top is not None:
            plain["behavior_top"] = [
                None if top is None else [[int(i) for i in top[0]], [float(x) for x in top[1]]]
                for top in whole.behavior_top
            ]
        if whole.experts is not None:
            experts = np.ascontiguousarray(whole.experts)
            plain["experts"] = [str(experts.dtype), list(experts.shape), bytes_to_text(experts)]
        if whole.steps is not None:
            stored = np.ascontiguousarray(whole.steps.stored)
            plain["steps"] = [list(stored.shape), bytes_to_text(stored), whole.steps.layout, str(stored.dtype)]
        plain["outcome"] = [type(whole.outcome).__name__, asdict(whole.outcome)]
    return row


def _shallow_dict(of: Any) -> dict[str, Any]:
    """Its fields, lists and trees copied, without a look into every token."""
    return {
        f.name: value.copy() if isinstance(value := getattr(of, f.name), list | dict) else value for f in fields(of)
    }


def decode(row: dict[str, Any]) -> Group:
    kinds = {
        "Score": Score,
        "Failed": Failed,
        "Ok": Ok,
        "EnvFault": EnvFault,
        "PolicyFault": PolicyFault,
        "OutOfBudget": OutOfBudget,
    }
    images: dict[str, Any] = {}
    if "images" in row:
        images = {digest: Image.from_stored_fields(stored) for digest, stored in row["images"].items()}

    def decode_trajectory(plain: dict[str, Any]) -> Trajectory:
        given = {key: kinds[plain[key][0]](**plain[key][1]) for key in ("score", "outcome") if plain[key] is not None}
        given |= {name: TokenColumn.from_text(kind, plain[name]) for name, kind in COLUMNS.items()}
        given["media"] = [ImagePlaceholder(start, images[digest]) for start, digest in plain.get("media", ())]
        given["drift"] = Drift(*plain["drift"]) if plain.get("drift") else None
        given["conversation"] = [Turn(*turn) for turn in plain.get("conversation", ())]
        if plain["experts"] is not None:
            dtype, *shape, routes = plain["experts"]
            given["experts"] = (
                np.frombuffer(text_to_bytes(routes), dtype).reshape(*shape).copy()
                if shape
                else np.asarray(routes, dtype)  # of a checkpoint that lists them
            )
        if plain.get("steps") is not None:
            size, rows, *kind = plain["steps"]
            layout, dtype = kind or (0, "float32")  # an older checkpoint has points of flows
            stored = np.frombuffer(text_to_bytes(rows), dtype).reshape(size).copy()
            given["steps"] = steps_from_rows(stored, layout)
        return Trajectory(**{**plain, **given})

    return Group(
        row["id"],
        Task(**row["task"]),
        [decode_trajectory(t) for t in row["trajectories"]],
        row["born"],
        row.get("supervised", False),
    )
