#!/usr/bin/env python3
"""Peer baseline: transformers' continuous batching on the same three kinds of rollout work as vllm_generate.py. One JSON row a kind.

usage: hf_continuous.py --model FOLDER [--dtype bfloat16|float32] [--groups 8 --group 8] [--attention "paged|eager"] [--page 64] [--requests 16]
Every request has its own max_new_tokens and no end token. Needs transformers >= 5.17; the cache is sized by --tokens.
If a request fails, the script says why in one line and exits 1.
"""
import argparse, json, os, sys, time

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
import torch, transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from vllm_generate import work

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("--model", required=True)
ap.add_argument("--dtype", default="bfloat16")
ap.add_argument("--groups", type=int, default=8)
ap.add_argument("--group", type=int, default=8)
ap.add_argument("--repeat", type=int, default=3)
ap.add_argument("--attention", default="paged|eager", help="paged|eager or sdpa: what it offers without a flash kernel")
ap.add_argument("--page", type=int, default=64, help="tokens in a page; whole pages are shared between prompts")
ap.add_argument("--tokens", type=int, default=65536, help="tokens in the cache")
ap.add_argument("--batch-tokens", type=int, default=2048, help="tokens in one step")
ap.add_argument("--requests", type=int, default=16, help="requests in one step; its attention without a flash kernel multiplies every query with every key of the step")
ap.add_argument("--threads", type=int, default=2)
ap.add_argument("--kind", default="equal,ragged,prefix")
a = ap.parse_args()
torch.set_num_threads(a.threads)
model = AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype), attn_implementation=a.attention).eval()
config = ContinuousBatchingConfig(page_size=a.page, num_blocks=a.tokens // a.page, max_batch_tokens=a.batch_tokens, max_requests_per_batch=a.requests, auto_switch_to_flash=False)
sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=1, eos_token_id=-1, pad_token_id=0)

def once(manager, flat):
    """Seconds until every request of [(prompt, new tokens)] has ended."""
    t = time.perf_counter()
    left = {manager.add_request(p, max_new_tokens=n, eos_token_id=-1): n for p, n in flat}
    while left:
        out = manager.get_result(timeout=5)
        if out is None:
            if not manager.is_running():
                sys.exit(f"transformers' continuous batching stopped with {len(left)} requests left (transformers {transformers.__version__}, {a.attention}); its log says why")
        elif out.error is not None:
            sys.exit(f"transformers' continuous batching does not run here (transformers {transformers.__version__}, {a.attention}): {out.error}")
        elif out.is_finished():
            wanted, got = left.pop(out.request_id), len(out.generated_tokens)
            if got != wanted: sys.exit(f"{got} tokens came back where {wanted} were asked for")
    return time.perf_counter() - t

manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=config)
manager.start()
try:
    for kind in a.kind.split(","):
        rates = []
        for r in range(a.repeat + 1):
            flat = [(p, n) for p, lengths in work(kind, a.groups, a.group, model.config.vocab_size, seed=r) for n in lengths]
            rates.append(sum(n for _, n in flat) / once(manager, flat))
        rates = sorted(rates[1:])
        print(json.dumps(dict(engine="transformers-cb", version=transformers.__version__, kind=kind, dtype=a.dtype, attention=a.attention, groups=a.groups, group=a.group, requests=a.requests, threads=a.threads, tok_s=round(rates[len(rates) // 2], 1), runs=[round(x, 1) for x in rates])), flush=True)
finally:
    manager.stop(block=True)
