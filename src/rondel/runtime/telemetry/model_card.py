"""The model card of an exported checkpoint, from the journal and recipe of its run: what it is, and how to load it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rondel.core.config.old_recipe import translate_moved_keys
from rondel.core.errors import UserError
from rondel.runtime.journal.log import drop_repeated_events, read_history, read_recipe
from rondel.runtime.telemetry.card import markdown_table
from rondel.runtime.telemetry.scores import failure_text, interval_text, is_share, score_text

Event = dict[str, Any]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
LICENCE = re.compile(r"\A---\n(?:(?!---\n).*\n)*?license:[ \t]*[\"']?([\w.+-]+)[\"']?[ \t]*\n")
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
LOAD = {
    "model": "from transformers import AutoModelForCausalLM, AutoTokenizer\n\nmodel = "
    'AutoModelForCausalLM.from_pretrained("{name}")\n'
    'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    "blocks": "import rondel  # blocks of masks are filled in: other tools would write token after token\n\n"
    'engine = rondel.Engine.load("{name}")\nanswers = engine.chat([[{{"role": "user", "content": prompt}}]])',
    "flow": "import torch\nfrom transformers import AutoTokenizer\n\n"
    'velocity = torch.export.load("{name}/program.pt2").module()  # x [N, D], sigma [N], prompt [P]\n'
    'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
    'asked = [{system}{{"role": "user", "content": prompt}}]\n'
    "text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)\n"
    'tokens = tokenizer(text, return_tensors="pt").input_ids[0]\n'
    "x = torch.randn(N, {dim})\nfor k in range(K):  # as many denoising steps as in the run\n"
    "    x = x - velocity(x, torch.full((N,), 1 - k / K), tokens) / K",
    "control": 'import torch\n\nact = torch.export.load("{name}/program.pt2").module()\n'
    "logits_or_means = act(observation)  # [N, O] float32 -> [N, A]",
    "chunks": 'import torch\n\nact = torch.export.load("{name}/program.pt2").module()\n'
    "actions = act(observation, noise)  # [N, O], [N, H*A] of a standard normal -> [N, H, A]",
    "vla": "import httpx  # its server: rondel serve {name}\n\n"
    'asked = {{"observation": picture.reshape(-1).tolist(), "instruction": "..."{system_field}}}  # [h, w, 3], 0 to 255\n'
    'actions = httpx.post("http://127.0.0.1:8000/act", json=asked).json()["action"]  # [H, A]',
    "adapter": "from peft import AutoPeftModelForCausalLM\n\nmodel = "
    'AutoPeftModelForCausalLM.from_pretrained("{name}")',
    "mergeable_adapter": "# peft would not find its base, which Rondel made: first, rondel merge FOLDER merged\n"
    "# (FOLDER holds this adapter: {name})\n"
    "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    'model = AutoModelForCausalLM.from_pretrained("merged")\n'
    'tokenizer = AutoTokenizer.from_pretrained("merged")',
}


def write_model_card(run: Path, step: int, into: Path, *, name: str = "", form: str = "") -> str:
    """README.md of the exported folder. name: what it is loaded by, its folder where left out. -> its text."""
    try:
        events = drop_repeated_events(read_history(run))
    except UserError:  # a checkpoint whose journal was moved away
        events = []
    recipe = read_recipe(run)
    translate_moved_keys(recipe)
    licence = licence_of_base(recipe.get("model", {}).get("path"))
    config = _read_config(into)
    named = {"name": name or str(into), "kind": _adapter_kind(into) or _kind_of(config), "dim": config.get("dim", 0)}
    text = render_model_card(recipe, events, step, **named, form=form, licence=licence)
    (into / "README.md").write_text(text, encoding="utf-8", errors="replace")
    return text


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _adapter_kind(folder: Path) -> str:
    """The same of an adapter, by whether its file names a base that peft can load; "" of a whole model."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return ""
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    return "adapter" if base and (Path(base).is_dir() or HUB_ID.fullmatch(base)) else "mergeable_adapter"


def _kind_of(config: dict[str, Any]) -> str:
    """How a model is loaded, by its config: a name of `LOAD`."""
    if config.get("block_diffusion"):
        return "blocks"
    kinds = {"mlp_policy": "control", "flow_policy": "chunks", "flow_vla": "vla"}
    kinds |= dict.fromkeys(("flow_mlp", "flow_dit", "flow_video"), "flow")
    return kinds.get(config.get("model_type", ""), "model")


