"""The engine's stored logprobs against a plain transformers forward pass (its own
eager attention, batch of one, no cache).

    rondel bench parity --model FOLDER --dtype float32 --json
Beside it the training path over the same answers (K3: mean of w - 1 - log w, w = pi_trainer / pi_engine of a token),
and the same model's own disagreement: transformers' cached decoding against its
full forward pass, the floor of rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    import torch
    from _work import SUFFIX

    import rondel
    from rondel.train.annotate import logprobs_of

    engine = rondel.Engine.load(a.model, dtype=a.dtype, device="cpu")
    tokenizer, model = engine.tokenizer, engine.loaded.model
    asked = [[{"role": "user", "content": f"{3 + i} + {9 - i} =" + SUFFIX}] for i in range(a.prompts)]
    prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in asked]
    outs = engine.generate(prompts, rondel.Sampling(n=a.samples, max_tokens=a.new))
    engine.close()
    trained = [
        torch.tensor(logprobs_of(engine.loaded, prompt + out.tokens)[len(prompt) :], dtype=torch.float64)
        - torch.tensor(out.logprobs, dtype=torch.float64)
        for prompt, samples in zip(prompts, outs)
        for out in samples
    ]
    x = torch.cat(trained)
    model.set_attn_implementation("eager")
    gaps, floor = [], []
    with torch.inference_mode():
        for prompt, samples in zip(prompts, outs):
            for out in samples:
                ids = torch.tensor([prompt + out.tokens])
                target = ids[0, len(prompt) :, None]
                plain = (
                    model(ids, use_cache=False)
                    .logits[0]
                    .float()
                    .log_softmax(-1)[len(prompt) - 1 : -1]
                    .gather(1, target)[:, 0]
                )
                gaps.append(float((plain - torch.tensor(out.logprobs)).abs().max()))
                past, own = None, []
                for piece in [ids[:, : len(prompt)], *ids[:, len(prompt) :].split(1, 1)]:
                    step = model(piece, past_key_values=past, use_cache=True)
                    past = step.past_key_values
                    own.append(step.logits[0, -1].float().log_softmax(-1))
                cached = torch.stack(own[:-1]).gather(1, target)[:, 0]
                floor.append(float((plain - cached).abs().max()))
    out = {"bench": "parity", "dtype": str(engine.loaded.dtype).removeprefix("torch."), "answers": len(gaps), "largest_gap": max(gaps),
           "trainer_gap_mean": float(x.abs().mean()), "trainer_gap_max": float(x.abs().max()),
           "trainer_k3": float((x.exp() - 1 - x).mean()), "tokens": len(x),
           "transformers_own_gap": max(floor)}  # fmt: skip
    print(json.dumps(out))


if __name__ == "__main__":
    main()
