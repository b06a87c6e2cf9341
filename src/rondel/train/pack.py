"""Groups -> one packed, ragged batch: no pad token, and the prompt of a group once for all its completions.

    group 1: prompt P │ c1 ····· │ c2 ··· │ c3 ······   group 2: prompt P' │ c1 ·· │ c2 ····
    source of the first token of every completion: the prompt's last position, computed once and shared

T packed tokens · M trainable tokens, in sample order · N samples
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from rondel.algos.mixture import Mixture
from rondel.algos.scored_samples import ScoredSamples
from rondel.algos.tokens import TokenBatch
from rondel.core import media
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.media import Image, ImagePlaceholder
from rondel.core.types import GREEDY, POLICY, Group, Score, Trajectory
from rondel.models.image_features import VisionFeatures
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.packed_steps import PackedSteps
from rondel.train.balance import PromptFamilies, balance_micro_batches, in_order
from rondel.train.sampling_mask import SupportMask
from rondel.train.turns import turns_of

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm
    from rondel.core.drawn_steps import DrawnSteps
    from rondel.core.unmasking_steps import UnmaskedAnswers, UnmaskingSteps
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.routing_tape import RoutingTape
    from rondel.train.settings import TrainSettings


@dataclass(slots=True)
class TrainSample:
    """One trajectory on its way through training; arrays are over its trainable tokens, [m] each.

    >>> TrainSample.from_trajectory(trajectory, group=17, index=0).lengths  # doctest: +SKIP
    """

    group: int
    index: int  # its place in the group
    tokens: np.ndarray  # [t] int32, the whole stream
    trainable: np.ndarray  # [m] int32, positions in `tokens` that the policy wrote
    reward: float
    known: TokenBatch  # what is known of its trainable tokens, [m] each, and becomes known on the way
    parts: dict[str, float] = field(default_factory=dict)  # what the reward was made of
    earned: np.ndarray | None = None  # [m] where the reward was earned; None: all of it at the end
    policy: str = POLICY  # whose weights wrote it, and learn from it
    agent: str = ""  # who acts; it is compared with the same one's other episodes
    parent: int | None = None  # the `index` of the trajectory whose credit it shares: a branch of the same episode
    stream: str = ""  # of its task, by which a mixture finds its row
    task: str = ""  # its name
    truncated: bool = False  # the token limit cut it off
    guided: bool = False  # a demonstration among the policy's own samples
    baseline: float | None = None  # the reward of the greedy answer to its prompt, where the row wants it
    experts: np.ndarray | None = None  # [t-1,L,K] of a MoE: where the engine sent each token
    support: list[np.ndarray | None] | None = None  # [m] the ids that a token was drawn from, where others were cut
    teacher_prompts: list[list[int] | None] = field(default_factory=list)  # what each teacher reads instead of its own
    # [m,D] each: a teacher's last hidden states, by its place among the teachers
    hidden: dict[int, Tensor] = field(default_factory=dict)
    media: list[ImagePlaceholder] = field(default_factory=list)  # the pictures that it reads
    steps: DrawnSteps | None = None  # of its trainable tokens
    after: np.ndarray | None = None  # [O] what a world showed where it cut the episode off
    value_after: float = 0.0  # what the critic expects from there
    keys: np.ndarray = field(init=False)  # [t] what siblings must have in common to share it

    @classmethod
    def from_trajectory(
        cls,
        trajectory: Trajectory,
        *,
        group: int,
        index: int,
        baseline: float | None = None,
        stream: str = "",
        task: str = "",
    ) -> TrainSample:
        # four bytes a token on the way, where nonzero() and a row of float64 take eight
        trainable = np.arange(len(trajectory.tokens), dtype=np.int32)[np.asarray(trajectory.mask, dtype=bool)]
        if len(trainable) and trainable[0] == 0:
            raise ValueError(
                f"group {group}, sample {index}: the first token has no predecessor, so it cannot be trained"
            )
        try:
            earned = (
                np.asarray(trajectory.score.token_rewards(trajectory.mask))
                if isinstance(trajectory.score, Score) and trajectory.score.steps
                else None
            )
        except ValueError as error:
            raise ValueError(f"group {group}, sample {index}: {error}") from error
        return cls(
            group,
            index,
            np.array(trajectory.tokens, dtype=np.int32),
            trainable,
            float(trajectory.reward or 0.0),
            TokenBatch(
                torch.zeros(1, dtype=torch.int64).expand(len(trainable)),
                behavior=torch.from_numpy(np.asarray(trajectory.logprobs, dtype=np.float32)[trainable]),
                versions=torch.from_numpy(np.asarray(trajectory.versions)[trainable]),
            ).with_fields(**_top_columns(trajectory, trainable)),
            dict(trajectory.score.parts) if isinstance(trajectory.score, Score) else {},
            earned,
            policy=POLICY if trajectory.is_demonstration else trajectory.policy,
            agent=trajectory.agent,
            parent=trajectory.parent,
            stream=stream,
            task=task,
            truncated=trajectory.is_truncated,
            guided=trajectory.is_demonstration,
            baseline=baseline,
            experts=None if trajectory.experts is None else np.asarray(trajectory.experts),
            support=None
            if trajectory.support is None
            else _checked_support(trajectory, trainable, f"group {group}, sample {index}"),
            teacher_prompts=trajectory.teacher_prompts,
            media=trajectory.media,
            steps=trajectory.steps,
            after=None if trajectory.steps is None else trajectory.steps.after,
        )

    def __post_init__(self) -> None:
        self.keys = np.asarray(media.content_keys(self.tokens, self.media), np.int64) if self.media else self.tokens

    def as_read_by(self, teacher: int) -> TrainSample:
        """The same answer behind what a teacher reads instead of the prompt; what is written of its tokens is of this
        sample's, too. The sample itself where the teacher reads the same.
        """
        prompt = self.teacher_prompts[teacher] if teacher < len(self.teacher_prompts) else None
        if prompt is None:
            return self
        own, first = self.prompt_length, len(prompt)
        return replace(
            self,
            tokens=np.concatenate([np.asarray(prompt, np.int32), self.tokens[own:]]),
            trainable=self.trainable - own + first,
            experts=None,
            support=None,
        )

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trainable one."""
        return int(self.trainable[0]) if len(self.trainable) else len(self.tokens)

    @property
    def packed_length(self) -> int:
        """Tokens that it takes in a row, with those of blocks that stand there once for each of their states."""
        return len(self.tokens) + (0 if self.steps is None else self.steps.copied)

    @property
    def several_turns(self) -> bool:
        """Something that it only read stands between what it wrote."""
        return len(self.trainable) > 0 and int(self.trainable[-1] - self.trainable[0]) >= len(self.trainable)

    @property
    def observations(self) -> np.ndarray | None:
        """[m, O] what a world of arrays showed before each of its actions; None in text."""
        return self.steps.x if isinstance(self.steps, ContinuousSteps) and self.steps.observed else None

    @property
    def earned_tokens(self) -> np.ndarray:
        """[m] where its reward was earned."""
        if self.earned is None:
            earned = np.zeros(len(self.trainable))
            earned[-1:] = self.reward
            return earned
        return self.earned

    @property
    def episode(self) -> int:
        """Which of its group: its branches share it."""
        return self.index if self.parent is None else self.parent


