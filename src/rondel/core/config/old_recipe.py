"""A job.toml of an earlier version in today's keys."""

from __future__ import annotations

from typing import Any

from rondel.core.config.environment import ENV_TABLES
from rondel.core.config.reward import RewardCallConfig
from rondel.core.config.section import split_kind

ENV_SETTINGS = {  # old key of [task] -> the setting of task.env, and the old default
    "suffix": ("suffix", ""),
    "examples": ("examples", []),
    "tools": ("tools", []),
    "turns": ("turns", 8),
    "tool_timeout": ("timeout", 30.0),
    "agent": ("agent", None),
    "agents": ("agents", []),
    "agent_timeout": ("timeout", 600.0),
}


def translate_moved_keys(tree: dict[str, Any]) -> None:
    """Rewrite in place the tree of an earlier job.toml, which names every key, to today's keys."""
    task, run = tree.get("task", {}), tree.get("run", {})
    kind, settings = split_kind(task.get("env", "single_turn"), "single_turn")
    known = ENV_TABLES[kind].model_fields if kind in ENV_TABLES else {}
    for old, (new, default) in ENV_SETTINGS.items():
        if old in task and (value := task.pop(old)) != default and new in known:
            settings[new] = value
    if settings:
        task["env"] = {"kind": kind, **settings}
    calls = {"reward_timeout": "timeout", "reward_workers": "workers"}
    kind, settings = split_kind(task.get("reward", "number"), "number")
    for old in (*calls, "max_failures", "patience"):
        new = calls.get(old, old)
        if old in task and (value := task.pop(old)) != RewardCallConfig.model_fields[new].default:
            settings[new] = value
    if settings:
        task["reward"] = {"kind": kind, **settings}
    for old, default in (("temperature", 0.0), ("max_tokens", None)):
        if (value := task.get("eval", {}).pop(old, default)) != default:
            task["eval"]["sampling"] = {old: value, **task["eval"].get("sampling", {})}
    vision = {old: tree["model"].pop(old) for old in ("tower", "image_tokens") if old in tree.get("model", {})}
    if vision:
        tree["model"]["vision"] = vision
    trainer = tree.get("trainer", {})
    optimizer = {old: trainer.pop(old) for old in ("warmup_steps", "weight_decay", "betas") if old in trainer}
    if optimizer:
        trainer["optimizer"] = optimizer
    if "offload" in trainer:
        trainer["memory"] = {"offload": trainer.pop("offload")}
    if "late" in (loop := tree.get("loop", {})):
        loop["oversample"] = {"groups": loop.get("oversample", 0), "late": loop.pop("late")}
    sinks = {"metrics_port": ("prometheus", "port", 0), "traces": ("opentelemetry", "url", "")}
    for old, (name, setting, default) in sinks.items():
        if (value := run.pop(old, default)) != default:
            run["sinks"] = [*run.get("sinks", []), {"kind": name, setting: value}]
    for section, old in ((tree.get("trainer", {}), "kind"), (tree.get("model", {}).get("adapter", {}), "dropout")):
        section.pop(old, None)