def licence_of_base(base: Any) -> str:
    """What the base model's own card says, in its folder or in the hub's cache: "apache-2.0"; else the name of its
    licence file; "" where neither is known. Asks no network.
    """
    if not isinstance(base, str):
        return ""
    folder = Path(base).expanduser()
    if not folder.is_dir() and HUB_ID.fullmatch(base):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(base, "config.json")
        folder = Path(found).parent if isinstance(found, str) else folder
    try:
        said = LICENCE.match((folder / "README.md").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        said = None
    return said[1] if said else next((name for name in LICENCE_FILES if (folder / name).is_file()), "")


def render_model_card(
    recipe: dict[str, Any],
    events: list[Event],
    step: int,
    *,
    name: str,
    kind: str = "model",
    dim: int = 0,
    form: str = "",
    licence: str = "",
) -> str:
    """The page, with the metadata that hubs read above it. kind: of `LOAD`; dim: numbers of a point of a flow."""
    adapter = kind in ("adapter", "mergeable_adapter")
    base = recipe.get("model", {}).get("path", "not recorded")
    shown = json.dumps(base) if isinstance(base, dict) else str(base)
    facts: dict[str, Any] = next((e["facts"] for e in reversed(events) if e["kind"] == "RunStarted"), {})
    meta = [
        "---",
        f"library_name: {'peft' if adapter else 'transformers'}",
        "tags:",
        "- reinforcement-learning",
        "- rondel",
    ]
    if isinstance(base, str) and HUB_ID.fullmatch(base):
        meta.insert(1, f"base_model: {base}")
    in_file = licence in LICENCE_FILES
    if licence and not in_file:
        meta.insert(1, f"license: {licence}")
    known = f"see {licence} of the base model" if in_file else licence
    algo, loop, data = (recipe.get(part, {}) for part in ("algo", "loop", "task"))
    tasks, env = facts.get("tasks", {}), data.get("env", "")
    kind_of_env = env.get("kind", "") if isinstance(env, dict) else env
    rows = [
        ("base model", shown),
        ("licence of the base", known or "not known: look before you share it"),
        ("kind", "LoRA adapter" if adapter else f"whole model, weights in {form}" if form else "whole model"),
        ("algorithm", f"{algo.get('kind', 'not recorded')}, {algo.get('group_size', '?')} answers a task"),
        ("steps", _steps_text(step, loop)),
        ("data", f"{_shorten(data.get('data', {}))}; {tasks.get('train', '?')} tasks to train on"),
        ("reward", "what the world pays" if kind_of_env in ("control", "gym") else _shorten(data.get("reward", "number"))),
        ("seed", str(facts.get("seed", loop.get("seed", "?")))),
        ("software", ", ".join(f"{k} {v}" for k, v in facts.get("versions", {}).items()) or "not recorded"),
    ]  # fmt: skip
    system, field = data.get("system"), ""
    if system is not None:  # what is drawn for a prompt is drawn for all that the run has put in front of it
        told = json.dumps(system, ensure_ascii=False)
        system, field = f'{{"role": "system", "content": {told}}}, ', f', "system": {told}'
    way = LOAD[kind].format(name=name, dim=dim, system=system or "", system_field=field)
    vllm = f"vllm serve {name}\n" if kind == "model" else ""
    serve = "" if adapter else f"\n\n```bash\n{vllm}rondel serve {name}\n```"
    return (
        "\n".join([*meta, "---"])
        + f"\n\n# {Path(name).name}\n\nPost-trained with reinforcement learning by Rondel.\n\n"
        + markdown_table(("what", "which"), rows)
        + "\n\n## Held-out figures\n\n"
        + _held_out(events, step)
        + f"\n\n## How to load it\n\n```python\n{way}\n```{serve}\n"
    )


def _steps_text(step: int, loop: dict[str, Any]) -> str:
    """`_steps_text(12, ...)` is "3 supervised, 32 demonstrations each; 9 of RL, 8 tasks each"."""
    warmup = loop.get("warmup", {})
    shown = min(step, warmup.get("steps", 0))
    told = [f"{shown} supervised, {warmup.get('groups_per_step', '?')} demonstrations each"] if shown else []
    return "; ".join([*told, f"{step - shown} of RL, {loop.get('groups_per_step', '?')} tasks each"])


def _held_out(events: list[Event], step: int) -> str:
    """Every set before training, and at this step."""
    rows = []
    for e in events:
        if e["kind"] == "Evaluated" and e["step"] in (0, step):
            share = is_share(e)
            when = f"after step {step}" if e["step"] else "before training"
            draws = f"{e['n']} tasks" + (f", {e['draws']} draws each" if e.get("draws", 1) > 1 else "")
            if failed := e.get("request", {}).get("failed"):
                draws += f", {failed} answers {failure_text(e['request'])}"
            rows.append((e["profile"], when, "score" if share else "mean reward", score_text(e["score"], share),
                         interval_text(e["low"], e["high"], share), draws))  # fmt: skip
            for metric, (value, low, high) in e.get("metrics", {}).items():
                own = share or not metric.startswith("avg@")
                rows.append((e["profile"], when, metric, score_text(value, own), interval_text(low, high, own), draws))
    if not rows:
        return "This checkpoint was not evaluated in its run."
    return markdown_table(("set", "when", "metric", "value", "95 % interval", "of"), rows)


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]} ..."
