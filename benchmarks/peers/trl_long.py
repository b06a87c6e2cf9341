#!/usr/bin/env python3
"""Peer baseline: one training step of TRL's GRPOTrainer on one given sample of many tokens, half of it prompt: seconds, peak of resident memory.

Own environment:  pip install torch==2.13.0 trl==1.16.0 datasets accelerate bitsandbytes
usage: trl_long.py --model FOLDER --tokens 4096 [--dtype float32|bfloat16] [--amp] [--checkpointing] [--optim adamw_8bit]
Nothing is generated: what the trainer would have drawn is given to it, first a sample of 64 tokens, which makes the moments, then the one that counts.
"""
import argparse, json, os, resource, tempfile, time

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("--model", required=True, help="folder with safetensors and tokenizer")
ap.add_argument("--tokens", type=int, default=1024, help="of the sample")
ap.add_argument("--dtype", default="float32", help="dtype the weights are loaded in")
ap.add_argument("--amp", action="store_true", help="bf16 autocast in training")
ap.add_argument("--checkpointing", action="store_true", help="gradient_checkpointing")
ap.add_argument("--optim", default="adamw_torch")
ap.add_argument("--threads", type=int, default=2)
a = ap.parse_args()

import torch
torch.set_num_threads(a.threads)
import transformers, trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

gb = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e9
row = dict(trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__, tokens=a.tokens, dtype=a.dtype, amp=a.amp, checkpointing=a.checkpointing, optim=a.optim, threads=a.threads)

class Clock(TrainerCallback):
    seconds, spent = [], []
    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter(), time.process_time()
    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.began[0]); self.spent.append(time.process_time() - self.began[1])

cfg = GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, max_steps=2, per_device_train_batch_size=1, steps_per_generation=2, gradient_accumulation_steps=1, num_generations=2,
    max_completion_length=a.tokens // 2, learning_rate=1e-6, lr_scheduler_type="constant", beta=0.0, bf16=a.amp, fp16=False, gradient_checkpointing=a.checkpointing, optim=a.optim,
    logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, model_init_kwargs={"dtype": a.dtype})
clock = Clock()
trainer = GRPOTrainer(model=a.model, args=cfg, train_dataset=Dataset.from_list([{"prompt": "x"}] * 8), reward_funcs=lambda completions, **_: [0.0] * len(completions),
    processing_class=AutoTokenizer.from_pretrained(a.model, padding_side="left"), callbacks=[clock])

def given(tokens, seed):
    ids = torch.randint(5, trainer.model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed))
    prompt, completion = ids[:, : tokens // 2], ids[:, tokens // 2 :]
    return dict(prompt_ids=prompt, prompt_mask=torch.ones_like(prompt), completion_ids=completion, completion_mask=torch.ones_like(completion), advantages=torch.ones(1), num_items_in_batch=torch.tensor(completion.numel()))

samples = iter([given(64, 0), given(a.tokens, 1)])
trainer._prepare_inputs = lambda _: next(samples)
before = gb()
trainer.train()
print(json.dumps(row | dict(seconds=round(clock.seconds[1], 2), cpu_seconds=round(clock.spent[1], 2), before=round(before, 2), peak=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2))), flush=True)
