"""The tiny recipe on random models of other families, and rollouts of a recurrent one with and without a prefix cache.

    rondel bench families --families qwen3_5_text,gpt_oss,lfm2,nemotron_h,deepseek_v32 --json
    rondel bench families --families "" --rollout lfm2,qwen3_5_text --prompt 512 --json

Learning: reward of the last ten steps, accuracy on held-out tasks, and the largest gap between the logprobs of engine
and trainer in two further steps at lr = 0 from the weights that were reached.
Rollout: tokens a second of `--groups` groups of `--group` answers behind prompts of their own, in turn with the cache
(a group computes its prompt once) and without (each request in a namespace of its own); bytes of state a sequence, as the
engine's memory is planned with and as it is held.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
PLAIN = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": PLAIN | {"num_hidden_layers": 3},
    "qwen3_5_text": PLAIN
    | LINEAR
    | {"head_dim": 24, "num_hidden_layers": 3}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "gpt_oss": PLAIN
    | {"head_dim": 24, "num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "lfm2": PLAIN | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "nemotron_h": PLAIN
    | EXPERTS
    | {"head_dim": 24, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 96}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]}
    | {"mamba_num_heads": 8, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4},
    "deepseek_v32": PLAIN
    | LATENT
    | EXPERTS
    | {"num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 8},
}


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, report

    parser = argparse.ArgumentParser(
        prog="rondel bench families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default="qwen3_5_text,gpt_oss,lfm2,nemotron_h,deepseek_v32")
    parser.add_argument("--steps", type=int, default=55, help="of reinforcement learning, after --warmup")
    parser.add_argument("--warmup", type=int, default=230, help="supervised steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollout", default="", help="families whose rollouts are timed")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    told = {name: learn(name, a) for name in filter(None, a.families.split(","))}
    speed = {name: roll_out(name, a) for name in filter(None, a.rollout.split(","))}
    report({"learning": told, "rollout": speed}, only_json=a.json)


def learn(name: str, a: argparse.Namespace) -> dict[str, float]:
    from rows import last, mean, train

    from rondel.runtime.journal.log import read

    model = {"model.path": {"random": name, "max_position_embeddings": 64, **MODELS[name]}}
    if any("experts" in key for key in MODELS[name]):
        model["trainer.routing_replay"] = True
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = Path(scratch) / "run", time.perf_counter()
        curve, _ = train(folder, a.seed, model | {"loop.steps": a.steps, "loop.warmup.steps": a.warmup}, a.set)
        seconds = time.perf_counter() - began
        held_out = [e["score"] for e in read(folder) if e["kind"] == "Evaluated"]
        still = {"model.path": last(folder), "loop.steps": 2, "loop.warmup.steps": 0, "trainer.lr": 0.0}
        replayed = {key: value for key, value in model.items() if key != "model.path"}
        train(Path(scratch) / "still", a.seed, still | replayed, a.set)
        gaps = [e["metrics"]["train/gap_max"] for e in read(Path(scratch) / "still") if e["kind"] == "StepDone"]
    row = {
        "first": round(curve[0], 3),
        "reward": round(mean(curve[-10:]), 3),
        "held_out": held_out[-1] if held_out else None,
        "gap_at_lr_0": max(gaps),
        "seconds": round(seconds, 1),
    }
    print(f"{name:<16} {row}", file=sys.stderr, flush=True)
    return row


def roll_out(name: str, a: argparse.Namespace) -> dict[str, float]:
    import torch
    from _work import median, opened

    from rondel.core.types import Request, Sampling, sample_key
    from rondel.generate.engine.builtin.engine import BuiltinEngine

    spec = {"random": name, "max_position_embeddings": 4 * a.prompt, **MODELS[name]}
    device, loaded = opened(spec, "float32", 1)
    engine = BuiltinEngine(loaded, run=device.run, kv_pages=65536, max_running=a.groups * a.group)
    prompts = torch.randint(5, 90, (a.groups, a.prompt), generator=torch.Generator().manual_seed(0)).tolist()

    async def once(cached: bool) -> float:
        engine.scheduler.drop_cache(engine.version)
        jobs = [
            Request(prompt, Sampling(max_tokens=a.new, ignore_eos=True), key=sample_key(0, g, s))
            for g, prompt in enumerate(prompts)
            for s in range(a.group)
        ]
        for number, job in enumerate(jobs):
            job.namespace = "" if cached else str(number)
        began = time.perf_counter()
        outs = await asyncio.gather(*map(engine.generate, jobs))
        return sum(len(out.tokens) for out in outs) / (time.perf_counter() - began)

    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(a.rounds + 1):
        for cached in rates:
            rates[cached].append(asyncio.run(once(cached)))
    on, off = (median(rates[cached][1:]) for cached in (True, False))
    states = engine.scheduler.states
    held = states.memory.pool_bytes // states.memory.slots if states else 0
    row = {"cached": round(on), "cold": round(off), "ratio": round(on / off, 2)}
    row |= {"state_bytes_planned": loaded.state_bytes, "state_bytes_held": held}
    print(f"{name:<16} {row}", file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    main()
