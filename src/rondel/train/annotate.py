"""Log-probabilities under some weights, per sample, in the same packing as the update: proximal, reference, start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rondel.models.load import Loaded
from rondel.models.tape import Tape
from rondel.train.logprobs import Kept, logprob_and_entropy
from rondel.train.pack import Batch, Packed, Sample, micro_batches
from rondel.words.errors import TrainError


def forward(
    loaded: Loaded, packed: Packed, *, temperature: float, tape: Tape | None = None, kept: Kept | None = None
) -> tuple[Tensor, Tensor]:
    """(logprob [M], entropy [M]) of the trainable tokens of one micro-batch, of what `kept` left of their distributions."""
    hidden = loaded.hidden(packed.tokens, packed.positions, packed.layout, tape)
    return logprob_and_entropy(hidden.index_select(0, packed.source), packed.target, loaded.head, temperature=temperature, kept=kept)


@torch.no_grad()
def annotate(
    loaded: Loaded,
    batch: Batch,
    name: str,
    *,
    budget: int,
    temperature: float,
    share: bool = True,
    replay: bool = False,
    drawn: bool = False,
) -> Batch:
    """Write the logprobs of `loaded` into every sample's notes under `name`, and the entropy beside "proximal".

    replay    repeat the engine's routes: for the policy; other weights route for themselves
    drawn     the distribution that the engine drew from, which top-k and top-p may have cut: for whatever enters a ratio with the behavior.
              A reference or teacher drew nothing and keeps its whole vocabulary, so x = log pi - log pi_ref is that of the cut policy
    """
    for packed in micro_batches(batch, budget, share=share, device=loaded.device):
        tape = replaying(loaded, packed) if replay else None
        logprobs, entropy = forward(loaded, packed, temperature=temperature, tape=tape, kept=packed.kept if drawn else None)
        note(batch, packed, name, logprobs)
        if name == "proximal":
            note(batch, packed, "entropy", entropy)
    return batch


def replaying(loaded: Loaded, packed: Packed) -> Tape:
    """The engine's routes of this micro-batch, ready for one forward pass."""
    if packed.routes is None or len(packed.routes) != len(packed.tokens):
        raise TrainError(
            f"{0 if packed.routes is None else len(packed.routes)} recorded routes for {len(packed.tokens)} tokens: every token needs "
            "the experts that the engine chose. An environment that builds trajectories itself must keep Completion.experts; "
            "or set trainer.routing_replay = false"
        )
    return Tape(loaded.routers, packed.routes)


def note(batch: Batch, packed: Packed, name: str, values_M: Tensor) -> None:
    """Give each sample its share of a per-token tensor."""
    spread([batch.samples[i] for i in packed.samples], name, values_M)


def gather(batch: Batch, packed: Packed, name: str) -> Tensor:
    """The inverse of `note`: [M] in the order of the packed row."""
    return flat([batch.samples[i] for i in packed.samples], name).to(packed.tokens.device)


def spread(samples: Sequence[Sample], name: str, values_T: Tensor) -> None:
    """Cut a tensor over all trainable tokens of `samples` into their notes."""
    for sample, piece in zip(samples, values_T.detach().float().cpu().split([len(s.trainable) for s in samples])):
        sample.notes[name] = piece.numpy()


def flat(samples: Sequence[Sample], name: str) -> Tensor:
    """The inverse of `spread`; "behavior" and "advantages" are the samples' own.  [T] float32."""
    own = ("behavior", "advantages")
    pieces = [torch.from_numpy(getattr(s, name) if name in own else s.notes[name]) for s in samples]
    return torch.cat(pieces) if pieces else torch.zeros(0)
