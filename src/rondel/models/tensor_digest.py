"""The digest of a tensor, of its bytes wherever they lie; also from pieces that nobody has together.

    8-byte words w[r, c] of the tensor in rows of 1023
    rows      R[r] = sum_c odd_c w[r, c]       columns   C[c] = sum_r w[r, c]       modulo 2^64
    digest    hash over r of R beside hash over c of C

One or two changed words change it: in two columns both column sums move; in one column two rows move, each by an odd
multiple. R and C are sums over words, and a word is a sum over its bytes: so pieces that together have every byte of
the tensor once add up to the R and C of the whole, bit for bit, and to its digest.

A check against accidents, not adversaries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROW = 1023  # words; odd, so that flipping the highest bit of every word of a row shows
_ROWS = 128  # at a time: 1 MB, which the second pass finds in the cache
_INSIDE, _ACROSS = 20261121, 20261122  # seeds of the multipliers of words in a row, and of rows
_odd: dict[tuple[str, int, int], Tensor] = {}


def tensor_digest(tensor: Tensor) -> str:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    sums = DigestSums(raw.numel(), device=raw.device)
    sums.add_bytes(0, raw)
    return sums.digest()


class DigestSums:
    """R, C and the bytes behind the last word of one tensor of `size` bytes, so far as they were added.

    values  all of them in one vector of int64, to be added to those of other pieces: [tail, the last and incomplete row,
            whole rows ..., columns ...]
    """

    def __init__(self, size: int, *, device: torch.device, values: Tensor | None = None) -> None:
        self.size, self.words = size, size // 8
        self.full = self.words // _ROW  # whole rows
        length = digest_length(size)
        self.values = torch.zeros(length, dtype=torch.int64, device=device) if values is None else values
        assert len(self.values) == length, (len(self.values), length)
        self._rows, self._columns = self.values[1 : 2 + self.full], self.values[2 + self.full :]
        self._inside = _hash_multipliers(self.values.device, _ROW, _INSIDE)

    def add_bytes(self, at: int, raw: Tensor) -> None:
        """uint8 [n], which are bytes [at, at + n) of the tensor."""
        end = self.words * 8
        if (behind := at + len(raw) - end) > 0:
            tail = raw[len(raw) - min(behind, len(raw)) :]
            shift = 8 * (max(at, end) - end)
            self.values[0] += int.from_bytes(bytes(tail.tolist()), "little") << shift
            raw = raw[: len(raw) - len(tail)]
        if not len(raw):
            return
        before, after = at % 8, -(at + len(raw)) % 8
        if before or after:
            raw = torch.cat([raw.new_zeros(before), raw, raw.new_zeros(after)])
        elif raw.storage_offset() % 8:
            raw = raw.clone()
        self._add_words((at - before) // 8, raw.view(torch.int64))

    def add_box(self, shape: tuple[int, ...], start: tuple[int, ...], box: Tensor) -> None:
        """A box of the tensor, which has this shape, from `start` on; every number of it once, in any pieces."""
        if not box.numel():
            return
        inner, width = shape[1:], box.element_size()
        row = math.prod(inner) * width
        if tuple(box.shape[1:]) == inner:
            return self.add_bytes((start[0] if shape else 0) * row, box.contiguous().view(-1).view(torch.uint8))
        each = max(1, _ROWS * _ROW * 8 // row)  # whole rows of the tensor with nothing but the box in them
        for first in range(0, len(box), each):
            some = box[first : first + each]
            around = box.new_zeros((len(some), *inner))
            place = around
            for dim in range(1, box.ndim):
                place = place.narrow(dim, start[dim], box.shape[dim])
            place.copy_(some)
            self.add_bytes((start[0] + first) * row, around.view(-1).view(torch.uint8))

    def _add_words(self, at: int, words: Tensor) -> None:
        first = at % _ROW
        if first:
            n = min(_ROW - first, len(words))
            self._add_part_row(at // _ROW, first, words[:n])
            at, words = at + n, words[n:]
        row, count = at // _ROW, len(words) // _ROW
        for some in words[: count * _ROW].view(count, _ROW).split(_ROWS) if count else ():
            self._rows[1 + row : 1 + row + len(some)] += _row_products(some, self._inside)
            self._columns += some.sum(0)
            row += len(some)
        if len(rest := words[count * _ROW :]):
            self._add_part_row(row, 0, rest)

    def _add_part_row(self, row: int, column: int, words: Tensor) -> None:
        self._rows[0 if row == self.full else 1 + row] += (words * self._inside[column : column + len(words)]).sum()
        self._columns[column : column + len(words)] += words

    def digest(self) -> str:
        across = _hash_words(self._rows, _hash_multipliers(self.values.device, len(self._rows), _ACROSS))
        rows, columns, tail = torch.stack((across, _hash_words(self._columns, self._inside), self.values[0])).tolist()
        first = rows + tail * 0x9E3779B97F4A7C15 + self.size
        return f"{first & (2**64 - 1):016x}{columns & (2**64 - 1):016x}"


def digest_length(size: int) -> int:
    """How many numbers the sums of a tensor of `size` bytes are: some thousandth of its words, and the columns."""
    words = size // 8
    return 2 + words // _ROW + min(words, _ROW)


def _hash_multipliers(device: torch.device, n: int, seed: int) -> Tensor:
    key = (str(device), n, seed)
    if key not in _odd:
        generator = torch.Generator().manual_seed(seed)
        _odd[key] = (torch.randint(-(2**62), 2**62, (n,), generator=generator) | 1).to(device)
    return _odd[key]


def _hash_words(words: Tensor, odd: Tensor) -> Tensor:
    """sum_i odd_i (w_i xor w_i >> 29) modulo 2^64.

    A product carries only upwards, so two flipped signs (bit 63) would cancel; the fold
    copies the high bits down. 29 and not 32, because the two floats of a word may change alike.
    """
    return ((words ^ (words >> 29 & (1 << 35) - 1)) * odd[: len(words)]).sum()


def _row_products(rows: Tensor, odd: Tensor) -> Tensor:
    """sum_i odd_i w_ri of every row r, modulo 2^64. A GPU has no product of integer matrices."""
    return torch.mv(rows, odd) if rows.device.type == "cpu" else (rows * odd).sum(1)
