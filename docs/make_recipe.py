"""Writes the table of keys into docs/recipe.md from the models of core/config.py: `python docs/make_recipe.py`.

A test compares (tests/e2e/test_docs.py), so the page cannot rot. A key's meaning is its
description in config.py; where that is left to the name, it stands here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from rondel.core.config import ConfigSection, Job

PAGE = Path(__file__).with_name("recipe.md")
BEGIN, END = "<!-- keys: written by docs/make_recipe.py -->\n", "<!-- end of keys -->\n"
MEANING = {
    "task.env": 'an environment: "single_turn", "tools", "gateway", or "module:name"',
    "task.data": "where tasks come from: `kind` and its settings, `prompt`, `answer`, `image`, `holdout`, `eval_<key>`, `seed`, `split_special_tokens`; see generate.md",
    "task.suffix": "appended to the last message of every prompt",
    "task.system": "a system message for prompts that bring none",
    "task.tools": 'what the policy may call with env = "tools": calculator, python (in a sandbox), or functions and classes of yours as "module:name"',
    "task.turns": "most replies of the policy in one episode",
    "task.tool_timeout": "seconds for one call of a tool",
    "task.reward_workers": "processes that compute rewards",
    "task.eval.temperature": "0 is greedy",
    "model.teacher": "whom algo.distill learns from: as model.path, with the same tokenizer",
    "model.adapter.targets": 'names of linear layers, `["q_proj", "v_proj"]`, or "all-linear": all but the head',
    "algo.guides": "how many times the task's own answer joins each group as a demonstration, beside the G answers; for luffy",
    "algo.kind": 'a row of papers.md (grpo, dapo, gspo, rloo, sft, ...), or "module:name"',
    "algo.group_size": "G, answers to one task",
    "algo.beside": "demonstrations in the same step, with a row, a weight and a count of their own: kind, weight, groups_per_step, data (as task.data)",
    "algo.advantage": "rewards of a group, or of the step -> advantages; kinds: papers.md",
    "algo.ratio": "over what the ratio is taken and from where: token, sequence, sequence_token; anchor = proximal or behavior",
    "algo.surrogate": "the loss of a token: clip, policy_gradient, clipped_weight, ... and its knobs; kinds: papers.md",
    "algo.correction": "weight for tokens that other weights or another numeric path sampled: none, importance, off_policy_mask",
    "algo.kl": "distance to the starting weights, in the loss, charged to the reward, or to the advantage behind the baseline: kind k1, k2, k3; coef; where; target; through; unbiased",
    "algo.aggregate": "the weight of a token: token_mean, seq_mean_token_mean, seq_mean_token_sum, fixed_norm",
    "algo.distill": "a teacher's opinion of every token: coef; needs model.teacher",
    "algo.shaping": "rewards -> rewards before the advantage: none, clip, overlong, kimi_length",
    "algo.value": "what a critic minimises: clip",
    "algo.entropy": "entropy bonus: coef, target, top",
    "loop.groups_per_step": "P, groups in one step",
    "loop.updates_per_step": "optimizer moves in one step",
    "loop.max_staleness": "S, versions between a group's admission and its training; 0 is on-policy",
    "loop.in_flight": "what happens to a request while the weights change: it waits, it ends first, or it is cut",
    "loop.window": 'how many younger groups may be trained before an unfinished one; 1 is first in, first out; "auto": as many as leave it its time',
    "loop.seed": "of the order of tasks and of all noise",
    "loop.max_refills": "a step stops refilling after this many times P dropped groups",
    "loop.warmup.steps": "steps of the supervised phase; 0 is none",
    "loop.warmup.lr": "its learning rate, constant",
    "loop.warmup.groups_per_step": "its demonstrations in one step",
    "engine.numerics": "`aligned`: the same bits in every batch and in the trainer; slower, dense models, refused where it does not hold",
    "engine.compile": "a CPU: fuses the small operations of the serving pass, seconds at the start, needs a C++ compiler; a GPU: CUDA graphs of decode steps",
    "engine.kv_pages": "cache pages of one token each",
    "engine.sampling.temperature": "part of the policy: the trainer divides by it too; 0 is refused in training",
    "engine.sampling.top_k": "0 keeps everything; what is kept is recorded, and the trainer reads it",
    "engine.sampling.top_p": "1 keeps everything; what is kept is recorded, and the trainer reads it",
    "engine.sampling.max_tokens": "the longest answer of one turn",
    "trainer.lr": "learning rate of AdamW",
    "trainer.schedule": "of the learning rate after its warmup",
    "trainer.warmup_steps": "steps in which the learning rate rises to lr",
    "trainer.weight_decay": "on matrices only",
    "trainer.betas": "of AdamW",
    "trainer.micro_tokens": "tokens in one forward and backward pass; speed and memory, never the result",
    "place.threads": 'CPU threads; "auto" is all that this process may use',
    "sync.kind": '"auto" is tensor in one process, where nothing is copied; else see sync.md',
    "sync.probe": "score a fixed prompt on both sides after every update",
    "run.folder": "where the run lives",
    "run.checkpoint.every": "steps between two checkpoints; 0 is only at the end",
    "run.checkpoint.keep": "how many stay",
    "run.sinks": 'tensorboard, jsonl, csv, wandb, trackio, mlflow, or "module:name"',
}


def keys(section: type[BaseModel] = Job, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, field) of every leaf; NAME stands for what the recipe calls an entry of a table of tables."""
    rows: list[tuple[str, Any]] = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        entry = get_args(inner)[1] if get_origin(inner) is dict else None
        if isinstance(inner, type) and issubclass(inner, ConfigSection):
            rows += keys(inner, f"{prefix}{name}.")
        elif isinstance(entry, type) and issubclass(entry, BaseModel):
            rows += keys(entry, f"{prefix}{name}.NAME.")
        else:
            rows.append((f"{prefix}{name}", field))
    return rows


def table() -> str:
    """Every key with type, default and meaning, a table a section."""
    known = keys()
    stale = MEANING.keys() - {key for key, _ in known}
    assert not stale, f"docs/make_recipe.py explains keys that do not exist: {', '.join(sorted(stale))}"
    lines: list[str] = []
    for key, field in known:
        section = key.partition(".")[0]
        if f"## {section}" not in lines:
            lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        told = MEANING.get(key) or field.description
        assert told, f"{key} has neither a description in core/config.py nor one in docs/make_recipe.py"
        cells = (f"`{key}`", kind(field), default(field), told)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def kind(field: Any) -> str:
    """int, 1 or more · "hold", "drain" or "abort" · text or table"""
    bounds = {
        name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)
    }
    words = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    return ", ".join([spell(field.annotation), *(words[name].format(bound) for name, bound in bounds.items())])


def spell(annotation: Any) -> str:
    plain = {int: "int", float: "float", str: "text", bool: "true or false"}
    if annotation in plain:
        return plain[annotation]
    inner = [a for a in get_args(annotation) if a is not type(None)]
    text = str(annotation)
    if text.startswith("typing.Literal"):
        return " or ".join(f'"{value}"' for value in inner)
    if text.startswith("dict"):
        return "table"
    if text.startswith(("list", "tuple")):
        return f"list of {spell(inner[0])}" if text.startswith("list") else "[" + ", ".join(map(spell, inner)) + "]"
    return " or ".join(map(spell, inner))


def default(field: Any) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "not set"
    return "of the row" if value == {} else f"`{json.dumps(value)}`"


def page() -> str:
    """The page as it should be: the text around the table stays."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
