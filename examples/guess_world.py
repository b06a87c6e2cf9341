"""A world with Gymnasium's verbs: `env = "gym"`, `data = { kind = "gym", name =
"guess_world:make", n = 200 }`. A number from 1 to 7 is to be guessed.
"""

import gymnasium
from gymnasium.spaces import Text


class Guess(gymnasium.Env):
    observation_space = action_space = Text(64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret, self.left = int(self.np_random.integers(1, 8)), 3
        return "guess ", {}

    def step(self, action):
        self.left -= 1
        right = action.strip() == str(self.secret)
        said = " no " if not action.strip().isdigit() else " more " if int(action) < self.secret else " less "
        return said, float(right) - 0.01, right, not self.left, {}


def make():
    return Guess()
