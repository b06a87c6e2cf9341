"""The step's arithmetic: packed new tokens through the model with the paged layout, then
one sample for every request that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rondel.algos.tokens import select_logprobs
from rondel.core.errors import EngineError
from rondel.generate.engine.builtin.channels import TokenChannels, note_behavior, note_raw
from rondel.generate.engine.builtin.logits_processors import process_logits
from rondel.generate.engine.builtin.pages import PageAllocator
from rondel.generate.engine.builtin.rejection import matching_prefix_length
from rondel.generate.engine.builtin.request import SequenceState, StepPlan, TokenFeed
from rondel.generate.engine.builtin.sampler import draw_from, draw_uniforms, read_draws, weighed_rows
from rondel.generate.engine.builtin.states import SequenceStates, StateMemory
from rondel.generate.engine.builtin.vision_encoder import RequestImages, VisionEncoderCache
from rondel.models.cache_pools import HostCopy, LayerPools, upload
from rondel.models.packed_layers import serving_pass_of
from rondel.models.paged_layout import DecodeBatch, PagedLayout, PrefillChunk
from rondel.models.recurrent.layout import SlotStates
from rondel.models.routing_tape import RoutingTape
from rondel.system.kernel_choice import choose_kernel

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.draft import DraftModel
    from rondel.models.adapter_rows import AdapterPass
    from rondel.models.compilation import CompiledModel
    from rondel.models.cuda_graphs import DecodeGraphs
    from rondel.models.fed_layout import BlockTable, FedLayout
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.paged_attention import TokenRun
    from rondel.models.static_decode import StaticDecode

# of the keys that whole contexts would read; beyond it the bookkeeping of families costs more than it saves
SHARE = 0.7
ROWS = 512  # logits are made for at most so many rows at once


@dataclass(slots=True, eq=False)
class StepOutput:
    """What a step draws: on the device at once, where the next step can take it up, and on the host when it is read.

    lives   each with 1 + its guesses rows, in the order of the rows
    rows    [3, R] float64, on the device: tokens, log-probabilities, masses
    drawn   the same on their way to the host
    routes  slots [T] and experts [T, L, K] of the step's tokens, where they are recorded
    """

    lives: list[SequenceState]
    rows: Tensor
    drawn: HostCopy
    routes: tuple[HostCopy, HostCopy] | None

    def tokens_of(self, lives: list[SequenceState]) -> Tensor:
        """The tokens of some of them [B], still on the device; none has guesses."""
        row = {live: at for at, live in enumerate(self.lives)}
        return self.rows[0].index_select(0, upload([row[live] for live in lives], self.rows.device)).long()

    def read(self) -> list[tuple[SequenceState, int, float]]:
        """-> (request, token, logprob) in the order of the tokens; the host waits for the step here."""
        return list(_accepted_rows(self.lives, *read_draws(set_adapters_apart(self.lives, self.drawn.wait())[0])))


def set_adapters_apart(lives: list[SequenceState], drawn: Tensor) -> tuple[Tensor, list[int]]:
    """[3, R] of `draw_tokens`, on the host -> the same, and the rows in which an adapter has overflowed: they are zeros,
    and their requests have a fault. It is the adapter's alone: the base and its other adapters go on.
    """
    rows: list[int] = []
    if bool((broken := drawn[2].isnan()).any()):
        at = 0
        for live in lives:
            own = range(at, at := at + 1 + len(live.guess))
            if live.request.adapter and bool(broken[own].any()):
                live.fault = EngineError(
                    f"the logits with adapter '{live.request.adapter}' are not finite: its weights or activations have "
                    "overflowed; go back to an earlier state of it, and lower its learning rate"
                )
                rows += own
    return (drawn.index_fill(1, torch.tensor(rows), 0.0), rows) if rows else (drawn, rows)


def _accepted_rows(
    lives: list[SequenceState], tokens: list[int], logprobs: list[float]
) -> Iterator[tuple[SequenceState, int, float]]:
    """Of each request's rows those up to the first whose token is not the guess, that one
    included: the rows after it saw a wrong token.
    """
    at = 0
    for live in lives:
        guessed = len(live.guess)
        n = 1 + (matching_prefix_length(tokens[at : at + guessed], live.guess) if guessed else 0)
        for row in range(at, at + n):
            yield live, tokens[row], logprobs[row]
        at += 1 + guessed


class ModelRunner:
    """table [rows, width]: the pages of every running request, one line each, so that a
    step gathers instead of rebuilding.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pages: PageAllocator,
        rows: int,
        *,
        records: bool = False,
        draft: DraftModel | None = None,
        compiled: CompiledModel | DecodeGraphs | StaticDecode | None = None,
        states: SequenceStates | None = None,
    ) -> None:
        self.records, self.draft, self.states = records, draft, states
        self.hidden = serving_pass_of(loaded) if compiled is None else compiled.hidden_states
        self.loaded, self.pages, self.device = loaded, pages, loaded.device
        self.table = np.zeros((rows, 256), np.int64)
        self.lines = lines_of(loaded, rows, pages.count)
        self.eyes = VisionEncoderCache(loaded)
        self._adapted: AdapterPass | None = None  # whose tokens those of the last pass were
        self._ahead: StepOutput | None = None  # of a step that was begun before the one in front of it was read

    @property
    def cache_bytes(self) -> int:
        """Memory of all keys and values and recurrent states, a draft model's included."""
        pools = [self.pages.keys, self.pages.values]
        if self.draft is not None:
            pools += [self.draft.keys, self.draft.values]
        states = 0 if self.states is None else self.states.memory.pool_bytes
        return states + sum(pool.pool_bytes for pool in pools)

    @torch.inference_mode()
    def step(self, plan: StepPlan, following: StepPlan | None = None) -> list[tuple[SequenceState, int, float]]:
        """Compute the plan, unless that was begun, and begin `following` before the host waits for what was drawn.
        -> (request, token, logprob) for those whose prompt is complete or that decode, in order of their tokens.
        """
        output, self._ahead = self._ahead or self._launch(plan), None
        if following is not None:
            self._ahead = self._launch(following, after=output)
        drawn = output.read()
        if output.routes is not None:
            self.pages.note_routes(*(copy.wait() for copy in output.routes))
        return drawn

    def forget_ahead(self) -> None:
        """The step that was begun ahead is nobody's any more."""
        self._ahead = None

    def _launch(self, plan: StepPlan, after: StepOutput | None = None) -> StepOutput:
        """`after`: the step before it, where that has not been read: each request's newest token is there."""
        if self.draft is not None:
            self.draft.propose_drafts(self, plan)
        if self.states is not None:
            self.states.make_copies()
        hidden, last, routes = self._forward_step(plan, after)
        drawn = []
        for part in _row_batches(last):
            rows = upload([first + i for live, first in part for i in range(1 + len(live.guess))], self.device)
            lives = [live for live, _ in part]
            drawn.append(self._draw_rows(lives, self._logits(hidden, rows), unread=int(after is not None)))
        for live, _ in last:
            if live.channels is not None:
                self._note_prompt(live, live.channels)
        whole = drawn[0] if len(drawn) == 1 else torch.cat(drawn, 1) if drawn else torch.empty(3, 0)
        return StepOutput([live for live, _ in last], whole, HostCopy(whole), routes)

    def _draw_rows(self, lives: list[SequenceState], logits: Tensor, unread: int) -> Tensor:
        """[3, B] as `draw_tokens` from rows of logits [B, V], one for each request and each of its guesses; they
        are overwritten, raw logprobs taken before. `unread` tokens of each are drawn and not yet known.
        """
        part = [live for live in lives for _ in range(1 + len(live.guess))]
        samplings = [live.request.sampling for live in part]
        noted = [(row, live, live.channels) for row, live in enumerate(part) if live.channels is not None]
        heard = [(row, channels) for row, _, channels in noted if channels.reads_raw]
        raw = logits[[row for row, _ in heard]].log_softmax(-1) if heard else None
        if shaped := [(row, part[row]) for row, s in enumerate(samplings) if s.changes_logits]:
            process_logits(logits, shaped)
        plain = (
            [row for row, s in enumerate(samplings) if not (s.changes_logits or s.truncates_support)]
            if self.loaded.aligned
            else []
        )
        if plain:
            at = upload(plain, self.device)
            exact = logits[at]
        places = [
            (live.request.key, live.noise_counter + unread + i) for live in lives for i in range(1 + len(live.guess))
        ]
        noise = draw_uniforms([key for key, _ in places], [t for _, t in places])
        weighed = weighed_rows(logits, samplings) if self.draft is None else list(range(len(part)))
        weighed = sorted({*weighed, *(row for row, *_ in noted)})
        drawn, p = draw_from(logits, samplings, noise, weighed)
        if self.draft is not None:
            drawn, apart = set_adapters_apart(lives, drawn.cpu())
            p[apart] = 1.0  # nobody reads what is verified there
            verified = self.draft.verify_drafts(lives, p, *read_draws(drawn))
            drawn = torch.cat([upload(verified, self.device, torch.float64), drawn[2:].to(self.device)])
        if plain:
            drawn[1, at] = _as_trained(exact, [samplings[row].temperature or 1.0 for row in plain], drawn[0, at].long())
        if raw is not None:
            tokens = drawn[0].long().tolist()
            note_raw(raw, [tokens[row] for row, _ in heard], [channels for _, channels in heard])
        for row, live, channels in noted:
            self._note_rest(live, channels, p[weighed.index(row)])
        return drawn

    def _note_rest(self, live: SequenceState, channels: TokenChannels, p: Tensor) -> None:
        """p [V]: the weights that its token was drawn with."""
        sampling = live.request.sampling
        if channels.support is not None:
            cut = (
                (sampling.truncates_support and sampling.temperature > 0)
                or live.constraint is not None
                or live.written < sampling.min_tokens
            )
            channels.support.append(p.nonzero()[:, 0].tolist() if cut else None)
        note_behavior(p, channels, live.request.key, live.noise_counter)

    def _note_prompt(self, live: SequenceState, channels: TokenChannels) -> None:
        """A pass over its prompt, once. It comes after all logits of the step: those are of the last pass."""
        if channels.prompt_logprobs == [] or channels.prompt_top_logprobs == []:
            scored, top = self._score_tokens(
                live.tokens[: live.prompt], live.gaze, channels.prompt_k, live.request.adapter
            )
            channels.prompt_logprobs = None if channels.prompt_logprobs is None else scored
            channels.prompt_top_logprobs = None if channels.prompt_top_logprobs is None else top

    @torch.inference_mode()
    def score(self, tokens: list[int], gaze: RequestImages | None = None, adapter: str = "") -> list[float]:
        """log p(token t | tokens before) through the paged path, on pages of its own:
        it needs no room and works asleep.
        """
        return self._score_tokens(tokens, gaze, adapter=adapter)[0]

    def _score_tokens(
        self, tokens: list[int], gaze: RequestImages | None, top: int = 0, adapter: str = ""
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """-> log p of each, 0 for the first; and the `top` likeliest in its place, none for the first."""
        n = len(tokens)
        where, ids = torch.arange(n, device=self.device), torch.tensor(tokens, device=self.device)
        layout = PagedLayout(LayerPools(n), LayerPools(n), where, [PrefillChunk(0, n, where)])
        if self.states is not None:
            layout.states = SlotStates(StateMemory(1), [(0, n, 0, True)], self.device)
        at = where if gaze is None else torch.from_numpy(gaze.position_ids(0, n)).to(self.device)
        hidden = self._forward_pass(ids, at, layout, [(0, n, gaze)], [(adapter, n)])
        out, likely = [0.0], [[]]  # type: list[float], list[list[tuple[int, float]]]
        for first in range(0, n - 1, ROWS):
            rows = where[first : min(first + ROWS, n - 1)]
            logprobs = self._logits(hidden, rows).log_softmax(-1)
            out += logprobs.gather(1, ids[rows + 1][:, None])[:, 0].tolist()
            if top:
                values, best = logprobs.topk(top)
                likely += [list(zip(*row)) for row in zip(best.tolist(), values.tolist())]
        return out, likely

    def _forward_step(
        self, plan: StepPlan, after: StepOutput | None
    ) -> tuple[Tensor, list[tuple[SequenceState, int]], tuple[HostCopy, HostCopy] | None]:
        """Hidden states of the step's new tokens, the first of the rows from which a request's tokens are drawn
        (1 + its guesses), and the routes of `StepOutput`.
        """
        chunks = [TokenFeed(live, live.computed_tokens - n, n) for live, n in plan.chunks if n > 1]
        # siblings that find their prompt cached
        single = [TokenFeed(live, live.computed_tokens - 1, 1) for live, n in plan.chunks if n == 1]
        newest = 1 if after is None else 0  # the place of a token that is not read is behind what has a page
        single += [TokenFeed(live, live.computed_tokens - newest, 1 + len(live.guess)) for live in plan.decoding]
        unread = None if after is None else after.tokens_of(plan.decoding)
        ids, at, layout, ends = self.pack_step(chunks, single, unread)
        last = [
            (f.live, end - len(f.live.guess) - 1)
            for f, end in zip([*chunks, *single], ends)
            if f.live.pending_tokens == 0
        ]
        tape = self.loaded.routing_tape(longest=self.pages.count) if self.records else None
        feeds = [feed for _, feed in sorted(zip(ends, [*chunks, *single]), key=itemgetter(0))]  # as they are packed
        whose = [(f.live.request.adapter, f.n) for f in feeds]
        hidden = self._forward_pass(ids, at, layout, [(f.first, f.n, f.live.gaze) for f in feeds], whose, tape)
        return hidden, last, None if tape is None else (HostCopy(layout.write), HostCopy(tape.recorded_routes))

    def _forward_pass(
        self,
        ids: Tensor,
        at: Tensor,
        layout: PagedLayout | FedLayout,
        fed: Sequence[tuple[int, int, RequestImages | None]],
        whose: Sequence[tuple[str, int]],
        tape: RoutingTape | None = None,
    ) -> Tensor:
        """`whose`: of the tokens in turn, the adapter that they are read with and how many they are."""
        seen, bank = self.eyes.gather_features(fed) if at.ndim == 2 else None, self.loaded.bank
        runs = [] if bank is None else [(bank.served[name] if name else None, n) for name, n in whose]
        with nullcontext() if bank is None else bank.use(runs) as self._adapted:
            return (
                self.hidden(ids, at, layout)
                if tape is None and seen is None
                else self.loaded.hidden_states(ids, at, layout, tape, seen)
            )

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[C, V] in fp32 of rows [C] of the last pass, with what their adapters add to the head."""
        logits = self.loaded.logits(hidden, rows)
        return (
            logits
            if self._adapted is None
            else self._adapted.add_to_logits(self.loaded.head.scale, hidden, rows, logits)
        )

    def pack_step(
        self, chunks: list[TokenFeed], single: list[TokenFeed], unread: Tensor | None
    ) -> tuple[Tensor, Tensor, Any, list[int]]:
        """A step's tokens, positions and layout over the cache, and in which row each feed ends."""
        ids, at, layout, ends = self.pack_feeds(chunks, single, self.pages.keys, self.pages.values, unread)
        if self.states is not None:
            runs = [(end - f.n, f.n, f.live.row, f.first == 0) for f, end in zip([*chunks, *single], ends)]
            layout.states = SlotStates(self.states.memory, runs, self.device)
        return ids, at, layout, ends

    def pack_feeds(
        self,
        chunks: list[TokenFeed],
        single: list[TokenFeed],
        keys: LayerPools,
        values: LayerPools,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, PagedLayout | FedLayout, list[int]]:
        """Packed tokens, their positions, who sees whom, and where each feed ends. The tokens
        of `single` feeds look back row by row. `ids`: the tokens, where the host does not know them.
        """
        tokens: list[int] = []
        positions: list[int] = []
        write: list[int] = []
        ends: list[int] = []
        laid: list[PrefillChunk] = []
        for feed in [*chunks, *single]:
            live, first, end = feed.live, feed.first, feed.first + feed.n
            self._record_pages(live)
            if self.lines is None and len(laid) < len(chunks):
                laid.append(
                    PrefillChunk(
                        len(positions),
                        feed.n,
                        upload(_slice_joined(live.pages, live.ahead, 0, end), self.device),
                    )
                )
            tokens += _slice_joined(live.tokens, live.guess, first, end)
            positions += range(first, end)
            write += _slice_joined(live.pages, live.ahead, first, end)
            ends.append(len(positions))
        ids = upload(tokens, self.device) if ids is None else ids
        at, where = upload(positions, self.device), upload(write, self.device)
        if any(feed.live.gaze is not None for feed in [*chunks, *single]):
            at = torch.from_numpy(np.concatenate([feed.position_ids for feed in [*chunks, *single]], 1)).to(self.device)
        if self.lines is not None:
            return ids, at, self.lines.fed_layout(keys, values, where, [_token_runs(chunks), _token_runs(single)]), ends
        return ids, at, PagedLayout(keys, values, where, laid, self._decoding(single) if single else None), ends

    def _decoding(self, feeds: list[TokenFeed]) -> DecodeBatch:
        """Whole contexts, or families over what they share where that reads less than SHARE of them.

        Siblings share their prompt; the rows of one request that guesses share all that was there before.
        """
        rows = [(feed, feed.first + i + 1) for feed in feeds for i in range(feed.n)]
        lines, total = [feed.live.row for feed, _ in rows], [n for _, n in rows]
        # a draft may be behind its prompt
        shares = [feed.live.shared if feed.first >= feed.live.shared else 0 for feed, _ in rows]
        siblings = [((id(feed.live.node), n) if n else at, n) for at, ((feed, _), n) in enumerate(zip(rows, shares))]
        best = _Families.from_rows(siblings, total)
        if len(rows) > len(feeds):
            own = _Families.from_rows([(id(feed), feed.first) for feed, _ in rows], total)
            best = min((best, own), key=lambda families: families.cost)
        if self.loaded.aligned or best.cost > SHARE * max(total) * len(rows):
            whole = self._slot_table(lines, [0] * len(lines), total)
            return DecodeBatch(upload(whole, self.device), upload(total, self.device))
        behind = [n - above for n, above in zip(total, best.above)]
        first = [lines[family[0]] for family in best.members]
        parts = (
            self._slot_table(lines, best.above, behind),
            behind,
            self._slot_table(first, [0] * len(first), best.shared),
            best.shared,
            *best.member_grid(),
        )
        slots, lengths, *family = (upload(x, self.device) for x in parts)
        return DecodeBatch(slots, lengths, *family)  # type: ignore[arg-type]  # four tensors

    def _slot_table(self, lines: Sequence[int], first: Sequence[int], count: Sequence[int]) -> Tensor:
        """[B, max(count)]: slots first .. first+count of each line of the table, padded with slot 0."""
        slots = np.zeros((len(lines), max(count)), np.int64)
        for row, line, begin, n in zip(slots, lines, first, count, strict=True):
            row[:n] = self.table[line, begin : begin + n]
        return torch.from_numpy(slots)

    def _record_pages(self, live: SequenceState) -> None:
        """Write the pages that are not yet in the request's line."""
        upto = live.computed_tokens + len(live.ahead)
        if self.lines is not None:
            self.lines.record_slots(live.row, live.noted, _slice_joined(live.pages, live.ahead, live.noted, upto))
            live.noted = upto
            return
        while upto > self.table.shape[1]:
            self.table = np.concatenate([self.table, np.zeros_like(self.table)], 1)
        self.table[live.row, live.noted : upto] = _slice_joined(live.pages, live.ahead, live.noted, upto)
        live.noted = upto


def lines_of(loaded: LoadedModel, rows: int, pages: int) -> BlockTable | None:
    """A GPU reads contexts by the paged kernel; aligned numerics have an order of their
    own, and without Triton there is no kernel.
    """
    if not has_kernel(loaded):
        return None
    from rondel.models.fed_layout import BlockTable

    return BlockTable(rows, min(loaded.max_context, pages), loaded.device)


def has_kernel(loaded: LoadedModel) -> bool:
    mutual = loaded.sight is not None and loaded.sight.mutual
    # the kernel reads whole contexts, none of them beyond its query; ranks are told of a PagedLayout
    unsupported = {
        "aligned numerics": loaded.aligned,
        "keys that are chosen or compressed": loaded.indexers > 0 or loaded.compressed,
        "images whose tokens see each other": mutual,
        "several ranks": loaded.leads_ranks,
    }
    return choose_kernel(loaded.device.type, *(what for what, present in unsupported.items() if present)).takes_kernel


def _token_runs(feeds: list[TokenFeed]) -> list[TokenRun]:
    from rondel.models.paged_attention import TokenRun

    rows = accumulate((f.n for f in feeds), initial=0)
    return [TokenRun(f.live.row, row, f.n, f.first + f.n) for f, row in zip(feeds, rows)]


def _row_batches(last: list[tuple[SequenceState, int]]) -> Iterator[list[tuple[SequenceState, int]]]:
    """Requests whose rows together are at most ROWS: a request's own stay together."""
    part: list[tuple[SequenceState, int]] = []
    rows = 0
    for live, first in last:
        rows += 1 + len(live.guess)
        if part and rows > ROWS:
            yield part
            part, rows = [], 1 + len(live.guess)
        part.append((live, first))
    if part:
        yield part


def _as_trained(logits: Tensor, temperatures: list[float], tokens: Tensor) -> Tensor:
    """Logprobs by the trainer's own formula, for aligned numerics."""
    out = torch.empty(len(tokens), device=logits.device)
    for temperature in set(temperatures):
        rows = upload([row for row, t in enumerate(temperatures) if t == temperature], logits.device)
        z = logits[rows] if temperature == 1.0 else logits[rows].div_(temperature)
        out[rows] = select_logprobs(z, tokens[rows])[0]
    return out.double()


def _slice_joined(known: list[int], more: list[int], first: int, end: int) -> list[int]:
    """[first, end) of the two lists behind one another."""
    n = len(known)
    return known[first:end] if end <= n else known[first:] + more[max(0, first - n) : end - n]


@dataclass(slots=True)
class _Families:
    """Rows by what they share. `cost` is how many keys are read, infinite where the grid would be mostly padding."""

    members: list[list[int]]
    shared: list[int]  # of each family
    above: list[int]  # the same, row by row
    cost: float

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[object, int]], total: Sequence[int]) -> _Families:
        """(whose family, how many tokens it shares) of each row, and its tokens in all."""
        families: dict[object, list[int]] = {}
        for at, (name, _) in enumerate(rows):
            families.setdefault(name, []).append(at)
        members = list(families.values())
        shared, above = [rows[family[0]][1] for family in members], [n for _, n in rows]
        cost = max(shared) * len(members) + max(n - over for n, over in zip(total, above)) * len(rows)
        padded = max(map(len, members)) * len(members) > 2 * len(rows)
        return cls(members, shared, above, float("inf") if padded else cost)

    def member_grid(self) -> tuple[Tensor, Tensor]:
        """[F,S] rows of the members, padded with row 0, and [B] where each row stands in it, counted flat."""
        widest = max(map(len, self.members))
        grid = torch.tensor([family + [0] * (widest - len(family)) for family in self.members])
        stands = {row: f * widest + i for f, family in enumerate(self.members) for i, row in enumerate(family)}
        return grid, torch.tensor([stands[row] for row in range(len(self.above))])
