"""What is trained of a step, in a function of your own: `algo.batch = "my_batch:without_short"`.

It gets the samples of the step before their advantages are computed, and returns the batch that is trained. A sample
that it leaves out stays in the store of rollouts.
"""

from dataclasses import replace

SHORTEST = 2  # tokens


def without_short(batch):
    """Leaves out answers of a single token, unless the step has no others."""
    kept = [sample for sample in batch.samples if len(sample.trainable) >= SHORTEST]
    return replace(batch, samples=kept or batch.samples)
