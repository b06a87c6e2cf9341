"""The reward. recipe.toml names it: `reward = { kind = "reward:grade", first_try = 0.1 }`.

It runs in a process of its own with a wall clock. What it raises is counted as a failure and is never a 0.
"""


def grade(trajectory, task, first_try=0.0):
    """Right or wrong, and a little more for the first try. Named parts are added up, and each is shown in the metrics.

    trajectory.text is what the policy wrote, in all its turns; task.data is the row of the task.
    """
    words = trajectory.text.split()
    correct = float(bool(words) and words[-1].strip(".*") == task.data["answer"])
    tries = sum(turn.written for turn in trajectory.conversation)
    return {"correct": correct, "first_try": first_try * correct * (tries <= 1)}
