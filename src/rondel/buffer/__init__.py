"""Between Filter and Train: admission, deadlines, refunds, the ledger. The only room that knows S."""

from rondel.buffer.buffer import LATE, Buffer

__all__ = ["LATE", "Buffer"]
