"""The text of a config -> {key: value}: YAML, JSON, a command line, or a shell script with one in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError
from rondel.core.registry import suggest_name
from rondel.importing.shell import read_commands

ENTRY = {  # the word of a command line behind which the config begins
    "trl": re.compile(r"^grpo$|grpo\w*\.py$|^trl\.scripts\.grpo$"),
    "verl": re.compile(r"\b(main_ppo\w*|main_dapo|main_entropy|fully_async_main)(\.py)?$"),
    "openrlhf": re.compile(r"\btrain_ppo(_ray)?(\.py)?$"),
}
OTHERS = {  # the word that names another trainer of theirs, or none
    "trl": re.compile(
        r"^trl (?P<command>[\w-]+)$|trl[./]scripts[./](?P<module>\w+?)(\.py)?$|"
        r"(?:^|/)(?P<file>sft|dpo|rloo|online_dpo|kto|ppo|orpo|cpo|xpo|gkd|bco|prm|nash_md|reward|rm|distillation)(_\w+)?\.py$"
    ),
    "verl": re.compile(r"(?P<sft>\w*sft_trainer\w*?)(\.py)?$|\b(?P<main>main_\w+?)(\.py)?$"),
    "openrlhf": re.compile(r"\b(?P<train>train_(?!ppo)\w+?)(\.py)?$"),
}
ONLY = {  # keys that only another trainer has, where no command names one
    "trl": {
        "sft": "assistant_only_loss completion_only_loss dataset_text_field packing packing_strategy eval_packing",
        "dpo": (
            "f_divergence_type label_smoothing ld_alpha precompute_ref_log_probs use_weighting reference_free "
            "rpo_alpha discopop_tau"
        ),
        "rloo": "normalize_advantages reward_clip_range",
        "kto": "desirable_weight undesirable_weight",
        "reward": "center_rewards_coefficient",
    },
    "verl": {"sft": "model.partial_pretrain optim.lr data.prompt_dict_keys data.multiturn.enable data.messages_key"},
    "openrlhf": {},
}
INSTEAD = {  # what to do for a trainer of this name
    "sft": "loop.warmup.steps trains on the answers of the data set before the loop, and algo.beside does beside it",
    "rloo": 'write a recipe with algo.kind = "rloo"; a KL in the reward is algo.kl with where = "reward"',
    "online_dpo": 'write a recipe with algo.kind = "online_dpo"',
    "dpo": 'nothing here learns from stored preferences; algo.kind = "online_dpo" makes the pairs from rewards',
    "reward": "no reward model is trained here; task.reward can ask one",
    "rm": "no reward model is trained here; task.reward can ask one",
    "eval": "rondel eval measures a model",
}
ENDS = re.compile(r"^(\||&&|\|\||;|&|\d?>+.*|\$@|\$\*|\"\$@\")$")
OVERRIDE = re.compile(r"^([+~]{0,2})([A-Za-z_][\w.\-/@]*)=(.*)$", re.DOTALL)

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*(.*?))?\s*\}", re.DOTALL)
INNER = re.compile(r"\$\{([\w.]+)\}")


def read_config(peer: str, text: str, folder: Path = Path()) -> dict[str, Any]:
    """The keys that a text sets, as the peer would see them. `folder` is where a
    `--config FILE` of the text is looked for.
    """
    if text.lstrip().startswith("{"):
        return _of_this_trainer(peer, resolve_references(flatten_tree(_load_json(text))))
    if peer != "openrlhf" and _is_yaml(text):
        return _of_this_trainer(peer, resolve_references(flatten_tree(_parse_yaml(text))))
    before, words = _command_words(peer, text)
    given: dict[str, Any] = read_overrides(words) if peer == "verl" else parse_flags(words)
    if peer == "trl":
        given = dict(_switched_off(key.replace("-", "_"), value) for key, value in given.items())
        if isinstance(path := given.get("config"), str):
            given = read_config("trl", _read_text(folder / path), folder) | given
    launcher = {key.replace("-", "_"): value for key, value in parse_flags(before).items()}
    own = {"num_processes"} if peer == "trl" else set()  # of the launcher, but part of the arithmetic of a batch
    return {key if key in own else f"launcher --{key}": value for key, value in launcher.items()} | given


def flatten_tree(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            out |= flatten_tree(value, f"{key}.")
        else:
            out[key] = parse_scalar(value) if isinstance(value, str) else value
    return out


def resolve_references(given: dict[str, Any]) -> dict[str, Any]:
    """{"a": 1, "b": "${a}", "c": "${oc.select:x,2}", "d": "n-${a}"} -> 1, 1, 2, "n-1".
    What is not known stays as it is written.
    """
    out = dict(given)
    for _ in range(8):  # a value may refer to one that refers
        for key, value in out.items():
            if isinstance(value, str) and (match := REFERENCE.fullmatch(value)):
                out[key] = out[match[1]] if match[1] in out else value if match[2] is None else parse_scalar(match[2])
            elif isinstance(value, str):
                out[key] = INNER.sub(lambda m: str(out.get(m[1], m[0])), value)
    return out


def parse_flags(words: list[str]) -> dict[str, Any]:
    """["--a", "1", "--b", "x", "y", "--c", "--d=2"] -> {"a": 1, "b": ["x", "y"], "c": True, "d": 2}"""
    out: dict[str, Any] = {}
    values: list[Any] = []
    key = ""
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(parse_scalar(word))
            continue
        if key:
            out[key] = True if not values else values[0] if len(values) == 1 else values
        key, equals, text = word[2:].partition("=")
        values = [parse_scalar(text)] if equals else []
    return out


def read_overrides(words: list[str]) -> dict[str, Any]:
    """["a.b=1", "+c=x", "--config-name=y"] -> {"a.b": 1, "c": "x", "--config-name": "y"}"""
    out: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            out |= {f"--{key}": value for key, value in parse_flags([word]).items()}
        elif match := OVERRIDE.match(word):
            out[match[2]] = None if match[1] == "~" else parse_scalar(match[3])
    return out


def parse_scalar(text: str) -> Any:
    """What a word means: "1e-6" -> 1e-06, "True" -> True, "null" -> None, "[a, 1]" -> ["a", 1], else the text."""
    text = text.strip()
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            value = kind(text.replace("_", "x"))
        except ValueError:
            continue
        return value if value == value and abs(value) != float("inf") else text
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [parse_scalar(part) for part in inner.split(",")] if inner else []
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def _command_words(peer: str, text: str) -> tuple[list[str], list[str]]:
    """(what stands before the entry of the command that trains, what stands behind it)."""
    found: list[tuple[list[str], list[str]]] = []
    for words in read_commands(text):
        at = next((i for i, word in enumerate(words) if ENTRY[peer].search(word)), None)
        if at is not None:
            found.append((words[:at], list(_until_end(words[at + 1 :]))))
    if len(found) > 1:
        raise ConfigError(
            f"the script trains {len(found)} times; leave the command that is meant and remove the others"
        )
    if found:
        return found[0]
    for words in read_commands(text):
        pairs = [f"trl {after}" for word, after in pairwise(words) if word == "trl"] if peer == "trl" else []
        for word in (*pairs, *words):
            if match := OTHERS[peer].search(word):
                _refuse_trainer(peer, next(name for name in match.groupdict().values() if name), word)
    return [], [
        word
        for words in read_commands(text)
        for word in words
        if word.startswith("--") or "=" in word or peer != "verl"
    ]


def _switched_off(key: str, value: Any) -> tuple[str, Any]:
    """`--no_use_bias_correction_kl` of a command line of TRL is `use_bias_correction_kl: false`."""
    return (key.removeprefix("no_"), False) if key.startswith("no_") and value is True else (key, value)


def _refuse_trainer(peer: str, name: str, found: str) -> None:
    kind = next(
        (
            each
            for each in sorted(INSTEAD, key=len, reverse=True)
            if re.search(rf"(^|_){each}(_|$)", name.replace("-", "_"))
        ),
        "",
    )
    reads = {"trl": "GRPOConfig", "verl": "main_ppo", "openrlhf": "train_ppo_ray"}[peer]
    told = INSTEAD.get(
        kind, "write the recipe by hand, or remove the command and leave the keys if they mean the same there"
    )
    raise ConfigError(
        f"'{found}' is another trainer of {peer}; rondel import reads configs of {reads}. Instead: {told}",
        page="docs/import.md",
    )


def _of_this_trainer(peer: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keys as they are; refused where some of them belong to another trainer of the peer."""
    for name, keys in ONLY[peer].items():
        if found := [key for key in keys.split() if key in given]:
            _refuse_trainer(peer, name, found[0])
    return given


def _until_end(words: list[str]) -> Iterator[str]:
    for word in words:
        if ENDS.match(word):
            return
        yield word


def _is_yaml(text: str) -> bool:
    """A first line that is neither blank nor a comment reads `key:`."""
    lines = [
        line
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("#") and line.strip() != "---"
    ]
    return bool(lines) and re.match(r"^[\w.\"']+\s*:(\s|$)", lines[0]) is not None


def _parse_yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the config is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"the config is YAML, but a {type(tree).__name__}; it must be a table of keys")
    return {str(key): value for key, value in tree.items()}


def _load_json(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the config is not JSON: {error}") from error
    return dict(tree)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = suggest_name(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ConfigError(f"the config {path} cannot be read: {error}.{near}") from error
