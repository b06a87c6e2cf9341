"""What is known of a peer, and what the user set in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError

DEVICE = "place.kind, place.ranks and place.mesh say here where a run is spread"
MEMORY = "speed and memory only; trainer.micro_tokens bounds it here"
PACKED = "samples are always packed, so there is no padding"
ENGINE = "it steers another engine; the one here is built in"
LAUNCHER = "it belongs to what starts the processes, not to the run"
FOLDER = "run.folder names the run and holds what it writes"
LORA = "it belongs to an adapter: model.adapter is plain LoRA, and off unless they ask for one"
NF4 = "the base lies as nf4 with double quantisation"
# what a switch may be set to on a command line of transformers
SWITCHES = dict.fromkeys(("yes", "y", "t", "on", "1"), True) | dict.fromkeys(("no", "n", "f", "off", "0"), False)
SINKS = ("tensorboard", "wandb", "trackio", "mlflow")  # that run.sinks has too
MACHINE = frozenset({DEVICE, MEMORY, PACKED, ENGINE, LAUNCHER, FOLDER})  # reasons of keys that no result depends on


@dataclass(frozen=True, slots=True)
class RecipeLine:
    """One line of the recipe: `RecipeLine("algo.group_size", 16, ("num_generations",))`.

    key, value   of ours
    sources      the keys of theirs that it says; none: a constant in their code
    note         what a reader of the line should know
    ask          why the user must look at it: the value is a guess
    """

    key: str
    value: Any
    sources: tuple[str, ...] = ()
    note: str = ""
    ask: str = ""


@dataclass(frozen=True, slots=True)
class SameKeys:
    """Keys that ask for what happens here anyway."""

    sources: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class MissingKeys:
    """Keys that ask for what nothing here does."""

    sources: tuple[str, ...]
    why: str


Part = RecipeLine | SameKeys | MissingKeys


@dataclass(frozen=True, slots=True)
class PeerFormat:
    """A framework whose configs are read: one release, its keys with their defaults, and what they mean here.

    parts     Setting -> some parts of a recipe, in its order
    reasons   pattern of keys -> why they have no equivalent; the first that fits speaks
    """

    name: str
    release: str
    defaults: dict[str, Any]
    renamed: dict[str, str]
    parts: tuple[Callable[[PeerSettings], Iterable[Part]], ...]
    reasons: dict[str, str]

    @classmethod
    def from_parts(
        cls, name: str, parts: tuple[Callable[[PeerSettings], Iterable[Part]], ...], reasons: dict[str, str]
    ) -> PeerFormat:
        table = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
        return cls(name, table["release"], table["defaults"], table["renamed"], parts, reasons)

    def canonical_key(self, key: str) -> str:
        """The name that a key has in this release: `init_kl_coef` is `algo.kl.init_coef`;
        a moved table takes its keys along.
        """
        head, rest = key, ""
        while head:
            if head in self.renamed:
                return self.renamed[head] + rest
            head, dot, leaf = head.rpartition(".")
            rest = dot + leaf + rest
        return key

    def knows_key(self, key: str) -> bool:
        """Is it a key, below one whose value is a table of the user's own, or what hydra makes of
        a table (`_target_`)?
        """
        head = key
        while head not in self.defaults and head:
            head = head.rpartition(".")[0]
        return head == key or self.defaults.get(head, 0) in (None, {}) or key.endswith("._target_")

    def missing_reason(self, key: str) -> str:
        return next(
            (why for pattern, why in self.reasons.items() if fnmatchcase(key, pattern)), "nothing here reads it"
        )


class PeerSettings:
    """What a run of the peer would see: `setting["beta"]` is the user's value or their default."""

    def __init__(self, peer: PeerFormat, given: dict[str, Any]) -> None:
        """`given` as the user wrote it; of two names of one key the later counts, but for an old name at its default,
        as dumps of a whole config have it: it says nothing.
        """
        self.peer = peer
        self.written: dict[str, str] = {}  # key of this release -> as the user wrote it
        self.values: dict[str, Any] = {}
        self.twice: dict[str, str] = {}  # a name that a later one replaced -> that one
        self.silent: list[str] = []  # old names at their defaults
        for name, value in given.items():
            key = peer.canonical_key(name)
            if name != key and name in peer.defaults and value == peer.defaults[name]:
                self.silent.append(name)
                continue
            if key in self.written:
                self.twice[self.written[key]] = name
            if isinstance(peer.defaults.get(key), bool) and str(value).lower() in SWITCHES:
                value = SWITCHES[str(value).lower()]
            self.written[key], self.values[key] = name, value

    def __getitem__(self, key: str) -> Any:
        return self.values[key] if key in self.values else self.peer.defaults[key]

    def is_set(self, *keys: str) -> bool:
        """Did the user set one of them?"""
        return any(key in self.values for key in keys)

    def require_number(self, key: str) -> Any:
        """A value that is counted with here, so it must be a number (or their None)."""
        value = self[key]
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise ConfigError(
            f"{self.written.get(key, key)} = {value!r} is not a number; write the value itself where the config has a "
            f"variable"
        )

    def require_integer(self, key: str) -> int:
        value = self.require_number(key)
        if value is None or value != int(value):
            raise ConfigError(f"{self.written.get(key, key)} = {value!r} is not a whole number")
        return int(value)

    def translate_choice(self, key: str, known: dict[str, Any]) -> Any:
        """What a word of theirs means here; None if it has no meaning here."""
        return known.get(str(self[key]))


