"""What is tried before an hour is spent: the recipe, the environment, a run at lr = 0, the speed of this machine."""
