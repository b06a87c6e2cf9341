"""stable-baselines3's PPO until it has solved a world, for `rondel bench control --peer`: one JSON object.

CartPole-v1 has the settings of its zoo (n_envs 8, n_steps 32, batch 256, lambda 0.8, gamma 0.98, 20 epochs, rate 1e-3
and clip 0.2 falling linearly), every other world those that PPO has itself. Evaluation is no part of the seconds.
"""

from __future__ import annotations

import argparse
import json
import time

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

LAST = 20
OTHERS = range(1_000_000, 1_000_020)  # seeds of the evaluation, those of the recipes
ZOO = {
    "CartPole-v1": dict(
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda left: left * 1e-3,
        clip_range=lambda left: left * 0.2,
    )
}


class UntilSolved(BaseCallback):
    def __init__(self, target: float) -> None:
        super().__init__()
        self.target, self.returns, self.found, self.curve = target, [], None, []
        self.began = time.perf_counter()

    def _on_step(self) -> bool:
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        if self.found is None and len(self.returns) >= LAST and np.mean(self.returns[-LAST:]) >= self.target:
            self.found = (self.num_timesteps, time.perf_counter() - self.began)
        return True

    def _on_rollout_end(self) -> None:
        if self.returns:
            seconds = time.perf_counter() - self.began
            self.curve.append((self.num_timesteps, seconds, float(np.mean(self.returns[-LAST:]))))


def likeliest_return(model: PPO, name: str, seed: int) -> float:
    """The return of one episode in which each action is the likeliest."""
    world, total, over = gymnasium.make(name), 0.0, False
    shown, _ = world.reset(seed=seed)
    while not over:
        action, _ = model.predict(shown, deterministic=True)
        shown, reward, terminated, truncated, _ = world.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    a = parser.parse_args()
    torch.set_num_threads(1)
    worlds = make_vec_env(a.world, n_envs=8 if a.world in ZOO else 1, seed=a.seed)
    model = PPO("MlpPolicy", worlds, seed=a.seed, device="cpu", **ZOO.get(a.world, {}))
    watch = UntilSolved(a.target)
    model.learn(a.steps, callback=watch)
    greedy = np.mean([likeliest_return(model, a.world, seed) for seed in OTHERS])
    steps, seconds = watch.found or (None, None)
    told = {"steps": steps, "seconds": seconds and round(seconds, 1), "greedy": float(greedy), "curve": watch.curve}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
