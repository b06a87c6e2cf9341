"""A reward of your own: `reward = "my_reward:grade"`, or with settings `{ kind = "my_reward:grade", brevity = 0.1 }`.

It runs in a process of its own with a wall clock; what it raises is counted as a failure and is never a 0.
"""


def grade(trajectory, task, brevity=0.0):
    """Right or wrong, and a little more for few tokens. Named parts are added up, and each is shown in the metrics."""
    said = trajectory.text.split()
    correct = float(bool(said) and said[-1].rstrip(".") == str(task.data["answer"]))
    return {"correct": correct, "brevity": brevity * correct / max(1, trajectory.written)}