@dataclass(slots=True)
class TrainBatch:
    """Samples of whole groups, whose denominators are counted before anything is split."""

    samples: list[TrainSample]

    @property
    def lengths_N(self) -> Tensor:
        return torch.tensor([len(s.trainable) for s in self.samples], dtype=torch.int64)

    @property
    def group_N(self) -> Tensor:
        """Which samples answer one prompt."""
        return torch.tensor([s.group for s in self.samples], dtype=torch.int64)

    @property
    def scored_samples(self) -> ScoredSamples:
        """What advantages are made of."""
        names = dict.fromkeys(name for s in self.samples for name in s.parts)
        sides = {side: i for i, side in enumerate(dict.fromkeys((s.group, s.agent) for s in self.samples))}
        tokens = self.tokens()
        greedy = [s.baseline for s in self.samples if s.baseline is not None]
        return ScoredSamples(
            torch.tensor([s.reward for s in self.samples], dtype=torch.float64),
            torch.tensor([sides[s.group, s.agent] for s in self.samples], dtype=torch.int64),
            self.lengths_N,
            {
                name: torch.tensor([s.parts.get(name, math.nan) for s in self.samples], dtype=torch.float64)
                for name in names
            },
            greedy_N=torch.tensor(greedy, dtype=torch.float64) if len(greedy) == len(self.samples) else None,
            earned_T=_concat_per_token([s.earned_tokens for s in self.samples])
            if any(s.earned is not None for s in self.samples)
            else None,
            values_T=_double(tokens.values),
            value_after_N=torch.tensor([s.value_after for s in self.samples], dtype=torch.float64)
            if any(s.after is not None for s in self.samples)
            else None,
            behavior_T=_double(tokens.behavior),
            ref_T=_double(tokens.reference),
            teacher_T=_double(tokens.teacher),
            margins={n: torch.cat([s.known.margins[n] for s in self.samples]).double() for n in self._hints()},
            proximal_T=_double(tokens.proximal),
            collision_T=_double(tokens.collision),
            agents=tuple(s.agent for s in self.samples),
            tasks=tuple(s.task for s in self.samples),
            **self._turns(),
        )

    def _hints(self) -> list[int]:
        """Hints that all samples were scored under."""
        return sorted(set.intersection(*(set(s.known.margins) for s in self.samples))) if self.samples else []

    def _turns(self) -> dict[str, Tensor]:
        shown = [s.observations for s in self.samples]
        if not any(s.several_turns or x is not None for s, x in zip(self.samples, shown)):
            return {}
        sides = [(s.group, s.agent) for s in self.samples]
        return turns_of([s.trainable for s in self.samples], [s.keys for s in self.samples], sides, shown)

    @property
    def total_tokens(self) -> int:
        return sum(len(s.trainable) for s in self.samples)

    @property
    def largest_group(self) -> int:
        """Tokens of the largest group in one row, its prompt once."""
        tokens: dict[int, int] = {}
        for s in self.samples:
            tokens[s.group] = tokens.get(s.group, s.prompt_length) + s.packed_length - s.prompt_length
        return max(tokens.values(), default=0)

    def tokens(self, chosen: Sequence[int] | None = None, device: torch.device | str = "cpu") -> TokenBatch:
        """The tokens of all samples, or of the chosen ones, in their order, with all that is known of every one."""
        picked = self.samples if chosen is None else [self.samples[i] for i in chosen]
        return TokenBatch.concat([s.known for s in picked], device)

    def write_tokens(self, chosen: Sequence[int] | None = None, **values: Tensor) -> None:
        """Give each sample its share of per-token tensors, under the names of TokenBatch's fields."""
        for name, values_T in values.items():
            for sample, piece in self._split_tokens(chosen, values_T):
                setattr(sample.known, name, piece)

    def write_teacher(self, chosen: Sequence[int], number: int, values_M: Tensor) -> None:
        """Give the chosen samples the log-probabilities of one teacher."""
        for sample, piece in self._split_tokens(chosen, values_M):
            sample.known.teachers[number] = piece

    def write_margins(self, chosen: Sequence[int], number: int, values_M: Tensor) -> None:
        """Give the chosen samples their margins under one hint."""
        for sample, piece in self._split_tokens(chosen, values_M):
            sample.known.margins[number] = piece

    def _split_tokens(self, chosen: Sequence[int] | None, values_T: Tensor) -> Iterator[tuple[TrainSample, Tensor]]:
        picked = self.samples if chosen is None else [self.samples[i] for i in chosen]
        yield from zip(
            picked, values_T.detach().to("cpu", torch.float32, copy=True).split([len(s.trainable) for s in picked])
        )

    def sample_name(self, sample: int) -> str:
        return f"group {self.samples[sample].group}, sample {self.samples[sample].index}"

    def split_by_row(self, algo: Algorithm | Mixture) -> list[tuple[Algorithm, float, TrainBatch]]:
        """Each row of `algo` with its weight and its samples."""
        if not isinstance(algo, Mixture):
            return [(algo, 1.0, self)]
        found = algo.split_by_row([s.stream for s in self.samples])
        return [(row, weight, TrainBatch([self.samples[i] for i in places])) for row, weight, places in found]

    @property
    def is_noted(self) -> bool:
        """Whether the proximal log-probabilities are with the samples."""
        return all(s.known.proximal is not None for s in self.samples)

    def restore_vocabulary(self) -> None:
        """Forget what truncation cut off when the tokens were drawn: their log-probabilities become those of the whole
        distribution.
        """
        for sample in self.samples:
            sample.support = None

    def trainable_samples(self, row: Algorithm) -> TrainBatch:
        """The samples that give a gradient: all, or those that were not cut off where the row masks truncated ones."""
        return TrainBatch([s for s in self.samples if not s.truncated]) if row.mask_truncated else self

    def samples_to_compute(self, row: Algorithm) -> list[int]:
        """Those without which the gradient of `row` would be another one: where it is a multiple of the advantage, the
        samples that have one. Of a batch in which none has, the first group, so that every step measures its tokens.
        """
        advantages = [s.known.advantages for s in self.samples]
        if not row.scales_advantage or any(a is None for a in advantages):
            return list(range(len(self.samples)))
        found = [i for i, a in enumerate(advantages) if a is not None and bool(a.any())]
        return found or [i for i, s in enumerate(self.samples) if s.group == self.samples[0].group]

    def split_updates(self, n: int) -> list[TrainBatch]:
        """`n` optimizer batches of whole groups, as equal as they come."""
        groups = list(dict.fromkeys(s.group for s in self.samples))
        parts = [set(groups[i::n]) for i in range(min(n, len(groups)))]
        return [TrainBatch([s for s in self.samples if s.group in part]) for part in parts]


