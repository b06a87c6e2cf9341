"""The step's arithmetic: packed new tokens through the model with the paged layout, then one sample for every request that needs it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rondel.generate.engine.builtin.channels import Channels, note_raw
from rondel.generate.engine.builtin.pages import Layers, Pages
from rondel.generate.engine.builtin.request import Live
from rondel.generate.engine.builtin.sampler import choose, uniform, weights
from rondel.generate.engine.builtin.scheduler import Plan
from rondel.generate.engine.builtin.shaping import shape
from rondel.models.attention import Chunk, Decoding, PagedLayout
from rondel.models.head import chosen
from rondel.models.load import Loaded
from rondel.models.tape import Tape

SHARE = 0.7  # of the keys that whole contexts would read; beyond it the bookkeeping of families costs more than it saves
ROWS = 512  # logits are made for at most so many rows at once


class Runner:
    """table [rows, width]: the pages of every running request, one line each, so that a step gathers instead of rebuilding."""

    def __init__(self, loaded: Loaded, pages: Pages, rows: int, *, records: bool = False) -> None:
        self.records = records
        self.loaded, self.pages, self.device = loaded, pages, loaded.device
        self.table = torch.zeros(rows, 256, dtype=torch.int64)

    @torch.inference_mode()
    def step(self, plan: Plan) -> list[tuple[Live, int, float]]:
        """Compute the plan. -> (request, token, logprob) for those whose prompt is complete or that decode."""
        hidden, last = self._forward(plan)
        sampled = [live for live, _ in last]
        rows = torch.tensor([row for _, row in last], device=self.device)
        out: list[tuple[Live, int, float]] = []
        for first in range(0, len(sampled), ROWS):
            part = sampled[first : first + ROWS]
            out += self._draw(part, self.loaded.head.logits(hidden.index_select(0, rows[first : first + ROWS])))
        return out

    def _draw(self, part: list[Live], logits: Tensor) -> Iterable[tuple[Live, int, float]]:
        """A token for every row of logits [B, V], which are overwritten; raw logprobs are taken before."""
        samplings = [live.request.sampling for live in part]
        heard = [(row, live.channels) for row, live in enumerate(part) if live.channels is not None and live.channels.reads_raw]
        raw = logits[[row for row, _ in heard]].log_softmax(-1) if heard else None
        if shaped := [(row, part[row]) for row, s in enumerate(samplings) if s.shaped]:
            shape(logits, shaped)
        plain = [row for row, s in enumerate(samplings) if not (s.shaped or s.truncated)] if self.loaded.aligned else []
        exact = logits[plain]
        p = weights(logits, samplings)
        tokens, logprobs = choose(p, samplings, [uniform(live.request.key, live.drawn) for live in part])
        for row, logprob in zip(
            plain, self._as_trained(exact, [samplings[row].temperature or 1.0 for row in plain], [tokens[row] for row in plain])
        ):
            logprobs[row] = logprob
        if raw is not None:
            note_raw(raw, [tokens[row] for row, _ in heard], [channels for _, channels in heard])
        for row, live in enumerate(part):
            if live.channels is not None:
                self._note_rest(live, live.channels, p[row])
        return zip(part, tokens, logprobs)

    def _as_trained(self, logits: Tensor, temperatures: list[float], tokens: list[int]) -> list[float]:
        """Logprobs by the trainer's own formula, for aligned numerics."""
        out = torch.empty(len(tokens))
        for temperature in set(temperatures):
            rows = [row for row, t in enumerate(temperatures) if t == temperature]
            z = logits[rows] if temperature == 1.0 else logits[rows].div_(temperature)
            out[rows] = chosen(z, torch.tensor([tokens[row] for row in rows], device=z.device))[0].cpu()
        return out.tolist()

    def _note_rest(self, live: Live, channels: Channels, p: Tensor) -> None:
        """p [V]: the weights that its token was drawn with."""
        sampling = live.request.sampling
        if channels.support is not None:
            cut = (sampling.truncated and sampling.temperature > 0) or live.constraint is not None or live.written < sampling.min_tokens
            channels.support.append(p.nonzero()[:, 0].tolist() if cut else None)
        if channels.prompt_logprobs == []:
            channels.prompt_logprobs = self.score(live.tokens[: live.prompt])

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> list[float]:
        """log p(token t | tokens before) through the paged path, on pages of its own: it needs no room and works asleep."""
        n = len(tokens)
        where, ids = torch.arange(n, device=self.device), torch.tensor(tokens, device=self.device)
        hidden = self.loaded.hidden(ids, where, PagedLayout(Layers(n), Layers(n), where, [Chunk(0, n, where)]))
        out = [0.0]
        for first in range(0, n - 1, ROWS):
            rows = slice(first, min(first + ROWS, n - 1))
            logprobs = self.loaded.head.logits(hidden[rows]).log_softmax(-1)
            out += logprobs.gather(1, ids[rows.start + 1 : rows.stop + 1, None])[:, 0].tolist()
        return out

    def _forward(self, plan: Plan) -> tuple[Tensor, list[tuple[Live, int]]]:
        """Hidden states of the step's new tokens, and the rows from which a token is drawn."""
        tokens: list[int] = []
        positions: list[int] = []
        write: list[int] = []
        last: list[tuple[Live, int]] = []
        chunks: list[Chunk] = []
        for live, n in plan.chunks:
            if n == 1:
                continue
            first = live.computed - n
            self._note(live)
            chunks.append(Chunk(len(tokens), n, torch.tensor(live.pages, device=self.device)))
            tokens += live.tokens[first : live.computed]
            positions += range(first, live.computed)
            write += live.pages[first:]
            if live.pending == 0:
                last.append((live, len(tokens) - 1))
        single = [live for live, n in plan.chunks if n == 1] + plan.decoding  # siblings that find their prompt cached feed one token too
        for live in single:
            self._note(live)
            if live.pending == 0:
                last.append((live, len(tokens)))
            tokens.append(live.tokens[live.computed - 1])
            positions.append(live.computed - 1)
            write.append(live.pages[-1])
        ids, at, where = (torch.tensor(x, device=self.device) for x in (tokens, positions, write))
        layout = PagedLayout(self.pages.keys, self.pages.values, where, chunks, self._decoding(single) if single else None)
        if not self.records:
            return self.loaded.hidden(ids, at, layout), last
        tape = Tape(self.loaded.routers)
        hidden = self.loaded.hidden(ids, at, layout, tape)
        self.pages.note_routes(where, tape.recorded)
        return hidden, last

    def _decoding(self, lives: list[Live]) -> Decoding:
        """Whole contexts, or families over what they share where that reads less than SHARE of them."""
        rows, total = torch.tensor([live.row for live in lives]), torch.tensor([live.computed for live in lives])
        families: dict[object, list[int]] = {}
        for at, live in enumerate(lives):
            families.setdefault((id(live.node), live.shared) if live.shared else at, []).append(at)
        members = max(map(len, families.values()))
        shared = torch.tensor([lives[family[0]].shared for family in families.values()])
        above = torch.tensor([live.shared for live in lives])
        read = int(shared.max()) * len(families) + int((total - above).max()) * len(lives)
        if self.loaded.aligned or read > SHARE * int(total.max()) * len(lives) or members * len(families) > 2 * len(lives):
            return Decoding(*(x.to(self.device) for x in (self._slots(rows, torch.zeros_like(total), total), total)))
        grid = torch.zeros(len(families), members, dtype=torch.int64)
        place = torch.empty(len(lives), dtype=torch.int64)
        for f, family in enumerate(families.values()):
            grid[f, : len(family)] = torch.tensor(family)
            place[family] = torch.arange(f * members, f * members + len(family))
        prefix = self._slots(rows[grid[:, 0]], torch.zeros_like(shared), shared)
        parts = (self._slots(rows, above, total - above), total - above, prefix, shared, grid, place)
        return Decoding(*(x.to(self.device) for x in parts))

    def _slots(self, rows: Tensor, first: Tensor, count: Tensor) -> Tensor:
        """[B, max(count)]: slots first .. first+count of each line of the table, padded with slot 0."""
        column = torch.arange(int(count.max()))
        at = (first[:, None] + column).clamp_(max=self.table.shape[1] - 1)
        return self.table[rows[:, None], at].masked_fill_(column >= count[:, None], 0)

    def _note(self, live: Live) -> None:
        """Write the pages that are not yet in the request's line."""
        while live.computed > self.table.shape[1]:
            self.table = torch.cat([self.table, torch.zeros_like(self.table)], 1)
        self.table.numpy()[live.row, live.noted : live.computed] = live.pages[live.noted :]
        live.noted = live.computed