def translate_truncation(setting: PeerSettings, key: str) -> Iterator[Part]:
    """Their top_p, top_k or min_p of training samples."""
    name = key.rpartition(".")[2]
    if setting[key] in ((1, None) if name == "top_p" else (0, -1, None) if name == "top_k" else (0, None)):
        yield SameKeys((key,), "it changes nothing at this value")
        return
    value = setting.require_number(key)
    if 0 < value < 1 if name != "top_k" else value > 0 and float(value).is_integer():
        yield RecipeLine(
            f"engine.sampling.{name}",
            value,
            (key,),
            "the trainer's logprob runs over the tokens that were kept, and not over all",
        )
    else:
        yield MissingKeys((key,), f"it cannot be {value!r}")


def translate_sinks(setting: PeerSettings, key: str) -> Iterator[Part]:
    """Where their metrics go; `console` and none are what is printed anyway."""
    given = setting[key] if isinstance(setting[key], list) else [setting[key]]
    kept = [name for name in given if name in SINKS]
    others = ", ".join(str(name) for name in given if name not in (*SINKS, "console", "none", None))
    yield RecipeLine("run.sinks", kept, (key,), f"no sink here: {others}" * bool(others))


def translate_adapter(
    s: PeerSettings,
    *,
    rank: str,
    alpha: str,
    targets: str,
    dropout: str = "",
    switch: tuple[str, ...] = (),
    four_bits: str = "",
) -> Iterator[Part]:
    """Their LoRA, under these names of theirs, where it is on."""
    named, ask = s[targets], ""
    if not named:
        named, ask = ["q_proj", "v_proj"], "theirs are peft's choice for the model; name the layers that yours has"
    elif isinstance(named, str) and named != "all-linear":
        named, ask = [named], "a pattern there; here a list of names"
    packed = bool(four_bits and s[four_bits])
    value = {
        "kind": "qlora" if packed else "lora",
        "rank": s.require_integer(rank),
        "alpha": s.require_integer(alpha),
        "targets": named,
    }
    yield RecipeLine(
        "model.adapter",
        value,
        (*switch, rank, alpha, targets, *((four_bits,) if packed else ())),
        NF4 if packed else "",
        ask=ask,
    )
    if dropout and s.require_number(dropout):
        yield MissingKeys((dropout,), "with dropout the trainer could not recompute what the engine drew from: 0 here")
    elif dropout:
        yield SameKeys((dropout,), "there is no dropout")
