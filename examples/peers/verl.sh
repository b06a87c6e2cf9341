#!/usr/bin/env bash
set -x

MODEL=${MODEL:-Qwen/Qwen3-1.7B}
max_response_length=$((1024 * 2))
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.clip_ratio=0.3   # a trap: clip_ratio_low and clip_ratio_high come first
)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=data/gsm8k/train.parquet \
    data.val_files=data/gsm8k/test.parquet \
    data.train_batch_size=1024 \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    trainer.logger=['console','wandb'] \
    trainer.n_gpus_per_node=8 \
    trainer.total_training_steps=435 \
    trainer.test_freq=5 "${ACTOR[@]}" $@
