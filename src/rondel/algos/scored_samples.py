"""The scored samples of a step on their way to advantages. Everything here sees the whole step, before any split."""

from __future__ import annotations

from dataclasses import dataclass, field

from rondel.algos.tensors import Tensor, torch


@dataclass(frozen=True)
class ScoredSamples:
    """N samples of whole groups; T trainable tokens, in the order of the samples.

    >>> ScoredSamples(torch.tensor([1.0, 0.0]), group_N=torch.tensor([7, 7]), lengths_N=torch.tensor([3, 5]))  # doctest: +SKIP
    """

    rewards_N: Tensor
    group_N: Tensor  # int64 group ids in any order and with any values
    lengths_N: Tensor  # int64 trainable tokens
    # [N] each: what the reward was made of; NaN where a sample has no such part
    parts: dict[str, Tensor] = field(default_factory=dict)
    greedy_N: Tensor | None = None  # the reward of the greedy answer to the sample's prompt
    earned_T: Tensor | None = None  # where the reward was earned; None: all of it at the end
    values_T: Tensor | None = None  # what the critic expected before the token; these are known if the row needs them
    behavior_T: Tensor | None = None
    ref_T: Tensor | None = None
    teacher_T: Tensor | None = None
    proximal_T: Tensor | None = None

    @property
    def token_rewards(self) -> Tensor:
        """[T] what each token earned."""
        return self.at_end(self.rewards_N) if self.earned_T is None else self.earned_T

    @property
    def sample_T(self) -> Tensor:
        """Whose token it is, by its place among the samples."""
        return self.spread_to_tokens(torch.arange(len(self.lengths_N), device=self.lengths_N.device))

    def spread_to_tokens(self, values_N: Tensor) -> Tensor:
        """Every token gets the value of its sample.  [N] -> [T]."""
        return values_N.repeat_interleave(self.lengths_N)

    def at_end(self, values_N: Tensor) -> Tensor:
        """The last token of a sample gets its value, the others 0.  [N] -> [T]."""
        written_N = self.lengths_N > 0
        out_T = values_N.new_zeros(int(self.lengths_N.sum()))
        return out_T.index_copy(0, (self.lengths_N.cumsum(0) - 1)[written_N], values_N[written_N])

    def sum_by_sample(self, values_T: Tensor) -> Tensor:
        """Added up over the tokens of each sample.  [T] -> [N]."""
        return values_T.new_zeros(len(self.lengths_N)).index_add(0, self.sample_T, values_T)
