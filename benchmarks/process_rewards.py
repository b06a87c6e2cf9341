"""What it is worth to value the steps of an answer while it is written: pipelined = true against after the fact.

    rondel bench process_rewards --pairs 3 --json

Both do the same work in turn (A B A B ...): the same answers, token by token, and the same steps.

seconds   from the first prompt to the last score: medians, then the least of each
saved     median of the pairs' differences, in seconds and as a share, and the least of them
waited    from an answer's end to its score, mean of all answers: what is left for a wall clock to show
early     share of the steps that were valued when their answer ended
apart     the largest difference between two scores of one answer

model           a model values the steps, in a process of its own; it and the engine have a core each, if there are two
judge per step  a server is asked about one step after the other, `--latency` seconds each
judge at once   a server is asked about all steps together, `--latency` seconds in all: nothing can be saved

Answers have lengths between a quarter of --new and --new, or with --equal all the same: then all wait for their scores
at the same time. The machine's other work is in all figures.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
SEPARATOR = ";"


async def judge_per_step(steps: list[str], task: Any, first: int = 0) -> list[float]:
    """A server with a latency, asked about one step after the other."""
    for _ in steps[first:]:
        await asyncio.sleep(task.data["latency"])
    return [float(len(step)) for step in steps[first:]]


async def judge_at_once(steps: list[str], task: Any, first: int = 0) -> list[float]:
    """The same, asked about all together."""
    await asyncio.sleep(task.data["latency"])
    return [float(len(step)) for step in steps[first:]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench process_rewards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--answers", type=int, default=8, help="written at once")
    parser.add_argument("--new", type=int, default=192, help="tokens of an answer at most")
    parser.add_argument("--equal", action="store_true", help="answers of equal length")
    parser.add_argument("--hidden", type=int, default=256, help="of the policy and of the model that values steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.1)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import opened, report

    shape = {
        "hidden_size": a.hidden,
        "intermediate_size": 3 * a.hidden,
        "num_hidden_layers": a.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2 * a.new + 64,
    }
    policy: Any = {"random": "llama", **shape}
    _, loaded = opened(policy, "float32", 1)
    result: dict[str, Any] = {"bench": "process_rewards", "answers": a.answers, "new": a.new, "latency": a.latency}
    with tempfile.TemporaryDirectory() as folder:
        save_step_model(Path(folder), shape, loaded.tokenizer)
        for case in a.cases:
            result[case] = asyncio.run(
                compare(a, loaded, {**CASES[case], **({"path": folder} if case == "model" else {})})
            )
            print(f"{case}: {result[case]}", file=sys.stderr, flush=True)
    report(result, only_json=a.json)


CASES: dict[str, dict[str, Any]] = {
    "model": {"separator": SEPARATOR, "aggregate": "mean"},
    "judge per step": {"scorer": "process_rewards:judge_per_step", "separator": SEPARATOR, "aggregate": "mean"},
    "judge at once": {"scorer": "process_rewards:judge_at_once", "separator": SEPARATOR, "aggregate": "mean"},
}


def save_step_model(folder: Path, shape: dict[str, int], tokenizer: Any) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **shape, vocab_size=len(tokenizer), num_labels=1)
    transformers.AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    if not tokenizer.chat_template:
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)


async def compare(a: argparse.Namespace, loaded: Any, spec: dict[str, Any]) -> dict[str, float]:
    """The figures of one case."""
    from _work import median

    async with scorers(a, loaded, spec) as work:
        for pipelined in (False, True):  # the first passes pack the weights; the first early answer is valued twice
            await work[pipelined](0)
        rounds = [[await work[pipelined](number) for pipelined in (False, True)] for number in range(1, a.pairs + 1)]
    after, early = zip(*rounds)
    saved = [one.seconds - other.seconds for one, other in rounds]
    return {
        "after the fact": round(median([one.seconds for one in after]), 3),
        "pipelined": round(median([one.seconds for one in early]), 3),
        "least after": round(min(one.seconds for one in after), 3),
        "least pipelined": round(min(one.seconds for one in early), 3),
        "waited after": round(sum(one.waited for one in after) / len(after), 4),
        "waited pipelined": round(sum(one.waited for one in early) / len(early), 4),
        "saved": round(median(saved), 3),
        "saved share": round(median([s / one.seconds for s, one in zip(saved, after)]), 3),
        "least saved": round(min(saved), 3),
        "steps": sum(one.steps for one in early) // len(early),
        "early": round(sum(one.early for one in early) / max(1, sum(one.steps for one in early)), 3),
        "apart": max(abs(x - y) for one, other in rounds for x, y in zip(one.scores, other.scores, strict=True)),
    }


@asynccontextmanager
async def scorers(a: argparse.Namespace, loaded: Any, spec: dict[str, Any]) -> AsyncIterator[dict[bool, Any]]:
    """pipelined -> what writes and scores the answers of a round, one engine and one process for each."""
    from rondel.core.types import Task
    from rondel.driver.step_watch import StepWatch
    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.runtime.devices import Device
    from rondel.score.pool import RewardPool

    device = Device("cpu", 1)
    engine = BuiltinEngine(loaded, run=device.run, kv_pages=a.answers * (2 * a.new + 64), max_running=a.answers)
    task = Task("t", "single_turn", {"prompt": "Think in steps.", "latency": a.latency})
    pools = {
        pipelined: RewardPool({"kind": "process", **spec, "pipelined": pipelined}, timeout=600.0)
        for pipelined in (False, True)
    }

    def work_of(pipelined: bool) -> Any:
        watch = StepWatch(pools[pipelined], lambda: engine)
        return lambda number: write_and_score(a, engine, watch if pipelined else None, pools[pipelined], task, number)

    try:
        yield {pipelined: work_of(pipelined) for pipelined in pools}
    finally:
        for pool in pools.values():
            pool.close()
        device.close()


@dataclass
class Round:
    """What one round took and gave."""

    seconds: float
    waited: float
    scores: list[float]
    steps: int
    early: int


async def write_and_score(a: argparse.Namespace, engine: Any, watch: Any, pool: Any, task: Any, number: int) -> Round:
    from contextlib import nullcontext

    from rondel.core.types import Sampling, sample_key
    from rondel.driver.step_watch import CURRENT_ANSWER
    from rondel.generate.envs.chat import TokenChat
    from rondel.generate.envs.episode import EpisodeState

    tokenizer = engine.loaded.tokenizer
    bias = {token: 2.5 for token in tokenizer.encode(SEPARATOR, add_special_tokens=False)}

    waits: list[float] = []

    async def answer(sample: int) -> float:
        length = a.new if a.equal else a.new // 4 + (a.new - a.new // 4) * sample // max(1, a.answers - 1)
        async with watch.open(task) if watch else nullcontext():
            chat = TokenChat(
                tokenizer,
                engine.generate,
                sampling=Sampling(max_tokens=length, ignore_eos=True, logit_bias=bias),
                key=lambda turn: sample_key(number, 0, sample, turn),
                max_context=2 * a.new + 64,
                episode=EpisodeState(watcher=CURRENT_ANSWER.get()),
            )
            chat.give_tokens(tokenizer.encode(task.data["prompt"], add_special_tokens=False))
            await chat.reply()
            watched, ended = CURRENT_ANSWER.get(), time.perf_counter()
            score = await (pool.score(chat.trajectory, task) if watched is None else watched.score(chat.trajectory))
        waits.append(time.perf_counter() - ended)
        return float(score.value)

    before, began = dict(pool.shared.counts), time.perf_counter()
    scores = list(await asyncio.gather(*(answer(sample) for sample in range(a.answers))))
    seconds = time.perf_counter() - began
    steps, early = (
        int(pool.shared.counts.get(name, 0) - before.get(name, 0)) for name in ("process_steps", "process_early_steps")
    )
    return Round(seconds, sum(waits) / len(waits), scores, steps, early)


if __name__ == "__main__":
    main()
