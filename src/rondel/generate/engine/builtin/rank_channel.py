"""Commands from the first rank of an engine to the others, and their word whether they could be carried out.

    leader     send("forward", tensors, ...) ──┐ one broadcast for the size,      ┌──> receive() -> {"do": "forward", ...}, tensors
    followers  ... wait for the next command   │ one for JSON and whole numbers   │
               report() <─────────────────────┘ after an update: "" or what failed
Nothing is unpickled: what has objects in it (a route) goes by the pipe between the two processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from rondel.core.config.section import LONGEST
from rondel.models.collectives import RankGroup

WORDS = 1000  # bytes of a follower's report that are read


class CommandChannel:
    """ranks: a group whose tensors lie on the host."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    def send(self, do: str, tensors: list[Tensor], facts: dict[str, Any]) -> None:
        header = json.dumps({"do": do, **facts, "shapes": [list(x.shape) for x in tensors]}).encode()
        message = pack_message(header, tensors)
        self.ranks.broadcast(torch.tensor([len(header), len(message)]))
        self.ranks.broadcast(message)

    def receive(self, device: torch.device) -> tuple[dict[str, Any], list[Tensor]]:
        """The next command, whenever it comes: a follower ends with its leader."""
        length, size = self.ranks.broadcast(torch.zeros(2, dtype=torch.int64), seconds=LONGEST).tolist()
        packed = self.ranks.broadcast(torch.empty(size, dtype=torch.uint8))
        facts = json.loads(bytes(packed[:length].tolist()))
        return facts, unpack_message(packed, length, facts["shapes"], device)

    def send_own(self, tensors: list[Tensor], to: int) -> None:
        """int64 tensors for one rank alone, behind a command that told it their shapes."""
        self.ranks.send(torch.cat([x.reshape(-1).cpu() for x in tensors]), to)

    def receive_own(self, shapes: list[list[int]], device: torch.device) -> list[Tensor]:
        words = torch.empty(sum(torch.Size(shape).numel() for shape in shapes), dtype=torch.int64)
        return unpack_message(self.ranks.receive(words, 0), 0, shapes, device)

    def report(self, fault: str) -> list[str]:
        """What failed on each rank, "" where nothing did; told to the first one."""
        said = torch.zeros(WORDS, dtype=torch.uint8)
        raw = fault.encode()[:WORDS]
        said[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        return [bytes(x.tolist()).rstrip(b"\0").decode(errors="replace") for x in self.ranks.gather_first(said)]


def raw_bytes(x: Tensor) -> Tensor:
    """[N] uint8, in which any dtype travels."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def receive_tensor(
    dtype: str, shape: Sequence[int], receive: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """One whose `raw_bytes` come; `receive` fills what it is given."""
    kind = getattr(torch, dtype)
    raw = torch.empty(prod(shape) * kind.itemsize, dtype=torch.uint8, device=device)
    return receive(raw).view(kind).view(*shape)


def pack_message(header: bytes, tensors: list[Tensor]) -> Tensor:
    """[N] uint8 on the host: bytes of a header, padded to words of 8, and int64 tensors behind them."""
    padded = header + b" " * (-len(header) % 8)
    words = [torch.frombuffer(bytearray(padded), dtype=torch.int64)]
    return torch.cat([*words, *(x.reshape(-1).cpu() for x in tensors)]).view(torch.uint8)


def unpack_message(packed: Tensor, length: int, shapes: list[list[int]], device: torch.device) -> list[Tensor]:
    """The tensors of these shapes behind a header of `length` bytes."""
    words = packed.view(torch.int64)[-(-length // 8) :]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape).to(device) for part, shape in zip(words.split(sizes), shapes)]
