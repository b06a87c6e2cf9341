"""The same work in each placement, in turn: what a step takes, and how long each place stands idle.

    rondel bench placements --rounds 3 --json

The work: a policy, a reference (its KL is in the loss) and a reward model, on two places: the first two cores here, two
GPUs elsewhere. Answers end at their limit, so each step has the same tokens.

shared           engine, trainer and reward model in turn on both cores; the reward model leaves them while the trainer works
shared, 2 ranks  each place has a rank of the trainer and an engine; the reward model, on both, scores while they write
split            trainer and reference | engine and reward model; synchronous
split, S = 2     the same, and both work at once
split-colocate   engine, trainer and reference in turn | reward model

`tokens_per_second` counts the tokens of trained answers. `place_0`, `place_1` are the shares of time in which a place had
nothing to do; where its roles work at the same moment, their times are added. `engine`, `trainer`, `reward_model` are
the same of each role. `issued` tasks are those that were trained, filtered, failed or are in flight; `unaccounted` is what is
missing from them. In arXiv:2409.19256 a split has the critic on the reward model's place, too. Rondel has no such
placement: a critic is with its trainer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rondel.score.model import RewardModel

sys.path.insert(0, str(Path(__file__).parent))
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
FIRST = 2  # steps that are not counted
STILL = {"idle", "held", "asleep", "refusing"}  # of a worker's account: it computes nothing
APART: dict[str, Any] = {"place.kind": "split", "place.threads": 1}
# what each changes in the recipe, and on which of the two places its roles are
PLACEMENTS: dict[str, dict[str, Any]] = {
    "shared": {
        "recipe": {"place.threads": 2, "trainer.memory.offload": True, "task.reward.offload": True},
        "places": {"engine": (0, 1), "trainer": (0, 1), "reward_model": (0, 1)},
    },
    "shared, 2 ranks": {
        "recipe": {"place.kind": "shared", "place.ranks": 2, "place.threads": 1},
        "places": {"engine": (0, 1), "trainer": (0, 1), "reward_model": (0, 1)},
    },
    "split": {"recipe": APART, "places": {"trainer": (0,), "engine": (1,), "reward_model": (1,)}},
    "split, S = 2": {
        "recipe": APART | {"loop.max_staleness": 2, "algo.correction": {"kind": "importance"}},
        "places": {"trainer": (0,), "engine": (1,), "reward_model": (1,)},
    },
    "split-colocate": {
        "recipe": {"place.threads": 1},
        "places": {"engine": (0,), "trainer": (0,), "reward_model": (1,)},
    },
}


class PinnedRewardModel(RewardModel):
    """A reward model that computes on these cores alone."""

    def __init__(self, *, cores: list[int], **settings: Any) -> None:
        os.sched_setaffinity(0, cores)
        super().__init__(threads=len(cores), **settings)


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, report

    parser = argparse.ArgumentParser(
        prog="rondel bench placements", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--placements", nargs="+", default=list(PLACEMENTS), choices=list(PLACEMENTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48, help="of every answer")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8, help="of a group")
    parser.add_argument("--hidden", type=int, default=256, help="of the policy; the reward model has as many")
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        parser.error("two places need two cores")
    told: dict[str, list[dict[str, float]]] = {name: [] for name in a.placements}
    with tempfile.TemporaryDirectory() as folder:
        apart(save_reward_model, folder, a.hidden)
        for number in range(a.rounds):
            for name in a.placements:
                told[name].append(apart(measure, a, name, folder, cores[:2]))
                print(f"round {number + 1}, {name}: {json.dumps(told[name][-1])}", file=sys.stderr, flush=True)
    result = {
        name: {what: statistics.median(run[what] for run in runs) for what in runs[0]} for name, runs in told.items()
    }
    report(result, only_json=a.json)


def apart(function: Any, *args: Any) -> Any:
    """Its result, from a process of its own: cores and thread pools of one run are not those of the next."""
    import rondel.assemble  # noqa: F401  once, before they are forked

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def save_reward_model(folder: str, hidden: int) -> None:
    import transformers

    from rondel.models.random_model import character_tokenizer

    tokenizer = character_tokenizer()
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, eos_token_id=0, bos_token_id=None, max_position_embeddings=512,
    )  # fmt: skip
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(a: argparse.Namespace, name: str, reward: str, cores: list[int]) -> dict[str, float]:
    """One run in one placement."""
    import placements  # by the name under which the reward's process finds it
    from _work import overrides

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.runtime.journal.log import read

    recipe, places = PLACEMENTS[name]["recipe"], PLACEMENTS[name]["places"]
    os.sched_setaffinity(0, [cores[i] for i in sorted({*places["engine"], *places["trainer"]})])
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "run.folder": folder, "run.sinks": [], "task.eval.every": 0, "task.eval.n": 1, "run.checkpoint.every": 0, "loop.warmup.steps": 0,
            "loop.steps": a.steps, "loop.groups_per_step": a.groups, "algo.group_size": a.answers, "algo.kl": {"coef": 0.01},
            "model.path.hidden_size": a.hidden, "model.path.intermediate_size": 2 * a.hidden, "model.path.num_hidden_layers": 4,
            "model.path.max_position_embeddings": 512, "engine.sampling": {"max_tokens": a.tokens, "ignore_eos": True}, "engine.max_running": 256,
            "task.reward.kind": f"{placements.__name__}:PinnedRewardModel", "task.reward.path": reward,
            "task.reward.cores": [cores[i] for i in places["reward_model"]], **recipe,
        }  # fmt: skip
        train(Job.read(RECIPE, overrides(a.set, changes)), quiet=True)
        events = list(read(Path(folder)))
    return shares(events, places)


def shares(events: Iterable[dict[str, Any]], places: dict[str, tuple[int, ...]]) -> dict[str, float]:
    """Of a run's journal: throughput, shares of idle time, the ledger."""
    events = list(events)
    done = [e for e in events if e["kind"] == "StepDone"]
    began, ended = done[FIRST - 1]["t"], done[-1]["t"]
    inside = [e for e in events if began < e["t"] <= ended]
    total: defaultdict[str, float] = defaultdict(float)
    busy: defaultdict[str, float] = defaultdict(float)
    for event in (e for e in inside if e["kind"] == "WorkerTime"):
        role = "engine" if event["worker"].startswith("engine") else "trainer"
        total[role] += sum(event["seconds"].values())
        busy[role] += sum(s for kind, s in event["seconds"].items() if kind not in STILL)
    total["reward_model"] = ended - began
    busy["reward_model"] = sum(e["counts"].get("model_seconds", 0.0) for e in inside if e["kind"] == "RewardCounts")
    used = {role: busy[role] / total[role] for role in places}
    ledger = done[-1]["ledger"]
    ends = {
        n: sum(v for k, v in ledger.items() if k.split("/")[0] == n)
        for n in ("trained", "filtered", "failed", "in_flight")
    }
    lengths = {e["number"]: sum(e["lengths"]) for e in events if e["kind"] == "GroupFinished"}
    taken = [number for e in events if e["kind"] == "GroupsTaken" and e["step"] > FIRST for number in e["numbers"]]
    tokens = sum(lengths[number] for number in taken)
    return {
        "step_seconds": (ended - began) / (len(done) - FIRST),
        "tokens_per_second": tokens / (ended - began),
        **{f"place_{i}": max(0.0, 1 - sum(used[role] for role, own in places.items() if i in own)) for i in (0, 1)},
        **{role: 1 - share for role, share in used.items()},
        "issued": ledger["issued"], **ends, "unaccounted": ledger["issued"] - sum(ends.values()),
    }  # fmt: skip


if __name__ == "__main__":
    main()
