"""Protocol Buffers' wire format, as much of it as the training API's messages use: numbers, bytes, messages in bytes.

    field   key = number << 3 | kind, then:   kind 0 a varint   1 eight bytes   2 a length and bytes   5 four bytes

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from rondel.core.errors import UserError

Value = int | bytes
Message = dict[int, list[Value]]  # of each field's number what was sent, in order


def decode_message(data: bytes) -> Message:
    """UserError where the bytes end in the middle of something. Fixed-width numbers stay bytes."""
    out: Message = {}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        value: Value
        if kind == 0:
            value, at = _read_varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
            if kind == 2:
                size, at = _read_varint(data, at)
            if size < 0 or at + size > len(data):
                raise UserError("the request is no protobuf message: it ends in the middle of a field")
            value, at = data[at : at + size], at + size
        out.setdefault(number, []).append(value)
    return out


def encode_message(fields: Iterable[tuple[int, int | float | bytes]]) -> bytes:
    """(number, value) in order; a float becomes a double."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        elif isinstance(value, float):
            out += _varint(number << 3 | 1) + struct.pack("<d", value)
        else:
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
    return bytes(out)


def packed_varints(values: Iterable[int]) -> bytes:
    """A repeated number in one field."""
    return b"".join(map(_varint, values))


def read_varints(sent: Iterable[Value]) -> list[int]:
    """A repeated number, packed or not."""
    out: list[int] = []
    for value in sent:
        if isinstance(value, int):
            out.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _read_varint(value, at)
            out.append(number)
    return out


def read_bytes(message: Message, number: int) -> bytes:
    """The last value of a field of bytes, b"" where it was not sent."""
    value = message.get(number, [b""])[-1]
    if isinstance(value, int):
        raise UserError(f"field {number} of the request is a number and should be bytes")
    return value


def read_int(message: Message, number: int) -> int:
    value = message.get(number, [0])[-1]
    if not isinstance(value, int):
        raise UserError(f"field {number} of the request should be a number")
    return value


def read_messages(message: Message, number: int) -> list[Message]:
    return [decode_message(value) for value in message.get(number, []) if not isinstance(value, int)]


def read_text(message: Message, number: int) -> str:
    return read_bytes(message, number).decode("utf-8", "replace")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise UserError("the request is no protobuf message: a number in it does not end")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if not byte & 128:
            return value, at


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
