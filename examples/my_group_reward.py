"""A reward that sees the whole group: `reward = "my_group_reward:rank"`, or as a part of `combine`.

`groupwise = True` says that it is called once a group, with all answers to the task, and returns one score each.
"""


def rank(trajectories, task, window=5.0):
    """1 for the right answer in the fewest tokens, less for longer ones, 0 for wrong ones: length counts only where it
    can be compared.
    """
    gold = str(task.data["answer"])
    right = [t.text.strip().rstrip(".").split()[-1:] == [gold] for t in trajectories]
    shortest = min((t.written for t, ok in zip(trajectories, right) if ok), default=0)
    return [ok / (1 + max(0, t.written - shortest) / window) for t, ok in zip(trajectories, right)]


rank.groupwise = True