def train_samples(groups: Iterable[Group]) -> Iterator[TrainSample]:
    """The scored trajectories of all groups."""
    for group in groups:
        for i, trajectory in enumerate(group.trajectories):
            if trajectory.reward is not None and trajectory.written and trajectory.policy != GREEDY:
                yield TrainSample.from_trajectory(
                    trajectory,
                    group=group.id,
                    index=i,
                    baseline=group.baseline,
                    stream=group.task.stream,
                    task=group.task.id,
                )


def batch_of(groups: Iterable[Group]) -> TrainBatch:
    return TrainBatch(list(train_samples(groups)))


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch, ready for a forward pass.

    tokens, positions  [T]   the packed row; positions are [4,T] where a picture is seen
    source             [M]   the packed position whose hidden state predicts the token: siblings
                       share the prompt's last one
    target             [M]   the token
    sample             [M]   index into `samples`
    """

    samples: list[int]  # indices into the batch
    tokens: Tensor
    positions: Tensor
    source: Tensor
    target: Tensor
    sample: Tensor
    layout: PackedLayout
    routes: Tensor | None = None  # [T,L,K] to be replayed
    kept: SupportMask | None = None  # of the M tokens, where truncation cut some of the vocabulary off
    looks: ImageLookups | None = None
    steps: PackedSteps | UnmaskedAnswers | None = None  # of the M tokens, where they are points, or unmasked in blocks
    idle: bool = False  # another rank computes it: only the pass counts

    def join_targets(self, values_M: Tensor) -> Tensor:
        """What was computed of the targets here -> of all: they are all here (row_share.py: not where ranks share a
        row).
        """
        return values_M

    def join_flips(self, tape: RoutingTape | None) -> None:
        """The same of what a pass has put on its tape."""

    @property
    def token_count(self) -> int:
        """Tokens of the samples in the row."""
        return len(self.tokens)

    def encode_images(self, loaded: LoadedModel) -> VisionFeatures | None:
        """What this model sees there."""
        return None if self.looks is None else self.looks.encode(loaded)


@dataclass(slots=True)
class ImageLookups:
    """Where a micro-batch looks at what: row rows[i] sees cell cells[i] of the images behind
    each other, each of which is there once.
    """

    images: list[Image]
    rows: Tensor  # [n] ascending
    cells: Tensor  # [n]
    numbers: Tensor  # [n] of the image and its place

    def encode(self, loaded: LoadedModel) -> VisionFeatures:
        """What this model sees in the cells."""
        return VisionFeatures(self.rows, loaded.encode_images(self.images).select_rows(self.cells), self.numbers)

    def of_rows(self, place_T: Tensor) -> ImageLookups | None:
        """Of some of the packed rows, by the new place of each, -1 of the others;
        with the images alone that these see."""
        at = place_T[self.rows]
        mine = (at >= 0).nonzero()[:, 0]
        if not len(mine):
            return None
        mine = mine[at[mine].argsort()]
        sizes = torch.tensor([image.tokens for image in self.images], device=at.device)
        which = torch.searchsorted(sizes.cumsum(0), self.cells[mine], right=True)
        seen = torch.zeros_like(sizes).index_fill_(0, which, 1)
        moved = (sizes * (1 - seen)).cumsum(0)  # cells of the images before it that go
        images = [image for image, stays in zip(self.images, seen.tolist()) if stays]
        return ImageLookups(images, at[mine], self.cells[mine] - moved[which], self.numbers[mine])


class MicroBatchShapes(Protocol):
    """Packing into rows of fixed shapes (train/static_batch.py)."""

    def split_cuts(self, batch: TrainBatch, cuts: list[list[int]]) -> list[list[int]]: ...

    def pack_samples(
        self, batch: TrainBatch, chosen: list[int], *, share: bool, device: torch.device | str
    ) -> PackedBatch: ...


class MicroBatches:
    """Those of one rank, each packed when its turn comes."""

    def __init__(
        self,
        batch: TrainBatch,
        cuts: list[list[int]],
        *,
        share: bool,
        device: torch.device | str,
        rank: int,
        ranks: int,
        shapes: MicroBatchShapes | None = None,
    ) -> None:
        """`shapes`: those that every row is padded to."""
        self.batch, self.cuts, self.share, self.device = batch, cuts, share, device
        self._pack = pack_samples if shapes is None else shapes.pack_samples
        self.numbers = range(rank, -(-len(cuts) // ranks) * ranks, ranks)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[PackedBatch]:
        for i in self.numbers:
            packed = self._pack(self.batch, self.cuts[i % len(self.cuts)], share=self.share, device=self.device)
            packed.idle = i >= len(self.cuts)
            yield packed


def micro_budget(batch: TrainBatch, settings: TrainSettings) -> int:
    """Tokens of a micro-batch of `batch`. It follows from the batch alone, so that a resumed run packs as before."""
    whole = min(batch.largest_group, settings.micro_group) if settings.micro_group else 0
    return max(settings.micro_tokens, whole)


def micro_batches(
    batch: TrainBatch,
    budget: int,
    *,
    share: bool = True,
    device: torch.device | str = "cpu",
    rank: int = 0,
    ranks: int = 1,
    stages: int = 1,
    shapes: MicroBatchShapes | None = None,
) -> MicroBatches:
    """Those of one rank, in turn; every rank gets as many, the last ones idle where there are too few."""
    even, filled = ranks * stages > 1, shapes is not None
    cuts = _split_batch(batch, budget, share=share, ranks=ranks, even=even, filled=filled)
    if shapes is not None:
        cuts = shapes.split_cuts(batch, cuts)
    return MicroBatches(batch, cuts, share=share, device=device, rank=rank, ranks=ranks, shapes=shapes)


def _split_batch(
    batch: TrainBatch, budget: int, *, share: bool, ranks: int, even: bool, filled: bool
) -> list[list[int]]:
    """Samples of each micro-batch, by a token budget that cannot change the result. Siblings
    stay together, to share their prompt, while they fit, and groups whose prompts begin
    alike share that. `even`: the micro-batches are of equal size, for ranks beside each other and stages behind each
    other wait for the fullest. `filled`: each is as full as can be, to need little padding."""
    families = _prompt_families(batch, list(range(len(batch.samples))), share)
    # any part of a family shares at least as much
    prompts = [_common_prompt([batch.samples[i] for i in family]) for family in families]
    trees = _prefix_trees(batch, families, prompts, share)
    of = {f: t for t, (members, _) in enumerate(trees) for f in members}
    number = [f for f, family in enumerate(families) for _ in family]
    own = [s.packed_length - prompts[f] for s, f in zip(batch.samples, number)]
    beyond = [prompt - trees[of[f]][1] for f, prompt in enumerate(prompts)]
    if own and not even and sum(own) + sum(beyond) + sum(root for _, root in trees) <= budget:
        return [list(range(len(own)))]
    sizes = PromptFamilies(own, number, beyond, [of[f] for f in range(len(families))], [root for _, root in trees])
    return (
        balance_micro_batches(sizes, budget=budget, ranks=ranks)
        if own and even
        else in_order(sizes, budget, filled=filled)
    )


@dataclass(frozen=True, slots=True)
class SamplePlacement:
    """The first tokens of a sample in the row: where each lies, and the segment that holds the last of them."""

    segment: int | None = None
    places: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


def pack_samples(
    batch: TrainBatch,
    chosen: list[int],
    *,
    share: bool = True,
    device: torch.device | str = "cpu",
    lay_out: Callable[[list[PackedSegment], torch.device | str], Any] = PackedLayout,
) -> PackedBatch:
    """Lay the chosen samples out in one row, as trees of what they share: what groups begin
    with, each group's prompt, its samples. `lay_out`: makes the attention layout of the segments.
    """
    segments: list[PackedSegment] = []
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    routes: list[np.ndarray] = []
    looked: list[tuple[int, ImagePlaceholder, int, int]] = []  # (row, picture, its cells from, to)
    pictured = any(batch.samples[i].media for i in chosen)
    at = 0

    def place_tokens(sample: TrainSample, end: int, above: SamplePlacement) -> SamplePlacement:
        """Its tokens up to `end`, of which those above lie already."""
        nonlocal at
        first = len(above.places)
        piece = sample.tokens[first:end]
        if not len(piece):  # a completion of one token is predicted by the prompt alone
            return above
        segments.append(PackedSegment(at, len(piece), above.segment))
        tokens.append(piece)
        positions.append(
            media.position_rows(end, sample.media)[:, first:] if pictured else np.arange(first, first + len(piece))
        )
        for place in sample.media:
            begin, stop = max(place.start, first), min(place.end, first + len(piece))
            if begin < stop:
                looked.append((at + begin - first, place, begin - place.start, stop - place.start))
        if sample.experts is not None:
            routes.append(sample.experts[first:end])
        at += len(piece)
        return SamplePlacement(len(segments) - 1, np.concatenate([above.places, np.arange(at - len(piece), at)]))

    def place_family(members: list[int], above: SamplePlacement) -> None:
        """What they have in common once, then each group of those that go on alike."""
        samples = [batch.samples[i] for i in members]
        whole = place_tokens(samples[0], _common_token_count(samples), above)
        going: dict[tuple[Any, ...], list[int]] = {}
        for i, sample in zip(members, samples):
            n = len(whole.places)
            if n == sample.trainable[-1]:  # the last token predicts nothing that is trained
                source[i] = whole.places[sample.trainable - 1]
            else:
                route = None if sample.experts is None else sample.experts[n : n + 1].tobytes()
                whose = None if n < sample.prompt_length else sample.episode
                going.setdefault((sample.keys[n], route, whose), []).append(i)
        for alike in going.values():
            place_family(alike, whole)

    source: dict[int, np.ndarray] = {}
    families = _prompt_families(batch, chosen, share)
    prompts = [_common_prompt([batch.samples[i] for i in family]) for family in families]
    for members, root in _prefix_trees(batch, families, prompts, share):
        whole = place_tokens(batch.samples[families[members[0]][0]], root, SamplePlacement())
        for f in members:
            place_family(families[f], whole)
    counts = [len(batch.samples[i].trainable) for i in chosen]
    return PackedBatch(
        chosen,
        _concat_tensor(tokens, device).long(),
        torch.from_numpy(np.concatenate(positions, 1)).to(device) if pictured else _concat_tensor(positions, device),
        _concat_tensor([source[i] for i in chosen], device),
        _concat_tensor([batch.samples[i].tokens[batch.samples[i].trainable] for i in chosen], device).long(),
        torch.repeat_interleave(torch.tensor(chosen), torch.tensor(counts)).to(device),
        lay_out(segments, device),
        _concat_tensor(routes, device).long() if routes else None,
        _support_mask([batch.samples[i] for i in chosen], device),
        _image_lookups(looked, device) if looked else None,
        _packed_steps([batch.samples[i] for i in chosen], device),
    )


def _packed_steps(samples: list[TrainSample], device: torch.device | str) -> PackedSteps | UnmaskedAnswers | None:
    """The steps of all samples, each under what stands before its first one; None where tokens have none."""
    found = [s.steps for s in samples if s.steps is not None]
    if not found:
        return None
    if len(found) < len(samples):
        raise ValueError("samples with steps beside samples without them: one policy draws either")
    prompts = [s.tokens[: s.prompt_length] for s in samples]
    if found[0].are_densities:
        return PackedSteps.of([steps.rows for steps in found], prompts, device)
    from rondel.core.unmasking_steps import UnmaskedAnswers

    answers = [s.tokens[s.prompt_length :] for s in samples]
    return UnmaskedAnswers(cast("list[UnmaskingSteps]", found), prompts, answers)


def _image_lookups(looked: list[tuple[int, ImagePlaceholder, int, int]], device: torch.device | str) -> ImageLookups:
    images = {place.image.digest: place.image for _, place, _, _ in looked}
    ends = np.cumsum([image.tokens for image in images.values()])
    begins = {digest: end - image.tokens for (digest, image), end in zip(images.items(), ends)}
    rows = [np.arange(row, row + end - begin) for row, _, begin, end in looked]
    cells = [np.arange(begin, end) + begins[place.image.digest] for _, place, begin, end in looked]
    numbers = [np.full(end - begin, i) for i, (_, _, begin, end) in enumerate(looked)]
    at_rows, at_cells, of_images = (_concat_tensor(pieces, device) for pieces in (rows, cells, numbers))
    return ImageLookups(list(images.values()), at_rows, at_cells, of_images)


def _checked_support(trajectory: Trajectory, trainable: np.ndarray, name: str) -> list[np.ndarray | None]:
    """The recorded ids of the trainable tokens, each of which must be among its own."""
    assert trajectory.support is not None
    found = [None if (ids := trajectory.support[t]) is None else np.asarray(ids, np.int32) for t in trainable]
    for t, ids in zip(trainable, found):
        if ids is not None and trajectory.tokens[t] not in ids:
            raise ValueError(
                f"{name}: token {trajectory.tokens[t]} at position {t} is none of the {len(ids)} that it was drawn from"
            )
    return found


def _top_columns(trajectory: Trajectory, trainable: np.ndarray) -> dict[str, Tensor]:
    """The likeliest tokens of every draw as two columns [m, K], filled up with -inf;
    none unless all of them have some."""
    tops = [] if trajectory.behavior_top is None else [trajectory.behavior_top[t] for t in trainable]
    if not tops or any(top is None for top in tops):
        return {}
    widest = max(len(ids) for ids, _ in tops)
    ids, logprobs = np.zeros((len(tops), widest), np.int64), np.full((len(tops), widest), -np.inf, np.float32)
    for row, (own, values) in enumerate(tops):
        ids[row, : len(own)], logprobs[row, : len(own)] = own, values
    return {"top_ids": torch.from_numpy(ids), "top_behavior": torch.from_numpy(logprobs)}


def _support_mask(samples: list[TrainSample], device: torch.device | str) -> SupportMask | None:
    rows = [ids for s in samples for ids in s.support or [None] * len(s.trainable)]
    if all(ids is None for ids in rows):
        return None
    counts = [0 if ids is None else len(ids) for ids in rows]
    return SupportMask(
        _concat_tensor([ids for ids in rows if ids is not None], device),
        torch.tensor(np.repeat(np.arange(len(rows)), counts), device=device),
    )


def _prompt_families(batch: TrainBatch, chosen: list[int], share: bool) -> list[list[int]]:
    """Neighbours of one group."""
    out: list[list[int]] = []
    for i in chosen:
        if share and out and batch.samples[out[-1][0]].group == batch.samples[i].group:
            out[-1].append(i)
        else:
            out.append([i])
    return out


# tokens that the prompts of several groups must begin with to be laid as one tree: for
# fewer it is not worth a segment more
ALIKE = 16


def _prefix_trees(
    batch: TrainBatch, families: list[list[int]], prompts: list[int], share: bool
) -> list[tuple[list[int], int]]:
    """Families whose prompts begin alike, and how many tokens they have in common: a system
    message, examples, the signatures of tools.

    A tree of one family has no root. Where routes were recorded, they must be the same, too.
    """
    trees: dict[bytes | int, list[int]] = {}
    for f, family in enumerate(families):
        start = batch.samples[family[0]].keys[:ALIKE]
        trees.setdefault(start.tobytes() if share and prompts[f] >= ALIKE else f, []).append(f)
    firsts = [batch.samples[family[0]] for family in families]
    return [
        (tree, _tree_root_length([firsts[f] for f in tree], min(prompts[f] for f in tree))) for tree in trees.values()
    ]


def _tree_root_length(firsts: list[TrainSample], end: int) -> int:
    """Of the first sample of every family, of whose prompts `end` is the shortest."""
    if len(firsts) == 1:
        return 0
    root = _alike_until(firsts, end)
    return root if root >= ALIKE else 0


def _common_token_count(samples: list[TrainSample]) -> int:
    """How many tokens they all begin with: what they were given, and of one episode also what was written in it."""
    one = len({s.episode for s in samples}) == 1
    return _alike_until(samples, min(int(s.trainable[-1]) if one else s.prompt_length for s in samples))


def _common_prompt(samples: list[TrainSample]) -> int:
    """How many given tokens all siblings begin with."""
    return _alike_until(samples, min(s.prompt_length for s in samples))


def _alike_until(samples: list[TrainSample], end: int) -> int:
    """How many of the first `end` tokens they all begin with, routed alike where routes were recorded: siblings whose
    prompt was computed under several versions of the weights may have routes of their own.
    """
    first = samples[0]
    for other in samples[1:]:
        if first.experts is not None and other.experts is not None:
            end = min(end, len(first.experts), len(other.experts))  # what was read last has none
            differs = (first.experts[:end] != other.experts[:end]).any((1, 2))
        elif first.experts is not other.experts:
            return 0
        else:
            differs = np.zeros(end, bool)
        differs |= first.keys[:end] != other.keys[:end]
        if len(places := differs.nonzero()[0]):
            end = int(places[0])
    return end


def _double(values_T: Tensor | None) -> Tensor | None:
    return None if values_T is None else values_T.double()


def _concat_per_token(pieces: list[np.ndarray]) -> Tensor:
    """One number for each trainable token, in float64."""
    return torch.from_numpy(np.concatenate([*pieces, np.empty(0)]))


def _concat_tensor(pieces: list[np.ndarray], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate(pieces) if pieces else np.empty(0, np.int64)).to(device)
