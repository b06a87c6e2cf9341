"""The step's arithmetic: packed new tokens through the model with the paged layout, then one sample for every request that needs it."""

from __future__ import annotations

import torch
from torch import Tensor

from rondel.generate.engine.builtin.pages import Layers, Pages
from rondel.generate.engine.builtin.request import Live
from rondel.generate.engine.builtin.sampler import draw, uniform
from rondel.generate.engine.builtin.scheduler import Plan
from rondel.models.attention import Chunk, PagedLayout
from rondel.models.load import Loaded

ROWS = 512  # logits are made for at most so many rows at once


class Runner:
    """table [rows, width]: the pages of every running request, one line each, so that a step gathers instead of rebuilding."""

    def __init__(self, loaded: Loaded, pages: Pages, rows: int) -> None:
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
            logits = self.loaded.head.logits(hidden.index_select(0, rows[first : first + ROWS]))
            noise = [uniform(live.request.key, live.drawn) for live in part]
            tokens, logprobs = draw(logits, [live.request.sampling for live in part], noise)
            out += zip(part, tokens, logprobs)
        return out

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> list[float]:
        """log p(token t | tokens before) through the paged path, on pages of its own: it needs no room and works asleep."""
        n = len(tokens)
        where, ids = torch.arange(n, device=self.device), torch.tensor(tokens, device=self.device)
        hidden = self.loaded.hidden(ids, where, PagedLayout(Layers(n), Layers(n), where, [Chunk(0, n, where)], None, None))
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
        table, lengths = None, None
        single = [live for live, n in plan.chunks if n == 1] + plan.decoding  # siblings that find their prompt cached feed one token too
        if single:
            for live in single:
                self._note(live)
                if live.pending == 0:
                    last.append((live, len(tokens)))
                tokens.append(live.tokens[live.computed - 1])
                positions.append(live.computed - 1)
                write.append(live.pages[-1])
            sizes = [live.computed for live in single]
            rows = torch.tensor([live.row for live in single])
            table = self.table[rows, : max(sizes)]
            lengths = torch.tensor(sizes)
            table.masked_fill_(torch.arange(max(sizes)) >= lengths[:, None], 0)
            table, lengths = table.to(self.device), lengths.to(self.device)
        ids, at, where = (torch.tensor(x, device=self.device) for x in (tokens, positions, write))
        layout = PagedLayout(self.pages.keys, self.pages.values, where, chunks, table, lengths)
        return self.loaded.hidden(ids, at, layout), last

    def _note(self, live: Live) -> None:
        """Write the pages that are not yet in the request's line."""
        while live.computed > self.table.shape[1]:
            self.table = torch.cat([self.table, torch.zeros_like(self.table)], 1)
        self.table.numpy()[live.row, live.noted : live.computed] = live.pages[live.noted :]
        live.noted = live.computed
